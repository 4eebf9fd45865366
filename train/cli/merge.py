"""`train merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from prep.cli.console import put, put_json, say
from prep.cli.signature import choice
from prep.formatting import counted, format_bytes, printable
from prep.fs.place import OUTPUT, place_of, require_local
from prep.runtime import defer_interrupts
from train.cli import options as opt

if TYPE_CHECKING:
    from prep.training.schema import Dtype
    from train.merging.directory import Merged, MergeRequest

DTYPES = ("float32", "float16", "bfloat16")


def merge(
    lora: Annotated[Path, typer.Argument(metavar="LORA", help="a LoRA file of any trainer, or the directory or "
                                         "URL of a run (of a LoRA, or of all weights) or of one of its checkpoints",
                                         show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="the directory to write; it must not exist",
                                         show_default=False)],
    model: Annotated[str | None, typer.Option(help="directory, single file or Hub id (default: the run's); needed if "
                                                  "it has moved, and with a LoRA file")] = None,
    strength: Annotated[float, typer.Option(help="factor of what the LoRA adds", min=-10, max=10)] = 1.0,
    dtype: Annotated[str | None, choice(help="dtype of the denoiser's weights (default: as they are)",
                                        words=DTYPES)] = None,
    download: opt.Download = False, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Add a LoRA to the weights of its model, and write a diffusers directory that needs no LoRA.

    Of a run that trained all weights, the directory has these, and the other parts of its model. README.md there is a
    model card.
    """
    from prep.cli.ticker import progress
    from prep.errors import PathError, UsageError
    from prep.models.hub import locate
    from prep.models.named import is_local
    from train.runs.directory import model_of, read_run, run_of
    from train.runs.stored.reading import for_merge

    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype is '{str(dtype)[:80]}', expected one of: {', '.join(DTYPES)}")
    require_local(output, "output", OUTPUT, UsageError)
    source = for_merge(place_of(lora))
    if not source.path.exists():
        raise PathError(f"{source} does not exist, expected a LoRA file or a run")
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
    request = MergeRequest(lora=source.path, model=folder, output=output, strength=strength,
                           dtype=cast("Dtype | None", dtype), hub_id=None if is_local(named) else str(named))
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
