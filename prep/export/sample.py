"""A sample as exports see it: its names and facts, its picture's bytes, and its rows in any dtype.

C channels, h w latent cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from prep.fs.blob import read_blob
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

    def placement(self, view: int) -> Placement:
        """The scaling, crop and mirroring of a view into the bucket."""
        return self.of.columns.placement(view, self.bucket)

    def latent(self, view: int) -> dict[str, StoredRow]:
        """The arrays of a view's latent: `latent` [C, h, w], not scaled, and `std` if the cache has it."""
        views = self.of.columns.views
        return self.of.rows(int(views["latent_shard"][view]), int(views["latent_row"][view]), "latent")

    def mask(self, view: int) -> StoredRow | None:
        """A view's mask, uint8 [1, h, w], 255: trains; `None`: all of it trains."""
        views = self.of.columns.views
        shard = int(views["mask_shard"][view])
        return None if shard < 0 else self.of.rows(shard, int(views["mask_row"][view]), "mask")["mask"]

    def text(self, number: int) -> dict[str, StoredRow]:
        """The arrays of a caption's row."""
        texts = self.of.columns.texts
        return self.of.rows(int(texts["shard"][number]), int(texts["row"][number]), "text")

    def picture(self) -> bytes:
        """The picture file, byte for byte as it was encoded. Raises `CacheError` if it is missing or has changed."""
        try:
            blob = self.of.files.find(self.source, self.name)
            data = b"" if blob is None else read_blob(blob)
        except OSError as error:
            raise self._without_picture(f": {error.strerror or error}") from None
        except (PathError, ValueError) as error:
            raise self._without_picture(f": {error}") from None
        if digest_bytes(data) != self.of.columns.picture_digest(self.number):
            raise self._without_picture(" as it was encoded: it was moved or edited")
        return data

    def _without_picture(self, why: str) -> CacheError:
        return CacheError(f"the picture of '{printable(self.name)}' is not in its source{why}",
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
            "views": [{"scaled": list(place.scaled), "crop": list(place.crop), "flip": place.flip}
                      for place in map(self.placement, self.views)]}


def safe_path(name: str) -> str:
    """`name` as a relative path that stays below any directory, on any system: other characters become `_`."""
    parts = [_FOREIGN.sub("_", part).strip() for part in name.split("/")]
    return "/".join(part.rstrip(".") + "_" if part.endswith(".") or not part else part for part in parts)
