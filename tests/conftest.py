"""Fixtures for every test: no network, no GPU, one place for the real pictures."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import kept_workers
import pytest
import typer
from hypothesis import HealthCheck, settings
from pictures import draw, draw_mask

from prep.runtime import gc_disabled
from prep.workers import pool

pytest_plugins = ("small_cache", "small_manifest", "browser")  # fixtures that several packages share

# Before any library reads them: tests never reach the network, and tiny models are quicker on few threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

# The time at which runs begin, so that two runs write the same result.
os.environ["SOURCE_DATE_EPOCH"] = "1700000000"

# What is remembered of files goes to a directory of the tests', not to the user's. Here, and not in a fixture: other
# modules copy the environment when they are imported.
_USER_CACHE = tempfile.mkdtemp(prefix="latentry-tests.")
os.environ["LATENTRY_USER_CACHE"] = _USER_CACHE
atexit.register(kept_workers.end_all)
atexit.register(shutil.rmtree, _USER_CACHE, ignore_errors=True)

# A disk takes longer to sync than most tests take, and no power fails here: tests/faults/power.py models what is lost.
# An open file is still needed.
os.fsync = lambda descriptor: os.fstat(descriptor) and None

# As in a terminal, also where the tests run in the background of a shell, which ignores Ctrl-C for them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is timed: how long something takes is for the benchmarks, and machines are busy.
settings.register_profile("latentry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("latentry"), max_examples=30, derandomize=True)


HEAVY = ("torch", "diffusers", "transformers", "peft", "bitsandbytes")


class _SkipsWhatIsHeavy:
    """Skips a test, or a module of tests, that imports a library which takes seconds to load."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in HEAVY:
            pytest.skip(f"needs {name}, see --without-torch", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="skip tests that import torch and what builds on it")


def pytest_configure(config: pytest.Config) -> None:
    """More examples where slow tests run, too, and others each time; tests that name a number of their own have that
    number. Without slow tests a change is judged by the same examples wherever and whenever it is tested.
    """
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "latentry")
    if config.getoption("--without-torch"):
        assert not set(HEAVY) & set(sys.modules), "tests/conftest.py and its plugins load nothing heavy"
        sys.meta_path.insert(0, _SkipsWhatIsHeavy())


SLOW = 2400  # seconds after which a slow test counts as one that hangs

# What takes minutes comes first, so that at the end no worker is left alone with it.
_FIRST = [Path(__file__).parent / name for name in ("train/parallel", "faults", "hostile", "train", "whole", "encode")]


# Families that differ from another by numbers alone, or by a part that a third one has.
TWINS = {"sd21": "sd15", "sd21_inpaint": "sd15_inpaint", "pixart_sigma": "pixart_alpha",
         "flux2_klein": "flux2", "flux_kontext": "flux", "qwenimage_edit": "qwenimage", "sdxl_inpaint": "sdxl",
         "longcat_image": "ovis", "longcat_image_edit": "longcat_image", "kolors": "sdxl"}
# What is left of a test that is marked few, if the mark names no others: a UNet, one with more conditions, and
# transformers whose text has one length, or trimmed rows and a mask.
FEW = {"sd15", "sdxl", "flux", "qwenimage"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is tested with a family is slow with its twin."""
    items.sort(key=lambda item: _turn(item.path))
    tested = {(_function(item), family) for item in items for family in _families(item)}
    for item in items:
        if any((_function(item), TWINS[family]) in tested for family in _families(item) if family in TWINS):
            item.add_marker(pytest.mark.slow)
        few = item.get_closest_marker("few")
        if few is not None and not (any(name in item.nodeid.partition("[")[2] for name in few.args) if few.args
                                    else _families(item) & FEW):
            item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _families(item: pytest.Item) -> set[str]:
    """The families, as words of the parameters' names, that a test is about."""
    return set(re.split(r"[-.]", item.nodeid.partition("[")[2].rstrip("]")))


@cache
def _turn(path: Path) -> int:
    return next((number for number, folder in enumerate(_FIRST) if folder in path.parents), len(_FIRST))


# The collector of cyclic garbage leaves alone what stays: the libraries and the tests, over a million objects. Looking
# through them took a third of the time of the tests of models.
_freeze = gc.freeze


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with gc_disabled():
        result = yield
    gc.collect()
    _freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    before = len(sys.modules)
    result = yield
    if len(sys.modules) != before or nextitem is None or nextitem.path != item.path:
        gc.collect()
        _freeze()
    return result


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What freezes and thaws the objects of a whole process does not thaw those of the tests."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(autouse=True)
def _kept_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_start", kept_workers.start)
    monkeypatch.setattr(pool.WorkerPool, "close", kept_workers.close)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real pictures named by LATENTRY_REAL_DATA; without it the test is skipped."""
    named = os.environ.get("LATENTRY_REAL_DATA")
    if not named or not (Path(named) / "photos").is_dir():
        pytest.skip("LATENTRY_REAL_DATA does not name a folder with photos/")
    return Path(named).resolve()


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Command = Callable[..., Result]
typer.main.get_command = cache(typer.main.get_command)  # which otherwise reads all signatures again at each call


@pytest.fixture
def prep(capsys: pytest.CaptureFixture[str]) -> Command:
    """`prep(*args)` runs the command in this process, as a user would type it."""
    from prep.cli.main import app

    return lambda *args: _invoke(app, "prep", args, capsys)


_counted: dict[tuple[object, ...], Any] = {}


@pytest.fixture
def _counted_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a step's memory takes seconds; what it is says tests/train/memory, where each is counted."""
    forecast = sys.modules.get("train.memory.forecast")  # which loads torch
    if forecast is None or request.path.is_relative_to(Path(__file__).parent / "train" / "memory"):
        return
    count = forecast.count

    def once(setup: Any, room: Any, world: int = 1) -> Any:
        key = (room.kind, world, setup.family.name, setup.config.method, setup.model.numbers)
        if key not in _counted:
            _counted[key] = count(setup, room, world)
        return _counted[key]

    monkeypatch.setattr(forecast, "count", once)


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], _counted_once: None) -> Command:
    """`train(*args)` runs the command in this process, as a user would type it."""
    from train.cli.main import app

    return lambda *args: _invoke(app, "train", args, capsys)


def _invoke(app, name: str, args, capsys: pytest.CaptureFixture[str]) -> Result:
    from prep.cli.console import run

    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        run(app, name, [str(arg) for arg in args])
    captured = capsys.readouterr()
    return Result(code=int(ending.value.code or 0), out=captured.out, err=captured.err)


@pytest.fixture
def decode_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prep encode` decodes in this process, where its decoders can be replaced."""
    from prep.encode.engines import tools

    monkeypatch.setattr(tools, "WorkerPool", partial(tools.WorkerPool, processes=False))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline directory of a few thousand random weights; never written to."""
    from prep.demo.tiny_model import build_random

    path = tmp_path_factory.mktemp("models") / "tiny"
    build_random(path)
    return path


@pytest.fixture
def make(tmp_path: Path, tiny_model: Path) -> Callable[..., Any]:
    """`make(**what_differs)`: a manifest in the test's directory, its model of random weights; see real_manifest.py."""
    from real_manifest import build

    return lambda **differs: build(tmp_path, differs.pop("model", tiny_model), **differs)


@pytest.fixture
def setup_of() -> Callable[..., Any]:
    """`setup_of(made, **settings)`: a run that may begin; settings as in train.toml."""
    from train.check import check
    from train.config.load import parse
    from train.setup import RunRequest

    def go(made, **settings):
        report = check(RunRequest(manifest=made.path), parse({"precision": "fp32", **settings}, "test"))
        assert report.setup is not None, [fault.message for fault in report.faults]
        return report.setup

    return go


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight pictures of three shapes with captions, masks for some, one with alpha."""
    root = tmp_path / "photos"
    sizes = [(96, 96), (100, 96), (144, 64), (140, 66), (64, 144), (96, 97), (97, 96), (150, 60)]
    for number, size in enumerate(sizes):
        picture = draw(root / f"{number}.png", size, seed=number, alpha=number == 5)
        picture.with_suffix(".txt").write_text(f"picture number {number % 6}")
        if number in (0, 2, 5):
            draw_mask(root / f"{number}-masklabel.png", size)
    return root
