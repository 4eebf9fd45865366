"""A small manifest made by the real writers, with values a test can know: random latents, masks and text rows.

Two buckets (64x64 and 80x48 pixels), a model of random weights. The fixture `make` varies what a test is about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prep.arrays import ArraySpec
from prep.cache.ledger.ledger import write_commit
from prep.cache.records import RowRef, Task
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.digest import canonical, digest_bytes, digest_json
from prep.fs.place import relative_name
from prep.geometry import BucketShape, Placement, Size
from prep.keys import text_key, unconditional_key
from prep.manifest.document import FORMAT, VERSION, WITH_REFERENCES, Manifest, write_manifest
from prep.manifest.samples import Reference, Sample, Text, View, build_samples
from prep.manifest.tables import build_findings, build_shards, write_table
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.recipe.prompts import parse_prompts

torch.set_num_threads(1)  # quicker for models this small

BUCKETS = ((64, 64), (80, 48))
CONTEXT = {"meaning": 1, "text": "tiny", "max_length": 8, "layout": "full"}
TOKENS, WIDTH = 8, 32
PROMPTS = "a red circle\na blue square --n blurry\n"


@dataclass(frozen=True, kw_only=True)
class Made:
    """A manifest and the values behind it, as float32, by key."""

    manifest: Manifest
    latents: Mapping[str, np.ndarray]
    masks: Mapping[str, np.ndarray]  # uint8
    texts: Mapping[str, np.ndarray]
    stds: Mapping[str, np.ndarray]  # empty unless asked for
    samples: Sequence[Sample]  # sorted by id, as in the table
    root: Path

    @property
    def path(self) -> Path:
        return self.manifest.path


@dataclass
class Shards:
    """Rows as they go into a cache."""

    cache: Cache
    refs: dict[str, RowRef] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def put(self, name: str, dtype: str, **arrays: Mapping[str, np.ndarray]) -> None:
        """One shard and its commit; arrays by name and key, bfloat16 values as float32 that bfloat16 can hold."""
        arrays = {array: rows for array, rows in arrays.items() if rows}
        if not arrays:
            return
        keys = tuple(sorted(next(iter(arrays.values()))))
        specs = [ArraySpec(name=array, dtype=dtype, shape=rows[keys[0]].shape) for array, rows in arrays.items()]
        with ShardWriter(self.cache, name, specs) as writer:
            for key in keys:
                writer.add(key, {array: as_bfloat16(rows[key]) if dtype == "bfloat16" else rows[key]
                                 for array, rows in arrays.items()})
            shard = writer.finish()
        task = Task(key=digest_json({"rows": list(keys)}), field=name, rows=keys)
        write_commit(self.cache, task, shard, [], {"host": "test"})
        self.refs.update({key: RowRef(shard=shard.digest, row=row) for row, key in enumerate(keys)})
        self.facts.append({"digest": shard.digest, "field": name, "rows": shard.rows, "bytes": shard.bytes,
                           "shapes": canonical({spec.name: list(spec.shape) for spec in specs}).decode(),
                           "dtypes": canonical({spec.name: dtype for spec in specs}).decode()})


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def exact(rng: np.random.Generator, shape: Sequence[int], mean: float = 0.0) -> np.ndarray:
    """Normal values that bfloat16 holds exactly."""
    values = rng.standard_normal(shape, dtype=np.float32) + np.float32(mean)
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


def key_of(*words: object) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def build(root: Path, model: Path, *, counts: Sequence[int] = (4, 3), validation: int = 2, masks: bool = True,
          repeats: int = 1, weight: float = 1.0, texts: int = 1, views: int = 1, prediction: str = "epsilon",
          prompts: str | None = PROMPTS, stds: bool = False, references: Sequence[Size] = (), prior: bool = False,
          pairs: bool = False,
          change: Callable[[dict[str, Any]], None] | None = None) -> Made:
    """The manifest root/m.json with `counts` training samples by bucket; every third sample has no mask.

    With `stds`, latents have standard deviations. Samples with odd numbers have references of the sizes `references`.
    With `prior`, that is the role of every second training sample. With `pairs`, each sample has the other picture of
    its pair, whose latent is larger by 8 on average.
    """
    rng = np.random.default_rng(0)
    cache = open_cache(root / "cache", create=True)
    shards, latents, mask_rows, captions, deviations = Shards(cache), {}, {}, {}, {}
    samples: list[Sample] = []
    for bucket, count in zip(BUCKETS, counts, strict=True):
        cells = (bucket[1] // 8, bucket[0] // 8)
        here: dict[str, np.ndarray] = {}
        masked: dict[str, np.ndarray] = {}
        for number in range(count + (validation if bucket == BUCKETS[0] else 0)):
            placed = []
            for view in range(views):
                latent, mask = key_of("latent", bucket, number, view), key_of("mask", bucket, number, view)
                here[latent] = exact(rng, (4, *cells))
                if masks and number % 3 != 2:
                    masked[mask] = rng.integers(0, 256, (1, *cells), dtype=np.uint8)
                own = [reference(size, bucket, number, view, place)
                       for place, size in enumerate([bucket] if pairs else references)]
                placed.append(View(latent=latent, mask=mask if mask in masked else None,
                                   references=tuple(own) if number % 2 or pairs else (),
                                   placement=Placement(scaled=bucket, crop=(0, 0), bucket=bucket)))
            words = [f"caption {text} of {number} in {bucket[0]}" for text in range(texts)]
            captions.update({text_key(word, CONTEXT): exact(rng, (TOKENS, WIDTH)) for word in words})
            samples.append(Sample(
                id=key_of("sample", bucket, number), name=f"{bucket[0]}/{number}.png", source=0,
                role="validation" if number >= count else "prior" if prior and number % 2 else "train",
                picture=key_of("picture", bucket, number),
                size=bucket, bucket=bucket, views=tuple(placed), repeats=repeats, weight=weight,
                texts=tuple(Text(caption=word, weight=1.0, key=text_key(word, CONTEXT)) for word in words)))
        wide = {key: np.abs(exact(np.random.default_rng(int(key[:8], 16)), row.shape)) for key, row in here.items()
                } if stds else {}
        shards.put("latent", "bfloat16", latent=here, std=wide)
        shards.put("mask", "uint8", mask=masked)
        deviations.update(wide)
        latents.update(here)
        mask_rows.update(masked)
    for size in dict.fromkeys(BUCKETS if pairs else references):
        keys = dict.fromkeys(each.latent for sample in samples for view in sample.views for each in view.references
                             if each.size == size)
        rows = {key: exact(rng, (4, size[1] // 8, size[0] // 8), 8.0 * pairs) for key in keys}
        shards.put("latent", "bfloat16", latent=rows,
                   std={key: np.abs(row) for key, row in rows.items()} if stds else {})
        latents.update(rows)
    asked = list(parse_prompts(prompts or ""))
    for words in [caption for one in asked for caption in (one.text, one.negative) if caption is not None]:
        captions[text_key(words, CONTEXT)] = exact(rng, (TOKENS, WIDTH))
    captions[unconditional_key(CONTEXT)] = exact(rng, (TOKENS, WIDTH))
    shards.put("text", "bfloat16", hidden=captions)
    manifest = seal(root, model, shards, samples, asked, prompts, masks=masks, stds=stds, prediction=prediction,
                    pairs=pairs, change=change)
    return Made(manifest=manifest, latents=latents, masks=mask_rows, texts=captions, stds=deviations, root=root,
                samples=sorted(samples, key=lambda sample: sample.id))


def reference(size: Size, *where: object) -> Reference:
    """A reference picture of this size, which is its bucket's too."""
    return Reference(name=f"references/{'-'.join(map(str, where[1:]))}.png", picture=key_of("reference", size, *where),
                     size=size, placement=Placement(scaled=size, crop=(0, 0), bucket=size),
                     latent=key_of("reference latent", size, *where))


def seal(root: Path, model: Path, shards: Shards, samples: Sequence[Sample], asked, prompts: str | None, *, masks: bool,
         stds: bool, prediction: str, pairs: bool, change: Callable[[dict[str, Any]], None] | None) -> Manifest:
    """Tables, prompt file and document."""
    table = build_shards(shards.facts)
    numbers = {digest.as_py().hex(): number for number, digest in enumerate(table["digest"])}

    def row(key: str) -> dict[str, int]:
        return {"shard": numbers[shards.refs[key].shard], "row": shards.refs[key].row}

    shapes = sorted({*((size, ()) for size in BUCKETS if not pairs), *(sample.shape for sample in samples)})
    unconditional = unconditional_key(CONTEXT)
    if prompts is not None:
        (root / "prompts.txt").write_text(prompts)
    cells = {"dtype": "bfloat16", "dims": ["c", "h", "w"]}
    arrays = {"latent": {"latent": cells, **({"std": cells} if stds else {})},
              "mask": {"mask": {"dtype": "uint8", "dims": ["1", "h", "w"]}},
              "text": {"hidden": {"dtype": "bfloat16", "dims": ["token", "channel"]}}}
    fields = {name: {"context": CONTEXT if name == "text" else {}, "arrays": arrays[name], "rows": 1, "shards": 1,
                     "bytes": 1} for name in arrays if masks or name != "mask"}
    document = {
        "format": FORMAT, "version": WITH_REFERENCES if any(sizes for _, sizes in shapes) else VERSION,
        "cache": "cache", "family": "sd15",
        "model": {"path": relative_name(model, root / "m.json")},
        "latents": {"channels": 4, "factor": 8, "scaling_factor": "0.5", "shift_factor": "0.125",
                    **({"references": {"fit": "pair", "resolution": 0}} if pairs else {})},
        "prediction": prediction, "models": {"vae": vae_fingerprint(model), "text": text_fingerprint(model)},
        "fields": fields, "sources": ["photos"], "recipe": None, "options": ["--model", {"path": "model"}],
        "rejected": 0,
        "buckets": [bucket_of(shape, samples) for shape in shapes], "samples": roles(samples, None),
        "prompts": {"file": None if prompts is None else "prompts.txt", "unconditional": row(unconditional),
                    "digest": None if prompts is None else digest_bytes(prompts.encode()),
                    "samples": [{"prompt": one.text, "negative": one.negative,
                                 "positive": row(text_key(one.text, CONTEXT)),
                                 "negative_row": row(unconditional if one.negative is None else
                                                     text_key(one.negative, CONTEXT)),
                                 **({"settings": one.settings.as_document()} if one.settings.as_document() else {})}
                                for one in asked]},
        "tables": {"samples": write_table(shards.cache, build_samples(samples, shapes, shards.refs, numbers, {})),
                   "shards": write_table(shards.cache, table),
                   "findings": write_table(shards.cache, build_findings([]))},
    }
    if change is not None:
        change(document)
    return write_manifest(root / "m.json", document)


def bucket_of(shape: BucketShape, samples: Sequence[Sample]) -> dict[str, Any]:
    return {"size": list(shape[0]), **({"references": [list(size) for size in shape[1]]} if shape[1] else {}),
            **roles(samples, shape)}


def roles(samples: Sequence[Sample], shape: BucketShape | None) -> dict[str, int]:
    return {role: sum(sample.role == role and shape in (None, sample.shape) for sample in samples)
            for role in ("train", "validation", "prior")}
