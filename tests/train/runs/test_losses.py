"""The losses of samples: whole records, cut where a run resumes, and nothing that a crash left behind."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prep.errors import CacheError
from prep.loader.index import open_index
from prep.runs.losses import HEAD, PART, RECORD, read_losses
from train.runs.losses import Losses, ids_of


@pytest.fixture
def written(make, tmp_path):
    """Three steps of two samples; the file's path and the index."""
    index, losses = open_index(make().manifest), Losses(tmp_path / "losses.bin")
    losses.rewind(0)
    for step in (1, 2, 3):
        losses.add(step, index, [(0, 10 * step, step / 4), (4, 999, 0.5)])
    losses.sync()
    losses.close()
    return tmp_path / "losses.bin", index


def test_a_record_says_which_sample_had_which_loss(written):
    path, index = written
    found = read_losses(path)
    assert path.stat().st_size == len(HEAD) + 6 * 20 and len(HEAD) == 20
    assert found["step"].tolist() == [1, 1, 2, 2, 3, 3] and found["timestep"].tolist() == [10, 999, 20, 999, 30, 999]
    assert found["loss"].tolist() == [0.25, 0.5, 0.5, 0.5, 0.75, 0.5]
    wanted = [int.from_bytes(index.samples.ids[sample, :8].tobytes(), "little") for sample in (0, 4)]
    assert found["id"].tolist() == wanted * 3 and ids_of(index)[4] == wanted[1]


@pytest.mark.parametrize("torn", [b"", b"abc", bytes(20), np.array([(2, 1, 0.5, 7)], RECORD).tobytes(), b"\xff" * 57])
def test_a_resumed_run_keeps_the_records_of_its_steps(written, torn):
    """A crash may leave anything after what was synced with the checkpoint."""
    path, index = written
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert len(read_losses(path)) in (6, 7, 8) and len(read_losses(path, last=3)) == 6
    losses = Losses(path)
    losses.rewind(2)
    losses.add(3, index, [(0, 30, 0.75), (4, 999, 0.5)])
    losses.close()
    assert path.read_bytes() == whole


def test_a_run_from_the_start_has_none(written):
    path, _ = written
    losses = Losses(path)
    losses.rewind(0)
    losses.close()
    assert path.read_bytes() == HEAD and not len(read_losses(path)) and not len(read_losses(path.with_name("none")))


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "losses.bin"
    path.write_bytes(b"something else, and longer than the head")
    with pytest.raises(CacheError) as caught:
        Losses(path).rewind(3)
    assert caught.value.message == f"{path}: it is not a file of losses"
    assert caught.value.hint == "remove it; only the losses of the samples so far are lost"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CacheError, match=r"losses.bin: is a pipe, expected a plain file"):
        read_losses(path)


def test_what_has_no_end_is_read_up_to_its_first_fault(written):
    """A file as long as a disk, of which nothing is there, takes no memory."""
    path, _ = written
    there = read_losses(path)
    os.truncate(path, 1 << 40)
    assert read_losses(path).tolist() == there.tolist() and len(there)
    os.truncate(path, len(HEAD) + there.nbytes)
    path.write_bytes(path.read_bytes() + np.tile(there[-1:], 3 * PART // RECORD.itemsize + 7).tobytes() + b"cut")
    found = read_losses(path)
    assert len(found) == len(there) + 3 * PART // RECORD.itemsize + 7 and (found[len(there):] == there[-1]).all()
    assert len(read_losses(path, last=int(there["step"][-1]) - 1)) < len(there)
