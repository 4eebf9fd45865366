"""Says what a planned encode takes of a device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prep.encode.options import BATCH, EMBED_BATCH, TEXT_BATCH
from prep.encode.plan import EncodePlan
from prep.encode.prepare import Prepared
from prep.errors import Problem
from prep.formatting import format_bytes
from prep.geometry import Size
from prep.models.device.peaks import Peak, first_of, free_bytes, require_fitting, text_peak, vae_peak, vision_peak
from prep.models.text.quantization import most_captions


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What encoding takes of the memory of a device."""

    free: int | None  # bytes of the device, or of the computer; None: the system does not say
    text: Peak | None  # of the text encoder that takes most; None: no captions to encode
    captions: int  # at a time
    vae: Peak | None  # None: no pictures to encode
    pictures: int  # at a time
    vision: Peak | None = None  # None: no pictures to embed

    @property
    def most(self) -> int | None:
        """The most pictures at a time that fit."""
        return None if self.vae is None or self.free is None else self.vae.fitting(self.free)

    def as_json(self) -> dict[str, Any]:
        """Its part of the document of `--json`."""
        return {"free": self.free, "text": None if self.text is None else self.text.of(self.captions),
                "latent": None if self.vae is None else self.vae.of(self.pictures), "batch_size": self.pictures,
                "largest_batch": self.most,
                "embedding": None if self.vision is None else self.vision.of(EMBED_BATCH)}

    def as_lines(self) -> list[str]:
        """The same for people."""
        parts = []
        if self.text is not None:
            parts.append(f"{self.text.name} {format_bytes(self.text.of(self.captions))}")
        if self.vae is not None:
            parts.append(f"VAE {format_bytes(self.vae.of(self.pictures))} for {self.pictures} of the largest pictures "
                         "at a time")
        if self.vision is not None:
            parts.append(f"{self.vision.name} {format_bytes(self.vision.of(EMBED_BATCH))}")
        if not parts:
            return []
        free = "" if self.free is None else f"; {format_bytes(self.free)} are free"
        more = "" if self.most is None else f", enough for {self.most} pictures at a time"
        return [f"estimated memory at the peak: {', '.join(parts)}{free}{more}"]


def forecast_of(ready: Prepared, planned: EncodePlan) -> Forecast | None:
    """The memory of `planned`; `None` if it needs no encoder. Raises `ModelError`, `OutOfMemoryError`."""
    resolved, options = ready.resolved, ready.call.options
    contexts, there = resolved.contexts.by_field(), first_of(options.device)
    free, on_cpu = free_bytes(there), there is None or there.type == "cpu"
    captions, text = most_captions(resolved.text_options.quantization) or TEXT_BATCH, None
    if planned.missing["text"]:
        text = _counted(lambda: text_peak(resolved.model, resolved.specs.family, resolved.text_options,
                                          str(contexts["text"]["compute"]), captions))
    vae, wanted = None, options.batch_size or BATCH
    sizes: list[Size] = [bucket for task in planned.tasks if task.field == "latent"
                         and (bucket := resolved.targets.bucket_of("latent", task.rows[0])) is not None]
    if sizes and resolved.latents_from is None:
        largest, tile = max(sizes, key=lambda size: size[0] * size[1]), ready.call.recipe.model.tile
        vae = _counted(lambda: vae_peak(resolved.model, str(contexts["latent"]["compute"]), largest, tile,
                                        on_cpu=on_cpu))
        if vae is not None and free is not None:
            require_fitting(vae, largest, free)
            wanted = wanted if options.batch_size else min(wanted, max(1, vae.fitting(free)))
    vision = None
    if (seeing := resolved.vision) is not None and planned.missing.get("embedding"):
        vision = _counted(lambda: vision_peak(seeing))
    if text is None and vae is None and vision is None:
        return None
    return Forecast(free=free, text=text, captions=captions, vae=vae, pictures=wanted, vision=vision)


def _counted(count: Callable[[], Peak]) -> Peak | None:
    """A peak; `None` for a model that a library cannot run without data: encoding says what is wrong with it."""
    try:
        return count()
    except Problem:
        raise
    except Exception:  # of a library, for broken configs nearly any
        return None
