"""`train evaluate`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import explain_interruption, put, put_json, say
from prep.cli.signature import option_of
from prep.errors import UsageError
from prep.formatting import counted
from prep.fs.place import OUTPUT, Local, maybe_place, require_local
from prep.models.device.named import require_device
from prep.runs.document import read_document
from prep.runtime import defer_interrupts
from prep.training.table import SETTINGS
from train.cli import options as opt


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run, finished or not",
                                           show_default=False)],
    prompts: Annotated[Path | None, typer.Option(help="file of prompts (default: the manifest's)")] = None,
    neutral: Annotated[Path | None, typer.Option(
        help="file of prompts whose pictures should stay as the base model draws them (default: the run's "
        "evaluate.neutral, or no prompt)")] = None,
    seeds: Annotated[int | None, option_of(
        SETTINGS["evaluate.seeds"], "--seeds", help="pictures of each prompt, with one seed after the other (default: "
        "the run's evaluate.seeds, usually 4)")] = None,
    every: Annotated[int, typer.Option(metavar="N", help="evaluate each N-th checkpoint, counted from the newest",
                                       min=1)] = 1,
    embed: Annotated[str | None, typer.Option(metavar="MODEL", help="the vision model that made the manifest's "
                                              "embeddings, a directory or Hub id (default: the run's evaluate.embed, "
                                              "or that in the options of its prep encode)")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with the scores and the pictures; replaces only an "
                                              "earlier page")] = None,
    manifest: Annotated[Path | None, typer.Option(help="the manifest, if it has moved since training")] = None,
    cache: opt.MovedCache = None,
    model: opt.ModelOfRun = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="diffusers' scheduler, as sample.sampler")] = None,
    steps: Annotated[int | None, option_of(SETTINGS["sample.steps"], "--steps", help="sampler steps")] = None,
    guidance: Annotated[float | None, option_of(SETTINGS["sample.guidance"], "--guidance", help="classifier-free "
                                                "guidance scale; 1: none")] = None,
    seed: Annotated[int | None, option_of(SETTINGS["sample.seed"], "--seed", help="the first random seed of the "
                                          "initial noise")] = None,
    device: opt.Device = "auto", download: opt.Download = False, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Say which checkpoint of a run to take. Proposes, of those that copy no training picture and have a drift below 1,
    the one whose pictures resemble the held-out pictures most; the earliest of those that no other exceeds by more than
    two standard errors."""
    from prep.cli.ticker import progress_unless

    require_local(folder, "run", "copy it to a directory of this computer")
    read_document(folder)  # refuses what is no run, before the libraries are imported
    for path, role in ((prompts, "prompt file"), (neutral, "prompt file")):
        if path is not None:
            require_local(path, role)
    if html is not None:
        require_local(html, "output", OUTPUT, UsageError)
    require_device(device)
    explain_interruption("interrupted; the pictures so far are kept", "run the same command again to continue")
    with defer_interrupts():
        from prep.models.tensors import pick_device
        from train.sample import SampleRequest
        from train.selection.page import check_page, write_page
        from train.selection.run import EvaluateRequest
        from train.selection.run import evaluate as run_evaluate
    sample = SampleRequest(run=Local(folder), which=("after",), prompts=prompts, manifest=maybe_place(manifest),
                           cache=maybe_place(cache), model=model, steps=steps, guidance=guidance, seed=seed,
                           sampler=sampler, download=download)
    if html is not None:
        check_page(html)
    found = run_evaluate(EvaluateRequest(sample=sample, neutral=neutral, embed=embed, every=every, seeds=seeds or 0),
                         pick_device(device), progress_unless(quiet))
    if html is not None:
        write_page(found, html, date.today())
    for warning in found.warnings:
        say(f"warning: {warning}")
    if not quiet:
        kept = f"{found.kept.folder} keeps them for the next time" if found.drawn else f"all are in {found.kept.folder}"
        say(f"{counted(found.drawn, 'picture')} drawn; {kept}")
    if as_json:
        put_json(found.as_json())
    else:
        put(found.as_text())
