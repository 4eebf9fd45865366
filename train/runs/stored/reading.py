"""Copies of what commands read of a run in a store: the copy of an object lies where its URL says.

They are apart from the working copy, in which a program of this computer may train just now. A copy is fetched again
only if its object has changed; what the store has no more is removed here. Several programs, like the ranks of a run,
may want a copy at once: one of them downloads it while the others wait, and what is as it should be is not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event

from prep.cache.remote.quota import STALE, NotFetched, make_dirs
from prep.cache.remote.shards import lock_copy
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.place import Local, Place, local_of
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import copy_of, run_root
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import ObjectEntry, size_in, version_of
from prep.runs.document import NAME as RUN
from prep.runs.heartbeat import read_heartbeat
from prep.runs.losses import NAME as LOSSES
from train.runs.checkpoint import STATE, step_name, step_named
from train.runs.directory import RESULTS
from train.runs.stored.bring import Names, bring_checkpoint, bring_file, has_weights
from train.runs.stored.layout import CHECKPOINTS, PROMPTS, WRITER, averaged_step, is_state, token_of, whole_steps
from train.runs.stored.objects import Objects, differs, fetch_object

TRIES = 3  # for a checkpoint that is removed while it is downloaded


@contextmanager
def _only_read() -> Iterator[None]:
    """Gives damage the hint for commands that only read weights: what continues a run would name --resume."""
    try:
        yield
    except (StoreError, NotFetched):
        raise
    except CacheError as error:
        error.hint = "name undamaged weights, like those of another checkpoint of the run"
        raise


def for_report(place: Place) -> Local:
    """A run with the files that its page needs; of checkpoints in a store only their state.json."""
    return _run(place, lambda name: (not name.startswith(CHECKPOINTS) or is_state(name))
                and (name.partition("/")[0] not in RESULTS or name.endswith("lora.safetensors")))


def for_losses(place: Place) -> Local:
    """A run with the losses of its samples; of checkpoints in a store only their state.json."""
    return _run(place, lambda name: name in (RUN, LOSSES, "manifest.json") or is_state(name))


def for_resume(place: Place) -> Local:
    """A run with the files that show how it can be continued; of checkpoints in a store only their state.json."""
    return _run(place, lambda name: name in (RUN, "samples.bin", "manifest.json") or is_state(name))


def for_weights(place: Place, checkpoint: str | None = None) -> Local:
    """A run with the weights of its newest checkpoint, or of the one named; if it has no checkpoint, with its result.
    Rows of prompts that the run encoded come with them.

    Raises `PathError`, `CacheError`.
    """
    return local_of(place, partial(_bring_weights, checkpoint=checkpoint))


def for_merge(place: Place) -> Local:
    """The source of `train merge`: a file, a run with its result, or one of its checkpoints with its run.json."""
    return local_of(place, _bring_merged)


def for_averages(place: Place) -> Local:
    """A run, or one of its checkpoints, with the power-function averages that it keeps, and its result."""
    return local_of(place, _bring_averages)


def for_init(place: Place) -> Local:
    """The weights at a place: a file, or the directory of a run, of one of its checkpoints or of a denoiser."""
    return local_of(place, _bring_initial)


def trained_here(place: Place) -> Local:
    """The run that a program of this computer trains. Raises `PathError` if none does."""
    return local_of(place, _working_copy, partial=False)


@_only_read()
def _bring_weights(place: Bucket, checkpoint: str | None = None, *, result: bool = False) -> Path:
    """The directory of copies of a run; with `result`, or if it has no checkpoint, with its result."""
    for retries in range(TRIES - 1, -1, -1):
        try:
            return _weights(place, checkpoint, result)
        except FileNotFoundError:  # a checkpoint that is removed just now: there is a newer one
            if not retries:
                raise
    raise AssertionError("the last try raises")


def _weights(place: Bucket, checkpoint: str | None, result: bool) -> Path:
    objects, folder, listed = _opened(place)
    steps = whole_steps(listed)
    chosen = _chosen(steps, checkpoint)
    of_result = {name for name in listed if name.partition("/")[0] in RESULTS} if result or not steps else set()
    weights = None if chosen is None or of_result else step_name(chosen)
    _keep(objects, folder, listed, lambda name: name == RUN or name in of_result or name.startswith(PROMPTS), weights)
    return folder


def _bring_merged(place: Bucket) -> Path:
    if place.suffix == ".safetensors":
        return _bring_initial(place)
    if place.parent.name == CHECKPOINTS.rstrip("/"):
        return _bring_weights(place.parent.parent, place.name) / CHECKPOINTS / place.name
    return _bring_weights(place, result=True)


@_only_read()
def _bring_averages(place: Bucket) -> Path:
    inside = place.parent.name == CHECKPOINTS.rstrip("/")
    for retries in range(TRIES - 1, -1, -1):
        objects, folder, listed = _opened(place.parent.parent if inside else place)
        try:
            _keep(objects, folder, listed, lambda name: name == RUN or is_state(name)
                  or averaged_step(name) is not None or name.partition("/")[0] in RESULTS)
            return folder / CHECKPOINTS / place.name if inside else folder
        except FileNotFoundError:  # of a checkpoint that is removed just now: its averages are kept elsewhere
            if not retries:
                raise
    raise AssertionError("the last try raises")


@_only_read()
def _bring_initial(place: Bucket) -> Path:
    folder = copy_of(place)
    if folder.suffix == ".safetensors":
        _fetch_file(place.url, folder)
        return folder
    objects = Objects(place)
    listed = objects.list()
    if RUN in listed:
        return _bring_weights(place)
    if STATE in listed:
        run, root = Objects(place.parent.parent), folder.parent.parent
        if not has_weights(run, root, folder.name):
            with _locked(root, run.stop):
                bring_checkpoint(run, root, folder.name, run.list(), weights_only=True)
        return folder
    _fetch(objects, folder, listed, lambda name: name.endswith((".safetensors", ".json")))
    return folder


def _working_copy(place: Bucket) -> Path:
    folder = run_root(place)
    if read_heartbeat(folder) is None:
        data = Objects(place).read(WRITER)
        last = "" if data is None else f"; it was last trained on {token_of(data)[1]}"
        raise PathError(f"{place} is in an object store, and no process of this computer trains it{last}",
                        hint="run this command on the computer that trains it")
    return folder


def _run(place: Place, wanted: Callable[[str], bool]) -> Local:
    """A run with the files that are `wanted`, by their names."""
    def bring(stored: Bucket) -> Path:
        objects, folder, listed = _opened(stored)
        _keep(objects, folder, listed, wanted)
        return folder

    return local_of(place, bring)


def _opened(place: Bucket) -> tuple[Objects, Path, Names]:
    """The objects of a run, its directory of copies, and the list. Raises `PathError` if it is none."""
    objects = Objects(place)
    listed = objects.list()
    if RUN not in listed:
        raise PathError(f"{objects.place} is not a training run: it has no run.json",
                        hint="name the place that train run wrote (-o)")
    return objects, copy_of(place), listed


def _keep(objects: Objects, folder: Path, listed: Names, wanted: Callable[[str], bool],
          weights: str | None = None) -> None:
    """Makes copies of a run's `wanted` files, and of the weights of a checkpoint, what the store has, and removes what
    it has no more."""
    if (not any(_gone(folder, listed)) and not any(_changed(folder, listed, wanted))
            and (weights is None or has_weights(objects, folder, weights))):
        return
    with _locked(folder, objects.stop):
        for path in list(_gone(folder, listed)):
            atomic.remove_tree(path)
        for name in _changed(folder, listed, wanted):
            bring_file(objects, folder, name, listed[name])
        if weights is not None:
            bring_checkpoint(objects, folder, weights, listed, weights_only=True)


def _fetch(objects: Objects, folder: Path, listed: Names, wanted: Callable[[str], bool]) -> None:
    """Makes copies of `wanted` objects what the store has."""
    if any(_changed(folder, listed, wanted)):
        with _locked(folder, objects.stop):
            for name in _changed(folder, listed, wanted):
                bring_file(objects, folder, name, listed[name])


def _fetch_file(url: str, copy: Path) -> None:
    """Makes the copy of one object what the store has; there is none if it is not there."""
    stop = Event()
    with suppress(FileNotFoundError):
        version = version_of(url, stop=stop)
        listed = ObjectEntry(size=size_in(version), written=0.0, version=version)
        if differs(copy, listed):
            with _locked(copy.parent, stop):
                if differs(copy, listed):
                    fetch_object(url, copy, listed, stop=stop)
        return
    atomic.remove(copy)


def _locked(folder: Path, stop: Event) -> AbstractContextManager[None]:
    """Holds the lock of the directory that is written to; below the checkpoints of a run, that of the run."""
    make_dirs(folder)
    runs = (above.parent for above in (folder, *folder.parents) if above.name == CHECKPOINTS.rstrip("/"))
    return lock_copy(next(runs, folder), stop)


def _gone(folder: Path, listed: Names) -> Iterator[Path]:
    """The checkpoints and files here that the store has no more, and what a killed program left."""
    steps = {step_name(step) for step in whole_steps(listed)}
    yield from (old for old in (folder / "checkpoints").glob("*") if old.name not in steps)
    for path in list(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in listed and not name.startswith(CHECKPOINTS) and not _is_coming(path):
            yield path


def _is_coming(path: Path) -> bool:
    """Whether a file may be the download of another program, of just a part of the run."""
    with suppress(OSError):
        return atomic.is_partial(path) and time.time() - path.stat().st_mtime < STALE
    return False


def _changed(folder: Path, listed: Names, wanted: Callable[[str], bool]) -> Iterator[str]:
    return (name for name, entry in listed.items() if wanted(name) and differs(folder / name, entry))


def _chosen(steps: set[int], named: str | None) -> int | None:
    """The step of the checkpoint that is read; `None`: there is none like that, as its reader will say."""
    if named is None:
        return max(steps, default=None)
    return step_named(named, steps)
