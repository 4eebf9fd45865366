"""A run's directory: its layout, run.json, and which paths may become one.

    RUN/run.json              manifest, model and settings
    RUN/manifest.json         a copy of the manifest, to see what the run was trained on
    RUN/samples.bin           a record per sample, to count changes when the run is resumed
    RUN/log.jsonl             the events
    RUN/losses.bin            the loss of each sample at each showing
    RUN/checkpoints/ samples/
    RUN/averages/step-000500/ power-function averages of removed checkpoints
    RUN/lora.safetensors | unet/ | transformer/    the result
    RUN/README.md             the model card
    RUN/loss.png              the loss so far
    RUN/report.html           the page of `train report`
    RUN/evaluation/           pictures that evaluated checkpoints drew, and their embeddings
    RUN/writer.json           of a run in a store: by which program this is the one that is there
    RUN/prompts/              text rows of prompts that were edited meanwhile
    RUN/heartbeat.json        which process trains it now, and what it does
    RUN/stop.request, RUN/sample.request    what that process is asked

run.json is written first, after the model is loaded. A run may start again in a directory without a checkpoint or a
result, and in one with nothing but the partial files of a start that was killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.digest import canonical, digest_bytes
from prep.errors import CacheError, ConfigError, ModelError, PathError, Problem
from prep.formatting import counted, format_bytes, join_texts, shell_name
from prep.fs.atomic import is_partial, make_dirs, write_atomic
from prep.fs.paths import MARKER, NamedPath, check_disjoint, resolve
from prep.fs.place import Local, Place, is_here
from prep.fs.untrusted import read_regular
from prep.loader.identity import RECORD
from prep.loader.index import Index, open_index
from prep.manifest.document import Manifest, read_copy, read_manifest
from prep.models.named import check_recorded, is_there, named_in, recorded
from prep.parse import Unparsed, brief, digest_of, expect, list_of
from prep.runs import heartbeat
from prep.runs.document import FORMAT, MOVED, VERSION, check_manifest, damaged, path_text, place_in, read_document
from prep.runs.documents import check_links, with_checksum
from prep.training.schema import Config
from train.config.load import as_table, parse
from train.optim.optimizers import TABLE
from train.runs import checkpoint
from train.setup import Origin, RunRequest, Setup

if sys.platform != "win32":
    import fcntl

RESULTS = ("lora.safetensors", "unet", "transformer")
PASSING = (heartbeat.NAME, *(f"{kind}.request" for kind in heartbeat.KINDS))  # files that tell of a process only
MOST_RECIPE = 1 << 20  # bytes of a recipe
_TIME, _TIMES = "%Y-%m-%dT%H:%M:%SZ", re.compile(r"\d{4,6}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The content of run.json."""

    local: Local
    request: RunRequest
    config: Config
    table: Mapping[str, Any]  # the settings as run.json has them
    base: Mapping[str, str]  # fingerprints of the model; empty in runs of version 1
    origin: Origin
    data: str = ""  # digest of the data that decide the steps, of its last start; empty in runs of version 1
    adopted: tuple[Mapping[str, Any], ...] = ()  # changes accepted when it was resumed: {"step", "changes"}

    @property
    def folder(self) -> Path:
        """The directory of its files on this computer."""
        return self.local.path


@contextmanager
def lock_run(run: Local, manifest: Manifest) -> Iterator[None]:
    """Locks the directory of a run for training, and creates it if needed, as `only_one` does.

    Raises `PathError` also if it may not become a run.
    """
    check_place(run.path, manifest)
    with only_one(run):
        yield


@contextmanager
def only_one(run: Local) -> Iterator[None]:
    """Locks the directory of a run, and creates it if needed. A kernel lock, released when the process ends.

    Raises `PathError` if another process holds the lock. If the system or the file system has no such lock, other
    processes are not kept out.
    """
    make_dirs(run.path)
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise PathError(f"another program is training in {run}", hint="wait for it to end; or name another "
                                f"directory: -o {shell_name(str(unused_name(run)))}") from None
        yield
    finally:
        os.close(descriptor)


def claim_run(run: Local, setup: Setup, *, step: int | None = None) -> list[str]:
    """Makes a directory that of the run: writes run.json, a copy of the manifest and the records of samples.

    `step` is the step of the checkpoint to resume from: renames newer checkpoints, with the sample pictures of later
    steps, and returns warnings of that. Pictures of steps that are made again are removed, as their events are.
    Raises `PathError` if it already holds a run that is not resumed.
    """
    folder = run.path
    check_place(folder, setup.manifest)
    if step is None:
        check_unused(run)
    warnings = _abandon(run, -1 if step is None else step)
    checkpoint.remove_partial(folder)
    make_dirs(folder)
    write_atomic(folder / "run.json", with_checksum(_document(run, setup)))  # first: it makes the directory a run's
    write_atomic(folder / "samples.bin", setup.identity.records)
    write_atomic(folder / "manifest.json", canonical(dict(setup.manifest.document)))
    return warnings


def _abandon(run: Local, step: int) -> list[str]:
    """Sets aside or removes what there is of steps after `step`; returns warnings. Pictures come first: after a crash
    between them, checkpoints still say that theirs are to be kept."""
    newer = any(int(folder.name[5:]) > step for folder in checkpoint.list_checkpoints(run.path))
    pictures = [f"samples/{name}" for name in checkpoint.clear_pictures(run.path, step, keep=newer)]
    back = " (--from {} tells the way back)" if run.origin is None else ""
    warnings = [f"a newer checkpoint was set aside: checkpoints/{name}{back.format(name)}"
            for name in checkpoint.set_aside(run.path, step)]
    if averages := [f"averages/{name}" for name in checkpoint.set_aside_averages(run.path, step)]:
        warnings.append(f"the averages of later steps were set aside: {join_texts(averages, 1)}")
    if pictures:
        warnings.append(f"the sample pictures of later steps were set aside: {join_texts(pictures, 1)}")
    return warnings


def check_unused(run: Local) -> None:
    """Raises `PathError` if a run has a checkpoint or a result: only --resume may continue it."""
    results = [*checkpoint.list_checkpoints(run.path), *(run.path / name for name in RESULTS)]
    if any(path.exists() for path in results):
        raise PathError(f"{run} already holds a run", hint="add --resume to continue it; or name another: "
                        f"-o {shell_name(str(unused_name(run)))}")


def unused_name(run: Local) -> Local:
    """A place beside that of a run that a new run can have."""
    names = (run.with_name(f"{run.path.name}-{number}") for number in range(2, 1 << 20))
    return next(beside for beside in names if not beside.path.exists())


def check_place(folder: Path, manifest: Manifest) -> None:
    """Raises `PathError` unless `folder` is, or may become, the directory of a run on this manifest, and `CacheError`
    for links in it."""
    if folder.exists() and not folder.is_dir():
        raise PathError(f"{folder} is a file, expected a directory for the run", hint="name another with -o")
    if folder.is_dir():
        check_links(folder)
    ours = (folder / "run.json").is_file() or checkpoint.list_checkpoints(folder)
    if folder.is_dir() and not ours and not all(path.name in PASSING or is_partial(path)
                                                for path in folder.iterdir()):
        raise PathError(f"{folder} is not empty and is not a training run", hint="name another directory with -o")
    sources = [NamedPath(role="pictures", path=place) for place in manifest.sources if place is not None]
    for other in (NamedPath(role="cache", path=manifest.cache), *sources):
        if is_here(other.path):
            check_disjoint([NamedPath(role="run", path=folder, may_hold=("cache", "pictures")), other])
    for parent in resolve(folder).parents:
        if (parent / MARKER).is_file():
            raise PathError(f"run {folder} lies in the cache {parent}", hint="name a directory outside with -o")
        if not ours and _is_run(parent):
            beside = unused_name(Local(parent))
            raise PathError(f"run {folder} would lie in the run {parent}", hint="name a directory outside: -o "
                            f"{shell_name(str(beside))}; --resume -o {shell_name(str(parent))} continues that run")


def _is_run(folder: Path) -> bool:
    """Whether `folder` is the directory of a run: other programs, too, may have a run.json."""
    try:
        return (folder / "run.json").is_file() and bool(read_document(folder))
    except CacheError:  # of another program, or damaged
        return bool(checkpoint.list_checkpoints(folder))


def check_writable(folder: Path) -> None:
    """Raises `PathError` unless `folder`, or its nearest existing parent, is writable."""
    parent = _nearest(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PathError(f"run {folder} cannot be written: no permission to write in {parent}",
                        hint="name another directory with -o")


def checkpoint_bytes(setup: Setup) -> int:
    """About the size of a checkpoint: the weights, their average in float32, and what the optimizer keeps."""
    config = setup.config
    averaged = config.ema.decay or TABLE[config.optimizer.name].averages
    each = 2 if config.method == "full" and config.full.dtype == "bfloat16" else 4
    return setup.model.saved * (each + (4 if averaged else 0)) + _kept_bytes(setup) + setup.model.state_bytes


def _kept_bytes(setup: Setup) -> int:
    """The size of the power-function averages of a checkpoint, which stay when it is removed."""
    return 4 * len(checkpoint.POWERS) * setup.model.saved if setup.config.ema.snapshots else 0


def check_space(folder: Path, setup: Setup, done: int, *, spare: int, elsewhere: str) -> None:
    """Raises `PathError` unless the disk has room for the checkpoints of the steps after `done`, and for the result.

    `spare` more than `checkpoint.keep` exist at a time. `elsewhere`: how another directory is named.
    """
    disk, settings = _nearest(folder), setup.config.checkpoint
    coming = _coming(setup, done)
    most = min(coming, settings.keep + spare - len(checkpoint.list_checkpoints(folder))) if settings.keep else coming
    size = checkpoint_bytes(setup)
    needed = max(most, 0) * size + max(coming - max(most, 0), 0) * _kept_bytes(setup) + 4 * setup.model.saved
    free = shutil.disk_usage(disk).free
    if free < needed:
        fewer = "" if settings.keep == 1 else ", or keep fewer checkpoints: --set checkpoint.keep=1"
        raise PathError(f"{disk} has {format_bytes(free)} of free space, expected {format_bytes(needed)} for "
                        f"{counted(max(most, 0), 'checkpoint')} of about {format_bytes(size)} and the result",
                        hint=f"free some space, name another directory {elsewhere}{fewer}")


def _coming(setup: Setup, done: int) -> int:
    """How many checkpoints are saved after step `done`; the last step has one in any case."""
    interval = setup.interval(setup.config.checkpoint.every)
    at_end = done < setup.steps and not interval.is_due(setup.steps)
    return interval.count(setup.steps) - interval.count(done) + at_end


def _nearest(folder: Path) -> Path:
    """`folder`, or its nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def read_run(run: Local, *, manifest: Place | None = None, cache: Place | None = None) -> Run:
    """Reads run.json; `manifest` and `cache`: where these are now, if they have moved.

    Raises `PathError` if there is none, `CacheError` if it is damaged.
    """
    folder = run.path
    body = read_document(folder)
    try:
        if cache is None and body.get("cache") is not None:
            cache = place_in(folder, path_text(body["cache"], "cache"))
        request = RunRequest(manifest=manifest or place_in(folder, path_text(body["manifest"], "manifest")),
                             cache=cache, model=_model(folder, body["model"]),
                             other_encoders=expect(body["other_encoders"], bool, "other_encoders"))
        table = expect(body["config"], dict, "config")
        base = {name: digest_of(value, f"base.{name}") for name, value in
                expect(body.get("base", {}), dict, "base").items()}
        return Run(local=run, request=request, config=parse(table, "config"), table=table, base=base,
                   origin=_origin(body), data=digest_of(body["data"], "data") if "data" in body else "",
                   adopted=tuple(list_of(body.get("adopted", []), checkpoint.adopted_of, "adopted")))
    except (Unparsed, ConfigError) as error:
        raise damaged(folder, error) from None


def own_manifest(run: Run, *, fetch: bool = False) -> Manifest | None:
    """The run's copy of the manifest that it was last started with, as if it lay where that did; `None` if it is
    missing or damaged, or with `fetch` if tables cannot be fetched."""
    try:
        return read_copy(run.folder / "manifest.json", run.request.manifest, fetch=fetch, cache=run.request.cache)
    except Problem:
        return None


def open_run(run: Run, manifest: Place | None = None) -> Index:
    """The samples that the run was last started with: by its own copy of the manifest, since another one may lie in
    its place now. If the cache has no tables of that, or a `manifest` was named: by what is there.

    Raises `ManifestError`, `CacheError`.
    """
    if manifest is None:
        with suppress(CacheError):
            if (own := own_manifest(run, fetch=True)) is not None:
                return open_index(own)
        require_manifest(run)
    return open_index(read_manifest(run.request.manifest, cache=run.request.cache))


def run_of(folder: Local) -> Local:
    """The run that has the checkpoint `folder`; any other directory is taken for a run itself."""
    above = folder.path.absolute().parent.parent
    if not ((folder.path / checkpoint.STATE).is_file() and (above / "run.json").is_file()):
        return folder
    return replace(folder, path=above, origin=folder.origin and folder.origin.parent.parent)


def read_records(folder: Path, samples: int) -> bytes | None:
    """The content of samples.bin, of so many samples; `None` if it cannot be read, since it only serves to count
    changes."""
    try:
        return read_regular(folder / "samples.bin", samples * RECORD.itemsize)
    except OSError:
        return None


def _document(run: Local, setup: Setup) -> dict[str, Any]:
    """The content of run.json. Paths are relative to the run, so that both can move together; of a run in a store they
    are absolute, and what is in a store is named by its URL."""
    named = setup.request.model if setup.request.model is not None else setup.manifest.model
    cache = setup.request.cache
    return {"format": FORMAT, "version": VERSION if cache is None else MOVED,
            "manifest": run.name_of(setup.request.manifest),
            **({} if cache is None else {"cache": run.name_of(cache)}),
            "manifest_digest": setup.manifest.digest, "data": setup.identity.digest,
            "model": recorded(named, run.name_of),
            "base": dict(setup.model.base), "other_encoders": bool(setup.model.others) or setup.request.other_encoders,
            "config": as_table(setup.config), "adopted": [dict(each) for each in setup.adopted],
            "started": setup.origin.started, "recipe": setup.origin.recipe}


def begin(manifest: Manifest) -> Origin:
    """The origin of a new run. SOURCE_DATE_EPOCH replaces the clock (reproducible-builds.org/specs)."""
    named, digest = manifest.document["recipe"], ""
    if named is not None:
        with suppress(OSError):  # the recipe's path is a hint; the manifest is whole without it
            digest = digest_bytes(read_regular(manifest.folder / named, MOST_RECIPE))
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(fixed) if fixed.isdecimal() and fixed.isascii() and len(fixed) < 12 else time.time()
    return Origin(started=time.strftime(_TIME, time.gmtime(seconds)), recipe=digest)


def _origin(body: Mapping[str, Any]) -> Origin:
    started, recipe = (expect(body.get(key, ""), str, key) for key in ("started", "recipe"))
    if started and not _TIMES.fullmatch(started):
        raise Unparsed(f"started is {brief(started)}, expected a time like 2026-11-22T19:30:00Z")
    return Origin(started=started, recipe=digest_of(recipe, "recipe") if recipe else "")


def _model(folder: Path, named: Any) -> str | Path | None:
    """The model that was trained, a directory or a Hub id; `None` in runs of version 1, which used the manifest's."""
    if named is None:
        return None
    table = expect(named, dict, "model")
    check_recorded(table, "model", path_text)
    return named_in(table, folder)


def require_manifest(run: Run) -> None:
    """Raises `CacheError` unless the manifest that the run names is a file."""
    check_manifest(run.local, run.request.manifest)


def model_of(run: Run, model: str | Path | None) -> str | Path | None:
    """The model that was trained, or `model` in its place. Raises `ModelError` if the run's directory of it is gone."""
    named = run.request.model
    if not model and named and not isinstance(named, str) and not is_there(named):
        raise ModelError(f"the base model of {run.local} is gone: {named} does not exist",
                         hint="name where it is now with --model DIR")
    return model or named
