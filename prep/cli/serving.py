"""Live pages served from a command until Ctrl-C: `prep view` and `prep studio`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prep.cli.console import put, put_json, say
from prep.errors import UsageError

if TYPE_CHECKING:
    from prep.view.guard import Guard


def serve(app: Guard, port: int, path: str, first: str, document: str, *, open_browser: bool, as_json: bool,
          more: Mapping[str, str] | None = None) -> None:
    """Answers until Ctrl-C; prints the address, with --json in a document of this format, with what `more` has."""
    from threading import Thread

    from prep.view.serve import HOST, Server, listen

    here = listen(port)
    server = f"http://{HOST}:{here.getsockname()[1]}"

    def ready() -> None:
        url = f"{server}/{path}"
        if as_json:
            put_json({"format": document, "version": 1, "url": url, **(more or {})}, indent=None)
        else:
            put(url)
        say("Ctrl-C ends it")
        if open_browser:
            Thread(target=_open, args=(f"{server}{app.ticket(first)}",), daemon=True).start()

    Server(app, ready).run_until_stopped(here)


def require_extra() -> None:
    """Raises `UsageError` if what serves pages is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"live pages need the package {' and '.join(missing)}, which is not installed",
                         hint="pip install 'latentry[view]'")


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say("no browser was found here: open the address yourself")
