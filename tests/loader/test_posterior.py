"""Latents drawn from their posterior: the draw that diffusers makes of the same noise, keyed by showing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders import vae
from hypothesis import given
from hypothesis import strategies as st

from prep.batching.plan import step_plan
from prep.batching.rng import draw_key, philox
from prep.loader.batches import batches, drawn_latents
from prep.loader.draws import Dropout, training, validation
from prep.loader.index import open_index
from prep.loader.rows import Rows


def shown(made, *, steps, seed=0, micro_batch=2, most=None, first=0):
    """Each showing of training, by sample and number: its draw, and its latent."""
    index = open_index(made.manifest)
    plan = step_plan(index.counts, seed=seed, batch_size=4, micro_batch=micro_batch)
    requests = training(index, plan, first, steps, timesteps=1000, most=most)
    found = {}
    with batches(Rows(index), requests, masked=False, pinned=False) as feed:
        for batch in feed:
            assert batch.latent_BChw.dtype == torch.float32
            for shot, latent in zip(batch.draws, batch.latent_BChw, strict=True):
                found[shot.sample, shot.posterior] = (shot, latent.clone())
    return found


def stored(made, shot):
    key = made.samples[shot.sample].views[0].latent
    return torch.from_numpy(made.latents[key]), torch.from_numpy(made.stds[key])


def noise_of(key, shape):
    return torch.from_numpy(philox(key).standard_normal(tuple(shape), dtype=np.float32))


def drawn_by_diffusers(mean, std, noise, monkeypatch):
    """`latent_dist.sample` for the same mean, deviation and noise."""
    monkeypatch.setattr(vae, "randn_tensor", lambda shape, **_: noise)
    distribution = vae.DiagonalGaussianDistribution(torch.cat([mean, 2 * std.log()])[None])
    assert torch.equal(distribution.mean[0], mean)
    torch.testing.assert_close(distribution.std[0], std)
    distribution.std = std[None]  # the exponential of its logarithm is rounded
    return distribution.sample()[0]


def test_a_latent_is_what_diffusers_draws_from_the_same_noise(make, monkeypatch):
    made = make(stds=True)
    found = shown(made, steps=6)
    assert len(found) >= 12
    for shot, latent in found.values():
        mean, std = stored(made, shot)
        noise = noise_of(shot.posterior, mean.shape)
        assert torch.equal(latent, drawn_by_diffusers(mean, std, noise, monkeypatch))
        assert not torch.equal(latent, mean)


def test_the_key_is_that_of_the_showing_and_of_no_other_draw(make):
    made = make(stds=True, repeats=2)
    found = shown(made, steps=4)
    index = open_index(made.manifest)
    for sample, key in found:
        ids = index.samples.ids[sample].tobytes()
        assert key in {draw_key(0, epoch, ids, number, "posterior") for epoch in range(2) for number in range(4)}
    keys = [key for _, key in found]
    assert len(set(keys)) == len(keys) and set(keys).isdisjoint(shot.noise for shot, _ in found.values())


@pytest.mark.parametrize("differs", [
    {"micro_batch": 1}, {"micro_batch": 4}, {"micro_batch": 4, "most": 3}, {"first": 2}], ids=str)
def test_draws_do_not_depend_on_the_batch_or_the_step_it_began_with(make, differs):
    made = make(stds=True, repeats=4)
    one, other = shown(made, steps=7), shown(made, steps=7, **differs)
    both = one.keys() & other.keys()
    assert len(both) >= 20
    for key in both:
        assert torch.equal(one[key][1], other[key][1])


def test_draws_have_the_stored_mean_and_deviation_and_are_not_the_noise_to_be_predicted(make):
    made = make(stds=True, counts=(3, 0), repeats=300, validation=0)
    by_sample, noises = {}, {}
    for shot, latent in shown(made, steps=225, micro_batch=4).values():
        mean, std = stored(made, shot)
        by_sample.setdefault(shot.sample, []).append((latent - mean) / std)
        noises.setdefault(shot.sample, []).append(noise_of(shot.noise, mean.shape))
    assert {len(each) for each in by_sample.values()} == {300}
    for sample, each in by_sample.items():
        whole = torch.stack(each)
        whole = whole[:, torch.isfinite(whole[0])]  # where the deviation is 0 the draw is the mean
        assert abs(whole.mean()) < 0.02 and abs(whole.std() - 1) < 0.02
        assert abs(whole.mean(0)).max() < 0.3 and (whole.std(0) - 1).abs().max() < 0.25
        other = torch.stack(noises[sample]).flatten()
        assert abs(torch.corrcoef(torch.stack([torch.stack(each).nan_to_num(0, 0, 0).flatten(), other]))[0, 1]) < 0.02


def test_everything_else_is_drawn_as_from_a_cache_of_means(make, tmp_path_factory, tiny_model):
    from real_manifest import build

    def shots(made):
        index = open_index(made.manifest)
        plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=2)
        requests = training(index, plan, 0, 6, dropout=Dropout(caption=0.3), timesteps=1000)
        return [shot for request in requests for shot in request.draws]

    means, drawn = shots(build(tmp_path_factory.mktemp("means"), tiny_model)), shots(make(stds=True))
    assert [(one.sample, one.view, one.text, one.timestep, one.noise) for one in means] == [
        (one.sample, one.view, one.text, one.timestep, one.noise) for one in drawn]
    assert {one.posterior for one in means} == {None} and None not in {one.posterior for one in drawn}


def test_validation_takes_the_mean(make):
    made = make(stds=True)
    index = open_index(made.manifest)
    with batches(Rows(index), validation(index, 2, count=2, timesteps=1000), masked=False, pinned=False) as feed:
        for batch in feed:
            assert batch.latent_BChw.dtype == torch.bfloat16
            for shot, latent in zip(batch.draws, batch.latent_BChw, strict=True):
                assert shot.posterior is None and torch.equal(latent.float(), stored(made, shot)[0])


@given(st.integers(0, 2**63), st.integers(1, 70), st.floats(-1e4, 1e4, width=16), st.floats(0, 1e4, width=16))
def test_drawing_is_one_product_and_one_sum_each_rounded_once(seed, count, mean, std):
    """As NumPy computes it number by number, at the end of a tensor as inside it."""
    noise = philox((seed, 1)).standard_normal((1, count), dtype=np.float32)
    wanted = [np.float32(np.float32(mean) + np.float32(np.float32(std) * one)) for one in noise[0]]
    drawn = drawn_latents(torch.full((1, count), mean).half(), torch.full((1, count), std).half(),
                          torch.from_numpy(noise.copy()))
    assert drawn[0].tolist() == [float(one) for one in wanted]


def test_values_that_are_not_finite_are_found_in_deviations(make):
    rows = Rows(open_index(make(stds=True).manifest))
    plan = step_plan(rows.index.counts, seed=0, batch_size=4, micro_batch=2)
    shots = next(training(rows.index, plan, 0, 1, timesteps=1000)).draws
    assert rows.not_finite(shots) == []
    fill = rows.fill

    def spoiled(out, field, array, refs, targets=None):
        fill(out, field, array, refs, targets)
        if array == "std":
            out[..., -1] = float("nan")

    rows.fill = spoiled
    assert [(field, shot) for field, shot, _ in rows.not_finite(shots)] == [("latent", shot) for shot in shots]
