"""The crew of a scan: what examines pictures, in processes of this computer or on the nodes of a Ray cluster.

The command walks the sources, remembers results and reports; requests and their results are the same wherever they are
answered. On a cluster each node has an actor, which asks worker processes of its own. Items whose actor was lost three
times become findings, which are not remembered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prep.fs.blob import Blob
from prep.images.plugins import decoders
from prep.recipe.schema import Recipe
from prep.scan.examiner import Examiner, Looked, not_examined
from prep.scan.memo import Stamp
from prep.scan.ray_worker import ScanWorker
from prep.sources.item import Item
from prep.workers.actors import Actors
from prep.workers.crew import ATTEMPTS, Crew, GivenUp
from prep.workers.processes import Threads
from prep.workers.ray import ClusterOptions, Share, actors_of, connected, library

BATCH = 8  # items per request: the exchange costs a twentieth of decoding a picture
SINGLE = 4  # items per worker that are sent singly at first, so that all workers have something to do


@dataclass(frozen=True, eq=False, slots=True)
class Examine:
    """A request to examine items, each with the stamp of its files."""

    stamped: Sequence[tuple[Item, Stamp | None]]

    def ask(self, examine: Callable[[Sequence[Item]], Any], _decode_again: Callable[..., Any]) -> Any:
        """Calls what answers this request."""
        return examine([item for item, _ in self.stamped])


@dataclass(frozen=True, eq=False, slots=True)
class DecodeAgain:
    """A request to decode a picture once more, with the digest `file`, for a task of the scan's service."""

    task: str
    picture: Blob
    file: str | None

    def ask(self, _examine: Callable[[Sequence[Item]], Any], decode_again: Callable[..., Any]) -> Any:
        """As of `Examine`."""
        return decode_again(self.task, self.picture, self.file)


Request = Examine | DecodeAgain
ScanCrew = Crew[Request, Any]


def batch_size(crew: ScanCrew, sent: int) -> int:
    """How many items a request should have, after so many were sent."""
    return 1 if sent <= SINGLE * crew.at_once else BATCH


def looked_at(request: Examine, result: list[Looked] | GivenUp) -> list[tuple[Item, Stamp | None, Looked]]:
    """The items of a request, with their stamps and results; findings if the request was given up."""
    if isinstance(result, GivenUp):
        said = (f"was not examined: its worker of the Ray cluster was lost {ATTEMPTS} times; the last time: "
                f"{result.said}")
        result = [not_examined(item, "decoder-crashed", said) for item, _ in request.stamped]
    return [(item, stamp, looked) for (item, stamp), looked in zip(request.stamped, result, strict=True)]


def local_crew(examiner: Examiner, jobs: int) -> ScanCrew:
    """`jobs` threads that ask an examiner; they end with it."""
    return Crew(Threads(lambda request: request.ask(examiner.examine, examiner.decode_again), jobs, examiner.close))


@contextmanager
def on_cluster(options: ClusterOptions, recipe: Recipe, note: Callable[[str], None]) -> Iterator[ScanCrew]:
    """A crew on a cluster, for pictures of a recipe's sources. Raises `UsageError`."""
    ray = library(options.address)
    notes: dict[str, None] = {}
    with connected(ray, options.address):
        try:
            with ray_crew(ray, Share.of(ray, options.workers, 0.0), lambda: _places(recipe), notes.setdefault) as crew:
                yield crew
        finally:
            for line in notes:
                note(line)


def ray_crew(ray: Any, share: Share, places: Callable[[], dict[str, int]], note: Callable[[str], object]) -> ScanCrew:
    """A crew of actors, each with a share of a cluster. `places`: the sources, and when each was last changed (ns)."""
    at_once = share.cpus + 1  # requests to an actor: one for each of its processes, and the next
    made = actors_of(ray, ScanWorker, share, max_concurrency=at_once)

    def new() -> tuple[Any, Any]:
        actor = made.remote()
        return actor, actor.start.remote(version("latentry"), decoders(), str(Path.cwd()), places(), share.cpus)

    def call(actor: Any, request: Request) -> Any:
        return request.ask(actor.examine.remote, actor.decode_again.remote)

    return Crew(Actors(ray, share, new, call, ahead=at_once, at_once=at_once), note=note)


def _places(recipe: Recipe) -> dict[str, int]:
    """The sources and references that are one directory or file here, and when each was last changed (ns)."""
    changed = {}
    for path in map(str, (*(source.path for source in recipe.sources), *recipe.reference_folders)):
        with suppress(OSError):
            changed[path] = os.stat(path).st_mtime_ns  # noqa: PTH116  # as it was typed
    return changed
