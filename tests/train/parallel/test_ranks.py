"""Ranks: what the environment says, agreement on failures and facts, and gradients in buckets."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prep.errors import CacheError, ConfigError, OutOfMemoryError, UsageError
from train.cli.run import _device
from train.parallel import code, collectives
from train.parallel.errors import RankFailed, RankLost, is_told
from train.parallel.ranks import ALONE, Ranks, _Says, joined, of_environment


@pytest.fixture
def pair(monkeypatch):
    """This process as one of two ranks, whose other one says what it is told to at each meeting: its report if it
    fails, else two numbers, which are zeros at last."""

    def make(rank=0, *, failed=(), numbers=(), values=(), ends=False):
        reports, said, told = iter(failed), iter(numbers), iter([*failed, *values])

        def exchange(mine):
            if next(reports, None):
                theirs = [_Says.ENDS if ends else _Says.FAILED, 9.0, 0.0, 0.0]
            elif mine[0] in (_Says.FAILED, _Says.ENDS):
                theirs = [_Says.SUM, 0.0, 0.0, 0.0]  # it is anywhere
            else:
                theirs = [mine[0], 0.0, *next(said, [0.0, 0.0])]
            return [mine, theirs] if rank == 0 else [theirs, mine]

        def gather(data, sizes):
            theirs = json.dumps(next(told, None)).encode()
            return [data, theirs] if rank == 0 else [theirs, data]

        monkeypatch.setattr(collectives, "exchange", exchange)
        monkeypatch.setattr(collectives, "gather", gather)
        return Ranks(rank=rank, world=2, local=rank)

    return make


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
    with pytest.raises(CacheError, match="mine"), ALONE.together():
        raise CacheError("mine")


def test_a_failure_of_another_rank_ends_this_one(pair):
    report = {"text": "a row is damaged", "hint": "prep verify", "code": 7}
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: a row is damaged") as caught, \
            pair(failed=[report]).together():
        pass
    assert caught.value.exit_code == 7 and caught.value.hint == "prep verify"
    with pytest.raises(SystemExit) as ending, pair(1, failed=[{"text": "", "hint": "", "code": 5}]).together():
        pass
    assert ending.value.code == 5


def test_the_first_rank_tells_its_own_failure_and_the_others_end_silently(pair):
    with pytest.raises(CacheError, match="mine"), pair().together():
        raise CacheError("mine")
    with pytest.raises(SystemExit) as ending, pair(1).together(lambda error: CacheError(str(error))):
        raise OSError("mine")
    assert ending.value.code == 7


def part(ranks):
    with ranks.together():
        pass


@pytest.mark.parametrize("meet", [
    lambda ranks: ranks.any(False), lambda ranks: ranks.total([1.0]), lambda ranks: ranks.gather("a"),
    lambda ranks: ranks.ask(-1), lambda ranks: ranks.share(lambda: 1), lambda ranks: ranks.require_equal({"a": 1}),
    lambda ranks: ranks.add_gradients([nn.Parameter(torch.ones(2))]), lambda ranks: part(ranks)])
def test_wherever_ranks_meet_they_hear_of_a_failure(pair, meet):
    """Also in the middle of a part, which is not told once more where it ends."""
    report = {"text": "no space", "hint": "", "code": 5}
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: no space") as caught:
        meet(ranks := pair(failed=[report]))
    assert is_told(caught.value) and not ranks.connection.lost and not isinstance(caught.value, RankLost)
    for part in (ranks.together, ranks.telling):
        told = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RankFailed), part():
            patch.setattr(collectives, "exchange", told.append)
            raise caught.value
        assert told == []
    with pytest.raises(RankLost, match="rank 1 of 2 failed: no space"):
        meet(pair(failed=[report], ends=True))


def test_a_failure_of_one_rank_alone_is_told_once(pair):
    ranks = pair()
    with pytest.raises(OSError, match="full"), ranks.telling(lambda error: CacheError("explained")), ranks.telling():
        raise OSError("full")
    said = []
    exchange = collectives.exchange
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="full"), ranks.telling():
        patch.setattr(collectives, "exchange", lambda mine: said.append(mine[0]) or exchange(mine))
        with ranks.telling():
            raise OSError("full")
    assert said == [_Says.ENDS]


def test_two_ranks_that_fail_at_once_know_of_each_other(pair):
    """One in what all end, and one alone: neither tells it again, where the other one already saves what is left."""
    report = {"text": "theirs", "hint": "", "code": 5}
    ranks = pair(failed=[report], ends=True)
    with pytest.raises(OSError, match="mine") as caught, ranks.together():
        raise OSError("mine")
    assert is_told(caught.value) and not ranks.connection.lost


def test_ranks_that_do_not_do_the_same_end_instead_of_waiting(monkeypatch):
    monkeypatch.setattr(collectives, "exchange", lambda mine: [mine, [_Says.ASK, 0.0, 0.0, 0.0]])
    ranks = Ranks(rank=0, world=2)
    with pytest.raises(RankLost, match=r"ended without a message .the ranks do not do the same."):
        ranks.any(True)
    monkeypatch.setattr(collectives, "exchange", lambda mine: pytest.fail("the connection is lost"))
    with pytest.raises(RankLost), ranks.together():
        ranks.gather(1)


def test_a_rank_stays_after_a_failure_that_ends_no_run():
    with pytest.raises(RankFailed, match="the first rank tells what failed"), Ranks(rank=1, world=2).staying():
        raise SystemExit(3)
    with pytest.raises(SystemExit), Ranks(rank=0, world=2).staying():
        raise SystemExit(3)


def test_a_flag_of_any_rank_counts(pair):
    assert pair(numbers=[[1.0, 0.0]]).any(False) and not pair().any(False) and pair().any(True)


def test_ranks_with_other_facts_do_not_train_together(pair):
    facts = {"settings": {"steps": 5}, "code": "abc"}
    pair(values=[facts]).require_equal(facts)
    with pytest.raises(ConfigError, match="rank 1 has another settings than rank 0, so they cannot train together"):
        pair(values=[{**facts, "settings": {"steps": 6}}]).require_equal(facts)


def test_a_broken_connection(monkeypatch):
    def broken(numbers):
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(collectives, "exchange", broken)
    with pytest.raises(RankLost, match=r"another of the 2 ranks ended without a message .Connection closed by peer."):
        Ranks(rank=0, world=2).total([1.0])
    with pytest.raises(OSError, match="mine"), Ranks(rank=1, world=2).together():
        raise OSError("mine")  # nobody else would tell it


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


@pytest.mark.parametrize(("where", "told"), [("room_for", True), ("used", True), ("add", False)])
def test_too_little_memory_for_sums_is_no_lost_rank(monkeypatch, where, told):
    """Before the sums the others hear of it where they wait to begin; in the middle they hear nothing."""
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    said = []
    monkeypatch.setattr(collectives, "exchange", lambda mine: said.append(mine[0]) or [mine, mine])
    monkeypatch.setattr(collectives, "gather", lambda mine, sizes: [mine, mine])
    monkeypatch.setattr(collectives, where, too_large)
    ranks, parameter = Ranks(rank=1, world=2), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(torch.OutOfMemoryError) as caught, ranks.telling(lambda error: OutOfMemoryError("no room")):
        ranks.add_gradients([parameter])
    assert is_told(caught.value) == told and bool(ranks.connection.lost) == (not told)
    assert said == [_Says.GATHER, _Says.ENDS if told else _Says.READY]


def test_a_connection_that_breaks_amid_sums_is_a_lost_rank(monkeypatch):
    monkeypatch.setattr(collectives, "exchange", lambda mine: [mine, mine])
    monkeypatch.setattr(collectives, "gather", lambda mine, sizes: [mine, mine])
    monkeypatch.setattr(collectives, "add", lambda *args: (_ for _ in ()).throw(RuntimeError("NCCL error: remote")))
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
