"""The whole step: equal to the usual way of computing it, and blind to how it is cut into micro-batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from beside import require_textbook, scattered
from diffusers import DDPMScheduler, UNet2DConditionModel
from real_manifest import CONTEXT

from prep.errors import ConfigError
from prep.keys import text_key, unconditional_key
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.latents import latents_of
from prep.loader.noise import PLAIN, Noise
from prep.loader.rows import Rows
from train.check import check
from train.config.load import parse
from train.failures import Progress
from train.loop import accumulate
from train.models.lora import without_adapters
from train.objectives.forward import forward, sample_losses
from train.sampling.prompts import places_of
from train.setup import RunRequest
from train.state import create_state, forward_backward

CPU = torch.device("cpu")


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("noise", [PLAIN, Noise(offset=0.1, pyramid=0.3, perturbation=0.5)], ids=["plain", "mixed"])
def test_loss_from_the_cache_equals_the_usual_way(make, setup_of, tiny_model, prediction, noise):
    """diffusers' scheduler, `F.mse_loss`, the same noise and timesteps: float32, 1e-5.

    Input perturbation as diffusers' text-to-image example has it: the input is made with new noise, the target is not.
    """
    made = make(prediction=prediction)
    setup = setup_of(made, batch_size=3)
    trainee = create_state(setup, CPU)
    scheduler = DDPMScheduler.from_pretrained(tiny_model / "scheduler", prediction_type=prediction)
    unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    requests = draws.training(setup.index, setup.plan, 0, 3, timesteps=1000, noise=noise)
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            ours = sample_losses(forward(trainee.denoiser, batch, latents_of(made.manifest), setup.config.loss),
                                 setup.config.loss)
            latent = (torch.stack([torch.from_numpy(made.latents[made.samples[shot.sample].views[0].latent])
                                   for shot in batch.draws]) - 0.125) * 0.5
            text = torch.stack([torch.from_numpy(made.texts[made.samples[shot.sample].texts[0].key])
                                for shot in batch.draws])
            noised = scheduler.add_noise(latent, batch.input_noise_BChw, batch.timestep_B)
            wanted = batch.noise_BChw if prediction == "epsilon" else scheduler.get_velocity(
                latent, batch.noise_BChw, batch.timestep_B)
            usual = torch.nn.functional.mse_loss(unet(noised, batch.timestep_B, text).sample, wanted)
            assert float(ours.mean()) == pytest.approx(float(usual), abs=1e-5)


@pytest.mark.parametrize("settings", [
    {"preserve": {"prior": True}}, {"preserve": {"unmasked": 0.7}, "loss": {"unmasked_weight": 0.0, "huber": 0.3}},
    {"preserve": {"prior": True, "unmasked": 2.0}, "loss": {"normalize_area": True}}], ids=str)
def test_what_the_base_predicts_is_preserved(make, setup_of, tiny_model, settings):
    """A UNet of the library beside the one with adapters, and the sums of a textbook: a sample of role "prior" is
    compared with the base instead of the noise, and where no mask is, all are, weighted."""
    made = make(prior=True)
    setup = setup_of(made, **{"batch_size": 3, "lora": {"rank": 2, "dropout": 0.5}, **settings})
    trainee, loss, preserve = create_state(setup, CPU), setup.config.loss, setup.config.preserve
    scattered(trainee.denoiser.parameters, 3)
    base = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    requests, roles = draws.training(setup.index, setup.plan, 0, 4, timesteps=1000), set()
    with batches(Rows(setup.index), requests, masked=True, pinned=False) as feed, torch.no_grad():
        trainee.denoiser.model.eval()
        for batch in feed:
            ours = sample_losses(forward(trainee.denoiser, batch, latents_of(made.manifest), loss, preserve), loss)
            latent = (batch.latent_BChw.float() - 0.125) * 0.5
            noised = DDPMScheduler.from_pretrained(tiny_model / "scheduler").add_noise(
                latent, batch.noise_BChw, batch.timestep_B)
            text = batch.text["hidden"].float()
            old = base(noised, batch.timestep_B, text).sample
            new = trainee.denoiser.model(noised, batch.timestep_B, text).sample
            assert (old - new).abs().max() > 0.01
            for number, shot in enumerate(batch.draws):
                role = made.samples[shot.sample].role
                roles.add(role)
                mask = batch.mask_B1hw[number].float() / 255
                wanted = old[number] if role == "prior" and preserve.prior else batch.noise_BChw[number]
                cells = mask + (1 - mask) * loss.unmasked_weight
                usual = (cells * error_of(new[number] - wanted, loss.huber)).mean()
                usual = usual / cells.mean() if loss.normalize_area else usual
                kept = ((1 - cells) * error_of(new[number] - old[number], loss.huber)).mean() * preserve.unmasked
                kept = kept / (1 - cells).mean().clamp(min=1e-12) if loss.normalize_area else kept
                assert float(ours[number]) == pytest.approx(float(usual + kept), abs=1e-5)
    assert roles == {"train", "prior"}


def test_what_the_base_predicts_for_other_prompts_is_preserved(make, setup_of, tiny_model):
    """Its difference is added to each sample's loss, with the sample's weight, and the gradients are those of the sum:
    computed by one backward pass through a textbook's formula."""
    made = make(weight=0.5)
    setup = setup_of(made, batch_size=2, loss={"masked": False}, lora={"rank": 2},
                     preserve={"prompted": 0.3, "prompts": ["", "a red circle"]})
    trainee, words = create_state(setup, CPU), set()
    scattered(trainee.denoiser.parameters, 3)
    base = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    keys = [unconditional_key(CONTEXT), text_key("a red circle", CONTEXT)]
    requests = draws.training(setup.index, setup.plan, 0, 8, timesteps=1000)
    with batches(Rows(setup.index), requests, masked=False, pinned=False) as feed:
        for batch in feed:
            total, losses = forward_backward(trainee, setup.config, batch)
            ours = {name: value.grad.clone() for name, value in trainee.denoiser.parameters.items()}
            trainee.optimizer.zero_grad()
            noised = DDPMScheduler.from_pretrained(tiny_model / "scheduler").add_noise(
                (batch.latent_BChw.float() - 0.125) * 0.5, batch.noise_BChw, batch.timestep_B)
            chosen = [shot.noise[0] % 2 for shot in batch.draws]
            words.update(chosen)
            other = torch.stack([torch.from_numpy(made.texts[keys[number]]) for number in chosen])
            new = trainee.denoiser.model(noised, batch.timestep_B, batch.text["hidden"].float()).sample
            kept = trainee.denoiser.model(noised, batch.timestep_B, other).sample
            with torch.no_grad():
                old = base(noised, batch.timestep_B, other).sample
            each = ((new - batch.noise_BChw)**2).mean(dim=(1, 2, 3)) + 0.3 * ((kept - old)**2).mean(dim=(1, 2, 3))
            require_textbook(each, trainee.denoiser.parameters, total, losses, ours)
            trainee.optimizer.zero_grad()
    assert words == {0, 1}


def test_prompts_without_rows_cannot_be_preserved(make, tmp_path):
    made = make()
    asked = parse({"preserve": {"prompted": 1.0, "prompts": ["", "a green cube"]}}, "test")
    (fault,) = check(RunRequest(manifest=made.path), asked).faults
    assert fault.message == ("preserve.prompts has 'a green cube', expected \"\" or a prompt of the manifest: "
                             "'a red circle', 'a blue square'")
    assert fault.hint.startswith("write it into a file of prompts, and prep prompts prompts.txt --manifest ")
    with pytest.raises(ConfigError) as error:
        places_of(SimpleNamespace(seeing=True), [""], "preserve.prompts")
    assert error.value.message == ("preserve.prompts names prompts, which have no rows of their own where text also "
                                   "shows references")
    for name, value in (("prior", True), ("unmasked", 0.5), ("prompted", 1.0)):
        report = check(RunRequest(manifest=made.path), parse({"method": "full", "preserve": {name: value}}, "test"))
        (fault,) = report.faults
        assert fault.message == f"preserve.{name} is on, which is for the frozen base of a LoRA, but method is 'full'"


def error_of(difference, huber):
    """The square; beyond `huber` the line that continues it."""
    far = huber * (2 * difference.abs() - huber)
    return torch.where(difference.abs() > huber, far, difference**2) if huber else difference**2


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"init": "pissa"}, {"kind": "loha"}, {"kind": "lokr"}], ids=str)
def test_without_adapters_a_denoiser_is_its_base(make, setup_of, tiny_model, kind):
    """Also after an error; and what is trained of it stays so."""
    trainee = create_state(setup_of(make(), lora={"rank": 2, **kind}), CPU)
    scattered(trainee.denoiser.parameters, 3)
    given = torch.randn(1, 4, 8, 8), torch.tensor([7]), torch.randn(1, 5, 32)
    model = trainee.denoiser.model.eval()
    base = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        changed = model(*given).sample
        with without_adapters(model):
            assert torch.allclose(model(*given).sample, base(*given).sample, atol=1e-5)
        assert torch.equal(model(*given).sample, changed)
        assert not torch.allclose(changed, base(*given).sample, atol=1e-2)
        with pytest.raises(ZeroDivisionError), without_adapters(model):
            1 / 0  # noqa: B018
        assert torch.equal(model(*given).sample, changed)
    assert {name for name, value in model.named_parameters() if value.requires_grad} == trained


def bucket_of(setup, shots):
    return int(setup.index.samples.bucket[shots[0].sample])


def gradients(setup, shots, cut, settings):
    """Gradients of one step of `shots`, cut into micro-batches of `cut`."""
    trainee, denoiser = create_state(setup, CPU), None
    denoiser = trainee.denoiser
    with torch.no_grad():
        for name, value in denoiser.parameters.items():  # lora_B is 0 at first, and lora_A then has no gradient
            if "lora_B" in name:
                value.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    parts = [shots[start : start + cut] for start in range(0, len(shots), cut)]
    requests = (draws.BatchRequest(bucket=bucket_of(setup, part), draws=tuple(part)) for part in parts)
    with batches(Rows(setup.index), requests, masked=settings["masked"], pinned=False) as feed:
        gathered = accumulate(trainee, setup.config, feed, Progress(device=CPU))
    return {name: value.grad for name, value in denoiser.parameters.items()}, gathered


@pytest.mark.parametrize("settings", [{"masked": False}, {"masked": True}, {"masked": True, "normalize_area": True}],
                         ids=["plain", "masked", "area"])
def test_gradients_do_not_depend_on_the_cut(make, setup_of, settings):
    setup = setup_of(make(counts=(4, 3)), batch_size=4, loss=settings)
    request = next(request for request in draws.training(setup.index, setup.plan, 0, 2, timesteps=1000)
                   if len(request.draws) == 4)
    whole, summed = gradients(setup, request.draws, 4, settings)
    for cut in (1, 2):
        cut_up, other = gradients(setup, request.draws, cut, settings)
        assert other.samples == summed.samples == 4
        assert float(other.loss) == pytest.approx(float(summed.loss), rel=1e-4)
        for name, value in whole.items():
            assert float((value - cut_up[name]).norm()) <= 1e-4 * float(value.norm()), name


def test_a_large_picture_counts_once_beside_a_small_one(make, setup_of):
    """Two buckets in one step: its gradient is the mean of each picture's own."""
    settings = {"masked": False}
    setup = setup_of(make(counts=(1, 1), validation=0), batch_size=2, micro_batch=1, loss=settings)
    requests = list(draws.training(setup.index, setup.plan, 0, 1, timesteps=1000))
    sizes = {setup.manifest.buckets[request.bucket] for request in requests}
    assert len(sizes) == 2 and len({width * height for width, height in sizes}) == 2
    both, summed = gradients(setup, [shot for request in requests for shot in request.draws], 1, settings)
    alone = [gradients(setup, request.draws, 1, settings) for request in requests]
    assert float(summed.loss) == pytest.approx(sum(float(one.loss) for _, one in alone), rel=1e-5)
    for name, value in both.items():  # alone a picture is a short step: its gradient is divided by batch_size, too
        assert torch.allclose(value, alone[0][0][name] + alone[1][0][name], rtol=1e-4, atol=1e-8), name


def test_a_short_step_moves_the_weights_by_its_share(make, setup_of):
    """One picture of a batch of four has the gradient that it has among four."""
    settings = {"masked": False}
    setup = setup_of(make(counts=(4, 0), validation=0), batch_size=4, loss=settings)
    (request,) = draws.training(setup.index, setup.plan, 0, 1, timesteps=1000)
    whole, _ = gradients(setup, request.draws, 4, settings)
    parts = [gradients(setup, [shot], 1, settings)[0] for shot in request.draws]
    for name, value in whole.items():
        assert float((value - sum(part[name] for part in parts)).norm()) <= 1e-4 * float(value.norm()), name
