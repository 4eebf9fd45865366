"""The addresses of the pages. Each names samples by number; no part of an address is ever a path on the disk.

    /                            the list; params.py has its query string
    /sample/NUMBER               everything about a sample
    /findings                    ?code=CODE&page=NUMBER
    /set                         what embeddings say of the samples; /like/NUMBER: those most like one
    /run                         of a run, with an ETag; POST /ask/KIND asks its process to stop, or to draw samples
    /cell/GRID/CELL              one of its sampled pictures, CELL "all" a whole grid
    /thumbnail/NUMBER            pictures
    /picture/NUMBER
    /view/NUMBER/VIEW            /mask/NUMBER/VIEW    /shade/NUMBER/VIEW    /latent/NUMBER/VIEW/CHANNEL
    /diff                        ?why=REASON&page=NUMBER, beside another manifest; /before/… has all pages of that one
    /decode/NUMBER/VIEW          the latent, decoded by the VAE
    /static/NAME                 style, script and icons

With `--edit`, of pictures:

    /edits                       what was edited; ?cost=yes: what re-encoding would take
    /paint/NUMBER                the whole mask
    /replace                     ?find=TEXT&with=TEXT&prepend=TEXT, and a query: the captions that this changes
    POST /replace                saves what that page showed; POST /replace/undo takes it back
    POST /edit/NUMBER/KIND       saves a caption (text) or a mask (PNG); POST /undo/NUMBER/KIND takes the last one back
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from prep.dataset.edits.log import UndoLog
from prep.dataset.edits.places import EditPlaces
from prep.dataset.edits.refused import Refused
from prep.errors import PathError, Problem
from prep.manifest.diff import names_of, sides_of
from prep.manifest.diff_samples import changes
from prep.manifest.opened import OpenedManifest
from prep.parse import Unparsed
from prep.view.data import data_of
from prep.view.diff import Diff
from prep.view.edit.editor import Editor, Edits
from prep.view.edit.routes import edit_routes
from prep.view.guard import App, new_token
from prep.view.memory import Memory
from prep.view.pages import error_page
from prep.view.pictures import Pictures
from prep.view.routes import asking, changes_of, comparing, routes_of
from prep.view.run import RunFiles
from prep.view.similar.state import Similar
from prep.view.site import Site
from prep.view.source.origins import Origins
from prep.view.source.pictures import SourcePictures
from prep.view.source.state import SourceSet

if TYPE_CHECKING:
    from prep.view.model import ViewedModel  # which imports torch


def build_app(opened: OpenedManifest, base: str, run: Path | None = None, model: ViewedModel | None = None,
              before: OpenedManifest | None = None, before_run: Path | None = None, edit_token: str = "",
              home: str = "") -> tuple[App, Site]:
    """The application, to be put behind a `Guard`, whose addresses begin with `base`; `run` is the directory of a run
    that was trained on the manifest, `before` is another manifest to compare with, `before_run` a run on that.
    `edit_token`: that of the guard (default: a new one); `home`: the address of the project's page, if these pages are
    part of one.

    Raises `CacheError` if a table of the manifest, or a file of the run, is missing or damaged.
    """
    token, both = edit_token or new_token() if run or before_run else "", run is not None and before_run is not None
    site = replace(_site(opened, base, run, model, root=base if before is not None else ""), home=home,
                   edit_token=token, compares=both)
    routes = _routes(site)
    if before is not None:
        old = replace(_site(before, f"{base}/before", before_run, None, root=base), edit_token=token, compares=both)
        diff = Diff(old, site, changes(*sides_of(before, opened)), names_of(before.manifest, opened.manifest))
        routes = [Route("/diff", changes_of(diff), methods=["GET"]), Route("/compare", comparing([old, site])),
                  Mount("/before", routes=_routes(old)), *routes]
    return _app(site, routes), site


def _routes(site: Site) -> list[BaseRoute]:
    """The pages of a site, and what a run's buttons ask."""
    asks = [] if site.run is None else [Route("/ask/{kind}", asking(site.run), methods=["POST"])]
    return [*asks, *routes_of(site)]


def build_source_app(source: SourceSet, base: str, edits: Edits | None = None,
                     home: str = "") -> tuple[App, Site]:
    """The application about pictures that are not encoded, as `build_app`; with `edits`, they are edited. Raises
    `PathError`."""
    pictures = SourcePictures(source, Memory())
    site = Site(base=base, home=home, state=source.data, pictures=pictures)
    if edits is not None:
        editor = Editor(source, edits, pictures.mask_file)
        site = replace(site, edit_token=new_token(), editor=editor, origins=Origins(source, edits.places, editor.log))
        return _app(site, [*routes_of(site), *edit_routes(site, pictures)]), site
    recipe = source.state.survey.original
    places = EditPlaces(recipe=recipe, folder=recipe.edits)
    with suppress(PathError):  # nothing is kept of edits beside the pictures
        site = replace(site, origins=Origins(source, places, UndoLog(places.undo)))
    return _app(site, routes_of(site)), site


def _app(site: Site, routes: list[BaseRoute]) -> App:
    app = Starlette(routes=routes, exception_handlers={
        HTTPException: _error(site), Unparsed: _error(site), Problem: _error(site), Refused: _error(site)})
    app.router.redirect_slashes = False
    return app


def _site(opened: OpenedManifest, base: str, run: Path | None, model: ViewedModel | None, *, root: str) -> Site:
    data, memory = data_of(opened), Memory()
    pictures = Pictures(opened, memory)
    site = Site(base=base, state=lambda: data, pictures=pictures, rows=pictures, model=model, root=root,
                similar=Similar(opened) if opened.manifest.embedded else None,
                run=None if run is None else RunFiles(run, data.selector.samples, memory))
    if site.run is not None:
        _ = site.run.history, site.hardness()
    return site


def _error(site: Site) -> Callable[[Request, Exception], Response]:
    """Answers with a page that says what is wrong."""
    def answer(_request: Request, error: Exception) -> Response:
        status, what, hint = _described(error)
        return HTMLResponse(error_page(site.base, status, what, hint), status)

    return answer


def _described(error: Any) -> tuple[int, str, str]:
    if isinstance(error, HTTPException):
        return error.status_code, "No sample, picture or page has this address.", ""
    if isinstance(error, Refused):
        return error.status, error.message, ""
    if isinstance(error, Problem):
        return 500, error.message, error.hint
    return 400, str(error), "Change the address, or begin with all samples."
