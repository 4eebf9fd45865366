"""Reads RUN/run.json, by which a directory is a training run (train/runs/directory.py writes it and reads the rest)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from prep.errors import CacheError, PathError
from prep.formatting import shell_name
from prep.fs.place import Local, Place, place_of
from prep.fs.remote.bucket import Bucket, is_object
from prep.fs.remote.copies import original_of
from prep.fs.remote.objects import size_of
from prep.parse import PATH, Unparsed, brief, expect
from prep.runs.documents import check_links, read_sealed, refused

NAME = "run.json"
FORMAT = "latentry/run"
VERSION = 3
MOVED = 4  # of a run whose cache is not where its manifest says
_OURS = "name the directory that train run wrote (-o)"
_SECOND = ("format", "version", "manifest", "manifest_digest", "data", "model", "base", "other_encoders", "config",
           "adopted")
_KEYS = {
    1: ("format", "version", "manifest", "manifest_digest", "model", "other_encoders", "config"),
    2: _SECOND, 3: (*_SECOND, "started", "recipe"), MOVED: (*_SECOND, "started", "recipe", "cache"),
}


def read_document(folder: Path) -> dict[str, Any]:
    """The run's document, its values unchecked. Raises `PathError` if there is none, `CacheError` if it is damaged, or
    if there is a link in the run's directory."""
    try:
        check_links(folder)
        return read_sealed(folder / NAME, FORMAT, _KEYS)
    except FileNotFoundError:
        if not folder.exists():
            raise PathError(f"{folder} does not exist, expected the directory of a run", hint=_OURS) from None
        raise PathError(f"{folder} is not a training run: it has no run.json", hint=_way_to(folder)) from None
    except (OSError, Unparsed) as error:
        if not folder.is_dir():
            raise PathError(f"{folder} is not a training run: it is not a directory", hint=_way_to(folder)) from None
        raise damaged(folder, error) from None


def _way_to(place: Path) -> str:
    """The hint for what is no run: the run in which it lies, if it is a checkpoint or a file of one."""
    if (place.parent / NAME).is_file():
        return f"name its run, {place.parent}"
    above = place.parent.parent
    if place.parent.name == "checkpoints" and (above / NAME).is_file():
        return f"name its run, {above}; train sample takes --checkpoint {place.name}"
    return _OURS


def damaged(folder: Path, error: Exception) -> CacheError:
    """The error for a document whose values are not those of a run."""
    return refused(folder / NAME, error, "remove it; --resume then takes the settings from the checkpoint, and the "
                   "model from --model or the manifest")


def path_text(value: Any, where: str) -> str:
    """A path in the document. Raises `Unparsed`."""
    text = expect(value, str, where)
    if not text or "\0" in text or len(text) > PATH:
        raise Unparsed(f"{where} is {brief(text)}, expected a path")
    return text


def place_in(folder: Path, named: str) -> Place:
    """The place that a run names by a path, usually relative to the run, or by a URL; the path of a copy means its
    object."""
    return place_of(named) if is_object(named) else original_of(folder / PurePosixPath(named))


def manifest_of(folder: Path) -> Place:
    """The manifest that the run in `folder` was trained on, also if it is gone. Raises `PathError`, `CacheError`."""
    try:
        return place_in(folder, path_text(read_document(folder)["manifest"], "manifest"))
    except Unparsed as error:
        raise damaged(folder, error) from None


def check_manifest(run: Local, manifest: Place) -> None:
    """Raises `CacheError` unless the manifest that a run names is a file, or is in a store."""
    if isinstance(manifest, Path) and not manifest.is_file():
        raise CacheError(f"the manifest of {run} is gone: {manifest} is not a file",
                         hint="name it with --manifest")


def check_not_stored(folder: Bucket) -> None:
    """Raises `PathError` if there is a run at a URL: for what shows runs on this computer only. Raises `StoreError`."""
    with suppress(FileNotFoundError):
        size_of((folder / NAME).url)
        raise PathError(f"{folder} is a training run in an object store, expected one on this computer",
                        hint=f"train report {shell_name(str(folder))} writes it as a page")
