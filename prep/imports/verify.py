"""Encodes some pictures again, and compares what their caches have."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from prep.cache.values import Values
from prep.dataset.ingest import KnownItem
from prep.digest import digest_bytes
from prep.encode.prepare import Prepared
from prep.encode.targets.records import PictureTarget
from prep.errors import CacheError
from prep.formatting import counted, join_texts, shell_name
from prep.fs.blob import read_blob
from prep.geometry import Placement
from prep.imports.compare import LatentComparison, compare
from prep.imports.npz import BadNpz
from prep.imports.source import NpzRows
from prep.models.fields import STD
from prep.parse import Unparsed
from prep.progress import Progress, phase
from prep.runtime import defer_interrupts
from prep.workers.pool import WorkerLost, WorkerPool

TRIES = 4  # latents that are read for each that is to be compared: a plain picture tells nothing
NAMED = 5  # in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """The result of comparing latents."""

    compared: int = 0  # latents that can only be of this VAE and picture
    deviation: float = 0.0  # the largest among them
    unclear: int = 0  # latents that would also fit other pictures, or whose picture cannot be decoded


def verify(ready: Prepared, rows: NpzRows, count: int, *, device: str, progress: Progress) -> Verified:
    """Compares up to `count` latents, chosen at random. Raises `CacheError` if one differs, `ModelError`.

    A latent that cannot be read is not compared: its row will say why.
    """
    items = {item.item.label: item for item in ready.resolved.survey.items}
    targets = list(ready.resolved.targets.latents.values())
    secrets.SystemRandom().shuffle(targets)
    compared: list[LatentComparison] = []
    differing: list[str] = []
    unclear = 0
    with _Again(ready, device, progress) as again, \
            progress("comparing latents", min(count, len(targets)), "latents") as tick:
        for target in targets[:TRIES * count]:
            latent = _latent(rows, target)
            if latent is None:
                continue
            posterior = again.posterior(items[target.name], target.placement)
            comparison = None if posterior is None else compare(latent, *posterior)
            if comparison is None or comparison.verdict == "unclear":
                unclear += 1
                continue
            tick(1)
            compared.append(comparison)
            if comparison.verdict == "differs":
                differing.append(f"{shell_name(target.name)}: {comparison.why} "
                                 f"(it deviates by {comparison.deviation:.2f})")
            if len(compared) == count:
                break
    if differing:
        _refuse(differing, len(compared), ready)
    return Verified(compared=len(compared), unclear=unclear,
                    deviation=max((comparison.deviation for comparison in compared), default=0.0))


def _refuse(differing: Sequence[str], compared: int, ready: Prepared) -> None:
    raise CacheError(
        f"{len(differing)} of {counted(compared, 'latent')} that were compared are not what the VAE of "
        f"{ready.resolved.recipe.model.path} makes of their pictures: {join_texts(differing, NAMED)}",
        hint="name the model whose VAE made them with --model, and add --bucket-no-upscale if sd-scripts had it; "
        "remove the caches of pictures that were replaced since; --verify 0 imports them as they are")


class _Again:
    """Decodes pictures as sd-scripts does, in a worker, and encodes them with the model's VAE."""

    def __init__(self, ready: Prepared, device: str, progress: Progress) -> None:
        """Raises `ModelError`, `OutOfMemoryError`."""
        from prep.encode.engines.decoding import SERVICE  # here: engines are for runs that encode

        self._alpha, self._factor = ready.resolved.recipe.image.alpha, ready.resolved.specs.family.factor
        with phase(progress, "loading the VAE"), defer_interrupts():
            from prep.models.loading import quiet_libraries  # here: torch is for runs that compare

            quiet_libraries()
            from prep.models.vae import VaeEncoder

            self._encoder = VaeEncoder(ready.resolved.model, device=device, compute="float32", dtype="float32",
                                       with_std=True, expected=ready.resolved.expected("latent", "vae"))
        self._workers = WorkerPool(SERVICE, most=1)

    def posterior(self, item: KnownItem, placement: Placement) -> tuple[Values, Values] | None:
        """Means and deviations of a placed picture, float32 [C, h, w]; `None` if it cannot be decoded, or encoded.
        """
        from prep.encode.engines.decoding import DECODE, LIMITS  # here: as above
        from prep.encode.engines.protocol import PictureMessage

        message = PictureMessage.of("stored", item.item.picture, item.picture, placement, color=self._alpha,
                                    factor=self._factor)
        try:
            (answer,) = self._workers.ask(DECODE, message, LIMITS)
            row = None if answer.code else self._encoder.encode(answer.array(message.shape)[None].copy())[0]
        except (WorkerLost, Unparsed, ValueError, OSError):
            return None
        return None if row is None else (row["latent"], row[STD])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self._workers.close()


def _latent(rows: NpzRows, target: PictureTarget) -> Values | None:
    """The latent in a cache; `None` if it is unreadable, not finite, or has changed."""
    try:
        data = read_blob(target.blob)
        latent = rows.values(data, target.placement)
    except (OSError, BadNpz):
        return None
    return latent if digest_bytes(data) == target.digest and np.isfinite(latent).all() else None
