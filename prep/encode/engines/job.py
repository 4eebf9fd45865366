"""What an executor is given, what it hands back, and what its commits say of their making."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prep.cache.records import Task
from prep.cache.store import Cache
from prep.encode.targets import Targets
from prep.findings import Finding
from prep.geometry import Size
from prep.models.fields import FieldSpecs
from prep.models.fingerprint import Expected

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Tasks to be run; everything in it decides how fast, except what the keys already hold."""

    cache: Cache
    model: Path
    vae: Expected  # what the keys say of the model's encoders
    text: Expected
    specs: FieldSpecs
    wants: Targets
    tasks: tuple[Task, ...]
    alpha: str  # color that transparency is flattened onto
    origin: str  # of masks: "file" or "alpha"
    compute: str  # dtype of the encoders
    device: str
    batch_size: int  # pictures per forward pass of the VAE
    jobs: int  # threads that decode
    max_rejects: int  # rows that may fail before the run stops

    def bucket_of(self, task: Task) -> Size | None:
        """The bucket that all rows of a latent or mask task have."""
        return self.wants.bucket_of(task.field, task.rows[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What was done: rows made by field, and rows that failed for now only (a file that changed under us)."""

    encoded: dict[str, int]
    transient: tuple[Finding, ...]


def provenance(device: str, seconds: float) -> dict[str, Any]:
    """What a commit says of its making; never part of a key."""
    return {"host": platform.node(), "device": device, "versions": _versions(), "milliseconds": round(1000 * seconds)}


@cache
def _versions() -> dict[str, str]:
    """Of the libraries that make rows; looking them up takes 6 ms."""
    return {name: version(name) for name in LIBRARIES}
