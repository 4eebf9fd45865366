"""Builds the SAMPLES table from samples and the places of their rows, and opens it as flat NumPy columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.batching.split import ROLES, Role
from prep.cache.ledger.columns import KEY, Column
from prep.cache.records import RowRef
from prep.fs.blob import blob_at, read_blob
from prep.fs.paths import resolve
from prep.fs.place import Place, is_directory, place_from
from prep.geometry import BucketShape, Placement, Size
from prep.manifest.tables import (
    BATCH_ROWS,
    DIGEST,
    EMBEDDING,
    POOL,
    REFERENCE,
    SAMPLES,
    SAMPLES_WITH_REFERENCES,
    TEXT,
    VIEW,
    samples_schema,
)

BLOCK = 1 << 12  # samples that are made into columns at a time
NO_PROMPT = ""  # the caption of the last text of a sample whose references the text encoder sees, of weight 0


class ShownPicture(NamedTuple):
    """A picture that is a reference."""

    picture: str  # its digest
    size: Size  # pixels, after orientation
    placement: Placement  # as the VAE is given it


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Columns of N samples; views and texts are flat, sample i's from offsets[i] to before offsets[i + 1]."""

    table: pa.Table  # for names and captions, which are read one by one
    ids: Column  # uint8 [N, 32]
    source: Column
    role: Column  # uint8: index into ROLES; len(ROLES) for an unknown role
    width: Column  # pixels, after orientation
    height: Column
    bucket: Column  # index into the manifest's buckets
    repeats: Column
    weight: Column
    coverage: Column  # NaN: no mask
    view_offsets: Column  # int64 [N + 1]
    views: Mapping[str, Column]  # scaled_width … mask_row; -1: no row
    text_offsets: Column
    texts: Mapping[str, Column]  # weight, shard, row
    reference_offsets: Column  # of the references of all views of a sample, one view after the other
    references: Mapping[str, Column]  # width, height, scaled_width … latent_row
    embeddings: Mapping[str, Column]  # embedding_shard, embedding_row, of N samples; -1: it has none

    def __len__(self) -> int:
        return len(self.bucket)

    @property
    def shard_columns(self) -> list[Column]:
        """The numbers of the shards that samples need, -1 for none."""
        return [columns[name] for columns in (self.views, self.texts, self.references, self.embeddings)
                for name in columns if name.endswith("shard")]

    @property
    def masked(self) -> int:
        """The number of samples with a mask."""
        return len(self) - int(self.table["coverage"].null_count)

    @property
    def caption_lengths(self) -> Column:
        """Characters of each caption, int64, in the order of `texts`; computed from the table each time."""
        captions = pc.struct_field(pc.list_flatten(self.table["texts"]), "caption")
        return _numbers(pc.utf8_length(captions)).astype(np.int64)

    def name(self, sample: int) -> str:
        """The sample's name, for messages."""
        return str(self.table["name"][sample].as_py())

    def with_sizes(self, buckets: Sequence[Size]) -> pa.Table:
        """The table with the bucket's sides in pixels: `bucket_width`, `bucket_height`."""
        sizes = np.array(buckets, np.int32).reshape(-1, 2)[self.bucket]
        return self.table.append_column("bucket_width", pa.array(sizes[:, 0])).append_column(
            "bucket_height", pa.array(sizes[:, 1]))

    def captions(self, sample: int) -> list[str]:
        """The sample's captions, in the order of its texts; without the text of no prompt."""
        captions = [text["caption"] for text in self.table["texts"][sample].as_py()]
        return captions[:-1] if self.has_no_prompt(sample) and captions[-1] == NO_PROMPT else captions

    def has_no_prompt(self, sample: int) -> bool:
        """Whether the last text of a sample may be that of no prompt: it has references, and that is never drawn."""
        first, past = (int(self.text_offsets[sample + at]) for at in (0, 1))
        shown = self.reference_offsets[sample] < self.reference_offsets[sample + 1]
        return bool(shown) and past - first > 1 and not self.texts["weight"][past - 1]

    def picture_digest(self, sample: int) -> str:
        """The SHA-256 of the sample's picture file."""
        return str(self.table["picture"][sample].as_py().hex())

    def picture_path(self, sample: int, sources: Sequence[Place | None]) -> Place | None:
        """The path of the sample's picture, which may be gone; `None` if no path leads to its source."""
        source = sources[int(self.source[sample])]
        return None if source is None else resolve(source) / self.name(sample)

    def reference_name(self, sample: int, reference: int) -> str:
        """The name of a sample's reference, a number in the columns of `references`."""
        return str(self._reference(sample, reference)["name"].as_py())

    def reference_digest(self, sample: int, reference: int) -> str:
        """The SHA-256 of the file of a sample's reference."""
        return str(self._reference(sample, reference)["picture"].as_py().hex())

    def reference_path(self, sample: int, reference: int, sources: Sequence[Place | None]) -> Place | None:
        """The path of a sample's reference, which may be gone; `None` if no path leads there."""
        source = sources[int(self.source[sample])]
        return None if source is None else place_from(source, self.reference_name(sample, reference))

    def reference_bytes(self, sample: int, reference: int, sources: Sequence[Place | None]) -> bytes:
        """A reference as its file, or its object in a store, has it now; nothing if no path leads there. Raises
        `OSError`, `StoreError`."""
        place = self.reference_path(sample, reference, sources)
        return b"" if place is None else read_blob(blob_at(place))

    def picture_bytes(self, sample: int, sources: Sequence[Place | None]) -> bytes:
        """The sample's picture as its file, or its object in a store, has it now; nothing if it is in a tar, or
        nothing leads to its source. Raises `OSError`, `StoreError`."""
        source = sources[int(self.source[sample])]
        if source is None or (source.suffix == ".tar" and not is_directory(source)):
            return b""
        return read_blob(blob_at(source, self.name(sample)))

    def placement(self, view: int, bucket: Size) -> Placement:
        """How a view of a sample is scaled, cropped and mirrored into its bucket."""
        return _placement(self.views, view, bucket)

    def reference_placement(self, reference: int, size: Size) -> Placement:
        """How a reference is scaled, cropped and mirrored to its size."""
        return _placement(self.references, reference, size)

    @property
    def reference_digests(self) -> list[str]:
        """The SHA-256 of each reference's picture file, in the order of `references`; read from the table each time."""
        if "references" not in self.table.column_names:
            return []
        pictures = pc.struct_field(pc.list_flatten(self.table["references"]), "picture")
        return [digest.hex() for digest in pictures.to_pylist()]

    def _reference(self, sample: int, reference: int) -> pa.StructScalar:
        return self.table["references"][sample][reference - int(self.reference_offsets[sample])]

    def shown_with(self, sample: int, sizes: Sequence[Size]) -> list[ShownPicture]:
        """A sample's references, as beside its first view; `sizes` are those of its bucket's."""
        first = self.references_of(sample, int(self.view_offsets[sample]))
        if not len(first):
            return []
        rows = self.table["references"][sample].as_py()[: len(first)]
        return [ShownPicture(row["picture"].hex(), (row["width"], row["height"]),
                             self.reference_placement(number, size))
                for number, row, size in zip(first, rows, sizes, strict=True)]

    def references_of(self, sample: int, view: int) -> range:
        """The references of a view of a sample, as numbers in the columns of `references`."""
        if not len(self.references["latent_row"]):
            return range(0)
        first, past = (int(self.reference_offsets[sample + at]) for at in (0, 1))
        views = range(int(self.view_offsets[sample]), int(self.view_offsets[sample + 1]))
        count = (past - first) // len(views)
        start = first + (view - views.start) * count
        return range(start, start + count)


def shown_in(reference: Mapping[str, Any]) -> ShownPicture:
    """A reference of a prompt, from its entry in a manifest."""
    size, scaled, crop, bucket = (tuple(reference[name]) for name in ("size", "scaled", "crop", "bucket"))
    return ShownPicture(reference["picture"], size, Placement(scaled=scaled, crop=crop, bucket=bucket))


def _placement(columns: Mapping[str, Column], number: int, bucket: Size) -> Placement:
    width, height, left, top = (int(columns[name][number])
                                for name in ("scaled_width", "scaled_height", "crop_x", "crop_y"))
    return Placement(scaled=(width, height), crop=(left, top), bucket=bucket, flip=bool(columns["flip"][number]))


def in_table_order(samples: Iterable[Sample]) -> Iterable[Sample]:
    """Samples in the order of the SAMPLES table."""
    if isinstance(samples, Samples):
        return samples.in_table_order()
    ordered = sorted(samples, key=attrgetter("name"))
    ordered.sort(key=attrgetter("id"))  # stable; in two sorts, which need no pair for each sample
    return ordered


def build_samples(samples: Iterable[Sample], buckets: Sequence[BucketShape], refs: Mapping[str, RowRef],
                  shard_index: Mapping[str, int], coverage: Mapping[str, float], *, embedded: bool = False) -> pa.Table:
    """The SAMPLES table: `refs` has the place of every key, `shard_index` a digest's row in SHARDS. With `embedded`, it
    says where the embeddings of samples are, also if none has one.

    `coverage` has the mean of each mask by sample id; samples without a mask are not in it. Built column by column:
    100,000 samples take 0.6 s, from Python dicts 2.5 s.
    """
    numbers = {bucket: number for number, bucket in enumerate(buckets)}
    schema = samples_schema(buckets, embedded=embedded)
    ordered = iter(in_table_order(samples))
    batches = []
    while block := list(islice(ordered, BLOCK)):
        columns = {
            "id": _digests(sample.id for sample in block), "picture": _digests(sample.picture for sample in block),
            "name": [sample.name for sample in block], "role": [sample.role for sample in block],
            "width": [sample.size[0] for sample in block], "height": [sample.size[1] for sample in block],
            "bucket": [numbers[sample.shape] for sample in block],
            "coverage": [coverage.get(sample.id) for sample in block],
            **{name: list(map(attrgetter(name), block)) for name in ("source", "repeats", "weight")},
            "views": _views(block, refs, shard_index), "texts": _texts(block, refs, shard_index),
        }
        if "references" in schema.names:
            columns["references"] = _references(block, refs, shard_index)
        if embedded:
            places = _places([sample.embedding for sample in block], refs, shard_index)
            columns |= dict(zip(EMBEDDING, places, strict=True))
        batches.append(pa.RecordBatch.from_arrays([_array(columns[field.name], field.type) for field in schema],
                                                  schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def renumber_shards(table: pa.Table, numbers: Column) -> pa.Table:
    """The SAMPLES table with other shard numbers: `numbers` has the new number of each old one."""
    batches = []
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        columns = [_renumbered(column, field.type, numbers) if pa.types.is_list(field.type) else
                   _numbered(column, numbers) if field.name.endswith("shard") else column
                   for column, field in zip(batch.columns, table.schema, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    return pa.Table.from_batches(batches, schema=table.schema)


def _renumbered(column: pa.Array, kind: pa.ListType, numbers: Column) -> pa.Array:
    """A column of views, texts or references, with other shard numbers; -1 remains."""
    flat = pc.list_flatten(column)
    fields = {field.name: pc.struct_field(flat, field.name) for field in kind.value_type}
    for name in fields:
        if name.endswith("shard"):
            fields[name] = _numbered(fields[name], numbers)
    return _lists(pc.list_value_length(column).to_numpy(), list(fields.values()), kind)


def _numbered(column: pa.Array, numbers: Column) -> pa.Array:
    """Numbers of shards by their new numbers; -1 remains."""
    old = column.to_numpy()
    return pa.array(np.where(old < 0, old, numbers[old]).astype(np.int32))


def _views(block: Sequence[Sample], refs: Mapping[str, RowRef], shard_index: Mapping[str, int]) -> pa.Array:
    views = [view for sample in block for view in sample.views]
    latents = _places([view.latent for view in views], refs, shard_index)
    masks = _places([view.mask for view in views], refs, shard_index)
    columns = [*_placements([view.placement for view in views]), *latents, *masks]
    return _lists([len(sample.views) for sample in block], columns, SAMPLES.field("views").type)


def _references(block: Sequence[Sample], refs: Mapping[str, RowRef], shard_index: Mapping[str, int]) -> pa.Array:
    each = [reference for sample in block for view in sample.views for reference in view.references]
    columns: list[Any] = [[reference.name for reference in each], _digests(reference.picture for reference in each),
                          [reference.size[0] for reference in each], [reference.size[1] for reference in each],
                          *_placements([reference.placement for reference in each]),
                          *_places([reference.latent for reference in each], refs, shard_index)]
    return _lists([sum(len(view.references) for view in sample.views) for sample in block], columns,
                  SAMPLES_WITH_REFERENCES.field("references").type)


def _placements(placements: Sequence[Placement]) -> list[Any]:
    return [[placement.scaled[0] for placement in placements], [placement.scaled[1] for placement in placements],
            [placement.crop[0] for placement in placements], [placement.crop[1] for placement in placements],
            [placement.flip for placement in placements]]


def _texts(block: Sequence[Sample], refs: Mapping[str, RowRef], shard_index: Mapping[str, int]) -> pa.Array:
    texts = [text for sample in block for text in sample.texts]
    places = _places([text.key for text in texts], refs, shard_index)
    columns: list[Any] = [[text.caption for text in texts], [text.weight for text in texts], *places]
    return _lists([len(sample.texts) for sample in block], columns, SAMPLES.field("texts").type)


def _places(keys: Sequence[str | None], refs: Mapping[str, RowRef], shard_index: Mapping[str, int]) -> list[list[int]]:
    """Shard number and row of each key; -1 for `None`."""
    places = [None if key is None else refs[key] for key in keys]
    return [[-1 if ref is None else shard_index[ref.shard] for ref in places],
            [-1 if ref is None else ref.row for ref in places]]


def _lists(lengths: Sequence[int] | Column, columns: Sequence[Any], kind: pa.ListType) -> pa.Array:
    """A list array: `lengths` records per list; `columns` in the order of the record's fields."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    fields = list(kind.value_type)
    records = pa.StructArray.from_arrays([_array(column, field.type) for column, field
                                          in zip(columns, fields, strict=True)], fields=fields)
    return pa.ListArray.from_arrays(pa.array(offsets), records, type=kind)


def _digests(digests: Iterable[str]) -> pa.Array:
    data = bytes.fromhex("".join(digests))
    return pa.FixedSizeBinaryArray.from_buffers(DIGEST, len(data) // 32, [None, pa.py_buffer(data)])


def _array(column: Any, kind: pa.DataType) -> pa.Array:
    return column if isinstance(column, pa.Array) else pa.array(column, kind, memory_pool=POOL)


def open_samples(table: pa.Table) -> SampleColumns:
    """The columns of a SAMPLES table. Numbers are copied once (122 bytes per sample); strings stay memory-mapped."""
    views, view_offsets = _flat(table["views"], VIEW)
    texts, text_offsets = _flat(table["texts"], {name: kind for name, kind in TEXT.items() if name != "caption"})
    numbers = {name: kind for name, kind in REFERENCE.items() if name not in ("name", "picture")}
    references: Mapping[str, Column] = {name: np.empty(0, np.int32) for name in numbers}
    reference_offsets: Column = np.broadcast_to(np.int64(0), len(table) + 1)
    if "references" in table.column_names:
        references, reference_offsets = _flat(table["references"], numbers)
    none = np.broadcast_to(np.int32(-1), len(table))
    embeddings = {name: _numbers(table[name]) if name in table.column_names else none for name in EMBEDDING}
    roles = pc.index_in(table["role"], value_set=pa.array(ROLES))
    ids = [np.frombuffer(chunk.buffers()[1], np.uint8, 32 * len(chunk), 32 * chunk.offset).reshape(-1, 32)
           for chunk in table["id"].chunks if len(chunk)]
    return SampleColumns(
        table=table, ids=np.concatenate(ids) if ids else np.empty((0, 32), np.uint8),
        role=pc.fill_null(roles, len(ROLES)).to_numpy().astype(np.uint8),
        coverage=_numbers(pc.fill_null(table["coverage"], float("nan"))),
        **{name: _numbers(table[name]) for name in ("source", "width", "height", "bucket", "repeats", "weight")},
        view_offsets=view_offsets, views=views, text_offsets=text_offsets, texts=texts,
        reference_offsets=reference_offsets, references=references, embeddings=embeddings,
    )


def _flat(column: pa.ChunkedArray, fields: Mapping[str, Any]) -> tuple[dict[str, Column], Column]:
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(_numbers(pc.list_value_length(column)), out=offsets[1:])
    flat = pc.list_flatten(column)
    return {name: _numbers(pc.struct_field(flat, name)) for name in fields}, offsets


def _numbers(column: pa.ChunkedArray) -> Column:
    return np.ascontiguousarray(column.to_numpy())


class View(NamedTuple):
    """One placement of a picture and the keys of its rows."""

    placement: Placement
    latent: str
    mask: str | None  # None: all ones
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceMask:
    """A mask that a prompt names: its path from the prompt file, its digest, and the key of its row."""

    name: str
    digest: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A picture that is a condition of a view, as it is placed, and the key of its row."""

    name: str  # its path from the sample's source, perhaps with ..; as those of pictures, below the name of its tar
    picture: str
    size: Size
    placement: Placement
    latent: str
    mask: ReferenceMask | None = None  # of a prompt of a family that inpaints, if it names one

    def as_document(self) -> dict[str, Any]:
        """Its entry in a manifest, without the place of its row."""
        place = self.placement
        return {"name": self.name, "picture": self.picture, "size": list(self.size), "scaled": list(place.scaled),
                "crop": list(place.crop), "bucket": list(place.bucket)}


class Text(NamedTuple):
    """One caption, its probability weight among the sample's captions, and the key of its row.

    The last text of a sample whose references the text encoder sees is that of no prompt: `NO_PROMPT`, with weight 0.
    """

    caption: str
    weight: float
    key: str


class Sample(NamedTuple):
    """One picture in one bucket; an epoch shows it `repeats` times."""

    id: str  # SHA-256; independent of names and order
    name: str
    source: int
    role: Role
    picture: str
    size: Size
    bucket: Size
    views: tuple[View, ...]
    texts: tuple[Text, ...]
    repeats: int = 1
    weight: float = 1.0  # of its loss
    embedding: str | None = None  # key; None: it has none

    def keys(self, field: str) -> list[str]:
        """The keys of its rows of a field."""
        if field == "embedding":
            return [] if self.embedding is None else [self.embedding]
        if field == "text":
            return [text.key for text in self.texts]
        if field == "mask":
            return [view.mask for view in self.views if view.mask is not None]
        return [key for view in self.views
                for key in (view.latent, *(reference.latent for reference in view.references))]

    @property
    def shape(self) -> BucketShape:
        """The shape of its bucket: all its views have references of the same sizes."""
        return self.bucket, tuple([reference.placement.bucket for view in self.views[:1]
                                   for reference in view.references])


class Samples:
    """Samples in order, each made into records when asked for: with a view and a text it takes 250 bytes beside its
    name, caption and keys, where records and digests as text take 620."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.counts: Counter[tuple[BucketShape, Role]] = Counter()
        self._rows: list[tuple[Any, ...]] = []  # (what many share, digests, name, 4 values a view, 3 a text)
        self._shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Adds a sample at the end."""
        common = (len(sample.views), sample.source, sample.role, sample.size, sample.bucket, sample.repeats,
                  sample.weight)
        digests = bytes.fromhex(sample.id + sample.picture + (sample.embedding or ""))
        row: list[Any] = [self._shared.setdefault(common, common), digests, sample.name]
        for view in sample.views:
            row += view
        for text in sample.texts:
            row += text
        self._rows.append(tuple(row))
        self.counts[sample.shape, sample.role] += 1

    @property
    def shapes(self) -> list[BucketShape]:
        """The shapes of all buckets with samples, sorted."""
        return sorted({shape for shape, _ in self.counts})

    def having(self, role: Role) -> int:
        """How many samples have a role."""
        return sum(self.counts[shape, role] for shape in self.shapes)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Sample:
        row = self._rows[number]
        (views, source, role, size, bucket, repeats, weight), digests = row[0], row[1].hex()
        first = 3 + 4 * views  # of the values of texts
        return Sample(id=digests[:64], name=row[2], source=source, role=role, picture=digests[64:128], size=size,
                      bucket=bucket, repeats=repeats, weight=weight, embedding=digests[128:] or None,
                      views=tuple([View(*row[at : at + 4]) for at in range(3, first, 4)]),
                      texts=tuple([Text(*row[at : at + 3]) for at in range(first, len(row), 3)]))

    def in_table_order(self) -> Iterator[Sample]:
        """The samples in the order of the SAMPLES table."""
        order = np.argsort(np.array([row[2] for row in self._rows], object), kind="stable")
        ids = np.frombuffer(b"".join([row[1][:32] for row in self._rows]), KEY)
        return map(self.__getitem__, order[np.argsort(ids[order], kind="stable")].tolist())
