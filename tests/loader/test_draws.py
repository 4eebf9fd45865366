"""Occurrences, draws and validation requests: what is shown, and that chance is keyed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.batching.plan import MicroBatch, step_plan
from prep.loader import draws
from prep.loader.draws import NO_TEXT, spread, training, trial, validation
from prep.loader.index import open_index
from prep.manifest.shards import ShardFacts

DROPS = draws.Dropout(caption=0.3)


def requests(index, first=0, total=6, *, seed=0, dropout=0.0, batch=4, micro=2):
    plan = step_plan(index.counts, seed=seed, batch_size=batch, micro_batch=micro)
    return list(training(index, plan, first, total, dropout=draws.Dropout(caption=dropout), timesteps=1000))


def test_an_epoch_shows_each_training_sample_as_often_as_it_repeats(make):
    index = open_index(make(repeats=3).manifest)
    assert index.counts == [12, 9]
    plan = step_plan(index.counts, seed=1, batch_size=4, micro_batch=2)
    epoch = requests(index, 0, plan.steps_per_epoch, seed=1)
    shown = Counter(shot.sample for request in epoch for shot in request.draws)
    trained = [sample for members in index.training for sample in members.tolist()]
    assert shown == dict.fromkeys(trained, 3)


def test_a_resumed_run_draws_what_an_unbroken_one_draws(make):
    index = open_index(make(texts=3, views=2).manifest)
    assert requests(index, dropout=0.5)[-4:] == requests(index, 4, 6, dropout=0.5)[-4:]


def test_each_repeat_epoch_and_seed_draws_anew(make):
    index = open_index(make(repeats=2).manifest)
    for one in (requests(index, 0, 5), requests(index, 0, 5, seed=1)):
        noises = [shot.noise for request in one for shot in request.draws]
        assert len(set(noises)) == len(noises)
    assert {shot.noise for request in requests(index) for shot in request.draws}.isdisjoint(
        shot.noise for request in requests(index, seed=1) for shot in request.draws)


def test_dropout_takes_the_unconditional_row_as_often_as_asked(make):
    index = open_index(make(repeats=40).manifest)
    dropped = [shot.text == NO_TEXT for request in requests(index, 0, 60, dropout=0.3) for shot in request.draws]
    assert abs(np.mean(dropped) - 0.3) < 0.08
    assert not any(shot.text == NO_TEXT for request in requests(index) for shot in request.draws)


def test_every_view_and_text_gets_its_turn(make):
    index = open_index(make(texts=3, views=2, repeats=10).manifest)
    shots = [shot for request in requests(index, 0, 17) for shot in request.draws]
    texts = {shot.text - int(index.samples.text_offsets[shot.sample]) for shot in shots}
    views = {shot.view - int(index.samples.view_offsets[shot.sample]) for shot in shots}
    assert texts == {0, 1, 2} and views == {0, 1}


def test_texts_are_drawn_by_weight():
    assert [draws._weighted(np.array([1.0, 3.0]), chance) for chance in (0.0, 0.24, 0.26, 0.999999)] == [0, 0, 1, 1]


def test_forward_passes_of_a_step_are_counted(make):
    index = open_index(make().manifest)
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=2)
    for most in (None, 1, 3):
        found = list(draws.training(index, plan, 0, 4, timesteps=1000, most=most))
        assert len(found) == sum(draws.passes(index, plan, step, most=most) for step in range(4))
        assert all(request.draws for request in found)
    assert [draws.passes(index, plan, step) for step in range(4)] == [len(plan.at(step)) for step in range(4)]


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_ranks_divide_the_shots_of_every_step(make, world, shuffle):
    """Together they have the shots of one process, each once and with the same draws."""
    index = open_index(make(repeats=3).manifest)
    plan = step_plan(index.counts, seed=5, batch_size=6, micro_batch=3, shuffle=shuffle)
    for step in range(2 * plan.steps_per_epoch):
        whole = [shot for request in draws.training(index, plan, step, step + 1, dropout=DROPS, timesteps=1000)
                 for shot in request.draws]
        parts = []
        for rank in range(world):
            share = draws.RankShare(rank=rank, world=world)
            mine = list(draws.training(index, plan, step, step + 1, dropout=DROPS, timesteps=1000, most=2, share=share))
            assert len(mine) == draws.passes(index, plan, step, most=2, share=share)
            parts.append([shot for request in mine for shot in request.draws])
        assert sorted(shot.noise for part in parts for shot in part) == sorted(shot.noise for shot in whole)
        assert {shot for part in parts for shot in part} == set(whole)


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_level_shares_have_idle_passes_beside_their_own(make, world, shuffle):
    """As many for each rank; what counts is what it would be without them."""
    index = open_index(make(counts=(9, 4), texts=2).manifest)
    plan = step_plan(index.counts, seed=5, batch_size=6, micro_batch=3, shuffle=shuffle)
    idle = 0
    for step in range(plan.steps_per_epoch):
        numbers = set()
        for rank in range(world):
            shares = [draws.RankShare(rank=rank, world=world, pad_ranks=level) for level in (False, True)]
            own, level = (list(draws.training(index, plan, step, step + 1, dropout=DROPS, timesteps=1000, most=2,
                                              share=share)) for share in shares)
            assert [request for request in level if not request.padding] == own
            assert len(level) == draws.passes(index, plan, step, most=2, share=shares[1])
            numbers.add(tuple(request.bucket for request in level))
            idle += sum(request.padding for request in level)
        assert len(numbers) == 1
    assert (idle > 0) == (world > 1)


@given(count=st.integers(0, 50), world=st.integers(1, 9), number=st.integers(0, 20))
def test_shares_are_nearly_equal(count, world, number):
    plan = step_plan([count], seed=0, batch_size=50)
    part = MicroBatch(bucket=0, occurrences=np.arange(count), turns=np.zeros(count, np.int64))
    places = [draws.RankShare(rank=rank, world=world).of(number, part, plan) for rank in range(world)]
    assert sorted(place for part in places for place in part) == list(range(count))
    assert max(map(len, places)) - min(map(len, places)) <= 1


def test_validation_never_changes(make):
    index = open_index(make(texts=2).manifest)
    one = list(validation(index, 4, count=4, timesteps=1000))
    assert one == list(validation(index, 4, count=4, timesteps=1000))
    shots = [shot for request in one for shot in request.draws]
    assert len(shots) == 2 * 4 and {shot.timestep for shot in shots} == set(spread(4, 1000)) == {125, 375, 625, 875}
    assert len({shot.noise for shot in shots}) == 8
    held = {sample for members in index.validation for sample in members.tolist()}
    assert {shot.sample for shot in shots} == held


def test_a_trial_has_the_most_pixels_of_any_forward_pass(make):
    """Buckets of 64x64 and 80x48: the larger one, unless it has too few samples to fill a forward pass."""
    for counts, underfill, most, wanted in [((4, 4), "partial", 9, (0, 3)), ((4, 4), "partial", 2, (0, 2)),
                                            ((1, 4), "partial", 9, (1, 3)), ((1, 4), "repeat", 9, (0, 3))]:
        index = open_index(make(counts=counts, validation=0).manifest)
        plan = step_plan(index.counts, seed=0, batch_size=6, micro_batch=3, underfill=underfill)
        found = trial(index, plan, most)
        assert (found.bucket, len(found.draws)) == wanted
        assert {int(index.samples.bucket[shot.sample]) for shot in found.draws} == {found.bucket}
        passes = training(index, plan, 0, 2 * plan.steps_per_epoch, timesteps=1000, most=most)
        sizes = [len(one.draws) * np.prod(index.manifest.buckets[one.bucket]) for one in passes]
        assert len(found.draws) * np.prod(index.manifest.buckets[found.bucket]) == max(sizes)


def with_tokens(index, tokens):
    """The index, with a shard of its own for each text, of so many tokens, as where rows are cut to their captions."""
    arrays = {**index.manifest.fields["text"].arrays, "attention_mask": {"dtype": "uint8", "dims": ["token"]}}
    text = replace(index.manifest.fields["text"], arrays=arrays)
    shards = [ShardFacts(digest=f"{number:064}", field="text", rows=1, bytes=1, dtypes={}, shapes={
        "hidden": (count, 8), "attention_mask": (count,)}) for number, count in enumerate(tokens)]
    texts = {**index.samples.texts, "shard": np.arange(len(tokens)) + len(index.shards)}
    return replace(index, manifest=replace(index.manifest, fields={**index.manifest.fields, "text": text}),
                   shards=(*(replace(shard, shapes={**shard.shapes, "attention_mask": (1,)}) for shard in index.shards),
                           *shards), samples=replace(index.samples, texts=texts))


def test_a_trial_has_the_longest_texts_of_its_bucket(make):
    index = open_index(make(counts=(5, 0), validation=2, texts=2).manifest)
    tokens = np.arange(2 * len(index.samples)) * 7 % 11 + 3
    held = index.validation[0]
    tokens[index.samples.text_offsets[held[0]]] = 99  # never trained
    index = with_tokens(index, tokens.tolist())
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=4)
    longest = {int(sample): int(tokens[slice(*index.samples.text_offsets[sample:sample + 2])].max())
               for sample in index.training[0]}
    found = trial(index, plan, 2)
    assert [longest[shot.sample] for shot in found.draws] == sorted(longest.values(), reverse=True)[:2]
    assert [tokens[shot.text] for shot in found.draws] == [longest[shot.sample] for shot in found.draws]
    assert len({shot.sample for shot in found.draws}) == 2


def test_of_buckets_with_as_many_pixels_a_trial_takes_that_with_the_longest_text(make):
    index = open_index(make(counts=(1, 1), validation=0).manifest)
    index = replace(index, manifest=replace(index.manifest, shapes=(((64, 64), ()), ((128, 32), ()))))
    plan = step_plan(index.counts, seed=0, batch_size=1, micro_batch=1)
    for tokens in ([5, 9], [9, 5]):
        assert trial(with_tokens(index, tokens), plan, 1).draws[0].text == np.argmax(tokens)


def test_rows_of_one_length_are_taken_in_their_order(make):
    index = open_index(make(counts=(5, 2), validation=0, texts=2).manifest)
    plan = step_plan(index.counts, seed=0, batch_size=3, micro_batch=3)
    shots = trial(index, plan, 9).draws
    assert [shot.sample for shot in shots] == index.training[0][:3].tolist()
    assert [shot.text for shot in shots] == index.samples.text_offsets[index.training[0][:3]].tolist()


@pytest.mark.parametrize(("counts", "batch", "micro", "most", "world", "underfill"), [
    ((4, 3), 4, 2, 2, 1, "partial"), ((4, 3), 4, 4, 4, 1, "partial"), ((4, 3), 4, 4, 2, 1, "partial"),
    ((3, 0), 4, 4, 3, 1, "partial"), ((2, 0), 8, 4, 4, 1, "partial"), ((2, 0), 8, 4, 4, 1, "repeat"),
    ((9, 8), 4, 4, 2, 2, "drop"), ((9, 8), 4, 4, 2, 1, "drop"), ((9, 8), 8, 4, 4, 4, "drop")])
def test_whether_a_step_has_several_passes_is_known(make, counts, batch, micro, most, world, underfill):
    index = open_index(make(counts=counts, validation=0).manifest)
    plan = step_plan(index.counts, seed=3, batch_size=batch, micro_batch=micro, underfill=underfill)
    passes = [draws.passes(index, plan, step, most=most, share=draws.RankShare(rank=rank, world=world))
              for step in range(plan.steps_per_epoch) for rank in range(world)]
    assert draws.accumulates(plan, most, world) == (max(passes) > 1)
