"""Draws the pictures of checkpoints that an evaluation lacks, and embeds them.

The denoiser is in memory while pictures are drawn, the vision model afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prep.cache.records import RowRef
from prep.digest import digest_bytes, digest_parts
from prep.embedding.rows import Rows
from prep.errors import CacheError, ModelError
from prep.fs.untrusted import read_parts
from prep.images.resize import scaled_pixels
from prep.loader.device import compute_dtype
from prep.loader.index import Index
from prep.loader.rows import Rows as StoredRows
from prep.models.device.memory import memory_freed
from prep.models.family import TextArrays
from prep.models.vision.encoder import VisionEncoder
from prep.models.vision.model import VisionModel
from prep.progress import Progress
from prep.recipe.prompts import PromptSettings
from prep.runtime import killable
from prep.training.schema import Config, Sampling
from train.config.load import by_name
from train.memory.forecast import blocks_offloaded
from train.models.adapters.frozen import PART
from train.models.denoiser import Denoiser, adapted, load, precision_of
from train.runs.checkpoint import files_of
from train.runs.resume import Start
from train.sample import put_trained
from train.sampling.prompts import PromptRows
from train.sampling.sampler import pictures
from train.selection.kept import Kept
from train.setup import Setup
from train.state_files import averaged

MEANING = 2  # raise it when the same key would name another picture
# The settings that decide what weights draw, besides those of `sample`; the others decide how they were trained.
DECIDING = ("method", "precision", "zero_terminal_snr", "guidance_embedding", "quantization", "tf32", "channels_last",
            "attention", "compile", "lora", "full")
AT_ONCE = 8  # pictures that are drawn before they are kept: the VAE is loaded once for them
SEEDS = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A checkpoint, or the base model, with the pictures that it draws."""

    start: Start | None  # None: the base model
    setup: Setup
    settings: Sampling
    prompts: tuple[PromptRows, ...]  # each with its seed
    keys: tuple[str, ...]  # of the pictures


def column(start: Start | None, setup: Setup, settings: Sampling, prompts: Sequence[PromptRows], device: torch.device
           ) -> Column:
    """A column with the keys of its pictures, as they are drawn on a device of this type. Raises `CacheError`."""
    about = {"meaning": MEANING, "weights": "base" if start is None else _weights(start, setup),
             "base": {name: digest for name, digest in setup.model.base.items() if name != PART},
             "models": dict(setup.manifest.document["models"]), "others": dict(setup.model.others),
             "family": setup.family.name, "prediction": setup.prediction, "config": _deciding(setup.config),
             "computed": [device.type, str(compute_dtype(precision_of(setup.config), device))],
             "sampler": settings.sampler,
             "drawn_by": settings.model, "steps": settings.steps, "guidance": settings.guidance,
             "size": settings.size or setup.index.usual_size}
    return Column(start=start, setup=setup, settings=settings, prompts=tuple(prompts), keys=tuple(
        digest_bytes(json.dumps({**about, "prompt": _described(prompt)}, sort_keys=True).encode())
        for prompt in prompts))


def seeded(prompts: Iterable[PromptRows], seeds: int, seed: int) -> tuple[PromptRows, ...]:
    """Each prompt with so many seeds, from its own on, or else from `seed`: first all prompts with their first."""
    every = list(prompts)
    return tuple(replace(prompt, target=None, settings=replace(
        prompt.settings, seed=((seed if prompt.settings.seed is None else prompt.settings.seed) + number) % SEEDS))
        for number in range(seeds) for prompt in every)


def no_prompt(index: Index) -> tuple[PromptRows, ...]:
    """No prompt, as a prompt; none for a model that draws only of pictures, or whose text shows some."""
    if index.inpaints or index.seeing:
        return ()
    nothing = index.unconditional()
    return (PromptRows(prompt="", positive=nothing, negative=nothing, settings=PromptSettings()),)


@killable()
def draw(columns: Sequence[Column], kept: Kept, vision: str, device: torch.device, progress: Progress) -> int:
    """Draws the pictures that are not kept; returns how many. The base model comes first, if it is among the columns: a
    LoRA is put into it. Raises `CacheError`, `ModelError`, `OutOfMemoryError`."""
    lacking = [[number for number, key in enumerate(each.keys) if not kept.has(key, vision)] for each in columns]
    total = sum(map(len, lacking))
    if not total:
        return 0
    with progress("drawing", total, "pictures") as tick, memory_freed(device):
        denoiser: Denoiser | None = None
        before: Column | None = None
        for each, numbers in zip(columns, lacking, strict=True):
            if not numbers:
                continue
            if (again := _again(denoiser, before, each, device)) is None:
                denoiser = None  # else there would be two while the next is loaded
                again = load(each.setup.model.drawing, each.setup.config, each.setup.prediction, device,
                             adapt=each.start is not None or each.setup.config.method == "full",
                             family=each.setup.family.name, offload=blocks_offloaded(each.setup, device),
                             progress=progress)
            denoiser, before = again, each
            if each.start is not None:
                with aside(each.start.folder):
                    put_trained(denoiser, each.setup, each.start)
            rows, left = StoredRows(each.setup.index), iter(numbers)
            while some := list(islice(left, AT_ONCE)):
                made = pictures(denoiser, rows, each.setup.model.drawing, [each.prompts[number] for number in some],
                                each.settings, vae=each.setup.model.path, alone=True)
                for number, pixels in zip(some, made, strict=True):
                    kept.put_picture(each.keys[number], pixels)
                tick(len(some))
            del again
        del denoiser
    return total


@contextmanager
def aside(checkpoint: Path) -> Iterator[None]:
    """Gives damage of a checkpoint the hint for a command that reads all of a run."""
    try:
        yield
    except CacheError as error:
        error.hint = f"the others are evaluated once {checkpoint} is moved out of the run"
        raise


def _again(denoiser: Denoiser | None, before: Column | None, now: Column, device: torch.device) -> Denoiser | None:
    """The denoiser that is loaded, if the next column can be put into it."""
    if denoiser is None or before is None or before.setup is not now.setup:
        return None
    if before.start is not None or now.start is None or now.setup.config.method == "full":
        return denoiser
    config = now.setup.config
    plain = config.method == "lora" and not blocks_offloaded(now.setup, device) and not config.compile
    return adapted(denoiser, now.setup.model.drawing, config, now.setup.prediction) if plain else None


@killable()
def embed(keys: Sequence[str], kept: Kept, vision: VisionModel, device: torch.device, progress: Progress) -> None:
    """Embeds the kept pictures that have no embedding, one by one: so a row depends on its picture alone. Raises
    `ModelError`, `OutOfMemoryError`."""
    name = vision.expected.digest
    lacking = [key for key in dict.fromkeys(keys) if kept.row(key, name) is None]
    if not lacking:
        return
    how = vision.preparation
    with progress("embedding", len(lacking), "pictures") as tick, memory_freed(device):
        encoder = VisionEncoder(vision, device=str(device))
        for key in lacking:
            pixels = kept.picture(key)
            assert pixels is not None, "it was drawn before"
            size = (pixels.shape[1], pixels.shape[0])
            seen = scaled_pixels(pixels, how.scaled_size(size), how.crop, how.resample)
            (row,) = encoder.begin(np.stack([seen]))()
            if row is None:
                raise ModelError(f"the vision model in {vision.folder} returns values that are not finite for a drawn "
                                 "picture", hint="name another with --embed")
            kept.put_row(key, name, row["embedding"])
            tick(1)
        del encoder


def rows_of(keys: Sequence[str], kept: Kept, vision: str) -> Rows:
    """The embeddings of pictures, float16 [P, D]."""
    rows = [kept.row(key, vision) for key in keys]
    assert all(row is not None for row in rows), "they were made before"
    return np.stack(rows)  # type: ignore[arg-type]  # said above


def _weights(start: Start, setup: Setup) -> list[str]:
    """The digests of the files with the weights that draw. Raises `CacheError`."""
    state = start.state
    return [state.files[name].sha256 or digest_parts(read_parts(start.folder / name))  # None: version 1
            for name in files_of(averaged(start, setup.family), state.files)]


def _deciding(config: Config) -> dict[str, Any]:
    """The settings of `DECIDING` that have not their defaults: one that a later version adds changes no key."""
    usual = by_name(Config())
    return {name: value for name, value in by_name(config).items()
            if name.partition(".")[0] in DECIDING and value != usual.get(name)}


def _described(prompt: PromptRows) -> dict[str, Any]:
    return {"text": prompt.prompt, "settings": asdict(prompt.settings), "rows": list(map(_identity, (
        prompt.positive, prompt.negative, *prompt.references, prompt.inpaint_mask)))}


def _identity(row: RowRef | TextArrays | Tensor | None) -> Any:
    """What names a row: its place, since a shard is named by its bytes, or the digest of its own bytes."""
    if row is None or isinstance(row, RowRef):
        return None if row is None else [row.shard, row.row]
    arrays = {"": row} if isinstance(row, Tensor) else dict(row)
    return {name: digest_parts(_bytes_of(array)) for name, array in arrays.items()}


def _bytes_of(array: Tensor) -> Iterator[bytes]:
    yield json.dumps([str(array.dtype), list(array.shape)]).encode()
    yield array.contiguous().view(torch.uint8).numpy().tobytes()
