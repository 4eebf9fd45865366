"""Answers to the addresses of `--edit`: what is edited, saved and undone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from prep.dataset.edits.refused import Refused
from prep.manifest.select import Query
from prep.view.edit import replace as replace_captions
from prep.view.edit.editor import KINDS, Done, Editor, Sent
from prep.view.edit.pages import BOARD, edits_page, plan_of, replace_page
from prep.view.edit.replace import REWORDING, Rewording, rewording_of
from prep.view.params import query_of
from prep.view.routes import picture_of, sample_of
from prep.view.site import Site
from prep.view.source.pictures import SourcePictures


def edit_routes(site: Site, pictures: SourcePictures) -> list[BaseRoute]:
    """The routes that --edit adds to those of the other pages."""
    def paint(request: Request) -> Response:
        return picture_of(pictures.painted(sample_of(site, request), BOARD))

    def edits(request: Request) -> Response:
        cost = site.editor.edits.cost if site.editor is not None and "cost" in request.query_params else None
        return HTMLResponse(edits_page(site, None if cost is None else cost()))

    def shown(request: Request) -> Response:
        return HTMLResponse(replace_page(site, *_replacing(site, request)))

    return [Route("/edits", edits, methods=["GET"]), Route("/paint/{number}", paint, methods=["GET"]),
            Route("/edit/{number}/{kind}", _posted(site, Editor.save), methods=["POST"]),
            Route("/undo/{number}/{kind}", _posted(site, Editor.undo), methods=["POST"]),
            Route("/accept/{number}/{kind}", _posted(site, Editor.accept, ("caption",)), methods=["POST"]),
            Route("/again/{number}/{kind}", _posted(site, Editor.ask_again, ("caption",)), methods=["POST"]),
            Route("/replace", shown, methods=["GET"]),
            *(Route(f"/replace{end}", _replaced(site, back=bool(end)), methods=["POST"]) for end in ("", "/undo"))]


def _replacing(site: Site, request: Request) -> tuple[Query, Rewording]:
    """The samples of an address whose captions are reworded, and how."""
    values = request.query_params
    data = site.data
    others = [(name, value) for name, value in values.multi_items() if name not in REWORDING]
    return query_of(others, data.shapes, len(data.sources)), rewording_of(values)


def _replaced(site: Site, *, back: bool) -> Callable[[Request], Response]:
    """Saves the captions that a page showed, or takes that `back`; answers with what it did, as text."""
    def endpoint(request: Request) -> Response:
        assert site.editor is not None, "there are such addresses only with --edit"
        plan = request.headers.get("x-latentry-plan", "")
        try:
            if back:
                return PlainTextResponse(replace_captions.undo(site.editor, plan))
            replacements = plan_of(site, *_replacing(site, request))
            return PlainTextResponse(replace_captions.save(site.editor, replacements, plan))
        except Refused as error:
            return PlainTextResponse(error.message, error.status)

    return endpoint


def _posted(site: Site, make: Callable[[Editor, Sent], Done], kinds: Sequence[str] = KINDS
            ) -> Callable[[Request], Awaitable[Response]]:
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
        number, kind = sample_of(site, request), request.path_params["kind"]
        if kind not in kinds:
            raise HTTPException(404)
        headers = request.headers
        return await run_in_threadpool(answer, Sent(
            number=number, kind=kind, sample=headers.get("x-latentry-sample", ""),
            version=headers.get("x-latentry-version", ""), body=await request.body(),
            media=headers.get("content-type", "").partition(";")[0].strip().lower()))

    return endpoint
