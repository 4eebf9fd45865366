"""A slider learns the difference of two prompts, both ways: by a textbook's formula, and in a library that loads it."""

from __future__ import annotations

import pytest
import torch
from beside import require_textbook, scattered
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from real_manifest import CONTEXT
from runs import go

from prep.keys import text_key, unconditional_key
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from train.check import check
from train.config.load import parse
from train.models.lora import at_weight
from train.setup import RunRequest
from train.state import create_state, forward_backward
from train.validate import validate

CPU = torch.device("cpu")
SLIDER = {"positive": "a red circle", "negative": "a blue square"}


def row(made, text):
    key = text_key(text, CONTEXT) if text else unconditional_key(CONTEXT)
    return torch.from_numpy(made.texts[key])[None]


@pytest.mark.parametrize("neutral", ["{caption}", "", "a red circle"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_directions_are_those_of_the_formula(make, setup_of, tiny_model, neutral, checkpointing):
    """Their losses, and the gradients of one backward pass through both; also if passes are made again in it."""
    made = make(weight=0.5)
    setup, plain = (setup_of(made, batch_size=2, loss={"masked": False}, lora={"rank": 2}, gradient_checkpointing=each,
                             slider={**SLIDER, "neutral": neutral, "strength": 1.5}) for each in (checkpointing, False))
    trainee, other = create_state(setup, CPU), create_state(plain, CPU)
    for each in (trainee, other):
        scattered(each.denoiser.parameters, 3)
    model, parameters = other.denoiser.model, other.denoiser.parameters
    base = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    requests = draws.training(setup.index, setup.plan, 0, 2, timesteps=1000)
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed:
        for batch in feed:
            total, losses = forward_backward(trainee, setup.config, batch)
            ours = {name: value.grad.clone() for name, value in trainee.denoiser.parameters.items()}
            noised = DDPMScheduler.from_pretrained(tiny_model / "scheduler").add_noise(
                (batch.latent_BChw.float() - 0.125) * 0.5, batch.noise_BChw, batch.timestep_B)
            count = len(noised)
            text = batch.text["hidden"].float() if neutral == "{caption}" else row(made, neutral).expand(count, -1, -1)
            with torch.no_grad():
                old, more, less = (base(noised, batch.timestep_B, each.expand(count, -1, -1)).sample for each in
                                   (text, row(made, "a red circle"), row(made, "a blue square")))
            turned = {name: -value for name, value in parameters.items() if "lora_B" in name}
            up = model(noised, batch.timestep_B, text).sample
            down = torch.func.functional_call(model, turned, (noised, batch.timestep_B, text)).sample
            each = ((up - old - 1.5 * (more - less))**2 + (down - old + 1.5 * (more - less))**2).mean((1, 2, 3)) / 2
            require_textbook(each, parameters, total, losses, ours)
            trainee.optimizer.zero_grad()
            other.optimizer.zero_grad()


@pytest.mark.parametrize("kind", [{}, {"kind": "loha"}, {"kind": "lokr"}], ids=str)
def test_negated_adapters_are_subtracted(make, setup_of, kind):
    """As far as a nearly linear model tells: the two differences to the base are each other's opposite. Also after an
    error all is as before."""
    trainee = create_state(setup_of(make(), lora={"rank": 2, **kind}), CPU)
    scattered(trainee.denoiser.parameters, 3)
    layer = next(module for module in trainee.denoiser.model.modules() if hasattr(module, "base_layer"))
    given = torch.randn(3, layer.base_layer.in_features)
    with torch.no_grad():
        base, up = layer.base_layer(given), layer(given)
        with pytest.raises(ZeroDivisionError), at_weight(trainee.denoiser.model, -1):
            down = layer(given)
            1 / 0  # noqa: B018
        assert torch.allclose(up - base, base - down, atol=1e-5) and not torch.allclose(up, base, atol=1e-3)
        assert torch.equal(layer(given), up)


def test_the_file_moves_pictures_both_ways(make, setup_of, tiny_model, tmp_path):
    """Loaded by diffusers, at weight 1 and -1: what the model predicts moves along the difference of the prompts."""
    made = make()
    go(setup_of(made, steps=60, batch_size=4, optimizer={"lr": 3e-3}, lora={"rank": 8, "targets": "kohya"},
                 slider={**SLIDER, "neutral": "", "strength": 2.0}), tmp_path / "run")
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, low_cpu_mem_usage=False)
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    latent = torch.stack([torch.from_numpy(made.latents[sample.views[0].latent]) for sample in made.samples
                          if sample.bucket == made.samples[0].bucket])
    timestep = torch.full((len(latent),), 500)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    noised = scheduler.add_noise((latent - 0.125) * 0.5, noise, timestep)

    def said(text):
        with torch.no_grad():
            return pipeline.unet(noised, timestep, row(made, text).expand(len(latent), -1, -1)).sample

    old, wanted = said(""), 2 * (said("a red circle") - said("a blue square"))
    pipeline.load_lora_weights(tmp_path / "run" / "lora.safetensors", adapter_name="slider")
    for weight in (1.0, -1.0):
        pipeline.set_adapters("slider", [weight])
        moved = said("") - old
        assert float(torch.cosine_similarity(moved.reshape(1, -1), weight * wanted.reshape(1, -1))) > 0.8
        assert float((moved * weight * wanted).sum() / (wanted * wanted).sum()) == pytest.approx(1, abs=0.5)


def test_validation_sees_both_directions(make, setup_of, tiny_model):
    """Adapters that still add nothing miss both by the difference of the prompts."""
    made = make()
    setup = setup_of(made, validation={"timesteps": 2}, loss={"masked": False}, slider={**SLIDER, "strength": 2.0})
    trainee = create_state(setup, CPU)
    found = validate(trainee.denoiser, trainee.model, Rows(setup.index), setup, trainee.slide)
    requests = draws.validation(setup.index, 1, count=2, timesteps=1000, most=setup.config.validation.most)
    base, errors = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False), []
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            noised = scheduler.add_noise((batch.latent_BChw.float() - 0.125) * 0.5, batch.noise_BChw, batch.timestep_B)
            more, less = (base(noised, batch.timestep_B, row(made, text)).sample for text in SLIDER.values())
            errors.append(float(((2 * (more - less))**2).mean()))
    assert found.loss == pytest.approx(sum(errors) / len(errors), rel=1e-4) and found.loss > 0


@pytest.mark.parametrize(("settings", "why"), [
    ({"method": "full"}, "method is 'full', which trains the model's own weights"),
    ({"lora": {"init": "pissa"}}, "lora.init is 'pissa', whose adapters are a part of the base"),
    ({"lora": {"dora": True}}, "lora.dora is on, which trains lengths of the base's rows")])
def test_what_cannot_be_subtracted_is_no_slider(make, settings, why):
    report = check(RunRequest(manifest=make().path), parse({**settings, "slider": SLIDER}, "test"))
    assert [fault.message for fault in report.faults] == [
        f"slider is on, which trains adapters at weight 1 and -1, but {why}"]


def test_its_prompts_have_rows_and_its_costs_are_said(make):
    made = make()
    asked = parse({"slider": {"positive": "a green cube"}}, "test")
    (fault,) = check(RunRequest(manifest=made.path), asked).faults
    assert fault.message == ("slider has 'a green cube', expected \"\" or a prompt of the manifest: 'a red circle', "
                             "'a blue square'")
    report = check(RunRequest(manifest=made.path), parse({"slider": SLIDER}, "test"))
    assert not report.faults and any(note.startswith("slider is on: pictures teach nothing but where it is trained")
                                     for note in report.notes)
