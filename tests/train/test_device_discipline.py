"""Training, validation and sampling keep to one device: played with a second one, and every planted slip is caught."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from runs import events
from runs import go as begin
from safetensors.torch import load_file
from second_device import playing

from prep.loader import batches as data
from train import state_files, validate
from train.models import denoiser as model
from train.sampling import sampler as sample

SETTINGS = {"steps": 2, "batch_size": 4, "micro_batch": 2, "ema": {"decay": 0.5}, "caption_dropout": 0.5,
            "loss": {"masked": True, "min_snr": 5.0}, "validation": {"every": 1, "timesteps": 2},
            "sample": {"every": 2, "steps": 2, "size": [64, 64]}}
LORA = {"lora": {"rank": 2, "dropout": 0.1}}


@pytest.fixture
def elsewhere(make, setup_of, tmp_path):
    """`elsewhere(**settings)`: a whole run on the second device, and its events."""
    made = make()

    def go(**settings):
        setup = setup_of(made, **{**SETTINGS, **LORA, **settings})
        with playing() as there:
            begin(setup, tmp_path / "run", resume=(tmp_path / "run").exists(), device=there)
        return events(tmp_path / "run")

    return go


def count(events, kind):
    return sum(event["event"] == kind for event in events)


@pytest.mark.slow  # by the command, with masks: test_validation_over_cached_latents_keeps_to_one_device
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_whole_run_keeps_to_its_device(elsewhere, tmp_path, method):
    """Steps, validation, pictures, a checkpoint, and another step after a resume."""
    elsewhere(method=method)
    events = elsewhere(method=method, steps=3)
    assert count(events, "step") == 3 and count(events, "validation") == 4 and count(events, "warning") == 0
    assert count(events, "sample") == 3
    result = tmp_path / "run" / ("lora.safetensors" if method == "lora" else "unet/diffusion_pytorch_model.safetensors")
    assert all(value.isfinite().all() for value in load_file(result).values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lora": {"rank": 2, "init": "pissa"}}, {"method": "full"}], ids=str)
def test_an_average_in_host_memory_is_the_one_of_a_single_device(
        elsewhere, make, setup_of, tmp_path, monkeypatch, settings):
    """Its steps, validation, pictures, checkpoints and result, also after a resume."""
    # `meta` has values here, which are not fetched.
    monkeypatch.setattr(state_files, "in_memory", lambda value, fetch: value)
    settings = {**settings, "ema": {"decay": 0.5, "device": "cpu"}}
    begin(setup_of(make(), **{**SETTINGS, **settings, "steps": 3}), tmp_path / "single")
    elsewhere(**settings)
    seen = elsewhere(**settings, steps=3)
    assert count(seen, "validation") == 4 and count(seen, "sample") == 3 and count(seen, "warning") == 0
    wanted = [event for event in events(tmp_path / "single") if event["event"] in ("step", "validation")]
    found = [event for event in seen if event["event"] in ("step", "validation")]
    assert [event["loss"] for event in found] == pytest.approx([event["loss"] for event in wanted], rel=1e-4)
    for name in ("checkpoints/step-000003/ema.safetensors", "lora.safetensors" if "lora" in settings else
                 "unet/diffusion_pytorch_model.safetensors"):
        theirs, ours = (load_file(tmp_path / run / name) for run in ("single", "run"))
        assert theirs.keys() == ours.keys()
        assert all(torch.allclose(theirs[each], value, atol=1e-5) for each, value in ours.items()), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw-schedule-free", "adafactor", "lion",
                                  *(["muon"] if hasattr(torch.optim, "Muon") else [])])
def test_every_optimizer_keeps_to_its_device(elsewhere, name):
    """Also what it keeps, after a resume. bitsandbytes has no kernels for a device that is only played, and
    Prodigy reads `Tensor.data`, which has no device there."""
    settings = {"optimizer": {"name": name}, "ema": {}, "sample": {"every": 0}}
    elsewhere(**settings)
    events = elsewhere(**settings, steps=3)
    assert count(events, "step") == 3 and count(events, "warning") == 0


def stay(tensor, device):
    """A move that was forgotten."""
    return tensor


def forget_validation(monkeypatch):
    """Only validation's text stays behind: the mixture that users of another trainer met."""
    answer = validate.forward
    monkeypatch.setattr(validate, "forward", lambda denoiser, batch, *rest: answer(
        denoiser, dataclasses.replace(batch, text={"hidden": batch.text["hidden"].to("cpu")}), *rest))


@pytest.mark.parametrize("plant", [
    lambda patch: patch.setattr(data, "to_device", stay),
    lambda patch: patch.setattr(model, "to_device", stay),
], ids=["batch", "schedule"])
def test_a_forgotten_move_is_caught(elsewhere, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        elsewhere()


@pytest.mark.parametrize(("plant", "what"), [
    pytest.param(lambda patch: patch.setattr(sample, "module_to_device", stay), "no sample pictures",
                 marks=pytest.mark.slow),
    pytest.param(forget_validation, "no validation", marks=pytest.mark.slow),
], ids=["vae", "validation"])
def test_a_forgotten_move_beside_the_steps_is_a_warning(elsewhere, monkeypatch, plant, what):
    plant(monkeypatch)
    said = [event["text"] for event in elsewhere() if event["event"] == "warning"]
    assert said and all(text.startswith(f"{what}: ") for text in said)
    assert "Expected all tensors to be on the same device" in said[0]


def test_the_play_itself():
    """It computes, knows where things are made, lets copies cross, and refuses mixtures."""
    with playing() as there:
        layer = torch.nn.Linear(3, 2).to(there)
        values = torch.ones(4, 3).to(there)
        layer(values).sum().backward()
        assert layer.weight.device == layer.weight.grad.device == there
        assert layer.weight.grad.to("cpu").tolist() == [[4.0] * 3] * 2
        assert (torch.arange(3, device=values.device) + values).device == there
        assert (values * torch.tensor(2.0)).to("cpu").tolist() == [[2.0] * 3] * 4
        with pytest.raises(RuntimeError, match="same device"):
            values + torch.arange(3)
