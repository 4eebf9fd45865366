"""Files of weights: the library reads them, so may others, equal values give equal bytes, a full disk is said."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from train.runs.checkpoint_files import CheckpointFile, write_part
from train.runs.safetensors import writer as weights

TENSORS = {"a": torch.arange(6.0).view(2, 3).T, "none": torch.zeros(0, 4), "number": torch.tensor(2.5),
           "b.ä": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "half": torch.ones(3, dtype=torch.float16)}


def test_the_library_reads_what_is_written(tmp_path):
    write_part(tmp_path / "w.safetensors", CheckpointFile(name="w", tensors=TENSORS, metadata={"z": "1", "a": "ö"}))
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"a": "ö", "format": "pt", "z": "1"}


def test_equal_values_give_equal_bytes(tmp_path):
    for name, metadata in (("one", {"x": "1", "y": "2"}), ("other", {"y": "2", "x": "1"})):
        write_part(tmp_path / name, CheckpointFile(name=name, tensors=TENSORS, metadata=metadata))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_tensors_begin_on_a_multiple_of_eight_bytes(tmp_path):
    for length in range(9):
        path = tmp_path / str(length)
        write_part(path, CheckpointFile(name="w", tensors={"x" * (length + 1): torch.ones(2)}))
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_others_may_read_weights_as_the_umask_has_it(tmp_path):
    before = os.umask(0o022)
    try:
        write_part(tmp_path / "w.safetensors", CheckpointFile(name="w", tensors=TENSORS))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "w.safetensors").stat().st_mode) == 0o644


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is wanted")
def test_a_full_disk_is_the_systems_own_error():
    with pytest.raises(OSError, match="No space left") as caught, Path("/dev/full").open("wb", buffering=0) as handle:
        weights.write_safetensors(handle, {"x": torch.zeros(100_000)}, {})
    assert caught.value.errno == errno.ENOSPC
