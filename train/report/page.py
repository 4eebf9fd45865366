"""Writes the page of `train report`: curves, samples through time, worst samples, settings, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from prep.errors import PathError, Problem
from prep.formatting import shell_name
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath
from prep.fs.place import Local, Place, is_here
from prep.manifest.document import read_manifest
from prep.pages.parts import Section, plural
from prep.pages.run import Film, run_page
from prep.pages.snapshot import EmbeddedPictures, PageOrigin, check_page_file, render_snapshot
from prep.runs.events import NAME as LOG
from prep.runs.events import read_events
from prep.runs.history import History, read_history
from prep.runs.state import RunState, state_of
from train.models.adapters.readers import KINDS
from train.report import pictures as shown
from train.report.provenance import checkpoints, provenance, settings
from train.runs.checkpoint import list_checkpoints
from train.runs.directory import Run, own_manifest, read_run

NAME = "report.html"
WORST = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A page that was written, and what is on it."""

    path: Path
    size: int  # bytes
    history: History
    prompts: int
    worst: int
    pictures: int  # without room on the page


def write_report(local: Local, output: Path | None, made: date, *, worst: int = WORST,
                 manifest: Place | None = None, cache: Place | None = None) -> Written:
    """Writes the page of a run to `output`, atomically. Default: RUN/report.html; of a run in a store,
    report.html in the working directory.

    Reads a run that goes on as it is now. Replaces nothing but an earlier page. Raises `PathError`, `CacheError` if
    run.json or the log is damaged, `ManifestError` for a `manifest` that is named; what else is missing is missing on
    the page.
    """
    run = read_run(local, manifest=manifest, cache=cache)
    path = output or local.new_file(NAME)
    _check_output(run, path)
    if worst and manifest is not None:  # what was named has to be there; where the run's own is gone, the page says so
        read_manifest(manifest, fetch=False)
    history = read_history(read_events(run.folder / LOG))
    room = EmbeddedPictures()
    films, note = shown.films(run.folder, history.grids, room)
    hardest = shown.hardest(run, worst, manifest, room)
    text = page(run, history, made, films, note, hardest)
    data = text.encode("utf-8")
    write_atomic(path, data)
    return Written(path=path, size=len(data), history=history, prompts=len(films), worst=len(hardest.cards),
                   pictures=room.refused)


def _check_output(run: Run, path: Path) -> None:
    """Raises `PathError` unless the page may be written: apart from cache and pictures, over an earlier page only."""
    places: list[tuple[str, Place | None]] = []
    try:  # not the run's copy: paths are relative to the manifest
        manifest = read_manifest(run.request.manifest, fetch=False, cache=run.request.cache)
        places = [("cache", manifest.cache), *(("pictures", place) for place in manifest.sources)]
    except Problem:
        pass  # it has moved; the page is still not written over anything else
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in places
                           if place is not None and is_here(place)))
    if path.suffix.lower() not in (".html", ".htm"):  # browsers show an HTML page of another name as its text
        raise PathError(f"{path} is not named like an HTML page, expected a name that ends in .html",
                        hint=f"-o {shell_name(str(path.with_suffix('.html')))}; a browser prints that, also as PDF")


def page(run: Run, history: History, made: date, films: Sequence[Film], note: str, hardest: shown.Hardest) -> str:
    """Renders the page, dated `made`; `note` is on the films that are left out."""
    changed, same, state = settings(run, changed=True), settings(run, changed=False), state_of(run.folder, history)
    none = "The run has no sample pictures" + (" yet." if run.config.sample.every else ": sample.every is 0.")
    about = run_page(history, state, films=films, films_note=note if films else none, worst=hardest.cards,
                     worst_note=hardest.why, what=_what(run), todo=_todo(run, history, state))
    sections = [
        *about.sections,
        Section(id="settings", title="Settings", count=len(changed.rows),
                note="" if changed.rows else "All have their defaults."),
        Section(id="provenance", title="Provenance")]
    origin = PageOrigin(name=run.folder.resolve().name, places=(str(run.local),), made=made)
    return render_snapshot("run.html", origin, scripted=True, live=False, head=about.head, sections=sections, run=about,
                           changed=changed, same=same, facts=[*_times(run, history), *provenance(run)],
                           saved=checkpoints(run))


def _what(run: Run) -> str:
    config, manifest = run.config, own_manifest(run)
    trained = f"{KINDS[config.lora.kind]} of rank {config.lora.rank}" if config.method == "lora" else "Full fine-tune"
    if manifest is None:
        return trained
    return f"{trained} for {manifest.family}, from {plural(_samples(manifest.document), 'sample')}"


def _samples(document: Mapping[str, Any]) -> int:
    return sum(document["samples"][role] for role in ("train", "prior"))


def _todo(run: Run, history: History, state: RunState) -> str:
    """The advice on what to do now."""
    again = ", with --resume" if list_checkpoints(run.folder) else "; it has no checkpoint yet"
    repeat = f"run the same train run command again{again}."
    if state.doing == "running":
        return "Make this page again later; prep view RUN shows the run as it goes."
    if state.doing == "unknown":
        return f"{state.says} If it is still running, make this page again later; if it was killed, {repeat}"
    if state.doing != "finished":
        return f"{state.says} To continue, {repeat}".strip()
    best, last = history.lowest, history.held_out[-1:]
    if best and last and best[0] < last[0][0] and last[0][1] > 1.02 * best[1]:
        return (f"The validation loss was lowest at step {best[0]:,}: compare a checkpoint from there, if it is kept, "
                "with train sample --checkpoint.")
    return (f"Nothing left to do. The result is {history.result}; train sample RUN --compare shows what it learned.")


def _times(run: Run, history: History) -> list[tuple[str, str]]:
    """When the run began and last wrote its log, and on what."""
    facts = [("begun", run.origin.started)] if run.origin.started else []
    try:
        last = datetime.fromtimestamp((run.folder / LOG).stat().st_mtime, UTC)
        facts.append(("log last written", last.strftime("%Y-%m-%dT%H:%M:%SZ")))
    except OSError:
        pass
    if history.device:
        facts.append(("device", history.device + (f", {plural(history.ranks, 'process', 'processes')}"
                                                  if history.ranks > 1 else "")))
    if history.parameters:
        facts.append(("trained parameters", f"{history.parameters:,}"))
    return facts
