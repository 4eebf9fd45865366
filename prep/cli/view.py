"""`prep view`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say

if TYPE_CHECKING:
    from prep.manifest.opened import OpenedManifest
    from prep.view.model import ViewedModel


def view(
    what: Annotated[Path, typer.Argument(metavar="MANIFEST|RUN", help="a manifest.json on this computer, or the "
                                         "directory of a training run, finished or not", show_default=False)],
    manifest: Annotated[Path | None, typer.Option(help="of a RUN whose manifest has moved")] = None,
    model: Annotated[str | None, typer.Option(help="the model that made the cache, a directory or a Hub id: shows "
                                              "tokens, which of them are cut off, and decoded latents")] = None,
    since: Annotated[Path | None, typer.Option(help="an earlier manifest: shows both side by side, and which samples "
                                               "changed")] = None,
    port: Annotated[int, typer.Option(help="of 127.0.0.1 (default: a free one)", min=0, max=65535,
                                      show_default=False)] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open the address in your browser")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show a manifest in your browser: samples, search, filters, what training sees of each. Ends with Ctrl-C.

    Of a run, also its curves, its sampled pictures through time, and the loss of each sample.

    Nothing is changed. Only this computer is answered, and only with the token in the printed address.
    """
    _require_extra()
    from threading import Thread

    from prep.images.decode import quiet_pillow
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.view.app import build_app
    from prep.view.guard import new_token
    from prep.view.serve import HOST, Server, listen

    quiet_pillow()
    place, run = _found(what, manifest)
    token = new_token()
    opened = open_manifest(read_manifest(place))
    earlier = None if since is None else open_manifest(read_manifest(_here(since)))
    app, site = build_app(opened, token, run, None if model is None else _model(model, opened), earlier)
    here = listen(port)
    server = f"http://{HOST}:{here.getsockname()[1]}"
    first = "" if run is None else "run"

    def ready() -> None:
        url = f"{server}/{token}/{first}"
        if as_json:
            put_json({"format": "latentry/view", "version": 1, "url": url}, indent=None)
        else:
            put(url)
        say("Ctrl-C ends it")
        if open_browser:
            Thread(target=_open, args=(f"{server}{app.ticket(first)}",), daemon=True).start()

    try:
        Server(app, ready).run_until_stopped(here)
    finally:
        site.pictures.close()


def _model(named: str, opened: OpenedManifest) -> ViewedModel:
    from prep.models.hub import locate
    from prep.runtime import defer_interrupts

    with defer_interrupts():
        from prep.view.model import ViewedModel  # imports torch
    return ViewedModel(locate(named), opened.manifest)


def _here(manifest: Path) -> Path:
    from prep.fs.mirror import refuse_url

    refuse_url(manifest)
    return manifest


def _found(what: Path, manifest: Path | None) -> tuple[Path, Path | None]:
    """The manifest to show, and the run."""
    from prep.errors import UsageError
    from prep.runs.document import NAME, check_manifest, manifest_of

    _here(what)
    if not what.is_dir():
        if manifest is not None:
            raise UsageError(f"--manifest is for a RUN, but {what} is not a directory", hint=f"prep view {manifest}")
        return what, None
    if not (what / NAME).exists():
        raise UsageError(f"{what} is a directory without a {NAME}, expected a manifest or a training run",
                         hint="of pictures that are not encoded yet, prep scan SOURCE --html FILE.html makes a page")
    named = manifest_of(what)
    if manifest is None:
        check_manifest(what, named)
    return manifest or named, what


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
