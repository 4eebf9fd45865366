"""Compares two manifests for `prep diff`. Reads documents, tables and keys; no rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.digest import canonical
from prep.errors import CacheError
from prep.fs.place import real_name
from prep.geometry import shape_document, shape_in
from prep.manifest.consistency import reference_sizes
from prep.manifest.describe import import_line
from prep.manifest.diff_samples import Side, compare_samples
from prep.manifest.document import Manifest
from prep.manifest.opened import OpenedManifest, open_manifest
from prep.manifest.shards import keys_at

T = TypeVar("T")
NOUNS = {"latent": "latents", "mask": "masks", "text": "text rows", "embedding": "embeddings"}
# What a changed entry in a field's key context means for all of its rows; {a} is the old value, {b} the new value.
WORDS: Mapping[str, str] = {
    "latent.vae": "the VAE differs",
    "latent.tile": "side of tiles in pixels: {b}, was {a}",
    "latent.origin": "made by {b}, were made by {a}",
    "latent.posterior": "the {b} of the VAE's posterior is stored, was {a}",
    "text.text": "the text encoder or its tokenizer differs",
    "text.max_length": "up to {b} tokens are encoded, was {a}",
    "text.clip_skip": "skipped layers of CLIP: {b}, was {a}",
    "text.text_windows": "windows of 75 tokens: {b}, was {a}",
    "text.quantization": "the weights of T5 or the language model: {b}, were {a}",
    "text.layout": "the layout is {b}, was {a}",
    "embedding.model": "the vision model differs",
    "embedding.output": "the {b} of the vision model is stored, was {a}",
    "mask.origin": "made from {b}, was {a} (alpha: the pictures' transparency; file: mask pictures)",
    "mask.factor": "a latent cell is {b} pixels wide, was {a}",
    "compute": "computed in {b}, was {a}",
    "stored": "stored as {b}, was {a}",
    "meaning": "latentry computes them differently (meaning {b}, was {a})",
    "image": "pictures are decoded or resized differently ({name} {b}, was {a})",
}


@dataclass(frozen=True, kw_only=True)
class DiffSide:
    """A manifest with its opened tables."""

    manifest: Manifest
    audit: OpenedManifest

    @cached_property
    def keys(self) -> Mapping[str, Column]:
        """The key (S32) of every referenced row: latents by view and then by reference, masks by view, texts by text
        and then by prompt.

        Empty bytes if a view has no mask. Raises `CacheError`.
        """
        samples, prompts = self.audit.samples, self.manifest.document["prompts"]
        places = [prompts["unconditional"], *(prompt[name] for prompt in prompts["samples"]
                                              for name in ("positive", "negative_row"))]
        texts = [np.append(samples.texts[name], [place[name] for place in places]) for name in ("shard", "row")]
        keys = partial(keys_at, self.audit.cache, [shard["digest"] for shard in self.audit.shards])
        latents = [np.append(samples.views[name], samples.references[name]) for name in ("latent_shard", "latent_row")]
        return {"latent": keys(latents[0], latents[1]),
                "mask": keys(samples.views["mask_shard"], samples.views["mask_row"]),
                "text": keys(texts[0], texts[1]), "embedding": keys(*samples.embeddings.values())}


def names_of(first: Manifest, second: Manifest) -> tuple[str, str]:
    """Names for two manifests that differ: those of their files, or, if these are the same, their paths or URLs."""
    if first.path.name != second.path.name or str(first.path) == str(second.path):
        return first.path.name, second.path.name
    return str(first.path), str(second.path)


def compare(first: Manifest, second: Manifest) -> dict[str, Any]:
    """The document of `prep diff --json`; skips what a missing or damaged cache prevents, with a note in `notes`.

    `same` is None if no difference was found but not everything could be compared.
    """
    notes: list[str] = []
    a, b = (_opened(manifest, notes) for manifest in (first, second))
    old, new, names = first.document, second.document, names_of(first, second)
    rows = None if a is None or b is None else _noted(lambda: _rows(a, b), notes)
    document: dict[str, Any] = {
        "format": "latentry/diff", "version": 1,
        "a": {"manifest": names[0], "digest": first.digest},
        "b": {"manifest": names[1], "digest": second.digest},
        "model": _model(first, second),
        "fields": {name: _field(first, second, name, (rows or {}).get(name))
                   for name in sorted({*first.fields, *second.fields})},
        "buckets": _buckets(old, new),
        "counts": {role: {"a": old["samples"][role], "b": new["samples"][role]} for role in ROLES},
        "samples": None if a is None or b is None else _noted(lambda: _samples(a, b, keys=rows is not None), notes),
        "prompts": _lists(*([_prompt(prompt) for prompt in each["prompts"]["samples"]] for each in (old, new))),
        "findings": None if a is None or b is None else _noted(
            lambda: _lists(a.audit.findings, b.audit.findings), notes),
    }
    identical, same = first.digest == second.digest, not _differs(document)
    return {**document, "notes": notes, "identical": identical,
            "same": None if same and notes and not identical else same}


def _opened(manifest: Manifest, notes: list[str]) -> DiffSide | None:
    return _noted(lambda: DiffSide(manifest=manifest, audit=open_manifest(manifest)), notes)


def _noted(work: Callable[[], T], notes: list[str]) -> T | None:
    """The result of `work`; None if it raises `CacheError`, whose message becomes a note."""
    try:
        return work()
    except CacheError as error:
        notes.append(error.message)
        return None


def _differs(document: Mapping[str, Any]) -> bool:
    """Whether anything differs that training would see; the places of rows and the paths of sources do not count."""
    samples, findings = document["samples"] or {}, document["findings"] or {}
    fields = [field for name, field in document["fields"].items() if name != "embedding"]
    return bool(
        document["model"] or document["buckets"]
        or any(entry["a"] != entry["b"] for entry in document["counts"].values())
        or any(samples.get(name) for name in ("added", "removed", "renamed", "changed"))
        or any(document["prompts"].values()) or any(findings.values())
        or any(field["change"] or field["context"] or field["arrays"] or _rows_differ(field["rows"])
               for field in fields))


def _rows_differ(rows: Mapping[str, Any]) -> bool:
    return rows["a"] != rows["b"] if rows["shared"] is None else bool(rows["added"] or rows["removed"])


def _model(a: Manifest, b: Manifest) -> list[dict[str, Any]]:
    """Differences between the models: {"what", "a", "b"}."""
    def facts(manifest: Manifest) -> dict[str, Any]:
        document = manifest.document
        return {"family": document["family"], "prediction": document["prediction"],
                **{f"latents.{name}": value for name, value in document["latents"].items() if name != "imported"},
                "origin of latents": import_line(document["latents"]) or "encoded",
                "vae": document["models"]["vae"], "text encoder": document["models"]["text"]}

    pairs = _pairs(facts(a), facts(b), "what")
    same_place = os.path.realpath(a.model) == os.path.realpath(b.model)
    # A path from where `prep encode` ran leads nowhere in a store.
    stored = a.in_store or b.in_store
    if a.document["model"] != b.document["model"] and not same_place and not stored:
        pairs.append({"what": "model", "a": str(a.model), "b": str(b.model)})
    return pairs


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    names = sorted({*a, *b})
    return [{label: name, "a": a.get(name), "b": b.get(name)} for name in names if a.get(name) != b.get(name)]


def _field(a: Manifest, b: Manifest, name: str, rows: Mapping[str, int] | None) -> dict[str, Any]:
    old, new = a.fields.get(name), b.fields.get(name)
    counts = {"a": old.rows if old else 0, "b": new.rows if new else 0}
    unknown = dict.fromkeys(("shared", "added", "removed"))
    changes: dict[str, Any] = {
        "change": "added" if old is None else "removed" if new is None else None, "context": [], "arrays": [],
        "rows": {**counts, **(rows or unknown)},
        "shards": {"a": old.shards if old else 0, "b": new.shards if new else 0},
        "bytes": {"a": old.bytes if old else 0, "b": new.bytes if new else 0},
    }
    if old is not None and new is not None:
        changes["context"] = [{**pair, "words": _words(name, pair)}
                              for pair in _pairs(_flat(old.context), _flat(new.context), "entry")]
        changes["arrays"] = _pairs({array: dict(facts) for array, facts in old.arrays.items()},
                                   {array: dict(facts) for array, facts in new.arrays.items()}, "array")
    return changes


def _flat(context: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of a context; entries of nested tables get dotted names."""
    flat: dict[str, Any] = {}
    for name, value in context.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _words(field: str, change: Mapping[str, Any]) -> str:
    entry = change["entry"]
    words = WORDS.get(f"{field}.{entry}") or WORDS.get(entry.partition(".")[0]) or "{name} is {b}, was {a}"
    return f"all {NOUNS.get(field, field)} change: " + words.format(
        a=_spelled(change["a"]), b=_spelled(change["b"]), name=entry.removeprefix("image."))


def _spelled(value: Any) -> Any:
    return "the default" if value is None else value


def _rows(a: DiffSide, b: DiffSide) -> dict[str, dict[str, int]]:
    """By field, the number of rows (distinct keys) that are shared, added and removed. Raises `CacheError`."""
    rows = {}
    for field in a.keys:
        old, new = (np.unique(side.keys[field]) for side in (a, b))
        old, new = old[old != b""], new[new != b""]
        shared = len(np.intersect1d(old, new, assume_unique=True))
        rows[field] = {"shared": shared, "added": len(new) - shared, "removed": len(old) - shared}
    return rows


def _samples(a: DiffSide, b: DiffSide, *, keys: bool) -> dict[str, Any]:
    """Compares the samples of both sides, as `_sides` has them."""
    return compare_samples(*_sides(a, b, keys=keys))


def sides_of(first: OpenedManifest, second: OpenedManifest) -> tuple[Side, Side]:
    """The samples of two manifests, as they are compared. Raises `CacheError` if a table cannot be read.

    Keys that cannot be read are not compared: then a changed mask is not seen.
    """
    a, b = (DiffSide(manifest=opened.manifest, audit=opened) for opened in (first, second))
    try:
        keys = bool(a.keys and b.keys)
    except CacheError:
        keys = False
    return _sides(a, b, keys=keys)


def _sides(a: DiffSide, b: DiffSide, *, keys: bool) -> tuple[Side, Side]:
    """With `keys` (they could be read) and equal key contexts, a different key means a different mask or caption."""
    def known(side: DiffSide, field: str) -> Column | None:
        contexts = [each.manifest.fields[field].context for each in (a, b) if field in each.manifest.fields]
        return side.keys[field] if keys and len(contexts) == 2 and contexts[0] == contexts[1] else None

    first, second = (
        Side(samples=side.audit.samples, buckets=side.manifest.buckets, sources=numbers,
             reference_sizes=reference_sizes(side.manifest, side.audit.samples),
             masks=known(side, "mask"), texts=known(side, "text"))
        for side, numbers in zip((a, b), _sources(a.manifest, b.manifest), strict=True))
    return first, second


def _sources(a: Manifest, b: Manifest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A number for each source of `a` and of `b`: sources at the same path share one, the rest pair up by position."""
    old, new = ([None if place is None else real_name(place) for place in side.sources] for side in (a, b))
    numbers = list(range(len(old)))
    same: dict[int, int] = {}
    for place, where in enumerate(new):
        match = next((number for number in numbers if where is not None and old[number] == where), None)
        if match is not None and match not in same.values():
            same[place] = match
    unpaired = [number for number in numbers if number not in same.values()]
    fresh = iter([*unpaired, *range(len(old), len(old) + len(new))])
    return tuple(numbers), tuple(same[place] if place in same else next(fresh) for place in range(len(new)))


def _buckets(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Buckets whose counts differ; a side without that bucket is None."""
    sides = [{shape_in(bucket): {role: bucket[role] for role in ROLES} for bucket in each["buckets"]}
             for each in (a, b)]
    return [{**shape_document(shape), "a": sides[0].get(shape), "b": sides[1].get(shape)}
            for shape in sorted({*sides[0], *sides[1]}) if sides[0].get(shape) != sides[1].get(shape)]


def _prompt(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A sample prompt as it is compared, with the files of its references if it has any."""
    references = [{"name": each["name"], "picture": each["picture"],
                   **({"mask": each["mask"]["name"]} if "mask" in each else {})}
                  for each in prompt.get("references", ())]
    return {"prompt": prompt["prompt"], "negative": prompt["negative"],
            **({"references": references} if references else {})}


def _lists(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Multiset difference of two lists: the items added in `b` and removed from `a`, sorted."""
    counted = [Counter(canonical(entry) for entry in each) for each in (a, b)]
    known = {canonical(entry): dict(entry) for each in (a, b) for entry in each}
    return {"added": [known[spelled] for spelled in sorted((counted[1] - counted[0]).elements())],
            "removed": [known[spelled] for spelled in sorted((counted[0] - counted[1]).elements())]}
