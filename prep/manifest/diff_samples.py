"""Compares two tables of samples column by column, without a Python object for each unchanged sample.

Samples are matched by name within their source. The rest are matched by name alone (moved to another source), then by
id (the same picture in the same bucket under another name).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.cache.ledger.columns import Column
from prep.geometry import Size
from prep.manifest.samples import SampleColumns

REASONS = ("added", "removed", "name", "source", "picture", "size", "bucket", "placement", "mask removed", "mask added",
           "mask", "references", "reference placement", "caption", "caption weight", "role", "repeats", "weight")
PLACEMENT = ("scaled_width", "scaled_height", "crop_x", "crop_y", "flip")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One manifest's samples, as they are compared."""

    samples: SampleColumns
    buckets: tuple[Size, ...]
    reference_sizes: Column  # [R, 2]: width and height of the pictures of references' latents
    sources: tuple[int, ...]  # by source: a number that equals the same source's number on the other side
    masks: Column | None  # S32 by view: key of its mask row; None: unknown, or not comparable with the other side's
    texts: Column | None  # S32 by text: key of its row; None as above

    def names(self, numbers: Column) -> list[str]:
        """The names of some samples, sorted."""
        return sorted(self.samples.table["name"].take(pa.array(numbers)).to_pylist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Sample numbers by group; each sample is in exactly one group of its side."""

    same: tuple[Column, Column]  # pairs
    moved: tuple[Column, Column]  # pairs, in different sources
    renamed: tuple[Column, Column]  # pairs
    removed: Column  # of a
    added: Column  # of b


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Differences between samples: R rows, one for each sample that is not the same on both sides."""

    old: Column  # int64 [R]: number of the sample in a; -1: it was added
    new: Column  # in b; -1: it was removed
    reasons: Mapping[str, Column]  # bool [R], by each of REASONS

    def __len__(self) -> int:
        return len(self.old)


def changes(a: Side, b: Side) -> Changes:
    """The samples that differ, and why, without a Python object for any; `compare_samples` names them."""
    matched = match(a, b)
    parts: list[tuple[Column, Column, Mapping[str, Column]]] = []
    for (old, new), known in ((matched.same, ""), (matched.moved, "source"), (matched.renamed, "name")):
        if len(old):
            reasons = {**_reasons(a, b, old, new), **({known: np.ones(len(old), bool)} if known else {})}
            places = np.flatnonzero(np.logical_or.reduce(list(reasons.values())))
            parts.append((old[places], new[places], {name: column[places] for name, column in reasons.items()}))
    for name, numbers in (("added", matched.added), ("removed", matched.removed)):
        nowhere, every = np.full(len(numbers), -1), np.ones(len(numbers), bool)
        parts.append((nowhere, numbers, {name: every}) if name == "added" else (numbers, nowhere, {name: every}))
    return Changes(
        old=np.concatenate([old for old, _, _ in parts]), new=np.concatenate([new for _, new, _ in parts]),
        reasons={name: np.concatenate([why.get(name, np.zeros(len(old), bool)) for old, _, why in parts])
                 for name in REASONS})


def compare_samples(a: Side, b: Side) -> dict[str, Any]:
    """Names of added, removed, renamed and changed samples, with the reasons for changes."""
    matched = match(a, b)
    changed = [*_changed(a, b, *matched.same, ()), *_changed(a, b, *matched.moved, ("source",))]
    renamed = _changed(a, b, *matched.renamed, ("name",))
    before = a.samples.table["name"].take(pa.array(matched.renamed[0])).to_pylist()
    moves = [{"from": old, "to": sample["name"], "why": sample["why"][1:]}
             for old, sample in zip(before, renamed, strict=True)]
    return {"a": len(a.samples), "b": len(b.samples), "added": b.names(matched.added),
            "removed": a.names(matched.removed), "renamed": sorted(moves, key=lambda sample: str(sample["to"])),
            "changed": sorted(changed, key=lambda sample: str(sample["name"]))}


def match(a: Side, b: Side) -> Matched:
    """Pairs samples of `a` with the same samples of `b`."""
    names_a, names_b = _codes(a.samples.table["name"], b.samples.table["name"])
    left_a, left_b = np.arange(len(a.samples)), np.arange(len(b.samples))
    pairs = []
    # Source numbers are small, so name and source fit in one integer.
    numbers_a, numbers_b = (np.array(side.sources, np.int64)[side.samples.source] for side in (a, b))
    width = 1 + max([*a.sources, *b.sources], default=0)
    for keys_a, keys_b in ((names_a * width + numbers_a, names_b * width + numbers_b), (names_a, names_b),
                           _codes_of_digests(a.samples.ids, b.samples.ids)):
        _, at_a, at_b = np.intersect1d(_counted(keys_a[left_a]), _counted(keys_b[left_b]), assume_unique=True,
                                       return_indices=True)
        pairs.append((left_a[at_a], left_b[at_b]))
        left_a, left_b = np.delete(left_a, at_a), np.delete(left_b, at_b)
    return Matched(same=pairs[0], moved=pairs[1], renamed=pairs[2], removed=left_a, added=left_b)


def _changed(a: Side, b: Side, old: Column, new: Column, known: Sequence[str]) -> list[dict[str, Any]]:
    """The names of differing pairs, with `known` and all other reasons; with a known reason every pair differs."""
    if not len(old):
        return []
    reasons = _reasons(a, b, old, new)
    differs = np.logical_or.reduce([*reasons.values(), np.full(len(old), bool(known))])
    places = np.flatnonzero(differs)
    names = b.samples.table["name"].take(pa.array(new[places])).to_pylist()
    return [{"name": name, "why": [*known, *(reason for reason, column in reasons.items() if column[place])]}
            for name, place in zip(names, places.tolist(), strict=True)]


def _reasons(a: Side, b: Side, old: Column, new: Column) -> Mapping[str, Column]:
    """By reason, which pairs differ."""
    before, after = a.samples, b.samples
    digests = [_digests(side.samples.table["picture"])[numbers] for side, numbers in ((a, old), (b, new))]
    sizes = [np.array(side.buckets, np.int64).reshape(-1, 2)[side.samples.bucket[numbers]]
             for side, numbers in ((a, old), (b, new))]
    differ = {
        "picture": digests[0] != digests[1],
        "size": (before.width[old] != after.width[new]) | (before.height[old] != after.height[new]),
        "bucket": (sizes[0] != sizes[1]).any(axis=1),
        **_views(a, b, old, new), **_references(a, b, old, new), **_texts(a, b, old, new),
        "role": before.role[old] != after.role[new],
        "repeats": before.repeats[old] != after.repeats[new],
        "weight": before.weight[old] != after.weight[new],
    }
    differ["placement"] &= ~(differ["bucket"] | differ["size"])  # a different bucket or size implies it
    differ["mask"] &= ~(differ["placement"] | differ["bucket"] | differ["size"])  # these change every mask
    return differ


def _views(a: Side, b: Side, old: Column, new: Column) -> dict[str, Column]:
    counts = [np.diff(side.samples.view_offsets)[numbers] for side, numbers in ((a, old), (b, new))]
    placement = counts[0] != counts[1]
    gone, come, mask = (np.zeros(len(old), bool) for _ in range(3))
    for place in range(int(min(counts[0].max(initial=0), counts[1].max(initial=0)))):
        both = np.flatnonzero((counts[0] > place) & (counts[1] > place))
        at = [side.samples.view_offsets[numbers[both]] + place for side, numbers in ((a, old), (b, new))]
        for name in PLACEMENT:
            placement[both] |= a.samples.views[name][at[0]] != b.samples.views[name][at[1]]
        had, has = (side.samples.views["mask_shard"][where] >= 0 for side, where in zip((a, b), at, strict=True))
        gone[both] |= had & ~has
        come[both] |= has & ~had
        if a.masks is not None and b.masks is not None:
            mask[both] |= had & has & (a.masks[at[0]] != b.masks[at[1]])
    return {"placement": placement, "mask removed": gone, "mask added": come, "mask": mask}


def _references(a: Side, b: Side, old: Column, new: Column) -> dict[str, Column]:
    """Which pairs have other reference pictures, another order or number of them; and which have the same, placed
    otherwise."""
    offsets = [(side.samples.reference_offsets[numbers], side.samples.reference_offsets[numbers + 1])
               for side, numbers in ((a, old), (b, new))]
    counts = [past - first for first, past in offsets]
    each = [count // np.diff(side.samples.view_offsets)[numbers]
            for count, side, numbers in zip(counts, (a, b), (old, new), strict=True)]
    others, placement = each[0] != each[1], np.zeros(len(old), bool)
    pictures = [_reference_pictures(side) for side in (a, b)]
    for place in range(int(min(counts[0].max(initial=0), counts[1].max(initial=0)))):
        both = np.flatnonzero((counts[0] > place) & (counts[1] > place))
        at = [first[both] + place for first, _ in offsets]
        others[both] |= pictures[0][at[0]] != pictures[1][at[1]]
        placement[both] |= (a.reference_sizes[at[0]] != b.reference_sizes[at[1]]).any(axis=1)
        for name in PLACEMENT:
            placement[both] |= a.samples.references[name][at[0]] != b.samples.references[name][at[1]]
    return {"references": others, "reference placement": placement & ~others}


def _reference_pictures(side: Side) -> Column:
    """The digests of the pictures of all references, as S32."""
    table = side.samples.table
    if "references" not in table.column_names:
        return np.empty(0, "S32")
    return _digests(pc.struct_field(pc.list_flatten(table["references"]), "picture"))


def _texts(a: Side, b: Side, old: Column, new: Column) -> dict[str, Column]:
    codes = (a.texts, b.texts) if a.texts is not None and b.texts is not None else _codes(*(
        pc.struct_field(pc.list_flatten(side.samples.table["texts"]), "caption") for side in (a, b)))
    counts = [np.diff(side.samples.text_offsets)[numbers] for side, numbers in ((a, old), (b, new))]
    caption, weight = counts[0] != counts[1], np.zeros(len(old), bool)
    for place in range(int(min(counts[0].max(initial=0), counts[1].max(initial=0)))):
        both = np.flatnonzero((counts[0] > place) & (counts[1] > place))
        at = [side.samples.text_offsets[numbers[both]] + place for side, numbers in ((a, old), (b, new))]
        caption[both] |= codes[0][at[0]] != codes[1][at[1]]
        weight[both] |= a.samples.texts["weight"][at[0]] != b.samples.texts["weight"][at[1]]
    return {"caption": caption, "caption weight": weight}


def _codes(a: pa.ChunkedArray, b: pa.ChunkedArray) -> tuple[Column, Column]:
    """An integer for each string; equal strings have equal integers on both sides."""
    joined = pa.chunked_array([*a.chunks, *b.chunks], a.type).dictionary_encode().unify_dictionaries()
    parts = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in joined.chunks]
    codes = np.concatenate([np.empty(0, np.int64), *parts])
    return codes[: len(a)], codes[len(a) :]


def _codes_of_digests(a: Column, b: Column) -> tuple[Column, Column]:
    """An integer for each digest, as `_codes`; digests are uint8 [N, 32]."""
    both = np.concatenate([a, b]).view("S32").reshape(-1)
    codes = np.unique(both, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return codes[: len(a)], codes[len(a) :]


def _counted(keys: Column) -> Column:
    """The keys (int64, from 0), made unique: each repetition of a key gets a running number in the high bits."""
    order = np.argsort(keys, kind="stable")
    inner = keys[order]
    starts = np.flatnonzero(np.append(True, inner[1:] != inner[:-1])[: len(inner)])
    copy = np.arange(len(inner)) - np.repeat(starts, np.diff(np.append(starts, len(inner))))
    counts = np.empty(len(keys), np.int64)
    counts[order] = copy << 40 | inner  # below 2^40: names times sources
    return counts


def _digests(column: pa.ChunkedArray) -> Column:
    """A column of binary(32) as S32."""
    parts = [np.frombuffer(chunk.buffers()[1], np.uint8, 32 * len(chunk), 32 * chunk.offset)
             for chunk in column.chunks if len(chunk)]
    return np.concatenate([np.empty(0, np.uint8), *parts]).view("S32")
