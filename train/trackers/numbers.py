"""The numbers of a run that trackers show."""

from __future__ import annotations

from collections.abc import Iterator

from prep.runs.events import Event

_NUMBERS = ("loss", "lr", "grad_norm", "samples_per_second", "wait", "memory", "loss_scale")  # of a step
_SCORES = ("held_out", "training", "nearest", "drift", "copies", "prompt_fit")  # of an evaluated checkpoint


def numbers(event: Event) -> Iterator[tuple[str, float]]:
    """The numbers of an event, by name. One that is not finite is null in an event, and has none."""
    if event["event"] == "step":
        yield from ((name, event[name]) for name in _NUMBERS if event.get(name) is not None)
    elif event["event"] == "validation" and event["loss"] is not None:
        yield "validation/loss", event["loss"]
        sources = event.get("sources") or {}
        if len(sources) > 1:
            yield from ((f"validation/{name}", part["loss"]) for name, part in sources.items()
                        if part["loss"] is not None)
    elif event["event"] == "evaluation":
        yield from ((f"evaluation/{name}", event[name]) for name in _SCORES if event.get(name) is not None)
