"""Renders the page about a run, and what the page of a sample has of it."""

from __future__ import annotations

from prep.formatting import clock
from prep.manifest.select import Query
from prep.report.pages.curves import Chart, Series, chart_of
from prep.report.pages.parts import plural
from prep.report.pages.run_curves import charts
from prep.runs.history import STATES, History
from prep.runs.losses import Hardness
from prep.view.run import RunFiles, films
from prep.view.site import Site, card_of

STEPS = 200  # with pictures, of a run
PROMPTS = 48
WORST = 12  # samples on a run's page
WARNINGS = 100
SHOWINGS = 500  # of a sample, in its chart
TONES = {"finished": "good", "stopped": "warning", "open": "info"}
HINTS = {"stopped": "To continue, run the same train run command again, with --resume.",
         "open": "Load this page again to see how far it is by then."}


def run_page(site: Site, run: RunFiles) -> str:
    """The run so far: its state, curves, pictures through time, and its worst samples."""
    history, hard = run.history, site.hardness()
    strips, steps = films(history, STEPS), {grid.step for grid in history.grids}
    worst = site.selector.select(Query(sort="loss", descending=True))[:WORST].tolist()
    shown = 0 if hard is None else int((hard.shown > 0).sum())
    of = f" of {history.steps:,}" if history.steps else ""
    return site.render(
        "run.html", run=run.folder.resolve().name, curves=charts(history), films=strips[:PROMPTS],
        state=f"{STATES[history.status]}: {history.step:,}{of} steps", tone=TONES[history.status],
        stats=_stats(history), hint=HINTS.get(history.status, ""), note=_left_out(len(steps), len(strips)), shown=shown,
        cards=[card_of(site.data, number, hard) for number in worst[:shown]],
        warnings=[(event["step"], str(event.get("text", ""))) for event in history.told
                  if event["event"] == "warning"][-WARNINGS:])


def _stats(history: History) -> list[tuple[str, str]]:
    smooth, held_out, best = history.smooth[-1:], history.held_out, history.lowest
    return [("loss, smoothed", f"{smooth[0][1]:.4g}" if smooth else "–"),
            ("validation loss", f"{held_out[-1][1]:.4g}" if held_out else "–"),
            ("lowest validation" if best is None else f"lowest, at step {best[0]:,}",
             "–" if best is None else f"{best[1]:.4g}"),
            ("samples per second", f"{history.samples / history.seconds:,.1f}" if history.seconds else "–"),
            ("in steps", clock(history.seconds))]


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
