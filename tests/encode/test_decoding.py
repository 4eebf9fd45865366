"""A decoder that hangs, crashes, leaves or eats memory costs `prep encode` one finding; all else is as it would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from pictures import draw, draw_mask

from prep.encode.engines import rows, tools
from prep.encode.engines.decoding import DECODE, LIMITS, SERVICE
from prep.encode.engines.protocol import PictureMessage, PixelsMessage
from prep.fs.blob import Blob
from prep.geometry import Placement
from prep.manifest.document import read_manifest
from prep.parse import Unparsed
from prep.workers.pool import WorkerPool
from prep.workers.service import Limits

BAD = (str(Path(__file__).parents[1] / "support" / "bad_decoder.py"),)
SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--json")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


@pytest.fixture
def bad(monkeypatch):
    """Decoders obey the files' names."""
    monkeypatch.setattr(tools, "WorkerPool", partial(WorkerPool, command=BAD))
    monkeypatch.setattr(rows, "LIMITS", Limits(seconds=60, memory=1 << 30))


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(*options, cache="cache"):
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o",
                    tmp_path / f"{cache}.json", *SMALL, *options)

    return go


def add(photos, *names):
    for number, name in enumerate(names):
        draw(photos / f"{name}.png", (96, 96), seed=100 + number).with_suffix(".txt").write_text("words")


@pytest.mark.slow
def test_each_way_to_die_is_one_finding(encode, photos, tmp_path, bad):
    assert encode(cache="whole").code == 0
    add(photos, "crash", "leave", "eat", "babble")
    result = encode()
    assert result.code == 0, result.err
    assert {one["path"]: (one["code"], one["detail"]) for one in result.json["rejected"]} == {
        "crash.png": ("decoder-crashed", "crash.png crashed its decoder, which ended by SIGSEGV"),
        "leave.png": ("decoder-crashed", "leave.png crashed its decoder, which ended with exit code 3"),
        "eat.png": ("too-large", "eat.png takes more memory than there is"),
        "babble.png": ("decoder-crashed", "babble.png got an invalid answer from its decoder: 3 bytes of pixels, "
                       "expected [96, 96, 3]"),
    }
    assert result.json["encoded"]["latent"] == 8 and result.json["samples"]["train"] == 8
    one, two = (read_manifest(tmp_path / f"{name}.json").document["samples"] for name in ("whole", "cache"))
    assert one == two


@pytest.mark.slow
def test_a_decoder_that_hangs_holds_up_nobody(encode, photos, bad, monkeypatch):
    monkeypatch.setattr(rows, "LIMITS", Limits(seconds=5, memory=LIMITS.memory))
    add(photos, "hang")
    result = encode()
    assert [one["detail"] for one in result.json["rejected"]] == ["hang.png was not decoded within 5 seconds"]
    assert result.json["rejected"][0]["code"] == "decoder-hung" and result.json["encoded"]["latent"] == 8


def test_what_a_decoder_died_of_is_tried_again(encode, photos, bad, monkeypatch):
    add(photos, "leave")
    assert [one["code"] for one in encode().json["rejected"]] == ["decoder-crashed"]
    monkeypatch.setattr(tools, "WorkerPool", WorkerPool)
    again = encode().json
    assert again["encoded"]["latent"] == 1 and again["rejected"] == []


def test_a_mask_that_crashes_its_decoder(encode, photos, bad):
    add(photos, "odd mask")
    draw_mask(photos / "odd mask-masklabel.png", (192, 192))  # no copy of another
    result = encode("--mask", "sidecar")
    assert result.code == 0 and result.json["encoded"] == {"latent": 9, "mask": 3, "text": 8}
    ((path, detail),) = [(one["path"], one["detail"]) for one in result.json["rejected"]]
    assert path == "odd mask.png"
    assert detail == "odd mask.png: its mask odd mask-masklabel.png crashed its decoder, which ended by SIGSEGV"


def test_many_of_them_stop_the_run(encode, photos, bad):
    add(photos, "leave", "leave more")
    result = encode("--max-rejects", 1)
    assert result.code == 7 and "2 rows failed" in result.err and "crashed its decoder" in result.err


def test_a_bug_of_ours_is_no_finding(encode, photos, bad):
    add(photos, "bug")
    result = encode()
    assert result.code == 70 and "ZeroDivisionError: of a decoder" in result.err


def test_no_more_workers_than_jobs_and_none_are_left(encode, monkeypatch):
    pools = []

    def pool(*args, **options):
        pools.append(WorkerPool(*args, **options))
        return pools[-1]

    monkeypatch.setattr(tools, "WorkerPool", pool)
    assert encode("--jobs", 2).code == 0
    assert 1 <= pools[0].started <= 2 and not pools[0]._all
    assert encode("--jobs", 2).code == 0 and len(pools) == 1, "nothing to decode, no worker"


def test_threads_and_processes_make_the_same_rows(encode, tmp_path, decode_here):
    assert encode("--mask", "sidecar", cache="here").code == 0
    tools.WorkerPool = WorkerPool
    assert encode("--mask", "sidecar").code == 0
    one, two = (read_manifest(tmp_path / f"{name}.json").document for name in ("here", "cache"))
    assert {**one, "cache": "", "self": ""} == {**two, "cache": "", "self": ""}


@pytest.mark.parametrize(("reading", "shape"), [("picture", (16, 24, 3)), ("mask", (1, 2, 3))])
def test_an_answer_of_another_size_is_none(reading, shape):
    asked = PictureMessage.of(reading, Blob(file="a"), "ab" * 32, color="white", factor=8,
                              placement=Placement(scaled=(24, 16), crop=(0, 0), bucket=(24, 16)))
    assert asked.shape == shape and asked.placement().bucket == (24, 16)
    with pytest.raises(Unparsed, match=r"7 bytes of pixels, expected \["):
        PixelsMessage(pixels=memoryview(b"7 bytes")).array(asked.shape)


def test_a_path_that_is_not_utf8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path / "a") + b"\xff.png")
    Path(name).write_bytes(draw(tmp_path / "plain.png", (16, 16), seed=1).read_bytes())
    from prep.digest import digest_bytes

    asked = PictureMessage.of("picture", Blob(file=name), digest_bytes(Path(name).read_bytes()), color="white",
                              factor=8, placement=Placement(scaled=(16, 16), crop=(0, 0), bucket=(16, 16)))
    with WorkerPool(SERVICE) as workers:
        (found,) = workers.ask(DECODE, asked, LIMITS)
        assert workers.started == 1
    assert found.code == "" and found.array(asked.shape).shape == (16, 16, 3)


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_also_while_a_decoder_hangs(photos, tiny_model, tmp_path):
    add(photos, "hang", "hang too")
    script = ("import functools, sys; from prep.encode.engines import tools; from prep.workers.pool import WorkerPool;"
              f"tools.WorkerPool = functools.partial(WorkerPool, command={BAD!r});"
              "from prep.cli.main import app; from prep.cli.console import run; run(app, 'prep', sys.argv[1:])")
    seen = tmp_path / "seen"
    seen.mkdir()
    words = ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
             "--jobs", 2, *SMALL[:-1]]
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, words)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True,
                               env={**os.environ, "HANGING": str(seen)})
    while len(list(seen.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted; finished work is kept" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # nobody of it is left
