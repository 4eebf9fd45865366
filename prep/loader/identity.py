"""Digests everything that determines the steps of a run, so that a resumed run detects how its data changed.

The digest covers samples, their order, buckets, roles, repeats and weights, the keys of their rows, the scaling of
latents and the prediction type. It uses the keys of rows, not their places: a cache keeps its identity when it is
compacted, repaired or moved, and a manifest when its prompts, findings or the places in its tables change. A hundred
thousand samples take 0.9 s on one core of an EPYC.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.digest import canonical
from prep.formatting import counted, grouped
from prep.loader.index import Index
from prep.manifest.shards import keys_at
from prep.parse import Unparsed, brief, count, expect, list_of

HALF = 16  # bytes of a sample's id, and of the digest of all else about it
RECORD = np.dtype([("id", f"S{HALF}"), ("rest", f"S{HALF}")])
_NAMES = {"buckets": "buckets", "latents.channels": "latent channels", "latents.factor": "pixels per latent cell",
          "latents.scaling_factor": "latent scaling", "latents.shift_factor": "latent shift",
          "latents.mean": "mean of latents", "latents.std": "standard deviation of latents",
          "paired": "pairs of pictures", "posterior": "posterior of latents", "masked": "use of masks",
          "prediction": "prediction type", "unconditional": "unconditional row"}


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Everything that determines the steps."""

    facts: Mapping[str, Any]  # JSON without floats
    records: bytes  # one RECORD per sample, in the order of their ids

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return _digest(self.facts, self.records)


def identify(index: Index, *, masked: bool, prediction: str) -> DataIdentity:
    """The identity of an index trained with these settings, cached in the index.

    Reads the keys of the shards. Raises `CacheError`.
    """
    identity = index.identities.get((masked, prediction))
    if identity is None:
        identity = index.identities[masked, prediction] = _identify(index, masked, prediction)
    assert isinstance(identity, DataIdentity)
    return identity


def _identify(index: Index, masked: bool, prediction: str) -> DataIdentity:
    document = index.manifest.document
    latents = {name: document["latents"][name]
               for name in ("channels", "factor", "scaling_factor", "shift_factor", "mean", "std")
               if name in document["latents"]}
    place = document["prompts"]["unconditional"]
    unconditional = _keys(index, np.array([place["shard"]]), np.array([place["row"]]))
    facts = {"latents": latents, "prediction": prediction, "masked": masked,
             **({"paired": True} if index.paired else {}), **({"posterior": "mean+std"} if index.with_std else {}),
             "buckets": [[*size, *(list(reference) for reference in references)]
                         for size, references in index.manifest.shapes],
             "unconditional": unconditional.tobytes().hex(), "samples": len(index.samples)}
    return DataIdentity(facts=facts, records=_records(index, masked))


def facts_of(value: Any, where: str) -> Mapping[str, Any]:
    """The facts that `_identify` makes, as JSON gives them back. Raises `Unparsed`."""
    facts = expect(value, dict, where)
    for name, each in expect(facts.get("latents"), dict, f"{where}.latents").items():
        if isinstance(each, list):  # a number for each channel
            list_of(each, lambda number, at: expect(number, str, at), f"{where}.latents.{name}")
        elif not isinstance(each, str | int):
            raise Unparsed(f"{where}.latents.{name} is {brief(each)}, expected a string, a whole number or a list")
    expect(facts.get("buckets"), list, f"{where}.buckets")
    expect(facts.get("masked"), bool, f"{where}.masked")
    for name in ("prediction", "unconditional"):
        expect(facts.get(name), str, f"{where}.{name}")
    count(facts.get("samples"), f"{where}.samples")
    return facts


def changes(before: Mapping[str, Any], digest: str, records: bytes | None, now: DataIdentity) -> list[str]:
    """Describes how `now` differs from the earlier facts and digest; empty if it does not.

    Counts added, removed and changed samples if the earlier `records` are given and intact.
    """
    if now.digest == digest:
        return []
    old, new = _flat(before), _flat(now.facts)
    differences = [f"{_NAMES[name]}: {_brief(new.get(name))}, was {_brief(old.get(name))}" for name in _NAMES
                   if old.get(name) != new.get(name)]
    if records is None or len(records) % RECORD.itemsize or _digest(before, records) != digest:
        return [*differences, *_uncounted(before["samples"], now.facts["samples"], others=bool(differences))]
    return differences + _counted(np.frombuffer(records, RECORD), np.frombuffer(now.records, RECORD))


def _uncounted(old: int, new: int, *, others: bool) -> list[str]:
    """The change of the samples, as far as it is known without the records of both sides; `others`: whether other
    differences are listed."""
    unknown = "it cannot be told which ones, since samples.bin, the run's list of them, is missing or damaged"
    if new != old:
        return [f"{counted(new, 'sample')} instead of {grouped(old)} ({unknown})"]
    which = "samples may have changed, too" if others else f"samples have changed, still {grouped(new)}"
    return [f"{which} ({unknown})"]


def _counted(old: Column, new: Column) -> list[str]:
    _, at_old, at_new = np.intersect1d(old["id"], new["id"], return_indices=True)
    counts = {"added": len(new) - len(at_new), "removed": len(old) - len(at_old),
              "changed": int((old["rest"][at_old] != new["rest"][at_new]).sum())}
    return [f"{count} {'sample' if count == 1 else 'samples'} {what}" for what, count in counts.items() if count]


def _records(index: Index, masked: bool) -> bytes:
    samples, views, texts = index.samples, index.samples.views, index.samples.texts
    latent = _keys(index, views["latent_shard"], views["latent_row"])
    mask = (_keys(index, views["mask_shard"], views["mask_row"]) if masked or index.inpaints else
            np.zeros(len(latent), latent.dtype))
    sizes = np.array(index.manifest.buckets, "<i4").reshape(-1, 2)[samples.bucket]
    # Each part as bytes, joined by sample: fixed numbers, then keys of views, then keys and weights of texts.
    fixed = _bytes(np.array([name.encode() for name in ROLES], "S10")[samples.role], sizes,
                   samples.repeats.astype("<i4"), samples.weight.astype("<f4"))
    of_views = _bytes(latent, mask)
    references = index.samples.references
    of_references = _bytes(_keys(index, references["latent_shard"], references["latent_row"]))
    of_texts = _bytes(_keys(index, texts["shard"], texts["row"]), texts["weight"].astype("<f4"))
    records = np.zeros(len(samples), RECORD)
    records["id"] = np.ascontiguousarray(samples.ids[:, :HALF]).view(f"S{HALF}").reshape(-1)
    counts = np.stack([np.diff(offsets) for offsets in (samples.view_offsets, samples.text_offsets,
                                                        samples.reference_offsets)], axis=1)
    for here, (view_count, text_count, reference_count) in _alike(counts):  # their parts are equally long
        views_here, texts_here, references_here = (
            part[(offsets[here][:, None] + np.arange(count)).reshape(-1)].reshape(len(here), -1)
            for part, offsets, count in ((of_views, samples.view_offsets, view_count),
                                         (of_texts, samples.text_offsets, text_count),
                                         (of_references, samples.reference_offsets, reference_count)))
        joined = _bytes(fixed[here], np.full(len(here), view_count, "<i4"), views_here, texts_here, references_here)
        data, width = joined.tobytes(), joined.shape[1]  # slices of bytes, not of arrays: a third of the time
        records["rest"][here] = [hashlib.sha256(data[at : at + width]).digest()[:HALF]
                                 for at in range(0, len(data), width)]
    return records.tobytes()


def _alike(rows: Column) -> Iterator[tuple[Column, list[int]]]:
    """The numbers of equal rows of `rows` `[N, 3]`, none over 2²⁰, and each such row."""
    joined = (rows[:, 0] << 20 | rows[:, 1]) << 20 | rows[:, 2]  # quicker to sort than rows
    _, first, which = np.unique(joined, return_index=True, return_inverse=True)
    for number, kind in enumerate(rows[first].tolist()):
        yield np.flatnonzero(which == number), kind


def _bytes(*columns: Column) -> Column:
    """Joins columns of N values or N rows as uint8 [N, bytes]."""
    flat = [np.ascontiguousarray(column) for column in columns]
    return np.concatenate([each.view(np.uint8).reshape(len(each), each.nbytes // max(len(each), 1)) for each in flat],
                          axis=1)


def _keys(index: Index, shard: Column, row: Column) -> Column:
    return keys_at(index.cache, [facts.digest for facts in index.shards], shard, row)


def _digest(facts: Mapping[str, Any], records: bytes) -> str:
    running = hashlib.sha256(canonical({"kind": "steps", "meaning": 1, **facts}))
    running.update(records)
    return running.hexdigest()


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    latents = facts["latents"]
    return {"posterior": "mean", **facts, **{f"latents.{name}": value for name, value in latents.items()}}


def _brief(value: Any) -> str:
    """A fact, formatted for a message."""
    if isinstance(value, list):
        return f"{len(value)} of them"
    known = {True: "on", False: "off", None: "none"}
    return str(value)[:12] if isinstance(value, str) else known.get(value, str(value))
