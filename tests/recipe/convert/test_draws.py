"""The noise levels that a converted configuration draws are those that its own tool draws.

Each tool's way of drawing is written here again, from its documentation, and drawn beside ours.
"""

from __future__ import annotations

import json
import tomllib
from math import pi

import numpy as np
import pytest
from pictures import draw

from prep.recipe.convert.detect import convert
from train.config.load import parse
from train.models.size_shift import chances_by_bucket

COUNT, STEPS = 20_000, 1000
FLUX = {"network_module": "networks.lora_flux", "timestep_sampling": "sigma"}
SD3 = {"network_module": "networks.lora_sd3"}
LUMINA = {"network_module": "networks.lora_lumina", "timestep_sampling": "sigma"}
OF_SD3 = 3.0  # the shift of SD 3's own schedule, on top of which ours comes
NORMAL = {"weighting_scheme": "logit_normal", "logit_mean": 0.8, "logit_std": 0.7}
MODE = {"weighting_scheme": "mode", "mode_scale": 1.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("draws")
    draw(place / "img" / "1_a" / "0.png", (64, 64), seed=0)
    return place


def ours(folder, document, own_shift=1.0):
    """Levels of noise, from 0 to 1, that training draws with what the file becomes, on a schedule with a shift."""
    (folder / "c.json").write_text(json.dumps(document))
    config = parse(tomllib.loads(convert(folder / "c.json").training.rendered("x")), "train.toml")
    (chances,) = chances_by_bucket(config.timesteps, [1.0])
    stream = np.random.default_rng(7)
    places = (np.array([chances.draw(stream, STEPS) for _ in range(COUNT)]) + 0.5) / STEPS
    return moved(places, own_shift)


def moved(places, shift):
    return shift * places / (1 + (shift - 1) * places)


def density(asked, random):
    """The place that weighting_scheme draws: sd-scripts' compute_density_for_timestep_sampling."""
    even = random.random(COUNT)
    if asked.get("weighting_scheme") == "logit_normal":
        return 1 / (1 + np.exp(-random.normal(asked["logit_mean"], asked["logit_std"], COUNT)))
    if asked.get("weighting_scheme") == "mode":
        return 1 - even - asked["mode_scale"] * (np.cos(pi * even / 2) ** 2 - 1 + even)
    return even


def of_flux(asked, random):
    """In sd-scripts' FLUX, a place in a list of levels from the most noise to the least; or a sigmoid, shifted."""
    shift, scale = asked.get("discrete_flow_shift", 3.0), asked.get("sigmoid_scale", 1.0)
    sigmoid = 1 / (1 + np.exp(-scale * random.standard_normal(COUNT)))
    kind = asked["timestep_sampling"]
    if kind == "sigma":
        levels = moved(np.arange(STEPS, 0, -1) / STEPS, shift)
        return levels[(density(asked, random) * STEPS).astype(int)]
    return {"uniform": random.random(COUNT), "sigmoid": sigmoid, "shift": moved(sigmoid, shift)}[kind]


def of_sd3(asked, random):
    """In sd-scripts' SD 3, a place from the least noise to the most, shifted by training_shift, within a range."""
    low, high = asked.get("min_timestep", 0), asked.get("max_timestep", 1000)
    return (moved(density(asked, random), asked.get("training_shift", 1.0)) * (high - low) + low) / 1000


def of_onetrainer(asked, random):
    """In OneTrainer, a place from the least noise to the most, within a range, shifted after that."""
    weight, bias = asked.get("noising_weight", 0.0), asked.get("noising_bias", 0.0)
    even, normal = random.random(COUNT), random.normal(bias, weight + 1, COUNT)
    places = {"UNIFORM": even, "LOGIT_NORMAL": 1 / (1 + np.exp(-normal)),
              "HEAVY_TAIL": 1 - even - weight * (np.cos(pi / 2 * even) ** 2 - 1 + even)}[asked["timestep_distribution"]]
    low, high = asked.get("min_noising_strength", 0.0), asked.get("max_noising_strength", 1.0)
    return moved(places * (high - low) + low, asked.get("timestep_shift", 1.0))


@pytest.mark.parametrize(("asked", "theirs", "own_shift"), [
    *(({**family, **scheme, **more}, of_flux, 1.0) for family in (FLUX, LUMINA) for scheme in ({}, NORMAL, MODE)
      for more in ({}, {"discrete_flow_shift": 1.0})),
    *(({**FLUX, "timestep_sampling": kind, **NORMAL, **more}, of_flux, 1.0) for kind in ("uniform", "sigmoid", "shift")
      for more in ({}, {"discrete_flow_shift": 2.0, "sigmoid_scale": 0.5})),
    *(({**SD3, **scheme, "training_shift": shift}, of_sd3, OF_SD3) for scheme in ({}, NORMAL, MODE)
      for shift in (OF_SD3, 6.0)),
    ({**SD3, **NORMAL, "training_shift": 2.0, "min_timestep": 100, "max_timestep": 800}, of_sd3, None),
    ({**NORMAL, "sd3_checkbox": True, "flux1_checkbox": False, "LoRA_type": "Standard"}, of_sd3, None),
])
def test_levels_of_sd_scripts(folder, asked, theirs, own_shift):
    document = {"train_data_dir": str(folder / "img"), **asked}
    if own_shift == OF_SD3:  # as the note says: divided by the shift of the schedule
        document["training_shift"] /= OF_SD3
    alike(ours(folder, document, own_shift or 1.0), theirs(asked, np.random.default_rng(1)))


@pytest.mark.parametrize("asked", [
    {"timestep_distribution": "UNIFORM"}, {"timestep_distribution": "UNIFORM", "timestep_shift": 3.0},
    {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.9, "noising_weight": 0.5},
    {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": -0.9, "timestep_shift": 2.0},
    {"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.2, "min_noising_strength": 0.2},
])
def test_levels_of_onetrainer(folder, asked):
    document = {"concepts": [{"path": str(folder / "img")}], "model_type": "FLUX_DEV_1", **asked}
    alike(ours(folder, document), of_onetrainer(asked, np.random.default_rng(1)))


def alike(found, wanted):
    """Both samples have the same deciles, to what 20,000 draws allow."""
    places = np.linspace(0.1, 0.9, 9)
    np.testing.assert_allclose(np.quantile(found, places), np.quantile(wanted, places), atol=0.015)
