"""What `train check` and `train init` say of the memory that a run takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.ticker import progress_unless
from prep.errors import OutOfMemoryError, first_line
from prep.formatting import format_bytes
from prep.progress import phase
from prep.runtime import defer_interrupts

if TYPE_CHECKING:
    from train.memory.forecast import Forecast
    from train.setup import Setup

MemoryOpt = Annotated[str | None, typer.Option(
    "--memory", metavar="SIZE", help="estimate for a GPU with so much memory, like 12GB, or with --device cpu for such "
    "a computer (default: the device that is there)", show_default=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """What a run takes, and with which settings it would take less."""

    forecast: Forecast | None  # None: it cannot be estimated
    ways: Sequence[Forecast] = ()  # each with more settings changed; if one fits, the last
    note: str = ""  # why there is no forecast
    drawing: bool = False  # whether another model draws sample pictures
    vision: int = 0  # bytes of the model that embeds the pictures of checkpoints; 0: none are evaluated

    @property
    def fault(self) -> OutOfMemoryError | None:
        """What is wrong if the run surely does not fit."""
        forecast = self.forecast
        if forecast is None or not forecast.impossible:
            return None
        assert forecast.room.total is not None
        return OutOfMemoryError(
            f"a step of this run takes about {format_bytes(forecast.peak)} of memory, but {forecast.room.name} has "
            f"{format_bytes(forecast.room.total)}", hint=self._hint)

    @property
    def _hint(self) -> str:
        from train.memory.forecast import spelled

        if self.ways and self.ways[-1].fits:
            return f"{spelled(self.ways[-1].settings)} takes about {format_bytes(self.ways[-1].peak)}"
        least = f"; {spelled(self.ways[-1].settings)} takes {format_bytes(self.ways[-1].peak)}" if self.ways else ""
        return f"a device with more memory, or a smaller --resolution in prep encode{least}"

    @property
    def lines(self) -> list[str]:
        """What it takes, and if that is too much, a line for each of the ways to less."""
        from train.memory.forecast import spelled

        if self.forecast is None:
            return [f"note: {self.note}"] if self.note else []
        lines = [self.forecast.line]
        if self.drawing and self.forecast.drawing > self.forecast.peak:
            lines.append(f"note: sample pictures take {format_bytes(self.forecast.drawing)}, since there are two "
                         "denoisers, and what their own passes need")
        if self.vision and self.forecast.resting + self.vision > self.forecast.peak:
            lines.append(f"note: evaluating a checkpoint takes {format_bytes(self.forecast.resting + self.vision)}, "
                         f"with the vision model ({format_bytes(self.vision)}), and what its passes need")
        if self.forecast.fits is False:
            lines.append("note: that is more than is free; these settings take less, those that cost least first:"
                         if self.ways else "note: that is more than is free, and no setting takes less")
            lines += [f"  {format_bytes(way.peak)} with {spelled(way.settings)}{way.elsewhere}" for way in self.ways]
        return lines

    @property
    def document(self) -> dict[str, Any] | None:
        """It as a part of the document of --json."""
        forecast = self.forecast
        if forecast is None:
            return None
        return {"device": forecast.room.kind, "parts": dict(forecast.parts), "peak": forecast.peak,
                "total": forecast.room.total, "free": forecast.room.free, "fits": forecast.fits,
                "ways": [{"settings": dict(way.settings), "peak": way.peak, "fits": way.fits} for way in self.ways]}


def fitting(setup: Setup | None, device: str, named: int | None, world: int | None) -> Fitting:
    """What a run takes on a device, or on one with so many bytes; shows progress. Raises `UsageError` for a device that
    is not there."""
    if setup is None:
        return Fitting(forecast=None)
    with defer_interrupts():
        from train.memory.forecast import forecast, vision_bytes, ways
        from train.memory.room import room_of

    room = room_of(device, named)
    try:
        with phase(progress_unless(False), "estimating memory"):
            result = forecast(setup, room, world=world or 1)
            less = tuple(ways(setup, result, world or 1)) if result.fits is False else ()
        return Fitting(forecast=result, ways=less, drawing=bool(setup.config.sample.model), vision=vision_bytes(setup))
    except Exception as error:  # a library may need data that a model without weights has not
        return Fitting(forecast=None, note=f"the memory of a run cannot be estimated: {first_line(error)[:200]}")
