"""Renders the page about a run, and what the page of a sample has of it."""

from __future__ import annotations

import time
from typing import Any

from prep.digest import digest_strings
from prep.formatting import brief_duration
from prep.manifest.select import Query
from prep.pages.charts import Chart, Series, chart_of
from prep.pages.parts import plural
from prep.pages.run import charts, key_numbers
from prep.runs.heartbeat import Kind
from prep.runs.history import History
from prep.runs.losses import RELATIVE, Hardness
from prep.runs.state import TONES, WORDS, State, next_command
from prep.view.run import RunFiles, films
from prep.view.site import Site, card_of, loss_of

STEPS = 200  # with pictures, of a run
PROMPTS = 48
WORST = 12  # samples on a run's page
WARNINGS = 100
SHOWINGS = 500  # of a sample, in its chart
BUTTONS: dict[Kind, tuple[str, str]] = {  # and while that is asked
    "sample": ("Draw samples now", "Drawing after this step …"), "stop": ("Stop after this step",
                                                                          "Stopping after this step …")}
OFTEN, SELDOM = 2, 10  # seconds between looks of the page, while a run goes on and else


def run_page(site: Site, run: RunFiles) -> str:
    """The run so far: its state, curves, pictures through time, and its worst samples."""
    history, state, hard, data = run.history, run.state, site.hardness(), site.data
    strips, steps = films(history, STEPS), {grid.step for grid in history.grids}
    worst = data.selector.select(Query(sort="loss", descending=True))[:WORST].tolist()
    shown = 0 if hard is None else int((hard.shown > 0).sum())
    return site.render(
        "run.html", run=run.folder.resolve().name, curves=charts(history), films=strips[:PROMPTS],
        **_state(history, state), command=next_command(run.folder, state), token=site.edit_token, tag=run_tag(run),
        stats=key_numbers(history), note=_left_out(len(steps), len(strips)), shown=shown, relative=RELATIVE,
        cards=[card_of(site, data, number, given="?sort=loss&order=down", facts=loss_of(hard, number))
               for number in worst[:shown]],
        warnings=[(event["step"], str(event.get("text", ""))) for event in history.told
                  if event["event"] == "warning"][-WARNINGS:])


def _state(history: History, state: State) -> dict[str, Any]:
    """What the head of the page says of the run's state."""
    running, beat, steps = state.doing == "running", state.beat, history.steps
    ago = time.time() - beat.stepped if running and beat is not None and beat.step else None
    return {
        "state": f"{WORDS[state.doing]}: {state.step:,}{f' of {steps:,}' if steps else ''} steps",
        "tone": TONES[state.doing], "says": state.says, "every": OFTEN if running else SELDOM,
        "done": min(state.step / steps, 1.0) if steps else None,
        "ago": None if ago is None else f"{max(ago, 0):.1f}", "ago_text": "" if ago is None else brief_duration(ago),
        "asks": [(kind, words[kind in state.asked], kind in state.asked) for kind, words in BUTTONS.items()
                 ] if running else []}


def run_tag(run: RunFiles) -> str:
    """A name of what the page of a run shows, which is another one as soon as that changes."""
    state = run.state
    beat = state.beat
    told = (state.doing, state.step, state.asked, state.says, None if beat is None else beat.stepped)
    return f'"{digest_strings([repr(told), *run.stamps])[:32]}"'


def _left_out(steps: int, prompts: int) -> str:
    told = [f"{STEPS} of {steps:,} steps with pictures are shown, evenly spread."] if steps > STEPS else []
    told += [f"{PROMPTS} of {prompts:,} prompts are shown."] if prompts > PROMPTS else []
    return " ".join(told)


def loss_facts(hard: Hardness | None, number: int) -> list[tuple[str, str]]:
    """What a run knows of a sample."""
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
