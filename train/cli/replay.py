"""`train replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import put, put_json, say
from prep.formatting import format_size, printable, shell_name
from prep.fs.place import maybe_place, place_of
from prep.geometry import Placement
from train.cli import options as opt

if TYPE_CHECKING:
    from train.show_step import ShownReference, ShownSample


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run, or its URL",
                                           show_default=False)],
    step: Annotated[int, typer.Option(help="the step, counted from 1 as in the log", min=1, show_default=False)],
    manifest: Annotated[Path | None, typer.Option(help="the manifest, if it has moved since training")] = None,
    cache: opt.MovedCache = None,
    model: opt.ModelOfRun = None, as_json: opt.AsJson = False,
) -> None:
    """Show what a step was trained on: pictures, crops, captions, timesteps. Nothing is trained or read from shards."""
    from train.runs.pictures import spelled
    from train.runs.stored.reading import for_losses
    from train.show_step import replay as drawn_again

    replayed = drawn_again(for_losses(place_of(folder)), step, maybe_place(manifest), model, maybe_place(cache))
    for warning in replayed.warnings:
        say(f"warning: {printable(warning)}")
    if as_json:
        put_json({"format": "latentry/replay", "version": 1, "step": step, "epoch": replayed.epoch,
                  "samples": [_as_json(each) for each in replayed.samples]})
        return
    put(f"step {step}, in epoch {replayed.epoch}")
    for each in replayed.samples:
        put("\n  ".join([
            spelled(each.path, each.name, each.source, replayed.prefixes), _details(each),
            "without its caption" if each.caption is None else f"caption: {printable(each.caption)}",
            *(f"{_called(one, number, replayed.paired)}: {shell_name(str(one.path or one.name))}, "
              f"{_placed(one.placement)}" for number, one in enumerate(each.references, 1))]))


def _called(reference: ShownReference, number: int, paired: bool) -> str:
    if paired:
        return "at weight -1"
    return f"{'reference' if reference.shown else 'without its reference'} {number}"


def _details(each: ShownSample) -> str:
    """Bucket and crop, timestep, and loss if it is known."""
    weight = "" if each.weight == 1 else f", weight {each.weight:g}"
    loss = "" if each.loss is None else f", loss {each.loss:.4f}"
    return (f"forward pass {each.forward + 1}, bucket {_placed(each.placement)}, timestep {each.timestep}"
            f"{weight}{loss}")


def _placed(place: Placement) -> str:
    """A crop of a scaled picture."""
    x, y = place.crop
    return (f"{format_size(place.bucket)} at {x},{y} of {format_size(place.scaled)}"
            f"{', mirrored' if place.flip else ''}")


def _as_json(each: ShownSample) -> dict[str, Any]:
    return {"name": each.name, "source": each.source, "path": None if each.path is None else str(each.path),
            "forward": each.forward, **_placed_as_json(each.placement), "caption": each.caption,
            "timestep": each.timestep, "weight": each.weight, "loss": each.loss,
            **({"references": [
                {"name": one.name, "path": None if one.path is None else str(one.path), "number": number,
                 "shown": one.shown, **_placed_as_json(one.placement)}
                for number, one in enumerate(each.references, 1)]} if each.references else {})}


def _placed_as_json(place: Placement) -> dict[str, Any]:
    return {"bucket": list(place.bucket), "scaled": list(place.scaled), "crop": list(place.crop), "flip": place.flip}
