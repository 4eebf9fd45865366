"""`prep view` in a process of its own, and requests that no browser would send."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from prep.dataset.edits.places import EditPlaces
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.progress import silent
from prep.recipe.load import load_recipe
from prep.recipe.options import without_caption_stop
from prep.studio.app import Studio
from prep.studio.forms import Form
from prep.view.app import build_app, build_source_app
from prep.view.edit.cost import cost_of
from prep.view.edit.editor import Edits
from prep.view.guard import Guard, new_token
from prep.view.model import ViewedModel
from prep.view.serve import Server, listen
from prep.view.source.state import SourceSet
from prep.view.source.survey import survey_source


@dataclass(frozen=True)
class Answer:
    """An answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Viewing:
    """A running server."""

    url: str  # with the token
    edit_token: str = ""
    process: subprocess.Popen[str] | None = None  # None: a thread of this process

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def base(self) -> str:
        """The path with the token, without its last slash."""
        return urlsplit(self.url).path.rstrip("/")

    def get(self, path: str = "/", **headers: str) -> Answer:
        """GET below the token; underscores in names of headers are hyphens."""
        return self.ask("GET", self.base + path, **headers)

    def ask(self, method: str, path: str, *, body: bytes | None = None, **headers: str) -> Answer:
        """Any request, its path as it is."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="host" in {name.lower() for name in headers})
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def form(self, number: int, kind: str) -> dict[str, str]:
        """The headers that a sample's page sends with its caption or mask."""
        text = self.get(f"/sample/{number}").text
        given = dict(re.findall(r'data-(token|sample)="([^"]*)"', text))
        version = re.search(rf'id="edit-{kind}" [^>]*data-version="([^"]*)"', text)
        assert version is not None, text
        return {"origin": f"http://127.0.0.1:{self.port}", "x_latentry_edit": given["token"],
                "x_latentry_sample": given["sample"], "x_latentry_version": version[1],
                "content_type": {"caption": "text/plain;charset=utf-8", "mask": "image/png"}[kind]}

    def save(self, number: int, kind: str, body: bytes, **headers: str) -> Answer:
        """Saves as the page does that shows what is there now."""
        form = {**self.form(number, kind), **headers}
        return self.ask("POST", f"{self.base}/edit/{number}/{kind}", body=body, **form)

    def undo(self, number: int, kind: str, **headers: str) -> Answer:
        """Undoes the last save."""
        return self.ask("POST", f"{self.base}/undo/{number}/{kind}", body=b"", **{**self.form(number, kind), **headers})

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        """POST below the token, as one of the pages does."""
        given = {"origin": f"http://127.0.0.1:{self.port}", "x_latentry_edit": self.edit_token, **headers}
        return self.ask("POST", self.base + path, body=body, **given)

    def interrupt(self) -> tuple[int, str, str]:
        """Ctrl-C: the exit code, and what else it has printed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def viewing(*words: object, command: str = "view") -> Iterator[Viewing]:
    """The server of `prep view`, or of another command, with these words, once it answers."""
    line = [sys.executable, "-m", "prep", command, *map(str, words), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.endswith("}\n"), process.communicate()[1]
        yield Viewing(url=json.loads(told)["url"], process=process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def viewing_here(manifest: Path, run: Path | None = None, model: Path | None = None,
                 before: Path | None = None, before_run: Path | None = None) -> Iterator[Viewing]:
    """The same pages from a thread of this process, which has its libraries already."""
    opened = open_manifest(read_manifest(manifest))
    viewed = None if model is None else ViewedModel(model, opened.manifest)
    app, site = build_app(opened, f"/{(token := new_token())}", run, viewed,
                          None if before is None else open_manifest(read_manifest(before)), before_run)
    with _served(Guard(app, token, site.edit_token), site.pictures.close, token) as running:
        yield replace(running, edit_token=site.edit_token)


@contextmanager
def viewing_source(source: Path, edits: Path | None = None, *, sidecars: bool = False, read_only: bool = False,
                   cache: Path | None = None, **choices: object) -> Iterator[Viewing]:
    """The pages of pictures that are not encoded, from a thread of this process; `choices` as for a recipe.

    With `edits` or `sidecars`, they are edited, unless they are `read_only`.
    """
    recipe = replace(load_recipe(source, choices=choices), edits=edits)
    survey = survey_source(without_caption_stop(recipe), jobs=2, scan=False, progress=silent)
    edited = None
    if (edits is not None or sidecars) and not read_only:
        cost = None if cache is None else partial(cost_of, recipe, cache, jobs=1)
        edited = Edits(places=EditPlaces(recipe=recipe, folder=edits), command="prep encode", cost=cost)
    app, site = build_source_app(SourceSet(survey), f"/{(token := new_token())}", edited)
    with _served(Guard(app, token, site.edit_token), site.pictures.close, token) as running:
        yield running


@contextmanager
def studio_here(project: Path, forms: Sequence[Form] = ()) -> Iterator[Viewing]:
    """The pages of `prep studio` from a thread of this process."""
    pages = Studio(project, forms, token := new_token())
    with _served(pages.app, pages.close, token) as running:
        yield replace(running, edit_token=pages.edit_token)


@contextmanager
def _served(app: Guard, close: Callable[[], object], token: str) -> Iterator[Viewing]:
    here, ready = listen(0), threading.Event()
    port, server = here.getsockname()[1], Server(app, ready.set)
    thread = threading.Thread(target=server.run_until_stopped, args=(here,))
    thread.start()
    try:
        assert ready.wait(60)
        yield Viewing(url=f"http://127.0.0.1:{port}/{token}/")
    finally:
        server.should_exit = True
        thread.join(60)
        close()
