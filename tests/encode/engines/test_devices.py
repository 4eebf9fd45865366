"""`prep encode --device A,B`: a process for each device, and the result of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from contextlib import ExitStack, contextmanager

import claims_that_end
import pytest

from prep.cache.store import open_cache
from prep.encode.engines import devices
from prep.encode.engines.devices import Bars

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--mask", "sidecar", "--shard-mib", 1)


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(device, cache="cache", *options):
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o", tmp_path / "m.json",
                    *SMALL, "--device", device, "--json", *options)

    return go


def commits(root):
    return sorted(open_cache(root, create=False).names("commits"))


def shards(root):
    return sorted(path.name for path in (root / "shards").glob("*/*"))


@pytest.mark.slow
def test_two_processes_make_what_one_makes(encode, tmp_path):
    alone = encode("cpu", "one")
    first = json.loads((tmp_path / "m.json").read_bytes())
    both = encode("cpu,cpu", "two")
    assert alone.code == both.code == 0, both.err
    second = json.loads((tmp_path / "m.json").read_bytes())
    assert alone.json["encoded"] == both.json["encoded"] == {"latent": 8, "mask": 3, "text": 7}
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    assert len(commits(tmp_path / "one")) == len(commits(tmp_path / "two"))
    assert {**first, "cache": 0, "self": 0} == {**second, "cache": 0, "self": 0}
    assert not multiprocessing.active_children()
    assert encode("cpu,cpu", "two").json["encoded"] == {"latent": 0, "mask": 0, "text": 0}


def test_an_error_on_one_device_is_the_error_of_the_command(tiny_model, photos, prep, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer" / "vocab.json").write_text("{")
    result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *SMALL,
                  "--device", "cpu,cpu")
    assert result.code == 6 and "tokenizer" in result.err and "Traceback" not in result.err
    assert not multiprocessing.active_children() and not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(("claims", "code", "said"), [
    ("Killed", 9, "the process that encodes on cpu was killed; the computer has probably too little memory for one "
     "process per device"),
    pytest.param("Ended", 70, "the process that encodes on cpu ended with exit code 3", marks=pytest.mark.slow),
    pytest.param("Broken", 70, "Unsendable: what cannot be sent", marks=pytest.mark.slow),
])
def test_a_process_that_ends(encode, monkeypatch, tmp_path, claims, code, said):
    monkeypatch.setattr(devices, "SharedClaims", getattr(claims_that_end, claims))
    result = encode("cpu,cpu", "cache")
    assert result.code == code and said in result.err
    assert not multiprocessing.active_children() and not (tmp_path / "m.json").exists()


def test_a_device_that_is_not_there(encode, tmp_path):
    result = encode("cpu,cuda:7")
    assert result.code == 2 and "--device is 'cuda:7', but this machine has no such device" in result.err
    assert not (tmp_path / "cache").exists(), "before anything is written"


@pytest.mark.slow
def test_an_interruption_ends_all_processes(encode, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bars, "report", interrupted)
        assert encode("cpu,cpu").code == 130
    assert not multiprocessing.active_children()
    result = encode("cpu,cpu")
    assert result.code == 0 and result.json["encoded"] == {"latent": 8, "mask": 3, "text": 7}


@pytest.mark.slow
def test_a_signal_stops_all_processes_after_their_tasks(encode, monkeypatch, tmp_path):
    """It comes when the first of them begins."""
    usual, asked = Bars.report, []

    def report(bars, kind, title, *values):
        if kind == "stage" and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        usual(bars, kind, title, *values)

    with monkeypatch.context() as patch:
        patch.setattr(Bars, "report", report)
        patch.setattr("prep.encode.plan.TASK_ROWS", 1)
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]
        result = encode("cpu,cpu")
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)] == before
    assert result.code == 75 and "stopped by SIGTERM: " in result.err
    assert not multiprocessing.active_children() and not (tmp_path / "m.json").exists()
    assert not list((tmp_path / "cache" / "tmp").glob("*"))
    assert encode("cpu").code == 0


@pytest.mark.slow
def test_failures_of_all_processes_count_against_the_limit(encode, photos, tmp_path, monkeypatch):
    """Two files change meanwhile, of different buckets, so that each process may meet one."""
    real = devices.SharedClaims

    def changed(*values):
        for name in ("0.png", "4.png"):
            (photos / name).write_bytes((photos / name).read_bytes() + b" ")
        return real(*values)

    monkeypatch.setattr(devices, "SharedClaims", changed)
    result = encode("cpu,cpu", "cache", "--max-rejects", 1, "--mask", "none")
    assert result.code == 7 and "2 rows failed" in result.err


def test_stages_of_the_same_title_share_a_bar():
    seen = []

    @contextmanager
    def progress(title, total, unit):
        seen.append(("open", title, total, unit))
        yield lambda count: seen.append(("tick", title, count))
        seen.append(("close", title))

    with ExitStack() as stack:
        bars = Bars(progress, stack)
        for _ in range(2):
            bars.report("phase", "loading")
        bars.report("end", "loading")
        assert seen == [("open", "loading", None, "")]
        bars.report("stage", "encoding", 9, "rows")
        bars.report("end", "loading")
        bars.report("stage", "encoding", 9, "rows")
        bars.report("tick", "encoding", 3)
        bars.report("tick", "encoding", 6)
    assert seen == [("open", "loading", None, ""), ("open", "encoding", 9, "rows"), ("close", "loading"),
                    ("tick", "encoding", 3), ("tick", "encoding", 6), ("close", "encoding")]
