"""Numbers as rows store them: those of torch, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prep.arrays import ArraySpec
from prep.cache.values import stored_values, values_of
from prep.models.tensors import DTYPES, finite_rows, stored


@pytest.mark.parametrize("dtype", DTYPES)
@given(bits=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=8))
def test_rows_are_rounded_as_torch_rounds_them(dtype, bits):
    values = np.array(bits, np.uint32).view(np.float32)
    rows = torch.from_numpy(values[None].copy())
    found = stored_values(values, dtype)
    assert (found is not None) == finite_rows(rows, dtype)[0]
    if found is not None:
        np.testing.assert_array_equal(found, stored(rows, dtype)[0])
        spec = ArraySpec(name="x", dtype=dtype, shape=values.shape)
        assert np.isfinite(values_of(spec, found.view(np.uint8))).all()
