"""`train extract`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from prep.cli.signature import choice
from prep.errors import ConfigError, UsageError
from prep.fs.place import OUTPUT, require_local
from prep.models.device.named import require_device
from prep.runtime import defer_interrupts
from train.cli import options as opt
from train.cli.reduced import Force, Keep, LoraOutput, show

if TYPE_CHECKING:
    from prep.training.schema import Dtype, Format

DTYPES, FORMATS = ("float32", "float16", "bfloat16"), ("auto", "kohya", "diffusers")


def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="the model that the other was made of: directory, single "
                                        "file or Hub id", show_default=False)],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="the changed model, or the directory of a run that "
                                         "trained all weights, or of one of its checkpoints", show_default=False)],
    output: LoraOutput,
    rank: Annotated[int, typer.Option(help="the most that a layer has", min=1, max=4096)] = 32,
    keep: Keep = None,
    targets: Annotated[list[str] | None, typer.Option(metavar="NAME", help="which layers, as lora.targets: a preset, "
                                                      "or the end of a layer's name; repeatable (default: all-linear)",
                                                      show_default=False)] = None,
    format_: Annotated[str, choice("--format", help="names of tensors, as lora.format", words=FORMATS)] = "auto",
    dtype: Annotated[str, choice(help="dtype of the file", words=DTYPES)] = "float32",
    force: Force = False, device: opt.Device = "auto", download: opt.Download = False, as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write a LoRA of what one model changed of another, and list what each layer keeps of it.

    Notes say how much of the difference is in what a LoRA cannot hold: norms, biases, text encoders, the VAE.
    """
    from prep.cli.ticker import progress
    from prep.models.hub import locate
    from prep.runs.document import NAME as RUN
    from prep.training.checks import PRESETS
    from prep.training.schema import Lora
    from train.runs.checkpoint import is_checkpoint

    for flag, value, words in (("--dtype", dtype, DTYPES), ("--format", format_, FORMATS)):
        if value not in words:
            raise UsageError(f"{flag} is '{value[:80]}', expected one of: {', '.join(words)}")
    require_device(device)
    require_local(output, "output", OUTPUT, UsageError)
    with defer_interrupts():
        from prep.models.tensors import pick_device
        from train.merging.extract import ExtractRequest, extract, pair_of

    named = ["all-linear"] if targets is None else targets
    settings = Lora(targets=named[0] if len(named) == 1 and named[0] in PRESETS else tuple(named),
                    format=cast("Format", format_))
    folder = Path(tuned)
    run = folder.is_dir() and ((folder / RUN).is_file() or is_checkpoint(folder))
    request = ExtractRequest(base=locate(base, download=download), output=output, rank=rank, keep=keep, lora=settings,
                             tuned=folder if run else locate(tuned, download=download), run=run, force=force,
                             dtype=cast("Dtype", dtype))
    try:
        pair = pair_of(request)
    except ConfigError as error:  # of settings that are options here
        error.hint = error.hint.replace("--set lora.format=", "--format ").replace("--set lora.targets=", "--targets ")
        raise
    with progress("extracting", len(pair.layers), unit="layers", shown=not quiet) as tick:
        done = extract(pair, pick_device(device), tick)
    show("extract", done, {"base": base, "tuned": tuned, "rank": rank, "keep": keep}, as_json)
