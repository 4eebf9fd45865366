"""What decides the steps has one digest: rows count by key, and each part of it matters."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from real_manifest import build

from prep.batching.split import ROLES
from prep.errors import CacheError
from prep.loader.identity import RECORD, _records, changes, identify
from prep.loader.index import open_index
from prep.manifest.shards import keys_at


@pytest.fixture
def identity(tmp_path_factory, tiny_model):
    """`identity(masked=…, prediction=…, **what_differs)` of a small manifest."""

    def go(masked=True, prediction="epsilon", **differs):
        made = build(tmp_path_factory.mktemp("made"), tiny_model, **differs)
        return identify(open_index(made.manifest), masked=masked, prediction=prediction)

    return go


def test_the_same_data_elsewhere_have_the_same_identity(identity):
    one, other = identity(), identity()
    assert one.digest == other.digest and changes(one.facts, one.digest, one.records, other) == []


def test_prompts_and_an_unused_field_are_no_part_of_it(identity):
    assert identity().digest == identity(prompts=None).digest
    assert identity(masked=False).digest == identity(masked=False, masks=False).digest


@pytest.mark.parametrize(("differs", "words"), [
    ({"repeats": 2}, ["9 samples changed"]), ({"weight": 0.5}, ["9 samples changed"]),
    ({"texts": 2}, ["9 samples changed"]), ({"views": 2}, ["9 samples changed"]),
    ({"counts": (5, 3)}, ["1 sample added"]), ({"counts": (4, 1)}, ["2 samples removed"]),
    ({"masked": False}, ["use of masks: off, was on", "6 samples changed"]),
    ({"prediction": "v_prediction"}, ["prediction type: v_prediction, was epsilon"]),
    ({"stds": True}, ["posterior of latents: mean+std, was mean"]),
    ({"change": lambda document: document["latents"].update(scaling_factor="0.25")},
     ["latent scaling: 0.25, was 0.5"]),
], ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "")
def test_each_part_changes_it_and_is_named(identity, differs, words):
    one, other = identity(), identity(**differs)
    assert one.digest != other.digest
    found = changes(one.facts, one.digest, one.records, other)
    if differs.get("counts") == (5, 3):  # the fifth was a validation sample: its role changed
        assert found[0].endswith("added") or found[-1].endswith("changed")
    else:
        assert found == words
    for records in (None, b"", one.records[:-1], bytes(len(one.records))):
        told = changes(one.facts, one.digest, records, other)
        known, now = told[:-1], other.facts["samples"]
        assert not any("sample" in each for each in known)
        assert told[-1] == (f"{now} samples instead of 9" if now != 9 else "samples may have changed, too" if known else
                            "samples have changed, still 9") + (
            " (it cannot be told which ones, since samples.bin, the run's list of them, is missing or damaged)")


def test_records_are_digests_of_each_samples_parts(tmp_path, tiny_model):
    """Against a loop over samples with unequal numbers of views and texts: offsets are moved, parts given away."""
    index = open_index(build(tmp_path, tiny_model, texts=3, views=2).manifest)
    samples = index.samples
    views, texts = samples.view_offsets.copy(), samples.text_offsets.copy()
    texts[1:-1] += np.arange(len(texts) - 2) % 3 - 1
    views[2] -= 1
    uneven = replace(index, samples=replace(samples, view_offsets=views, text_offsets=texts))
    assert len({tuple(row) for row in np.stack([np.diff(views), np.diff(texts)], axis=1).tolist()}) > 3
    digests = [facts.digest for facts in index.shards]
    latents, masks = (keys_at(index.cache, digests, samples.views[f"{name}_shard"], samples.views[f"{name}_row"])
                      for name in ("latent", "mask"))
    keys = keys_at(index.cache, digests, samples.texts["shard"], samples.texts["row"])
    found = np.frombuffer(_records(uneven, masked=True), RECORD)
    for number in range(len(samples)):
        parts = ROLES[samples.role[number]].encode().ljust(10, b"\0")
        parts += struct.pack("<2iif", *index.manifest.buckets[samples.bucket[number]], samples.repeats[number],
                             samples.weight[number])
        parts += struct.pack("<i", views[number + 1] - views[number])
        for view in range(views[number], views[number + 1]):
            parts += latents[view].ljust(32, b"\0") + masks[view].ljust(32, b"\0")
        for text in range(texts[number], texts[number + 1]):
            parts += keys[text].ljust(32, b"\0") + struct.pack("<f", samples.texts["weight"][text])
        assert found["rest"][number].ljust(16, b"\0") == hashlib.sha256(parts).digest()[:16]


def test_records_are_one_per_sample_in_the_order_of_their_ids(identity):
    records = np.frombuffer(identity().records, RECORD)
    assert len(records) == 9 and len(set(records["rest"].tolist())) == 9
    ids = [bytes(one).ljust(16, b"\0") for one in records["id"].tolist()]
    assert ids == sorted(ids)


def test_a_row_that_its_shard_does_not_have(tmp_path, tiny_model):
    index = open_index(build(tmp_path, tiny_model).manifest)
    digest = index.shards[0].digest
    assert keys_at(index.cache, [digest], np.array([-1]), np.array([0])).tolist() == [b""]
    with pytest.raises(CacheError, match=rf"shard {digest} has \d+ rows, expected more than 99"):
        keys_at(index.cache, [digest], np.array([0]), np.array([99]))
    assert identify(index, masked=True, prediction="epsilon") is identify(index, masked=True, prediction="epsilon")
    assert replace(index, samples=index.samples).identities == {}
