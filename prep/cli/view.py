"""`prep view`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.ticker import progress_unless
from prep.errors import PathError, UsageError
from prep.formatting import shell_name
from prep.recipe.options import BY_NAME

if TYPE_CHECKING:
    from prep.manifest.opened import OpenedManifest
    from prep.view.guard import Guard
    from prep.view.model import ViewedModel
    from prep.view.site import Site


NOT_SHOWN = ("model", "dtype", "compute", "max_length", "clip_skip", "text_windows", "text_quantization", "posterior",
             "tile", "prompts")


@opt.with_recipe_options(without=NOT_SHOWN)
def view(
    what: Annotated[Path, typer.Argument(
        metavar="SOURCE|MANIFEST|RUN", help="a directory of pictures, a recipe .toml or tars; a manifest.json on this "
        "computer; or the directory of a training run, finished or not", show_default=False)],
    manifest: Annotated[Path | None, typer.Option(help="of a RUN whose manifest has moved")] = None,
    model: Annotated[str | None, typer.Option(
        help="the model that made the cache, a directory or a Hub id: shows tokens, which of them are cut off, and "
        "decoded latents; for a SOURCE, the model whose buckets to show")] = None,
    since: Annotated[Path | None, typer.Option(help="an earlier manifest: shows both side by side, and which samples "
                                               "changed")] = None,
    scan: Annotated[bool, typer.Option("--scan", help="scan a SOURCE first, as prep scan does; else findings of "
                                       "earlier scans are shown")] = False,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    port: Annotated[int, typer.Option(help="of 127.0.0.1 (default: a free one)", min=0, max=65535,
                                      show_default=False)] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open the address in your browser")] = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Show pictures, a manifest or a run in your browser: samples, search, filters, what training sees of each.

    Pictures are shown before anything is encoded, in the buckets and crops that prep encode would choose. Of a run,
    also its curves, its sampled pictures through time, and the loss of each sample. Ends with Ctrl-C.

    Nothing is changed. Only this computer is answered, and only with the token in the printed address.
    """
    _require_extra()
    from prep.images.decode import quiet_pillow
    from prep.view.guard import new_token

    quiet_pillow()
    _here(what)
    token, first = new_token(), ""
    if is_source(what):
        _refuse({"--manifest": manifest, "--since": since}, "a MANIFEST or RUN", f"{what} is a source of pictures")
        app, site = _source(what, token, scan=scan, jobs=jobs, quiet=quiet, model=model, **given)
    else:
        options = {BY_NAME[name].flag: value for name, value in given.items()}
        _refuse({**options, "--scan": scan or None}, "a SOURCE", f"{what} is none")
        app, site, first = _encoded(what, token, manifest, model, since)
    _serve(app, site, port, f"{token}/{first}", first, open_browser=open_browser, as_json=as_json)


def _serve(app: Guard, site: Site, port: int, path: str, first: str, *, open_browser: bool, as_json: bool) -> None:
    """Answers until Ctrl-C."""
    from threading import Thread

    from prep.view.serve import HOST, Server, listen

    try:
        here = listen(port)
        server = f"http://{HOST}:{here.getsockname()[1]}"

        def ready() -> None:
            url = f"{server}/{path}"
            if as_json:
                put_json({"format": "latentry/view", "version": 1, "url": url}, indent=None)
            else:
                put(url)
            say("Ctrl-C ends it")
            if open_browser:
                Thread(target=_open, args=(f"{server}{app.ticket(first)}",), daemon=True).start()

        Server(app, ready).run_until_stopped(here)
    finally:
        site.pictures.close()


def is_source(what: Path) -> bool:
    """Whether a path names pictures: a directory that is no run, a recipe, or tars. Raises `PathError`."""
    from prep.runs.document import NAME
    from prep.sources.walk import is_tars

    if what.is_dir():
        return not (what / NAME).exists()
    return what.suffix == ".toml" or is_tars(what)


def _source(what: Path, token: str, *, scan: bool, jobs: int, quiet: bool, **given: Any) -> tuple[Guard, Site]:
    from prep.view.app import build_source_app
    from prep.view.source.state import SourceSet
    from prep.view.source.survey import survey_source

    recipe = opt.without_caption_stop(opt.recipe_from_options(what, **given))
    survey = survey_source(recipe, jobs=jobs, scan=scan, progress=progress_unless(quiet))
    if not survey.items:
        raise PathError(f"{what} has no picture that can be used, and is no training run",
                        hint=f"prep scan {shell_name(str(what))} says what is there; of a manifest, name its file")
    source = SourceSet(survey)
    for line in () if quiet else (*source.notices, *source.data().notes):
        say(line)
    return build_source_app(source, token)


def _encoded(what: Path, token: str, manifest: Path | None, model: str | None,
             since: Path | None) -> tuple[Guard, Site, str]:
    """The pages of a manifest or a run, and the first of them."""
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.view.app import build_app

    place, run = _found(what, manifest)
    opened = open_manifest(read_manifest(place))
    earlier = None if since is None else open_manifest(read_manifest(_here(since)))
    app, site = build_app(opened, token, run, None if model is None else _model(model, opened), earlier)
    return app, site, "" if run is None else "run"


def _refuse(options: Mapping[str, Any], use: str, why: str) -> None:
    """Raises `UsageError` for the first option with a value."""
    for flag, value in options.items():
        if value is not None:
            raise UsageError(f"{flag} is for {use}, but {why}", hint=f"leave {flag} out")


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
    from prep.runs.document import check_manifest, manifest_of

    if not what.is_dir():
        if manifest is not None:
            raise UsageError(f"--manifest is for a RUN, but {what} is not a directory", hint=f"prep view {manifest}")
        return what, None
    named = manifest_of(what)
    if manifest is None:
        check_manifest(what, named)
    return manifest or named, what


def _require_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"prep view needs the package {' and '.join(missing)}, which is not installed",
                         hint="pip install 'latentry[view]'")


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say("no browser was found here: open the address yourself")
