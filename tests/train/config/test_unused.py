"""Settings that have no effect beside the others, the data, the model or the computer are named.

`TABLE` has every setting, so that a new one is not forgotten here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from prep.training.table import SETTINGS
from train.config.load import load_config
from train.config.unused import Facts, depends_on_device, unused, unused_on

USUAL = Facts(masked=True, prior=True, referring=True, held_out=True, large=True, convolves=True, rescaled=False)


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Where a setting has no effect, and where it has."""

    value: Any  # of the setting, unlike its default
    why: str
    beside: Mapping[str, Any] | None = None  # other settings
    facts: Mapping[str, bool] | None = None
    device: str = "cuda"
    world: int = 2
    unless: Mapping[str, Any] | None = None  # settings beside which it has an effect


FULL, LORA = {"method": "full"}, "method is 'full'"
NEVER = {"sample.every": 0}
SHOWN = "sample.every is 0, and only train sample uses such settings then"
ALWAYS = "always"  # or refused where it would have none


def of_lora(value):
    return Idle(value=value, beside=FULL, why=LORA)


def of_sample(value):
    return Idle(value=value, beside=NEVER, why=SHOWN)


TABLE: Mapping[str, Any] = {
    **dict.fromkeys((
        "method", "steps", "epochs", "batch_size", "micro_batch", "underfill", "shuffle", "seed", "precision",
        "prediction", "guidance_embedding", "caption_dropout", "quantization", "gradient_checkpointing", "compile",
        "attention", "base.adapter",
        "optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay",
        "optimizer.momentum", "optimizer.d_coef", "optimizer.bias_correction", "optimizer.clip", "schedule.name",
        "schedule.warmup", "timesteps.distribution", "timesteps.shift", "timesteps.shift_by_size", "timesteps.low",
        "timesteps.high", "noise.offset", "noise.pyramid", "noise.perturbation", "loss.masked", "loss.min_snr",
        "loss.weighting", "loss.huber", "preserve.prompted", "slider.positive", "slider.negative", "ema.decay",
        "ema.snapshots", "sample.every", "evaluate.every", "checkpoint.every", "checkpoint.keep",
        "checkpoint.copy_gib", "log.plot", "log.tensorboard", "log.wandb", "result.dtype", "result.title",
        "result.author", "result.description", "result.license", "result.trigger"), ALWAYS),
    "tf32": Idle(value=True, device="cpu", why="the device is cpu, expected an NVIDIA GPU for it"),
    "offload": Idle(value=4, device="cpu", why="the device is cpu, whose memory is the system's"),
    "channels_last": Idle(value=True, facts={"convolves": False}, why="the denoiser has no convolutions"),
    "zero_terminal_snr": Idle(value=True, facts={"rescaled": True},
                              why="the model's own noise schedule ends in pure noise"),
    "base.adapter_scale": Idle(value=0.5, unless={"base.adapter": "beside.safetensors"}, why="base.adapter is not set"),
    "lora.kind": of_lora("lokr"), "lora.rank": of_lora(8), "lora.alpha": of_lora(3.0), "lora.rslora": of_lora(True),
    "lora.dora": of_lora(True), "lora.init": of_lora("pissa"), "lora.dropout": of_lora(0.5),
    "lora.targets": of_lora("kohya"), "lora.layers": of_lora([{"match": "to_q", "rank": 2}]),
    "lora.format": of_lora("diffusers"),
    "lora.factor": Idle(value=4, beside={"lora.kind": "loha"}, unless={"lora.kind": "lokr"},
                        why="lora.kind is 'loha', expected 'lokr' for it"),
    **dict.fromkeys(("lora.conv_rank", "lora.conv_alpha"),
                    Idle(value=8, facts={"large": False}, why="lora.targets has no convolution larger than 1x1; "
                         "kohya-conv has those of a UNet")),
    **dict.fromkeys(("full.train", "full.freeze"),
                    Idle(value=["attn2"], unless=FULL, why="method is 'lora'")),
    "full.dtype": Idle(value="bfloat16", unless=FULL, why="method is 'lora'"),
    "full.fused_backward": Idle(value=True, unless=FULL, why="method is 'lora'"),
    "optimizer.safeguard_warmup": Idle(
        value=True, beside={"optimizer.name": "prodigy"},
        unless={"optimizer.name": "prodigy", "schedule.warmup": 5},
        why="the learning rate is 1 from the first step to the last"),
    "schedule.floor": Idle(value=0.1, unless={"schedule.name": "cosine"}, why="schedule.name is 'constant'"),
    "schedule.cycles": Idle(value=3, beside={"schedule.name": "cosine"}, unless={"schedule.name": "cosine-restarts"},
                            why="schedule.name is 'cosine', expected 'cosine-restarts' for it"),
    "schedule.power": Idle(value=2.0, unless={"schedule.name": "polynomial"},
                           why="schedule.name is 'constant', expected 'polynomial' for it"),
    **dict.fromkeys(("timesteps.mean", "timesteps.std"),
                    Idle(value=2.0, unless={"timesteps.distribution": "logit-normal"},
                         why="timesteps.distribution is 'uniform', expected 'logit-normal' for it")),
    "timesteps.mode_scale": Idle(value=1.0, beside={"timesteps.distribution": "logit-normal"},
                                 unless={"timesteps.distribution": "mode"},
                                 why="timesteps.distribution is 'logit-normal', expected 'mode' for it"),
    "timesteps.base_side": Idle(value=512, unless={"timesteps.shift_by_size": "area"},
                                why="timesteps.shift_by_size is 'none', expected 'area' for it"),
    "noise.pyramid_levels": Idle(value=4, unless={"noise.pyramid": 0.5}, why="noise.pyramid is 0"),
    "reference_dropout": Idle(value=0.5, facts={"referring": False}, why="no picture has references"),
    "each_reference_dropout": Idle(value=0.5, facts={"referring": False}, why="no picture has references"),
    "loss.unmasked_weight": Idle(value=0.5, facts={"masked": False}, why="no masks are used"),
    "loss.normalize_area": Idle(value=True, facts={"masked": False}, why="no masks are used"),
    "preserve.unmasked": Idle(value=0.5, facts={"masked": False}, why="no masks are used"),
    "preserve.prompts": Idle(value=["", "x"], unless={"preserve.prompted": 1.0}, why="preserve.prompted is 0"),
    "preserve.prior": Idle(value=True, facts={"prior": False}, why='no sample has the role "prior"'),
    "slider.neutral": Idle(value="", unless={"slider.positive": "x"}, why="slider.positive is slider.negative"),
    "slider.strength": Idle(value=2.0, unless={"slider.positive": "x"}, why="slider.positive is slider.negative"),
    "ema.device": Idle(value="cpu", unless={"ema.decay": 0.9}, why="ema.decay is 0"),
    "validation.every": Idle(value=5, facts={"held_out": False}, why="the manifest holds out no samples"),
    **dict.fromkeys(("validation.timesteps", "validation.most"),
                    Idle(value=2, beside={"validation.every": 0}, why="validation.every is 0")),
    "sample.steps": of_sample(4), "sample.guidance": of_sample(3.0), "sample.sampler": of_sample("DDIMScheduler"),
    "sample.model": of_sample("owner/name"), "sample.seed": of_sample(1), "sample.size": of_sample([64, 64]),
    "sample.wait": Idle(value=5, beside=NEVER, why="sample.every is 0"),
    **{f"evaluate.{name}": Idle(value=value, unless={"evaluate.every": 1},
                                why="evaluate.every is 0, and only train evaluate uses such settings then")
       for name, value in (("seeds", 2), ("neutral", "stay.txt"), ("embed", "owner/name"))},
    "sample.encode": Idle(value="cuda", beside={"sample.wait": 0}, why="sample.wait is 0"),
    "parallel.shard": Idle(value=True, world=1, why="there is one process; several are started with torchrun"),
    "result.tags": Idle(value=False, beside=FULL, why="method is 'full', and only files of a LoRA hold the counts"),
}
IDLE = {name: case for name, case in TABLE.items() if case != ALWAYS}


def notes(settings, facts=USUAL, device="cuda", world=2):
    config = load_config(None, settings)
    return [*unused(config, facts), *unused_on(config, device, world)]


def test_the_table_has_every_setting():
    assert set(TABLE) == set(SETTINGS)


@pytest.mark.parametrize("name", IDLE)
def test_what_has_no_effect_is_named_with_the_reason(name):
    case = IDLE[name]
    said = notes({**(case.beside or {}), name: case.value}, replace(USUAL, **(case.facts or {})), case.device,
                 case.world)
    assert [one for one in said if name in one.partition(": ")[0].split(" ")] == [
        one for one in said if one.endswith(f"no effect: {case.why}")]
    assert len(said) == 1, said


@pytest.mark.parametrize(("device", "said"), [
    ("cpu", ["gradient_checkpointing 'offload' is as true: the device is cpu, whose memory is the system's"]),
    ("cuda", [])])
def test_what_is_recomputed_from_lies_where_it_may(device, said):
    assert notes({"gradient_checkpointing": "offload"}, device=device) == said


@pytest.mark.parametrize("name", IDLE)
def test_what_has_an_effect_is_not_named(name):
    case = IDLE[name]
    assert notes({**(case.unless or {}), name: case.value}) == []


@pytest.mark.parametrize("settings", [
    {}, {"method": "full"}, {"lora.rank": 8}, {"lora.rank": 8, "lora.alpha": 4.0}, {"validation.every": 0}, NEVER,
    {"method": "full", "quantization": "none"}], ids=str)
def test_defaults_that_follow_from_others_are_not_named(settings):
    assert not [one for one in notes(settings, replace(USUAL, large=False)) if "alpha" in one or "conv" in one]


def test_settings_of_one_reason_are_named_together():
    assert notes({"method": "full", "lora.rank": 8, "lora.alpha": 4.0, "lora.dora": True}) == [
        "lora.rank, lora.alpha and lora.dora have no effect: method is 'full'"]
    assert notes({"validation.every": 0, "validation.most": 3}, replace(USUAL, held_out=False)) == [
        "validation.every and validation.most have no effect: the manifest holds out no samples"]


def test_an_average_is_on_the_cpu_in_any_case():
    settings = {"ema.snapshots": True, "ema.device": "cpu"}
    assert notes(settings, device="cpu") == [
        "ema.device has no effect: the device is cpu, where the weights are as well"]
    assert notes(settings, device="mps") == []


def test_what_is_not_known_of_the_computer_is_not_told():
    config = load_config(None, {"tf32": True, "parallel.shard": True})
    assert list(unused_on(config, None, None)) == []
    assert depends_on_device(config) and not depends_on_device(load_config(None, {"parallel.shard": True}))
