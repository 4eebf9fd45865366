"""A small manifest written by hand: two buckets, three samples, one mask, one prompt; no model, no pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from one_key import latent_key, mask_key
from PIL import Image

from prep.arrays import ArraySpec
from prep.cache.ledger.ledger import write_commit
from prep.cache.records import RowRef, Task
from prep.cache.store import open_cache
from prep.cache.writer import ShardWriter
from prep.digest import canonical, digest_bytes, digest_json
from prep.findings import Finding
from prep.geometry import Placement, cover
from prep.keys import text_key, unconditional_key
from prep.manifest.document import read_manifest, write_manifest
from prep.manifest.opened import OpenedManifest, open_manifest
from prep.manifest.samples import Reference, Sample, Text, View, build_samples
from prep.manifest.tables import build_findings, build_shards, write_table

CONTEXT = {"meaning": 1}
MASKED = {"meaning": 1, "origin": "alpha"}  # of masks
WHITE = (255, 255, 255)
SQUARE = Placement(scaled=(64, 72), crop=(0, 4), bucket=(64, 64))
WIDE = Placement(scaled=(96, 64), crop=(0, 0), bucket=(96, 64))
REFERENCE = (48, 32)  # of each reference, in pixels
NASTY = "<script>alert('caption')</script> & \x1b[31mred"


@dataclass(frozen=True)
class Row:
    key: str
    field: str
    array: str
    dtype: str
    value: np.ndarray

    @property
    def spec(self):
        return ArraySpec(name=self.array, dtype=self.dtype, shape=self.value.shape)


def key_of(word):
    return digest_bytes(word.encode())


def latent(name, placement):
    width, height = placement.bucket
    color = WHITE if name == "c.png" else None
    key = latent_key(key_of(f"picture {name}"), placement, color, CONTEXT)
    return Row(key, "latent", "latent", "bfloat16", np.full((4, height // 8, width // 8), 7, np.uint16))


def text(key):
    return Row(key, "text", "hidden", "bfloat16", np.zeros((2, 3), np.uint16))


MASK = Row(mask_key(key_of("picture a.png"), SQUARE, MASKED), "mask", "mask", "uint8",
           np.arange(64, dtype=np.uint8).reshape(1, 8, 8) * 4)
PLACED = {"a.png": SQUARE, "sub/b.png": SQUARE, "c.png": WIDE}
CAPTIONS = {"a.png": NASTY, "sub/b.png": "shared", "c.png": "shared"}


def write_small(root: Path, texts: Sequence[str] = (), pictures: Mapping[str, bytes] | None = None,
                references: Mapping[str, bytes] | None = None) -> Path:
    """A cache and manifest below `root`; returns the manifest's path.

    `references`: files of references of a.png, in their order, by names below `photos`, which may leave it.

    `texts`: the three samples' names, their captions, and the rejected picture's name, where they are other ones.
    `pictures`: files of samples, by the names in PLACED, of 128x144 and (the last) 96x64 pixels.
    """
    named = dict(zip(PLACED, texts[:3] or PLACED, strict=True))
    captions = dict(zip(PLACED, texts[3:6] or CAPTIONS.values(), strict=True))
    cache = open_cache(root / "cache", create=True)
    nothing = unconditional_key(CONTEXT)
    words = {text_key(caption, CONTEXT) for caption in [*captions.values(), "a prompt"]}
    referred = [reference_of(name, data) for name, data in (references or {}).items()]
    rows = [MASK, *(latent(name, placement) for name, placement in PLACED.items()),
            *{one.latent: Row(one.latent, "latent", "latent", "bfloat16", np.full((4, *cells(REFERENCE)), 9, np.uint16))
              for one in referred}.values(),
            *(text(key) for key in words | {nothing})]
    refs, facts = write_shards(cache, rows)
    shards = build_shards(facts)
    numbers = {digest.as_py().hex(): number for number, digest in enumerate(shards["digest"])}
    samples = [sample_of(name, captions[name])._replace(name=named[name]) for name in PLACED]
    for name, data in (pictures or {}).items():
        place = list(PLACED).index(name)
        file = root / "photos" / named[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        samples[place] = samples[place]._replace(picture=digest_bytes(data))
    for name, data in (references or {}).items():
        file = root / "photos" / name
        with suppress(OSError, ValueError):  # a name that this disk does not take
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    samples[0] = samples[0]._replace(views=(samples[0].views[0]._replace(references=tuple(referred)),))
    buckets = sorted({sample.shape for sample in samples})
    coverage = {sample.id: 0.5 for sample in samples if sample.views[0].mask is not None}

    def place(key):
        return {"shard": numbers[refs[key].shard], "row": refs[key].row}

    def roles(members):
        return {role: sum(one.role == role for one in members) for role in ("train", "validation", "prior")}

    arrays = {"latent": ["c", "h", "w"], "mask": ["1", "h", "w"], "hidden": ["token", "channel"]}
    fields = {field: {"context": MASKED if field == "mask" else CONTEXT,
                      "rows": sum(row.field == field for row in rows),
                      "shards": sum(fact["field"] == field for fact in facts),
                      "bytes": sum(fact["bytes"] for fact in facts if fact["field"] == field),
                      "arrays": {row.array: {"dtype": row.dtype, "dims": arrays[row.array]} for row in rows
                                 if row.field == field}} for field in ("latent", "mask", "text")}
    bad = texts[6] if texts else "bad.png"
    finding = Finding(path=bad, code="truncated", severity="error", detail="ends <early>")
    path = root / "manifest.json"
    write_manifest(path, {
        "format": "latentry/manifest", "version": 2 if referred else 1, "cache": "cache",
        "model": {"hub": "some/model"},
        "family": "sd15", "prediction": "epsilon",
        "latents": {"channels": 4, "factor": 8, "scaling_factor": "0.18215", "shift_factor": "0",
                    "alpha": list(WHITE)},
        "models": {"vae": key_of("vae"), "text": key_of("text")}, "fields": fields,
        "buckets": [{"size": list(size), **roles([one for one in samples if one.shape == (size, sizes)]),
                     **({"references": [list(side) for side in sizes]} if sizes else {})} for size, sizes in buckets],
        "samples": roles(samples), "sources": ["photos"], "recipe": None, "options": [],
        "prompts": {"file": None, "digest": None, "unconditional": place(nothing),
                    "samples": [{"prompt": "a prompt", "negative": None,
                                 "positive": place(text_key("a prompt", CONTEXT)), "negative_row": place(nothing)}]},
        "tables": {"samples": write_table(cache, build_samples(samples, buckets, refs, numbers, coverage)),
                   "shards": write_table(cache, shards), "findings": write_table(cache, build_findings([finding]))},
        "rejected": 1,
    })
    return path


def cells(size):
    return size[1] // 8, size[0] // 8


def reference_of(name, data):
    """A reference whose file has these bytes."""
    size = Image.open(BytesIO(data)).size
    placement = cover(size, REFERENCE)
    return Reference(name=name, picture=digest_bytes(data), size=size, placement=placement,
                     latent=latent_key(digest_bytes(data), placement, None, CONTEXT))


def write_shards(cache, rows):
    """The place of every row, and the shards' facts: one shard for each field and shape."""
    refs, facts = {}, []
    for field, shape in sorted({(row.field, row.value.shape) for row in rows}):
        mine = sorted((row for row in rows if (row.field, row.value.shape) == (field, shape)), key=lambda row: row.key)
        writer = ShardWriter(cache, field, [mine[0].spec])
        for row in mine:
            writer.add(row.key, {row.array: row.value})
        shard = writer.finish()
        keys = tuple(row.key for row in mine)
        write_commit(cache, Task(key=digest_json(list(keys)), field=field, rows=keys), shard, [], {})
        refs |= {row.key: RowRef(shard=shard.digest, row=number) for number, row in enumerate(mine)}
        facts.append({"digest": shard.digest, "field": field, "rows": shard.rows, "bytes": shard.bytes,
                      "shapes": canonical({mine[0].array: list(shape)}).decode(),
                      "dtypes": canonical({mine[0].array: mine[0].dtype}).decode()})
    return refs, facts


def sample_of(name, caption):
    placement = PLACED[name]
    view = View(placement=placement, latent=latent(name, placement).key, mask=MASK.key if name == "a.png" else None)
    size = (128, 144) if placement is SQUARE else (96, 64)
    return Sample(id=key_of(f"sample {name}"), name=name, source=0, picture=key_of(f"picture {name}"), size=size,
                  role="validation" if name == "c.png" else "train", bucket=placement.bucket, views=(view,),
                  texts=(Text(caption=caption, weight=1.0, key=text_key(caption, CONTEXT)),))


@pytest.fixture
def small(tmp_path: Path) -> OpenedManifest:
    """The small manifest, opened."""
    return open_manifest(read_manifest(write_small(tmp_path)))


def moved(path: Path, target: Path, cache: str) -> None:
    """Writes the manifest at `path` as `target`, with another name of its cache."""
    document = {**read_manifest(path).document, "cache": cache}
    document.pop("self")
    write_manifest(target, document)
