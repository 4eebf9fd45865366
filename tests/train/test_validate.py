"""Validation: its loss against diffusers' way, and that neither seed nor training state changes what it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

from prep.batching.rng import draw_key, philox
from prep.loader import draws
from prep.loader.rows import Rows
from train.state import create_state
from train.validate import validate

CPU = torch.device("cpu")


def run(setup, trainee=None):
    trainee = trainee or create_state(setup, CPU)
    return validate(trainee.denoiser, trainee.model, Rows(setup.index), setup)


def test_its_loss_is_the_usual_one_over_fixed_noise_and_timesteps(make, setup_of, tiny_model):
    made = make()
    found = run(setup_of(made, validation={"timesteps": 2}, loss={"masked": False}))
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    losses = {250: [], 750: []}
    for sample in made.samples:
        if sample.role == "validation":
            latent = (torch.from_numpy(made.latents[sample.views[0].latent])[None] - 0.125) * 0.5
            text = torch.from_numpy(made.texts[sample.texts[0].key])[None]
            for at, each in losses.items():
                key = draw_key(0, 0, bytes.fromhex(sample.id), at, "validation")
                noise = torch.from_numpy(philox(key).standard_normal(latent.shape[1:], dtype="float32"))[None]
                timestep = torch.tensor([at])
                with torch.no_grad():
                    said = unet(scheduler.add_noise(latent, noise, timestep), timestep, text).sample
                each.append(float(torch.nn.functional.mse_loss(said, noise)))
    assert found.samples == 2 and found.timesteps == (250, 750)
    assert found.losses == pytest.approx([sum(each) / 2 for each in losses.values()], abs=1e-5)
    assert found.loss == pytest.approx(sum(sum(each) for each in losses.values()) / 4, abs=1e-5)


def test_the_seed_and_the_micro_batch_change_nothing(make, setup_of):
    made = make()
    one, other = run(setup_of(made, seed=1)), run(setup_of(made, seed=2, batch_size=3))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one == run(setup_of(made, seed=5, optimizer={"lr": 1.0}))


def test_masks_count_as_in_training(make, setup_of):
    made = make()
    assert run(setup_of(made, loss={"masked": True, "unmasked_weight": 0.0})).loss < run(
        setup_of(made, loss={"masked": False})).loss


def test_masks_are_normalized_as_in_training(make, setup_of):
    """Only the cells that train count, and the pictures of a small mask as much as those of a large one."""
    made = make()
    whole = run(setup_of(made, loss={"masked": True, "unmasked_weight": 0.0, "normalize_area": False})).loss
    assert run(setup_of(made, loss={"masked": True, "unmasked_weight": 0.0, "normalize_area": True})).loss > 1.2 * whole


def test_dropout_is_off_meanwhile_and_on_afterwards(make, setup_of):
    made = make()
    setup = setup_of(made, lora={"dropout": 0.9})
    trainee = create_state(setup, CPU)
    with torch.no_grad():
        for value in trainee.denoiser.parameters.values():
            value.normal_(std=0.3)
    assert run(setup, trainee) == run(setup, trainee)
    assert trainee.denoiser.model.training


def test_without_validation_samples_there_is_none(make, setup_of):
    assert run(setup_of(make(validation=0))) is None


def test_a_cap_takes_samples_from_all_of_them(make, setup_of):
    made = make(counts=(6, 6), validation=8)
    setup = setup_of(made)
    held_out = [int(sample) for members in setup.index.validation for sample in members]
    for most, wanted in ((3, [held_out[0], held_out[2], held_out[5]]), (8, held_out), (0, held_out), (99, held_out)):
        requests = draws.validation(setup.index, 4, count=2, timesteps=1000, most=most)
        shown = [shot.sample for request in requests for shot in request.draws]
        assert shown == [sample for sample in wanted for _ in range(2)]
    assert run(setup_of(made, validation={"most": 3})).samples == 3


def test_the_loss_of_each_source_and_its_spread(make, setup_of, monkeypatch):
    made = make(counts=(4, 4), validation=4)
    setup = setup_of(made, validation={"timesteps": 2})
    alone = run(setup)
    assert alone.sources == {}
    held_out = [int(sample) for members in setup.index.validation for sample in members]
    source = setup.index.samples.source.copy()
    source[held_out[-1]] = 1
    samples = replace(setup.index.samples, source=source)
    document = {**setup.manifest.document, "sources": ["../x/photos", "../y/photos"]}
    manifest = replace(setup.manifest, document=document)
    found = run(replace(setup, manifest=manifest, index=replace(setup.index, samples=samples)))
    assert found.loss == alone.loss and list(found.sources) == ["photos 1", "photos 2"]
    parts = list(found.sources.values())
    assert [part.samples for part in parts] == [3, 1] and parts[1].spread == 0.0
    assert sum(part.loss * part.samples for part in parts) / 4 == pytest.approx(found.loss)
    mean = [parts[0].loss] * 3 + [parts[1].loss]
    between = sum((one - found.loss) ** 2 for one in mean) / 4
    assert found.spread ** 2 == pytest.approx(between + parts[0].spread ** 2 * 3 / 4)
