"""A run's events as numbers over steps, whether it has ended, was stopped, was killed, or is still going."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prep.runs.events import Event

Status = Literal["finished", "stopped", "open"]  # open: the log has no end: `prep.runs.state` knows more
Point = tuple[int, float]  # step, value
SMOOTH = 50  # the moving average is over this part of the run
TOLD = ("start", "checkpoint", "evaluation", "warning", "stopped", "end")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Pictures that were sampled at a step, in one file."""

    step: int
    picture: str  # path in the run
    prompts: tuple[str, ...]  # of its pictures; fewer, or none in logs of earlier versions, if they are not known
    sizes: tuple[tuple[int, int], ...]  # of each picture


@dataclass(kw_only=True, slots=True)
class History:
    """A run's log as numbers over steps."""

    status: Status = "open"
    step: int = 0  # done
    steps: int = 0  # in total, by the newest start; 0: the log has no start
    steps_per_epoch: int = 0
    parameters: int = 0  # trained
    device: str = ""
    ranks: int = 1
    result: str = ""
    seconds: float = 0.0  # of all steps
    waited: float = 0.0  # of these, for data
    samples: int = 0  # showings
    starts: list[int] = field(default_factory=list)  # step of each start
    curves: dict[str, list[Point]] = field(default_factory=lambda: {
        name: [] for name in ("loss", "lr", "grad_norm", "samples_per_second", "memory")})
    validations: list[Event] = field(default_factory=list)  # that have a loss
    scores: dict[str, list[Point]] = field(default_factory=lambda: {
        name: [] for name in ("held_out", "training", "drift", "prompt_fit")})  # of evaluated checkpoints
    grids: list[Grid] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # events of `TOLD`

    @property
    def smooth(self) -> list[Point]:
        """The loss, smoothed over a fiftieth of the run, as in loss.png."""
        return list(smoothed(self.curves["loss"], max(1.0, self.steps / SMOOTH)))

    @property
    def held_out(self) -> list[Point]:
        """The validation loss."""
        return [(event["step"], event["loss"]) for event in self.validations]

    @property
    def lowest(self) -> Point | None:
        """Step and loss of the lowest validation loss; the earliest of several."""
        return min(self.held_out, key=lambda point: (point[1], point[0]), default=None)

    @property
    def warnings(self) -> list[str]:
        """The texts of the warnings."""
        return [str(event.get("text", "")) for event in self.events if event["event"] == "warning"]


def smoothed(losses: Iterable[Point], span: float) -> Iterator[Point]:
    """The exponential moving average over about `span` steps, without the bias of its beginning (Kingma & Ba 2015)."""
    keep, total, weight = 1 - 1 / max(span, 1.0), 0.0, 0.0
    for step, loss in losses:
        total, weight = keep * total + (1 - keep) * loss, keep * weight + (1 - keep)
        yield step, total / weight


def read_history(events: Iterable[Event]) -> History:
    """The history of a run from the events of its log; skips values of other types than expected."""
    history = History()
    for event in events:
        kind, step = event["event"], event["step"]
        history.step = max(history.step, step)
        if kind in TOLD:
            history.events.append(event)
        history.status = {"end": "finished", "stopped": "stopped"}.get(kind, "open")  # type: ignore[assignment]  # of them
        if kind == "start":
            _start(history, event)
        elif kind == "step":
            _step(history, event)
        elif kind == "evaluation":
            _points(history.scores, event)
        elif kind == "validation" and _number(event, "loss") is not None:
            history.validations.append(event)
        elif kind == "sample" and isinstance(event.get("picture"), str):
            history.grids.append(Grid(step=step, picture=event["picture"], prompts=_texts(event.get("prompts")),
                                      sizes=_sizes(event.get("sizes"))))
        elif kind == "end":
            history.result = str(event.get("result", ""))
    return history


def _start(history: History, event: Event) -> None:
    history.starts.append(event["step"])
    for name in ("steps", "steps_per_epoch", "parameters", "ranks"):
        value = event.get(name)
        if type(value) is int and value >= 0:
            setattr(history, name, value)
    history.device = str(event.get("device", ""))


def _step(history: History, event: Event) -> None:
    _points(history.curves, event)
    history.seconds += _number(event, "seconds") or 0.0
    history.waited += _number(event, "wait") or 0.0
    history.samples += int(_number(event, "samples") or 0)


def _points(curves: Mapping[str, list[Point]], event: Event) -> None:
    """Adds the numbers of an event to the curves of their names."""
    for name, points in curves.items():
        if (value := _number(event, name)) is not None:
            points.append((event["step"], value))


def _number(event: Event, name: str) -> float | None:
    value = event.get(name)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else None  # type: ignore[arg-type]  # a number


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    """Sizes of pictures; none unless all are."""
    pairs = value if isinstance(value, list) else []
    return tuple((pair[0], pair[1]) for pair in pairs) if all(map(_is_size, pairs)) else ()


def _is_size(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(type(side) is int and 0 < side < 1 << 16
                                                                 for side in pair)
