"""The denoiser that is trained, and its noise schedule. Nothing here loads a VAE or a text encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn

from prep.errors import ModelError, first_line
from prep.loader.device import autocast, compute_dtype, module_to_device, to_device
from prep.models.files import FETCH_AGAIN, read_config
from prep.models.loading import load_model
from prep.models.pipeline import weighted_files
from prep.parse import brief
from train.config.schema import Config
from train.models import lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoiser:
    """A UNet ready to be trained or sampled."""

    unet: Any
    alphas: Tensor  # [timesteps] cumulative products of the noise schedule, on the device
    prediction: str  # epsilon | v_prediction
    parameters: Mapping[str, nn.Parameter]  # the trained parameters, float32; empty if `adapt` is false
    device: torch.device
    dtype: torch.dtype  # of the forward pass

    @property
    def timesteps(self) -> int:
        """Number of timesteps of the noise schedule."""
        return len(self.alphas)


def load(model: Path, config: Config, prediction: str, device: torch.device, *, adapt: bool = True) -> Denoiser:
    """Loads the denoiser below `model` to `device`, ready to train as `config` says; `adapt=False`: only to sample.

    With a frozen base (LoRA), bfloat16 precision halves its memory: only the trained parameters are float32.
    Raises `ModelError`.
    """
    quiet()
    dtype = compute_dtype(config.precision, device)
    unet = _load_unet(model)
    trained: Mapping[str, nn.Parameter] = {}
    if adapt and config.method == "full":
        trained = dict(unet.named_parameters())
        unet.requires_grad_(True)
    else:
        module_to_device(unet, torch.device("cpu"), dtype).requires_grad_(False)
        if adapt:
            trained = lora.attach(unet, config.lora, config.seed)
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    module_to_device(unet, device)
    alphas = noise_schedule(model)
    unet.train(adapt)
    return Denoiser(unet=unet, alphas=to_device(alphas, device), prediction=prediction, device=device, dtype=dtype,
                    parameters={name: value for name, value in unet.named_parameters() if name in trained})


def predict(denoiser: Denoiser, noised_BChw: Tensor, timestep_B: Tensor, text_BLD: Tensor) -> Tensor:
    """The denoiser's prediction, `[B, C, h, w]`."""
    with autocast(denoiser.device, denoiser.dtype):
        answer: Tensor = denoiser.unet(noised_BChw.to(denoiser.dtype), timestep_B, text_BLD.to(denoiser.dtype)).sample
    return answer


@contextmanager
def evaluating(denoiser: Denoiser) -> Iterator[None]:
    """Puts the denoiser in evaluation mode (no dropout) inside the `with` block, then restores its mode."""
    before = denoiser.unet.training
    denoiser.unet.eval()
    try:
        yield
    finally:
        denoiser.unet.train(before)


def noise_schedule(model: Path) -> Tensor:
    """Cumulative products of alphas, float32 `[timesteps]`, as diffusers computes them from the scheduler's config.

    Raises `ModelError`, also for alphas outside of (0, 1].
    """
    alphas: Tensor = load_scheduler(diffusers.DDPMScheduler, model).alphas_cumprod.float()
    if not bool(((alphas > 0) & (alphas <= 1)).all()):
        raise ModelError(f"the scheduler's config in {model / 'scheduler'} gives alphas outside of 0 to 1",
                         hint=FETCH_AGAIN)
    return alphas


def load_scheduler(kind: Any, model: Path, **changes: Any) -> Any:
    """The scheduler of class `kind` with the config of the pipeline directory `model`, overridden by `changes`.

    Raises `ModelError`.
    """
    config = scheduler_config(model)
    steps = config.get("num_train_timesteps", 1000)
    if type(steps) is not int or not 1 <= steps <= MOST_TIMESTEPS:
        raise ModelError(f"the scheduler's config in {model / 'scheduler'} has num_train_timesteps {brief(steps)}, "
                         f"expected a whole number from 1 to {MOST_TIMESTEPS}", hint=FETCH_AGAIN)
    try:
        return kind.from_config({**config, **changes})
    except Exception as error:  # bad values can raise nearly any exception
        raise ModelError(f"cannot use the scheduler's config in {model / 'scheduler'}: {first_line(error)}",
                         hint=FETCH_AGAIN) from None


MOST_TIMESTEPS = 100_000  # published models have 1,000


def scheduler_config(model: Path) -> dict[str, Any]:
    """The scheduler's config in the model directory. Raises `ModelError`."""
    return read_config(model / "scheduler" / "scheduler_config.json")


def quiet() -> None:
    """Silences diffusers' messages below errors, and its progress bars."""
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()


def _load_unet(model: Path) -> Any:
    return load_model(diffusers.UNet2DConditionModel, weighted_files(model, "unet"), "denoiser",
                      low_cpu_mem_usage=False, torch_dtype=torch.float32)
