"""A sample as exports see it: its names and facts, its picture's bytes, and its rows in any dtype.

C channels, h w latent cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.values import Values, values_of
from prep.digest import digest_bytes
from prep.errors import CacheError, PathError
from prep.export.pictures import PictureFiles
from prep.formatting import printable
from prep.fs.blob import Blob, read_blob
from prep.geometry import Placement, Size
from prep.manifest.document import Manifest
from prep.manifest.opened import OpenedManifest
from prep.manifest.samples import SampleColumns

_FOREIGN = re.compile(r'[\\:*?"<>|\x00-\x1f\x7f]')  # what Windows allows in no name, and control characters
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRow:
    """One array of a row, as the cache has it."""

    spec: ArraySpec
    data: Bytes  # uint8 [row_bytes]

    def values(self) -> Values:
        """The array in its shape: uint8 as it is, floats as float32, which holds each of them exactly."""
        return values_of(self.spec, self.data)


class Samples:
    """The samples of a manifest, by number from 0."""

    def __init__(self, opened: OpenedManifest) -> None:
        self.manifest: Manifest = opened.manifest
        self.columns: SampleColumns = opened.samples
        self._shards = [shard["digest"] for shard in opened.shards]
        self._reader = Reader(opened.cache)
        self.files = PictureFiles(opened.manifest.sources)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[ExportSample]:
        return (ExportSample(of=self, number=number, stem=stem) for number, stem in enumerate(self.stems))

    @cached_property
    def stems(self) -> list[str]:
        """A path without suffix for each sample, like its name; unique, also where case does not count.

        Names are below a number where there are several sources.
        """
        several, taken, stems = len(self.manifest.sources) > 1, set[str](), []
        for number in range(len(self)):
            name = safe_path(self.columns.name(number))
            source = f"{int(self.columns.source[number])}/" if several else ""
            stem = unique = source + str(PurePosixPath(name).with_suffix(""))
            copy = 2
            while unique.casefold() in taken:
                unique, copy = f"{stem}-{copy}", copy + 1
            taken.add(unique.casefold())
            stems.append(unique)
        return stems

    def rows(self, shard: int, row: int, field: str) -> dict[str, StoredRow]:
        """The arrays of the row at a place. Raises `CacheError` if it is damaged."""
        rows = {}
        ref = RowRef(shard=self._shards[shard], row=row)
        for name in self.manifest.fields[field].arrays:
            spec, _ = self._reader.array_info(ref.shard, name)
            out = np.empty(spec.row_bytes, np.uint8)
            self._reader.read_into(out, ref.shard, name, ref.row)
            rows[name] = StoredRow(spec=spec, data=out)
        return rows


@dataclass(frozen=True, kw_only=True)
class ExportSample:
    """One sample."""

    of: Samples
    number: int
    stem: str  # its path in an export, without suffix

    @property
    def name(self) -> str:
        """The picture's path in its source."""
        return self.of.columns.name(self.number)

    @property
    def source(self) -> int:
        """The number of the sample's source."""
        return int(self.of.columns.source[self.number])

    @property
    def role(self) -> str:
        """The sample's role: train, validation or prior."""
        return str(self.of.columns.table["role"][self.number].as_py())

    @property
    def repeats(self) -> int:
        """The number of times that an epoch shows the sample."""
        return int(self.of.columns.repeats[self.number])

    @property
    def bucket(self) -> Size:
        """Width and height of the encoded crop in pixels."""
        return self.of.manifest.buckets[int(self.of.columns.bucket[self.number])]

    @property
    def size(self) -> Size:
        """Width and height of the whole upright picture."""
        return int(self.of.columns.width[self.number]), int(self.of.columns.height[self.number])

    @cached_property
    def captions(self) -> list[str]:
        """The captions, in the order of their rows."""
        return self.of.columns.captions(self.number)

    @property
    def views(self) -> range:
        """The numbers of its views among those of all samples."""
        offsets = self.of.columns.view_offsets
        return range(int(offsets[self.number]), int(offsets[self.number + 1]))

    @property
    def texts(self) -> range:
        """The numbers of its texts among those of all samples."""
        offsets = self.of.columns.text_offsets
        return range(int(offsets[self.number]), int(offsets[self.number + 1]))

    def references(self, view: int) -> range:
        """The numbers of a view's references, in order, among those of all samples."""
        return self.of.columns.references_of(self.number, view)

    def placement(self, view: int) -> Placement:
        """The scaling, crop and mirroring of a view into the bucket."""
        return self.of.columns.placement(view, self.bucket)

    def latent(self, view: int) -> dict[str, StoredRow]:
        """The arrays of a view's latent: `latent` [C, h, w], not scaled, and `std` if the cache has it."""
        views = self.of.columns.views
        return self.of.rows(int(views["latent_shard"][view]), int(views["latent_row"][view]), "latent")

    def mask(self, view: int) -> StoredRow | None:
        """A view's mask, uint8 [1, h, w], 255: trains; `None`: all of it trains. Of a family that inpaints [M, h, w],
        255: to be painted."""
        views = self.of.columns.views
        shard = int(views["mask_shard"][view])
        return None if shard < 0 else self.of.rows(shard, int(views["mask_row"][view]), "mask")["mask"]

    def text(self, number: int) -> dict[str, StoredRow]:
        """The arrays of a caption's row."""
        texts = self.of.columns.texts
        return self.of.rows(int(texts["shard"][number]), int(texts["row"][number]), "text")

    def reference_latent(self, reference: int) -> dict[str, StoredRow]:
        """The arrays of a reference's latent, as those of a view's."""
        columns = self.of.columns.references
        return self.of.rows(int(columns["latent_shard"][reference]), int(columns["latent_row"][reference]), "latent")

    def picture(self) -> bytes:
        """The picture file, byte for byte as it was encoded. Raises `CacheError` if it is missing or has changed."""
        return self._file("the picture", self.of.files.find, self.name, self.of.columns.picture_digest(self.number))

    def reference_file(self, reference: int) -> bytes:
        """The file of a reference, byte for byte as it was encoded. Raises `CacheError` as `picture`."""
        columns = self.of.columns
        return self._file("a reference", self.of.files.find_reference, columns.reference_name(self.number, reference),
                          columns.reference_digest(self.number, reference))

    def _file(self, what: str, find: Callable[[int, str], Blob | None], name: str, digest: str) -> bytes:
        try:
            blob = find(self.source, name)
            data = b"" if blob is None else read_blob(blob)
        except OSError as error:
            raise self._without(what, name, f": {error.strerror or error}") from None
        except (PathError, ValueError) as error:
            raise self._without(what, name, f": {error}") from None
        if digest_bytes(data) != digest:
            raise self._without(what, name, " as it was encoded: it was moved or edited")
        return data

    def _without(self, what: str, name: str, why: str) -> CacheError:
        called = "" if name == self.name else f", '{printable(name)}',"
        return CacheError(f"{what} of '{printable(self.name)}'{called} is not in its source{why}",
                          hint="this format has the pictures, too; --to safetensors and webdataset need none. "
                          "prep encode notices edits")

    def facts(self) -> dict[str, Any]:
        """The sample's facts beside its rows, as JSON has them."""
        columns, number = self.of.columns, self.number
        return {
            "id": columns.ids[number].tobytes().hex(), "name": self.name, "role": self.role,
            "size": list(self.size), "bucket": list(self.bucket), "repeats": self.repeats,
            "weight": float(columns.weight[number]), "captions": self.captions,
            "caption_weights": [float(columns.texts["weight"][text]) for text in self.texts],
            "views": [{**_placed(self.placement(view)), **self._reference_facts(view)} for view in self.views]}

    def _reference_facts(self, view: int) -> dict[str, Any]:
        """The references of a view, if it has any, as JSON has them."""
        columns, numbers = self.of.columns, self.references(view)
        sizes = self.of.manifest.shapes[int(columns.bucket[self.number])][1]
        return {"references": [
            {"name": columns.reference_name(self.number, number),
             "size": [int(columns.references[side][number]) for side in ("width", "height")], "bucket": list(size),
             **_placed(columns.reference_placement(number, size))}
            for number, size in zip(numbers, sizes, strict=True)]} if numbers else {}


def _placed(place: Placement) -> dict[str, Any]:
    return {"scaled": list(place.scaled), "crop": list(place.crop), "flip": place.flip}


def safe_path(name: str) -> str:
    """`name` as a relative path that stays below any directory, on any system: other characters become `_`."""
    parts = [_FOREIGN.sub("_", part).strip() for part in name.split("/")]
    return "/".join(part.rstrip(".") + "_" if part.endswith(".") or not part else part for part in parts)
