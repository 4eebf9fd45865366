"""`train init`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from prep.cli.console import put, say
from prep.errors import UsageError
from train.cli.memory import MemoryOpt, fitting
from train.cli.options import SETTINGS_FILE, Device, bytes_named, request_of, stop_at_faults


def init(
    manifest: Annotated[Path | None, typer.Argument(
        metavar="MANIFEST", help="a manifest.json, for settings with which a run of it fits into memory",
        show_default=False)] = None,
    memory: MemoryOpt = None, device: Device = "auto",
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")] = Path("train.toml"),
) -> None:
    """Write a commented train.toml with every setting and its default. Never replaces an existing file.

    With MANIFEST: with settings that take less memory, if the defaults take more than the device has, or --memory.
    """
    from prep.errors import PathError
    from prep.fs.atomic import make_dirs, new_file, write
    from prep.fs.place import require_local
    from prep.training.table import as_toml

    if manifest is None and memory is not None:
        raise UsageError("--memory is given without MANIFEST, but how much a run takes depends on its model and data",
                         hint="train init MANIFEST --memory SIZE")
    require_local(output, "settings file")
    make_dirs(output.absolute().parent)
    if output.is_symlink() or output.exists():
        raise PathError(f"{output} exists, expected a new file", hint="name another with -o")
    chosen = {} if manifest is None else _fitting(manifest, device, memory)
    with new_file(output) as file:
        write(file, as_toml(chosen).encode())
    named = "" if output.name == SETTINGS_FILE and output.parent == Path() else f" -c {output}"
    put(f"wrote {output}; train run MANIFEST{named} reads it")


def _fitting(manifest: Path, device: str, memory: str | None) -> Mapping[str, Any]:
    """Settings with which a run fits, as far as defaults do not. Raises `OutOfMemoryError` if there are none."""
    import tomllib

    from prep.errors import OutOfMemoryError
    from prep.formatting import format_bytes
    from prep.training.table import as_toml
    from train.check import check
    from train.config.load import parse

    report = check(request_of(manifest, None, False, False), parse(tomllib.loads(as_toml()), "train.toml"))
    stop_at_faults(report.faults)
    fit = fitting(report.setup, device, bytes_named(memory, "--memory"), None)
    for line in fit.lines:
        say(line)
    if fit.forecast is None or fit.forecast.fits is not False:
        return {}
    if not (fit.ways and fit.ways[-1].fits):
        raise OutOfMemoryError(f"no settings make a run of {manifest} fit: it takes "
                               f"{format_bytes(min(way.peak for way in (*fit.ways, fit.forecast)))}",
                               hint="a device with more memory, or a smaller --resolution in prep encode")
    return fit.ways[-1].settings
