"""Settings that have no effect beside the others are named."""

from __future__ import annotations

import pytest

from train.config.load import parse
from train.config.unused import unused


def notes(table, masked=True, large=False):
    return list(unused(parse(table, "test"), masked=masked, large=large))


@pytest.mark.parametrize(("table", "expected"), [
    ({"method": "full", "lora": {"rank": 8, "targets": "kohya"}}, "lora.rank and lora.targets have no effect: method "
     "is 'full'"),
    ({"full": {"train": ["attn2"]}}, "full.train has no effect: method is 'lora'"),
    ({"lora": {"conv_rank": 8}}, "lora.conv_rank and lora.conv_alpha have no effect: lora.targets has no convolution "
     "larger than 1x1; kohya-conv has those of a UNet"),
    ({"schedule": {"floor": 0.1}}, "schedule.floor has no effect: schedule.name is 'constant'"),
    ({"schedule": {"name": "cosine", "cycles": 3}}, "schedule.cycles has no effect: schedule.name is 'cosine', "
     "expected 'cosine-restarts' for it"),
    ({"schedule": {"power": 2.0}}, "schedule.power has no effect: schedule.name is 'constant', expected 'polynomial' "
     "for it"),
    ({"timesteps": {"mean": 1.0, "std": 2.0}}, "timesteps.mean and timesteps.std have no effect: "
     "timesteps.distribution is 'uniform', expected 'logit-normal' for it"),
    ({"timesteps": {"distribution": "logit-normal", "mode_scale": 1.0}}, "timesteps.mode_scale has no effect: "
     "timesteps.distribution is 'logit-normal', expected 'mode' for it"),
    ({"timesteps": {"base_side": 512}}, "timesteps.base_side has no effect: timesteps.shift_by_size is 'none', "
     "expected 'area' for it"),
    ({"noise": {"pyramid_levels": 4}}, "noise.pyramid_levels has no effect: noise.pyramid is 0"),
    ({"ema": {"device": "cpu"}}, "ema.device has no effect: ema.decay is 0"),
], ids=lambda value: None if isinstance(value, dict) else value.split(" ")[0])
def test_each_is_named_with_its_reason(table, expected):
    assert notes(table) == [expected]


def test_masks_that_are_not_used():
    table = {"loss": {"normalize_area": True, "unmasked_weight": 0.5}}
    assert notes(table) == []
    assert notes(table, masked=False) == ["loss.unmasked_weight and loss.normalize_area have no effect: no masks are "
                                          "used"]


@pytest.mark.parametrize(("table", "large"), [
    ({}, False), ({"method": "full"}, False), ({"lora": {"rank": 8}}, False), ({"lora": {"conv_rank": 8}}, True),
    ({"method": "full", "full": {"train": ["attn2"]}}, False),
    ({"schedule": {"name": "cosine-restarts", "cycles": 3, "floor": 0.1}}, False),
    ({"timesteps": {"distribution": "mode", "mode_scale": 1.0, "shift_by_size": "area", "base_side": 512}}, False),
    ({"noise": {"pyramid": 0.5, "pyramid_levels": 4}}, False)])
def test_what_has_an_effect_is_not_named(table, large):
    assert notes(table, large=large) == []
