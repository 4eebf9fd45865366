"""One case per model family for `tests/whole/test_families.py`: how diffusers' own pipeline is asked for the same.

Written from the pipelines' signatures, not from the code that is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_pipelines.calls import edited_at, without_picture
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family's pipeline is called by hand."""

    family: str  # of prep.models.families
    build: str  # of tiny_pipelines
    options: Mapping[str, Any] = field(default_factory=dict)  # of tiny_pipelines
    unguided: Mapping[str, Any]  # arguments of __call__ that ask the denoiser once a step, for the prompt alone
    guided: Mapping[str, Any]  # those of a usual picture
    guidance: float  # the value of sample.guidance that means `guided`
    packed: Callable[[Tensor], Tensor] = lambda latent: latent  # [1, C, h, w] as __call__ takes it
    normalized: Callable[[Any, Tensor], Tensor]  # the VAE and its posterior's mean → what the denoiser sees
    encode: Callable[[Any, Tensor], Tensor] = lambda vae, image: vae.encode(image).latent_dist.mean
    mended: Callable[[Any], None] = lambda pipeline: None  # changes a pipeline that does not do what its authors say
    cut: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given  # a denoiser's arguments, without padding
    shown: Callable[[Sequence[Any]], dict[str, Any]] = lambda pictures: {"image": list(pictures)}  # as conditions
    # Those of a pipeline that inpaints, of a picture and its mask; None: it makes whole pictures.
    painted: Callable[[Any, Any], dict[str, Any]] | None = None
    sizes_shown: Sequence[tuple[int, int]] = ()  # of such pictures
    stretched: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # for the VAE
    seen: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # for the text encoder
    rtol: float = 0.0  # of a picture from cached rows
    surrounding: int = 0  # most tokens in a whole row besides the longest tokenizer's, and besides padding
    padded_left: bool = False


def flux_packed(latent: Tensor) -> Tensor:
    from diffusers import FluxPipeline

    count, channels, height, width = latent.shape
    return FluxPipeline._pack_latents(latent, count, channels, height, width)


def flux2_patched(latent: Tensor) -> Tensor:
    from diffusers import Flux2Pipeline

    return Flux2Pipeline._patchify_latents(latent)


def by_batch_norm(vae: Any, mean: Tensor, epsilon: float | None = None) -> Tensor:
    from diffusers import Flux2Pipeline

    epsilon = vae.config.batch_norm_eps if epsilon is None else epsilon

    center, variance = (values.view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
    normalized = (flux2_patched(mean) - center) / torch.sqrt(variance + epsilon)
    return Flux2Pipeline._unpatchify_latents(normalized)


def ernie_normalized(vae: Any, mean: Tensor) -> Tensor:
    return by_batch_norm(vae, mean, 1e-5)  # of the pipeline's code


def krea2_without_padding(given: dict[str, Any]) -> dict[str, Any]:
    """Padding is between the caption and the end of the template; positions of text are all zero."""
    mask = given.get("encoder_attention_mask")
    if mask is None:
        return given
    kept, text = mask[0].bool(), mask.shape[1]
    ids = given["position_ids"]
    assert not ids[:text].any()
    shorter = {"encoder_hidden_states": given["encoder_hidden_states"][:, kept],
               "position_ids": torch.cat([ids[:text][kept], ids[text:]])}
    return {name: value for name, value in (given | shorter).items() if name != "encoder_attention_mask"}


def of_video(vae: Any, image: Tensor) -> Tensor:
    return vae.encode(image[:, :, None]).latent_dist.mean[:, :, 0]


def by_channel(vae: Any, mean: Tensor) -> Tensor:
    center, deviation = (torch.tensor(values)[:, None, None]
                         for values in (vae.config.latents_mean, vae.config.latents_std))
    return (mean - center) / deviation


def scaled(vae: Any, mean: Tensor) -> Tensor:
    return mean * vae.config.scaling_factor


def shifted(vae: Any, mean: Tensor) -> Tensor:
    return (mean - vae.config.shift_factor) * vae.config.scaling_factor


def without_padding(given: dict[str, Any]) -> dict[str, Any]:
    """The rows of text that a mask of whole numbers or booleans keeps, in place of padded rows and their mask."""
    mask = given["encoder_attention_mask"].bool()
    assert not mask[:, 1:].logical_and(~mask[:, :-1]).any(), "padding is on the right"
    rows = [hidden[kept] for hidden, kept in zip(given["encoder_hidden_states"], mask, strict=True)]
    return {**given, "encoder_hidden_states": rows, "encoder_attention_mask": None}


def chroma_without_padding(given: dict[str, Any]) -> dict[str, Any]:
    """The text rows that the pipeline's mask, which does not mask, is meant to keep; those of the picture are last."""
    if "attention_mask" not in given:
        return given
    text = given["encoder_hidden_states"].shape[1]
    mask = given["attention_mask"].bool()[0]
    kept = int(mask[:text].sum())
    assert mask[:kept].all() and mask[text:].all() and not mask[kept:text].any()
    return {**{name: value for name, value in given.items() if name != "attention_mask"},
            "encoder_hidden_states": given["encoder_hidden_states"][:, :kept], "txt_ids": given["txt_ids"][:kept]}


def chroma_mended(pipeline: Any) -> None:
    """Makes a pipeline's masks boolean: attention adds floats to its scores."""
    usual = pipeline._get_t5_prompt_embeds

    def masked(*args: Any, **options: Any) -> Any:
        hidden, mask = usual(*args, **options)
        return hidden, mask.bool()

    pipeline._get_t5_prompt_embeds = masked


def edit_mended(pipeline: Any) -> None:
    """Lets a pipeline that insists on pictures do without, as Qwen-Image's; gives the VAE small ones, by the square of
    `EDIT_SIDE`; and tells the text encoder which tokens are pictures, as transformers 5 asks."""
    from diffusers import QwenImagePipeline
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

    kind = type(pipeline)

    def call(self: Any, image: Any = None, prompt: Any = None, negative_prompt: Any = None, **options: Any) -> Any:
        if image is not None:
            module.VAE_IMAGE_SIZE, usual = EDIT_SIDE**2, module.VAE_IMAGE_SIZE
            try:
                return kind.__call__(self, image=image, prompt=prompt, negative_prompt=negative_prompt, **options)
            finally:
                module.VAE_IMAGE_SIZE = usual
        plain = QwenImagePipeline(**{name: part for name, part in self.components.items()
                                     if name != "processor"})
        plain.set_progress_bar_config(disable=True)
        texts = {"": prompt} | ({} if negative_prompt is None else {"negative_": negative_prompt})
        for before, words in texts.items():
            found, _ = self.encode_prompt(words, device="cpu")
            options[f"{before}prompt_embeds"] = found
        return plain(**options)

    def told(_: Any, args: Any, named: dict[str, Any]) -> Any:
        places = named["input_ids"] == pipeline.processor.image_token_id
        return args, {**named, "mm_token_type_ids": places.int()}

    pipeline.text_encoder.register_forward_pre_hook(told, with_kwargs=True)
    pipeline.__class__ = type(kind.__name__, (kind,), {"__call__": call})


EDIT_SIDE = 64


def longcat_edit_mended(pipeline: Any) -> None:
    """The same of LongCat-Image-Edit, which takes one picture and gives what it makes that picture's size; without, it
    guides and encodes as with one, but for the places of the picture."""
    kind, place = type(pipeline), pipeline.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def call(self: Any, image: Any = None, negative_prompt: Any = None, **options: Any) -> Any:
        options["negative_prompt"] = negative_prompt
        if image is not None:
            with edited_at(EDIT_SIDE):
                return kind.__call__(self, *image, **{name: value for name, value in options.items()
                                                     if name not in ("height", "width")})
        return without_picture(self)(**options, enable_prompt_rewrite=False, enable_cfg_renorm=False)

    def told(_: Any, args: Any, named: dict[str, Any]) -> Any:
        return args, named if "pixel_values" not in named else {
            **named, "mm_token_type_ids": (named["input_ids"] == place).int()}

    pipeline.text_encoder.register_forward_pre_hook(told, with_kwargs=True)
    pipeline.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def painted(picture: Any, mask: Any) -> dict[str, Any]:
    return {"image": picture, "mask_image": mask, "strength": 1.0}


def with_means(pipeline: Any) -> None:
    """Takes the mean of the VAE's posterior, from which pipelines that inpaint draw."""
    usual = pipeline.vae.encode

    def encode(image: Any) -> Any:
        found = usual(image)
        found.latent_dist.sample = lambda generator=None: found.latent_dist.mean
        return found

    pipeline.vae.encode = encode


def modular_mended(pipeline: Any) -> None:
    """Lets a modular pipeline be called as others are, with the scale of its guider."""
    from diffusers import ClassifierFreeGuidance

    kind = type(pipeline)

    def call(self: Any, guidance_scale: float = 1.0, negative_prompt: str | None = None, **options: Any) -> Any:
        self.guider = ClassifierFreeGuidance(guidance_scale=guidance_scale)
        given = {} if negative_prompt is None else {"negative_prompt": negative_prompt}
        if options.get("output_type") == "latent":  # which not all of them have
            return kind.__call__(self, **options | given | {"output_type": "np"}, output="latents")
        return kind.__call__(self, **options, **given)

    pipeline.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def flat(latent: Tensor) -> Tensor:
    return latent.flatten(2).transpose(1, 2)


def with_opacity(vae: Any, image: Tensor) -> Tensor:
    """Latents of opaque pictures."""
    return of_video(vae, torch.cat([image, torch.ones_like(image[:, :1])], dim=1))


def without_pictures(given: dict[str, Any]) -> dict[str, Any]:
    """Zeros for what the text encoder returns for pictures, which the transformer replaces; nothing that is kept from
    one step to the next."""
    hidden = given["encoder_hidden_states"]
    kept = ~given["img_mask"][:, :hidden.shape[1], None]
    return {name: hidden * kept if name == "encoder_hidden_states" else value for name, value in given.items()
            if not name.startswith("kv_cache")}


def with_layers(numbers: tuple[int, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leaves of Llama's layers those that HiDream's transformer looks up."""
    name = "encoder_hidden_states_llama3"
    return lambda given: {**given, name: [given[name][number] for number in numbers]}


NO_CFG, CFG = {"guidance_scale": 1.0}, {"guidance_scale": 4.0}
ODD = [(93, 70), (64, 130)]  # cropped to whole tokens
SMALL_AREA = {"max_area": 64 * 64}  # that of every picture
AS_WRITTEN = {"enable_prompt_rewrite": False}
AS_GIVEN = {"use_resolution_binning": False, "clean_caption": False}  # sizes and captions
CASES = [
    Case(family="sd15", build="sd15", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled),
    *(Case(family=name, build=name, unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled, painted=painted,
           mended=with_means) for name in ("sd15_inpaint", "sd21_inpaint", "sdxl_inpaint")),
    Case(family="sd21", build="sd21", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled),
    Case(family="sd21", build="sd21", options={"prediction": "epsilon"}, unguided=NO_CFG, guided=CFG, guidance=4.0,
         normalized=scaled),
    Case(family="sdxl", build="sdxl", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled),
    *(Case(family="sd3", build="sd3", options=options, unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=shifted,
           surrounding=77)  # CLIP's
      for options in ({}, {"qk_norm": "rms_norm"}, {"qk_norm": "rms_norm", "dual": (0,)}, {"without_t5": True})),
    Case(family="flux", build="flux", unguided={"guidance_scale": 3.5}, guided=CFG, guidance=4.0, packed=flux_packed,
         normalized=shifted),
    Case(family="flux", build="flux", options={"guidance": False}, unguided={}, guided=CFG, guidance=4.0,
         packed=flux_packed, normalized=shifted),
    Case(family="flux_kontext", build="flux_kontext", unguided={"guidance_scale": 3.5} | SMALL_AREA,
         guided=CFG | SMALL_AREA, guidance=4.0, packed=flux_packed, normalized=shifted, sizes_shown=[(96, 64)],
         shown=lambda pictures: {"image": pictures[0], "_auto_resize": False}),
    Case(family="flux_fill", build="flux_fill", unguided={"guidance_scale": 3.5}, guided=CFG, guidance=4.0,
         packed=flux_packed, normalized=shifted, painted=painted, mended=with_means),
    *(Case(family=name, build=name, options=options, unguided=NO_CFG | AS_GIVEN, guided=CFG | AS_GIVEN, guidance=4.0,
           normalized=scaled, cut=without_padding)
      for name, options in (("pixart_alpha", {}), ("pixart_alpha", {"sample_size": 64}), ("pixart_sigma", {}))),
    # The pipeline's guidance scale 0 is off, so 3 means what 4 does elsewhere.
    Case(family="zimage", build="zimage", unguided={"guidance_scale": 0.0}, guided={"guidance_scale": 3.0},
         guidance=4.0, normalized=shifted),
    Case(family="chroma", build="chroma", unguided=NO_CFG, guided=CFG, guidance=4.0, packed=flux_packed,
         normalized=shifted, cut=chroma_without_padding, mended=chroma_mended),
    # Without a negative prompt the pipeline does not guide.
    Case(family="qwenimage", build="qwenimage", unguided={"true_cfg_scale": 1.0},
         guided={"true_cfg_scale": 4.0, "negative_prompt": " "}, guidance=4.0, packed=flux_packed, encode=of_video,
         normalized=by_channel),
    *(Case(family="qwenimage_edit", build="qwenimage_edit", options=options, unguided={"true_cfg_scale": 1.0},
           guided={"true_cfg_scale": 4.0, "negative_prompt": " "}, guidance=4.0, packed=flux_packed, encode=of_video,
           normalized=by_channel, mended=edit_mended, sizes_shown=[(96, 64), (32, 128)],
           stretched={(96, 64): (64, 64), (32, 128): (32, 128)}, seen={(96, 64): (480, 320), (32, 128): (192, 768)})
      for options in ({}, {"zero_cond_t": True})),
    Case(family="qwenimage21", build="qwenimage21", unguided={"true_cfg_scale": 1.0, "output_resolution": 64},
         guided={"true_cfg_scale": 4.0, "negative_prompt": " ", "output_resolution": 64}, guidance=4.0, packed=flat,
         encode=with_opacity, normalized=by_channel, cut=without_pictures, sizes_shown=[(96, 64), (32, 128)],
         stretched={(96, 64): (64, 64), (32, 128): (32, 128)}, seen={(96, 64): (64, 64), (32, 128): (32, 128)}),
    Case(family="flux2", build="flux2", unguided={"guidance_scale": 3.5}, guided=CFG, guidance=4.0,
         packed=flux2_patched, normalized=by_batch_norm, surrounding=300, padded_left=True,  # the system's message
         sizes_shown=ODD),
    *(Case(family="flux2_klein", build="flux2_klein", options=options, unguided=NO_CFG, guided=CFG, guidance=4.0,
           packed=flux2_patched, normalized=by_batch_norm, surrounding=60, sizes_shown=ODD)
      for options in ({}, {"distilled": True})),
    # One picture alone is not cropped, but filled up to whole tokens: this one has them.
    Case(family="flux3", build="flux3", unguided=NO_CFG, guided=CFG, guidance=4.0, packed=flux2_patched,
         normalized=by_batch_norm, mended=modular_mended, sizes_shown=[(96, 64), (93, 70)]),
    Case(family="lumina2", build="lumina2", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=shifted,
         cut=without_padding),
    Case(family="ovis", build="ovis", unguided=NO_CFG, guided=CFG, guidance=4.0, packed=flux_packed,
         normalized=shifted),
    Case(family="longcat_image", build="longcat_image", unguided=NO_CFG | AS_WRITTEN, guided=CFG | AS_WRITTEN,
         guidance=4.0, packed=flux_packed, normalized=shifted),
    Case(family="longcat_image_edit", build="longcat_image_edit", unguided=NO_CFG, guided=CFG, guidance=4.0,
         packed=flux_packed, normalized=shifted, mended=longcat_edit_mended, sizes_shown=[(96, 96)],
         stretched={(96, 96): (64, 64)}, seen={(96, 96): (64, 64)}),
    Case(family="cogview4", build="cogview4", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled),
    *(Case(family="sana", build="sana", options=options, unguided=NO_CFG | AS_GIVEN, guided=CFG | AS_GIVEN,
           guidance=4.0, normalized=scaled, encode=lambda vae, image: vae.encode(image).latent, cut=without_padding)
      for options in ({}, {"solver": True, "timestep_scale": 0.5})),
    Case(family="auraflow", build="auraflow", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled),
    *(Case(family="hidream", build="hidream", options=options, unguided=NO_CFG, guided=CFG, guidance=4.0,
           normalized=shifted, cut=with_layers(options.get("layers", (0, 1))))
      for options in ({}, {"layers": (2, 0), "whole": False})),
    # As with Z-Image, 0 is off.
    Case(family="krea2", build="krea2", unguided={"guidance_scale": 0.0}, guided={"guidance_scale": 3.0}, guidance=4.0,
         packed=flux_packed, encode=of_video, normalized=by_channel, cut=krea2_without_padding),
    Case(family="ernie", build="ernie", unguided=NO_CFG, guided=CFG, guidance=4.0, packed=flux2_patched,
         normalized=ernie_normalized),
    Case(family="anima", build="anima", unguided=NO_CFG, guided=CFG, guidance=4.0, encode=of_video,
         packed=lambda latent: latent[:, :, None], normalized=by_channel, mended=modular_mended),
    Case(family="kolors", build="kolors", unguided=NO_CFG, guided=CFG, guidance=4.0, normalized=scaled,
         padded_left=True),
]


def named(case: Case) -> str:
    """The case's name in test ids."""
    return "-".join([case.build, *(f"{name}={value}" for name, value in case.options.items())])


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two arguments of a denoiser are the same: tensors, lists of tensors, plain values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        kept = [{key: value for key, value in each.items() if value is not None} for each in (one, other)]
        return kept[0].keys() == kept[1].keys() and all(same(kept[0][key], kept[1][key], tolerance) for key in kept[0])
    return bool(one == other)
