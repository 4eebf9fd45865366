"""The index refuses tables that contradict the manifest, each with a message that names the sample."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from prep.errors import CacheError
from prep.loader.index import Index, open_index
from prep.manifest.consistency import check_places


@pytest.fixture
def index(make):
    return open_index(make(repeats=2, weight=0.5).manifest)


def changed(index: Index, **columns) -> Index:
    return Index(manifest=index.manifest, cache=index.cache, shards=index.shards,
                 samples=dataclasses.replace(index.samples, **columns))


def refused(index: Index, message: str) -> None:
    with pytest.raises(CacheError, match=message) as caught:
        check_places(index.manifest, index.shards, index.samples)
    assert caught.value.hint.startswith("run prep encode again")


def test_an_occurrence_is_a_sample_and_one_of_its_repeats(index):
    shown = list(zip(*index.showings(0, np.arange(index.counts[0])), strict=True))
    members = index.training[0].tolist()
    assert shown == [(sample, repeat) for sample in members for repeat in (0, 1)]
    assert index.names({0: np.array([0, 1, 2])}) == sorted(index.samples.name(sample) for sample in members[:2])
    assert set(index.samples.weight.tolist()) == {0.5}


def test_shapes_follow_bucket_and_factor(index):
    assert index.shape("latent", 1) == {"latent": (4, 6, 10)} and index.shape("mask", 0) == {"mask": (1, 8, 8)}
    assert index.shape("text", 0) == {"hidden": (8, 32)}


@pytest.mark.parametrize(("column", "value"), [("latent_row", 999), ("latent_row", -1), ("latent_shard", 77),
                                               ("mask_row", 999)])
def test_a_place_that_is_nowhere(index, column, value):
    views = {**index.samples.views, column: index.samples.views[column].copy()}
    at = int(np.flatnonzero(views["mask_shard"] >= 0)[0])
    views[column][at] = value
    field = column.partition("_")[0]
    refused(changed(index, views=views), rf"sample '{index.samples.name(at)}' has its {field} in row -?\d+ of shard "
                                         r"number \d+, which the manifest's shard table does not have")


def test_a_row_of_another_field(index, monkeypatch):
    monkeypatch.setattr(type(index.samples), "name", lambda *_: "b\nerror: fake")  # which forges no line
    views = {**index.samples.views, "latent_shard": index.samples.texts["shard"].copy(),
             "latent_row": index.samples.texts["row"].copy()}
    refused(changed(index, views=views), r"^sample 'b\\nerror: fake' has its latent in shard [0-9a-f]+, "
                                         r"which holds text hidden:\[8, 32\] hidden:bfloat16, expected latent")
