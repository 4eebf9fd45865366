"""What `train check --find-lr` prints of its test of learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import explain_interruption
from prep.cli.ticker import progress, progress_unless
from prep.fs.place import Place
from prep.runtime import defer_interrupts

if TYPE_CHECKING:
    from train.rates.find import Found
    from train.setup import Setup

FindLr = Annotated[bool, typer.Option("--find-lr", help="load the model, make 120 steps with a rising learning rate, "
                                      "suggest a rate, and throw the steps away: nothing is written")]


def finding(setup: Setup, device: str, place: Place) -> Found:
    """The test on a device. Raises as a run does."""
    from pathlib import Path

    from prep.fs.lock import PATIENCE, lock_directory

    with defer_interrupts():
        from prep.models.device.allocator import settled_heap
        from prep.models.tensors import pick_device
        from train.failures import Progress, explained
        from train.rates.find import STEPS, find_rate

    explain_interruption("interrupted; nothing was written", "run the same command again to start over")
    state = Progress(device=pick_device(device))
    with (lock_directory(setup.index.cache.root, exclusive=False, patience=PATIENCE), settled_heap(state.device),
          progress("finding a learning rate", STEPS, unit="steps") as tick, explained(setup, Path(str(place)), state)):
        return find_rate(setup, state, progress_unless(False), tick)


def lines_of(found: Found) -> Iterator[str]:
    """The result as text: the curve, and what it suggests."""
    from train.rates.curve import chart

    if len(found.points) > 1:
        yield "change of the loss by learning rate:"
        yield from chart(found.points)
    if found.diverged is not None:
        yield f"the steps diverged at a learning rate of {found.diverged:.1e}"
    rate, reason = found.suggestion.rate, found.suggestion.reason
    yield f"no learning rate is suggested: {reason}" if rate is None else f"suggested: --lr {rate:.1e} ({reason})"


def document(found: Found) -> dict[str, Any]:
    """It as a part of the document of --json."""
    said = found.suggestion
    return {"suggested": said.rate, "steepest": said.steepest, "lowest": said.lowest, "reason": said.reason,
            "diverged": found.diverged, "steps": found.steps, "points": [asdict(point) for point in found.points]}
