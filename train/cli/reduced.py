"""What `train resize` and `train extract` print, and the options that they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import put, put_json, say
from prep.formatting import counted, format_bytes, printable, shell_name

if TYPE_CHECKING:
    from train.merging.reduced import Written

LoraOutput = Annotated[Path, typer.Option("-o", "--output", help="the .safetensors file to write", show_default=False)]
Keep = Annotated[float | None, typer.Option(metavar="PART", help="give each layer the smallest rank that keeps this "
                                            "part of its change, as a Frobenius norm: 0.98", min=0.0, max=1.0)]
Force = Annotated[bool, typer.Option("--force", help="replace an existing file")]


def show(kind: str, done: Written, more: dict[str, Any], as_json: bool) -> None:
    """A line for each layer, and what the whole file keeps."""
    for note in done.notes:
        say(f"note: {printable(note)}")
    if as_json:
        put_json({"format": f"latentry/{kind}", "version": 1, "output": str(done.output), **more, "kept": done.kept,
                  "bytes": done.size,
                  "layers": [{"name": each.layer, "before": each.before, "rank": each.rank, "norm": each.norm,
                              "kept": each.kept} for each in done.layers]})
        return
    put(f"{'rank':>9}  {'norm':>10}  {'kept':>7}  layer")
    for each in done.layers:
        ranks = f"{each.before}->{each.rank}"
        put(f"{ranks:>9}  {each.norm:10.4g}  {_percent(each.kept):>7}  {printable(each.layer)}")
    put(f"wrote {shell_name(str(done.output))}: {counted(len(done.layers), 'layer')}, {_percent(done.kept)} of the "
        f"whole change kept, {format_bytes(done.size)}")


def _percent(part: float) -> str:
    """A part, rounded down: 100% is all of it, but for rounding."""
    return f"{int(part * 1e4 + 1e-5) / 100:.2f}%"
