"""Loads pipelines and calls them, whatever arguments their family insists on."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.transformers import transformer_cosmos as cosmos
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as longcat_image_edit
from PIL import Image

from tiny_pipelines import tokenizers

_untyped: Any = diffusers  # its constructors have no type annotations


@contextmanager
def known_warnings() -> Iterator[None]:
    """Hides warnings that diffusers' own code causes: those seen in 0.42.1, and no others."""
    with warnings.catch_warnings():
        # Chroma's transformer imports a class from where diffusers no longer wants it imported.
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
        # ChatGLM compiles a function as torch no longer wants it compiled.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        # Schedulers call np.array(tensor); NumPy 2 would like torch's tensors to know `copy`.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning,
                                r"diffusers\.schedulers\.")
        # UniPC compares a tensor through NumPy.
        warnings.filterwarnings("ignore", "__array_wrap__ must accept context", DeprecationWarning,
                                r"diffusers\.schedulers\.")
        yield


def load(folder: Path, **options: Any) -> Any:
    """The pipeline saved in `folder`, as diffusers loads it, with `options` for `from_pretrained`.

    Parts that the index has none of (SD3 without T5) are named as such: otherwise diffusers says that they are missing.
    """
    if not (folder / "model_index.json").exists():
        return load_modular(folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name, part in index.items() if part == [None, None]}
    for name, part in index.items():
        if name.endswith("processor"):  # diffusers would load that of videos, too, which needs torchvision
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
            options = {name: tokenizers.PROCESSORS[part[1]](tokenizer)} | options
    with known_warnings():
        pipeline = _untyped.DiffusionPipeline.from_pretrained(folder, **(absent | options))
    without_bars(pipeline)
    return pipeline


def load_modular(folder: Path) -> Any:
    """The same of a modular repository, without the blocks whose components it lacks."""
    index = json.loads((folder / "modular_model_index.json").read_text(encoding="utf-8"))
    kind = getattr(_untyped, index["_class_name"])
    blocks = getattr(_untyped, index["_blocks_class_name"])()
    blocks.sub_blocks.pop("prompt_upsampler", None)
    pipeline = kind(blocks=blocks, pretrained_model_name_or_path=str(folder))
    processors = {name: part[1] for name, part in index.items() if isinstance(part, list) and part[1] in
                  tokenizers.PROCESSORS}
    with known_warnings():
        pipeline.load_components([name for name in pipeline.pretrained_component_names if name not in processors])
    pipeline.update_components(**{name: tokenizers.PROCESSORS[processor](transformers.AutoTokenizer.from_pretrained(
        folder / name)) for name, processor in processors.items()})
    without_bars(pipeline)
    return pipeline


def without_torchvision() -> None:
    """Gives Cosmos' transformer what it calls of torchvision: resizing a mask by the nearest pixel."""
    module: Any = cosmos
    if not hasattr(module, "transforms"):
        def resize(mask: Any, size: Any, interpolation: Any) -> Any:
            return torch.nn.functional.interpolate(mask, size=tuple(size), mode="nearest-exact")

        module.transforms = SimpleNamespace(functional=SimpleNamespace(resize=resize),
                                            InterpolationMode=SimpleNamespace(NEAREST=None))


def without_bars(pipeline: Any) -> None:
    """Hides a pipeline's progress bars."""
    pipeline.set_progress_bar_config(disable=True)
    waiting = [pipeline._blocks] if isinstance(pipeline, _untyped.ModularPipeline) else []
    for block in waiting:  # a modular pipeline itself looks no deeper than one level
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        waiting += block.sub_blocks.values()


def text_only(pipeline: Any) -> Any:
    """A pipeline of the same class and parts, but without denoiser and VAE: what is loaded to encode captions."""
    if isinstance(pipeline, _untyped.ModularPipeline):
        alone = type(pipeline)(blocks=pipeline._blocks)
        alone.update_components(**{name: part for name, part in pipeline.components.items()
                                   if name in ("text_encoder", "tokenizer", "t5_tokenizer")})
        return alone
    taken = inspect.signature(type(pipeline).__init__).parameters
    parts = {name: None if name in ("unet", "transformer", "vae") else part
             for name, part in pipeline.components.items()}
    settings = {name: value for name, value in pipeline.config.items() if name in taken and name not in parts}
    return type(pipeline)(**parts, **settings)


def encode_prompts(pipeline: Any, prompts: Sequence[str], **options: Any) -> Any:
    """What the pipeline's `encode_prompt` returns for `prompts`, with `options` for it; negative prompts are empty."""
    if isinstance(pipeline, _untyped.ModularPipeline):
        encode = pipeline._blocks.sub_blocks["text_encoder"]
        with torch.no_grad():
            if isinstance(pipeline, _untyped.AnimaModularPipeline):
                return [list(encode.encode_prompt(pipeline, prompt, device="cpu").values()) for prompt in prompts]
            return [encode._get_qwen3_vl_prompt_embeds(pipeline.text_encoder, pipeline.tokenizer, prompt)
                    for prompt in prompts]
    if isinstance(pipeline, _untyped.LongCatImageEditPipeline):
        pipeline = without_picture(pipeline)
    taken = inspect.signature(pipeline.encode_prompt).parameters
    usual = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True,
             "prompt_2": None, "prompt_3": None, "prompt_4": None}
    given = {name: value for name, value in usual.items() if name in taken} | options
    with torch.no_grad(), known_warnings():  # most pipelines leave gradients on
        return pipeline.encode_prompt(list(prompts), **given)


def draw(pipeline: Any, prompt: str = "a cat", *, side: int = 64, steps: int = 2, seed: int = 0, **options: Any) -> Any:
    """A picture of `side` pixels as an array [H, W, 3] of floats, from noise that `seed` decides.

    Two steps at least: where the schedule does not end at 0 (Qwen-Image), diffusers divides by zero for one.
    """
    if "use_resolution_binning" in inspect.signature(pipeline.__call__).parameters:
        options = {"use_resolution_binning": False} | options  # or pictures would have the size of trained ones
    if "max_area" in inspect.signature(pipeline.__call__).parameters:
        options = {"max_area": side * side} | options  # or they would have that area
    if type(pipeline) is diffusers.HiDreamImagePipeline:  # every picture is as large as this, whatever is asked for
        pipeline.default_sample_size = side // pipeline.vae_scale_factor
    if type(pipeline) is diffusers.QwenImageEditPlusPipeline:  # it makes no picture without one
        options = {"image": [Image.new("RGB", (side, side), "white")]} | options
    if type(pipeline) is diffusers.LongCatImageEditPipeline:  # nor does it, nor of any other size
        with edited_at(side), known_warnings():
            made = pipeline(Image.new("RGB", (side, side), "white"), prompt, num_inference_steps=steps,
                            output_type="np", generator=torch.Generator().manual_seed(seed), **options)
        return np.asarray(made.images[0])
    if "enable_prompt_rewrite" in inspect.signature(pipeline.__call__).parameters:
        options = {"enable_prompt_rewrite": False} | options
    if "mask_image" in inspect.signature(pipeline.__call__).parameters:
        options = {"image": Image.new("RGB", (side, side), "teal"), "mask_image": half_white(side), "strength": 1.0,
                   } | options
    with known_warnings():
        made = pipeline(prompt=prompt, num_inference_steps=steps, output_type="np", height=side, width=side,
                        generator=torch.Generator().manual_seed(seed), **options)
    return over_white(np.asarray(made.images[0]))


def without_picture(pipeline: Any) -> Any:
    """LongCat-Image's pipeline with the parts of LongCat-Image-Edit's, and its template without the picture's place."""
    plain = _untyped.LongCatImagePipeline(**pipeline.components)
    plain.prompt_template_encode_prefix = pipeline.prompt_template_encode_prefix.partition("<|vision_start|>")[0]
    without_bars(plain)
    return plain


@contextmanager
def edited_at(side: int) -> Iterator[None]:
    """Has LongCat-Image-Edit scale pictures to about `side`² pixels, where its code has 1024²."""
    usual = longcat_image_edit.calculate_dimensions
    longcat_image_edit.calculate_dimensions = lambda _, ratio: usual(side * side, ratio)
    try:
        yield
    finally:
        longcat_image_edit.calculate_dimensions = usual


def half_white(side: int) -> Image.Image:
    """A mask, white in its left half."""
    mask = Image.new("L", (side, side))
    mask.paste(255, (0, 0, side // 2, side))
    return mask


def over_white(picture: Any) -> Any:
    """[H, W, 3] of a picture, [H, W, 3 or 4] from 0 to 1, that may be transparent."""
    return picture if picture.shape[2] == 3 else 1 - picture[..., 3:] * (1 - picture[..., :3])
