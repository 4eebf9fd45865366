"""A slider learns from pairs of pictures, both ways: by a textbook's formula, and in a library that loads it."""

from __future__ import annotations

import pytest
import torch
from beside import require_textbook, scattered
from counted_steps import counted
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from runs import events, go
from safetensors.torch import load_file

from prep.errors import CacheError
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import write_manifest
from train.check import check
from train.cli.summary import plan_lines
from train.config.load import parse
from train.memory.room import room_of
from train.memory.step import count
from train.setup import RunRequest
from train.state import create_state, forward_backward
from train.validate import validate

CPU = torch.device("cpu")


def stored(made, draws, which):
    """The latents that draws show, or those of the opposites, as the model takes them; from the values behind the rows.
    """
    by_name = {sample.name: sample.views[0] for sample in made.samples}
    views = [by_name[name] for name in draws]
    keys = [view.latent if which == "A" else view.references[0].latent for view in views]
    return (torch.stack([torch.from_numpy(made.latents[key]) for key in keys]) - 0.125) * 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_pictures_are_those_of_the_formula(make, setup_of, tiny_model, checkpointing):
    """Their losses, and the gradients of one backward pass through both: the same noise and timestep, A with the
    adapters added and B with them subtracted. Latents are means, also where deviations are stored."""
    made = make(weight=0.5, pairs=True, stds=True)
    setup, plain = (setup_of(made, batch_size=2, loss={"masked": False}, lora={"rank": 2}, gradient_checkpointing=each)
                    for each in (checkpointing, False))
    trainee, other = create_state(setup, CPU), create_state(plain, CPU)
    for each in (trainee, other):
        scattered(each.denoiser.parameters, 3)
    model, parameters = other.denoiser.model, other.denoiser.parameters
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    requests = draws.training(setup.index, setup.plan, 0, 2, timesteps=1000)
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed:
        for batch in feed:
            total, losses = forward_backward(trainee, setup.config, batch)
            ours = {name: value.grad.clone() for name, value in trainee.denoiser.parameters.items()}
            names = [setup.index.samples.name(draw.sample) for draw in batch.draws]
            text, noise, at = batch.text["hidden"].float(), batch.noise_BChw, batch.timestep_B
            turned = {name: -value for name, value in parameters.items() if "lora_B" in name}
            up = model(scheduler.add_noise(stored(made, names, "A"), noise, at), at, text).sample
            down = torch.func.functional_call(
                model, turned, (scheduler.add_noise(stored(made, names, "B"), noise, at), at, text)).sample
            each = (((up - noise)**2).mean((1, 2, 3)) + ((down - noise)**2).mean((1, 2, 3))) / 2
            require_textbook(each, parameters, total, losses, ours)
            trainee.optimizer.zero_grad()
            other.optimizer.zero_grad()


@pytest.mark.slow
def test_the_file_moves_pictures_both_ways(make, setup_of, tiny_model, tmp_path):
    """Loaded by diffusers: noise in held-out pictures A is known best at weight 1, in B at -1; and what the model makes
    of something between both is more like A at 1 than at -1."""
    made = make(pairs=True, counts=(4, 0))
    lora = {"rank": 8, "targets": "kohya-conv", "conv_rank": 8, "conv_alpha": 8}
    go(setup_of(made, steps=60, batch_size=4, optimizer={"lr": 1e-2}, lora=lora, loss={"masked": False}),
       tmp_path / "run")
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, low_cpu_mem_usage=False)
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    held_out, at = [sample for sample in made.samples if sample.role == "validation"], torch.tensor([300, 300])
    a, b = (stored(made, [sample.name for sample in held_out], which) for which in "AB")
    text = torch.stack([torch.from_numpy(made.texts[sample.texts[0].key]) for sample in held_out])
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(0))
    pipeline.load_lora_weights(tmp_path / "run" / "lora.safetensors", adapter_name="slider")

    def said(latent, weight):
        pipeline.set_adapters("slider", [weight])
        with torch.no_grad():
            return pipeline.unet(scheduler.add_noise(latent, noise, at), at, text).sample

    for latent, own in ((a, 1.0), (b, -1.0)):
        errors = {weight: float((said(latent, weight) - noise).norm()) for weight in (1.0, 0.0, -1.0)}
        assert min(errors, key=errors.__getitem__) == own, errors
    moved = said((a + b) / 2, -1.0) - said((a + b) / 2, 1.0)  # less noise like A is more picture like A
    assert float((moved * (a - b)).sum()) > 0


def test_validation_sees_both_pictures(make, setup_of, tiny_model):
    """Adapters that still add nothing miss the noise of both as the base does."""
    made = make(pairs=True)
    setup = setup_of(made, validation={"timesteps": 2}, loss={"masked": False})
    trainee = create_state(setup, CPU)
    found = validate(trainee.denoiser, trainee.model, Rows(setup.index), setup)
    requests = draws.validation(setup.index, 1, count=2, timesteps=1000, most=setup.config.validation.most)
    base, errors = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False), []
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler")
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            names = [setup.index.samples.name(draw.sample) for draw in batch.draws]
            for latent in (stored(made, names, which) for which in "AB"):
                noised = scheduler.add_noise(latent, batch.noise_BChw, batch.timestep_B)
                said = base(noised, batch.timestep_B, batch.text["hidden"].float()).sample
                errors.append(float(((said - batch.noise_BChw)**2).mean()))
    assert found.loss == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_a_resumed_run_is_the_same_to_the_last_bit(make, setup_of, tmp_path):
    """With what the base is to keep: of a masked area, of samples of role "prior", and of another prompt. A run of
    pairs does not go on with the same pictures as conditions, or as nothing."""
    made = make(pairs=True, prior=True, prompts="a red circle\n")
    kept = {"unmasked": 0.5, "prior": True, "prompted": 0.5, "prompts": ["a red circle"]}
    setups = [setup_of(made, steps=steps, batch_size=2, preserve=kept, lora={"rank": 2}, validation={"every": 2},
                       optimizer={"lr": 1e-2}, schedule={"name": "constant"}) for steps in (2, 4)]
    go(setups[1], tmp_path / "whole")
    go(setups[0], tmp_path / "run")
    go(setups[1], tmp_path / "run", resume=True)
    whole, parts = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole) and whole.keys() == parts.keys()
    losses = [[(each["step"], each["loss"]) for each in events(tmp_path / name)
               if each["event"] in ("step", "validation")] for name in ("whole", "run")]
    assert losses[0] == losses[1] and len(losses[0]) > 4
    document = {**setups[0].manifest.document}
    document["latents"] = {**document["latents"], "references": {"fit": "bucket", "resolution": 0}}
    write_manifest(made.path, document)
    with pytest.raises(CacheError, match="pairs of pictures: none, was on"):
        go(setup_of(made, steps=6, batch_size=2, preserve=kept, lora={"rank": 2}), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("settings", "why"), [
    ({"method": "full"}, "method is 'full', which trains the model's own weights"),
    ({"lora": {"init": "pissa"}}, "lora.init is 'pissa', whose adapters are a part of the base"),
    ({"slider": {"positive": "a red circle"}}, None)])
def test_what_cannot_be_trained_from_pairs(make, settings, why):
    report = check(RunRequest(manifest=make(pairs=True).path), parse(settings, "test"))
    assert [fault.message for fault in report.faults] == [
        f"the pictures are pairs, which train adapters at weight 1 and -1, but {why}" if why else
        "slider is on, which trains a slider between two prompts, but the pictures are pairs, which train one between "
        "themselves"]
    assert "--references none" in report.faults[0].hint


def test_a_manifest_of_pairs_has_the_other_of_each(make):
    def claim(document):
        document["latents"]["references"] = {"fit": "pair", "resolution": 0}

    made = make(references=[(64, 64)], change=claim)
    with pytest.raises(CacheError, match=r"expected one reference of its size in family 'sd15', of pairs"):
        open_index(made.manifest)


def test_a_check_counts_pairs_and_keeps_them_whole(make):
    made = make(pairs=True)
    report = check(RunRequest(manifest=made.path), parse({"precision": "fp32"}, "test"))
    assert not report.faults and any(
        note.startswith("a slider is trained from 7 pairs of pictures: ") for note in report.notes)
    assert "reference" not in "".join(plan_lines(report))
    (wanted, _), given = counted(report.setup), count(report.setup, room_of("cpu")).parts
    assert sum(given.values()) == pytest.approx(sum(wanted.values()), rel=0.05)
    dropped = check(RunRequest(manifest=made.path), parse({"each_reference_dropout": 0.5}, "test"))
    (fault,) = dropped.faults
    assert "each_reference_dropout" not in "".join(dropped.notes)
    assert fault.message == ("each_reference_dropout is above 0, expected 0 for pairs of pictures, of which a slider "
                             "needs both")
