"""Lists what a run was made from, down to digests: data, model, encoders, settings, checkpoints and the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prep.errors import Problem, first_line
from prep.formatting import format_bytes
from prep.fs.untrusted import size_regular, walk
from prep.models.fingerprint import digest_file
from prep.pages.parts import Column, Table
from prep.runs.documents import reason
from prep.training.table import SETTINGS, spell
from train.config.load import by_name
from train.models.adapters.frozen import PART
from train.runs.checkpoint import State, list_checkpoints, read_state
from train.runs.directory import RESULTS, Run, own_manifest

MOST_DIGESTED = 1 << 30  # bytes of a result, beyond which its digest would take minutes
Facts = list[tuple[str, str]]  # title, value


def provenance(run: Run) -> Facts:
    """Titles and values, digests in whole."""
    manifest = own_manifest(run)
    facts: Facts = [("manifest", str(run.request.manifest))]
    if manifest is not None:
        facts.append(("manifest, SHA-256", manifest.digest))
        facts += [(f"{name} that encoded, fingerprint", digest)
                  for name, digest in sorted(manifest.document["models"].items())]
    facts += [("model", str(run.request.model or "the manifest's"))]
    facts += [(f"{name}{'' if name == PART else ' that was trained'}, fingerprint", digest)
              for name, digest in sorted(run.base.items())]
    if run.request.other_encoders:
        facts.append(("encoders", "the model's differ from those that made the cache (--allow-other-encoders)"))
    if run.origin.recipe:
        facts.append(("recipe, SHA-256", run.origin.recipe))
    return [*facts, *_of_checkpoint(run), *_result(run)]


def _of_checkpoint(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the facts in the newest readable checkpoint on the data and on the weights at step 0."""
    state = next((candidate for folder in reversed(list_checkpoints(run.folder))
                  if isinstance(candidate := _state(run, folder), State)), None)
    if state is None:
        return
    if state.data is not None:
        yield "data that decides the steps, SHA-256", state.data.digest
    if state.init:
        yield "weights at step 0", f"{state.init['name']}, SHA-256 {state.init['sha256']}"
    for adopted in state.adopted:
        yield f"changed at step {adopted['step']} (--adopt)", "; ".join(adopted["changes"])


def _state(run: Run, folder: Path) -> State | Problem:
    try:
        return read_state(folder, complete=not run.local.partial)  # of a run in a store only this file is here
    except Problem as error:
        return error


def _result(run: Run) -> Iterator[tuple[str, str]]:
    for name in RESULTS:
        place = run.folder / name
        for path in walk(place) if place.is_dir() else [place] if place.is_file() else []:
            title = path.relative_to(run.folder).as_posix()
            try:
                size = size_regular(path)
                digest = "too large to digest here" if size > MOST_DIGESTED else f"SHA-256 {digest_file(path)}"
                yield title, f"{format_bytes(size)}, {digest}"
            except OSError as error:  # a link, for example, or gone since
                yield title, reason(error)


def checkpoints(run: Run) -> Table:
    """The files of each checkpoint with the digests that its state.json has; a damaged one says what is wrong."""
    rows: list[tuple[str, ...]] = []
    for folder in list_checkpoints(run.folder):
        state = _state(run, folder)
        if isinstance(state, Problem):
            rows.append((folder.name, first_line(state), "", ""))
        else:
            rows += [(folder.name, name, format_bytes(file.bytes), file.sha256 or "")
                     for name, file in sorted(state.files.items())]
    return Table(caption="Checkpoints and the digests of their files", rows=tuple(rows), columns=(
        Column(head="checkpoint", kind="code"), Column(head="file"), Column(head="size", kind="number"),
        Column(head="SHA-256", kind="name")))


def settings(run: Run, *, changed: bool) -> Table:
    """The settings that differ from their defaults, or the others."""
    rows = tuple((name, spell(value), *((_default(default),) if changed else ()))
                 for name, value in by_name(run.config).items()
                 if (value != (default := SETTINGS[name].default)) == changed)
    return Table(caption="Settings that differ from their defaults" if changed else "Settings at their defaults",
                 rows=rows, columns=(Column(head="setting", kind="code"), Column(head="value", kind="code"),
                                     *((Column(head="default", kind="code"),) if changed else ())))


def _default(value: Any) -> str:
    return "by the data" if value is None else spell(value)
