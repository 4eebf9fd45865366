"""Spells samples as members of WebDataset tars, for `webdataset`'s own decoders.

    000000012.json                  facts, as in the safetensors export
    000000012.txt                   the first caption
    000000012.view0.latent.npy      and view0.std.npy, view0.mask.npy, view1.latent.npy …
    000000012.text0.hidden.npy      and text0.pooled.npy, text1.hidden.npy …

Floats are float32, since NumPy has no bfloat16; masks are uint8. The same samples make the same bytes.
"""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np

from prep.export.safetensors import described, rows_of
from prep.export.sample import Sample


def members(sample: Sample) -> dict[str, bytes]:
    """The contents of a sample's members by the names' endings. Raises `CacheError` for a damaged row."""
    found = {"json": json.dumps(described(sample), sort_keys=True).encode()}
    if sample.captions:
        found["txt"] = sample.captions[0].encode()
    for name, row in rows_of(sample).items():
        spelled = io.BytesIO()
        np.save(spelled, np.ascontiguousarray(row.values()), allow_pickle=False)
        found[f"{name}.npy"] = spelled.getvalue()
    return found


def add(tar: tarfile.TarFile, sample: Sample) -> int:
    """Adds a sample's members to a tar; returns the bytes of their contents."""
    size = 0
    for ending, data in members(sample).items():
        member = tarfile.TarInfo(f"{sample.number:09d}.{ending}")  # dated 1970, owned by nobody
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
        size += len(data)
    return size
