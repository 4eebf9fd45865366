"""`prep view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say


def view(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="a manifest.json on this computer",
                                             show_default=False)],
    port: Annotated[int, typer.Option(help="of 127.0.0.1 (default: a free one)", min=0, max=65535,
                                      show_default=False)] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open the address in your browser")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show a manifest in your browser: samples, search and filters, and what training sees of each. Ends with Ctrl-C.

    Nothing is changed. Only this computer is answered, and only with the token in the printed address.
    """
    _require_extra()
    from threading import Thread

    from prep.fs.mirror import refuse_url
    from prep.images.decode import quiet_pillow
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.view.app import build_app
    from prep.view.guard import new_token
    from prep.view.serve import HOST, Server, listen

    refuse_url(manifest)
    quiet_pillow()
    token = new_token()
    app, site = build_app(open_manifest(read_manifest(manifest)), token)
    here = listen(port)
    place = f"http://{HOST}:{here.getsockname()[1]}"

    def ready() -> None:
        url = f"{place}/{token}/"
        if as_json:
            put_json({"format": "latentry/view", "version": 1, "url": url}, indent=None)
        else:
            put(url)
        say("Ctrl-C ends it")
        if open_browser:
            Thread(target=_open, args=(f"{place}{app.ticket()}",), daemon=True).start()

    try:
        Server(app, ready).run_until_stopped(here)
    finally:
        site.pictures.close()


def _require_extra() -> None:
    from importlib.util import find_spec

    from prep.errors import UsageError

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"prep view needs the package {' and '.join(missing)}, which is not installed",
                         hint="pip install 'latentry[view]'")


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say("no browser was found here: open the address yourself")
