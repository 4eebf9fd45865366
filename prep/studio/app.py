"""The addresses of a project's pages. No part of one is a path on the disk, but for names that the project lists.

    /                            what the project has, and the steps
    /form/NAME                   a command: ?FIELD=VALUE&…; POST adds the command to the queue
    POST /forecast/NAME          asks what that would take, which its page shows; POST /forecast/NAME/forget
    /jobs                        /jobs/NUMBER, with ETags
    POST /jobs/NUMBER/ACTION     stop, kill, again, first, remove; POST /queue/pause, /queue/start
    /look/KIND/NAME/…            the pages of `prep view` for a manifest, a run or a source of the project
    /within/KIND/FOLDER/NAME/…   the same of what is in a directory of the project, as runs are by default
    /compare                     ?run=NAME&run=NAME: runs beside each other, with an ETag
    /api/jobs                    the same as JSON: GET, and POST {"words": ["train", "run", …]}; /api/jobs/NUMBER
    POST /api/jobs/NUMBER/ACTION
    /static/NAME                 style, script and icons
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from prep.errors import Problem, UsageError, first_line, from_system
from prep.formatting import counted, printable
from prep.jobs import queue
from prep.jobs.job import Job, jobs_document
from prep.jobs.log import tail
from prep.pages.compare import MOST
from prep.pages.layout import static_file
from prep.parse import Unparsed, expect, list_of
from prep.studio.forecasts import Forecasts, question_of
from prep.studio.forms import Form, complete
from prep.studio.looks import Looks
from prep.studio.pages import LOG, OFTEN, form_page, job_page, jobs_page, jobs_tag, name_of, project_page, step_of
from prep.studio.project import read_project
from prep.studio.queue import Queue
from prep.view.guard import Guard, new_token
from prep.view.pages import error_page
from prep.view.routes import tagged
from prep.view.run_pages import compare_page, compare_tag, compared

ACTIONS: Mapping[str, Callable[[Path, str], Job]] = {
    "stop": queue.stop, "kill": lambda project, name: queue.stop(project, name, "now"), "again": queue.again,
    "first": queue.first, "remove": queue.remove}
MOST_BODY = 1 << 20  # bytes


class Studio:
    """The pages of a project behind their guard."""

    def __init__(self, project: Path, forms: Sequence[Form], token: str) -> None:
        self._project, self._base, self.edit_token = project, f"/{token}", new_token()
        self._forms = {form.name: form for form in forms}
        self._queue = Queue(project)
        self.looks, self._forecasts = Looks(project, self._base, self.edit_token), Forecasts(project)
        app = Starlette(routes=[
            Route("/", self._home), Route("/form/{name}", self._form, methods=["GET", "POST"]),
            Route("/forecast/{name}", self._ask, methods=["POST"]),
            Route("/forecast/{name}/forget", self._forget, methods=["POST"]), Route("/compare", self._compare),
            Route("/jobs", self._jobs), Route("/jobs/{name}", self._job),
            Route("/jobs/{name}/{action}", self._act, methods=["POST"]),
            Route("/queue/{action}", self._switch, methods=["POST"]),
            Route("/api/jobs", self._listed), Route("/api/jobs", self._posted, methods=["POST"]),
            Route("/api/jobs/{name}", self._told), Route("/api/jobs/{name}/{action}", self._acted, methods=["POST"]),
            Route("/static/{name}", _static), Mount("/look/{kind}/{name}", self.looks),
            Mount("/within/{kind}/{folder}/{name}", self.looks)],
            exception_handlers={HTTPException: self._error, Problem: self._error, OSError: self._error})
        app.router.redirect_slashes = False
        self.app = Guard(app, token, self.edit_token)

    def close(self) -> None:
        """Ends the starting of jobs and what forms ask, and closes pictures."""
        self._queue.close()
        self._forecasts.close()
        self.looks.close()

    def _site(self, tag: str = "", every: int = OFTEN) -> dict[str, Any]:
        return {"base": self._base, "name": name_of(self._project), "kind": "Project", "token": self.edit_token,
                "tag": tag, "every": every, "edits": False, "home": "", "paused": self._queue.paused}

    def _home(self, request: Request) -> Response:
        jobs, project = queue.jobs_of(self._project), read_project(self._project)
        return tagged(request, jobs_tag(jobs, project, self._queue.paused),
                       lambda tag: project_page(project, jobs, **self._site(tag)))

    def _form(self, request: Request) -> Response:
        form, given = self._form_of(request), _given(request)
        if request.method == "POST":
            return _answered(lambda: queue.add(self._project, complete(form, given)), f"{self._base}/jobs/{{}}")
        forecast = self._forecasts.of(form.name)
        asking = forecast is not None and forecast.answer is None
        return HTMLResponse(form_page(
            form, read_project(self._project), given or None, asks=self._asked_by(form), forecast=forecast,
            busy=any(job.state == "running" for job in queue.jobs_of(self._project)),
            **self._site(every=OFTEN if asking else 0)))

    def _form_of(self, request: Request) -> Form:
        form = self._forms.get(request.path_params["name"])
        if form is None:
            raise HTTPException(404)
        return form

    def _asked_by(self, form: Form) -> Form | None:
        """The form of the command that says what another one would take."""
        step = step_of(form)
        return None if step is None else self._forms.get(step.asks)

    def _ask(self, request: Request) -> Response:
        form = self._form_of(request)
        asks = self._asked_by(form)
        if asks is None:
            raise HTTPException(404)
        try:
            self._forecasts.ask(form.name, question_of(asks, _given(request)))
        except Problem as error:
            return PlainTextResponse(f"{printable(error.message)}.", 409)
        except (OSError, ValueError) as error:
            return PlainTextResponse(f"It cannot be asked: {first_line(error)}.", 507)
        return PlainTextResponse("Asked: the answer comes below.")

    def _forget(self, request: Request) -> Response:
        self._forecasts.forget(self._form_of(request).name)
        return PlainTextResponse("No longer asked.")

    def _compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MOST:
            raise UsageError(f"{counted(len(names), 'run')} {'is' if len(names) == 1 else 'are'} chosen, expected 2 to "
                             f"{MOST}", hint="choose them on the project's page")
        sites = [self.looks.opened("runs", name)[1] for name in names]
        runs = compared([(site.base, site.run) for site in sites if site.run is not None])
        return tagged(request, compare_tag(runs), lambda _: compare_page(runs, self._base, home=self._base))

    def _jobs(self, request: Request) -> Response:
        jobs, trouble = queue.jobs_of(self._project), self._queue.trouble
        return tagged(request, jobs_tag(jobs, self._queue.paused, trouble),
                       lambda tag: jobs_page(jobs, trouble=trouble, **self._site(tag)))

    def _job(self, request: Request) -> Response:
        job, project = queue.job_of(self._project, request.path_params["name"]), read_project(self._project)
        return tagged(request, jobs_tag([job], project.runs, self._queue.paused),
                       lambda tag: job_page(job, project, **self._site(tag, OFTEN if not job.is_over else 5 * OFTEN)))

    def _act(self, request: Request) -> Response:
        action, name = _action(request), request.path_params["name"]
        following = {"again": f"{self._base}/jobs/{{}}", "remove": f"{self._base}/jobs"}.get(action, "")
        return _answered(lambda: ACTIONS[action](self._project, name), following)

    def _switch(self, request: Request) -> Response:
        action = request.path_params["action"]
        if action not in ("pause", "start"):
            raise HTTPException(404)
        self._queue.paused = action == "pause"
        return PlainTextResponse("The queue is paused: what runs goes on." if self._queue.paused else
                                 "The queue goes on.")

    def _listed(self, _request: Request) -> Response:
        jobs = queue.jobs_of(self._project)
        return _document(jobs_document(jobs, paused=self._queue.paused))

    def _told(self, request: Request) -> Response:
        return _as_json(lambda: queue.job_of(self._project, request.path_params["name"]), log=True)

    def _acted(self, request: Request) -> Response:
        action = _action(request)
        return _as_json(lambda: ACTIONS[action](self._project, request.path_params["name"]))

    async def _posted(self, request: Request) -> Response:
        body = await request.body()
        return await run_in_threadpool(_as_json, lambda: queue.add(self._project, _words_in(body)))

    def _error(self, _request: Request, error: Exception) -> Response:
        if isinstance(error, Problem):
            status = 400 if isinstance(error, UsageError) else 404
            return HTMLResponse(error_page(self._base, status, error.message, error.hint, first="The project"), status)
        if isinstance(error, OSError):
            return HTMLResponse(error_page(self._base, 500, f"{error}", first="The project"), 500)
        status = error.status_code if isinstance(error, HTTPException) else 500
        return HTMLResponse(error_page(self._base, status, "No page has this address.", first="The project"), status)


def _given(request: Request) -> dict[str, list[str]]:
    """The values of fields in the address."""
    given: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    return given


def _answered(change: Callable[[], Job], following: str = "") -> Response:
    """What was done, or why not, as text; and the page to go to."""
    try:
        job = change()
    except Problem as error:
        return PlainTextResponse(f"{printable(error.message)}.", 409)
    except OSError as error:
        return PlainTextResponse(f"That cannot be done: {error.strerror or error}.", 507)
    more = {"x-latentry-next": following.format(job.name)} if following else {}
    return PlainTextResponse(f"Job {job.name}: {job.says}.", headers=more)


def _as_json(change: Callable[[], Job], *, log: bool = False) -> Response:
    """The job, or an error as the commands' --json has it."""
    try:
        job = change()
    except (Problem, OSError) as caught:
        error = caught if isinstance(caught, Problem) else from_system(caught)
        said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code, "kind": error.kind}
        return _document({"format": "latentry/error", "version": 1, "error": said}, 409)
    return _document(jobs_document([job], **({"log": tail(job, LOG)} if log else {})))


def _document(body: Mapping[str, Any], status: int = 200) -> Response:
    """A document in ASCII: words may have what UTF-8 cannot spell."""
    return Response(json.dumps(body), status, media_type="application/json")


def _words_in(body: bytes) -> list[str]:
    """The words that a request has. Raises `UsageError`."""
    try:
        if len(body) > MOST_BODY:
            raise Unparsed(f"the body has {len(body)} bytes, expected at most {MOST_BODY}")
        document = expect(json.loads(body), dict, "the body")
        return list_of(document.get("words"), lambda word, where: expect(word, str, where), "words")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{error}", hint='send {"words": ["train", "run", "manifest.json"]}') from None


def _action(request: Request) -> str:
    action: str = request.path_params["action"]
    if action not in ACTIONS:
        raise HTTPException(404)
    return action


def _static(request: Request) -> Response:
    file = static_file(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return Response(file[0], media_type=file[1])
