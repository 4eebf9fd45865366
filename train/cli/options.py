"""Options shared by the `train` commands, and their conversion to settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import fail, say
from prep.cli.options import AsJson as AsJson
from prep.cli.options import Device as Device
from prep.cli.options import Download as Download
from prep.cli.options import MovedCache as MovedCache
from prep.cli.signature import Command, choice, expand, parameter
from prep.errors import UsageError
from prep.formatting import printable
from prep.fs.place import Place, is_file, maybe_place, place_of
from prep.runtime import defer_interrupts
from prep.setting import Row
from prep.training.table import SETTINGS

if TYPE_CHECKING:
    from prep.errors import Problem
    from prep.training.schema import Config
    from train.setup import RunRequest, Setup

ManifestArg = Annotated[Path, typer.Argument(metavar="MANIFEST", help="the manifest.json that prep encode wrote, "
                                             "or that of prep push: s3://bucket/dataset/manifest.json",
                                             show_default=False)]
ManifestOrRuns = Annotated[Path | None, typer.Argument(
    metavar="MANIFEST", help="the manifest.json that prep encode wrote, or that of prep push: "
    "s3://bucket/dataset/manifest.json; with --resume and -o the run's, if it is not named", show_default=False)]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="directory of the run, or a place in a store: "
                                             "s3://bucket/runs/cat (default: runs/NAME)")]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint of the run")]
From = Annotated[str | None, typer.Option("--from", metavar="STEP", help="with --resume: continue from this "
                                          "checkpoint, like step-000500; newer ones are set aside")]
Adopt = Annotated[bool, typer.Option("--adopt", help="with --resume: accept changed data, model or settings; the "
                                     "result records it")]
ConfigOpt = Annotated[Path | None, typer.Option("-c", "--config", help="settings file (default: train.toml beside the "
                                                "manifest or in the current directory, or else all defaults)")]
ModelOpt = Annotated[str | None, typer.Option(help="directory, single file or Hub id (default: the manifest's)")]
ModelOfRun = Annotated[str | None, typer.Option("--model", help="directory, single file or Hub id (default: the "
                                                "run's); needed if it has moved since training")]
Set = Annotated[list[str] | None, typer.Option("--set", help="any setting, like lora.alpha=8; repeatable",
                                               metavar="NAME=VALUE")]
Others = Annotated[bool, typer.Option("--allow-other-encoders", help="train a model whose VAE or text encoder did not "
                                      "make the cache; the output records it")]
Init = Annotated[Path | None, typer.Option("--init-from", metavar="PATH", help="begin with these weights: a LoRA, a "
                                           "denoiser, a run or a checkpoint, here or in a store; the result "
                                           "records it")]
Quiet = Annotated[bool, typer.Option("--quiet", help="only warnings and errors on stderr")]
Given = Mapping[str, Any]  # values of settings that have an option of their own; None: not given
FLAGS: Mapping[str, str] = {
    "method": "--method", "steps": "--steps", "epochs": "--epochs", "batch_size": "--batch-size",
    "micro_batch": "--micro-batch", "underfill": "--underfill", "seed": "--seed", "precision": "--precision",
    "optimizer.lr": "--lr", "lora.rank": "--rank", "loss.masked": "--masked/--no-masked",
    "parallel.shard": "--shard/--no-shard", "compile": "--compile/--no-compile"}


def with_setting_options(command: Command) -> Command:
    """`command` with an option for each setting in `FLAGS` in place of its parameter `given`."""
    parameters = {name: _parameter(SETTINGS[name], flag) for name, flag in FLAGS.items()}
    return expand(command, "given", list(parameters.values()), lambda values: {
        name: values[parameter.name] for name, parameter in parameters.items()})


def _parameter(row: Row, flag: str) -> inspect.Parameter:
    """The option of a setting. The settings are checked together, and in a file alike, so it has no range here."""
    switch = "/" in flag
    text = row.spec.help + (f"; {row.name}" if "." in row.name else "") + (
        f" (default: {row.spec.derived})" if row.spec.derived else "")
    option = (choice(flag, help=text, words=row.spec.choices) if row.spec.choices and not switch else
              typer.Option(flag, help=text))
    kind = bool if switch else type(row.value)
    return parameter(row.name.replace(".", "_"), Annotated[kind | None, option], None)


def settings_of(config: Path | None, manifest: Path | None) -> Path | None:
    """The settings file of a new run: `config`, or else train.toml beside the manifest or here, which is printed.

    `None` if there is none. Raises `UsageError` if two files are found.
    """
    if config is not None or manifest is None:
        return config
    beside = place_of(manifest).parent / SETTINGS_FILE
    files = [path for path in (beside, Path(SETTINGS_FILE)) if is_file(path)]
    if len(files) == 2 and not files[0].samefile(files[1]):
        raise UsageError(f"there are two files of settings, {files[0]} and {files[1]}", hint=f"name one: -c {files[0]}")
    if files:
        say(f"settings: {printable(str(files[0]))}")
    return files[0] if files else None


SETTINGS_FILE = "train.toml"  # as `train init` writes it


def read_settings(path: Path | None, settings: list[str] | None, options: Mapping[str, Any],
                  before: Mapping[str, Any] | None = None) -> Config:
    """Settings from file and options; without a file, starts from `before`, the settings of the run to resume.

    Raises `UsageError` for two values of a setting, `ConfigError`.
    """
    from train.config.load import load_config, option, parts

    choices = [(name, value, _spelled(name, value)) for name, value in options.items() if value is not None]
    choices += [(*part, f"--set {text}") for text in settings or () for part in parts(*option(text))]
    overrides: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value, text in choices:
        if name in overrides and overrides[name] != value:
            raise UsageError(f"{name} is given twice, by {spelled[name]} and by {text}, expected one value",
                             hint="omit one of them")
        overrides[name], spelled[name] = value, text
    return load_config(path, overrides, before)


def _spelled(name: str, value: Any) -> str:
    """The option of its own that a setting was given by."""
    on, _, off = FLAGS[name].partition("/")
    return f"{on} {value}" if not off else on if value else off


def request_of(manifest: Place, model: str | None, download: bool, others: bool, init: Path | None = None,
               cache: Path | None = None) -> RunRequest:
    from train.runs.stored.reading import for_init
    from train.setup import RunRequest

    return RunRequest(manifest=place_of(manifest), model=model, download=download, other_encoders=others,
                      init=None if init is None else for_init(place_of(init)), cache=maybe_place(cache))


def numbers_in(text: str) -> tuple[float, ...]:
    """The numbers of a list with commas; none if one of them is no number."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return ()


def bytes_named(size: str | None, option: str) -> int | None:
    """The bytes of an option like --memory. Raises `UsageError`."""
    from prep.parse import Unparsed, bytes_of

    try:
        return None if size is None else bytes_of(size)
    except Unparsed as error:
        raise UsageError(f"{option} {error}") from None


def prompt_faults(setup: Setup | None) -> list[Problem]:
    """The faults of the prompt file's lines, if a new run makes sample pictures of it. When the file is edited beside a
    run, they are warnings."""
    from train.sampling.prompts import bad_lines

    return [] if setup is None or not setup.config.sample.every else [*bad_lines(setup.index)]


def check_compiler(config: Config, kind: str) -> None:
    """Raises `ConfigError` if settings ask for torch.compile, which lacks its compiler for a device of this kind."""
    if not config.compile:
        return
    with defer_interrupts():
        import torch

        from train.failures import of_compiler

        try:
            from prep.models.device.toolchain import missing_compiler
        except ImportError:  # another torch has its search elsewhere: then the first step finds out
            return
    if (error := missing_compiler(torch.device(kind))) is not None:
        raise of_compiler(error)


def stop_at_faults(faults: Sequence[Problem], *, printed: bool = False) -> None:
    """Ends the command if there are faults; `printed`: the command has already printed them."""
    if faults and printed:
        raise typer.Exit(faults[0].exit_code)
    if faults:
        fail(faults)
