"""`prep studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli import serving
from prep.errors import PathError
from prep.fs.paths import resolve
from prep.fs.place import require_local


def studio(
    project: Annotated[Path, typer.Argument(metavar="PROJECT", help="a directory, in which commands are run and which "
                                            "has, or will have, a recipe, a cache, manifests and runs",
                                            show_default=False)],
    port: Annotated[int, typer.Option(help="of 127.0.0.1 (default: a free one)", min=0, max=65535,
                                      show_default=False)] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open the address in your browser")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Do the whole job in your browser: from a folder of pictures to a LoRA, with a queue of jobs.

    Each page shows the exact command that it runs. Jobs go on when this ends, and the queue when it is started again.
    Reachable from this computer only, and only with the token in the printed address.
    """
    serving.require_extra()
    from prep.cli.forms import step_forms
    from prep.images.decode import quiet_pillow
    from prep.studio.app import Studio
    from prep.view.guard import new_token

    quiet_pillow()
    place, token = resolve(require_local(project, "PROJECT")), new_token()
    if not place.is_dir():
        raise PathError(f"there is no directory {place}", hint=f"mkdir -p {project}")
    pages = Studio(place, step_forms(), token)
    try:
        serving.serve(pages.app, port, f"{token}/", "", "latentry/studio", open_browser=open_browser, as_json=as_json,
                      more={"edit_token": pages.edit_token})
    finally:
        pages.close()
