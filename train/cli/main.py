"""The `train` commands. The only room of train that prints or exits; what it imports late keeps `--help` quick."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from prep.cli.console import put, put_json, run, say, say_problem
from prep.formatting import names_of, safe
from prep.runtime import held_back

if TYPE_CHECKING:
    from train.check import Asked, Report, Setup
    from train.config.load import Config

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Trains from a manifest; never loads a VAE or a text encoder while it does.")

ManifestArg = Annotated[Path, typer.Argument(metavar="MANIFEST", help="the manifest.json that prep encode wrote",
                                             show_default=False)]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="directory of the run (default: runs/NAME)")]
ConfigOpt = Annotated[Path | None, typer.Option("-c", "--config", help="settings; without it all have defaults")]
ModelOpt = Annotated[str | None, typer.Option(help="directory or Hub id (default: the manifest's)")]
Method = Annotated[str | None, typer.Option(help="lora or full")]
Steps = Annotated[int | None, typer.Option(help="optimizer steps in all")]
Epochs = Annotated[int | None, typer.Option(help="epochs in all, instead of steps")]
BatchSize = Annotated[int | None, typer.Option(help="samples per optimizer step")]
MicroBatch = Annotated[int | None, typer.Option(help="samples per forward pass")]
Underfill = Annotated[str | None, typer.Option(help="a bucket's last micro-batch: drop, partial or repeat")]
Seed = Annotated[int | None, typer.Option(help="of everything that is drawn")]
Precision = Annotated[str | None, typer.Option(help="auto, bf16 or fp32")]
Lr = Annotated[float | None, typer.Option(help="optimizer.lr")]
Rank = Annotated[int | None, typer.Option(help="lora.rank")]
Masked = Annotated[bool | None, typer.Option("--masked/--no-masked", help="loss.masked")]
Set = Annotated[list[str] | None, typer.Option("--set", help="any setting: --set lora.alpha=8", metavar="NAME=VALUE")]
Others = Annotated[bool, typer.Option("--allow-other-encoders", help="train a model whose VAE or text encoder did not "
                                      "make the cache; the output says so")]
Download = Annotated[bool, typer.Option("--download", help="fetch a Hub model that is not in the cache")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="nothing on stderr but warnings and errors")]


@app.command()
def check(
    manifest: ManifestArg, config: ConfigOpt = None, model: ModelOpt = None, method: Method = None, steps: Steps = None,
    epochs: Epochs = None, batch_size: BatchSize = None, micro_batch: MicroBatch = None, underfill: Underfill = None,
    seed: Seed = None, precision: Precision = None, lr: Lr = None, rank: Rank = None, masked: Masked = None,
    settings: Set = None, allow_other_encoders: Others = False, download: Download = False, as_json: AsJson = False,
) -> None:
    """Check everything that run checks, and show the step plan; nothing is trained and no model is loaded."""
    chosen = _settings(config, settings, {
        "method": method, "steps": steps, "epochs": epochs, "batch_size": batch_size, "micro_batch": micro_batch,
        "underfill": underfill, "seed": seed, "precision": precision, "optimizer.lr": lr, "lora.rank": rank,
        "loss.masked": masked})
    report = _check(_asked(manifest, model, download, allow_other_encoders), chosen)
    if as_json:
        put_json(_as_json(report))
    else:
        text = _as_text(report)
        if text:
            put(text)
    _stop_at_faults(report, told=as_json)


@app.command(name="run")
def run_(
    manifest: ManifestArg, config: ConfigOpt = None, model: ModelOpt = None,
    output: Output = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint of the run")] = False,
    method: Method = None, steps: Steps = None, epochs: Epochs = None, batch_size: BatchSize = None,
    micro_batch: MicroBatch = None, underfill: Underfill = None, seed: Seed = None, precision: Precision = None,
    lr: Lr = None, rank: Rank = None, masked: Masked = None, settings: Set = None, allow_other_encoders: Others = False,
    download: Download = False, device: Device = "auto", as_json: AsJson = False, quiet: Quiet = False,
) -> None:
    """Train. The manifest says which model and where its cache is; Ctrl-C keeps a checkpoint."""
    folder = output or Path("runs") / manifest.stem
    chosen = _settings(config, settings, {
        "method": method, "steps": steps, "epochs": epochs, "batch_size": batch_size, "micro_batch": micro_batch,
        "underfill": underfill, "seed": seed, "precision": precision, "optimizer.lr": lr, "lora.rank": rank,
        "loss.masked": masked}, folder if resume else None)
    asked = _asked(manifest, model, download, allow_other_encoders)
    report = _check(asked, chosen)
    _stop_at_faults(report)
    assert report.setup is not None
    for line in _uneven(report) if not quiet else ():
        say(line)

    from prep.fs.lock import hold
    from train.check import PATIENCE, check_shards
    from train.runs.directory import claim, held
    from train.runs.log import Log
    from train.runs.watch import watching

    with held_back():
        from train.device import choose
        from train.loop import train

    place = choose(device)
    index = report.setup.index
    with held(folder, report.setup), hold(index.cache, alone=False, patience=PATIENCE):  # prep gc holds it alone
        check_shards(index)  # it may have been here since
        claim(folder, report.setup, asked, resume=resume)
        with watching(quiet) as watch, Log(folder / "log.jsonl", watch) as log:
            train(report.setup, folder, place, log, resume=resume)
    if as_json:
        put_json(log.last)
    else:
        put(str(folder / log.last["result"]))


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run", show_default=False)],
    prompts: Annotated[Path | None, typer.Option(help="file of prompts (default: the manifest's)")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="the PNG to write")] = Path("grid.png"),
    checkpoint: Annotated[str | None, typer.Option(help="like step-000500 (default: the newest)")] = None,
    base: Annotated[bool, typer.Option("--base", help="the model as it was before training")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="before and after, side by side")] = False,
    manifest: Annotated[Path | None, typer.Option(help="where the manifest is now (default: where it was)")] = None,
    model: ModelOpt = None,
    steps: Annotated[int | None, typer.Option(help="of the sampler", min=1, max=1000)] = None,
    guidance: Annotated[float | None, typer.Option(help="1: none", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="of the noise each picture begins with", min=0)] = None,
    device: Device = "auto", download: Download = False, quiet: Quiet = False,
) -> None:
    """Make pictures with a run's newest checkpoint (its moving average, where there is one)."""
    from prep.cli.console import progress

    with held_back():
        from train.device import choose
        from train.sample import Wanted, show

    wanted = Wanted(folder=folder, prompts=prompts, checkpoint=checkpoint, manifest=manifest, model=model, steps=steps,
                    guidance=guidance, seed=seed, download=download,
                    which=("before", "after") if compare else ("before",) if base else ("after",))
    with progress("sampling", None, shown=not quiet):
        shown = show(wanted, choose(device), output)
    for warning in shown.warnings:
        say(f"warning: {warning}")
    put(str(output))


def _settings(path: Path | None, settings: list[str] | None, options: dict[str, Any],
              run_folder: Path | None = None) -> Config:
    """The settings of file and options; of the run that is resumed, where no file is named."""
    from train.config.load import load, option

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(option(text) for text in settings or ())
    if path is None and run_folder is not None and (run_folder / "run.json").is_file():
        from train.runs.directory import read

        return load(None, overrides, read(run_folder).table)
    return load(path, overrides)


def _asked(manifest: Path, model: str | None, download: bool, others: bool) -> Asked:
    from train.check import Asked

    return Asked(manifest=manifest, model=model, download=download, other_encoders=others)


def _check(asked: Asked, config: Config) -> Report:
    from train.check import check

    return check(asked, config)


def _stop_at_faults(report: Report, *, told: bool = False) -> None:
    for fault in report.faults if not told else ():
        say_problem(fault)
    if report.faults:
        raise typer.Exit(report.faults[0].exit_code)


def _uneven(report: Report) -> list[str]:
    """A line for samples that an epoch leaves out, and one for those it repeats."""
    lines = []
    for names, what in ((report.left_out, "left out of the first epoch"), (report.repeated, "shown again to fill up")):
        if names:
            lines.append(f"note: {len(names)} samples are {what}: {names_of(names, 5)}; train check lists all")
    return lines


def _as_json(report: Report) -> dict[str, Any]:
    return {"ok": not report.faults, "faults": [{"what": fault.message, "hint": fault.hint} for fault in report.faults],
            "steps_per_epoch": report.plan.steps_per_epoch if report.plan else 0,
            "left_out": list(report.left_out), "repeated": list(report.repeated)}


def _as_text(report: Report) -> str:
    lines = [] if report.setup is None else _what(report.setup)
    if report.plan is not None:
        lines.append(f"{sum(report.plan.counts)} showings an epoch, {report.plan.steps_per_epoch} steps of up to "
                     f"{report.plan.batch_size} samples in micro-batches of up to {report.plan.micro_batch}")
    if report.setup is not None:
        epochs = report.setup.steps / report.setup.plan.steps_per_epoch
        lines.append(f"{report.setup.steps} steps are {math.floor(epochs * 10) / 10} epochs; nothing stands in the way")
    lines += [f"left out: {safe(name)}" for name in report.left_out]
    lines += [f"shown again: {safe(name)}" for name in report.repeated]
    return "\n".join(lines)


def _what(setup: Setup) -> list[str]:
    """What would be trained, and on what."""
    config, manifest = setup.config, setup.manifest
    dtypes = {name: "/".join(str(array["dtype"]) for array in each.arrays.values())
              for name, each in manifest.fields.items()}
    unused = "" if config.loss.masked else " (not used: loss.masked is off)"
    black = f", {setup.index.black} of them black everywhere" if setup.index.black else ""
    masked = f" for {setup.index.masked} of {len(setup.index.samples)}{black}{unused}"
    fields = [f"{name} {dtype}{masked if name == 'mask' else ''}" for name, dtype in sorted(dtypes.items())]
    held_out = sum(len(members) for members in setup.index.validation)
    what = f"a LoRA of rank {config.lora.rank} on" if config.method == "lora" else "every weight of"
    return [f"{what} {safe(str(setup.model))} ({manifest.family}, {setup.prediction})",
            f"{len(setup.index.samples) - held_out} samples to train on and {held_out} to validate on in "
            f"{len(manifest.buckets)} buckets: {', '.join(fields)}"]


def main() -> NoReturn:
    """The console script `train`."""
    run(app, "train")
