"""Occurrences, draws and validation requests: what is shown, and that chance is keyed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from prep.batching.plan import step_plan
from prep.loader import draws
from prep.loader.draws import NO_TEXT, spread, training, trial, validation
from prep.loader.index import open_index


def requests(index, first=0, total=6, *, seed=0, dropout=0.0, batch=4, micro=2):
    plan = step_plan(index.counts, seed=seed, batch_size=batch, micro_batch=micro)
    return list(training(index, plan, first, total, dropout=dropout, timesteps=1000))


def test_an_epoch_shows_each_training_sample_as_often_as_it_repeats(make):
    index = open_index(make(repeats=3).manifest)
    assert index.counts == [12, 9]
    plan = step_plan(index.counts, seed=1, batch_size=4, micro_batch=2)
    epoch = requests(index, 0, plan.steps_per_epoch, seed=1)
    shown = Counter(shot.sample for request in epoch for shot in request.shots)
    trained = [sample for members in index.training for sample in members.tolist()]
    assert shown == dict.fromkeys(trained, 3)


def test_a_resumed_run_draws_what_an_unbroken_one_draws(make):
    index = open_index(make(texts=3, views=2).manifest)
    assert requests(index, dropout=0.5)[-4:] == requests(index, 4, 6, dropout=0.5)[-4:]


def test_each_repeat_epoch_and_seed_draws_anew(make):
    index = open_index(make(repeats=2).manifest)
    for one in (requests(index, 0, 5), requests(index, 0, 5, seed=1)):
        noises = [shot.noise for request in one for shot in request.shots]
        assert len(set(noises)) == len(noises)
    assert {shot.noise for request in requests(index) for shot in request.shots}.isdisjoint(
        shot.noise for request in requests(index, seed=1) for shot in request.shots)


def test_dropout_takes_the_unconditional_row_as_often_as_asked(make):
    index = open_index(make(repeats=40).manifest)
    dropped = [shot.text == NO_TEXT for request in requests(index, 0, 60, dropout=0.3) for shot in request.shots]
    assert abs(np.mean(dropped) - 0.3) < 0.08
    assert not any(shot.text == NO_TEXT for request in requests(index) for shot in request.shots)


def test_every_view_and_text_gets_its_turn(make):
    index = open_index(make(texts=3, views=2, repeats=10).manifest)
    shots = [shot for request in requests(index, 0, 17) for shot in request.shots]
    texts = {shot.text - int(index.samples.text_offsets[shot.sample]) for shot in shots}
    views = {shot.view - int(index.samples.view_offsets[shot.sample]) for shot in shots}
    assert texts == {0, 1, 2} and views == {0, 1}


def test_texts_are_drawn_by_weight():
    assert [draws._weighted(np.array([1.0, 3.0]), chance) for chance in (0.0, 0.24, 0.26, 0.999999)] == [0, 0, 1, 1]


def test_a_step_ends_with_its_last_micro_batch(make):
    index = open_index(make().manifest)
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=2)
    ends = [request.last for request in requests(index, 0, 4)]
    assert sum(ends) == 4
    assert [len(plan.at(step)) for step in range(4)] == [ends[:2].index(True) + 1, *_lengths(ends[2:])]


def _lengths(ends):
    lengths, running = [], 0
    for end in ends:
        running += 1
        if end:
            lengths.append(running)
            running = 0
    return lengths


def test_validation_never_changes(make):
    index = open_index(make(texts=2).manifest)
    one = list(validation(index, 4, count=4, timesteps=1000))
    assert one == list(validation(index, 4, count=4, timesteps=1000))
    shots = [shot for request in one for shot in request.shots]
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
        assert (found.bucket, len(found.shots)) == wanted
        assert {int(index.samples.bucket[shot.sample]) for shot in found.shots} == {found.bucket}
        passes = training(index, plan, 0, 2 * plan.steps_per_epoch, dropout=0.0, timesteps=1000, most=most)
        sizes = [len(one.shots) * np.prod(index.manifest.buckets[one.bucket]) for one in passes]
        assert len(found.shots) * np.prod(index.manifest.buckets[found.bucket]) == max(sizes)
