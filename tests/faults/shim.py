"""Faults, made at the primitives of `prep.fs.atomic`, by which alone a cache changes the disk.

A plan, as JSON:

    {"kill": n, "when": "before" | "after" | "half"}   SIGKILL at the n-th call; half of a write is done
    {"signal": n, "name": "SIGTERM"}                   that signal, at the n-th call, which then goes on
    {"change": FILE}                                   a byte more in this file, at the first call
    {"message": n}                                     SIGKILL at the n-th message between ranks that train together
    {"pass": n, "where": PLACE, "error": NAME}         the n-th forward and backward pass of a training fails there
    {"power": n, "home": DIR, "seed": s}               the power goes after n calls: see `power.py`; n = -1: at the end
    {"follow": FILE}                                   as "power" does, and keeps in FILE what is not on the disk yet
    {"from": FILE}                                     goes on from there: the process died, the computer did not
    {"fail": n, "errno": "ENOSPC", "for": k}           the n-th call and all k that follow raise; k = 0: to the end
    {"quota": bytes}                                   a full disk: so much can be written, then ENOSPC
    {"deny": n}                                        before the n-th call, nobody may write below `home` any more
    {"drop": ["sync"], "where": PATTERN}               these do nothing (there), to show what they are for
    {"plain": true}                                    a system without hard links and without syncs of directories
    {"record": FILE}                                   a line for each call: name, and path below `home`
    {"watch": FILE}                                    a line for each other change below `home`: event, and path
    {"trace": FILE}                                    a line for each look at a task and each commit: what, key, time
    {"anywhere": true}                                 tasks are begun at any of them, as without a shim
    {"task_rows": n}                                   the engine's tasks have n rows
    {"ahead": n}                                       rows of n bytes, or one row, may wait to be written
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
           "shutil.copyfile", "shutil.move", "shutil.rmtree", "sqlite3.connect", "tempfile.mkdtemp", "tempfile.mkstemp")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
GROWING = ("create", "write", "link", "make_dir")  # what takes room on a disk


def install(plan: dict[str, Any]) -> Shim:
    """Puts the plan's faults into this process."""
    shim = Shim(plan)
    from prep.encode import plan as encode
    from prep.encode.engines import commit, order, tools
    from prep.encode.engines.writing import WritingThread
    from prep.fs import atomic

    for name in atomic.PRIMITIVES:
        setattr(atomic, name, shim.wrapped(name, getattr(atomic, name)))
    tools.WorkerPool = functools.partial(tools.WorkerPool, processes=False)  # workers change no disk, and take time
    if plan.get("plain"):
        _take_away(atomic)
    if "message" in plan:
        shim.count_messages(plan["message"])
    if "pass" in plan:
        fail_pass(plan["pass"], plan["where"], plan["error"])
    if "task_rows" in plan:
        encode.TASK_ROWS = plan["task_rows"]
    if "ahead" in plan:
        WritingThread.__init__.__defaults__ = (plan["ahead"],)
    if "watch" in plan:
        shim.watch(Path(plan["watch"]))
    if "trace" in plan:
        _trace(order, commit, Path(plan["trace"]))
    if not plan.get("anywhere"):
        order.start_at = lambda tasks: 0
    return shim


class Shim:
    """Counts the calls of primitives, outermost ones only, and does what the plan says at some of them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.calls = 0
        self.room = plan.get("quota")
        self.within = threading.local()  # `inside`: a thread of its own may write files as well
        self.home = Path(plan.get("home", "/"))
        self.record = Path(plan["record"]).open("w") if "record" in plan else None  # noqa: SIM115  # to the end
        self.disk = None
        if {"power", "follow"} & set(plan):
            from power import Disk

            self.disk = Disk(self.home, plan.get("from"))

    @property
    def inside(self) -> bool:
        """Whether this thread is inside a primitive."""
        return getattr(self.within, "inside", False)

    def wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(first: Any, *rest: Any, **options: Any) -> Any:
            if self.inside:  # a fallback, which is part of the call around it
                return plain(first, *rest, **options)
            self.within.inside = True
            try:
                return self._step(name, plain, first, *rest, **options)
            finally:
                self.within.inside = False

        return step

    def _step(self, name: str, plain: Callable[..., Any], first: Any, *rest: Any, **options: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        path = first if isinstance(first, Path) else Path(first.name)
        self._note(name, rest[0] if name in ("rename", "link") else path)
        here, when = self.plan.get("kill") == number, self.plan.get("when", "before")
        if here and self.disk is not None:
            self.disk.keep(self.plan["follow"])
        if here and when == "half" and name == "write":
            first.write(bytes(rest[0])[: len(bytes(rest[0])) // 2])
            first.flush()
        if here and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0 and "change" in self.plan:
            with Path(self.plan["change"]).open("ab") as file:
                file.write(b" ")
        if self.plan.get("signal") == number:
            os.kill(os.getpid(), getattr(signal, self.plan["name"]))
        self._refuse(name, number, path, first, rest)
        dropped = name in self.plan.get("drop", ()) and re.fullmatch(self.plan.get("where", ".*"), self._below(path))
        result = None if dropped else plain(first, *rest, **options)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.disk is not None:
            if not dropped:
                self.disk.saw(name, path)
            if self.plan.get("power") == self.calls:
                self._cut()
        return result

    def _refuse(self, name: str, number: int, path: Path, first: Any, rest: tuple[Any, ...]) -> None:
        if number == self.plan.get("deny"):
            for folder in (self.home, *self.home.rglob("*")):
                if folder.is_dir() and not folder.is_symlink():
                    folder.chmod(0o555)
        begun, lasting = self.plan.get("fail", 1 << 60), self.plan.get("for", 0)
        if number >= begun and (not lasting or number < begun + lasting):
            self._raise(self.plan["errno"], path)
        if self.room is not None and name in GROWING:
            size = len(bytes(rest[0])) if name == "write" else 0
            if size > self.room or self.room == 0:
                if name == "write":
                    first.write(bytes(rest[0])[: self.room])
                    first.flush()
                self.room = 0
                self._raise("ENOSPC", path)
            self.room -= size

    def _raise(self, name: str, path: Path) -> None:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number), str(path))

    def _note(self, name: str, path: Path) -> None:
        if self.record is not None:
            print(json.dumps([name, self._below(path)]), file=self.record, flush=True)

    def _below(self, path: Path) -> str:
        with contextlib.suppress(ValueError):
            path = path.resolve().relative_to(self.home.resolve())
        return path.as_posix()

    def watch(self, file: Path) -> None:
        """Notes what changes the disk and is inside no primitive."""
        notes = file.open("w")

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if self.inside or event not in CHANGES or not isinstance(args[0], str | Path):
                return
            if Path(args[0]).is_relative_to(self.home) and (event != "open" or args[2] & WRITING):
                print(json.dumps([event, Path(args[0]).relative_to(self.home).as_posix()]), file=notes, flush=True)

        sys.addaudithook(hook)

    def count_messages(self, last: int) -> None:
        """Kills this process before its `last`-th message to all ranks; `record` has a line for each."""
        from torch import distributed

        left = iter(range(last))

        def counted(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            self._note("message", self.home)
            return plain(*args, **options)

        for name in ("all_reduce", "all_gather"):
            setattr(distributed, name, functools.partial(counted, getattr(distributed, name)))

    def _cut(self) -> None:
        assert self.disk is not None
        self.disk.lose(self.plan.get("seed"))
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        """The commands are done."""
        if self.plan.get("power") == -1:
            self._cut()


def fail_pass(last: int, where: str, name: str) -> None:
    """Lets the `last`-th pass (from 0; the first one tries the largest bucket) raise the error of this name: at its
    "begin", "inside" of its forward part, inside of its "backward" part, or at its "end"; or that of a "validation"
    or of sample "pictures".
    """
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    from train import evaluate, loop, trial, validate

    modules, attribute = {"validation": ((validate,), "forward"), "pictures": ((evaluate,), "pictures")}.get(
        where, ((loop, trial), "forward_backward"))
    left, plain = iter(range(last)), getattr(modules[0], attribute)
    errors = {"memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
              "bug": RuntimeError("shapes differ"), "disk": OSError(errno.EIO, "cannot be read")}

    def fail(*args: Any) -> None:
        raise errors[name]

    def within(module: Any, given: Any, output: Any) -> None:
        if type(module).__name__ == "Attention":  # in one of the blocks that are gathered alone
            if where == "inside":
                fail()
            output.register_hook(fail)

    def passing(*args: Any) -> Any:
        if next(left, None) is not None:
            return plain(*args)
        if where in ("begin", "validation", "pictures"):
            fail()
        with register_module_forward_hook(within) if where in ("inside", "backward") else contextlib.nullcontext():
            plain(*args)
        return fail()

    for module in modules:
        setattr(module, attribute, passing)


def _trace(order: Any, commit: Any, file: Path) -> None:
    """Notes when each task was looked at, and when it was committed; all processes have one clock."""
    notes, look, write = file.open("a"), order.is_done, commit.write_commit

    def note(*what: Any) -> None:
        print(json.dumps(what), file=notes, flush=True)

    def looked(cache: Any, key: str) -> bool:
        begun = time.monotonic()
        finished = look(cache, key)
        note("finished" if finished else "missing", key, begun)
        return bool(finished)

    def committed(cache: Any, task: Any, *rest: Any, **options: Any) -> Any:
        result = write(cache, task, *rest, **options)
        note("committed", task.key, time.monotonic())
        return result

    order.is_done, commit.write_commit = looked, committed


def _take_away(files: Any) -> None:
    """Hard links are refused, and directories cannot be opened, as on Windows with a FAT disk."""
    plain_open = os.open

    def no_link(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links on this file system")

    def no_directory(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags == os.O_RDONLY and Path(path).is_dir():
            raise OSError(errno.EACCES, "directories cannot be opened")
        return plain_open(path, flags, *rest, **options)

    Path.hardlink_to = no_link  # type: ignore[method-assign]
    files.os = type("os", (), {**{name: getattr(os, name) for name in dir(os)}, "open": staticmethod(no_directory)})
