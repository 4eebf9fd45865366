"""Answers to the addresses that `app.py` lists: pages and pictures of a site. Each names samples by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from prep.errors import Problem
from prep.findings import CODES
from prep.fs.place import Local
from prep.manifest.select import Query
from prep.pages.layout import static_file
from prep.parse import Unparsed, one_of
from prep.runs.heartbeat import KINDS
from prep.runs.requests import ask, reply
from prep.view.diff import Diff, diff_page
from prep.view.pages import findings_page, list_page, sample_page, tags_page
from prep.view.params import number_of, query_of
from prep.view.run import RunFiles
from prep.view.run_pages import compare_page, compare_tag, compared, page_of_run, run_tag
from prep.view.similar.pages import like_page, map_page
from prep.view.similar.state import Similar
from prep.view.site import Site
from prep.view.source.worker import UNDECODABLE

Answer = Callable[[Request], Response]


def routes_of(site: Site) -> list[BaseRoute]:
    """Pages and pictures of a site."""
    return [Route(path, _endpoint(make, site), methods=["GET"]) for path, make in _ROUTES.items()]


def changes_of(diff: Diff) -> Answer:
    """Answers with the page of differences from another manifest."""
    def endpoint(request: Request) -> Response:
        why = request.query_params.get("why", "")
        return HTMLResponse(diff_page(diff, one_of(why, diff.counts, "why") if why else "", page_of(request)))

    return endpoint


def comparing(sites: Sequence[Site]) -> Answer:
    """Answers with the page of the sites' runs beside each other."""
    def endpoint(request: Request) -> Response:
        runs = compared([(site.base, site.run) for site in sites if site.run is not None])
        if len(runs) < 2:
            raise HTTPException(404)
        return tagged(request, compare_tag(runs), lambda _: compare_page(runs, sites[0].root, home=""))

    return endpoint


def tagged(request: Request, tag: str, page: Callable[[str], str]) -> Response:
    """The page with an ETag; only that it is the same, if the browser has it."""
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return HTMLResponse(page(tag), headers={"etag": tag})


def asking(run: RunFiles) -> Answer:
    """Asks the process that trains the run; answers with what it does, or why it cannot be asked, as text."""
    def endpoint(request: Request) -> Response:
        kind = next((kind for kind in KINDS if kind == request.path_params["kind"]), None)
        if kind is None:
            raise HTTPException(404)
        try:
            return PlainTextResponse(f"Asked: {reply(kind, ask(Local(run.folder), kind))}.")
        except Problem as error:
            return PlainTextResponse(f"{error.message}.", 409)
        except OSError as error:
            return PlainTextResponse(f"it cannot be asked: {error.strerror or error}", 507)

    return endpoint


def _endpoint(make: Callable[[Site, Request], Response], site: Site) -> Answer:
    """An endpoint that runs in a thread: pages and pictures are work for the processor."""
    def endpoint(request: Request) -> Response:
        return make(site, request)

    return endpoint


def _list(site: Site, request: Request) -> Response:
    return HTMLResponse(list_page(site, query_in(site, request), page_of(request)))


def _sample(site: Site, request: Request) -> Response:
    return HTMLResponse(sample_page(site, sample_of(site, request), query_in(site, request)))


def query_in(site: Site, request: Request) -> Query:
    data = site.data
    return query_of(request.query_params.multi_items(), data.shapes, len(data.sources))


def _tags(site: Site, request: Request) -> Response:
    return HTMLResponse(tags_page(site, query_in(site, request)))


def _findings(site: Site, request: Request) -> Response:
    code = request.query_params.get("code", "")
    return HTMLResponse(findings_page(site, one_of(code, CODES, "code") if code else "", page_of(request)))


def _set(site: Site, _request: Request) -> Response:
    return HTMLResponse(map_page(site, _similar(site)))


def _like(site: Site, request: Request) -> Response:
    return HTMLResponse(like_page(site, _similar(site), sample_of(site, request)))


def _similar(site: Site) -> Similar:
    if site.similar is None:
        raise HTTPException(404)
    return site.similar


def _run(site: Site, request: Request) -> Response:
    if site.run is None:
        raise HTTPException(404)
    run = site.run
    return tagged(request, run_tag(run), lambda _: page_of_run(site, run))


def _cell(site: Site, request: Request) -> Response:
    if site.run is None:
        raise HTTPException(404)
    grids = site.run.history.grids
    grid = grids[_part(request, "grid", len(grids))]
    whole = request.path_params["cell"] == "all"
    return picture_of(site.run.cell(grid, -1 if whole else _part(request, "cell", len(grid.sizes))))


def _thumbnail(site: Site, request: Request) -> Response:
    return picture_of(site.pictures.thumbnail(*_file(site, request)))


def _whole(site: Site, request: Request) -> Response:
    return picture_of(site.pictures.whole(*_file(site, request)))


def _view(site: Site, request: Request) -> Response:
    return picture_of(site.pictures.view(*_place(site, request)))


def _mask(site: Site, request: Request) -> Response:
    return picture_of(site.pictures.mask(*_place(site, request), shade=False))


def _shade(site: Site, request: Request) -> Response:
    return picture_of(site.pictures.mask(*_place(site, request), shade=True))


def _latent(site: Site, request: Request) -> Response:
    if site.rows is None:
        raise HTTPException(404)
    channel = _part(request, "channel", site.rows.channels)
    return picture_of(site.rows.channel(*_place(site, request), channel))


def _decode(site: Site, request: Request) -> Response:
    number, view = _place(site, request)
    if site.model is None or site.rows is None:
        raise HTTPException(404)
    return picture_of(site.rows.decoded(number, view, _file(site, request)[1], site.model.decode))


def _static(_site: Site, request: Request) -> Response:
    file = static_file(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return Response(file[0], media_type=file[1])


_ROUTES: dict[str, Callable[[Site, Request], Response]] = {
    "/": _list, "/sample/{number}": _sample, "/tags": _tags, "/findings": _findings, "/run": _run,
    "/set": _set, "/like/{number}": _like,
    "/cell/{grid}/{cell}": _cell, "/thumbnail/{number}": _thumbnail,
    "/thumbnail/{number}/{reference}": _thumbnail, "/picture/{number}": _whole,
    "/picture/{number}/{reference}": _whole, "/view/{number}/{view}": _view, "/mask/{number}/{view}": _mask,
    "/shade/{number}/{view}": _shade, "/latent/{number}/{view}/{channel}": _latent, "/decode/{number}/{view}": _decode,
    "/decode/{number}/{view}/{reference}": _decode,
    "/static/{name}": _static,
}


def picture_of(data: bytes | None) -> Response:
    if data is None or data == UNDECODABLE:
        data, kind = static_file("missing.svg" if data is None else "undecodable.svg") or (b"", "")
        return Response(data, media_type=kind)
    return Response(data, media_type="image/png" if data.startswith(b"\x89PNG") else "image/jpeg")


def sample_of(site: Site, request: Request) -> int:
    return _part(request, "number", len(site.selector.samples))


def _place(site: Site, request: Request) -> tuple[int, int]:
    """The sample and the view of an address."""
    number, offsets = sample_of(site, request), site.selector.samples.view_offsets
    return number, _part(request, "view", int(offsets[number + 1] - offsets[number]))


def _file(site: Site, request: Request) -> tuple[int, int | None]:
    """The sample of an address, and which of its references, if it names one."""
    number = sample_of(site, request)
    if "reference" not in request.path_params:
        return number, None
    samples = site.selector.samples
    return number, _part(request, "reference", len(samples.references_of(number, int(samples.view_offsets[number]))))


def _part(request: Request, name: str, count: int) -> int:
    """A number below `count` in the path; anything else is nowhere."""
    try:
        return number_of(request.path_params[name], name, count - 1)
    except Unparsed:
        raise HTTPException(404) from None


def page_of(request: Request) -> int:
    """The page of a query string, from 0."""
    return max(0, number_of(request.query_params.get("page") or "1", "page", 10**9 - 1) - 1)
