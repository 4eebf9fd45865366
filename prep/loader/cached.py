"""A manifest's samples as tables and arrays, for scripts and notebooks. Floats come as float32: NumPy has no bfloat16.

C channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prep.batching.split import ROLES
from prep.cache.records import RowRef
from prep.cache.zarr_view import open_shard
from prep.errors import UsageError
from prep.findings import Finding
from prep.geometry import Placement, Size, have_references
from prep.loader.index import Index, open_index
from prep.loader.rows import DTYPES, Rows
from prep.manifest.describe import describe_columns
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.opened import findings_of

Array = np.ndarray[Any, np.dtype[Any]]


class CachedDataset:
    """The samples of a manifest, by number from 0 in the manifest's order."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._rows = Rows(index)

    def __reduce__(self) -> tuple[type[CachedDataset], tuple[Index]]:
        return CachedDataset, (self.index,)

    @property
    def manifest(self) -> Manifest:
        """The manifest: `manifest.document` is what `prep inspect --json` reads."""
        return self.index.manifest

    @property
    def buckets(self) -> tuple[Size, ...]:
        """Width and height of each bucket in pixels."""
        return tuple(self.manifest.buckets)

    @property
    def fields(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The arrays of each field: dtype and names of dimensions."""
        return {name: {array: dict(facts) for array, facts in field.arrays.items()}
                for name, field in self.manifest.fields.items()}

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings on pictures, captions and masks when they were encoded."""
        return findings_of(self.manifest)

    @cached_property
    def table(self) -> Any:
        """A `pyarrow.Table`, one row a sample: the manifest's (names, roles, captions, places of rows; see format.md)
        with `bucket_width` and `bucket_height`. For `to_pandas()`, `polars.from_arrow`, DuckDB."""
        return self.index.samples.with_sizes(self.buckets)

    def __len__(self) -> int:
        return len(self.index.samples)

    def numbers(self, role: str) -> list[int]:
        """The samples of a role: train, validation or prior. Raises `UsageError` for another."""
        if role not in ROLES:
            raise UsageError(f"role is '{role}', expected one of: {', '.join(ROLES)}")
        return [int(number) for number in np.flatnonzero(self.index.samples.role == ROLES.index(role))]

    def name(self, number: int) -> str:
        """The sample's name: the picture's path in its source."""
        return self.index.samples.name(self._checked(number))

    def captions(self, number: int) -> list[str]:
        """The sample's captions."""
        return self.index.samples.captions(self._checked(number))

    def placement(self, number: int, view: int = 0) -> Placement:
        """The scaling, crop and mirroring of a view of the picture into its bucket."""
        at = self._view(number, view)
        return self.index.samples.placement(at, self.buckets[int(self.index.samples.bucket[number])])

    def latent(self, number: int, view: int = 0) -> dict[str, Array]:
        """The rows of a view's latent: `latent`, float32 [C, h, w], not scaled, and `std` if the cache has it."""
        views, at = self.index.samples.views, self._view(number, view)
        return self._read("latent", self.index.ref(int(views["latent_shard"][at]), int(views["latent_row"][at])))

    def references(self, number: int, view: int = 0) -> list[dict[str, Any]]:
        """The reference pictures of a view, in order; empty for a sample without.

        Of each `name`, its path from the sample's source, and `picture`, the SHA-256 of its file; `width` and `height`;
        `bucket`, `scaled`, `crop` and `flip`, as of a view; `latent`, and `std` if the cache has it, as of a view.
        """
        samples, at = self.index.samples, self._view(number, view)
        described = describe_columns(samples, self.manifest.shapes, number, lambda *_: None)["views"][view]
        return [{**{name: row[name] for name in ("name", "picture", "bucket", "scaled", "crop", "flip")},
                 "width": row["size"][0], "height": row["size"][1],
                 **self._read("latent", self.index.ref(*(int(samples.references[column][place])
                                                         for column in ("latent_shard", "latent_row"))))}
                for place, row in zip(samples.references_of(number, at), described.get("references", ()), strict=True)]

    def mask(self, number: int, view: int = 0) -> Array | None:
        """The view's mask, uint8 [1, h, w], 255: trains; `None`: all of it trains. Of a family that inpaints [M, h, w],
        255: to be painted."""
        views, at = self.index.samples.views, self._view(number, view)
        shard = int(views["mask_shard"][at])
        return None if shard < 0 else self._read("mask", self.index.ref(shard, int(views["mask_row"][at])))["mask"]

    def text(self, number: int, caption: int = 0) -> dict[str, Array]:
        """The arrays of a caption's row, by the family's names."""
        texts, at = self.index.samples.texts, self._at(number, caption, "text", self.index.samples.text_offsets)
        return self._read("text", self.index.ref(int(texts["shard"][at]), int(texts["row"][at])))

    def path(self, number: int) -> Path | None:
        """The sample's picture; `None` if it is not a file there: moved, or in a tar or a table."""
        return self.index.picture(self._checked(number))

    def reference_path(self, number: int, reference: int) -> Path | None:
        """A reference of the sample, counted from 0; `None` if it is not a file there."""
        return self.index.reference(number, self.reference_number(number, reference))

    def reference_number(self, number: int, reference: int, view: int = 0) -> int:
        """The number of a view's reference among those of all samples, as in `index.samples.references`."""
        places = self.index.samples.references_of(number, self._view(number, view))
        if not 0 <= reference < len(places):
            raise IndexError(f"reference {reference} of sample {number}, which has {len(places)}")
        return places[reference]

    def examples(self, number: int) -> Iterator[dict[str, Any]]:
        """A sample as a dict of plain values and arrays, for each of its views.

        `id`, `name`, `role`, `repeats`, `weight`, `captions` and `caption_weights`; `width` and `height` of the
        picture; `view`, `bucket` (width, height), `scaled`, `crop` and `flip` of the view; `latent`, and `std` if the
        cache has it; `mask`, or None; `text`: the arrays of each caption's row. If any sample of the manifest has
        references, `references`, as of this class.
        """
        row = describe_columns(self.index.samples, self.manifest.shapes, self._checked(number), lambda *_: None)
        same = {**{name: row[name] for name in ("id", "name", "role", "repeats", "weight")},
                "width": row["size"][0], "height": row["size"][1],
                "captions": [text["caption"] for text in row["texts"]],
                "caption_weights": [text["weight"] for text in row["texts"]],
                "text": [self.text(number, caption) for caption in range(len(row["texts"]))]}
        for view, place in enumerate(row["views"]):
            yield {**same, "view": view, "bucket": row["bucket"],
                   **{name: place[name] for name in ("scaled", "crop", "flip")}, **self.latent(number, view),
                   "mask": self.mask(number, view),
                   **({"references": self.references(number, view)} if have_references(self.index.manifest.shapes)
                      else {})}

    def groups(self, field: str) -> Mapping[str, Any]:
        """The shards of a field as read-only `zarr.Group`s by digest: `groups["latent"]` has `key` and the arrays.

        Slow, a millisecond a row, for other programs and for looking; bfloat16 comes as `ml_dtypes.bfloat16` if that is
        installed, else as its bits.
        """
        if field not in self.manifest.fields:
            raise UsageError(f"the manifest has no field '{field}', expected one of: {', '.join(self.manifest.fields)}")
        return {facts.digest: open_shard(self.index.cache, facts.digest) for facts in self.index.shards
                if facts.field == field}

    def _read(self, field: str, ref: RowRef) -> dict[str, Array]:
        arrays = {}
        for array, facts in self.manifest.fields[field].arrays.items():
            dtype = DTYPES[str(facts["dtype"])]
            spec, _ = self._rows.reader.array_info(ref.shard, array)
            row = torch.empty((1, *spec.shape), dtype=dtype)
            self._rows.fill(row, field, array, [ref])
            arrays[array] = (row[0].float() if dtype.is_floating_point else row[0]).numpy()
        return arrays

    def _view(self, number: int, view: int) -> int:
        return self._at(number, view, "view", self.index.samples.view_offsets)

    def _at(self, number: int, which: int, what: str, offsets: Array) -> int:
        """The place of a sample's view or text among those of all samples."""
        first, end = int(offsets[self._checked(number)]), int(offsets[number + 1])
        if not 0 <= which < end - first:
            raise IndexError(f"{what} {which} of sample {number}, which has {end - first}")
        return first + which

    def _checked(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return number


def examples_of(manifest: str, numbers: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """The examples of a manifest's samples, by number, in groups that several processes divide among them."""
    dataset = CachedDataset(open_index(read_manifest(Path(manifest))))
    for group in numbers:
        for number in group:
            yield from dataset.examples(number)
