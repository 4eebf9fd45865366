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
from prep.fs.mirror import shown as shown_place
from prep.fs.paths import NamedPath
from prep.manifest.document import read_manifest
from prep.pages.parts import Column, Head, Section, Stat, Table, plural
from prep.pages.run import charts, key_numbers
from prep.pages.snapshot import Origin, Pictures, check_page_file, render_snapshot
from prep.runs.events import NAME as LOG
from prep.runs.events import Event, read_events
from prep.runs.history import History, read_history
from prep.runs.losses import RELATIVE
from prep.runs.state import TONES, WORDS, State, state_of
from train.models.adapters.readers import KINDS
from train.report import pictures as shown
from train.report.provenance import checkpoints, provenance, settings
from train.runs.checkpoint import list_checkpoints
from train.runs.directory import Run, own_manifest, read_run
from train.runs.watch import line

NAME = "report.html"
WORST = 24
EVENTS = 200  # rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a page was made of."""

    path: Path
    size: int  # bytes
    history: History
    prompts: int
    worst: int
    pictures: int  # without room on the page


def write_report(folder: Path, output: Path | None, made: date, *, worst: int = WORST,
                 manifest: Path | None = None, cache: Path | None = None) -> Written:
    """Writes the page of the run in `folder` to `output` (default: RUN/report.html), atomically.

    Reads a run that goes on as it is now. Replaces nothing but an earlier page. Raises `PathError`, `CacheError` if
    run.json or the log is damaged, `ManifestError` for a `manifest` that is named; what else is missing is missing on
    the page.
    """
    run, path = read_run(folder, manifest=manifest, cache=cache), folder / NAME if output is None else output
    _check_output(run, path)
    if worst and manifest is not None:  # what was named has to be there; where the run's own is gone, the page says so
        read_manifest(manifest, fetch=False)
    history = read_history(read_events(folder / LOG))
    room = Pictures()
    strips, left_out = shown.strips(folder, history.grids, room)
    hardest = shown.hardest(run, worst, manifest, room)
    text = page(run, history, made, strips, left_out, hardest)
    data = text.encode("utf-8")
    write_atomic(path, data)
    return Written(path=path, size=len(data), history=history, prompts=len(strips), worst=len(hardest.cards),
                   pictures=room.refused)


def _check_output(run: Run, path: Path) -> None:
    """Raises `PathError` unless the page may be written: apart from cache and pictures, over an earlier page only."""
    places: list[tuple[str, Path | None]] = []
    try:  # not the run's copy: paths are relative to the manifest
        manifest = read_manifest(run.asked.manifest, fetch=False, cache=run.asked.cache)
        places = [("cache", manifest.cache_root), *(("pictures", place) for place in manifest.sources)]
    except Problem:
        pass  # it has moved; the page is still not written over anything else
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in places
                           if place is not None and place.exists()))
    if path.suffix.lower() not in (".html", ".htm"):  # browsers show an HTML page of another name as its text
        raise PathError(f"{path} is not named like an HTML page, expected a name that ends in .html",
                        hint=f"-o {shell_name(str(path.with_suffix('.html')))}; a browser prints that, also as PDF")


def page(run: Run, history: History, made: date, strips: Sequence[shown.Strip], left_out: str,
         hardest: shown.Hardest) -> str:
    """Renders the page, dated `made`."""
    curves = charts(history)
    validation, changed, same = _validation(history), settings(run, changed=True), settings(run, changed=False)
    events, saved = _events(history), checkpoints(run)
    sections = [
        Section(id="curves", title="Curves", note="" if curves else "The log has no steps yet."),
        Section(id="samples", title="Samples through time", count=len(strips), note=left_out if strips else (
            "The run has no sample pictures" + (" yet." if run.config.sample.every else ": sample.every is 0."))),
        Section(id="worst", title="Worst samples", count=len(hardest.cards), note=hardest.why or (
            f"{RELATIVE} The numbers are those of train worst.")),
        Section(id="events", title="Events", count=len(events.rows) + events.more),
        Section(id="settings", title="Settings", count=len(changed.rows),
                note="" if changed.rows else "All have their defaults."),
        Section(id="provenance", title="Provenance")]
    origin = Origin(name=run.folder.resolve().name, places=(shown_place(run.folder),), made=made)
    return render_snapshot("report.html", origin, scripted=True, head=_head(run, history), sections=sections,
                           curves=curves, validation=validation, strips=strips, hardest=hardest, events=events,
                           changed=changed, same=same, facts=[*_times(run, history), *provenance(run)], saved=saved)


def _head(run: Run, history: History) -> Head:
    config, done, steps = run.config, history.step, history.steps
    trained = f"{KINDS[config.lora.kind]} of rank {config.lora.rank}" if config.method == "lora" else "Full fine-tune"
    manifest = own_manifest(run)
    on = "" if manifest is None else f" for {manifest.family}, from {plural(_samples(manifest.document), 'sample')}"
    epochs = f", {done / history.steps_per_epoch:.1f} epochs" if history.steps_per_epoch else ""
    state = state_of(run.folder, history)
    return Head(
        kind="Training run", what=f"{trained}{on}", part=min(done / steps, 1.0) if steps else None,
        usable=f"{WORDS[state.doing]}: {done:,} of {plural(steps, 'step')}{epochs}", todo=_todo(run, history, state),
        tone=TONES[state.doing],  # type: ignore[arg-type]  # one of them
        stats=(*(Stat(value=value, label=label) for label, value in key_numbers(history)),
               Stat(value=f"{len(history.warnings):,}", label="warnings", tone="warning")))


def _samples(document: Mapping[str, Any]) -> int:
    return sum(document["samples"][role] for role in ("train", "prior"))


def _todo(run: Run, history: History, state: State) -> str:
    """What to do now."""
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


def _validation(history: History) -> list[Table]:
    """The newest validation loss by timestep, and by source if there are several."""
    if not history.validations:
        return []
    newest = history.validations[-1]
    step, tables = newest["step"], []
    pairs = list(zip(_list(newest.get("timesteps")), _list(newest.get("losses")), strict=False))
    if pairs:
        tables.append(Table(caption=f"Validation loss by timestep, at step {step:,}", columns=(
            Column(head="timestep", kind="number"), Column(head="loss", kind="number")),
            rows=tuple((_spelled(timestep), _spelled(loss)) for timestep, loss in pairs)))
    sources = newest.get("sources")
    if isinstance(sources, Mapping) and sources:
        rows = tuple((str(name), *(_spelled(part.get(key)) for key in ("loss", "spread", "samples")))
                     for name, part in sources.items() if isinstance(part, Mapping))
        tables.append(Table(caption=f"Validation loss by source, at step {step:,}", rows=rows, columns=(
            Column(head="source", kind="name"), *(Column(head=head, kind="number") for head in (
                "loss", "standard deviation", "samples")))))
    return tables


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _spelled(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}" if isinstance(value, float) else "–"


def _events(history: History) -> Table:
    """Starts, checkpoints, warnings and the end, in order; the newest if they are many."""
    rows = [(f"{event['step']:,}", event["event"], _text(event)) for event in history.told]
    more = max(0, len(rows) - EVENTS)
    return Table(caption="Events of the run", rows=tuple(rows[more:]), more=more, elsewhere="log.jsonl has all.",
                 columns=(Column(head="step", kind="number"), Column(head="event", kind="code"), Column(head="what")))


def _text(event: Event) -> str:
    try:
        return (line(event) or "").removeprefix(f"step {event['step']}: ")
    except (KeyError, TypeError, ValueError):  # an event of another program, or of a later version
        return str(event.get("text", ""))
