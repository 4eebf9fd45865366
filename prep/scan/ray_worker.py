"""A worker of a scan on a Ray cluster: on some node it examines pictures in processes of its own, with their limits.

It reads pictures itself, from the disk or the store. Nothing here imports Ray: `crew.py` beside this makes an actor of
it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from prep.errors import PathError, Problem, UsageError
from prep.fs.blob import Blob
from prep.images.plugins import decoders
from prep.scan.examiner import Examiner, Looked
from prep.scan.worker import LIMITS, SERVICE
from prep.sources.item import Item
from prep.workers.crew import Failure
from prep.workers.pool import WorkerPool
from prep.workers.ray import check_version, failed, tried


class ScanWorker:
    """The actor of a scan. Some threads of Ray examine pictures in it, and one more asks whether it still works."""

    def __init__(self) -> None:
        self._examiner: Examiner | None = None

    def start(self, version: str, formats: str, directory: str, places: Mapping[str, int], cpus: int) -> Failure | None:
        """Gets ready, if this node judges pictures as the command does, and has the same ones.

        `version` and `formats` are the command's, `directory` is where it runs, `places` are the times at which its
        sources were last changed (ns); paths may be relative to it.
        """
        with suppress(OSError):  # a node that lacks it may still have all of the paths
            os.chdir(directory)
        try:
            check_version(version)
            _check_node(formats, places)
        except Problem as problem:
            return failed(problem)
        self._examiner = Examiner(WorkerPool(SERVICE, most=cpus), LIMITS)
        return None

    def examine(self, items: Sequence[Item]) -> list[Looked] | Failure:
        """As `Examiner.examine`."""
        answer: list[Looked] | Failure = self._tried("examine", items)
        return answer

    def decode_again(self, task: str, picture: Blob, file: str | None) -> Any:
        """As `Examiner.decode_again`."""
        return self._tried("decode_again", task, picture, file)

    def beat(self) -> int:
        """Answers, which means that the process works."""
        return 0

    def _tried(self, name: str, *values: Any) -> Any:
        return tried(lambda: getattr(self._examiner, name)(*values))


def _check_node(formats: str, places: Mapping[str, int]) -> None:
    """Raises `UsageError` for other decoders, `PathError` for another directory at the path of a source."""
    node = platform.node()
    if decoders() != formats:
        raise UsageError(f"node {node} decodes pictures with {decoders()}, expected {formats}, as the command",
                         hint="install the same version and the same extras on all nodes")
    for path, changed in places.items():
        try:
            here = os.stat(path).st_mtime_ns  # noqa: PTH116  # as it was typed
        except OSError as error:
            raise PathError(f"{path} cannot be read on node {node}: {error.strerror}", hint=SHARED) from None
        if here != changed:
            raise PathError(f"{path} on node {node} is another one than on the node of the command", hint=SHARED)


SHARED = "keep the pictures on a disk that all nodes share, under one path, or in an object store"
