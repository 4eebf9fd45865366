"""A run in an object store: trained in a working copy here, and uploaded beside the steps.

Whatever ends a program, and whenever: what the store shows is whole. A checkpoint's files are there, and compared,
before its state.json is; the log, the losses and the pictures before that, so the log is never behind the newest
checkpoint. Old checkpoints are removed after a newer one is whole, their state.json first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from prep.cache.remote.quota import make_dirs
from prep.errors import CacheError, PathError, Problem, first_line
from prep.formatting import shell_name
from prep.fs import atomic
from prep.fs.place import Local, Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import DIRECTORY, run_root
from prep.fs.remote.errors import Stopped
from prep.fs.remote.objects import ObjectEntry
from prep.runs.document import NAME as RUN
from train.runs.checkpoint import STATE, aside_name, list_checkpoints, pictured, read_state, step_name
from train.runs.checkpoint_files import remove
from train.runs.directory import check_place, check_space, check_unused, check_writable, only_one
from train.runs.stored import layout
from train.runs.stored.bring import check_new, continued, make_way
from train.runs.stored.layout import CHECKPOINTS, KEPT, WRITER
from train.runs.stored.objects import Objects, snapshot
from train.setup import Setup

_log = logging.getLogger("latentry.remote")  # a notice is a line on stderr


class OnDisk:
    """Keeps a run in a directory, where training writes it anyway. `StoredRun` keeps one in a store."""

    spare = 1  # checkpoints on the disk besides those that are kept: a new one is written before the oldest is removed
    elsewhere = "with -o"  # how another directory is named for what a run writes on this computer

    def __init__(self, run: Local) -> None:
        self.run = run

    @property
    def folder(self) -> Path:
        """The directory in which the run is trained."""
        return self.run.path

    def prepare(self, *, resume: bool, named: str | None) -> list[str]:
        """Makes the directory what the run's place has, before it is read; returns warnings."""
        return []

    def check_new(self, setup: Setup) -> None:
        """Raises `PathError` unless a new run may begin at its place."""
        check_place(self.folder, setup.manifest)
        check_writable(self.folder)
        check_unused(self.run)

    def check_space(self, setup: Setup, done: int = 0) -> None:
        """Raises `PathError` unless the disk has room for what is written after step `done`."""
        check_space(self.folder, setup, done, spare=self.spare, elsewhere=self.elsewhere)

    def begins(self, resume: bool) -> bool:
        """Whether `resume` finds nothing to continue, and the run begins."""
        return False

    def claim(self, step: int | None) -> None:
        """After the directory was claimed: makes this program the one that writes. `step`: of the checkpoint it
        continues from; `None`: it begins."""

    def local_keep(self, keep: int) -> int:
        """The number of checkpoints that a save leaves in the directory; 0: all."""
        return keep

    def saved(self) -> None:
        """A checkpoint was written."""

    def news(self) -> list[str]:
        """Warnings since it was last asked. Raises `PathError` if another program continues the run."""
        return []

    def finish(self) -> None:
        """After the last event: waits until everything is there. Raises `CacheError`."""

    def __enter__(self) -> OnDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


def kept_in(place: Place) -> OnDisk:
    """What keeps a run at `place`, in a directory or in a store. Sends no request yet."""
    return StoredRun(place) if isinstance(place, Bucket) else OnDisk(Local(place))


class _Superseded(Exception):
    """Another program continues the run: who."""


class StoredRun(OnDisk):
    """A run in a store. As a context manager, uploads what is left when training fails or is interrupted."""

    spare = 2  # the new one, and one that is being uploaded
    elsewhere = f"for what is here of runs in a store: export {DIRECTORY}=DIR"

    def __init__(self, place: Bucket) -> None:
        super().__init__(Local(run_root(place), place))
        self.place, self._objects = place, Objects(place)
        self._token, self._resume, self._keep = layout.new_token(), False, 0
        self._there: dict[str, ObjectEntry] = {}  # objects before this program wrote any
        self._sent: dict[str, tuple[int, int]] = {}  # files as they were uploaded: size, time
        self._whole: dict[int, list[str]] = {}  # checkpoints in the store: their names
        self._changed, self._removing = threading.Condition(), threading.Lock()
        self._sending: str | None = None  # the checkpoint that is being uploaded
        self._due = self._closing = self._idle = False
        self._news: list[str] = []
        self._failed: Exception | None = None
        self._lost: PathError | None = None
        self._ended = False  # nothing more to upload, or it failed
        self._seen: set[int] = set()  # checkpoints in the store when the run was prepared
        self._thread: threading.Thread | None = None

    # ---- before training ---------------------------------------------------------------------------------------------

    def prepare(self, *, resume: bool, named: str | None) -> list[str]:
        """Brings the working copy to what the store has: of a run to continue its newest checkpoint, or `named`.

        Raises `PathError`, also if a new run's place is taken, `CacheError`.
        """
        self._resume = resume
        listed = self._objects.list()
        self._seen = layout.whole_steps(listed)
        make_dirs(self.folder.parent)
        if not resume:
            check_new(self._objects, listed)
            return make_way(self.place, self.folder)
        with only_one(self.run):
            return continued(self._objects, self.run, listed, named)

    def check_new(self, setup: Setup) -> None:
        """Raises `PathError` unless a new run may begin there."""
        check_new(self._objects, self._objects.list())

    def begins(self, resume: bool) -> bool:
        """Whether the run has no checkpoint yet, so that `resume` begins it."""
        return resume and not list_checkpoints(self.folder)

    def claim(self, step: int | None) -> None:
        """Makes this program the run's writer, and begins to upload. Raises `PathError` if another one began the run.
        """
        objects = self._objects
        if not self._resume and not objects.create(RUN, (self.folder / RUN).read_bytes()):
            raise PathError(f"{self.place} already holds a run", hint="add --resume to continue it; or name another: "
                            f"-o {shell_name(f'{self.place}-2')}")
        if layout.whole_steps(objects.list()) != self._seen:
            raise PathError(f"another program trained in {self.place} meanwhile", hint="run the same command again")
        objects.put(WRITER, data := layout.writer(self._token))
        atomic.write_atomic(self.folder / WRITER, data)
        self._there = objects.list()
        self._whole = {saved: layout.below(f"{CHECKPOINTS}{step_name(saved)}", self._there)
                       for saved in layout.whole_steps(self._there)}
        newer = sorted(saved for saved in self._whole if saved > (step or 0))
        self._clear_pictures(-1 if step is None else step, keep=bool(newer))
        for later in newer:
            self._set_aside(later)
        self._set_averages_aside(step or 0)
        self._clear_remains()
        for name in (RUN, "samples.bin", "manifest.json"):
            self._send(name)
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()
        if step is not None:
            self.saved()  # one that was not uploaded before

    def _clear_pictures(self, step: int, *, keep: bool) -> None:
        """As `clear_pictures`, in the store."""
        for name in [name for name in layout.below("samples", self._there) if pictured(name, after=step)]:
            if keep:
                aside = aside_name(name, lambda other: f"samples/{other}" in self._there)
                self._objects.rename(f"samples/{name}", f"samples/{aside}")
                self._there[f"samples/{aside}"] = self._there[f"samples/{name}"]
            else:
                self._objects.remove([f"samples/{name}"])
            del self._there[f"samples/{name}"]

    def _set_aside(self, step: int) -> None:
        folder, taken = f"{CHECKPOINTS}{step_name(step)}", {name.split("/")[1] for name in self._there if "/" in name}
        target = aside_name(step_name(step), taken.__contains__)
        names_there = self._whole.pop(step)
        self._objects.move(folder, f"{CHECKPOINTS}{target}", names_there, STATE)
        for name in names_there:
            del self._there[f"{folder}/{name}"]

    def _set_averages_aside(self, step: int) -> None:
        """As `set_aside_averages`, in the store."""
        later = [name for name in self._there if name.startswith(KEPT) and (layout.averaged_step(name) or 0) > step]
        for name in later:
            target = KEPT + aside_name(name.removeprefix(KEPT), lambda other: KEPT + other in self._there)
            self._objects.rename(name, target)
            self._there[target] = self._there.pop(name)

    def _clear_remains(self) -> None:
        """Removes what is left of checkpoints that a newer one has replaced, where that was interrupted."""
        newest = max(self._whole, default=0)
        remains = [name for name in self._there if (step := layout.step_of(name)) is not None and step < newest
                   and step not in self._whole]
        for name in remains:
            self._keep_average(name)
        self._objects.remove(remains)
        for name in remains:
            del self._there[name]

    def _keep_average(self, name: str) -> None:
        """Copies an object of a checkpoint to where it stays, if it is a power-function average."""
        kept = f"{KEPT}{name.removeprefix(CHECKPOINTS)}"
        if layout.averaged_step(name) is not None and kept not in self._there:
            self._there[kept] = self._objects.copy(name, kept)

    # ---- beside the steps --------------------------------------------------------------------------------------------

    def local_keep(self, keep: int) -> int:
        """All: what is being uploaded must stay. The thread that uploads removes old ones."""
        self._keep = keep
        return 0

    def saved(self) -> None:
        self._remove_local()
        with self._changed:
            self._due = True
            self._changed.notify_all()

    def news(self) -> list[str]:
        if self._lost is not None:
            raise self._lost
        with self._changed:
            news, self._news = self._news, []
        return news

    def _work(self) -> None:
        """The thread: uploads what is due. A failure is told, and what failed is due again with the next checkpoint."""
        while True:
            with self._changed:
                self._idle = not self._due
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._due or self._closing)
                if not self._due:
                    return
                self._due = self._idle = False
            try:
                self._upload()
                self._failed = None
            except _Superseded as other:
                self._lost = PathError(f"another program continues {self.place}, or removed it: {other}",
                                       hint=f"nothing of it was overwritten; what was trained here is in {self.folder}")
                break
            except Stopped:
                break
            except Exception as error:  # also a bug must not leave `finish` waiting
                self._failed = error
                with self._changed:
                    self._news.append(f"not uploaded yet, training goes on: {first_line(error)}")
        with self._changed:
            self._idle = True
            self._changed.notify_all()

    def _upload(self) -> None:
        while (folder := self._next()) is not None:
            self._upload_checkpoint(folder)
            self._remove_old()
        self._remove_old()  # also if all were uploaded before
        self._upload_others()

    def _next(self) -> Path | None:
        """The oldest checkpoint to upload, which from now on stays here until the next one is asked for."""
        with self._removing:
            newest = max(list(self._whole), default=-1)
            waiting = [folder for folder in list_checkpoints(self.folder) if int(folder.name[5:]) > newest]
            first = next(iter(waiting[-self._keep :] if self._keep else waiting), None)
            self._sending = None if first is None else first.name
            return first

    def _upload_checkpoint(self, folder: Path) -> None:
        state, place = read_state(folder), f"{CHECKPOINTS}{folder.name}"
        for name, facts in sorted(state.files.items()):
            self._check()
            self._objects.send(f"{place}/{name}", folder / name, facts.sha256, self._there.get(f"{place}/{name}"))
        self._objects.remove(f"{place}/{name}" for name in layout.below(place, self._there)
                             if name not in (*state.files, STATE))
        self._upload_others()
        self._check()
        self._objects.send(f"{place}/{STATE}", folder / STATE)
        self._whole[state.step] = [*state.files, STATE]

    def _upload_others(self) -> None:
        for name in layout.others(self.folder):
            if name.startswith(KEPT) and layout.averaged_step(name) in self._whole:
                continue  # which is copied there when its checkpoint is removed
            with suppress(FileNotFoundError):
                self._send(name)

    def _send(self, name: str) -> None:
        """Uploads a file, unless it is as it was when it was last uploaded."""
        path = self.folder / name
        status = path.stat()
        now = status.st_size, status.st_mtime_ns
        if self._sent.get(name) == now:
            return
        self._check()
        with _steady(path, layout.grows(name)) as steady:
            self._objects.send(name, steady, listed=self._there.pop(name, None))
        self._sent[name] = now

    def _check(self) -> None:
        """Raises `_Superseded` unless this program still writes the run."""
        data = self._objects.read(WRITER)
        token, who = ("", "it has no writer.json any more") if data is None else layout.token_of(data)
        if token != self._token:
            raise _Superseded(who)

    def _remove_old(self) -> None:
        """In the store, after a newer one is whole; power-function averages stay."""
        for step in sorted(self._whole)[: -self._keep] if self._keep else ():
            folder = f"{CHECKPOINTS}{step_name(step)}"
            names = self._whole[step]
            for name in names:
                self._keep_average(f"{folder}/{name}")
            self._objects.remove(f"{folder}/{name}" for name in sorted(names, key=lambda name: name != STATE))
            del self._whole[step]
        self._remove_local()

    def _remove_local(self) -> None:
        """All but the newest that are kept, the store's newest (so that newer ones count after a failure), and the one
        that is being uploaded: however slow the store is, they do not fill the disk."""
        with self._removing:
            newest = step_name(max(list(self._whole), default=0))  # a list at once: threads
            for old in list_checkpoints(self.folder)[: -self._keep] if self._keep else ():
                if old.name not in (newest, self._sending):
                    remove(self.folder, old)

    # ---- at the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._ended = True
        self.saved()
        with self._changed:
            self._changed.wait_for(lambda: (self._idle and not self._due) or self._lost is not None)
        if self._lost is not None:
            raise self._lost
        if self._failed is not None:
            raise CacheError(f"{self.place} is not all uploaded: {first_line(self._failed)}",
                             hint=f"all is whole in {self.folder}: the same command with --resume, on this computer, "
                             "uploads it")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is not None and self._thread is not None and self._lost is None and not self._ended:
                self._finish_after(error)
        finally:
            self._objects.stop.set()
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(5.0)

    def _finish_after(self, error: BaseException) -> None:
        """Uploads what is left. If that fails it is the error after an interruption, and else a notice."""
        try:
            self.finish()
        except Problem as failed:
            if isinstance(error, KeyboardInterrupt):
                raise
            _log.warning("%s; %s", failed.message, failed.hint)


@contextmanager
def _steady(path: Path, grows: bool) -> Iterator[Path]:
    """A file that does not change while it is read twice: a copy, if it grows."""
    staged = snapshot(path) if grows else path
    try:
        yield staged
    finally:
        if grows:
            atomic.remove(staged)
