"""A model that cannot draw a run's sample pictures is refused before anything is loaded, by what is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_caches import hub_cache
from safetensors.torch import load_file, save_file

from prep.models.named import beside, without_folders
from train.check import check
from train.cli.memory import Fitting
from train.config.load import load_config, parse, published
from train.memory.forecast import PARTS, Forecast
from train.memory.room import Room
from train.setup import RunRequest

ANOTHER = "name another model of the family with sample.model, or none: --set sample.model="
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def other(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "turbo")


def report(made, model, **settings):
    sample = {**settings.pop("sample", {}), "model": str(model)}
    return check(RunRequest(manifest=made.path), parse({"batch_size": 2, "sample": sample, **settings}, ""))


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def reshaped(other, change):
    """Changes the weights of the denoiser, whose config stays."""
    save_file(change(load_file(other / WEIGHTS)), other / WEIGHTS)


def test_one_that_fits_is_told_with_what_it_takes(make, other):
    found = report(make(), other)
    assert not found.faults and found.setup.model.drawing == other
    size = sum(value.nbytes for value in load_file(other / WEIGHTS).values()) / 1024
    assert [note for note in found.notes if "drawn" in note] == [
        f"sample pictures are drawn by {other}: while they are made, its denoiser is in memory beside the one that is "
        f"trained, {size:.1f} KiB as its files have it"]
    assert found.setup.model.path != other and found.setup.model.base == report(make(), "").setup.model.base


@pytest.mark.parametrize(("settings", "why", "way"), [
    ({"method": "full"}, "method is 'full', which trains the model's own weights", "--method lora"),
    ({"lora": {"init": "pissa"}}, "lora.init is 'pissa', whose adapters only suit the base that they were taken out of",
     "--set lora.init=kaiming"),
    ({"parallel": {"shard": True}}, "parallel.shard is on, which divides the model among the GPUs", "--no-shard")])
def test_only_adapters_that_suit_another_base_can_be_drawn_with(make, other, settings, why, way):
    (fault,) = report(make(), other, **settings).faults
    assert fault.message == f"sample.model is set, which draws with the adapters of a LoRA, but {why}"
    assert fault.hint == f"{way}, or --set sample.model= for pictures of the trained model" and fault.exit_code == 3


def test_one_that_is_not_there(make, tmp_path):
    (fault,) = report(make(), tmp_path / "none").faults
    assert fault.message == f"sample.model: model {tmp_path / 'none'} is neither a directory nor a Hub id"
    (fault,) = report(make(), "owner/none").faults
    assert fault.message == "sample.model: model 'owner/none' is neither a directory nor in the local Hub cache"
    assert fault.hint == ("name a directory, or add --download to download it from the Hub; train sample takes --model "
                          "in place of it") and fault.exit_code == 6


def test_one_in_the_hub_s_cache(make, tiny_model, tmp_path, monkeypatch):
    hub_cache(tmp_path / "hub", tiny_model, "someone/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = report(make(), "someone/tiny")
    assert not found.faults and found.setup.model.drawing.is_relative_to(tmp_path / "hub")


def test_one_of_another_family(make, other):
    edit(other / "model_index.json", _class_name="StableDiffusionXLPipeline")
    (fault,) = report(make(), other).faults
    assert fault.message == f"model {other} is of family 'sdxl', but the manifest is of family 'sd15'"
    assert fault.hint == ANOTHER and fault.exit_code == 6


def test_one_that_predicts_something_else(make, other):
    edit(other / "scheduler" / "scheduler_config.json", prediction_type="v_prediction")
    (fault,) = report(make(), other).faults
    assert fault.message == (f"model {other} predicts v_prediction, but the model that this run trains predicts "
                             "epsilon")
    assert fault.hint == ANOTHER


def test_one_that_takes_other_text(make, other):
    edit(other / "unet" / "config.json", cross_attention_dim=48)
    (fault,) = report(make(), other).faults
    assert fault.message == f"{other / 'unet'} has cross_attention_dim 48, but the cache's rows have 32"
    assert fault.hint == ANOTHER


def test_one_without_usable_noise_levels(make, other):
    edit(other / "scheduler" / "scheduler_config.json", beta_end=-3.0)
    (fault,) = report(make(), other).faults
    assert str(other) in fault.message and fault.exit_code == 6


def test_one_that_the_sampler_does_not_work_with(make, other):
    """While the trained model, which draws nothing, need not."""
    named = {"sampler": "DPMSolverMultistepScheduler"}
    assert not report(make(), other, sample=named).faults
    edit(other / "scheduler" / "scheduler_config.json", rescale_betas_zero_snr=True)
    (fault,) = report(make(), other, sample={"sampler": "DPMSolverSDEScheduler"}).faults
    assert fault.message.startswith("sample.sampler is 'DPMSolverSDEScheduler', which cannot follow a noise schedule")
    made = make(model=other)
    assert report(made, "", sample={"sampler": "DPMSolverSDEScheduler"}).faults
    edit(Path(shutil.copytree(other, other.with_name("usual"))) / "scheduler" / "scheduler_config.json",
         rescale_betas_zero_snr=False)
    assert not report(made, other.with_name("usual"), sample={"sampler": "EulerAncestralDiscreteScheduler"}).faults


@pytest.mark.parametrize(("change", "said"), [
    (lambda name, value: {}, "the denoiser of {other} has no layer '{layer}', which this run adapts"),
    (lambda name, value: {name: torch.ones(48, value.shape[1])},
     "'{layer}' of {other} has the shape [48, {into}], expected [{out}, {into}], as in the model that this run trains"),
    (lambda name, value: {name: value, "mid_block.more.attn1.to_q.weight": value.clone()},
     "the denoiser of {other} has a layer 'mid_block.more.attn1.to_q' to adapt, which the model that this run trains "
     "lacks")])
def test_one_whose_layers_are_others(make, other, change, said):
    tensors = load_file(other / WEIGHTS)
    name = next(name for name in tensors if name.endswith("attn1.to_q.weight"))
    out, into = tensors[name].shape
    reshaped(other, lambda tensors: {**{each: value for each, value in tensors.items() if each != name},
                                     **change(name, tensors[name])})
    (fault,) = report(make(), other).faults
    assert fault.message == said.format(other=other, layer=name.removesuffix(".weight"), out=out, into=into)
    assert fault.hint == ANOTHER


def test_its_path_begins_at_the_file_that_names_it(other, tmp_path, monkeypatch):
    """One that is typed begins here; what is not there may be a Hub id."""
    (tmp_path / "settings").mkdir()
    file = tmp_path / "settings" / "train.toml"
    for named, found in (("../turbo", f"{tmp_path / 'settings'}/../turbo"), ("owner/name@main", "owner/name@main"),
                         ("x.safetensors@../turbo", f"{tmp_path}/settings/x.safetensors@{tmp_path}/settings/../turbo")):
        file.write_text(f'[sample]\nmodel = "{named}"\n')
        assert load_config(file).sample.model == found
    monkeypatch.chdir(tmp_path)
    assert load_config(file, {"sample.model": "turbo"}).sample.model == str(other)
    assert load_config(file, {"sample.model": ""}).sample.model == load_config(None).sample.model == ""
    assert beside("turbo", Path()) == "turbo"


def test_what_is_published_has_no_path(other, tmp_path):
    for named, name in ((str(other), "turbo"), (str(tmp_path / "gone"), "gone"), ("owner/name", "owner/name"),
                        (f"{tmp_path}/x.gguf@{tmp_path}/gone", "x.gguf@gone"), (f"{tmp_path}/x.gguf", "x.gguf"),
                        (f"{tmp_path}/x.gguf@owner/name", "x.gguf@owner/name"), ("", "")):
        assert published(parse({"sample": {"model": named}}, "")).sample.model == without_folders(named) == name


def test_check_tells_of_two_denoisers_where_they_take_more_than_a_step(make, other, train):
    result = train("check", make().path, "--set", f"sample.model={other}", "--batch-size", "1")
    assert result.code == 0, result.err
    assert f"note: sample pictures are drawn by {other}: " in result.out + result.err
    parts, room = dict.fromkeys(PARTS, 1 << 20), Room(device=None, name="a GPU", total=None, free=None, libraries=0)
    small, large = (Forecast(parts={**parts, "weights": size << 20}, room=room, settings={}) for size in (1, 9))
    assert len(Fitting(forecast=small, drawing=True).lines) == len(Fitting(forecast=large).lines) == 1
    assert Fitting(forecast=large, drawing=True).lines[1:] == [
        "note: sample pictures take 23.0 MiB, since there are two denoisers, and what their own passes need"]
