"""Estimates what a run would take, for `prep encode --dry-run`: bytes of its rows, memory, and time if it is measured.

Bytes are compared with those of the same rows as many caches have them: float32, and text padded to the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from prep.arrays import ITEM_BYTES, ArraySpec
from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.encode.plan import EncodePlan
from prep.encode.resolve import ResolvedRecipe
from prep.formatting import clock, format_bytes, grouped
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.fingerprint import text_files, vae_files
from prep.models.pipeline import single_model_files
from prep.models.text.quantization import encoder_bytes
from prep.models.vision.model import COMPUTE
from prep.models.weights import shapes_in

if TYPE_CHECKING:
    from prep.encode.forecast.memory import Forecast

FLOAT32 = 4  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldEstimate:
    """The rows of a field."""

    encode: int  # rows to make
    reuse: int  # rows that the cache has
    bytes: int  # of the rows to make
    stored: int  # bytes of all of them
    padded: int  # the same in float32, text padded to its longest row


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a short run of the encoders took, and what a whole run would take."""

    seconds: float  # of a whole run
    loading: float  # of these, to load the encoders
    memory: int | None  # bytes, at their peak: of the device if that has memory of its own, else of the process
    rows: Mapping[str, int]  # how many were encoded, by field


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run would take."""

    fields: Mapping[str, FieldEstimate]
    weights: int  # bytes of the largest encoder that would be loaded
    measured: Measured | None
    memory: Forecast | None = None  # None: nothing to encode, or nothing that could be counted

    def as_json(self) -> dict[str, Any]:
        """Its part of the document of `--json`."""
        measured = self.measured
        return {
            "fields": {name: {"encode": counts.encode, "reuse": counts.reuse, "bytes": counts.bytes,
                              "stored": counts.stored, "padded_float32": counts.padded}
                       for name, counts in self.fields.items()},
            "weights": self.weights,
            "memory": None if self.memory is None else self.memory.as_json(),
            "measured": None if measured is None else {"seconds": round(measured.seconds, 1), "memory": measured.memory,
                                                       "rows": dict(measured.rows)},
        }

    def as_lines(self) -> list[str]:
        """The same for people."""
        lines = [f"{name}: {grouped(counts.encode)} to encode ({format_bytes(counts.bytes)}), "
                 f"{grouped(counts.reuse)} reused" for name, counts in self.fields.items()]
        stored, padded = (sum(getattr(counts, name) for counts in self.fields.values())
                          for name in ("stored", "padded"))
        if stored:
            lines.append(f"all rows: {format_bytes(stored)}; as float32, with padded text: {format_bytes(padded)}, "
                         f"{padded / stored:.1f} times as much")
        if self.weights:
            lines.append(f"weights of the largest encoder: {format_bytes(self.weights)}")
        lines += [] if self.memory is None else self.memory.as_lines()
        if self.measured is not None:
            tried = ", ".join(f"{grouped(count)} {name}" for name, count in self.measured.rows.items())
            memory = self.measured.memory
            peak = "" if memory is None else f"; peak memory: about {format_bytes(memory)}"
            lines.append(f"time: about {clock(self.measured.seconds)}{peak} (measured with {tried})")
        return lines


def estimate(resolved: ResolvedRecipe, planned: EncodePlan, cache: Cache | None, measured: Measured | None,
             memory: Forecast | None = None) -> Estimate:
    """What running `planned` would take. Raises `ModelError`, `CacheError`."""
    tasks: dict[str, list[tuple[tuple[ArraySpec, ...], int]]] = {field: [] for field in planned.missing}
    for task in planned.tasks:
        bucket = resolved.targets.bucket_of(task.field, task.rows[0])
        tokens = None if bucket else resolved.group_of(task.field, task.rows[0])[1]
        specs = resolved.specs.arrays_of(task.field, bucket, tokens)
        tasks[task.field].append((specs, len(task.rows)))
    reused = {field: [] if cache is None else list(_stored(resolved, planned, cache, field))
              for field in planned.missing}
    fields = {field: FieldEstimate(
        encode=planned.missing[field], reuse=planned.reused[field], bytes=_bytes(tasks[field]),
        stored=_bytes([*tasks[field], *reused[field]]),
        padded=sum(count * _padded(resolved, field, specs) for specs, count in (*tasks[field], *reused[field])))
        for field in planned.missing}
    return Estimate(fields=fields, weights=_weights(resolved, planned), measured=measured,
                    memory=memory)


def _stored(resolved: ResolvedRecipe, planned: EncodePlan, cache: Cache,
            field: str) -> Iterable[tuple[tuple[ArraySpec, ...], int]]:
    """The arrays of wanted rows in the cache, and how many there are of each."""
    shards = planned.refs.only(resolved.targets.rows_by_field()[field]).by_shard()
    reader = Reader(cache)
    try:
        for shard, count in sorted(shards.items()):
            yield tuple(reader.array_info(shard, name)[0] for name in resolved.specs.as_manifest(field)), count
    finally:
        reader.close()


def _bytes(rows: Iterable[tuple[tuple[ArraySpec, ...], int]]) -> int:
    return sum(count * spec.row_bytes for specs, count in rows for spec in specs)


def _padded(resolved: ResolvedRecipe, field: str, specs: Iterable[ArraySpec]) -> int:
    """Bytes of a row in float32; of text, of the longest, without an attention mask."""
    shapes = resolved.specs.text.values() if field == "text" else [spec.shape for spec in specs]
    return FLOAT32 * sum(prod(shape) for shape in shapes)


def _weights(resolved: ResolvedRecipe, planned: EncodePlan) -> int:
    """Bytes of the largest encoder that missing rows need, in its compute dtype. Raises `ModelError`."""
    index, sizes = pipeline_index(resolved.model), [0]
    if planned.missing["text"]:
        for name, files in text_files(resolved.model).encoders.items():
            shapes, item = shapes_in(files.tensors), ITEM_BYTES[resolved.contexts.text["compute"]]
            kind = class_of(index, name, resolved.model)[1]
            sizes.append(encoder_bytes(kind, shapes, resolved.text_options.quantization, item))
    if planned.missing["latent"]:
        shapes = shapes_in(vae_files(resolved.model).tensors)
        sizes.append(ITEM_BYTES[resolved.contexts.latent["compute"]] * sum(map(prod, shapes.values())))
    if resolved.vision is not None and planned.missing.get("embedding"):
        shapes = shapes_in(single_model_files(resolved.vision.folder).tensors)
        sizes.append(ITEM_BYTES[COMPUTE] * sum(map(prod, shapes.values())))
    return max(sizes)
