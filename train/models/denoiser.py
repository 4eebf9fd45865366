"""The denoiser that is trained, and its noise schedule. Nothing here loads a VAE or a text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn

from prep.errors import ModelError, first_line
from prep.loader.device import autocast, compute_dtype, module_to_device, to_device
from prep.models.checkpoints.streaming import Keep
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.denoiser.levels import check_timesteps
from prep.models.families.registry import FAMILIES
from prep.models.family import ATTENTION_MASK, Conditions, Family
from prep.models.files import FETCH_AGAIN, ComponentFiles, Model
from prep.models.loading import Form, load_diffusers
from prep.models.pipeline import infer_family, scheduler_config, weighted_files
from prep.models.text.pipeline import spoken
from prep.progress import Progress, silent
from prep.training.schema import Config, Precision, Quantization, WeightDtype
from train.models import lora
from train.models.offload import Offloaded
from train.models.quantized import LEAST, quantized
from train.models.recomputed import way_of
from train.models.speed import speed_up
from train.models.targets import unfrozen

DTYPES: Mapping[WeightDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoiser:
    """A denoiser ready to be trained or sampled."""

    model: Any
    family: Family
    levels: Tensor  # [timesteps] on the device: cumulative products of alphas; of a flow, sigmas
    prediction: str  # epsilon | v_prediction | flow
    zero_terminal_snr: bool  # whether the schedule of a diffusion model was rescaled to end in pure noise
    guidance_embedding: float | None  # the setting of that name
    schedule: Mapping[str, Any]  # the scheduler's config, of a flow; else empty
    # The trained parameters: float32, or as `full.dtype` says; empty if `adapt` is false.
    parameters: Mapping[str, nn.Parameter]
    weights: Mapping[str, nn.Parameter]  # those that a file of weights holds: with full fine-tuning also frozen ones
    device: torch.device
    dtype: torch.dtype  # of the forward pass
    conditioner: Any  # the model that makes its text of rows; None: the family has none

    @property
    def timesteps(self) -> int:
        """Number of timesteps of the noise schedule."""
        return len(self.levels)


def load(model: Model, config: Config, prediction: str, device: torch.device, *, adapt: bool = True,
         family: str = "", weights_on: torch.device | None = None, keep: Keep | None = None, parts: int = 1,
         offload: int = 0, beside: Callable[[Any, torch.dtype], object] = lambda *_: None,
         place: Callable[[Any, torch.device], object] = module_to_device,
         progress: Progress = silent) -> Denoiser:
    """Loads the denoiser below `model` to `device`, ready to train as `config` says; `adapt=False`: only to sample.

    Its weights are read to `weights_on`, `None`: the device itself; `place` brings it there with its adapters. `keep`
    is given each parameter, also of adapters, and keeps one of so many `parts`; until `place` the model has none.
    `beside` adds a training adapter, in the dtype of the forward pass.
    `family` is the manifest's; "": that of the pipeline's class. Of so many of its blocks as `offload` says the frozen
    weights stay in host memory: see `train.models.offload`.

    With a frozen base (LoRA), bfloat16 precision halves its memory: only the trained parameters are float32. Of full
    fine-tuning all weights have `full.dtype`, but for those that their class keeps in float32.
    Raises `ModelError`, and `ConfigError` if there are no blocks to offload.
    """
    quiet()
    dtype, facts = compute_dtype(precision_of(config), device), FAMILIES[family or infer_family(model)]
    whole = adapt and config.method == "full"
    on = torch.device("cpu") if offload else weights_on or device
    form = Form(dtype=DTYPES[config.full.dtype], device=on) if whole else _frozen(config, dtype, on, device)
    form = form if keep is None else replace(form, keep=keep, parts=parts)
    denoiser = load_diffusers(*source_of(model, facts), "denoiser", form, progress)
    if whole:
        unfreeze(denoiser, config)
    else:
        denoiser.requires_grad_(False)
        if adapt:
            lora.attach(denoiser, config.lora, config.seed, facts.lora.presets, keep)
        beside(denoiser, dtype)
    way = way_of(config, device)
    blocks = Offloaded(denoiser, offload, device, way) if offload else None
    if config.recomputes:
        denoiser.enable_gradient_checkpointing(way if blocks is None else blocks.recompute)
    place(denoiser, device)
    speed_up(denoiser, config, device)
    denoiser.train(adapt)
    return with_noise(denoiser, model, facts, config, prediction, device, dtype,
                      _conditioner(model, facts, dtype, device))


def adapted(base: Denoiser, model: Model, config: Config, prediction: str) -> Denoiser:
    """What `load` makes, of a base that it has loaded only to sample, which is changed: of a LoRA without offloaded
    blocks that is not compiled. Raises `ModelError`."""
    lora.attach(base.model, config.lora, config.seed, base.family.lora.presets)
    module_to_device(base.model, base.device)
    speed_up(base.model, config, base.device)  # the adapters, too
    base.model.train()
    return with_noise(base.model, model, base.family, config, prediction, base.device, base.dtype, base.conditioner)


def _frozen(config: Config, dtype: torch.dtype, on: torch.device, device: torch.device) -> Form:
    """How frozen weights are kept that are read to `on`: those of layers quantized on `device` may go back there."""
    settle = partial(quantized, config.quantization)
    if on != device and config.quantization != "none":
        settle = partial(_settled_there, device, config.quantization)
    return Form(dtype=dtype, device=on, settle=settle, least=LEAST[config.quantization])


def precision_of(config: Config) -> Precision:
    """The precision of forward passes. With weights in bfloat16 auto is bf16 on any device: all are computed from
    these."""
    half = config.method == "full" and config.full.dtype == "bfloat16"
    return "bf16" if half and config.precision == "auto" else config.precision


def _settled_there(device: torch.device, quantization: Quantization, name: str, layer: nn.Module) -> nn.Module:
    """The replacement of a layer in host memory, quantized on the device: faster, and as without `offload`."""
    if type(layer) is not nn.Linear:
        return layer
    return module_to_device(quantized(quantization, name, module_to_device(layer, device)), torch.device("cpu"))


def source_of(model: Model, family: Family) -> tuple[Any, ComponentFiles]:
    """The class and the files of the denoiser below `model`. Raises `ModelError`."""
    return files_of(model, family.denoiser)


def files_of(model: Model, name: str) -> tuple[Any, ComponentFiles]:
    """The class and the files of a component of diffusers below `model`. Raises `ModelError`."""
    return getattr(diffusers, class_of(pipeline_index(model), name, model)[1]), weighted_files(model, name)


def _conditioner(model: Model, family: Family, dtype: torch.dtype, device: torch.device) -> Any:
    """The model that makes the denoiser's text of rows, in `dtype` on `device`; `None`: the family has none. Raises
    `ModelError`."""
    if family.conditioner is None:
        return None
    name = family.conditioner.component
    loaded = load_diffusers(*files_of(model, name), spoken(name), Form(dtype=dtype, device=device))
    return module_to_device(frozen(loaded, device), device)


def frozen(conditioner: Any, device: torch.device) -> Any:
    """`conditioner`, which from now on is not trained, and computes as in its pipeline: without autocast, which would
    round the positions of tokens to bfloat16."""
    conditioner.requires_grad_(False).eval()
    conditioner.forward = torch.autocast(device.type, enabled=False)(conditioner.forward)
    return conditioner


def unfreeze(denoiser: nn.Module, config: Config) -> None:
    """Leaves trainable what full fine-tuning trains, and freezes all else."""
    trained = set(unfrozen(dict(denoiser.named_parameters()), config.full))
    for name, value in denoiser.named_parameters():
        value.requires_grad_(name in trained)


def with_noise(denoiser: nn.Module, model: Model, family: Family, config: Config, prediction: str, device: torch.device,
               dtype: torch.dtype, conditioner: Any = None) -> Denoiser:
    """A denoiser whose trained parameters are those that require gradients, with the noise schedule below `model`.
    Raises `ModelError`."""
    levels = noise_schedule(model, prediction, zero_terminal_snr=config.zero_terminal_snr)
    flow, named = prediction == "flow", dict(denoiser.named_parameters())
    schedule = dict(load_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, model).config) if flow else {}
    trained = {name: value for name, value in named.items() if value.requires_grad}
    whole = config.method == "full" and bool(trained)
    return Denoiser(model=denoiser, family=family, levels=to_device(levels, device), prediction=prediction,
                    zero_terminal_snr=config.zero_terminal_snr, schedule=schedule, device=device, dtype=dtype,
                    guidance_embedding=config.guidance_embedding, parameters=trained, conditioner=conditioner,
                    weights={name: value for name, value in named.items() if whole or lora.is_stored(name)})


def predict(denoiser: Denoiser, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The denoiser's prediction, `[B, C, h, w]`; for a flow, of noise - latent."""
    time_B = denoiser.levels[timestep_B] if denoiser.prediction == "flow" else timestep_B
    text = {name: array if name == ATTENTION_MASK else array.to(denoiser.dtype)
            for name, array in conditions.text.items()}
    mask = conditions.inpaint_mask
    with autocast(denoiser.device, denoiser.dtype):
        return denoiser.family.predict(denoiser.model, noised_BChw.to(denoiser.dtype), time_B,
                                      replace(conditions, text=text, schedule=denoiser.schedule, references=[
                                          reference_BChw.to(denoiser.dtype) for reference_BChw in conditions.references
                                      ], inpaint_mask=None if mask is None else mask.to(denoiser.dtype),
                                              guidance_embedding=denoiser.guidance_embedding,
                                              conditioner=denoiser.conditioner))


@contextmanager
def evaluating(denoiser: Denoiser) -> Iterator[None]:
    """Puts the denoiser in evaluation mode (no dropout) inside the `with` block, then restores its mode."""
    before = denoiser.model.training
    denoiser.model.eval()
    try:
        yield
    finally:
        denoiser.model.train(before)


def noise_schedule(model: Model, prediction: str, *, zero_terminal_snr: bool = False) -> Tensor:
    """The noise levels, float32 `[timesteps]`, as diffusers computes them from the scheduler's config.

    Cumulative products of alphas, rescaled to end in 0 if the config or `zero_terminal_snr` says so (Lin et al. 2024,
    algorithm 1); for a flow, sigmas from least to most noise, with the static shift of the config.
    Raises `ModelError`, also for levels outside of 0 to 1.
    """
    if prediction == "flow":
        return _sigmas(model)
    scheduler = load_scheduler(diffusers.DDPMScheduler, model, **rescaled(zero_terminal_snr))
    alphas: Tensor = scheduler.alphas_cumprod.float()
    if not bool(((alphas[:-1] > 0) & (alphas[:-1] <= 1)).all() and 0 <= alphas[-1] <= 1):
        raise ModelError(f"the scheduler's config in {model / 'scheduler'} gives alphas outside of 0 to 1",
                         hint=FETCH_AGAIN)
    return alphas


def rescaled(zero_terminal_snr: bool) -> dict[str, Any]:
    """Overrides of a scheduler's config for a schedule that ends in pure noise; empty if it is not asked for."""
    return {"rescale_betas_zero_snr": True} if zero_terminal_snr else {}


def _sigmas(model: Model) -> Tensor:
    """A fresh scheduler's table, as diffusers' training examples index it. set_timesteps would shift it once more."""
    sigmas: Tensor = load_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, model).sigmas.float().flip(0)
    if not bool(((sigmas > 0) & (sigmas <= 1)).all()):
        raise ModelError(f"the scheduler's config in {model / 'scheduler'} gives sigmas outside of 0 to 1",
                         hint=FETCH_AGAIN)
    return sigmas


def load_scheduler(kind: Any, model: Model, **changes: Any) -> Any:
    """The scheduler of class `kind` with the config of the pipeline directory `model`, overridden by `changes`.

    Raises `ModelError`.
    """
    config = scheduler_config(model)
    check_timesteps(config, model)
    flows = (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler)
    if kind in flows and "flow_shift" in config:
        config.setdefault("shift", config["flow_shift"])  # as DPM-Solver's config names it; else diffusers takes 1
    try:
        return kind.from_config({**config, **changes})
    except Exception as error:  # bad values can raise nearly any exception
        raise ModelError(f"cannot use the scheduler's config in {model / 'scheduler'}: {first_line(error)}",
                         hint=FETCH_AGAIN) from None


def quiet() -> None:
    """Silences diffusers' messages below errors, and its progress bars."""
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
