"""The SAMPLES table: built from samples and the places of their rows; opened as flat NumPy columns for the hot path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.cache.tables import BATCH_ROWS, SAMPLES, TEXT, VIEW
from prep.records import RowRef, Sample, Size, Text, View

ROLES = ("train", "validation", "prior")
Column = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Columns of N samples; those of views and texts are flat, sample i having [offsets[i], offsets[i + 1])."""

    table: pa.Table  # names and captions, read one at a time
    ids: Column  # uint8 [N, 32]
    source: Column
    role: Column  # uint8: index into ROLES
    width: Column  # pixels, after orientation
    height: Column
    bucket: Column  # index into the manifest's buckets
    repeats: Column
    weight: Column
    coverage: Column  # NaN: no mask
    view_offsets: Column  # int64 [N + 1]
    views: Mapping[str, Column]  # scaled_width … mask_row; -1: has none
    text_offsets: Column
    texts: Mapping[str, Column]  # weight, shard, row

    def __len__(self) -> int:
        return len(self.bucket)

    def name(self, sample: int) -> str:
        """The sample's name, for messages."""
        return str(self.table["name"][sample].as_py())

    def captions(self, sample: int) -> list[str]:
        """The sample's captions, in the order of its texts."""
        return [text["caption"] for text in self.table["texts"][sample].as_py()]


def build_samples(
    samples: Iterable[Sample], buckets: Sequence[Size], refs: Mapping[str, RowRef], shard_index: Mapping[str, int],
    coverage: Mapping[str, float],
) -> pa.Table:
    """The SAMPLES table: `refs` has the place of every key, `shard_index` a digest's row in SHARDS.

    `coverage` has the mean of a sample's mask by sample id; a sample without a mask is not in it.
    """
    numbers = {bucket: number for number, bucket in enumerate(buckets)}
    ordered = iter(sorted(samples, key=lambda sample: (sample.id, sample.name)))

    def place(key: str | None) -> tuple[int, int]:
        return (-1, -1) if key is None else (shard_index[refs[key].shard], refs[key].row)

    batches = []
    while block := list(islice(ordered, BATCH_ROWS)):
        rows = [
            {
                "id": bytes.fromhex(sample.id), "name": sample.name, "source": sample.source, "role": sample.role,
                "picture": bytes.fromhex(sample.picture), "width": sample.size[0], "height": sample.size[1],
                "bucket": numbers[sample.bucket], "repeats": sample.repeats, "weight": sample.weight,
                "coverage": coverage.get(sample.id),
                "views": [_view(view, place(view.latent), place(view.mask)) for view in sample.views],
                "texts": [_text(text, place(text.key)) for text in sample.texts],
            }
            for sample in block
        ]
        batches.append(pa.RecordBatch.from_pylist(rows, schema=SAMPLES))
    return pa.Table.from_batches(batches, schema=SAMPLES)


def open_samples(table: pa.Table) -> SampleColumns:
    """The columns of a SAMPLES table. Numbers are copied out once (122 bytes a sample); strings stay mapped."""
    views, view_offsets = _flat(table["views"], VIEW)
    texts, text_offsets = _flat(table["texts"], {name: kind for name, kind in TEXT.items() if name != "caption"})
    roles = pc.index_in(table["role"], value_set=pa.array(ROLES))
    ids = [np.frombuffer(chunk.buffers()[1], np.uint8, 32 * len(chunk), 32 * chunk.offset).reshape(-1, 32)
           for chunk in table["id"].chunks if len(chunk)]
    return SampleColumns(
        table=table, ids=np.concatenate(ids) if ids else np.empty((0, 32), np.uint8),
        role=roles.to_numpy().astype(np.uint8), coverage=_numbers(pc.fill_null(table["coverage"], float("nan"))),
        **{name: _numbers(table[name]) for name in ("source", "width", "height", "bucket", "repeats", "weight")},
        view_offsets=view_offsets, views=views, text_offsets=text_offsets, texts=texts,
    )


def _view(view: View, latent: tuple[int, int], mask: tuple[int, int]) -> dict[str, Any]:
    placement = view.placement
    values = (*placement.scaled, *placement.crop, placement.flip, *latent, *mask)
    return dict(zip(VIEW, values, strict=True))


def _text(text: Text, place: tuple[int, int]) -> dict[str, Any]:
    return dict(zip(TEXT, (text.caption, text.weight, *place), strict=True))


def _flat(column: pa.ChunkedArray, fields: Mapping[str, Any]) -> tuple[dict[str, Column], Column]:
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(_numbers(pc.list_value_length(column)), out=offsets[1:])
    flat = pc.list_flatten(column)
    return {name: _numbers(pc.struct_field(flat, name)) for name in fields}, offsets


def _numbers(column: pa.ChunkedArray) -> Column:
    return np.ascontiguousarray(column.to_numpy())
