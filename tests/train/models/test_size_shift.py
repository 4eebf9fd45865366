"""The shift of timesteps by size: against diffusers' pipelines and schedulers, and the formula of Esser et al."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.cogview4 import pipeline_cogview4
from diffusers.pipelines.flux import pipeline_flux

from prep.batching.plan import step_plan
from prep.errors import ConfigError, ModelError
from prep.loader import draws
from prep.loader.index import open_index
from prep.models.families.registry import FAMILIES
from prep.training.schema import TimestepDraws
from train.models.size_shift import chances_by_bucket, flux_shift, size_shifts

SIZES = [(1024, 1024), (512, 512), (768, 1344), (1536, 640)]
FLUX = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
        "max_image_seq_len": 4096, "time_shift_type": "exponential"}
QWEN = {**FLUX, "max_shift": 0.9, "max_image_seq_len": 8192}
COGVIEW4 = {"use_dynamic_shifting": True, "base_shift": 0.25, "max_shift": 0.75, "base_image_seq_len": 256,
            "time_shift_type": "linear"}


def shifts_of(family, schedule, sizes=SIZES, **settings):
    return size_shifts(TimestepDraws(**settings), FAMILIES[family], schedule, sizes)


def sigmas_of(mu, schedule):
    """The pipeline's noise levels for four steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(**schedule)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
    return scheduler.sigmas[:-1]


@pytest.mark.parametrize(("family", "schedule", "module"), [
    ("flux", FLUX, pipeline_flux), ("qwenimage", QWEN, pipeline_flux), ("cogview4", COGVIEW4, pipeline_cogview4),
])
def test_the_schedule_s_shift_is_the_pipeline_s(family, schedule, module):
    """Four plain levels, shifted, are those that the scheduler makes with the pipeline's mu."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    for (width, height), shift in zip(SIZES, shifts_of(family, schedule, shift_by_size="schedule"), strict=True):
        mu = module.calculate_shift(width * height // 256, *(schedule[name] for name in names if name in schedule))
        plain = torch.tensor([1.0, 0.75, 0.5, 0.25])
        assert torch.allclose(shift * plain / (1 + (shift - 1) * plain), sigmas_of(mu, schedule), atol=1e-5)


def test_flux_s_shift_grows_with_the_tokens():
    """exp(0.5) at 256 tokens and exp(1.15) at 4096, which are 1024 x 1024 pixels."""
    assert flux_shift(256, {}) == pytest.approx(np.exp(0.5)) and flux_shift(4096, {}) == pytest.approx(np.exp(1.15))
    assert shifts_of("flux", FLUX, shift_by_size="schedule")[:2] == pytest.approx([3.158, 1.878], rel=1e-3)


def test_the_shift_by_area_is_a_square_root():
    """Esser et al. 2024, equation 23: sqrt(m / n), for m and n pixels."""
    assert shifts_of("sd3", {}, shift_by_size="area") == pytest.approx(
        [np.sqrt(width * height / 1024**2) for width, height in SIZES])
    assert shifts_of("sd3", {}, shift_by_size="area", base_side=256)[0] == 4
    assert shifts_of("sd3", FLUX) == (1.0,) * 4, "off by default, whatever the schedule is"


def test_a_schedule_without_such_a_shift_is_refused():
    with pytest.raises(ConfigError) as caught:
        shifts_of("sd3", {"shift": 3.0, "use_dynamic_shifting": False}, shift_by_size="schedule")
    assert caught.value.message == ("timesteps.shift_by_size is 'schedule', but the model's scheduler config has the "
                                    "same shift for every size, which training always has")
    assert caught.value.hint == "--set timesteps.shift_by_size=none, or area"


@pytest.mark.parametrize("broken", [{"base_shift": "a"}, {"max_image_seq_len": 256}, {"max_shift": 1e9},
                                    {"base_shift": None}, {"time_shift_type": "linear", "base_shift": -50}])
def test_a_schedule_that_cannot_be_used_is_refused(broken):
    with pytest.raises(ModelError, match=r"^the scheduler's config gives no usable shift by size$"):
        shifts_of("flux", {**FLUX, **broken}, shift_by_size="schedule")


def test_each_sample_has_the_shift_of_its_bucket(make):
    """The same draws as without it, moved: t to s·t / (1 + (s - 1)·t), times the shift of the settings."""
    index = open_index(make(counts=(6, 6)).manifest)
    plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=4)
    settings = TimestepDraws(distribution="logit-normal", shift=2.0)

    def timesteps(settings, shifts):
        requests = draws.training(index, plan, 0, 12, timesteps=100_000,
                                  chances=chances_by_bucket(settings, shifts))
        return {(request.bucket, shot.noise): shot.timestep for request in requests for shot in request.draws}

    plain, moved = timesteps(replace(settings, shift=1.0), (1.0, 1.0)), timesteps(settings, (3.0, 0.5))
    assert plain.keys() == moved.keys() and {bucket for bucket, _ in plain} == {0, 1}
    for key, timestep in plain.items():
        place, shift = timestep / 100_000, 2 * (3.0, 0.5)[key[0]]
        assert moved[key] == pytest.approx(100_000 * shift * place / (1 + (shift - 1) * place), abs=20)
