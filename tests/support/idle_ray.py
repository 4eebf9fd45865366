"""A worker of the Ray engine that makes nothing, to see what the driver takes; imported by name in a cluster."""

from __future__ import annotations

from prep.encode.engines.job import Outcome
from prep.encode.engines.ray_worker import RayWorker


class IdleWorker(RayWorker):
    def encode(self, job):
        return Outcome(encoded={task.field: len(task.rows) for task in job.tasks}, transient=())
