"""Noise that is mixed: against the formulas of its authors, written with torch; plain noise keeps its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prep.batching.plan import step_plan
from prep.batching.rng import philox
from prep.loader.batches import batches
from prep.loader.draws import training
from prep.loader.index import open_index
from prep.loader.noise import PLAIN, Noise, enlarged
from prep.loader.rows import Rows

KEY = (11, 22)
ALL = Noise(offset=0.1, pyramid=0.5, pyramid_levels=4, perturbation=0.2)


def drawn(noise, key=KEY, shape=(4, 12, 20)):
    found = np.empty(shape, np.float32)
    noise.draw(key, found)
    return found


def test_plain_noise_is_what_it_always_was():
    """The bytes of NumPy's Philox at the start of the key's stream; a golden value in case NumPy's change."""
    plain = np.random.Generator(np.random.Philox(key=np.array(KEY, np.uint64))).standard_normal(5, dtype=np.float32)
    assert np.array_equal(philox(KEY).standard_normal(5, dtype=np.float32), plain)
    assert np.array_equal(drawn(PLAIN).reshape(-1)[:5], plain)
    assert np.array_equal(drawn(Noise(perturbation=0.5, pyramid_levels=3)), drawn(PLAIN)), "the target's noise"


def test_streams_of_a_key_have_nothing_in_common():
    streams = [philox(KEY, stream).standard_normal(4000) for stream in range(4)]
    correlations = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlations).max() < 0.06


def test_the_offset_is_one_normal_number_for_each_channel():
    """Guttenberg 2023: randn_like(latents) + 0.1 * randn(latents.shape[0], latents.shape[1], 1, 1)."""
    added = drawn(Noise(offset=0.1)) - drawn(PLAIN)
    assert np.ptp(added.reshape(4, -1), axis=1).max() < 1e-6, "the same for all cells of a channel"
    means = [(drawn(Noise(offset=0.1), (n, 1)) - drawn(PLAIN, (n, 1))).mean(axis=(1, 2)) for n in range(500)]
    assert np.std(means) == pytest.approx(0.1, rel=0.05) and abs(np.mean(means)) < 0.01


def test_the_pyramid_follows_its_author_s_code():
    """Whitaker 2023, with torch's bilinear Upsample: sizes divided by r**i for each level, r = random() * 2 + 2."""
    source, plain = philox(KEY, 2), torch.from_numpy(drawn(PLAIN))[None]
    upsample = torch.nn.Upsample(size=plain.shape[2:], mode="bilinear")
    noise, levels = plain.clone(), 0
    for i in range(10):
        r = source.random() * 2 + 2
        h, w = max(1, int(12 / r**i)), max(1, int(20 / r**i))
        noise += upsample(torch.from_numpy(source.standard_normal((1, 4, h, w), dtype=np.float32))) * 0.7**i
        levels = i + 1
        if w == 1 or h == 1:
            break
    assert levels in (3, 4), "it ended at one cell"
    found = drawn(Noise(pyramid=0.7))
    assert np.allclose(found, (noise / noise.std())[0].numpy(), atol=1e-5)
    assert not np.allclose(found, drawn(Noise(pyramid=0.7, pyramid_levels=2)), atol=1e-2)


@pytest.mark.parametrize(("given", "wanted"), [((3, 5), (12, 20)), ((1, 2), (7, 9)), ((12, 20), (12, 20))])
def test_enlarging_is_torch_s_bilinear(given, wanted):
    values = np.random.default_rng(0).standard_normal((4, *given)).astype(np.float32)
    found = enlarged(enlarged(values, 1, wanted[0]), 2, wanted[1])
    assert np.allclose(found, torch.nn.functional.interpolate(torch.from_numpy(values)[None], wanted,
                                                              mode="bilinear")[0].numpy(), atol=1e-6)


def test_the_input_alone_is_perturbed():
    """Ning et al. 2023, algorithm 1: x_t from e + g·e', the target is e."""
    target, given = drawn(Noise(perturbation=0.2)), np.empty((4, 12, 20), np.float32)
    Noise(perturbation=0.2).perturb(KEY, target, given)
    assert np.allclose(given, target + 0.2 * philox(KEY, 3).standard_normal(given.shape, dtype=np.float32), atol=1e-6)


def noises(made, most, noise):
    """Target's and input's noise of every showing of two epochs, by sample and key."""
    index = open_index(made.manifest)
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=4)
    requests = training(index, plan, 0, 4, timesteps=1000, noise=noise, most=most)
    found = {}
    with batches(Rows(index), requests, masked=False, pinned=False) as feed:
        for batch in feed:
            for number, shot in enumerate(batch.draws):
                target, given = (each[number].numpy().copy() for each in (batch.noise_BChw, batch.input_noise_BChw))
                found[shot.noise] = target, given, shot.timestep
    return found


def test_mixed_noise_does_not_depend_on_the_cut_into_micro_batches(make):
    made = make()
    whole, cut = noises(made, 4, ALL), noises(made, 1, ALL)
    assert whole.keys() == cut.keys() and len(whole) > 6
    for key, (target, given, timestep) in whole.items():
        assert np.array_equal(target, cut[key][0]) and np.array_equal(given, cut[key][1]) and timestep == cut[key][2]
        assert not np.array_equal(target, given)


def test_mixing_changes_no_other_draw(make):
    made = make()
    plain, mixed = noises(made, 4, PLAIN), noises(made, 4, ALL)
    assert plain.keys() == mixed.keys()
    for key, (target, given, timestep) in plain.items():
        assert timestep == mixed[key][2] and np.array_equal(target, given)
        assert np.array_equal(target, drawn(PLAIN, key, target.shape)) and not np.array_equal(target, mixed[key][0])
