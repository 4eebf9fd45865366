"""Samples pictures with the family's own diffusers pipeline, from cached text rows.

The VAE is loaded only for decoding, after all prompts; text encoders are never loaded.

C latent channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from prep.batching.rng import draw_key, philox
from prep.cache.records import RowRef
from prep.geometry import Size
from prep.loader.device import autocast, module_to_device, to_device, to_host
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.models.denoiser.samplers import diffusion_options, flow_options, require_steps
from prep.models.family import ATTENTION_MASK, Prompted, TextArrays
from prep.models.files import Model
from prep.models.loading import quiet_libraries
from prep.models.pipeline import scheduler_config
from prep.models.text.pipeline import assemble
from prep.models.vae import decode, load_vae
from prep.training.schema import Sampling
from train.models.adapters.beside import switched_off
from train.models.denoiser import Denoiser, evaluating, load_scheduler, rescaled
from train.sampling.grid import beside
from train.sampling.prompts import PromptRows

Drawn = Sequence[Sequence[Tensor]]  # of each prompt: references, what is made, the sample's own picture, as stored


def pictures(denoiser: Denoiser, rows: Rows, model: Model, prompts: Sequence[PromptRows],
             settings: Sampling, *, vae: Model | None = None, alone: bool = False) -> list[np.ndarray]:
    """One picture per prompt, uint8 [H, W, 3], or [H, W, 4] of a VAE that makes opacity, too; a prompt's own settings
    override `settings`. With references, these are left of what is made, and the sample that they belong to is right of
    it, but not with `alone`. A training adapter is off.

    `model` is that of the denoiser, and `vae` the one whose VAE decodes; `None`: the same.

    The same seed, prompt and size always start from the same noise. Raises `CacheError`, `ModelError`, `ConfigError`.
    """
    made = drawn(denoiser, rows, model, prompts, settings, alone=alone)
    return decoded(made, model if vae is None else vae, prompts, denoiser.device)


def drawn(denoiser: Denoiser, rows: Rows, model: Model, prompts: Sequence[PromptRows], settings: Sampling, *,
          alone: bool = False) -> Drawn:
    """The latents of `pictures`, on the host: decoding them needs no denoiser."""
    quiet_libraries()  # transformers, too: diffusers imports it with the pipeline
    usual = settings.size or rows.index.usual_size
    with evaluating(denoiser), switched_off(denoiser.model), torch.no_grad():
        pipeline = _pipeline(denoiser, model, settings.sampler)
        for prompt in prompts:  # before the first is drawn
            scheduler = pipeline.scheduler
            require_steps(type(scheduler).__name__, scheduler.config, _settings_of(prompt, settings).steps)
        facts, shown = latents_of(rows.index.manifest), list[list[Tensor]]()
        for prompt in prompts:
            size = _painted(denoiser, rows, prompt) or _whole(denoiser, (
                prompt.settings.width or usual[0], prompt.settings.height or usual[1]))
            made = to_host(facts.restore(_denoise(denoiser, pipeline, rows, prompt, size,
                                                  _settings_of(prompt, settings))))
            target = [] if prompt.target is None else [rows.latent(prompt.target).float()]
            shown.append([made] if alone else [*(_stored(rows, place).float() for place in prompt.references), made,
                                               *target])
        return shown


@torch.no_grad()
def decoded(latents: Drawn, model: Model, prompts: Sequence[PromptRows], device: torch.device) -> list[np.ndarray]:
    """The pictures of what was drawn of `prompts`, those of a prompt side by side. The VAE of `model` is in memory only
    during this call."""
    if not latents:
        return []
    vae = load_vae(model, torch.float32)
    module_to_device(vae, device).eval()
    shown = ([_pixels(decode(vae, to_device(latent, device))) for latent in row] for row in latents)
    return [beside(row, row[min(len(row) - 1, len(prompt.references))].shape[0])
            for prompt, row in zip(prompts, shown, strict=True)]


def _painted(denoiser: Denoiser, rows: Rows, prompt: PromptRows) -> Size | None:
    """The size of the masked picture that is painted; `None`: the family does not inpaint."""
    if denoiser.family.inpainting is None:
        return None
    height, width = _stored(rows, prompt.references[0]).shape[2:]
    return width * denoiser.family.factor, height * denoiser.family.factor


def _whole(denoiser: Denoiser, size: Size) -> Size:
    """`size`, rounded down to sides that the denoiser takes."""
    least, longest = denoiser.family.factor * denoiser.family.patch, denoiser.family.longest_side
    most = (None if longest is None else longest(denoiser.model.config)) or max(size)
    width, height = (max(least, min(side, most) // least * least) for side in size)
    return width, height


def _pipeline(denoiser: Denoiser, model: Model, sampler: str | None) -> Any:
    """The family's own pipeline around the denoiser, without text encoders and VAE, with the scheduler `sampler`."""
    sampling = denoiser.family.sampling
    if sampler is None:
        options = dict(sampling.sampler_options)
    elif denoiser.prediction == "flow":
        options = flow_options(sampler, scheduler_config(model))
    else:
        options = diffusion_options(sampler)
    if denoiser.prediction != "flow":
        options["prediction_type"] = denoiser.prediction
    if denoiser.zero_terminal_snr:  # sampling begins at the last timestep, which is learned (Lin et al. 2024, 3.3)
        options |= {**rescaled(True), "timestep_spacing": "trailing"}
    scheduler = load_scheduler(getattr(diffusers, sampler or sampling.sampler), model, **options)
    models = (denoiser.model, denoiser.conditioner)
    parts = {**sampling.parts, **dict(zip(denoiser.family.trained_with, models, strict=False)), "scheduler": scheduler}
    pipeline = assemble(model, denoiser.family, parts, sampling.pipeline)
    if sampling.vae is not None:
        pipeline.vae = sampling.vae(denoiser.model)
    return pipeline


def _settings_of(prompt: PromptRows, settings: Sampling) -> Sampling:
    """`settings` with the prompt's own seed, steps and guidance, if set."""
    own = {name: value for name in ("seed", "steps", "guidance")
           if (value := getattr(prompt.settings, name)) is not None}
    return replace(settings, **own)


def _denoise(denoiser: Denoiser, pipeline: Any, rows: Rows, prompt: PromptRows, size: Size,
             settings: Sampling) -> Tensor:
    """The sampled latent `[1, C, h, w]`, by the pipeline's own loop."""
    family, sampling = denoiser.family, denoiser.family.sampling
    shape = (family.latent_channels, size[1] // family.factor, size[0] // family.factor)
    noise = to_device(torch.from_numpy(_noise(prompt.prompt, shape, settings.seed))[None], denoiser.device)
    prompted = Prompted(positive=_text(rows, prompt.positive, denoiser),
                        negative=_text(rows, prompt.negative, denoiser), latent_1Chw=noise, size=size,
                        guidance=sampling.guidance if settings.guidance is None else settings.guidance)
    if sampling.prepare is not None:
        sampling.prepare(pipeline, prompted)
    if hasattr(pipeline.scheduler, "noise_sampler_seed"):  # it draws noise without the generator
        pipeline.scheduler.noise_sampler_seed = settings.seed
    references = _references(rows, prompt) if prompt.references else []
    shown = (_conditioned(denoiser, references) if prompt.inpaint_mask is None else
             _inpainting(denoiser, rows.mask(prompt.inpaint_mask), references[0]))
    with shown, autocast(denoiser.device, denoiser.dtype), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Should have t[ab]")  # of torchsde, about rounded ends of an interval
        made = _called(pipeline, {
            **sampling.call(denoiser.model, prompted), "width": size[0], "height": size[1],
            "num_inference_steps": settings.steps,
            "generator": torch.Generator().manual_seed(settings.seed)})  # some samplers draw noise
    return sampling.unpack(denoiser.model, made.float(), size)


def _called(pipeline: Any, given: Mapping[str, Any]) -> Tensor:
    """The latents that a pipeline makes with these arguments."""
    modular = isinstance(pipeline, diffusers.ModularPipeline)
    made: Tensor = (pipeline(**given, output="latents") if modular else
                    pipeline(**given, output_type="latent", return_dict=False)[0])
    return made


def _references(rows: Rows, prompt: PromptRows) -> list[Tensor]:
    """A prompt's references as the denoiser takes them, `[1, C, h, w]` each."""
    latents = latents_of(rows.index.manifest)
    return [latents.normalize(_stored(rows, place)) for place in prompt.references]


def _stored(rows: Rows, place: RowRef | Tensor) -> Tensor:
    """A latent `[1, C, h, w]` as it is stored."""
    return rows.latent(place) if isinstance(place, RowRef) else place


@contextmanager
def _conditioned(denoiser: Denoiser, references: Sequence[Tensor]) -> Iterator[None]:
    """Lets the pipeline give the denoiser references, too, inside the `with` block.

    Pipelines take pictures, which they scale, crop and encode as if they were new; these are encoded already. What is
    predicted of them is cut off: a pipeline from text alone would take it for noise.
    """
    facts = denoiser.family.references
    if facts is None or not references:
        yield
        return
    references = [to_device(reference_1Chw, denoiser.device) for reference_1Chw in references]
    append, leading, tokens = facts.append, facts.leading, 0

    def given(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal tokens
        tokens = named["hidden_states"].shape[1]
        return args, dict(append(named, references))

    def cut(_: Any, args: Any, made: tuple[Tensor]) -> tuple[Tensor]:
        return (made[0][:, -tokens:] if leading else made[0][:, :tokens],)

    with denoiser.model.register_forward_pre_hook(given, with_kwargs=True), denoiser.model.register_forward_hook(cut):
        yield


@contextmanager
def _inpainting(denoiser: Denoiser, mask_1Mhw: Tensor, masked_1Chw: Tensor) -> Iterator[None]:
    """Lets a pipeline that makes pictures from text alone tell the denoiser, too, what to paint, inside the `with`
    block."""
    facts = denoiser.family.inpainting
    assert facts is not None, "only then a prompt has a mask"
    mask, masked = (to_device(each, denoiser.device) for each in (mask_1Mhw.float() / 255, masked_1Chw))

    def given(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (facts.join(args[0], mask, masked), *args[1:]), named
        return args, {**named, "hidden_states": facts.join(named["hidden_states"], mask, masked)}

    with denoiser.model.register_forward_pre_hook(given, with_kwargs=True):
        yield


def _text(rows: Rows, part: RowRef | TextArrays, denoiser: Denoiser) -> TextArrays:
    """The arrays of one text row on the device, in float32; read from the cache unless `part` is the row itself."""
    arrays = rows.text([part]) if isinstance(part, RowRef) else part
    return {name: to_device(array if name == ATTENTION_MASK else array.float(), denoiser.device)
            for name, array in arrays.items()}


def _noise(prompt: str, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    key = draw_key(seed, 0, hashlib.sha256(prompt.encode()).digest(), 0, "sample")
    return philox(key).standard_normal(shape, dtype=np.float32)


def _pixels(decoded: Tensor) -> np.ndarray:
    scaled_CHW = ((decoded[0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    picture: np.ndarray = to_host(scaled_CHW).permute(1, 2, 0).numpy()
    return picture
