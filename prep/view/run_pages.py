"""Renders the page about a run, that of several runs, and the parts about a run on the page of a sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prep.digest import digest_strings
from prep.formatting import brief_duration
from prep.manifest.select import Query
from prep.pages.charts import Chart, Series, chart_of
from prep.pages.compare import Side, comparison
from prep.pages.layout import render
from prep.pages.overlay import Shot
from prep.pages.parts import plural
from prep.pages.run import Prompt, films_of, run_page
from prep.runs.document import read_document
from prep.runs.heartbeat import Kind
from prep.runs.history import Grid
from prep.runs.losses import Hardness
from prep.runs.sheets import keyed_prompts
from prep.runs.state import RunState, next_command
from prep.view.run import RunFiles
from prep.view.site import Site, card_of, loss_of

STEPS = 200  # with pictures, of a run
PROMPTS = 48
COMPARED_STEPS, COMPARED_PROMPTS = 60, 24  # of each run beside others
WORST = 12  # samples on a run's page
NO_PICTURES = "The run has no sample pictures yet, or sample.every is 0."
SHOWINGS = 500  # of a sample, in its chart
BUTTONS: dict[Kind, tuple[str, str]] = {  # and while that is asked
    "sample": ("Draw samples now", "Drawing after this step …"), "stop": ("Stop after this step",
                                                                          "Stopping after this step …")}
Cell = tuple[int, int, int]  # grid, picture in it, step
OFTEN, SELDOM = 2, 10  # seconds between looks of the page, while a run goes on and else


def page_of_run(site: Site, run: RunFiles) -> str:
    """The run so far: its state, curves, pictures through time, and its worst samples."""
    history, state, hard, data = run.history, run.state, site.hardness(), site.data
    films, note = films_of(history.grids, partial(_cells, history.grids), partial(_shot, site.base),
                           steps=STEPS, prompts=PROMPTS)
    shown = 0 if hard is None else int((hard.shown > 0).sum())
    worst = data.selector.select(Query(sort="loss", descending=True))[:min(WORST, shown)].tolist()
    page = run_page(
        history, state, films=films, films_note=note if films else NO_PICTURES,
        worst=[card_of(site, data, number, query="?sort=loss&order=down", facts=loss_of(hard, number))
               for number in worst],
        worst_note="" if shown else "The run has no losses of samples of this manifest yet.")
    return site.render(
        "run.html", live=True, name=run.folder.resolve().name, run=page, shown=shown,
        sections={section.id: section for section in page.sections}, command=next_command(run.folder, state),
        token=site.edit_token, tag=run_tag(run), **_process(state))


def _cells(grids: Sequence[Grid], number: int) -> dict[Prompt, Cell]:
    """The place of each prompt's picture in a grid; -1: the whole, if its prompts are not known."""
    return {prompt: (number, cell, grids[number].step) for cell, prompt in enumerate(keyed_prompts(grids[number]))} or {
        ("", 0): (number, -1, grids[number].step)}


def _shot(base: str, name: str, place: Cell) -> Shot:
    grid, cell, step = place
    return Shot(name=name, address=f"{base}/cell/{grid}/{'all' if cell < 0 else cell}?step={step}", lazy=True)


def _process(state: RunState) -> dict[str, Any]:
    """The words of the page's head on the process, and the requests that it takes."""
    running, beat = state.doing == "running", state.beat
    ago = time.time() - beat.stepped if running and beat is not None and beat.step else None
    return {
        "says": state.says, "every": OFTEN if running else SELDOM, "ago": None if ago is None else f"{max(ago, 0):.1f}",
        "ago_text": "" if ago is None else brief_duration(ago),
        "asks": [(kind, words[kind in state.requests], kind in state.requests) for kind, words in BUTTONS.items()
                 ] if running else []}


def run_tag(run: RunFiles) -> str:
    """A name of what the page of a run shows, which is another one as soon as that changes."""
    state = run.state
    beat = state.beat
    shown = (state.doing, state.step, state.requests, state.says, None if beat is None else beat.stepped)
    return f'"{digest_strings([repr(shown), *run.stamps])[:32]}"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A run beside others."""

    name: str
    base: str  # of the addresses of its pages
    files: RunFiles


def compared(runs: Sequence[tuple[str, RunFiles]]) -> list[Compared]:
    """Runs by the addresses of their pages; each named by its directory, and what that is in if another has the name.
    """
    folders = [files.folder.resolve() for _, files in runs]
    names = [folder.name for folder in folders]
    return [Compared(name=name if names.count(name) == 1 else f"{folder.parent.name}/{name}", base=base, files=files)
            for name, folder, (base, files) in zip(names, folders, runs, strict=True)]


def compare_page(runs: Sequence[Compared], base: str, *, home: str) -> str:
    """The page of several runs, with a link to the project's page at `home`, if there is one. Raises `PathError`,
    `CacheError`."""
    shown = comparison([_side(run) for run in runs])
    going = any(side.state.doing == "running" for side in shown.sides)
    return render("compare.html", base=base, home=home, edits=False, has_run=False, shown=shown,
                  every=OFTEN if going else SELDOM, tag=compare_tag(runs))


def compare_tag(runs: Sequence[Compared]) -> str:
    """A name of what that page shows, which is another one as soon as that changes."""
    return f'"{digest_strings([run_tag(run.files) for run in runs])[:32]}"'


def _side(run: Compared) -> Side:
    history, files = run.files.history, run.files
    films, _ = films_of(history.grids, partial(_cells, history.grids), partial(_shot, run.base), steps=COMPARED_STEPS,
                        prompts=COMPARED_PROMPTS)
    return Side(name=run.name, base=run.base, history=history, state=files.state,
                document=read_document(files.folder), films=films)


def facts_of_run(hard: Hardness | None, number: int) -> list[tuple[str, str]]:
    """Titles and values of a sample's loss in a run."""
    if hard is None:
        return []
    if not hard.shown[number]:
        return [("loss", "the run has not shown it")]
    return [("loss", f"{hard.ratio[number]:.2f} times the usual loss, {hard.loss[number]:.4f} on average"),
            ("shown", plural(int(hard.shown[number]), "time"))]


def loss_chart(site: Site, number: int) -> Chart | None:
    """The losses of a sample over the steps."""
    if site.run is None:
        return None
    points = site.run.losses_of(number)
    return chart_of("Its losses", [Series(name="loss, at random timesteps", kind="dots", points=points[-SHOWINGS:])],
                    axis="step", last=site.run.history.step, zero=True)
