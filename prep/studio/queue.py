"""The queue of a project while its pages are shown: a thread starts what waits, unless the queue is paused."""

from __future__ import annotations

import threading
from pathlib import Path

from prep.errors import Problem
from prep.jobs.queue import jobs_of
from prep.jobs.runner import PAUSE, Runner


class Queue:
    """Starts jobs. What waited when it was made waits until a person looks at it: the directory may be a stranger's."""

    def __init__(self, project: Path) -> None:
        self._runner = Runner(project)
        self.paused = any(job.state == "waiting" for job in jobs_of(project))
        self.trouble = ""  # why jobs cannot be started
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Starts no further job; those that run go on."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(PAUSE):
            if self.paused:
                continue
            try:
                self._runner.step()
                self.trouble = ""
            except Problem as error:
                self.trouble = error.message
            except OSError as error:
                self.trouble = f"no job can be started: {error.strerror or error}"
