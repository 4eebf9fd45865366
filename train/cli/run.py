"""`train run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli.console import put, put_json, say
from prep.formatting import counted, join_names
from prep.runtime import defer_interrupts
from train.cli import options as opt

if TYPE_CHECKING:
    from train.setup import CheckReport


def run(
    manifest: opt.ManifestArg, config: opt.ConfigOpt = None, model: opt.ModelOpt = None, output: opt.Output = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint of the run")] = False,
    method: opt.Method = None, steps: opt.Steps = None, epochs: opt.Epochs = None, batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None, underfill: opt.Underfill = None, seed: opt.Seed = None,
    precision: opt.Precision = None, lr: opt.Lr = None, rank: opt.Rank = None, masked: opt.Masked = None,
    settings: opt.Set = None, allow_other_encoders: opt.Others = False, download: opt.Download = False,
    device: opt.Device = "auto", as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Train from a manifest. It names the model and its cache; Ctrl-C keeps a checkpoint."""
    folder = output or Path("runs") / manifest.stem
    chosen = opt.read_settings(config, settings, {
        "method": method, "steps": steps, "epochs": epochs, "batch_size": batch_size, "micro_batch": micro_batch,
        "underfill": underfill, "seed": seed, "precision": precision, "optimizer.lr": lr, "lora.rank": rank,
        "loss.masked": masked}, folder if resume else None)
    asked = opt.request_of(manifest, model, download, allow_other_encoders)
    report = opt.check_all(asked, chosen)
    opt.stop_at_faults(report)
    assert report.setup is not None
    for line in _uneven(report) if not quiet else ():
        say(line)

    from prep.fs.lock import PATIENCE, lock_directory
    from train.check import check_shards
    from train.runs.directory import claim_run, lock_run
    from train.runs.log import Log
    from train.runs.watch import watching

    with defer_interrupts():
        from prep.loader.device import choose
        from train.loop import train

    place = choose(device)
    index = report.setup.index
    with lock_run(folder, report.setup), lock_directory(index.cache.root, exclusive=False, patience=PATIENCE):
        check_shards(index)  # it may have been here since
        claim_run(folder, report.setup, asked, resume=resume)
        with watching(quiet) as watch, Log(folder / "log.jsonl", watch, watch.progress) as log:
            train(report.setup, folder, place, log, resume=resume)
    if as_json:
        put_json({"format": "latentry/run-result", "version": 1, **log.last})
    else:
        put(str(folder / log.last["result"]))


def _uneven(report: CheckReport) -> list[str]:
    """A line for samples that an epoch leaves out, and one for those it repeats."""
    lines = []
    for names, what in ((report.left_out, "left out of the first epoch"), (report.repeated, "repeated to fill up")):
        if names:
            lines.append(f"note: {counted(len(names), 'sample')} {what}: {join_names(names, 5)}; train check lists all")
    return lines
