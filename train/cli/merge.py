"""`train merge`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from prep.cli.console import put, put_json, say
from prep.cli.signature import choice
from prep.formatting import counted, format_bytes, printable
from prep.fs.place import OUTPUT, Local, place_of, require_local
from prep.runtime import defer_interrupts
from train.cli import averaging
from train.cli import options as opt

if TYPE_CHECKING:
    from prep.training.schema import Dtype
    from train.merging.directory import Merged, MergeRequest

DTYPES = ("float32", "float16", "bfloat16")


def merge(
    lora: Annotated[list[Path], typer.Argument(
        metavar="LORA", help="a LoRA file of any trainer, or the directory or URL of a run (of a LoRA, or of all "
        "weights) or of one of its checkpoints; several: they are averaged", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="the directory to write, which must not exist; of "
                                         "several, and with --ema, a .safetensors file", show_default=False)],
    weights: Annotated[str | None, typer.Option(
        metavar="NUMBERS", help="of several: the part of each in the average, as 0.7,0.3 (default: equal)",
        show_default=False)] = None,
    rank: Annotated[int | None, typer.Option(
        help="of several LoRA files: the most that a layer has (default: the sum of theirs, which is exact)", min=1,
        max=4096, show_default=False)] = None,
    ema: Annotated[float | None, typer.Option(
        metavar="LENGTH", help="of one run with ema.snapshots: write the average of its weights of this length, in "
        "parts of the training time, as a .safetensors file", min=0.01, max=0.28, show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="directory, single file or Hub id (default: the run's); needed if "
                                                  "it has moved, and with a LoRA file")] = None,
    strength: Annotated[float, typer.Option(help="factor of what the LoRA adds", min=-10, max=10)] = 1.0,
    dtype: Annotated[str | None, choice(help="dtype of the denoiser's weights, or of an average (default: as they "
                                        "are)", words=DTYPES)] = None,
    download: opt.Download = False, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Add a LoRA to the weights of its model, and write a diffusers directory that needs no LoRA; or average results.

    Of a run that trained all weights, the directory has these, and the other parts of its model. README.md there is a
    model card. Several results of the same kind become one file of the same kind, their weighted average: -o
    mean.safetensors. With --ema one run becomes a file of a moving average of its weights.
    """
    from prep.errors import PathError, UsageError
    from train.runs.stored.reading import for_averages, for_merge

    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype is '{str(dtype)[:80]}', expected one of: {', '.join(DTYPES)}")
    require_local(output, "output", OUTPUT, UsageError)
    sources = [(for_merge if ema is None or len(lora) > 1 else for_averages)(place_of(each)) for each in lora]
    for source in sources:
        if not source.path.exists():
            raise PathError(f"{source} does not exist, expected a LoRA file or a run")
    chosen = cast("Dtype | None", dtype)
    if ema is not None:
        if len(sources) > 1:
            raise UsageError(f"--ema is for one run, but {len(sources)} are named", hint="name one run")
        _refuse({"--weights": weights, "--rank": rank, "--model": model, "--strength": None if strength == 1 else
                 strength}, "without --ema")
        averaging.posthoc(sources[0], output, ema, chosen, as_json=as_json, quiet=quiet)
    elif len(sources) == 1:
        _refuse({"--weights": weights, "--rank": rank}, "of several results, but one is named")
        _into_model(sources[0], output, model, strength, chosen, download=download, as_json=as_json, quiet=quiet)
    else:
        _refuse({"--model": model, "--strength": None if strength == 1 else strength}, "of one result, which is added "
                "to its model, but several are named")
        averaging.average(sources, output, averaging.numbers(weights, len(sources)), rank, chosen, as_json=as_json,
                          quiet=quiet)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    """Raises `UsageError` if one of these options is given."""
    from prep.errors import UsageError

    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} is for the merge {reason}", hint=f"omit {name}")


def _into_model(source: Local, output: Path, model: str | None, strength: float, dtype: Dtype | None, *,
                download: bool, as_json: bool, quiet: bool) -> None:
    """Adds what was trained to its model."""
    from prep.cli.ticker import progress
    from prep.errors import UsageError
    from prep.models.hub import locate
    from prep.models.named import is_local
    from train.runs.directory import model_of, read_run, run_of

    named: str | Path | None = model
    if named is None and source.path.is_dir():
        named = model_of(read_run(run_of(source)), None)
    if named is None:
        parent = source.path.parent
        beside = f"name its run, {parent}, or " if (parent / "run.json").is_file() else ""
        raise UsageError("--model is missing: a LoRA file does not say where its model is",
                         hint=f"{beside}add --model DIR")
    with defer_interrupts():
        from train.merging.directory import MergeRequest, merge

    folder = locate(named, download=download)
    request = MergeRequest(lora=source.path, model=folder, output=output, strength=strength, dtype=dtype,
                           hub_id=None if is_local(named) else str(named))
    with progress("merging", None, unit="files", shown=not quiet) as tick:
        done = merge(request, tick)
    _show(done, request, as_json)


def _show(done: Merged, request: MergeRequest, as_json: bool) -> None:
    """What was written, and what was left out."""
    for note in done.notes:
        say(f"note: {printable(note)}")
    if as_json:
        put_json({"format": "latentry/merge", "version": 1, "output": str(done.output), "lora": str(done.lora),
                  "sha256": done.sha256, "strength": request.strength, "layers": done.layers, "bytes": done.size})
    elif done.full:
        put(f"wrote {done.output}: the weights of {done.lora}, and the other parts of {request.model}, "
            f"{format_bytes(done.size)}")
    else:
        put(f"wrote {done.output}: {counted(done.layers, 'layer')} changed, {format_bytes(done.size)}")
