"""The loss against diffusers' way of computing it, and the masked one against a formula written in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from prep.training.schema import Loss
from train.objectives import loss


def schedule(kind: str) -> DDPMScheduler:
    return DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=kind)


@pytest.fixture
def drawn():
    torch.manual_seed(0)
    return torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6), torch.tensor([0, 500, 999])


def test_noised_is_what_diffusers_adds(drawn):
    latent, noise, timestep = drawn
    scheduler = schedule("epsilon")
    ours = loss.noised("epsilon", latent, noise, scheduler.alphas_cumprod[timestep])
    assert torch.allclose(ours, scheduler.add_noise(latent, noise, timestep), atol=1e-6)


def test_velocity_is_what_diffusers_computes(drawn):
    latent, noise, timestep = drawn
    scheduler = schedule("v_prediction")
    ours = loss.target("v_prediction", latent, noise, scheduler.alphas_cumprod[timestep])
    assert torch.allclose(ours, scheduler.get_velocity(latent, noise, timestep), atol=1e-6)
    assert loss.target("epsilon", latent, noise, scheduler.alphas_cumprod[timestep]) is noise


@pytest.mark.parametrize("normalize", [False, True])
def test_masked_means_equal_a_formula_in_numpy(drawn, normalize):
    said, wanted, _ = drawn
    mask = np.random.default_rng(0).random((3, 1, 5, 6), dtype=np.float32)
    cells = loss.cell_weight(torch.from_numpy(mask), 0.1)
    found = loss.per_sample(said, wanted, cells, normalize_area=normalize)
    for b in range(3):
        error = area = 0.0
        for c in range(4):
            for y in range(5):
                for x in range(6):
                    cell = mask[b, 0, y, x] * 1.0 + (1 - mask[b, 0, y, x]) * 0.1
                    error += cell * float(said[b, c, y, x] - wanted[b, c, y, x]) ** 2
                    area += cell if normalize else 1
        assert float(found[b]) == pytest.approx(error / area, rel=1e-5)


def test_area_is_normalized_as_in_onetrainer():
    """Its `masked_losses`: losses times the mask (at least the unmasked weight), divided by each sample's mean of that.

    Four pictures with masks of 100, 50, 10 and 2 percent, and the same error everywhere, then count the same.
    """
    torch.manual_seed(0)
    said, wanted = torch.randn(4, 4, 10, 10), torch.randn(4, 4, 10, 10)
    mask = (torch.arange(100).view(1, 1, 10, 10) < torch.tensor([100, 50, 10, 2]).view(4, 1, 1, 1)).float()
    for unmasked in (0.0, 0.1):
        clamped = mask.clamp(unmasked, 1)
        losses = (said - wanted) ** 2 * clamped / clamped.mean(dim=(1, 2, 3), keepdim=True)
        found = loss.per_sample(said, wanted, loss.cell_weight(mask, unmasked), normalize_area=True)
        assert torch.allclose(found, losses.mean(dim=(1, 2, 3)), rtol=1e-5)
    even = loss.per_sample(torch.ones(4, 4, 10, 10), torch.zeros(4, 4, 10, 10), mask, normalize_area=True)
    assert torch.allclose(even, torch.ones(4))


def test_without_mask_it_is_the_mean(drawn):
    said, wanted, _ = drawn
    for normalize in (False, True):
        found = loss.per_sample(said, wanted, None, normalize_area=normalize)
        assert torch.allclose(found.mean(), torch.nn.functional.mse_loss(said, wanted))


def test_all_masked_out_has_no_error(drawn):
    said, wanted, _ = drawn
    said.requires_grad_(True)
    found = loss.per_sample(said, wanted, loss.cell_weight(torch.zeros(3, 1, 5, 6), 0.0), normalize_area=True)
    found.sum().backward()
    assert found.tolist() == [0, 0, 0] and float(said.grad.abs().sum()) == 0


def test_min_snr_follows_the_paper():
    """Equation 6 of Hang et al.: min(snr, gamma) / snr for the noise, / (snr + 1) for the velocity."""
    alpha = torch.tensor([0.99, 0.5, 0.01])
    snr = np.array([99.0, 1.0, 0.01 / 0.99])
    epsilon = loss.min_snr_weight("epsilon", alpha, 5.0).numpy()
    velocity = loss.min_snr_weight("v_prediction", alpha, 5.0).numpy()
    assert epsilon == pytest.approx(np.minimum(snr, 5) / snr, rel=1e-4)
    assert velocity == pytest.approx(np.minimum(snr, 5) / (snr + 1), rel=1e-4)
    assert loss.min_snr_weight("epsilon", alpha, 0.0).tolist() == [1, 1, 1]


def test_debiased_weights_follow_the_paper():
    """Yu et al. 2023: 1 / sqrt(SNR)."""
    scheduler, timesteps = schedule("epsilon"), torch.tensor([1, 300, 999])
    wanted = 1 / compute_snr(scheduler, timesteps).sqrt()
    found = loss.timestep_weight(Loss(weighting="debiased"), "epsilon", scheduler.alphas_cumprod[timesteps])
    assert torch.allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize(("ours", "theirs"), [("cosmap", "cosmap"), ("inverse-square", "sigma_sqrt"), ("none", "none")])
def test_weights_of_flows_are_those_of_diffusers(ours, theirs):
    sigma = torch.tensor([0.01, 0.3, 1.0])
    wanted = compute_loss_weighting_for_sd3(theirs, sigma)
    assert torch.allclose(loss.timestep_weight(Loss(weighting=ours), "flow", sigma), wanted, rtol=1e-5)


def test_huber_is_squared_up_to_its_bound_and_linear_beyond():
    """Twice equation 2.3 of Huber 1964: d² up to c, then 2 c |d| - c²."""
    said = torch.tensor([0.0, 0.05, 0.1, 0.5, -2.0]).view(5, 1, 1, 1)
    found = loss.per_sample(said, torch.zeros_like(said), None, normalize_area=False, huber=0.1)
    assert found.tolist() == pytest.approx([0.0, 0.0025, 0.01, 2 * 0.1 * 0.5 - 0.01, 2 * 0.1 * 2 - 0.01], rel=1e-5)
    assert loss.per_sample(said, torch.zeros_like(said), None, normalize_area=False).tolist() == pytest.approx(
        [0.0, 0.0025, 0.01, 0.25, 4.0], rel=1e-5)
