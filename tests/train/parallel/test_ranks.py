"""Ranks: what the environment says, agreement on failures and facts, and gradients in buckets."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import DistBackendError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from prep.errors import CacheError, ConfigError, UsageError
from train.cli.run import _device
from train.parallel import code, collectives
from train.parallel.errors import RankFailed, RankLost
from train.parallel.ranks import ALONE, Ranks, joined, of_environment


@pytest.fixture
def pair(monkeypatch):
    """This process as one of two ranks, whose other one gives these numbers and values at each meeting."""

    def make(rank=0, *, numbers=(), values=()):
        said, given = iter(numbers), iter(values)

        def exchange(mine):
            theirs = next(said, [0.0] * len(mine))
            return [mine, theirs] if rank == 0 else [theirs, mine]

        def gather(data, sizes):
            theirs = json.dumps(next(given, {"failed": None})).encode()
            return [data, theirs] if rank == 0 else [theirs, data]

        monkeypatch.setattr(collectives, "exchange", exchange)
        monkeypatch.setattr(collectives, "gather", gather)
        return Ranks(rank=rank, world=2, local=rank)

    return make


@pytest.fixture
def second(monkeypatch, tmp_path, pair):
    """`second()`: this process as rank 1 of two that torchrun has started, as a context manager; how long it has
    waited for which other one is in `waited`."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "1" / "error.json")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "1").mkdir()
    waited = []
    monkeypatch.setattr(collectives, "connect", lambda local, patience: None)
    monkeypatch.setattr(collectives, "disconnect", lambda: None)
    monkeypatch.setattr(collectives, "wait_for", waited.append)
    pair(1)
    return SimpleNamespace(joined=joined, waited=waited, errors=tmp_path / "1" / "error.json")


def test_the_environment_of_torchrun():
    assert of_environment({}) is ALONE
    assert of_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Ranks(rank=3, world=8, local=1)
    here = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert of_environment(here) == Ranks(rank=9, world=16, local=1, local_world=8, nodes=2)
    for text in ("0", "17", "x"):
        with pytest.raises(UsageError, match=f"^LOCAL_WORLD_SIZE is '{text}', expected 1 to WORLD_SIZE, which is 16$"):
            of_environment({**here, "LOCAL_WORLD_SIZE": text})
    for wrong in ({"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
                  {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}):
        with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE, LOCAL_RANK are .*, expected what torchrun sets"):
            of_environment(wrong)


def test_nobody_to_reach(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=r"rank 1 cannot reach the other 1: .*MASTER_ADDR") as caught, joined():
        pass
    assert caught.value.hint == "start all ranks with torchrun"


def test_one_process_needs_no_other():
    with joined() as found:
        assert found is ALONE
    assert ALONE.total([1.5]) == [1.5] and ALONE.any(True) and not ALONE.any(False) and ALONE.gather("a") == ["a"]
    parameter = nn.Parameter(torch.ones(2))
    ALONE.add_gradients([parameter])
    assert parameter.grad is None
    with pytest.raises(CacheError, match="mine"), ALONE.collective():
        raise CacheError("mine")


REPORT = {"failed": {"text": "a row is damaged", "hint": "prep verify", "code": 7}}


def test_a_failure_of_another_rank_ends_a_part_for_this_one(pair):
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: a row is damaged") as caught, \
            pair(values=[REPORT]).collective():
        pass
    assert (caught.value.exit_code, caught.value.hint, caught.value.rank) == (7, "prep verify", 1)


def test_the_first_rank_that_failed_is_the_one_that_all_know(pair):
    with pytest.raises(RankFailed) as caught, pair(values=[REPORT]).collective():
        raise CacheError("mine")
    assert caught.value.rank == 0 and isinstance(caught.value.__cause__, CacheError)
    with pytest.raises(RankFailed) as caught, pair(1, values=[REPORT]).collective():
        raise CacheError("mine")
    assert caught.value.rank == 0 and caught.value.exit_code == 7


def test_what_all_know_is_not_told_once_more(pair):
    asked = RankFailed("theirs", rank=1)
    with pytest.raises(RankFailed) as caught, pair(values=[]).collective():
        raise asked
    assert caught.value is asked


def test_a_rank_that_failed_says_so_and_torchrun_reads_it(second):
    """Its own error, with its own exit code; the other one may be waiting in the middle of a step."""
    with pytest.raises(CacheError, match=r"^rank 1 of 2 failed: a row is damaged$") as caught, second.joined():
        raise CacheError("a row is damaged", hint="prep verify")
    assert caught.value.exit_code == CacheError.exit_code and caught.value.hint == "prep verify"
    written = json.loads(second.errors.read_text())["message"]
    assert (written["message"], written["errorCode"]) == ("a row is damaged", CacheError.exit_code)
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=7, error_file=str(second.errors))
    assert failure.message["message"] == "a row is damaged" and failure.timestamp > 0
    with pytest.raises(SystemExit) as ending, second.joined():  # as if it were another one, a moment later
        raise ConfigError("the same")
    assert ending.value.code == ConfigError.exit_code and second.waited == []


def test_a_rank_that_knows_of_a_failure_waits_until_it_is_said(second):
    with pytest.raises(SystemExit) as ending, second.joined():
        raise RankFailed("rank 0 of 2 failed: a row is damaged", rank=0, exit_code=7)
    assert ending.value.code == 7 and second.waited == [0] and not second.errors.exists()
    with pytest.raises(CacheError, match="rank 1 of 2 failed: mine"), second.joined():
        raise RankFailed("rank 1 of 2 failed: mine", rank=1) from CacheError("mine")
    assert second.waited == [0]


def test_a_killed_rank_is_told_by_those_that_miss_it(second, monkeypatch):
    def broken(numbers):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer\nmore")

    monkeypatch.setattr(collectives, "exchange", broken)
    with pytest.raises(RankLost, match=r"^another of the 2 ranks ended without a message .\[gloo.* closed by peer.$"), \
            second.joined() as ranks:
        ranks.total([1.0])
    with pytest.raises(SystemExit), second.joined() as ranks:  # after another one has said why
        ranks.gather("a")


def test_an_exchange_of_weights_breaks(second):
    """FSDP makes it, in the middle of a pass."""
    with pytest.raises(RankLost, match="another of the 2 ranks ended without a message"), second.joined():
        raise DistBackendError("NCCL error: remote process exited")


def test_a_rank_without_torchrun_says_its_own(monkeypatch, second):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    for _ in range(2):
        with pytest.raises(CacheError, match="rank 1 of 2 failed: mine"), second.joined():
            raise CacheError("mine")


def test_a_flag_of_any_rank_counts(pair):
    assert pair(numbers=[[1.0]]).any(False) and not pair().any(False) and pair().any(True)


def test_ranks_with_other_facts_do_not_train_together(pair):
    facts = {"settings": {"steps": 5}, "code": "abc"}
    pair(values=[facts]).require_equal(facts)
    with pytest.raises(ConfigError, match="rank 1 has another settings than rank 0, so they cannot train together"):
        pair(values=[{**facts, "settings": {"steps": 6}}]).require_equal(facts)


def test_its_own_failure_counts_more_than_a_broken_connection(monkeypatch):
    def broken(numbers):
        raise RuntimeError("[gloo] Connection closed by peer")

    monkeypatch.setattr(collectives, "exchange", broken)
    with pytest.raises(OSError, match="mine"), Ranks(rank=1, world=2).collective():
        raise OSError("mine")


def test_gradients_are_added_where_any_rank_has_one(monkeypatch):
    """The other rank has gradients of 10 for the first and the third parameter."""
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5)),
                  nn.Parameter(torch.ones(1))]
    parameters[0].grad, parameters[1].grad = torch.full((2, 3), 2.0), torch.full((4,), 3.0)
    monkeypatch.setattr(collectives, "exchange", lambda mine: [mine, mine])
    monkeypatch.setattr(collectives, "gather", lambda mine, sizes: [mine, bytes([1, 0, 1, 0])])
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda flat: flat.add_(torch.cat(
        [torch.full((6,), 10.0), torch.zeros(4), torch.full((5,), 10.0)])))
    Ranks(rank=0, world=2).add_gradients(parameters)
    assert [None if one.grad is None else one.grad.unique().tolist() for one in parameters] == [
        [12.0], [3.0], [10.0], None]


def test_too_little_memory_for_sums_is_no_lost_rank(monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(collectives, "exchange", lambda mine: [mine, mine])
    monkeypatch.setattr(collectives, "gather", lambda mine, sizes: [mine, mine])
    monkeypatch.setattr(collectives, "add", too_large)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(torch.OutOfMemoryError):
        Ranks(rank=1, world=2).add_gradients([parameter])


def test_a_connection_that_breaks_amid_sums_is_a_lost_rank(monkeypatch):
    monkeypatch.setattr(collectives, "exchange", lambda mine: [mine, mine])
    monkeypatch.setattr(collectives, "gather", lambda mine, sizes: [mine, mine])
    monkeypatch.setattr(collectives, "add", lambda *args: (_ for _ in ()).throw(DistBackendError("NCCL error: remote")))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(RankLost, match=r"ended without a message .NCCL error: remote."):
        Ranks(rank=0, world=2).add_gradients([parameter])


def test_buckets_hold_one_dtype_and_no_more_than_they_may():
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in (
        (4, torch.float32), (4, torch.float32), (100, torch.float32), (2, torch.bfloat16), (2, torch.float32))]
    found = [[len(one) for one in bucket] for bucket in collectives.buckets(parameters, most=32)]
    assert found == [[4, 4], [100], [2], [2]]


def test_the_digest_of_the_code_is_that_of_every_module(monkeypatch, tmp_path):
    for package in ("prep", "train"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.setattr(code, "find_spec", lambda name: SimpleNamespace(origin=tmp_path / name / "__init__.py"))
    before = code.code_digest()
    assert before == code.code_digest()
    (tmp_path / "train" / "loop.py").write_text("steps = 1")
    assert (changed := code.code_digest()) != before
    (tmp_path / "train" / "loop.py").rename(tmp_path / "train" / "other.py")
    assert code.code_digest() not in (before, changed)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    second = Ranks(rank=3, world=4, local=1)
    with pytest.raises(UsageError, match="--device is 'cuda:0', but 4 processes train together"):
        _device("cuda:0", second)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [_device(name, second) for name in ("auto", "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _device("auto", second) == "auto" and _device("cuda:0", ALONE) == "cuda:0"
