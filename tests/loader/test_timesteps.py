"""Timesteps: the distributions of the paper, against its formulas and diffusers' helper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from prep.loader.timesteps import UNIFORM, Timesteps, logistic, mode, shifted


def drawn(count=1000, number=20_000, **settings):
    stream, chances = np.random.default_rng(0), Timesteps(**settings)
    return np.array([chances.draw(stream, count) for _ in range(number)])


def test_the_default_draws_what_it_always_drew():
    """A resumed run of an earlier version has the timesteps that it would have had."""
    stream, again = np.random.default_rng(3), np.random.default_rng(3)
    assert [UNIFORM.draw(stream, 1000) for _ in range(50)] == [int(again.integers(1000)) for _ in range(50)]


def test_logit_normal_has_the_density_of_the_paper():
    """Equation 19 of Esser et al.: 1 / (s sqrt(2 pi)) / (t (1 - t)) exp(-(logit(t) - m)² / (2 s²))."""
    found = drawn(distribution="logit-normal", mean=0.5, std=0.8)
    place = (np.arange(1000) + 0.5) / 1000
    density = np.exp(-((np.log(place / (1 - place)) - 0.5) ** 2) / (2 * 0.8**2)) / (
        0.8 * np.sqrt(2 * np.pi) * place * (1 - place))
    wanted = density.reshape(10, 100).mean(axis=1) / 10
    assert np.bincount(found // 100, minlength=10) / len(found) == pytest.approx(wanted, abs=0.012)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.29])
def test_mode_is_diffusers_density(scale):
    """Its helper draws u itself, from the same generator."""
    wanted = compute_density_for_timestep_sampling("mode", 100, mode_scale=scale,
                                                   generator=torch.Generator().manual_seed(1))
    values = torch.rand(100, generator=torch.Generator().manual_seed(1))
    assert [mode(float(value), scale) for value in values] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_logistic_is_diffusers_density():
    wanted = compute_density_for_timestep_sampling("logit_normal", 100, logit_mean=0.3, logit_std=0.7,
                                                   generator=torch.Generator().manual_seed(1))
    values = torch.normal(0.3, 0.7, (100,), generator=torch.Generator().manual_seed(1))
    assert [logistic(float(value)) for value in values] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_shift_is_that_of_diffusers_scheduler():
    from diffusers import FlowMatchEulerDiscreteScheduler

    plain, moved = (FlowMatchEulerDiscreteScheduler(shift=shift).sigmas for shift in (1.0, 3.0))
    assert [shifted(float(place), 3.0) for place in plain] == pytest.approx(moved.tolist(), abs=1e-5)


def test_draws_stay_in_their_range():
    found = drawn(low=0.2, high=0.6, shift=3.0)
    assert found.min() >= 200 and found.max() < 600 and np.median(found) > 450
    assert set(drawn(count=1, number=20, distribution="mode")) == {0}
    assert drawn(distribution="logit-normal", mean=10.0, std=10.0).max() == 999
