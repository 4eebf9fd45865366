"""Input and output of an executor, and the provenance in its commits."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

from prep.arrays import ArraySpec
from prep.cache.records import Task
from prep.cache.store import Cache
from prep.encode.engines.claims import Claims
from prep.encode.engines.protocol import Cell
from prep.encode.targets.records import LatentRows, Targets
from prep.encode.text_groups import TextGroups
from prep.findings import Finding
from prep.geometry import Size
from prep.manifest.samples import Samples
from prep.models.family import TextOptions
from prep.models.fields import FieldSpecs, embedding_arrays
from prep.models.files import Model
from prep.models.fingerprint import Expected
from prep.models.vision.model import VisionModel
from prep.workers.ray import ClusterOptions

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureJob:
    """Tasks to run, and their settings, which need no model with a family: those of embeddings. Settings that the keys
    do not cover change no row."""

    cache: Cache
    targets: Targets
    tasks: tuple[Task, ...]
    alpha: str  # what becomes of transparency: the recipe's setting
    vision: VisionModel | None  # what makes embeddings; None: there are none
    device: str  # one for `local`, any number for `devices`
    batch_size: int  # pictures per forward pass of the VAE
    jobs: int  # threads that decode
    max_rejects: int  # rows that may fail before the run stops
    claims: Claims = field(default_factory=Claims)

    @property
    def cell(self) -> tuple[int, Cell]:
        """Pixels per latent cell and side, and what a mask has of a cell; of no account without masks."""
        return 1, "mean"

    def arrays_of(self, task: Task) -> tuple[ArraySpec, ...]:
        """The arrays of each row of a task."""
        assert self.vision is not None, "a job without a family makes embeddings"
        return embedding_arrays(self.vision.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(PictureJob):
    """Tasks to run, of all fields."""

    model: Model
    vae: Expected  # fingerprints of the model's encoders in the keys
    text: Expected
    specs: FieldSpecs
    compute: Mapping[str, str]  # dtype that the encoder of each field computes in, as in its keys
    tile: int = 0  # pixels; the VAE encodes larger pictures in tiles of this side; 0: never
    encoder_memory: int | None = None  # bytes of the device for the weights of a text encoder; None: no limit
    text_options: TextOptions
    text_groups: TextGroups
    vision: VisionModel | None = None
    fewer: bool = False  # whether the VAE's pictures at a time may be fewer, where memory lacks
    compiled: bool = False  # whether encoders are compiled; not in the keys
    latents: LatentRows | None = None  # what makes latents; None: the VAE

    @property
    def cell(self) -> tuple[int, Cell]:
        family = self.specs.family
        return family.factor, "mean" if family.inpainting is None else family.inpainting.cell

    def arrays_of(self, task: Task) -> tuple[ArraySpec, ...]:
        return self.specs.arrays_of(task.field, self.bucket_of(task), self.tokens_of(task))

    def share(self, tasks: Sequence[Task]) -> Job:
        """A job of some of the tasks, with the targets of their rows alone, so that it can be sent."""
        keys = [key for task in tasks for key in task.rows]
        targets = replace(self.targets, samples=Samples(), labels=(), prompts=(), findings=(), notices=(),
                          latents={key: self.targets.latents[key] for key in keys if key in self.targets.latents},
                          masks={key: self.targets.masks[key] for key in keys if key in self.targets.masks},
                          texts={key: self.targets.texts[key] for key in keys if key in self.targets.texts},
                          embeddings={key: self.targets.embeddings[key] for key in keys
                                      if key in self.targets.embeddings})
        return replace(self, tasks=tuple(tasks), targets=targets, text_groups=self.text_groups.only(keys),
                       claims=Claims())

    def bucket_of(self, task: Task) -> Size | None:
        """The bucket that all rows of a latent or mask task have."""
        return self.targets.bucket_of(task.field, task.rows[0])

    def tokens_of(self, task: Task) -> int | None:
        """The tokens of all rows of a text task; `None` if rows are not trimmed."""
        return self.text_groups.tokens(task.rows[0]) or None if task.field == "text" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions(ClusterOptions):
    """How a Ray cluster is used."""

    gpus: float | None = None  # of each worker; None: one, if the cluster has any and the device is not the CPU
    seconds: float = 3600.0  # that a task may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Rows encoded, by field, and rows that failed only in this run (such as a file that changed meanwhile)."""

    encoded: dict[str, int]
    transient: tuple[Finding, ...]
    notices: tuple[str, ...] = ()
    failed: int = 0  # rows that count against max_rejects

    @classmethod
    def sum(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome of several jobs; each notice once."""
        encoded: Counter[str] = Counter()
        for outcome in outcomes:
            encoded.update(outcome.encoded)
        return cls(encoded=dict(encoded),
                   transient=tuple(chain.from_iterable(outcome.transient for outcome in outcomes)),
                   notices=tuple(dict.fromkeys(chain.from_iterable(outcome.notices for outcome in outcomes))),
                   failed=sum(outcome.failed for outcome in outcomes))


def provenance(device: str, seconds: float) -> dict[str, Any]:
    """Host, device, library versions and duration, for a commit; never part of a key."""
    return {"host": platform.node(), "device": device, "versions": _versions(), "milliseconds": round(1000 * seconds)}


@cache
def _versions() -> dict[str, str]:
    """Versions of the libraries that make rows; the lookup takes 6 ms."""
    return {name: version(name) for name in LIBRARIES}
