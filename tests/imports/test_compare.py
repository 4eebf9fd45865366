"""Samples of a posterior fit it; what was made otherwise does not; what cannot be told is not taken for verified."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.imports.compare import SPREAD, compare

SHAPE = (4, 16, 24)


def drawn(seed, noise=0.1):
    """Means, deviations, and a sample of them."""
    generator = np.random.default_rng(seed)
    mean = generator.normal(0.5, 2, SHAPE).astype(np.float32)
    std = (noise * generator.uniform(0.5, 1.5, SHAPE)).astype(np.float32)
    return mean, std, (mean + std * generator.normal(size=SHAPE)).astype(np.float32)


@given(st.integers(0, 1 << 32), st.floats(0, 1.0))
def test_a_sample_fits(seed, noise):
    mean, std, sample = drawn(seed, noise)
    assert compare(sample, mean, std).verdict == "fits"
    assert compare(mean, mean, std).verdict == "fits"  # as in our own exports


def test_allowed_is_what_filters_and_precision_do():
    mean, std, sample = drawn(1)
    off = np.random.default_rng(2).normal(size=SHAPE) * 2
    assert compare(sample + 0.8 * SPREAD * off, mean, std).verdict == "fits"
    found = compare(sample + 1.3 * SPREAD * off, mean, std)
    assert found.verdict == "differs" and found.deviation == pytest.approx(1.3 * SPREAD, rel=0.1)


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda x: x * 0.18215, "it is multiplied by 0.18"), (lambda x: x * 1.5305, "it is multiplied by 1.53"),
    (lambda x: (x - 0.5) * 0.3611, "it is multiplied by 0.361, moved by -0.18"),
    (lambda x: x[..., ::-1], "it is that of the mirrored picture"),
    (lambda x: -x, "it is of another VAE, crop or picture"),
    (lambda x: np.roll(x, 1, axis=2), "it is of another VAE, crop or picture"),
    (lambda x: np.roll(x, 1, axis=1), "it is of another VAE, crop or picture"),
    (lambda x: x[::-1], "it is of another VAE, crop or picture"),
    (lambda x: np.zeros_like(x), "it is of another VAE, crop or picture"),
])
def test_what_does_not_fit_is_explained(spoil, why):
    mean, std, sample = drawn(3, 0.05)
    found = compare(np.ascontiguousarray(spoil(sample)), mean, std)
    assert found.verdict == "differs" and why in found.why


def test_what_tells_nothing_is_unclear():
    mean, std, _ = drawn(4)
    even = np.concatenate([mean[..., :12], mean[..., 11::-1]], axis=2)
    assert compare(even, even, std * 0).verdict == "unclear"
    mean, std, sample = drawn(5, noise=300.0)
    assert compare(sample, mean, std).verdict == "unclear"
    flat = np.full(SHAPE, 2, np.float32)
    assert compare(flat, flat, np.zeros(SHAPE, np.float32)).verdict == "unclear"
    assert compare(flat + 1, flat, np.zeros(SHAPE, np.float32)).verdict == "differs"
