"""A run's directory: what it is called, what is in run.json, and when a path may become one.

    RUN/run.json              which manifest and model, with which settings
    RUN/log.jsonl             what happened
    RUN/checkpoints/ samples/
    RUN/lora.safetensors | unet/    the result
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prep.errors import ConfigError, PathError
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.paths import MARKER, NamedPath, check_disjoint, resolve
from train.config.load import as_table, parse
from train.config.schema import Config
from train.runs import checkpoint
from train.setup import RunRequest, Setup

if sys.platform != "win32":
    import fcntl

FORMAT = "latentry/run"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What run.json says."""

    folder: Path
    asked: RunRequest
    config: Config
    table: Mapping[str, Any]  # the settings as they stand there


@contextmanager
def lock_run(folder: Path, setup: Setup) -> Iterator[None]:
    """Within it no other program trains in `folder`, which is made when it is not there. A kernel lock, gone with us.

    Raises `PathError` when another has it, or `folder` may not become a run. Where the system has no such lock, or not
    on this disk, nobody is kept out.
    """
    _check_place(folder, setup)
    make_dirs(folder)
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise PathError(f"another program is training in {folder}", hint="wait for it to end; or name another "
                                f"directory with -o, like {folder.name}-2") from None
        yield
    finally:
        os.close(descriptor)


def claim_run(folder: Path, setup: Setup, asked: RunRequest, *, resume: bool) -> None:
    """Makes `folder` the run's directory and writes run.json.

    Raises `PathError`; with `resume`, `CacheError` and `ConfigError` where its newest checkpoint does not fit `setup`.
    """
    _check_place(folder, setup)
    if (folder / "run.json").is_file() and not resume:
        raise PathError(f"{folder} holds a run already", hint=f"--resume goes on with it; or name another with "
                        f"-o, like {folder.name}-2")
    for newest in checkpoint.list_checkpoints(folder)[-1:]:
        state = checkpoint.read_state(newest)
        checkpoint.check_same(state, setup.manifest.digest, as_table(setup.config))
        if state.step > setup.steps:
            raise ConfigError(f"{folder} is at step {state.step} already, and the settings end at step {setup.steps}",
                              hint=f"--steps {state.step} or more, or another RUN with -o")
    checkpoint.remove_partial(folder)
    make_dirs(folder)
    write_atomic(folder / "run.json", json.dumps(_document(folder, setup, asked), indent=1).encode() + b"\n")


def _check_place(folder: Path, setup: Setup) -> None:
    if folder.exists() and not folder.is_dir():
        raise PathError(f"{folder} is a file, expected a directory for the run", hint="name another with -o")
    if folder.is_dir() and not (folder / "run.json").is_file() and any(folder.iterdir()):
        raise PathError(f"{folder} is not empty and is no run of train", hint="name another directory with -o")
    sources = [NamedPath(role="pictures", path=place) for place in setup.manifest.sources if place is not None]
    for other in (NamedPath(role="cache", path=setup.manifest.cache_root), *sources):
        if other.path.exists():
            check_disjoint([NamedPath(role="run", path=folder, may_hold=("cache", "pictures")), other])
    for parent in resolve(folder).parents:
        if (parent / MARKER).is_file():
            raise PathError(f"run {folder} lies in the cache {parent}", hint="name a directory outside with -o")


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises `PathError` when there is none, `ConfigError` for settings that are not ours."""
    path = folder / "run.json"
    try:
        body = json.loads(path.read_bytes())
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            raise PathError(f"{path} has format {body.get('format')!r} version {body.get('version')!r}, "
                            f"this program reads '{FORMAT}' version {VERSION}")
        asked = RunRequest(manifest=folder / PurePosixPath(body["manifest"]), model=_model(folder, body["model"]),
                           other_encoders=bool(body["other_encoders"]))
        table = dict(body["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PathError(f"{folder} is no run of train: cannot read {path.name}: {error}",
                        hint="name the directory that train run wrote (-o)") from None
    return Run(folder=folder, asked=asked, config=parse(table, str(path)), table=table)


def _document(folder: Path, setup: Setup, asked: RunRequest) -> dict[str, Any]:
    """Paths are relative to the run, so that both can move together."""
    model = asked.model
    if model is not None and Path(model).is_dir():
        return {**_facts(folder, setup, asked), "model": {"path": _relative(Path(model), folder)}}
    return {**_facts(folder, setup, asked), "model": None if model is None else {"hub": model}}


def _facts(folder: Path, setup: Setup, asked: RunRequest) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "manifest": _relative(asked.manifest, folder),
            "manifest_digest": setup.manifest.digest, "other_encoders": bool(setup.others) or asked.other_encoders,
            "config": as_table(setup.config)}


def _relative(path: Path, folder: Path) -> str:
    """`path` as seen from `folder`; absolute where nothing relative leads there, as to another drive."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.resolve().as_posix()


def _model(folder: Path, named: Mapping[str, str] | None) -> str | None:
    if named is None:
        return None
    return str(folder / PurePosixPath(named["path"])) if "path" in named else str(named["hub"])
