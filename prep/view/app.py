"""The addresses of the pages. Each names samples by number; no part of an address is ever a path on the disk.

    /                            the list; params.py has its query string
    /sample/NUMBER               everything about a sample
    /findings                    ?code=CODE&page=NUMBER
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

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from prep.errors import Problem
from prep.findings import CODES
from prep.manifest.diff import names_of, sides_of
from prep.manifest.diff_samples import changes
from prep.manifest.opened import OpenedManifest
from prep.manifest.select import Query
from prep.pages.layout import static_file
from prep.parse import Unparsed, one_of
from prep.runs.heartbeat import KINDS as KINDS_ASKED
from prep.runs.requests import ask, told
from prep.view.data import data_of
from prep.view.diff import Diff, diff_page
from prep.view.edit import replace as replace_captions
from prep.view.edit.editor import KINDS, Done, Editor, Edits, Sent
from prep.view.edit.pages import BOARD, edits_page, plan_of, replace_page
from prep.view.edit.refused import Refused
from prep.view.edit.replace import REWORDING, Rewording, reworded_by
from prep.view.guard import Guard, new_token
from prep.view.memory import Memory
from prep.view.pages import error_page, findings_page, list_page, sample_page
from prep.view.params import number_of, query_of
from prep.view.pictures import Pictures
from prep.view.run import RunFiles
from prep.view.run_pages import run_page, run_tag
from prep.view.site import Site
from prep.view.source.pictures import SourcePictures
from prep.view.source.state import SourceSet

if TYPE_CHECKING:
    from prep.view.model import ViewedModel  # which imports torch

Made = Callable[[Request], Response]


def build_app(opened: OpenedManifest, token: str, run: Path | None = None, model: ViewedModel | None = None,
              before: OpenedManifest | None = None) -> tuple[Guard, Site]:
    """The application behind its guard; `run` is the directory of a run that was trained on the manifest, `before` is
    another manifest to compare with.

    Raises `CacheError` if a table of the manifest, or a file of the run, is missing or damaged.
    """
    base = f"/{token}"
    site = _site(opened, base, run, model, root=base if before is not None else "")
    routes: list[BaseRoute] = _routes(site)
    if (files := site.run) is not None:
        site = replace(site, edit_token=new_token())
        routes = [Route("/ask/{kind}", _ask(files), methods=["POST"]), *_routes(site)]
    if before is not None:
        old = _site(before, f"{base}/before", None, None, root=base)
        diff = Diff(old, site, changes(*sides_of(before, opened)), names_of(before.manifest, opened.manifest))
        routes = [Route("/diff", _diff(diff), methods=["GET"]), Mount("/before", routes=_routes(old)), *routes]
    return _guarded(site, routes, token), site


def build_source_app(source: SourceSet, token: str, edits: Edits | None = None) -> tuple[Guard, Site]:
    """The application about pictures that are not encoded; with `edits`, they are edited. Raises `PathError`."""
    pictures = SourcePictures(source, Memory())
    site = Site(base=f"/{token}", state=source.data, pictures=pictures)
    if edits is not None:
        site = replace(site, edit_token=new_token(), editor=Editor(source, edits, pictures.mask_file))
        return _guarded(site, [*_routes(site), *_edit_routes(site, pictures)], token), site
    return _guarded(site, _routes(site), token), site


def _guarded(site: Site, routes: list[BaseRoute], token: str) -> Guard:
    app = Starlette(routes=routes, exception_handlers={
        HTTPException: _told(site), Unparsed: _told(site), Problem: _told(site), Refused: _told(site)})
    app.router.redirect_slashes = False
    return Guard(app, token, site.edit_token)


def _edit_routes(site: Site, pictures: SourcePictures) -> list[BaseRoute]:
    def paint(request: Request) -> Response:
        return _picture(pictures.painted(_number(site, request), BOARD))

    def edits(request: Request) -> Response:
        cost = site.editor.edits.cost if site.editor is not None and "cost" in request.query_params else None
        return HTMLResponse(edits_page(site, None if cost is None else cost()))

    def shown(request: Request) -> Response:
        return HTMLResponse(replace_page(site, *_replacing(site, request)))

    return [Route("/edits", edits, methods=["GET"]), Route("/paint/{number}", paint, methods=["GET"]),
            Route("/edit/{number}/{kind}", _posted(site, Editor.save), methods=["POST"]),
            Route("/undo/{number}/{kind}", _posted(site, Editor.undo), methods=["POST"]),
            Route("/replace", shown, methods=["GET"]),
            *(Route(f"/replace{end}", _replaced(site, back=bool(end)), methods=["POST"]) for end in ("", "/undo"))]


def _replacing(site: Site, request: Request) -> tuple[Query, Rewording]:
    """The samples of an address whose captions are reworded, and how."""
    values = request.query_params
    data = site.data
    others = [(name, value) for name, value in values.multi_items() if name not in REWORDING]
    return query_of(others, data.buckets, len(data.sources)), Rewording(
        *(reworded_by(values.get(name, ""), name) for name in REWORDING))


def _replaced(site: Site, *, back: bool) -> Callable[[Request], Response]:
    """Saves the captions that a page showed, or takes that `back`; answers with what it did, as text."""
    def endpoint(request: Request) -> Response:
        assert site.editor is not None, "there are such addresses only with --edit"
        plan = request.headers.get("x-latentry-plan", "")
        try:
            if back:
                return PlainTextResponse(replace_captions.undo(site.editor, plan))
            found = plan_of(site, *_replacing(site, request))
            return PlainTextResponse(replace_captions.save(site.editor, found, plan))
        except Refused as error:
            return PlainTextResponse(error.message, error.status)

    return endpoint


def _posted(site: Site, make: Callable[[Editor, Sent], Done]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that answers with what it did, or why not, as text."""
    def answer(sent: Sent) -> Response:
        assert site.editor is not None, "there are such addresses only with --edit"
        try:
            done = make(site.editor, sent)
        except Refused as error:
            return PlainTextResponse(error.message, error.status)
        except OSError as error:
            return PlainTextResponse(f"it cannot be saved: {error.strerror or error}", 507)
        return PlainTextResponse(done.said, headers={"x-latentry-version": done.version,
                                                     "x-latentry-undo": "yes" if done.undo else "no"})

    async def endpoint(request: Request) -> Response:
        number, kind = _number(site, request), request.path_params["kind"]
        if kind not in KINDS:
            raise HTTPException(404)
        headers = request.headers
        return await run_in_threadpool(answer, Sent(
            number=number, kind=kind, sample=headers.get("x-latentry-sample", ""),
            version=headers.get("x-latentry-version", ""), body=await request.body(),
            media=headers.get("content-type", "").partition(";")[0].strip().lower()))

    return endpoint


def _site(opened: OpenedManifest, base: str, run: Path | None, model: ViewedModel | None, *, root: str) -> Site:
    data, memory = data_of(opened), Memory()
    pictures = Pictures(opened, memory)
    site = Site(base=base, state=lambda: data, pictures=pictures, rows=pictures, model=model, root=root,
                run=None if run is None else RunFiles(run, data.selector.samples, memory))
    if site.run is not None:
        _ = site.run.history, site.hardness()
    return site


def _routes(site: Site) -> list[BaseRoute]:
    return [Route(path, _endpoint(make, site), methods=["GET"]) for path, make in _ROUTES.items()]


def _diff(diff: Diff) -> Made:
    def endpoint(request: Request) -> Response:
        why = request.query_params.get("why", "")
        return HTMLResponse(diff_page(diff, one_of(why, diff.counts, "why") if why else "", _page(request)))

    return endpoint


def _endpoint(make: Callable[[Site, Request], Response], site: Site) -> Made:
    """An endpoint that runs in a thread: pages and pictures are work for the processor."""
    def endpoint(request: Request) -> Response:
        return make(site, request)

    return endpoint


def _list(site: Site, request: Request) -> Response:
    return HTMLResponse(list_page(site, _query(site, request), _page(request)))


def _sample(site: Site, request: Request) -> Response:
    return HTMLResponse(sample_page(site, _number(site, request), _query(site, request)))


def _query(site: Site, request: Request) -> Query:
    data = site.data
    return query_of(request.query_params.multi_items(), data.buckets, len(data.sources))


def _findings(site: Site, request: Request) -> Response:
    code = request.query_params.get("code", "")
    return HTMLResponse(findings_page(site, one_of(code, CODES, "code") if code else "", _page(request)))


def _run(site: Site, request: Request) -> Response:
    if site.run is None:
        raise HTTPException(404)
    headers = {"etag": run_tag(site.run)}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(run_page(site, site.run), headers=headers)


def _ask(run: RunFiles) -> Callable[[Request], Response]:
    """Asks the process that trains the run; answers with what it does, or why it cannot be asked, as text."""
    def endpoint(request: Request) -> Response:
        kind = next((one for one in KINDS_ASKED if one == request.path_params["kind"]), None)
        if kind is None:
            raise HTTPException(404)
        try:
            return PlainTextResponse(f"Asked: {told(kind, ask(run.folder, kind))}.")
        except Problem as error:
            return PlainTextResponse(f"{error.message}.", 409)
        except OSError as error:
            return PlainTextResponse(f"it cannot be asked: {error.strerror or error}", 507)

    return endpoint


def _cell(site: Site, request: Request) -> Response:
    if site.run is None:
        raise HTTPException(404)
    grids = site.run.history.grids
    grid = grids[_part(request, "grid", len(grids))]
    whole = request.path_params["cell"] == "all"
    return _picture(site.run.cell(grid, -1 if whole else _part(request, "cell", len(grid.sizes))))


def _thumbnail(site: Site, request: Request) -> Response:
    return _picture(site.pictures.thumbnail(_number(site, request)))


def _whole(site: Site, request: Request) -> Response:
    return _picture(site.pictures.whole(_number(site, request)))


def _view(site: Site, request: Request) -> Response:
    return _picture(site.pictures.view(*_place(site, request)))


def _mask(site: Site, request: Request) -> Response:
    return _picture(site.pictures.mask(*_place(site, request), shade=False))


def _shade(site: Site, request: Request) -> Response:
    return _picture(site.pictures.mask(*_place(site, request), shade=True))


def _latent(site: Site, request: Request) -> Response:
    if site.rows is None:
        raise HTTPException(404)
    channel = _part(request, "channel", site.rows.channels)
    return _picture(site.rows.channel(*_place(site, request), channel))


def _decode(site: Site, request: Request) -> Response:
    number, view = _place(site, request)
    if site.model is None or site.rows is None:
        raise HTTPException(404)
    return _picture(site.rows.decoded(number, view, site.model.decode))


def _static(_site: Site, request: Request) -> Response:
    found = static_file(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return Response(found[0], media_type=found[1])


_ROUTES: dict[str, Callable[[Site, Request], Response]] = {
    "/": _list, "/sample/{number}": _sample, "/findings": _findings, "/run": _run,
    "/cell/{grid}/{cell}": _cell, "/thumbnail/{number}": _thumbnail,
    "/picture/{number}": _whole, "/view/{number}/{view}": _view, "/mask/{number}/{view}": _mask,
    "/shade/{number}/{view}": _shade, "/latent/{number}/{view}/{channel}": _latent, "/decode/{number}/{view}": _decode,
    "/static/{name}": _static,
}


def _picture(data: bytes | None) -> Response:
    if data is None:
        data, kind = static_file("missing.svg") or (b"", "")
        return Response(data, media_type=kind)
    return Response(data, media_type="image/png" if data.startswith(b"\x89PNG") else "image/jpeg")


def _number(site: Site, request: Request) -> int:
    return _part(request, "number", len(site.selector.samples))


def _place(site: Site, request: Request) -> tuple[int, int]:
    """The sample and the view of an address."""
    number, offsets = _number(site, request), site.selector.samples.view_offsets
    return number, _part(request, "view", int(offsets[number + 1] - offsets[number]))


def _part(request: Request, name: str, count: int) -> int:
    """A number below `count` in the path; anything else is nowhere."""
    try:
        return number_of(request.path_params[name], name, count - 1)
    except Unparsed:
        raise HTTPException(404) from None


def _page(request: Request) -> int:
    """The page of a query string, from 0."""
    return max(0, number_of(request.query_params.get("page") or "1", "page", 10**9 - 1) - 1)


def _told(site: Site) -> Callable[[Request, Exception], Response]:
    """Answers with a page that says what is wrong."""
    def told(_request: Request, error: Exception) -> Response:
        status, what, hint = _described(error)
        return HTMLResponse(error_page(site.base, status, what, hint), status)

    return told


def _described(error: Any) -> tuple[int, str, str]:
    if isinstance(error, HTTPException):
        return error.status_code, "No sample, picture or page has this address.", ""
    if isinstance(error, Refused):
        return error.status, error.message, ""
    if isinstance(error, Problem):
        return 500, error.message, error.hint
    return 400, str(error), "Change the address, or begin with all samples."
