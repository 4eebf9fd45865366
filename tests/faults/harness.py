"""A launcher of real processes, and a stage for each run: pictures, a model, and a home for one cache."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from account import State, account, state

from prep.cache.store import Cache

FORKS = pytest.mark.skipif(sys.platform != "linux", reason="a process with torch in it can be forked on Linux only")
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}  # this tree, wherever another is installed
OPTIONS = ("--resolution", "96", "--step", "16", "--dtype", "float32", "--device", "cpu", "--jobs", "1", "--json",
           "--quiet")  # fmt: skip

PATIENCE = 120  # seconds for a command on a Ray cluster


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What a command writes to stdout and stderr that leads a session of its own and ends with this code."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == code, err
    return out, err


def words_of(endings: dict[str, Any] | list[dict[str, Any]]) -> str:
    """How runs ended, with all that each wrote: of anything but a string, pytest shows 240 characters."""
    runs = [endings] if isinstance(endings, dict) else endings
    return "\n".join(f"run {number} of {len(runs)} ended with {run['codes']}, signal {run['signal']}, and wrote\n"
                     f"{run['err']}{run['out']}" for number, run in enumerate(runs, 1))


class Launcher:
    """Real processes, forked from one that has imported everything."""

    def __init__(self, *argv: list[str], training: bool = False) -> None:
        self._argv, self._training = argv, training
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def __call__(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        """Starts all of `runs` at once; how each ended."""
        if self._process is None:
            self._start()
        return self._ask(runs)

    def _start(self) -> None:
        words = [sys.executable, str(HERE / "launcher.py"), *(["train"] if self._training else [])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                                         env=ENVIRONMENT)
        assert self._ask(self._argv) == [0] * len(self._argv)

    def _ask(self, asked: Any) -> Any:
        """The answer. After a test that was ended meanwhile, its answer must not be taken for that of the next one."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
            assert line, "the launcher has died; its last words are on stderr"
        except BaseException:
            self._process.kill()
            self.close()
            raise
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process.stdout.close()
            self._process = None


def ranks_of(*lines: list[str], **options: Any) -> list[dict[str, Any]]:
    """Runs of `train` for a Launcher: processes that train together, one for each command line; or one alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": str(len(lines)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"argv": [[str(word) for word in line]], "program": "train",
             "environment": {} if len(lines) == 1 else {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
             **options} for rank, line in enumerate(lines)]


@dataclass(frozen=True)
class Stage:
    """Pictures, a model, and a home for one cache and its manifests."""

    launch: Any  # a Launcher
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

    def part(self, number: int, count: int, *options: object, name: str = "m.json") -> list[str]:
        return self.encode("--part", f"{number}/{count}", *options, name=name)

    def seal(self, count: int | None = None, *options: object, name: str = "m.json") -> list[str]:
        """The command that writes the manifest of parts, with the options of `encode`."""
        return ["seal", *self.encode(*options, name=name)[1:], *([] if count is None else ["--parts", str(count)])]

    def verify(self, name: str = "m.json") -> list[str]:
        return ["verify", str(self.home / name), "--json"]

    def clean(self) -> list[str]:
        return ["gc", str(self.cache), "--keep", str(self.manifest), "--older-than", "0", "--yes"]

    def compact(self) -> list[str]:
        return ["compact", str(self.cache), "--quiet"]

    def cache_shard(self, shard: Any) -> Path:
        return Cache(root=self.cache).shard(shard.digest)

    def run(self, *argv: list[str], **plan: Any) -> dict[str, Any]:
        """What this run came to; `plan` is shim.py's, but for `user`, whose rights it has."""
        user = plan.pop("user", None)
        return self.launch({**self.one(*argv, **plan), "user": user})[0]

    def one(self, *argv: list[str], **plan: Any) -> dict[str, Any]:
        """A run for `launch`."""
        return {"argv": list(argv), "shim": {"home": str(self.home), "task_rows": self.rows, **plan}}

    def points(self, *argv: list[str], **plan: Any) -> list[tuple[str, str]]:
        """Every call of a primitive in an undisturbed run: its name, and the path below home."""
        record = self.home.parent / f"{self.home.name}.calls"
        ending = self.run(*argv, record=str(record), **plan)
        assert ending["code"] == 0, ending["err"]
        return [tuple(json.loads(line)) for line in record.read_text().splitlines()]

    def writers(self, count: int, *argv: list[str], **plan: Any) -> list[dict[str, Any]]:
        """Runs for `launch`: so many of one kind, or one for each of `argv`; all write into one trace."""
        commands = argv or [self.encode(name=f"{number}.json") for number in range(count)]
        return [self.one(command, anywhere=True, trace=str(self.trace), **plan) for command in commands]

    @property
    def trace(self) -> Path:
        return self.home.parent / f"{self.home.name}.trace"

    def recover(self, wanted: State, **plan: Any) -> dict[str, Any]:
        """Runs the same again: afterwards all is as if nothing had ever happened. The report of the encode."""
        ending = self.run(self.encode(), self.verify(), **plan)
        assert ending["codes"] == [0, 0], words_of(ending)
        left = account(self.home)
        assert left.staging == [] and left.plans == []
        assert state(self.home) == wanted
        return json.JSONDecoder().raw_decode(ending["out"])[0]
