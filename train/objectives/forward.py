"""The forward pass from a batch on its device to the loss, for both training and validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prep.loader.batches import Batch
from prep.loader.device import to_device
from prep.loader.latents import Latents
from prep.models.family import Conditions
from prep.training.schema import Loss, Preserve
from train.models.denoiser import Denoiser, predict
from train.models.lora import without_adapters
from train.objectives import loss
from train.objectives.slider import Slide

NOTHING = Preserve()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The denoiser's prediction and its target."""

    noised_BChw: Tensor  # what was predicted from, with these
    conditions: Conditions
    predicted_BChw: Tensor
    target_BChw: Tensor
    weight_B1hw: Tensor | None  # None: every cell has weight 1
    weight_B: Tensor  # weight of each sample's error
    base_BChw: Tensor | None = None  # what the base predicts
    neutral_BChw: Tensor | None = None  # of a slider, what the base predicts; its target at weight -1 is beyond it
    unmasked: float = 0.0  # weight of the difference to that in cells, as far as they have less than 1


def forward(denoiser: Denoiser, batch: Batch, latents: Latents, settings: Loss, preserve: Preserve = NOTHING,
            slide: Slide | None = None, *, together: bool = False) -> Prediction:
    """One forward pass over `batch`, which is on the denoiser's device; and before it others without the adapters, if
    what is to `preserve`, or a slider, needs them. `together`: with other processes, which must make as many."""
    kind, level_B = denoiser.prediction, denoiser.levels[batch.timestep_B]
    latent_BChw = latents.normalize(batch.latent_BChw)
    noised_BChw = loss.noised(kind, latent_BChw, batch.input_noise_BChw, level_B)
    conditions = Conditions(text=batch.text, sizes_B6=batch.sizes_B6,
                            references=[latents.normalize(reference_BChw) for reference_BChw in batch.references],
                            inpaint_mask=None if batch.inpaint_mask_BMhw is None else
                            batch.inpaint_mask_BMhw.to(torch.float32) / 255)
    base_BChw = neutral_BChw = None
    if slide is not None:
        conditions = slide.asked(conditions)
    shown = preserve.prior and (together or any(draw.prior for draw in batch.draws))
    if shown or (preserve.unmasked and batch.mask_B1hw is not None):
        base_BChw = _of_base(denoiser, noised_BChw, batch.timestep_B, conditions)
    predicted_BChw = predict(denoiser, noised_BChw, batch.timestep_B, conditions)
    if slide is None:
        target_BChw = loss.target(kind, latent_BChw, batch.noise_BChw, level_B)
    else:
        neutral_BChw, target_BChw = slide.targets(denoiser, noised_BChw, batch.timestep_B, conditions)
    if base_BChw is not None and shown:
        prior_B = to_device(torch.tensor([draw.prior for draw in batch.draws]), denoiser.device)
        target_BChw = torch.where(prior_B[:, None, None, None], base_BChw, target_BChw)
    weight_B1hw = None
    if batch.mask_B1hw is not None:
        weight_B1hw = loss.cell_weight(batch.mask_B1hw.to(torch.float32) / 255, settings.unmasked_weight)
    return Prediction(
        noised_BChw=noised_BChw, conditions=conditions,
        predicted_BChw=predicted_BChw, target_BChw=target_BChw, weight_B1hw=weight_B1hw, base_BChw=base_BChw,
        neutral_BChw=neutral_BChw, unmasked=preserve.unmasked,
        weight_B=batch.weight_B * loss.timestep_weight(settings, kind, level_B),
    )


def has_opposite(batch: Batch, slide: Slide | None) -> bool:
    """Whether a slider is trained, whose adapters predict once more at weight -1: by prompts, or of pairs."""
    return slide is not None or batch.opposite_BChw is not None


def opposite(denoiser: Denoiser, batch: Batch, latents: Latents, settings: Loss, given: Prediction,
             preserve: Preserve = NOTHING, *, together: bool = False) -> Prediction:
    """The other direction of a slider, of which `given` is that at weight 1; the adapters are at weight -1 by now.

    Of pairs, the other picture with the same noise, timestep, text and mask: visual sliders of Gandikota et al. (2023).
    """
    if batch.opposite_BChw is not None:
        return forward(denoiser, replace(batch, latent_BChw=batch.opposite_BChw), latents, settings, preserve,
                       together=together)
    assert given.neutral_BChw is not None, "only a slider has two directions"
    return replace(given, predicted_BChw=predict(denoiser, given.noised_BChw, batch.timestep_B, given.conditions),
                   target_BChw=2 * given.neutral_BChw - given.target_BChw)


@torch.no_grad()
def _of_base(denoiser: Denoiser, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    with without_adapters(denoiser.model):
        return predict(denoiser, noised_BChw, timestep_B, conditions).float()


def prompted_losses(denoiser: Denoiser, batch: Batch, given: Prediction, settings: Loss, prompts: Mapping[str, Tensor]
                    ) -> Tensor:
    """The difference to the base's prediction of each sample, `[B]`, from what `given` was predicted from, but for one
    of the `prompts`, whose rows are arrays `[prompts, …]`: which one, the sample's noise decides.

    What ai-toolkit calls blank prompt preservation for the row of no prompt, and for captions without their trigger
    differential output preservation.
    """
    count = len(next(iter(prompts.values())))
    chosen_B = to_device(torch.tensor([draw.noise[0] % count for draw in batch.draws]), denoiser.device)
    conditions = replace(given.conditions, text={name: value[chosen_B] for name, value in prompts.items()})
    base_BChw = _of_base(denoiser, given.noised_BChw, batch.timestep_B, conditions)
    predicted_BChw = predict(denoiser, given.noised_BChw, batch.timestep_B, conditions)
    return loss.per_sample(predicted_BChw, base_BChw, None, normalize_area=False, huber=settings.huber)


def sample_losses(prediction: Prediction, settings: Loss) -> Tensor:
    """The loss of each sample, `[B]`, not yet multiplied by `prediction.weight_B`: its error; and where its mask takes
    weight from cells, that much of the difference to the base's prediction, as masked prior preservation of OneTrainer
    and the inverted mask prior of ai-toolkit have it."""
    losses_B = loss.per_sample(prediction.predicted_BChw, prediction.target_BChw, prediction.weight_B1hw,
                               normalize_area=settings.normalize_area, huber=settings.huber)
    if prediction.base_BChw is None or prediction.weight_B1hw is None or not prediction.unmasked:
        return losses_B
    kept_B = loss.per_sample(prediction.predicted_BChw, prediction.base_BChw, 1 - prediction.weight_B1hw,
                             normalize_area=settings.normalize_area, huber=settings.huber)
    return losses_B + prediction.unmasked * kept_B
