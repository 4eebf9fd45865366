"""Reference pictures: compound buckets, rows read into batches, dropout, and what of it decides the steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
import torch
from real_manifest import build

from prep.batching.plan import step_plan
from prep.errors import CacheError, ManifestError
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.identity import identify
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.consistency import read_samples, reference_sizes
from prep.manifest.document import WITH_REFERENCES
from prep.manifest.samples import renumber_shards
from prep.manifest.tables import SAMPLES_WITH_REFERENCES, read_table, write_table

SIZES = ((64, 64), (48, 32))
SHOWN = {"name": "a.png", "picture": "a" * 64, "size": [64, 64], "scaled": [64, 64], "crop": [0, 0], "bucket": [64, 64],
         "shard": 0, "row": 0}  # of a prompt


def all_of(index, plan, steps=6, **settings):
    requests = list(draws.training(index, plan, 0, steps, timesteps=1000, **settings))
    with batches(Rows(index), iter(requests), masked=True, pinned=False) as feed:
        yield from feed


def plan_of(index, micro=3):
    return step_plan(index.counts, seed=3, batch_size=2 * micro, micro_batch=micro)


def test_a_data_set_with_references_has_compound_buckets(make):
    made = make(references=SIZES)
    index = open_index(made.manifest)
    assert made.manifest.document["version"] == WITH_REFERENCES and index.referring
    assert {(size, sizes) for size, sizes in made.manifest.shapes} == {
        ((64, 64), ()), ((80, 48), ()), ((64, 64), SIZES), ((80, 48), SIZES)}
    assert sum(index.counts) == 7
    assert not open_index(make().manifest).referring


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("stds", [False, True])
def test_a_batch_has_the_references_of_its_views(make, views, stds):
    """Bit for bit, in their order, each at its own size; the mean, also where latents are drawn."""
    made = make(references=SIZES, views=views, stds=stds)
    index, seen = open_index(made.manifest), 0
    for batch in all_of(index, plan_of(index)):
        assert len({draw.kept for draw in batch.draws}) == 1
        assert [tuple(reference.shape[1:]) for reference in batch.references] == [
            (4, height // 8, width // 8) for width, height in (SIZES if batch.references else ())]
        for row, draw in enumerate(batch.draws):
            sample = made.samples[draw.sample]
            view = sample.views[draw.view - int(index.samples.view_offsets[draw.sample])]
            assert len(view.references) == len(batch.references)
            for reference, rows in zip(view.references, batch.references, strict=True):
                assert torch.equal(rows[row].float(), torch.from_numpy(made.latents[reference.latent]))
                seen += 1
    assert seen


def test_without_references_a_batch_has_none(make):
    index = open_index(make().manifest)
    assert all(batch.references == () for batch in all_of(index, plan_of(index)))


@pytest.mark.parametrize(("dropout", "wanted"), [
    (draws.Dropout(references=1.0), {()}), (draws.Dropout(each_reference=1.0), {()}),
    (draws.Dropout(references=0.5), {(), (0, 1)}), (draws.Dropout(each_reference=0.5), {(), (0,), (1,), (0, 1)})])
def test_references_are_dropped_by_draws_of_their_own(make, dropout, wanted):
    """Nothing else about a showing changes; a pass has samples with the same references, and no step another sample."""
    index = open_index(make(references=SIZES, repeats=20, validation=0).manifest)
    plan = plan_of(index)
    usual, dropped = (list(draws.training(index, plan, 0, 20, timesteps=1000, dropout=chance))
                      for chance in (draws.NO_DROPOUT, dropout))
    each = [{draw.noise: draw for request in requests for draw in request.draws} for requests in (usual, dropped)]
    assert each[0].keys() == each[1].keys()
    assert all(replace(draw, references=(), kept=()) == replace(each[0][noise], references=(), kept=())
               for noise, draw in each[1].items())
    referring = [draw for noise, draw in each[1].items() if each[0][noise].references]
    assert {draw.kept for draw in referring} == wanted
    assert all(len({draw.kept for draw in request.draws}) == 1 for request in dropped)
    for draw in referring:
        own = index.samples.references_of(draw.sample, draw.view)
        assert draw.references == tuple(own[place] for place in draw.kept)


@pytest.mark.parametrize("dropout", [draws.Dropout(references=0.3, each_reference=0.3), draws.NO_DROPOUT])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 2])
def test_ranks_divide_what_one_shows_and_know_their_passes(make, dropout, world, most):
    index = open_index(make(references=SIZES, repeats=3).manifest)
    plan = plan_of(index, micro=4)
    for step in range(2 * plan.steps_per_epoch):
        settings = {"timesteps": 1000, "dropout": dropout, "most": most}
        whole = {draw for request in draws.training(index, plan, step, step + 1, **settings) for draw in request.draws}
        parts, counts = [], []
        for rank in range(world):
            for pad in (False, True):
                share = draws.RankShare(rank=rank, world=world, pad_ranks=pad)
                mine = list(draws.training(index, plan, step, step + 1, share=share, **settings))
                count = draws.passes(index, plan, step, dropout=dropout, most=most, share=share)
                assert len(mine) == count
                counts += [count] if pad else []
                parts += [draw for request in mine for draw in request.draws] if not pad else []
        assert set(parts) == whole and len(parts) == len(whole)
        assert len(set(counts)) == 1


def test_the_trial_has_the_most_pixels_with_references(make):
    """A smaller picture with large references takes more memory than a larger one without."""
    index = open_index(make(references=((256, 256),)).manifest)
    request = draws.trial(index, plan_of(index), 2)
    assert index.manifest.shapes[request.bucket][1] == ((256, 256),)
    assert all(draw.references for draw in request.draws)


def test_references_decide_the_steps(tiny_model, tmp_path):
    """Other references, or another order, are other data."""
    digests = set()
    for number, sizes in enumerate([(), SIZES, SIZES[::-1], SIZES[:1]]):
        root = tmp_path / str(number)
        root.mkdir()
        index = open_index(build(root, tiny_model, references=sizes).manifest)
        digests.add(identify(index, masked=True, prediction="epsilon").digest)
    assert len(digests) == 4


def table_of(made, change):
    """The manifest with another table of samples."""
    cache = open_index(made.manifest).cache
    document = made.manifest.document
    table = change(read_table(cache, document["tables"]["samples"], SAMPLES_WITH_REFERENCES))
    tables = {**document["tables"], "samples": write_table(cache, table)}
    return replace(made.manifest, document={**document, "tables": tables})


def changed(name, value, **others):
    def change(table):
        rows = table.to_pylist()
        for row in rows:
            for reference in row["references"]:
                reference.update({name: value, **others})
        return pa.Table.from_pylist(rows, schema=table.schema)
    return change


@pytest.mark.parametrize(("name", "value", "says"), [
    ("width", 0, "reference width 0"), ("crop_x", 40, "reference crop_x 40"), ("crop_y", -1, "reference crop_y -1"),
    ("latent_shard", 77, "has its latent in row"), ("latent_shard", -1, "has its latent in row"),
    ("latent_row", 9999, "has its latent in row")])
def test_a_table_that_contradicts_itself(make, name, value, says):
    manifest = table_of(make(references=SIZES), changed(name, value))
    with pytest.raises(CacheError, match=says):
        open_index(manifest)


def test_a_sample_with_other_references_than_its_bucket(make):
    def drop(table):
        rows = table.to_pylist()
        for row in rows:
            row["references"] = row["references"][:-1]
        return pa.Table.from_pylist(rows, schema=table.schema)

    with pytest.raises(CacheError, match="reference count"):
        open_index(table_of(make(references=SIZES), drop))


def test_a_reference_in_a_shard_of_another_shape(make):
    """A place that exists, whose rows have another size."""
    made = make(references=SIZES)
    shards = {facts.shapes["latent"]: number for number, facts in enumerate(open_index(made.manifest).shards)
              if facts.field == "latent"}
    manifest = table_of(made, changed("latent_shard", shards[4, 6, 10], latent_row=0))
    with pytest.raises(CacheError, match=r"expected latent latent:\[4, (8, 8|4, 6)\]"):
        open_index(manifest)


@pytest.mark.parametrize(("change", "says"), [
    (lambda document: document.update(version=1),
     "expected 2: 3 if it has embeddings, 2 if not and a bucket has references"),
    (lambda document: document["buckets"][1].update(references=[]), ".references has 0 sizes, expected 1 to 64"),
    (lambda document: document["prompts"]["samples"][0].update(references=[]),
     ".references has 0 members, expected 1 to 64"),
    (lambda document: document["prompts"]["samples"][0].update(references=[SHOWN | {"size": [0, 64]}]),
     "expected two sides of at most"),
    (lambda document: document["prompts"]["samples"][0].update(references=[SHOWN | {"crop": [9, 0]}]),
     "expected a crop within the scaled picture"),
    (lambda document: document["buckets"][1].update(references=[[64]]), "expected width and height"),
    (lambda document: document["buckets"][1].update(references=[[60, 64]]), "expected multiples of 8"),
    (lambda document: document.update(version=4), "this program reads versions 1 to 3")])
def test_a_document_that_is_not_valid(make, change, says):
    with pytest.raises(ManifestError, match=says):
        make(references=SIZES, change=change)


def test_other_shard_numbers(make):
    made = make(references=SIZES)
    index = open_index(made.manifest)
    table = index.samples.table
    numbers = np.arange(len(index.shards))[::-1].copy()
    moved = renumber_shards(table, numbers).to_pylist()
    for before, after in zip(table.to_pylist(), moved, strict=True):
        assert [numbers[each["latent_shard"]] for each in before["references"]] == [
            each["latent_shard"] for each in after["references"]]


def test_sizes_follow_the_table(make):
    made = make(references=SIZES, views=2)
    samples = read_samples(open_index(made.manifest).cache, made.manifest)
    wanted = [reference.size for sample in made.samples for view in sample.views for reference in view.references]
    assert reference_sizes(made.manifest, samples).tolist() == [list(size) for size in wanted]


def test_rows_that_are_not_finite_are_found_in_references(make):
    made = make(references=SIZES)
    index = open_index(made.manifest)
    request = next(request for request in draws.training(index, plan_of(index), 0, 6, timesteps=1000)
                   if request.draws[0].references)
    assert Rows(index).not_finite(request.draws) == []
    assert {ref.shard for ref in islice(Rows(index).places(request.draws, masked=True).read, 99)} == Rows(
        index).shards_of(request, True)
