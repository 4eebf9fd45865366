"""musubi-tuner's training settings, which have sd-scripts' names: what train.toml comes of them."""

from __future__ import annotations

import math

import pytest

from prep.errors import ConfigError
from train.config.load import load_config

DATA = """[general]
resolution = 512
enable_bucket = true
batch_size = 2
[[datasets]]
image_directory = "photos"
control_directory = "masks"
"""
WHOLE = """dit = "qwen.safetensors"
vae = "vae.safetensors"
text_encoder = "qwen25.safetensors"
dataset_config = "data.toml"
mixed_precision = "bf16"
timestep_sampling = "shift"
discrete_flow_shift = 2.2
weighting_scheme = "none"
optimizer_type = "adamw8bit"
learning_rate = 5e-5
gradient_checkpointing = true
network_module = "networks.lora_qwen_image"
network_dim = 16
max_train_epochs = 16
save_every_n_epochs = 1
seed = 42
fp8_base = true
fp8_scaled = true
blocks_to_swap = 16
sdpa = true
output_dir = "out"
metadata_author = "me"
huggingface_token = "SECRET"
"""


@pytest.fixture
def convert_settings(convert_text, tmp_path):
    """`convert_settings(text)`: what a configuration comes to, and its checked train.toml."""
    (tmp_path / "data.toml").write_text(DATA)

    def go(text: str):
        found = convert_text(text)
        (tmp_path / "train.toml").write_text(found.training.rendered("head"))
        return found, load_config(tmp_path / "train.toml")

    return go


def notes(found):
    return {one.key: one.said for one in found.training.notes}


def test_a_whole_file(convert_settings, tmp_path):
    found, config = convert_settings(WHOLE)
    assert found.tool == "musubi-tuner" and found.recipe.reference_fit == "bucket"
    assert found.recipe.sources[0].references == (tmp_path / "masks",) and not found.recipe.model.path
    assert (config.epochs, config.batch_size, config.seed, config.precision) == (16, 2, 42, "bf16")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 1, "all-linear")
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw-8bit", 5e-5)
    assert (config.timesteps.distribution, config.timesteps.shift) == ("logit-normal", 2.2)
    assert (config.quantization, config.offload, config.gradient_checkpointing) == ("fp8", 16, True)
    assert (config.checkpoint.every, config.loss.masked, config.result.author) == ("1 epoch", False, "me")
    assert set(notes(found)) == {"dit", "vae", "text_encoder", "fp8_scaled", "sdpa", "output_dir",
                                 "discrete_flow_shift", "other settings"}
    assert "SECRET" not in found.training.rendered("") and "huggingface_token" in found.training.rendered("")


HEAD = 'dit = "a.safetensors"\ndataset_config = "data.toml"\nnetwork_module = "networks.lora_zimage"\n'


def theirs(number, kind, scheme="none", shift=1.0, mean=0.0, std=1.0, scale=1.0):
    """The noise of a standard normal number, as its documentation says: a share of noise, 0 to 1."""
    if kind == "logsnr":
        return 1 / (1 + math.exp((mean + std * number) / 2))
    if kind == "sigma":  # a place in levels that are shifted, and begin with the most noise
        level = 1 - 1 / (1 + math.exp(-(mean + std * number)))
    else:
        level = 1 / (1 + math.exp(-scale * number))
    return level * shift / (1 + (shift - 1) * level)


@pytest.mark.parametrize(("text", "kind", "values"), [
    ('timestep_sampling = "sigmoid"\nsigmoid_scale = 1.3', "sigmoid", {"scale": 1.3}),
    ('timestep_sampling = "shift"\ndiscrete_flow_shift = 3.0', "shift", {"shift": 3.0}),
    ('timestep_sampling = "logsnr"\nlogit_mean = 1.0\nlogit_std = 2.0', "logsnr", {"mean": 1.0, "std": 2.0}),
    ('weighting_scheme = "logit_normal"\nlogit_mean = 0.5\nlogit_std = 0.8\ndiscrete_flow_shift = 2.0', "sigma",
     {"mean": 0.5, "std": 0.8, "shift": 2.0})])
def test_the_noise_that_is_drawn_is_the_same(convert_settings, text, kind, values):
    _, config = convert_settings(HEAD + text)
    draws, own = config.timesteps, []
    assert draws.distribution == "logit-normal"
    numbers = (-2.0, -0.7, 0.0, 0.4, 1.9)
    for number in numbers:
        t = 1 / (1 + math.exp(-(draws.mean + draws.std * number)))
        own.append(t * draws.shift / (1 + (draws.shift - 1) * t))
    wanted = [theirs(number, kind, **values) for number in numbers]
    assert sorted(own) == pytest.approx(sorted(theirs(-number, kind, **values) for number in numbers)
                                        if kind in ("sigma", "logsnr") else wanted)


@pytest.mark.parametrize(("text", "low", "high"), [
    ('timestep_sampling = "uniform"\nmin_timestep = 200\nmax_timestep = 900', 0.2, 0.9),
    ("min_timestep = 200\nmax_timestep = 900", 0.1, 0.8), ("", 0, 1)])  # of sigma, from the most noise
def test_ranges(convert_settings, text, low, high):
    draws = convert_settings(HEAD + text)[1].timesteps
    assert (draws.low, draws.high, draws.distribution) == (low, high, "uniform")


@pytest.mark.parametrize(("module", "args", "wanted", "said"), [
    ("networks.lora_flux_2", "[]", ("lora", "all-linear", 0, 1.0), set()),
    ("networks.lora_krea2", "[]", ("lora", "kohya", 0, None), set()),
    ("networks.lokr", '["factor=8", "conv_dim=4"]', ("lokr", "all-linear", 8, None), {"network_args conv_dim"}),
    ("networks.lora_wan", '["exclude_patterns=[\'x\']", "loraplus_lr_ratio=4"]', ("lora", "all-linear", 0, None),
     {"network_module", "network_args exclude_patterns", "network_args loraplus_lr_ratio"})])
def test_networks(convert_settings, module, args, wanted, said):
    found, config = convert_settings(HEAD.replace("networks.lora_zimage", module) + f"network_args = {args}\n")
    assert (config.lora.kind, config.lora.targets, config.lora.factor, config.guidance_embedding) == wanted
    assert set(notes(found)) == {"dit", *said}


def test_a_configuration_is_told_by_its_dataset(convert_settings):
    found, _ = convert_settings('dataset_config = "data.toml"\nmax_train_steps = 5\ntimestep_sampling = "qwen_shift"\n')
    assert found.tool == "musubi-tuner" and found.training.settings["timesteps.shift_by_size"] == "schedule"


def test_a_configuration_without_a_dataset(convert_text):
    with pytest.raises(ConfigError, match="it has no dataset_config"):
        convert_text('dit = "a"\nnetwork_dim = 4\n')
