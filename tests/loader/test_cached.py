"""A manifest as tables and arrays, against the values that were written."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from prep import api
from prep.errors import CacheError, UsageError
from prep.loader.cached import CachedDataset
from prep.loader.index import open_index
from prep.manifest.document import write_manifest


def opened(made):
    return CachedDataset(open_index(made.manifest))


def test_rows_are_those_that_were_written(make):
    made = make(texts=2, views=2, stds=True)
    found = opened(made)
    assert len(found) == len(made.samples) and found.buckets == ((64, 64), (80, 48))
    assert found.fields["latent"]["std"]["dtype"] == "bfloat16"
    for number, sample in enumerate(made.samples):
        assert found.name(number) == sample.name
        assert found.captions(number) == [text.caption for text in sample.texts]
        for at, view in enumerate(sample.views):
            latent = found.latent(number, at)
            np.testing.assert_array_equal(latent["latent"], made.latents[view.latent])
            np.testing.assert_array_equal(latent["std"], made.stds[view.latent])
            mask = found.mask(number, at)
            assert (mask is None) == (view.mask is None) and found.placement(number, at) == view.placement
            if view.mask is not None:
                np.testing.assert_array_equal(mask, made.masks[view.mask])
        for at, text in enumerate(sample.texts):
            np.testing.assert_array_equal(found.text(number, at)["hidden"], made.texts[text.key])


def test_the_table_has_a_row_a_sample(make):
    made = make(repeats=2)
    table = opened(made).table
    rows = table.to_pylist()
    assert [row["name"] for row in rows] == [sample.name for sample in made.samples]
    assert [(row["bucket_width"], row["bucket_height"]) for row in rows] == [sample.bucket for sample in made.samples]
    assert {row["repeats"] for row in rows} == {2} and rows[0]["texts"][0]["caption"].startswith("caption 0")


def test_groups_are_what_zarr_reads(make):
    made = make()
    groups = opened(made).groups("mask")
    rows = {bytes(key).hex(): mask for group in groups.values()
            for key, mask in zip(group["key"][:], group["mask"][:], strict=True)}
    assert rows.keys() == made.masks.keys()
    for key, mask in rows.items():
        np.testing.assert_array_equal(mask, made.masks[key])
    with pytest.raises(UsageError, match="the manifest has no field 'masks', expected one of: latent, mask, text"):
        opened(made).groups("masks")


def test_numbers_that_are_not_there(make):
    found = opened(make())
    for wrong in (lambda: found.name(-1), lambda: found.latent(len(found)), lambda: found.latent(0, 1),
                  lambda: found.text(0, -1)):
        with pytest.raises(IndexError, match="of "):
            wrong()


def test_the_path_of_a_picture_that_is_there(make, tmp_path):
    found = opened(make())
    assert found.path(0) is None
    place = tmp_path / "photos" / found.name(0)
    place.parent.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(place)
    assert found.path(0) == place and found.findings == ()


@pytest.mark.parametrize("method", ["fork", *(pytest.param(name, marks=pytest.mark.slow)  # they import torch again
                                             for name in ("spawn", "forkserver"))])
def test_workers_of_a_loader_read_it_however_they_are_started(make, method):
    made = make()
    dataset = api.open_manifest(made.path)
    loader = torch.utils.data.DataLoader(Latents(dataset), batch_size=None, num_workers=1,
                                         multiprocessing_context=method)
    assert [found.numpy().tobytes() for found in loader] == [dataset.latent(number)["latent"].tobytes()
                                                     for number in range(len(dataset))]


class Latents(torch.utils.data.Dataset):
    """As people write one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        return self.dataset.latent(number)["latent"]


def test_a_copy_is_the_same_and_refuses_another_manifest(make):
    made = make()
    dataset, stream = api.open_manifest(made.path), api.batches(made.path, batch_size=2, steps=2)
    assert dataset.table.equals(pickle.loads(pickle.dumps(dataset)).table)
    names = [batch["names"] for batch in stream]
    copied = pickle.loads(pickle.dumps(api.batches(made.path, batch_size=2, steps=2)))
    assert [batch["names"] for batch in copied] == names
    copy = pickle.dumps(dataset)
    document = dict(made.manifest.document) | {"rejected": 9}
    document.pop("self")
    write_manifest(made.path, document)
    with pytest.raises(CacheError, match=r"m\.json has changed since it was opened: it is "):
        pickle.loads(copy)
