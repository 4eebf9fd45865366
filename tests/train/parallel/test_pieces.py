"""Checkpoints in pieces: each rank writes its rows, and anybody continues from them as from whole files."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
from pieces import NAMES, flip, make_whole, whole
from safetensors.torch import load_file
from torch.testing import assert_close
from torchrun import torchrun

from prep.errors import PathError
from train.parallel.errors import RankFailed
from train.parallel.ranks import Ranks
from train.runs import saver as saving

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo on Windows needs another set-up")
COMMON = ("--device", "cpu", "--precision", "fp32", "--batch-size", 4, "--micro-batch", 4, "--lr", "1e-3", "--method",
          "full", "--set", "checkpoint.every=1", "--set", "validation.every=0", "--set", "sample.every=0", "--set",
          "sample.steps=2", "--set", "ema.decay=0.9", "--set", "ema.snapshots=true")
RESULT = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.slow
def test_a_damaged_piece_is_refused_by_its_name(make, tmp_path):
    """Also one that only another rank reads."""
    path, run = make().path, tmp_path / "run"
    words = ("run", path, *COMMON, "--shard", "-o", run)
    done = torchrun(2, *words, "--steps", 1)
    assert done.returncode == 0, done.stderr
    piece = run / "checkpoints" / "step-000001" / "optimizer" / "shard-00002-of-00003.safetensors"
    flip(piece)
    done = torchrun(2, *words, "--resume", "--steps", 2)
    assert done.returncode != 0 and done.stderr.count("error: ") == 1
    assert f"error: rank 1 of 2 failed: {piece}: its bytes do not match their digest\n" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("count", "how"), [(1, "--no-shard"), (2, "--shard"), (2, "--no-shard"), (4, "--shard")])
def test_pieces_are_continued_like_whole_files(make, tmp_path, count, how):
    """Bit by bit, and from pieces to the pieces of another number of ranks: weights, moments and average."""
    path, run, other = make().path, tmp_path / "run", tmp_path / "other"
    done = torchrun(2, "run", path, *COMMON, "--steps", 2, "--shard", "-o", run)
    assert done.returncode == 0, done.stderr
    shutil.copytree(run, other)
    make_whole(other / "checkpoints" / "step-000002")
    for each in (run, other):
        done = torchrun(count, "run", path, *COMMON, "--steps", 4, how, "-o", each, "--resume")
        assert done.returncode == 0, done.stderr
    assert (run / RESULT).read_bytes() == (other / RESULT).read_bytes()
    last = "checkpoints/step-000004"
    names = sorted(file.relative_to(run).as_posix() for file in (run / last).rglob("*.safetensors"))
    assert len(names) == (5 if how == "--no-shard" else 5 * count + 1)
    for name in names:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
def test_from_two_ranks_to_one_to_four(make, train, tmp_path):
    """A chain of runs; nothing changes on the way, since each is at its last step."""
    path, run = make().path, tmp_path / "run"
    words = ("run", path, *COMMON, "-o", run)
    done = torchrun(2, *words, "--shard", "--steps", 2)
    assert done.returncode == 0, done.stderr
    first = load_file(run / RESULT)
    kept = {name: whole(run / "checkpoints" / "step-000002" / name) for name in NAMES}
    assert {value.isfinite().all().item() for each in kept.values() for value in each.values()} == {True}
    (run / RESULT).unlink()
    assert train(*words, "--no-shard", "--resume", "--steps", 2).code == 0
    assert_close(load_file(run / RESULT), first, rtol=0, atol=0)
    (run / RESULT).unlink()
    done = torchrun(4, *words, "--shard", "--resume", "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert_close(load_file(run / RESULT), first, rtol=0, atol=0)


class Second(Ranks):
    """Rank 1 of two, without a connection."""

    def gather_bytes(self, data):
        return [b'"elsewhere"' if data == b'""' else b'{"failed": null}', data]


@pytest.mark.parametrize("call", [
    lambda run, ranks: saving.save_pieces(run, SimpleNamespace(step=1), [], 0, ranks),
    saving.require_shared], ids=["saving", "before the first step"])
def test_ranks_that_do_not_share_a_directory(tmp_path, monkeypatch, call):
    monkeypatch.setattr(saving, "LOOKS", 1)
    with pytest.raises(RankFailed) as caught:
        call(tmp_path, Second(rank=1, world=2))
    own = caught.value.__cause__
    assert isinstance(own, PathError) and own.message == (
        f"{tmp_path} is not the same directory on all ranks, but with --shard each writes its part of a checkpoint")
    assert own.hint == "name a directory that all ranks share with -o"
