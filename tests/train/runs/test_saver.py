"""Checkpoints that several ranks write beside their steps: whole or not at all, on all ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file

from prep.errors import PathError
from train.parallel.errors import RankFailed
from train.parallel.ranks import Ranks
from train.runs import checkpoint_files as files
from train.runs import saver as saving
from train.runs.checkpoint import DataFacts, State, read_state, remove_partial
from train.runs.checkpoint_files import CheckpointFile

WORLD = 2


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the threads that play ranks exchange values."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD, timeout=60))
    values: list = field(default_factory=lambda: [None] * WORLD)


@dataclass(frozen=True, kw_only=True)
class Here(Ranks):
    """A rank that is a thread of this process."""

    meeting: Meeting

    def gather_bytes(self, data):
        self.meeting.values[self.rank] = data
        self.meeting.barrier.wait()
        found = list(self.meeting.values)
        self.meeting.barrier.wait()
        return found

    def total(self, numbers):
        return [sum(column) for column in zip(*self.gather(list(numbers)), strict=True)]


def together(work):
    """What `work(ranks)` returns, or raises, on each rank."""
    meeting = Meeting()

    def of_rank(rank):
        try:
            return work(Here(rank=rank, world=WORLD, meeting=meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(of_rank, range(WORLD)))


def a_state(step):
    return State(step=step, manifest="0" * 64, config={}, micro_batch=1,
                 data=DataFacts(digest="0" * 64, facts={"latents": {}, "buckets": [], "masked": False, "samples": 1,
                                                        "prediction": "epsilon", "unconditional": ""}))


def save(saver, run, ranks, step, values, *, beside=True, keep=1, done=lambda: None):
    piece = CheckpointFile(name=f"w/{ranks.rank}.safetensors", tensors={"w": values})
    saver.save_pieces(run, a_state(step), [piece], keep, ranks, beside=beside, done=done)


def test_it_is_there_when_all_have_written_and_one_has_checked(tmp_path, monkeypatch):
    """Nothing is visible before, and the values are those of its time."""
    slow, write = threading.Event(), saving.write_parts

    def wait_for_us(staged, parts):
        parts = list(parts)
        assert parts[0].name != "w/1.safetensors" or slow.wait(30)
        return write(staged, parts)

    monkeypatch.setattr(saving, "write_parts", wait_for_us)
    folder = tmp_path / "checkpoints" / "step-000004"

    def rank(ranks):
        kept, values = [], torch.full((3,), float(ranks.rank))
        with saving.Saver() as saver:
            save(saver, tmp_path, ranks, 4, values, done=lambda: kept.append(4))
            saver.then(lambda: kept.append((folder / "state.json").is_file()))
            values.fill_(9)
            saver.check()
            before = folder.exists(), list(kept)
            ranks.gather(None)
            slow.set()
            while not saver.is_ready():
                pass
            while not kept:
                saver.check()
            return before, kept, saver.is_ready()

    assert together(rank) == [((False, []), [4, True], False)] * WORLD
    assert [load_file(folder / "w" / f"{rank}.safetensors")["w"].tolist() for rank in range(WORLD)] == [
        [0.0] * 3, [1.0] * 3]
    assert set(read_state(folder).files) == {"w/0.safetensors", "w/1.safetensors"}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def test_beside_the_steps_it_has_the_same_bytes(tmp_path):
    def rank(ranks):
        for name, beside in (("waited", False), ("beside", True)):
            with saving.Saver() as saver:
                for step in (1, 2):  # the second one waits for the first
                    save(saver, tmp_path / name, ranks, step, torch.arange(4.0) + step + ranks.rank, beside=beside)
                saver.wait()

    assert together(rank) == [None] * WORLD
    found = [{path.relative_to(tmp_path / name): path.read_bytes()
              for path in (tmp_path / name).rglob("*") if path.is_file()} for name in ("waited", "beside")]
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize("where", ["written", "copied"])
def test_a_rank_that_fails_fails_on_all_and_nothing_is_left(tmp_path, monkeypatch, where):
    def fail(*args):
        raise OSError(28, "No space left on device")

    def rank(ranks):
        with saving.Saver() as saver:
            save(saver, tmp_path, ranks, 1, torch.ones(2))
            saver.wait()
            values = torch.ones(2)
            if ranks.rank == 1:
                monkeypatch.setattr(*((saving, "copied_to_host", lambda value: fail() if value is values else value)
                                             if where == "copied" else
                                             (files, "write_part", lambda path, part, real=files.write_part: (
                                                 fail() if "/1." in path.as_posix() else real(path, part)))))
            ranks.gather(None)
            try:
                save(saver, tmp_path, ranks, 2, values, done=lambda: pytest.fail("it was not written"))
                saver.then(lambda: pytest.fail("it is not there"))
                saver.wait()
            finally:
                saver.wait()  # there is nothing any more

    first, second = together(rank)
    assert all(isinstance(each, RankFailed) and each.rank == 1 for each in (first, second))
    assert "rank 1 of 2 failed: " in str(first) and "No space left" in str(first)
    assert isinstance(second.__cause__, OSError)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize("function", ["_require", "write_parts"])
def test_what_a_lost_rank_leaves_is_given_up(tmp_path, monkeypatch, function):
    """No rank asks another one then. The lost one goes on writing, but does not bring the directory back."""
    given_up, begun, real = threading.Event(), threading.Event(), getattr(saving, function)

    def late(*args):
        if threading.current_thread() in lost:
            begun.set()
            assert given_up.wait(30)
        return real(*args)

    monkeypatch.setattr(saving, function, late)
    lost = []

    def rank(ranks):
        with saving.Saver() as saver:
            if not ranks.first:
                lost.append(saver._pool.submit(threading.current_thread).result())
            save(saver, tmp_path, ranks, 1, torch.ones(2), done=lambda: pytest.fail("it was not published"))
            saver.then(lambda: pytest.fail("it is not there"))
            if ranks.first:
                assert begun.wait(30)
            saver.leave()
            if ranks.first:
                given_up.set()
            saver.check()
            saver.wait()

    assert together(rank) == [None, None]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_cannot_be_removed_does_not_hide_why_a_checkpoint_was_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(saving.atomic, "remove_tree", fail_to_remove)

    def rank(ranks):
        with saving.Saver() as saver:
            save(saver, tmp_path, ranks, 1, torch.ones(2))
            saver.leave()

    assert together(rank) == [None, None]
    (left,) = (tmp_path / "checkpoints").iterdir()
    monkeypatch.undo()
    remove_partial(tmp_path)
    assert not left.exists()


def fail_to_remove(path):
    raise OSError(39, "Directory not empty", str(path))


def test_ranks_that_share_no_directory_are_told_beside_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LOOKS", 1)
    monkeypatch.setattr(saving, "SECONDS", 0.0)

    def rank(ranks):
        with saving.Saver() as saver:
            save(saver, tmp_path / str(ranks.rank), ranks, 1, torch.ones(2))
            saver.wait()

    first, second = together(rank)
    assert isinstance(second.__cause__, PathError)
    assert "is not the same directory on all ranks" in second.__cause__.message
    assert isinstance(first, RankFailed) and first.rank == 1
    assert not list((tmp_path / "0" / "checkpoints").iterdir())


def test_only_what_is_elsewhere_is_fetched(tmp_path):
    """Before the thread begins: the others answer only then."""
    there, here, fetched = torch.empty(3, device="meta"), torch.ones(2), []

    def fetch(value):
        assert value is there and threading.current_thread() is threading.main_thread()
        fetched.append(value)
        return torch.full((3,), 5.0)

    with saving.Saver() as saver:
        weights = CheckpointFile(name="w.safetensors", tensors={"a": there, "b": here}, fetch=fetch)
        saver.save(tmp_path, a_state(1), [weights], 1, beside=True, done=lambda: None)
        assert len(fetched) == 1
    found = load_file(tmp_path / "checkpoints" / "step-000001" / "w.safetensors")
    assert found["a"].tolist() == [5.0] * 3 and found["b"].tolist() == [1.0] * 2


def test_a_checkpoint_is_written_beside_from_values_of_its_time(tmp_path, monkeypatch):
    """The weights change while the thread waits to write them."""
    begin, values, kept = threading.Event(), torch.ones(5), []
    real = saving.save

    def late(*args):
        assert begin.wait(30)
        return real(*args)

    monkeypatch.setattr(saving, "save", late)
    with saving.Saver() as saver:
        saver.save(tmp_path, a_state(4), [CheckpointFile(name="w.safetensors", tensors={"w": values})], 1, beside=True,
                   done=lambda: kept.append(4))
        values.fill_(7)
        saver.check()
        assert not kept and not (tmp_path / "checkpoints" / "step-000004").exists()
        begin.set()
        saver.wait()
    assert kept == [4]
    found = load_file(tmp_path / "checkpoints" / "step-000004" / "w.safetensors")
    assert torch.equal(found["w"], torch.ones(5))


@pytest.mark.parametrize("then", ["check", "wait", "save"])
def test_what_a_thread_could_not_write_is_raised_once(tmp_path, monkeypatch, then):
    monkeypatch.setattr(saving, "save", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with saving.Saver() as saver:
        saver.save(tmp_path, a_state(4), [], 1, beside=True, done=lambda: pytest.fail("it was not written"))
        while not saver._saving.done():
            time.sleep(0.01)
        with pytest.raises(OSError, match="No space left"):
            saver.save(tmp_path, a_state(5), [], 1, beside=True, done=int) if then == "save" else getattr(saver, then)()
        saver.wait()
