"""Charts of a run's history, loss, learning rate, throughput, gradient, memory; and its key numbers."""

from __future__ import annotations

from collections.abc import Sequence

from prep.formatting import clock, pace
from prep.pages.charts import Chart, Series, chart_of
from prep.runs.history import SMOOTH, History, Point, smoothed

FEW = 50  # steps, of which a smoothed loss is mostly noise


def key_numbers(history: History) -> list[tuple[str, str]]:
    """Names and values, the validation loss first."""
    held_out, best, smooth = history.held_out, history.lowest, history.smooth
    speed, unit = pace(history.samples / history.seconds, "sample") if history.seconds else ("–", "samples per second")
    found = []
    if best is not None:
        found += [("validation loss", f"{held_out[-1][1]:.4g}"),
                  (f"lowest validation loss (step {best[0]:,})", f"{best[1]:.4g}")]
    if best is None or len(smooth) >= FEW:
        found.append(("loss, smoothed", f"{smooth[-1][1]:.4g}" if smooth else "–"))
    return [*found, (unit, speed), ("training time", clock(history.seconds))]


def charts(history: History) -> list[Chart]:
    """Charts of loss, learning rate, throughput and gradient; those without a point are left out."""
    marks: dict[float, str] = {step: "resumed" for step in history.starts if step}
    axis, last = "step", history.steps
    speed = history.curves["samples_per_second"]
    waited = f"{history.waited / history.seconds:.0%} of the time went to waiting for data." if history.seconds else ""
    memory = history.curves["memory"]
    found = [
        chart_of("Loss", [
            Series(name="loss of the steps", kind="band", points=history.curves["loss"]),
            Series(name="smoothed", kind="line", points=history.smooth),
            Series(name="validation", kind="dots", points=history.held_out)], axis=axis, last=last, marks=marks,
            note=f"Smoothed over a fiftieth of the run. {_without(history)}".strip()),
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
    return [one for one in found if one is not None]


def _smooth(points: Sequence[Point], steps: int) -> list[Point]:
    return list(smoothed(points, max(1.0, steps / SMOOTH)))


def _without(history: History) -> str:
    return "" if history.validations else "No validation loss: no sample is held out, or validation.every is 0."
