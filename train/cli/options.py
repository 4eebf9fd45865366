"""Options that the commands of `train` share, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import say_problem

if TYPE_CHECKING:
    from train.config.schema import Config
    from train.setup import CheckReport, RunRequest

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


def read_settings(path: Path | None, settings: list[str] | None, options: dict[str, Any],
                  run_folder: Path | None = None) -> Config:
    """The settings of file and options; of the run that is resumed, where no file is named."""
    from train.config.load import load_config, option

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(option(text) for text in settings or ())
    if path is None and run_folder is not None and (run_folder / "run.json").is_file():
        from train.runs.directory import read_run

        return load_config(None, overrides, read_run(run_folder).table)
    return load_config(path, overrides)


def request_of(manifest: Path, model: str | None, download: bool, others: bool) -> RunRequest:
    from train.setup import RunRequest

    return RunRequest(manifest=manifest, model=model, download=download, other_encoders=others)


def check_all(asked: RunRequest, config: Config) -> CheckReport:
    from train.check import check

    return check(asked, config)


def stop_at_faults(report: CheckReport, *, told: bool = False) -> None:
    for fault in report.faults if not told else ():
        say_problem(fault)
    if report.faults:
        raise typer.Exit(report.faults[0].exit_code)
