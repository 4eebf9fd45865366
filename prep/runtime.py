"""Defers Ctrl-C during imports, because interrupting torch's import can kill the process, and ends a command where a
library does not return after it; heeds signals that ask a run to stop; starts other Python processes; controls the
collector; says how much memory this process took and gives back what it freed; and how many cores it may use.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from prep.errors import EXIT_INTERRUPTED

# Clusters send them before they end a job. Windows has neither, nor the clock that limits the time to stop.
STOPPING = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "setitimer") else ()


class GraceOver(BaseException):
    """Raised in the main thread when a run has to stop at once."""


class StopRequest:
    """Whether SIGTERM or SIGUSR1 asked this run to stop, and what happens then."""

    def __init__(self, grace: float) -> None:
        self.signal = ""  # the name of the signal; "": none came
        self._grace = grace  # seconds in which what is under way may be completed
        self._stop: Callable[[], object] | None = None
        self._alarm: signal.Handlers | Callable[[int, FrameType | None], object] | int | None = None  # as it was

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, the first of these signals raises `GraceOver`: at once, or `grace` seconds later in `completing`.

        Changes nothing outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._asked) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def completing(self, stop: Callable[[], object]) -> Iterator[None]:
        """Inside, a signal calls `stop`, after which the work should end by itself within the time of grace."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None
            if self.signal:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, self._alarm or signal.SIG_DFL)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:  # again: schedulers send it to each process, and to the group
            return
        self.signal = signal.Signals(number).name
        if self._stop is None:
            raise GraceOver
        self._stop()
        self._alarm = signal.signal(signal.SIGALRM, _grace_over)
        signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-6))


def _grace_over(_number: int, _frame: FrameType | None) -> None:
    raise GraceOver


def python(*words: str) -> list[str]:
    """The command line of another Python process, which finds no modules in the current directory: that may be the
    directory of a stranger's dataset."""
    return [sys.executable, "-P", *words]


def main_of(module: str) -> tuple[str, str]:
    """The words for `python` that call `main` of one of our modules.

    Not `-m`: that needs this package's folder in PYTHONPATH, where all packages beside it would shadow Python's own
    modules.
    """
    root = str(Path(__file__).parents[1])
    return "-c", f"import sys; sys.path.append({root!r}); from {module} import main; main()"


def ask_for_huge_pages() -> None:
    """Asks torch for pages of 2 MiB in large blocks on the CPU, unless the environment says otherwise. Torch reads that
    as it makes its first tensor (c10/core/alignment.h), also in processes that this one starts."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def safe_path() -> Iterator[None]:
    """Python processes that libraries start inside find no modules in the current directory, nor do those that these
    start."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def stops_held() -> Iterator[None]:
    """Holds signals that ask to stop back; processes that are started inside never get them: their parent ends them."""
    if not STOPPING:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


PATIENCE = 1.5  # seconds after Ctrl-C in which a library's function may return
_last_words: Callable[[], object] | None = None  # of the command; None: this process is not ours to end
_watched = False  # whether `killable` is entered


@contextmanager
def command_says(last_words: Callable[[], object]) -> Iterator[None]:
    """Inside, this process is that of a command, which calls `last_words` in a thread before `killable` ends it."""
    global _last_words
    before, _last_words = _last_words, last_words
    try:
        yield
    finally:
        _last_words = before


@contextmanager
def killable() -> Iterator[None]:
    """Inside, Ctrl-C ends a command even if a library's function does not return: `PATIENCE` seconds later, with
    `EXIT_INTERRUPTED`. By itself, Python raises `KeyboardInterrupt` only between its own instructions, and on a CPU one
    layer of a VAE takes ten seconds.

    Nothing is tidied up then, as if the process was killed, so this is for work that leaves no files behind. Changes
    nothing in a program that is no command of ours, outside the main thread, and where Ctrl-C does not raise.
    """
    global _watched
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _watched or _last_words is None or not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    wakings, woken = socket.socketpair()
    woken.setblocking(False)
    threading.Thread(target=_end_after_interrupt, args=(wakings, _last_words), name="interrupts", daemon=True).start()
    before = -1
    try:
        before = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)  # the system's handler writes at once
        _watched = True
        yield
    finally:
        _watched = False
        signal.set_wakeup_fd(before)
        woken.close()


def _end_after_interrupt(wakings: socket.socket, last_words: Callable[[], object]) -> None:
    """Ends the process `PATIENCE` seconds after the first Ctrl-C, unless the other end of the socket is closed."""
    due: float | None = None
    with wakings, suppress(TimeoutError):
        while numbers := wakings.recv(64):
            if due is None and signal.SIGINT in numbers:
                due = time.monotonic() + PATIENCE
            if due is not None:
                wakings.settimeout(max(1e-3, due - time.monotonic()))
        return
    try:
        last_words()
    finally:
        os._exit(EXIT_INTERRUPTED)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end of the context, where the previous handler is then called once; a command does not wait
    for that longer than `killable` does."""
    with killable(), _deferred():
        yield


@contextmanager
def _deferred() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # ignored, or in C
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        handler(*interrupts[0])


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Turns Python's cyclic garbage collector off, and restores its state at the end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def gc_enabled() -> Iterator[None]:
    """Inside `gc_disabled`: turns the collector on for objects made from here on (encoders do make cycles)."""
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.unfreeze()


def peak_resident() -> int | None:
    """Bytes of memory that this process took at most; `None` on systems that do not say."""
    if sys.platform == "win32":
        return None
    with suppress(OSError, IndexError):  # Linux, where getrusage also counts what the parent had at the start
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def resident() -> int | None:
    """Bytes of memory that this process takes now; `None` on systems that do not say."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10
    return None


def glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library, if that is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        return getattr(library, name) if hasattr(library, "gnu_get_libc_version") else None
    except OSError:
        return None


def return_heap() -> None:
    """Returns freed memory that glibc keeps to the system."""
    if trim := glibc("malloc_trim"):
        trim(0)


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that this process may use: the computer's, or less in a container; `None` if the system has no answer.

    `groups` is where Linux mounts control groups.
    """
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows; a system without these names
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2 and 1
        try:
            text = (groups / name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            size = min(size, int(text))
    return size


def usable_cores(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The processors that this process may use: the computer's, or fewer in a container or in a cluster's job.

    A scheduler binds a job to some cores (`sched_setaffinity`) or bounds its time (a control group's `cpu.max`, or
    `cpu.cfs_quota_us` in version 1: microseconds in each period). A part of a core counts as one. `groups` is where
    Linux mounts control groups.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((groups / name).read_text(encoding="ascii") for name in names).split()
        except (OSError, UnicodeDecodeError):
            continue
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # without a limit: "max", or -1
            cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return cores
