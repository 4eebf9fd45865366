"""Spells samples as members of WebDataset tars, for `webdataset`'s own decoders.

    000000012.json                  facts, as in the safetensors export
    000000012.txt                   the first caption
    000000012.view0.latent.npy      and view0.std.npy, view0.mask.npy, view1.latent.npy …
    000000012.view0.ref0.latent.npy and view0.ref1.latent.npy …: the latents of references
    000000012.text0.hidden.npy      and text0.pooled.npy, text1.hidden.npy …

Floats are float32, since NumPy has no bfloat16; masks are uint8. The same samples make the same bytes.

All samples have the same members, which Hugging Face's `load_dataset("webdataset")` requires: a mask of white where
others have one, and where others have more views or captions, those that a sample lacks are as its first; references
that it lacks are zeros, of the size of its latent. The JSON has how many there are.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass

import numpy as np

from prep.cache.values import Values
from prep.export.safetensors import described, rows_of
from prep.export.sample import ExportSample, Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The numbers of views, texts and references that all samples of an export get, and whether they get masks."""

    views: int
    texts: int
    masks: bool
    references: int = 0  # of a view

    @classmethod
    def of(cls, samples: Samples) -> Shared:
        """The shared numbers of these samples: the most views and texts of any, and whether one has a mask."""
        columns = samples.columns
        return cls(views=int(np.diff(columns.view_offsets).max(initial=0)),
                   texts=int(np.diff(columns.text_offsets).max(initial=0)),
                   masks=bool((columns.views["mask_shard"] >= 0).any()),
                   references=max((len(sizes) for _, sizes in samples.manifest.shapes), default=0))


def members(sample: ExportSample, shared: Shared) -> dict[str, bytes]:
    """The contents of a sample's members by the names' endings. Raises `CacheError` for a damaged row."""
    contents = {"json": json.dumps(described(sample), sort_keys=True).encode(),
                "txt": "".join(sample.captions[:1]).encode()}
    for name, values in arrays(sample, shared).items():
        spelled = io.BytesIO()
        np.save(spelled, np.ascontiguousarray(values), allow_pickle=False)
        contents[f"{name}.npy"] = spelled.getvalue()
    return contents


def arrays(sample: ExportSample, shared: Shared) -> dict[str, Values]:
    """All rows of a sample by name, and those that it lacks."""
    rows = {name: row.values() for name, row in rows_of(sample).items()}
    for number in range(len(sample.views)) if shared.masks else ():
        height, width = rows[f"view{number}.latent"].shape[-2:]
        rows.setdefault(f"view{number}.mask", np.full((1, height, width), 255, np.uint8))
    for number in range(len(sample.views)):
        for place in range(shared.references):
            for name in sample.of.manifest.fields["latent"].arrays:
                rows.setdefault(f"view{number}.ref{place}.{name}", np.zeros_like(rows[f"view{number}.{name}"]))
    for kind, count, most in (("view", len(sample.views), shared.views), ("text", len(sample.texts), shared.texts)):
        first = {name.partition(".")[2]: values for name, values in rows.items() if name.startswith(f"{kind}0.")}
        for number in range(count, most):
            rows |= {f"{kind}{number}.{name}": values for name, values in first.items()}
    return dict(sorted(rows.items()))


def add(tar: tarfile.TarFile, sample: ExportSample, shared: Shared) -> int:
    """Adds a sample's members to a tar; returns the bytes of their contents."""
    size = 0
    for ending, data in members(sample, shared).items():
        member = tarfile.TarInfo(f"{sample.number:09d}.{ending}")  # dated 1970, owned by nobody
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
        size += len(data)
    return size
