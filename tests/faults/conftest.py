"""Fixtures of the fault tests: a launcher of real processes, a stage for each run, what must hold after any fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from account import State, account, state
from pictures import draw, draw_mask

from prep.cache.store import Cache

HERE = Path(__file__).parent
SIZES = [(96, 96), (100, 96), (144, 64), (140, 66), (64, 144)]
OPTIONS = ("--resolution", "96", "--step", "16", "--dtype", "float32", "--device", "cpu", "--jobs", "1", "--json",
           "--quiet")  # fmt: skip


class Launcher:
    """Real processes, forked from one that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, str(HERE / "launcher.py")], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._reply() == "ready"

    def __call__(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        """Starts all of `runs` at once; how each ended."""
        assert self._process.stdin is not None
        print(json.dumps(runs), file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the launcher has died; its last words are on stderr"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """`launch(run, …)`: see launcher.py."""
    launcher = Launcher()
    yield launcher
    launcher.close()


@dataclass(frozen=True)
class Stage:
    """Pictures, a model, and a home for one cache and its manifests."""

    launch: Launcher
    pictures: Path
    model: Path
    home: Path
    mask: str = "sidecar"
    rows: int = 2  # of a task, at most

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def manifest(self) -> Path:
        return self.home / "m.json"

    def at(self, home: Path) -> Stage:
        """The same pictures and model, another home."""
        home.mkdir(exist_ok=True)
        return Stage(launch=self.launch, pictures=self.pictures, model=self.model, home=home, rows=self.rows)

    def encode(self, *options: object, name: str = "m.json") -> list[str]:
        return ["encode", str(self.pictures), "--model", str(self.model), "--cache", str(self.cache), "-o",
                str(self.home / name), "--mask", self.mask, *OPTIONS, *map(str, options)]

    def verify(self, name: str = "m.json") -> list[str]:
        return ["verify", str(self.home / name), "--json"]

    def clean(self) -> list[str]:
        return ["gc", str(self.cache), "--keep", str(self.manifest), "--older-than", "0", "--yes"]

    def cache_shard(self, shard: Any) -> Path:
        return Cache(root=self.cache).shard(shard.digest)

    def run(self, *argv: list[str], **plan: Any) -> dict[str, Any]:
        """What this run came to; `plan` is shim.py's."""
        return self.launch(self.one(*argv, **plan))[0]

    def one(self, *argv: list[str], **plan: Any) -> dict[str, Any]:
        """A run for `launch`."""
        return {"argv": list(argv), "shim": {"home": str(self.home), "task_rows": self.rows, **plan}}

    def points(self, *argv: list[str], **plan: Any) -> list[tuple[str, str]]:
        """Every call of a primitive in an undisturbed run: its name, and the path below home."""
        record = self.home.parent / f"{self.home.name}.calls"
        ending = self.run(*argv, record=str(record), **plan)
        assert ending["code"] == 0, ending["err"]
        return [tuple(json.loads(line)) for line in record.read_text().splitlines()]

    def recover(self, wanted: State, **plan: Any) -> dict[str, Any]:
        """Runs the same again: afterwards all is as if nothing had ever happened. The report of the encode."""
        ending = self.run(self.encode(), self.verify(), **plan)
        assert ending["codes"] == [0, 0], ending
        left = account(self.home)
        assert left.staging == [] and left.plans == []
        assert state(self.home) == wanted
        return json.JSONDecoder().raw_decode(ending["out"])[0]


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """Five pictures of three shapes with captions, masks for two; and a model. Never written to."""
    root = tmp_path_factory.mktemp("setting") / "photos"
    for number, size in enumerate(SIZES):
        draw(root / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(f"picture number {number % 3}")
        if number in (0, 2):
            draw_mask(root / f"{number}-masklabel.png", size)
    return root, tiny_model


@pytest.fixture
def stage(launch: Launcher, setting: tuple[Path, Path], tmp_path: Path) -> Iterator[Stage]:
    """A stage whose pictures and model are the same bytes after the test."""
    pictures, model = setting
    before = [_stamps(pictures), _stamps(model)]
    (tmp_path / "whole").mkdir()
    yield Stage(launch=launch, pictures=pictures, model=model, home=tmp_path / "whole")
    assert [_stamps(pictures), _stamps(model)] == before, "a run has written to what is the user's"


def _stamps(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
            for path in root.rglob("*") if path.is_file()}
