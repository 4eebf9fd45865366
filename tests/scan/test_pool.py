"""A decoder that hangs, crashes, leaves or eats memory costs one finding; everything else is as it would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pictures import draw

from prep.fs.blob import Blob
from prep.parse import Unparsed
from prep.scan import pool as crew_module
from prep.scan.pool import WorkerLost, WorkerPool
from prep.scan.protocol import pack, pack_item, unpack_all_examined, unpack_examined, unpack_thumb
from prep.scan.scanner import scan
from prep.sources.directory import walk
from prep.sources.item import Item

BAD = (str(Path(__file__).parents[1] / "support" / "bad_worker.py"),)
ROOM = 1 << 30  # bytes of address space: enough for any picture here
GOOD = ("a", "b", "d", "i", "z")

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


def pictures(tmp_path, *names):
    for number, name in enumerate((*GOOD, *names)):
        draw(tmp_path / f"{name}.png", (64, 48), seed=number).with_suffix(".txt").write_text("words")
    return walk(tmp_path, source=0, mask_from="none")


def told(report):
    return {one.path: (one.code, one.detail) for one in report.findings}


@posix
def test_each_way_to_die_is_one_finding(tmp_path):
    items = pictures(tmp_path, "crash", "leave", "eat", "babble")
    report = scan(items, jobs=2, crew=WorkerPool(command=BAD, memory=ROOM))
    assert told(report) == {
        "crash.png": ("decoder-crashed", "the decoder ended by SIGSEGV"),
        "leave.png": ("decoder-crashed", "the decoder ended with exit code 3"),
        "eat.png": ("too-large", "takes more memory than there is"),
        "babble.png": ("decoder-crashed",
                       "the decoder's worker says what it never would: findings is 'none', expected a list"),
    }
    assert (report.pictures, report.samples) == (9, 5)


@posix
def test_whose_batch_a_worker_died_of_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr("prep.scan.scanner.SINGLE", 0)
    items = pictures(tmp_path, "crash", "leave")
    crew = WorkerPool(command=BAD)
    report = scan(items, jobs=1, crew=crew)
    assert {path: code for path, (code, _) in told(report).items()} == {"crash.png": "decoder-crashed",
                                                                        "leave.png": "decoder-crashed"}
    assert (report.pictures, report.samples) == (7, 5) and crew.started >= 3


@posix
def test_a_decoder_that_hangs_holds_up_nobody(tmp_path):
    items = pictures(tmp_path, "hang")
    report = scan(items, jobs=2, crew=WorkerPool(command=BAD, seconds=3))
    assert told(report) == {"hang.png": ("decoder-hung", "was not decoded within 3 seconds")}
    assert report.samples == 5


def test_what_a_worker_died_of_is_not_remembered(tmp_path, monkeypatch):
    from prep.scan import memo as remembered

    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    items = list(pictures(tmp_path / "in", "leave"))
    memory = remembered.ScanMemo(tmp_path / "table")
    assert scan(items, jobs=1, crew=WorkerPool(command=BAD), memory=memory).samples == 5
    memory.close()
    again = WorkerPool()
    assert scan(items, jobs=1, crew=again, memory=remembered.ScanMemo(tmp_path / "table")).samples == 6
    assert again.started == 1


def test_a_bug_of_ours_is_no_finding(tmp_path):
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: of a check"):
        scan(pictures(tmp_path, "bug"), jobs=2, crew=WorkerPool(command=BAD))


def item(path):
    return pack_item(Item(name=path.name, source=0, picture=Blob(file=str(path)), caption=None, mask=None))


def test_a_worker_that_died_between_two_pictures_is_replaced(tmp_path):
    path = draw(tmp_path / "a.png", (64, 48), seed=1)
    with WorkerPool() as crew:
        first = crew.request("examine", items=[item(path)])
        (worker,) = crew._all
        worker._process.kill()
        worker._process.wait()
        assert crew.request("examine", items=[item(path)]) == first and crew.started == 2


def test_no_more_workers_than_are_asked_and_none_are_left(tmp_path):
    crew = WorkerPool()
    report = scan(pictures(tmp_path), jobs=4, crew=crew)
    assert report.samples == 5 and 1 <= crew.started <= 4 and not crew._all
    empty = WorkerPool()
    assert scan([], jobs=4, crew=empty).pictures == 0 and empty.started == 0


@pytest.mark.parametrize("how", ["switched off", "cannot be started", "ends at once", "frozen"])
def test_without_processes_it_is_done_here(tmp_path, monkeypatch, how):
    items = list(pictures(tmp_path))
    wanted = scan(items, jobs=2)
    options = {"switched off": {"processes": False}, "ends at once": {"command": ("-c", "pass")}}.get(how, {})
    if how == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    if how == "cannot be started":
        monkeypatch.setattr(subprocess, "Popen", refused)
    crew = WorkerPool(**options)
    assert scan(items, jobs=2, crew=crew) == wanted and crew.started == 0


def refused(*_, **__):
    raise OSError("no more processes")


def test_a_worker_that_is_never_ready_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(crew_module, "START", 0.2)
    with WorkerPool(command=("-c", "import time; time.sleep(60)")) as crew:
        assert crew.request("preview", picture=["nothing here", 0, None, ""], side=8) == ({}, b"")


def test_the_directory_one_stands_in_is_no_place_for_modules(tmp_path, monkeypatch):
    """Pictures come with whatever else is in their directory."""
    for name in ("numpy", "json", "prep", "PIL"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(tmp_path)
    path = draw(tmp_path / "a.png", (64, 48), seed=1)
    with WorkerPool() as crew:
        document, data = crew.request("examine", items=[item(path)])
        assert crew.started == 1
    assert unpack_all_examined(document, data, 1)[0].identity is not None


@posix
def test_a_worker_whose_scan_is_gone_ends(tmp_path):
    """Its input ends; and were it decoding, its own alarm would ring."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from prep.scan.worker import main; main()"
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-P", "-c", code, root, "1", str(ROOM)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.communicate(timeout=30)[0].endswith(b"latentry worker 1") and process.returncode == 0
    process = subprocess.Popen([sys.executable, *BAD, "1", str(ROOM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    path = draw(tmp_path / "hang.png", (64, 48), seed=1)
    request = pack({"do": "examine", "items": [item(path)]})
    process.stdin.write(len(request).to_bytes(4, "little") + request)
    process.stdin.flush()
    assert process.wait(60) < 0
    process.stdin.close()
    process.stdout.close()


def test_when_it_is_closed_nothing_is_decoded_any_more(tmp_path):
    """Least of all in this process: after Ctrl-C, say."""
    crew = WorkerPool(processes=False)
    crew.close()
    with pytest.raises(WorkerLost, match="the scan ended before it was decoded"):
        crew.request("examine", items=[item(draw(tmp_path / "a.png", (64, 48), seed=1))])


@posix
def test_ctrl_c_ends_the_scan_and_its_workers(tmp_path):
    """Also while a decoder hangs, which no signal for the scan alone would end."""
    for _ in pictures(tmp_path, "hang", "hang too"):
        pass
    script = ("import functools, sys; from prep.scan import pool, run as scanning;"
              "from prep.cli.main import app;"
              "from prep.cli.console import run;"
              f"scanning.scan = functools.partial(scanning.scan, crew=pool.WorkerPool(command={BAD!r}));"
              "run(app, 'prep', ['scan', sys.argv[1], '--jobs', '2'])")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(3)  # both hang by now; if not, this proves less and is no failure
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.startswith("interrupted; ") and err.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # nobody of it is left


def test_an_answer_that_is_cut_or_too_long_is_none():
    with WorkerPool(command=("-c",
                             "import sys; sys.stdout.buffer.write(b'\\x11\\0\\0\\0latentry worker 1' + b'\\xff' * 9);"
                             "sys.stdout.flush(); sys.stdin.read(1)")) as crew:
        with pytest.raises(WorkerLost) as error:
            crew.request("preview", picture=["x", 0, None, ""], side=8)
        assert error.value.code == "decoder-crashed"


def test_thumbnails_survive_the_way():
    from prep.scan.duplicates.correlation import SIDE, Thumb
    from prep.scan.protocol import pack_thumb

    thumb = Thumb(across=np.arange(SIDE * 3, dtype=np.uint8).reshape(SIDE, 3),
                  down=np.arange(SIDE * 2, dtype=np.uint8).reshape(SIDE, 2))
    again = unpack_thumb(pack_thumb(thumb))
    assert (again.across == thumb.across).all() and (again.down == thumb.down).all()
    assert unpack_thumb(b"") is None
    with pytest.raises(Unparsed, match=r"a thumbnail has 5 bytes for lengths of 257 and 1"):
        unpack_thumb(b"\x01\x01\x01\x00x")


GOOD_ONE = {"name": "a", "captions": ["b"], "findings": [["a", "blank", "warning", "x"]],
            "identity": ["00", 1, 2, 3, "7f"]}  # fmt: skip


def test_answers_are_checked_as_a_whole():
    good = {"found": [GOOD_ONE], "lengths": [0]}
    assert unpack_all_examined(good, b"", 1)[0].name == "a"
    for document, data, count in ((good, b"x", 1), (good, b"", 2), ({**good, "lengths": [-1]}, b"", 1), ({}, b"", 0),
                                  ({**good, "lengths": [0, 0]}, b"", 1)):
        with pytest.raises(Unparsed):
            unpack_all_examined(document, data, count)
    with pytest.raises(Unparsed, match="an answer has 1 items and 0 bytes, expected 2 and 0"):
        unpack_all_examined(good, b"", 2)


@pytest.mark.parametrize("change", [
    {"name": 3}, {"captions": [3]}, {"findings": [["a"]]}, {"findings": [["a", "b", "fatal", "d"]]}, {"identity": [1]},
    {"identity": ["00", 1, 2, -3, ""]}, {"identity": ["00", 1, 2, 3, 4]},
    {"identity": ["00", 1, 2, 3, "xy"]}, {"identity": ["00", 1, 2, 3]}, {"findings": 7}, {"captions": None},
])
def test_what_a_worker_says_is_checked(change):
    assert unpack_examined(GOOD_ONE, None).identity.size == (2, 3)
    with pytest.raises(Unparsed):
        unpack_examined({**GOOD_ONE, **change}, None)
    with pytest.raises(Unparsed, match="what was found lacks a part: 'captions'"):
        unpack_examined({"name": "a", "identity": None}, None)
