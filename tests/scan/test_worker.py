"""A decoder that hangs, crashes, leaves or eats memory costs one finding; everything else is as it would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import kept_workers
import pytest
from pictures import draw
from walking import item_of, walk

from prep.scan.protocol import ItemMessage
from prep.scan.scanner import scan
from prep.scan.worker import EXAMINE, LIMITS, SERVICE
from prep.workers.pool import WorkerPool
from prep.workers.protocol import HEADER, QUESTION, VERSION, TaskHeader, frame_of
from prep.workers.service import Limits

BAD = (str(Path(__file__).parents[1] / "support" / "bad_worker.py"),)
SMALL = Limits(seconds=60, memory=1 << 30)  # enough for any picture here
GOOD = ("a", "b", "d", "i", "z")

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


def bad_pool() -> WorkerPool:
    return WorkerPool(SERVICE, command=BAD)


def pictures(tmp_path, *names):
    for number, name in enumerate((*GOOD, *names)):
        draw(tmp_path / f"{name}.png", (64, 48), seed=number).with_suffix(".txt").write_text("words")
    return walk(tmp_path, source=0, mask_from="none")


def told(report):
    return {one.path: (one.code, one.detail) for one in report.findings}


@posix
def test_each_way_to_die_is_one_finding(tmp_path):
    items = pictures(tmp_path, "crash", "leave", "eat", "babble")
    report = scan(items, jobs=2, workers=bad_pool(), limits=SMALL)
    assert told(report) == {
        "crash.png": ("decoder-crashed", "the decoder ended by SIGSEGV"),
        "leave.png": ("decoder-crashed", "the decoder ended with exit code 3"),
        "eat.png": ("too-large", "takes more memory than there is"),
        "babble.png": ("decoder-crashed",
                       "the decoder ended with an invalid answer: Expected `array`, got `str` - at `$[0]`"),
    }
    assert (report.pictures, report.samples) == (9, 5)


@posix
def test_whose_batch_a_worker_died_of_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr("prep.scan.crew.SINGLE", 0)
    items = pictures(tmp_path, "crash", "leave")
    workers = bad_pool()
    report = scan(items, jobs=1, workers=workers)
    assert {path: code for path, (code, _) in told(report).items()} == {"crash.png": "decoder-crashed",
                                                                        "leave.png": "decoder-crashed"}
    assert (report.pictures, report.samples) == (7, 5) and workers.started >= 3


@pytest.mark.slow
@posix
def test_a_decoder_that_hangs_holds_up_nobody(tmp_path):
    items = pictures(tmp_path, "hang")
    report = scan(items, jobs=2, workers=bad_pool(), limits=Limits(seconds=3, memory=LIMITS.memory))
    assert told(report) == {"hang.png": ("decoder-hung", "was not decoded within 3 seconds")}
    assert report.samples == 5


def test_what_a_worker_died_of_is_not_remembered(tmp_path, monkeypatch):
    from prep.scan import memo as remembered

    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    items = list(pictures(tmp_path / "in", "leave"))
    memory = remembered.ScanMemo(tmp_path / "table")
    assert scan(items, jobs=1, workers=bad_pool(), memory=memory).samples == 5
    memory.close()
    again = WorkerPool(SERVICE)
    assert scan(items, jobs=1, workers=again, memory=remembered.ScanMemo(tmp_path / "table")).samples == 6
    assert again.started == 1


class Short(WorkerPool):
    """Workers that leave the last item out."""

    def ask(self, task, question, limits):
        return super().ask(task, question, limits)[:-1]


def test_an_answer_of_fewer_items_is_none(tmp_path):
    report = scan(pictures(tmp_path), jobs=1, workers=Short(SERVICE, processes=False))
    assert set(told(report).values()) == {
        ("decoder-crashed", "the decoder gave an invalid answer: an answer has 0 items, expected 1")}


def test_a_bug_of_ours_is_no_finding(tmp_path):
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: of a check"):
        scan(pictures(tmp_path, "bug"), jobs=2, workers=bad_pool())


def test_no_more_workers_than_are_asked_and_none_are_left(tmp_path):
    workers = WorkerPool(SERVICE)
    report = scan(pictures(tmp_path), jobs=4, workers=workers)
    assert report.samples == 5 and 1 <= workers.started <= 4 and not workers._all
    empty = WorkerPool(SERVICE)
    assert scan([], jobs=4, workers=empty).pictures == 0 and empty.started == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    "switched off", "cannot be started", "ends at once", pytest.param("frozen", marks=pytest.mark.slow)])
def test_without_processes_it_is_done_here(tmp_path, monkeypatch, how):
    items = list(pictures(tmp_path))
    wanted = scan(items, jobs=2)
    kept_workers.end_all()  # or else none has to be started
    options = {"switched off": {"processes": False}, "ends at once": {"command": ("-c", "pass")}}.get(how, {})
    if how == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    if how == "cannot be started":
        monkeypatch.setattr(subprocess, "Popen", refused)
    workers = WorkerPool(SERVICE, **options)
    assert scan(items, jobs=2, workers=workers) == wanted and workers.started == 0


def refused(*_, **__):
    raise OSError("no more processes")


def test_the_current_directory_is_no_place_for_modules(tmp_path, monkeypatch):
    """Pictures come with whatever else is in their directory."""
    for name in ("numpy", "json", "prep", "PIL"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(tmp_path)
    path = draw(tmp_path / "a.png", (64, 48), seed=1)
    with WorkerPool(SERVICE) as workers:
        (found,) = workers.ask(EXAMINE, (ItemMessage.of(item_of(path)),), LIMITS)
        assert workers.started == 1
    assert found.examined().identity is not None


@posix
def test_a_worker_whose_command_is_gone_ends(tmp_path, monkeypatch):
    """Its input ends; and were it decoding, its own alarm would ring."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from prep.workers.worker import main; main()"
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-P", "-c", code, root, SERVICE.module], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.communicate(timeout=30)[0].endswith(VERSION) and process.returncode == 0
    process = subprocess.Popen([sys.executable, *BAD, SERVICE.module], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    question = (ItemMessage.of(item_of(draw(tmp_path / "hang.png", (64, 48), seed=1))),)
    header = TaskHeader(EXAMINE.name, 1 - 10, LIMITS.memory)  # GRACE is added
    process.stdin.write(frame_of(HEADER, header) + frame_of(QUESTION, question))
    process.stdin.flush()
    assert process.wait(60) == -signal.SIGALRM
    process.stdin.close()
    process.stdout.close()


@posix
def test_ctrl_c_ends_the_scan_and_its_workers(tmp_path):
    """Also while a decoder hangs, which no signal for the scan alone would end."""
    for _ in pictures(tmp_path, "hang", "hang too"):
        pass
    script = ("import functools, sys; from prep.scan import run as scanning;"
              "from prep.scan.worker import SERVICE;"
              "from prep.workers.pool import WorkerPool;"
              "from prep.cli.main import app;"
              "from prep.cli.console import run;"
              f"scanning.scan = functools.partial(scanning.scan, workers=WorkerPool(SERVICE, command={BAD!r}));"
              "run(app, 'prep', ['scan', sys.argv[1], '--jobs', '2'])")
    seen = tmp_path / "seen"
    seen.mkdir()
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True,
                               env={**os.environ, "HANGING": str(seen)})
    while len(list(seen.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.startswith("interrupted; ") and err.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # nobody of it is left
