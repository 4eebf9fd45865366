"""The page of a run, as `train report` writes it and `prep view` shows it: state, curves, samples, worst samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prep.formatting import clock, pace
from prep.pages.charts import Chart, Series, chart_of
from prep.pages.overlay import Shot
from prep.pages.parts import Card, Column, Head, Section, Stat, Table, plural
from prep.runs.events import Event
from prep.runs.history import SMOOTH, Grid, History, Point, smoothed
from prep.runs.lines import line
from prep.runs.losses import RELATIVE
from prep.runs.sheets import spread_grids
from prep.runs.state import TONES, WORDS, RunState

EVENTS = 200  # rows
FEW = 50  # steps, of which a smoothed loss is mostly noise
Prompt = tuple[str, int]  # its text, and how many pictures before it in the grid have the same; "": a whole grid
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A prompt's picture at a step."""

    step: int
    shot: Shot


@dataclass(frozen=True, kw_only=True, slots=True)
class Film:
    """The pictures of one prompt, in order of their steps."""

    prompt: str  # "": whole grids, of a log that does not know their prompts
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPage:
    """The contents of a run's page."""

    head: Head
    curves: Sequence[Chart]
    validation: Sequence[Table]  # the newest losses
    films: Sequence[Film]
    worst: Sequence[Card]
    events: Table
    sections: tuple[Section, ...]


def run_page(history: History, state: RunState, *, films: Sequence[Film], films_note: str, worst: Sequence[Card],
             worst_note: str, what: str = "", todo: str = "") -> RunPage:
    """Puts together what `templates/run.html` shows; `worst_note` says why there are no worst samples, if so."""
    curves, events = charts(history), _events(history)
    return RunPage(
        head=_head(history, state, what, todo), curves=curves, validation=_validation(history), films=films,
        worst=worst, events=events, sections=(
            Section(id="curves", title="Curves", note="" if curves else "The log has no steps yet."),
            Section(id="samples", title="Samples through time", count=len(films), note=films_note),
            Section(id="worst", title="Worst samples", count=len(worst),
                    note=worst_note or f"{RELATIVE} The numbers are those of train worst."),
            Section(id="events", title="Events", count=len(events.rows) + events.more)))


def _head(history: History, state: RunState, what: str, todo: str) -> Head:
    steps, done = history.steps, state.step
    epochs = f", {done / history.steps_per_epoch:.1f} epochs" if history.steps_per_epoch else ""
    amount = f"{done:,} of {plural(steps, 'step')}" if steps else plural(done, "step")
    return Head(
        kind="Training run", what=what, part=min(done / steps, 1.0) if steps else None, todo=todo,
        usable=f"{WORDS[state.doing]}: {amount}{epochs}",
        tone=TONES[state.doing],  # type: ignore[arg-type]  # one of them
        stats=(*(Stat(value=value, label=label) for label, value in _key_numbers(history)),
               Stat(value=f"{len(history.warnings):,}", label="warnings", tone="warning")))


def films_of(grids: Sequence[Grid], pictures: Callable[[int], Mapping[Prompt, T]], shot: Callable[[str, T], Shot], *,
             steps: int, prompts: int) -> tuple[list[Film], str]:
    """Puts the sampled pictures together by prompt, and says what is left out, of steps and prompts beyond these.

    `pictures` has those of a grid, by its number: none if they cannot be read; `shot` makes one for the page, with its
    name.
    """
    chosen = {number: pictures(number) for number in spread_grids(grids, steps)}
    every = list(dict.fromkeys(prompt for cells in chosen.values() for prompt in cells))
    films = [Film(prompt=prompt[0], frames=tuple(
        Frame(step=(step := grids[number].step),
              shot=shot(f"{prompt[0] or 'all prompts'}, at step {step:,}", cells[prompt]))
        for number, cells in chosen.items() if prompt in cells)) for prompt in every[:prompts]]
    taken, gone = len({grid.step for grid in grids}), sum(not cells for cells in chosen.values())
    notes = [
        f"{len(chosen)} of {taken:,} steps with pictures are shown, evenly spread; all are in samples."
        if taken > len(chosen) else "",
        f"{prompts} of {len(every):,} prompts are shown." if len(every) > prompts else "",
        f"{plural(gone, 'file')} of sample pictures cannot be read." if gone else ""]
    return films, " ".join(note for note in notes if note)


def loss_facts(ratio: float, loss: float, shown: int) -> tuple[str, ...]:
    """The facts of a sample's card on its losses in a run."""
    return (f"{ratio:.2f} times the usual loss", f"loss {loss:.4f}", f"shown {plural(shown, 'time')}")


def _events(history: History) -> Table:
    """Starts, checkpoints, warnings and the end, in order; the newest if they are many."""
    rows = [(f"{event['step']:,}", event["event"], _text(event)) for event in history.events]
    more = max(0, len(rows) - EVENTS)
    return Table(caption="Events of the run", rows=tuple(rows[more:]), more=more, elsewhere="log.jsonl has all.",
                 columns=(Column(head="step", kind="number"), Column(head="event", kind="code"), Column(head="what")))


def _text(event: Event) -> str:
    try:
        return (line(event) or "").removeprefix(f"step {event['step']}: ")
    except (KeyError, TypeError, ValueError):  # an event of another program, or of a later version
        return str(event.get("text", ""))


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


def _key_numbers(history: History) -> list[tuple[str, str]]:
    """Names and values, the validation loss first."""
    held_out, best, smooth = history.held_out, history.lowest, history.smooth
    speed, unit = pace(history.samples / history.seconds, "sample") if history.seconds else ("–", "samples per second")
    numbers = []
    if best is not None:
        numbers += [("validation loss", f"{held_out[-1][1]:.4g}"),
                  (f"lowest validation loss (step {best[0]:,})", f"{best[1]:.4g}")]
    if best is None or len(smooth) >= FEW:
        numbers.append(("loss, smoothed", f"{smooth[-1][1]:.4g}" if smooth else "–"))
    if proposed := _proposed(history):
        numbers.append(("proposed checkpoint", proposed))
    return [*numbers, (unit, speed), ("training time", clock(history.seconds))]


def _proposed(history: History) -> str:
    """The step of the checkpoint that a finished run's evaluations propose; "" if none is."""
    found = history.events[-1].get("proposal") if history.events else None
    name = str(found.get("checkpoint") or "") if isinstance(found, dict) else ""
    number = name.removeprefix("step-")
    return f"step {int(number):,}" if number.isdecimal() else name


def charts(history: History) -> list[Chart]:
    """Charts of loss, learning rate, throughput and gradient; those without a point are left out."""
    marks: dict[float, str] = {step: "resumed" for step in history.starts if step}
    axis, last = "step", history.steps
    speed = history.curves["samples_per_second"]
    waited = f"{history.waited / history.seconds:.0%} of the time went to waiting for data." if history.seconds else ""
    memory = history.curves["memory"]
    every = [
        chart_of("Loss", [
            Series(name="loss of the steps", kind="band", points=history.curves["loss"]),
            Series(name="smoothed", kind="line", points=history.smooth),
            Series(name="validation", kind="dots", points=history.held_out)], axis=axis, last=last, marks=marks,
            note=f"Smoothed over a fiftieth of the run. {_without(history)}".strip()),
        chart_of("Likeness of drawn pictures", [
            Series(name="to held-out pictures", kind="dots", points=history.scores["held_out"]),
            Series(name="to training pictures", kind="dots second", points=history.scores["training"]),
            Series(name="to their prompts", kind="dots third", points=history.scores["prompt_fit"])],
            axis=axis, last=last, marks=marks,
            note="The mean cosine with the nearest pictures of the data set, and with the prompt, of each evaluated "
            "checkpoint."),
        chart_of("Drift of pictures that should stay", [
            Series(name="drift", kind="dots", points=history.scores["drift"])], axis=axis, last=last, marks=marks,
            zero=True, note="0: as the base model draws them; 1: as far from those as these are from one another."),
        chart_of("Learning rate", [Series(name="rate", kind="line", points=history.curves["lr"])], axis=axis,
                 last=last, marks=marks, zero=True),
        chart_of("Throughput", [
            Series(name="samples per second", kind="band", points=speed),
            Series(name="smoothed", kind="line", points=_smooth(speed, last))], axis=axis, last=last, marks=marks,
            zero=True, note=waited),
        chart_of("Gradient norm", [
            Series(name="norm before clipping", kind="band", points=history.curves["grad_norm"]),
            Series(name="smoothed", kind="line", points=_smooth(history.curves["grad_norm"], last))], axis=axis,
            last=last, marks=marks, zero=True),
        chart_of("GPU memory in GiB", [Series(name="most so far", kind="line", points=[
            (step, value / (1 << 30)) for step, value in memory])], axis=axis, last=last, marks=marks, zero=True)]
    return [chart for chart in every if chart is not None]


def _smooth(points: Sequence[Point], steps: int) -> list[Point]:
    return list(smoothed(points, max(1.0, steps / SMOOTH)))


def _without(history: History) -> str:
    return "" if history.validations else "No validation loss: no sample is held out, or validation.every is 0."
