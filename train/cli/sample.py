"""`train sample`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli.console import put, say
from prep.cli.signature import option_of
from prep.errors import UsageError
from prep.formatting import printable
from prep.fs.place import OUTPUT, maybe_place, place_of, require_local
from prep.models.device.named import require_device
from prep.progress import phase
from prep.runs.document import read_document
from prep.runtime import defer_interrupts
from prep.training.table import SETTINGS
from train.cli import options as opt

MOST = 10  # of a weight

if TYPE_CHECKING:
    from train.sample import Encode


def sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run, or its URL",
                                           show_default=False)],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="a prompt, encoded if the cache lacks it; "
                                                     "may contain --n, --w, --h, --d, --s, --l, --ref, --mask "
                                                     "as in a file; --ref, --mask: a picture that is encoded")] = None,
    prompts: Annotated[Path | None, typer.Option(help="file of prompts (default: the manifest's)")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="the PNG to write; replaces only an "
                                                "earlier grid (default: grid.png, or grid-2.png if that is there, and "
                                                "so on)")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="name, like step-000500 (default: the newest)")] = None,
    base: Annotated[bool, typer.Option("--base", help="use the model as it was before training")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="show before and after training side by side")] = False,
    weights: Annotated[str | None, typer.Option(metavar="LIST", help="weights of the LoRA, each in a column: -1,0,1 "
                                                "(default: 1, and these of a slider)")] = None,
    manifest: Annotated[Path | None, typer.Option(help="the manifest, if it has moved since training")] = None,
    cache: opt.MovedCache = None,
    model: opt.ModelOfRun = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="diffusers' scheduler, as sample.sampler")] = None,
    steps: Annotated[int | None, option_of(SETTINGS["sample.steps"], "--steps", help="sampler steps, also of prompts "
                                           "in a file with --s")] = None,
    guidance: Annotated[float | None, option_of(SETTINGS["sample.guidance"], "--guidance", help="classifier-free "
                                                "guidance scale; 1: none; also of prompts in a file with --l")] = None,
    seed: Annotated[int | None, option_of(SETTINGS["sample.seed"], "--seed", help="random seed of the initial noise, "
                                          "also of prompts in a file with --d")] = None,
    device: opt.Device = "auto", download: opt.Download = False, quiet: opt.Quiet = False,
) -> None:
    """Make pictures with a run's newest checkpoint. Uses its moving average, if it has one."""
    from prep.cli.ticker import progress_unless
    from prep.recipe.prompts import parse_prompt
    from train.runs.stored.reading import for_losses, for_weights

    if prompt and prompts is not None:
        raise UsageError("--prompt and --prompts are both given, expected one of them")
    if base and compare:
        raise UsageError("--base is given with --compare, which shows the model before training anyway",
                         hint="omit one of them")
    if base and checkpoint is not None:
        raise UsageError("--base is given with --checkpoint, but it shows the model before training",
                         hint="omit one of them")
    require_device(device)
    output, columns = output or unused_picture("grid"), _numbers(weights, base or compare)
    texts = tuple(parse_prompt(text, "--prompt") for text in prompt or ())
    require_local(output, "output", OUTPUT, UsageError)
    if prompts is not None:
        require_local(prompts, "prompt file")
    run = for_losses(place_of(folder)) if base else for_weights(place_of(folder), checkpoint)
    read_document(run.path)  # refuses what is no run, before the libraries are imported
    with defer_interrupts():
        from prep.models.tensors import pick_device
        from train.sample import SampleRequest, show

        encode: Encode | None = None
        if texts:
            from train.sampling.text import encode_prompts

            encode = encode_prompts
    wanted = SampleRequest(run=run, prompts=prompts, texts=texts, checkpoint=checkpoint,
                           manifest=maybe_place(manifest), cache=maybe_place(cache), model=model, steps=steps,
                           guidance=guidance, seed=seed, sampler=sampler, download=download, weights=columns,
                           which=("before", "after") if compare else ("before",) if base else ("after",))
    progress = progress_unless(quiet)
    with phase(progress, "sampling"):
        shown = show(wanted, pick_device(device), output, encode, progress)
    for warning in shown.warnings:
        say(f"warning: {warning}")
    put(str(output))


def _numbers(text: str | None, otherwise: bool) -> tuple[float, ...]:
    """The weights that were typed; none if what to show is said `otherwise`. Raises `UsageError`."""
    if text is None:
        return ()
    if otherwise:
        raise UsageError("--weights is given with --base or --compare, expected one of them",
                         hint="--weights 0,1 shows a LoRA before and after training")
    values = opt.numbers_in(text)
    if not values or not all(abs(value) <= MOST for value in values):
        raise UsageError(f"--weights is '{printable(text)}', expected numbers from -{MOST} to {MOST}, like -1,0,1")
    return values


def unused_picture(stem: str) -> Path:
    """A PNG of this name in the working directory that is not there yet: what was drawn before is kept."""
    names = (Path(f"{stem}{'' if number == 1 else f'-{number}'}.png") for number in range(1, 1 << 20))
    return next(place for place in names if not os.path.lexists(place))
