"""Describes a manifest and its cache as JSON documents for `prep inspect`; reads tables and keys, no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow.compute as pc

from prep.cache.reader import Reader
from prep.errors import CacheError, UsageError
from prep.formatting import counted, printable, printable_name
from prep.fs.labels import labels_of, sources_of
from prep.geometry import BucketShape
from prep.manifest.opened import OpenedManifest
from prep.manifest.samples import SampleColumns
from prep.parse import suggest

SUGGEST_AMONG = 20_000  # names; searching more for a similar name takes seconds


def describe_manifest(audit: OpenedManifest) -> dict[str, Any]:
    """The document of `prep inspect --json`. Raises `CacheError` when a table is missing or damaged."""
    document = audit.manifest.document
    return {
        "format": "latentry/inspect", "version": 1,
        "manifest": audit.manifest.path.name, "digest": audit.manifest.digest,
        "family": document["family"], "model": dict(document["model"]), "prediction": document["prediction"],
        "latents": dict(document["latents"]),
        "samples": {role: document["samples"][role] for role in ("train", "validation", "prior")},
        "fields": {name: _field(audit, name) for name in audit.manifest.fields},
        "buckets": [dict(bucket) for bucket in document["buckets"]],
        "models": dict(document["models"]),
        "prompts": [sample["prompt"] for sample in document["prompts"]["samples"]],
        "masks": _masks(audit.samples),
        "rejected": document["rejected"],
        "findings": audit.findings,
    }


def import_line(latents: Mapping[str, Any]) -> str:
    """Says which program made a manifest's latents, and whether any was compared; "" for latents that were encoded."""
    imported = latents.get("imported")
    if imported is None:
        return ""
    how = f"VAE verified: {counted(imported['verified'], 'latent')} compared" if imported["verified"] else \
        "VAE unverified"
    return f"imported from {imported['from']}, {how}"


def describe_samples(audit: OpenedManifest, name: str) -> dict[str, Any]:
    """The samples called `name` (their full name, the label in findings or a file name), and their findings.

    Raises `UsageError` if there are none, `CacheError` if a table is damaged.
    """
    name = printable_name(name)  # the table's spelling, if the shell completed a name that is not UTF-8
    column = audit.samples.table["name"]
    numbers = pc.indices_nonzero(pc.equal(column, name)).to_pylist()
    for source, named in sources_of(name, audit.prefixes) if not numbers else ():  # the label in scans and findings
        same = pc.indices_nonzero(pc.equal(column, named)).to_pylist()
        numbers += [number for number in same if audit.samples.source[number] == source]
    if not numbers:
        ends = pc.ends_with(column, pattern="/" + PurePosixPath(name).name)
        numbers = pc.indices_nonzero(ends).to_pylist()
    sources = range(len(audit.manifest.sources))
    labels = {name, *(label for source in sources for label in labels_of(source, name, audit.prefixes))}
    findings = [row for row in audit.findings if row["path"] in labels]
    if not numbers and not findings:
        near = printable(suggest(name, column.to_pylist())) if len(column) <= SUGGEST_AMONG else ""
        raise UsageError(f"manifest has no sample '{printable(name)}', expected one of its {len(column)} names{near}",
                         hint="prep inspect MANIFEST --json lists rejected pictures")
    keys = Keys(audit)
    return {"format": "latentry/sample", "version": 1, "findings": findings,
            "samples": [describe(audit, number, keys) for number in numbers]}


def describe(audit: OpenedManifest, number: int, keys: Keys | None = None) -> dict[str, Any]:
    """One sample as a document: sizes, views and texts with the places of their rows, and their keys if given."""
    return describe_columns(audit.samples, audit.manifest.shapes, number,
                            lambda shard, row: _place(audit, shard, row, keys))


def describe_columns(samples: SampleColumns, shapes: Sequence[BucketShape], number: int,
                     place: Callable[[int, int], Mapping[str, Any] | None]) -> dict[str, Any]:
    """One sample as a document; `place` describes the row of a shard, both by number."""
    row = samples.table.slice(number, 1).to_pylist()[0]
    bucket, sizes = shapes[row["bucket"]]
    views = [_view(view, place) for view in row["views"]]
    for at, reference in enumerate(row.get("references", [])):
        views[at // len(sizes)].setdefault("references", []).append({
            "name": reference["name"], "picture": reference["picture"].hex(),
            "size": [reference["width"], reference["height"]], "bucket": list(sizes[at % len(sizes)]),
            **_placed(reference), "latent": place(reference["latent_shard"], reference["latent_row"])})
    return {
        "id": row["id"].hex(), "name": row["name"], "source": row["source"], "role": row["role"],
        "picture": row["picture"].hex(), "size": [row["width"], row["height"]], "bucket": list(bucket),
        "repeats": row["repeats"], "weight": row["weight"], "coverage": row["coverage"],
        "views": views,
        **({"embedding": place(row["embedding_shard"], row["embedding_row"])} if "embedding_shard" in row else {}),
        "texts": [
            {"caption": text["caption"], "weight": text["weight"],
             "row": place(text["shard"], text["row"])}
            for text in row["texts"]
        ],
    }


def _view(view: Mapping[str, Any], place: Callable[[int, int], Mapping[str, Any] | None]) -> dict[str, Any]:
    return {**_placed(view), "latent": place(view["latent_shard"], view["latent_row"]),
            "mask": place(view["mask_shard"], view["mask_row"])}


def _placed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"scaled": [row["scaled_width"], row["scaled_height"]], "crop": [row["crop_x"], row["crop_y"]],
            "flip": row["flip"]}


class Keys:
    """The keys of rows, read once per shard."""

    def __init__(self, audit: OpenedManifest) -> None:
        self._reader = Reader(audit.cache)
        self._known: dict[str, np.ndarray[Any, Any]] = {}

    def of(self, shard: str, row: int) -> str | None:
        """The key of a row; `None` if the shard's keys cannot be read (`prep verify` reports why)."""
        try:
            if shard not in self._known:
                self._known[shard] = self._reader.keys(shard)
            return bytes(self._known[shard][row]).hex()
        except (CacheError, OSError, IndexError):
            return None


def _field(audit: OpenedManifest, name: str) -> dict[str, Any]:
    field = audit.manifest.fields[name]
    by_shard = [shard["shapes"] for shard in audit.shards if shard["field"] == name]
    shapes = {array: sorted({tuple(each[array]) for each in by_shard if array in each}) for array in field.arrays}
    arrays = {array: {**described, "shapes": [list(shape) for shape in shapes[array]]}
              for array, described in field.arrays.items()}
    return {"rows": field.rows, "shards": field.shards, "bytes": field.bytes, "arrays": arrays}


def _masks(samples: SampleColumns) -> dict[str, Any]:
    """The number of samples with a mask, and the mean coverage of the masks."""
    mean = pc.mean(samples.table["coverage"]).as_py()
    return {"samples": samples.masked, "coverage": None if mean is None else round(mean, 4)}


def _place(audit: OpenedManifest, shard: int, row: int, keys: Keys | None) -> Mapping[str, Any] | None:
    """The place of a row, with its key if `keys` is given; `None` for no row. Raises `CacheError`."""
    if shard < 0:
        return None
    if shard >= len(audit.shards):
        raise CacheError(f"the sample table names shard number {shard}, but there are {len(audit.shards)} shards")
    digest = audit.shards[shard]["digest"]
    return {"shard": digest, "row": row, **({} if keys is None else {"key": keys.of(digest, row)})}
