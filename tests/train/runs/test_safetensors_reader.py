"""Tensors of a checkpoint: exactly those that are expected, read once, with their digest."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import save

from prep.digest import digest_bytes
from prep.parse import Unparsed
from train.runs import safetensors_reader as reader
from train.runs.safetensors_header import read_header
from train.runs.safetensors_reader import names_of, read_safetensors

TENSORS = {"x": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "one": torch.tensor(2.5),
           "none": torch.zeros(0, 4)}
WANTED = {name: (value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(save(TENSORS))
    return tmp_path / "x.safetensors"


def test_the_library_s_files_are_read(path):
    found = read_safetensors(path, WANTED, digest_bytes(path.read_bytes()))
    assert list(found) == list(WANTED) and names_of(path) == set(WANTED)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in TENSORS.items())


@pytest.mark.parametrize(("change", "said"), [
    ({"more": (torch.float32, (2,))}, "'more' is missing, expected shape [2]"),
    ({"x": (torch.float32, (3, 2))}, "'x' has shape [2, 3] F32, expected [3, 2] float32"),
    ({"x": (torch.bfloat16, (2, 3))}, "'x' has shape [2, 3] F32, expected [2, 3] bfloat16"),
    ({"one": None}, "'one' is not a tensor of this run"),
])
def test_tensors_are_those_that_are_wanted(path, change, said):
    wanted = {name: value for name, value in {**WANTED, **change}.items() if value is not None}
    with pytest.raises(Unparsed) as caught:
        read_safetensors(path, wanted, None)
    assert str(caught.value) == said


def test_a_file_that_shrinks_while_it_is_read(path):
    data = path.read_bytes()
    handle = io.BytesIO(data[:-4])
    hashed = reader._Hashed(handle)
    header = read_header(hashed, len(data))
    with pytest.raises(Unparsed, match="it ends 4 bytes early"):
        for info in header.values():
            reader._read(hashed, info)
