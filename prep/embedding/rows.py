"""Reads embeddings from a cache: those of a manifest's samples, or of a recipe's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from prep.cache.ledger.ledger import load_ledger
from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.store import Cache
from prep.embedding.survey import Survey
from prep.errors import ConfigError
from prep.formatting import shell_name
from prep.manifest.opened import OpenedManifest
from prep.manifest.tables import EMBEDDING

Rows = np.ndarray[Any, np.dtype[np.float16]]  # [N, D], each of length 1
Mask = np.ndarray[Any, np.dtype[np.bool_]]  # [N]
BLOCK = 1 << 14  # rows that are asked for at a time


def embeddings_of(opened: OpenedManifest) -> tuple[Rows, Mask]:
    """The embeddings of a manifest's samples, in their order, [N, D], and which samples have one, [N]; the rows of the
    others are zeros. Each row's checksum is tested.

    Raises `ConfigError` if the manifest has none, `CacheError` for rows that are missing or damaged.
    """
    manifest, samples = opened.manifest, opened.samples
    if not manifest.embedded:
        raise ConfigError(f"{manifest.path} has no embeddings", hint="name a vision model in [embed] of the recipe and "
                          f"run prep encode again, or: prep embed SOURCE --model MODEL --cache "
                          f"{shell_name(str(manifest.cache))}")
    width = next((shard["shapes"]["embedding"][0] for shard in opened.shards if shard["field"] == "embedding"), 0)
    digests = [shard["digest"] for shard in opened.shards]
    places = zip(*(samples.embeddings[name].tolist() for name in EMBEDDING), strict=True)
    return _read(opened.cache, [None if shard < 0 else RowRef(shard=digests[shard], row=row) for shard, row in places],
                 width)


def embeddings_in(cache: Cache, surveyed: Survey) -> tuple[Rows, Mask]:
    """The embeddings of a recipe's pictures, as `embeddings_of`; `prep embed` makes those that the cache lacks. Raises
    `CacheError`."""
    refs = load_ledger(cache).resolve(surveyed.targets.embeddings)
    return _read(cache, [refs.get(picture.key) for picture in surveyed.pictures], surveyed.vision.width)


def _read(cache: Cache, places: Sequence[RowRef | None], width: int) -> tuple[Rows, Mask]:
    """The rows at these places, shard after shard."""
    rows, there = np.zeros((len(places), width), np.float16), np.array([place is not None for place in places], bool)
    wanted = sorted((place.shard, place.row, number) for number, place in enumerate(places) if place is not None)
    with closing(Reader(cache)) as reader:
        for start in range(0, len(wanted), BLOCK):
            block = wanted[start:start + BLOCK]
            out = np.empty((len(block), 2 * width), np.uint8)
            reader.read_batch(out, "embedding", [RowRef(shard=shard, row=row) for shard, row, _ in block])
            rows[[number for *_, number in block]] = out.view(np.float16)
    return rows, there
