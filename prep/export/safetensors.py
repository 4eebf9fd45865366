"""Spells a sample as one safetensors file, with each row in the dtype that it has in the cache.

    view0.latent view0.std view0.mask view1.latent …    rows of each view
    view0.ref0.latent view0.ref1.latent …               rows of its references, in order, where it has any
    text0.hidden text0.pooled text1.hidden …            rows of each caption, by the family's names

The only metadata, `latentry`, is JSON: the sample's facts, what is true of all latents (scale, shift), the family and
the manifest's digest. Written here, since NumPy, which the library takes tensors from, has no bfloat16.
"""

from __future__ import annotations

import json
from typing import Any

from prep.arrays import safetensors_header
from prep.export.sample import ExportSample, StoredRow

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}


def spell(sample: ExportSample) -> bytes:
    """The file's bytes. Raises `CacheError` for a damaged row."""
    rows = rows_of(sample)
    shapes = {name: (DTYPES[row.spec.dtype], row.spec.shape, len(row.data)) for name, row in rows.items()}
    header = safetensors_header(shapes, {"latentry": json.dumps(described(sample), sort_keys=True)})
    return b"".join([header, *(row.data.tobytes() for row in rows.values())])


def rows_of(sample: ExportSample) -> dict[str, StoredRow]:
    """All rows of a sample by name."""
    rows = {}
    for number, view in enumerate(sample.views):
        for name, row in sample.latent(view).items():
            rows[f"view{number}.{name}"] = row
        if (mask := sample.mask(view)) is not None:
            rows[f"view{number}.mask"] = mask
        for place, reference in enumerate(sample.references(view)):
            for name, row in sample.reference_latent(reference).items():
                rows[f"view{number}.ref{place}.{name}"] = row
    for number, text in enumerate(sample.texts):
        for name, row in sample.text(text).items():
            rows[f"text{number}.{name}"] = row
    return rows


def described(sample: ExportSample) -> dict[str, Any]:
    """The sample's facts with those that a reader of its rows needs."""
    document = sample.of.manifest.document
    return {**sample.facts(), "family": document["family"], "prediction": document["prediction"],
            "latents": document["latents"], "manifest": sample.of.manifest.digest}
