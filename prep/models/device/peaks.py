"""The memory that encoders take at their peak, counted while they run on shapes alone: no weights are read.

Tensors are counted, not what kernels allocate inside. Where a CPU gives no huge pages, the heap that is kept from batch
to batch (`device.allocator`) gets holes: how many differs from run to run, so the most that was seen is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import diffusers
import torch
import transformers

from prep.errors import OutOfMemoryError, UsageError
from prep.formatting import format_bytes
from prep.geometry import Size
from prep.models.checkpoints.bounds import known_warnings, of_diffusers, require_room
from prep.models.checkpoints.classes import imported
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.device.allocator import has_huge_pages, keeps_heap
from prep.models.device.hollow import META, Hollow
from prep.models.device.host import available
from prep.models.device.offload import SHARED
from prep.models.family import Family, TextOptions
from prep.models.files import ComponentFiles, Model
from prep.models.fingerprint import text_files, vae_files
from prep.models.loading import load_part, quiet_libraries
from prep.models.pipeline import single_model_files
from prep.models.tensors import DTYPES, checked_device, device_names
from prep.models.text.pipeline import encoder_configs, spoken
from prep.models.text.quantization import encoder_bytes, most_captions
from prep.models.vae import posterior, use_tiles
from prep.models.vision.encoder import outputs
from prep.models.vision.model import COMPUTE, VisionModel
from prep.models.weights import shapes_in

PLENTY = 1 << 13  # bytes that a VAE takes for a pixel at the most: three times what SD's takes in float32
HOLES = 1.4  # what the kept heap takes for each byte of tensors at the most: of the VAEs of SD1.5 and SDXL 1.01 to 1.4
SURELY = 0.9 / HOLES  # of a forecast: what is more than the memory does not fit, with the fewest holes
_WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Bytes of an encoder."""

    name: str  # as people call it
    weights: int
    each: int  # beside them, for each item of a batch

    def of(self, count: int) -> int:
        """Bytes at the peak with so many items at a time."""
        return self.weights + count * self.each

    def fitting(self, free: int) -> int:
        """The most items at a time that `free` bytes hold."""
        return max(0, free - self.weights) // max(1, self.each)


@cache
def vae_peak(model: Model, compute: str, bucket: Size, tile: int = 0, *, on_cpu: bool = True) -> Peak:
    """Of the VAE, which encodes pictures of this size. Raises `ModelError`, and what a library raises for a config that
    it cannot use."""
    files, (width, height), dtype = vae_files(model), bucket, DTYPES[compute]
    kind = getattr(diffusers, class_of(pipeline_index(model), "vae", model)[1])

    def encode(vae: Any, mode: Hollow) -> object:
        if tile:
            use_tiles(vae, tile)
        image_13HW = mode.empty((1, height, width, 3), torch.uint8).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        return posterior(vae, image_13HW.to(dtype))

    weights, moving = _counted(kind, files, partial(of_diffusers, kind, files), dtype, encode)
    holes = HOLES if on_cpu and keeps_heap() and not has_huge_pages() else 1.0
    return Peak(name="VAE", weights=weights, each=int(moving * holes))


def text_peak(model: Model, family: Family, options: TextOptions, compute: str, batch: int) -> Peak:
    """Of the text encoder that takes most, for captions of the greatest length. Raises as `vae_peak`."""
    files, index = text_files(model), pipeline_index(model)
    configs, found = encoder_configs(model, family, files), []
    for name, each in files.encoders.items():
        kind = imported(class_of(index, name, model))
        layers = not kind.__name__.startswith(("T5", "UMT5"))  # of which pipelines take the last one
        length = options.max_length
        if kind.__name__.startswith("CLIP"):
            length = min(length, int(configs[name].max_position_embeddings))

        def encode(encoder: Any, _: Hollow, length: int = length, layers: bool = layers) -> object:
            tokens = torch.zeros((1, length), dtype=torch.int64)
            return encoder(tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=layers)

        count = partial(_counted, kind, each, partial(kind, configs[name]), DTYPES[compute])
        _, moving = count(encode)
        if family.text.vision is not None and family.references is not None:  # such a row is encoded alone
            tokens = family.references.most * family.text.vision.tokens
            _, alone = count(partial(encode, length=length + tokens))
            moving = max(moving, alone // (most_captions(options.quantization) or batch))
        weights = encoder_bytes(kind.__name__, shapes_in(each.tensors), options.quantization,
                                DTYPES[compute].itemsize)
        found.append(Peak(name=spoken(name), weights=weights, each=moving))
    return max(found, key=lambda peak: peak.of(most_captions(options.quantization) or batch))


def vision_peak(model: VisionModel) -> Peak:
    """Of a vision model, for pictures as it sees them. Raises as `vae_peak`."""
    files = single_model_files(model.folder)
    kind = getattr(transformers, model.kind.model)
    config = load_part(kind.config_class, files, "config of the vision model")
    width, height = model.preparation.seen

    def embed(tower: Any, mode: Hollow) -> object:
        image_13HW = mode.empty((1, height, width, 3), torch.uint8).permute(0, 3, 1, 2).float()
        return outputs(tower, model.kind.output, image_13HW)

    weights, moving = _counted(kind, files, partial(kind, config), DTYPES[COMPUTE], embed)
    return Peak(name="vision model", weights=weights, each=moving)


def _counted(kind: Any, files: ComponentFiles, made: Callable[[], Any], dtype: torch.dtype,
             encode: Callable[[Any, Hollow], object]) -> tuple[int, int]:
    """Bytes of a model, and those beside it at the peak of `encode`."""
    quiet_libraries()
    require_room(kind, files, made)
    with Hollow() as counted, known_warnings(), torch.inference_mode():
        with META:
            model = made().to(dtype).eval()
        counted.enter(model)
        counted.add(_WEIGHTS, [*model.parameters(), *model.buffers()])
        counted.reset_peak()
        encode(model, counted)
        peak: Mapping[str, int] = counted.peak
    weights = peak.get(_WEIGHTS, 0)
    return weights, sum(peak.values()) - weights


def first_of(device: str) -> torch.device | None:
    """The first of the devices that `--device` names; `None`: it is not here."""
    try:
        return checked_device(device_names(device)[0] if device == "all" or "," in device else device)
    except UsageError:
        return None


def free_bytes(there: torch.device | None) -> int | None:
    """Bytes that are free on a device; `None`: nobody knows."""
    if there is None:
        return None
    if there.type == "cuda":
        return int(torch.cuda.mem_get_info(there)[0])
    return available() if there.type in SHARED else None


def at_once(model: Model, compute: str, bucket: Size, tile: int, device: str, *, wanted: int, fewer: bool) -> int:
    """How many pictures of this size the VAE should encode at a time: as many as `wanted`, or if `fewer` are allowed,
    as memory holds. Raises `OutOfMemoryError` if it does not hold one.

    Only where a device has the computer's memory: there, the system ends who takes too much, without a word.
    """
    there = checked_device(device)
    free = free_bytes(there) if there.type in SHARED else None
    if free is None or wanted * PLENTY * bucket[0] * bucket[1] < free // 2:
        return wanted
    peak = vae_peak(model, compute, bucket, tile, on_cpu=there.type == "cpu")
    require_fitting(peak, bucket, free)
    return min(wanted, max(1, peak.fitting(free))) if fewer else wanted


def require_fitting(peak: Peak, bucket: Size, free: int) -> None:
    """Raises `OutOfMemoryError` if surely not even one picture of this size fits."""
    if SURELY * peak.of(1) > free:
        raise OutOfMemoryError(f"the VAE takes {format_bytes(peak.of(1))} of memory for a picture of {bucket[0]}x"
                               f"{bucket[1]} pixels, and {format_bytes(free)} are available",
                               hint="encode in overlapping tiles (--tile 512), in bfloat16 (--compute bfloat16) or "
                               "with a smaller --resolution, or end other programs; finished rows are kept")
