"""`prep doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.app import LIBRARIES
from prep.cli.console import put, put_json, screen_width
from prep.errors import EXIT_FINDINGS, PathError


def doctor(
    directory: Annotated[Path | None, typer.Argument(
        help="the disk that will hold the caches; 64 MiB are written there and removed (default: your cache directory)",
        show_default=False)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Look at this computer: libraries, devices, memory, speed of the disk, missing extras.

    Exits with 1 if something will get in the way.
    """
    from prep.doctor.disk import check_disk
    from prep.doctor.libraries import check_extras, check_libraries
    from prep.doctor.machine import check_devices, check_machine
    from prep.fs.place import require_local
    from prep.fs.user_cache import make_private, user_cache
    from prep.report.terminal.doctor import as_json as document
    from prep.report.terminal.doctor import as_text

    folder = user_cache() if directory is None else directory
    if folder is None:
        raise PathError("there is no home directory to measure the disk in", hint="prep doctor DIRECTORY")
    require_local(folder, "DIRECTORY")
    if directory is None:
        make_private(folder)
    elif not folder.is_dir():
        raise PathError(f"{folder} is not a directory", hint="name the directory of caches, or its parent")
    groups = {"computer": check_machine(), "devices": check_devices(), "disk": check_disk(folder),
              "libraries": check_libraries(("latentry", *LIBRARIES)), "extras": check_extras()}
    if as_json:
        put_json(document(groups))
    else:
        put(as_text(groups, width=screen_width()))
    if any(check.state == "warning" for checks in groups.values() for check in checks):
        raise typer.Exit(EXIT_FINDINGS)
