"""The pages of `prep view` for what a project has, each opened when it is first looked at."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse

from prep.errors import PathError, Problem
from prep.fs.place import Local
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.progress import silent
from prep.recipe.load import load_recipe
from prep.recipe.options import without_caption_stop
from prep.runs.document import NAME as RUN
from prep.runs.document import check_manifest, manifest_of
from prep.studio.project import read_project
from prep.view.app import build_app, build_source_app
from prep.view.guard import App, Receive, Scope, Send
from prep.view.pages import error_page
from prep.view.site import Site
from prep.view.source.state import SourceSet
from prep.view.source.survey import survey_source

KINDS = {"pictures": "pictures", "recipes": "pictures", "manifests": "samples", "runs": "run"}  # and what they show
OPEN = 4  # sites at a time
JOBS = 2  # threads that read a source


def address_of(base: str, kind: str, name: str) -> str:
    """Where the pages of a place of a project begin."""
    return f"{base}/{'within' if '/' in name else 'look'}/{kind}/{quote(name)}"


class Looks:
    """An application that shows a manifest, a run or a source by its name in the project."""

    def __init__(self, project: Path, base: str, edit_token: str) -> None:
        self._project, self._base, self._edit_token = project, base, edit_token
        self._lock, self._opening = threading.Lock(), dict[tuple[str, str], threading.Lock]()
        self._sites: OrderedDict[tuple[str, str], tuple[object, App, Site]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request below /look/KIND/NAME or /within/KIND/FOLDER/NAME."""
        given = scope["path_params"]
        kind, name = given["kind"], "/".join(given[part] for part in ("folder", "name") if part in given)
        try:
            app: App = (await run_in_threadpool(self.opened, kind, name))[0]
        except Problem as error:
            app = HTMLResponse(error_page(self._base, 409, error.message, error.hint, first="The project"), 409)
        await app(scope, receive, send)

    def close(self) -> None:
        """Closes what is open."""
        with self._lock:
            while self._sites:
                self._sites.popitem()[1][2].pictures.close()

    def opened(self, kind: str, name: str) -> tuple[App, Site]:
        """The pages of one place, as it is now. Raises `Problem`."""
        if kind not in KINDS or name not in read_project(self._project).names(kind):
            raise PathError(f"the project has no {name[:100]} among its {kind[:20]}", hint="begin with the project")
        key = kind, name
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # which may take long: other places are shown meanwhile
            now = _stamp(self._project / name / (RUN if kind == "runs" else ""))  # its directory changes all the time
            with self._lock:
                known = self._sites.get(key)
            if known is None or known[0] != now:
                known = (now, *self._opened(kind, name))
                with self._lock:
                    gone = [self._sites.pop(key)] if key in self._sites else []
                    self._sites[key] = known
                    gone += [self._sites.popitem(last=False)[1] for _ in range(len(self._sites) - OPEN)]
                for _, _, site in gone:
                    site.pictures.close()
            with self._lock:
                if key in self._sites:
                    self._sites.move_to_end(key)
            return known[1:]

    def _opened(self, kind: str, name: str) -> tuple[App, Site]:
        base, place = address_of(self._base, kind, name), self._project / name
        if kind == "manifests":
            return build_app(open_manifest(read_manifest(place)), base, home=self._base)
        if kind == "runs":
            manifest = manifest_of(place)
            check_manifest(Local(place), manifest)
            return build_app(open_manifest(read_manifest(manifest)), base, place, edit_token=self._edit_token,
                             home=self._base)
        recipe = without_caption_stop(load_recipe(place, choices={}))
        survey = survey_source(recipe, jobs=JOBS, scan=False, progress=silent)
        if not survey.items:
            raise PathError(f"{name} has no picture that can be used", hint=f"prep scan {name} says what is there")
        return build_source_app(SourceSet(survey), base, home=self._base)


def _stamp(place: Path) -> object:
    """What changes with a file or a directory."""
    try:
        status = place.stat()
    except OSError as error:
        raise PathError(f"cannot read {place.name}: {error.strerror or error}") from None
    return status.st_mtime_ns, status.st_ino
