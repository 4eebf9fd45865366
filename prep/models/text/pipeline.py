"""Builds a diffusers pipeline of only its tokenizers and text encoders: denoiser and VAE are not loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers

from prep.errors import ModelError
from prep.models.checkpoints.bounds import known_warnings
from prep.models.checkpoints.classes import imported
from prep.models.components import class_of
from prep.models.configs import Configs, index_file, pipeline_index
from prep.models.family import Class, Family
from prep.models.files import ComponentFiles, Model
from prep.models.fingerprint import TextFiles
from prep.models.loading import dtype_keyword, load_part, load_transformers, refuse_unknown_tokens
from prep.models.pipeline import PICTURES_ALONE, PROCESSOR
from prep.models.text.chat import render_apart
from prep.models.text.quantization import bitsandbytes_options, encoder_bytes, is_quantized
from prep.models.text.tokenizer import load_tokenizer
from prep.models.text.vision import load_processor

CLIP_POSITIONS = 77  # if a config does not say
DENOISING = "denoise"  # diffusers' name of the block of a modular pipeline between embeddings and latents
TOO_LONG = "set model_max_length in its tokenizer_config.json"


def load_encoder(model: Model, family: Family, name: str, files: TextFiles, dtype: torch.dtype,
                 quantization: str = "none") -> Any:
    """The text encoder `name` of `model` on the CPU, in `dtype` whatever its config says. Raises `ModelError`."""
    options: dict[str, Any] = {dtype_keyword(transformers.__version__): dtype}
    kind = _encoder_class(model, family, name)
    if is_quantized(kind.__name__, quantization):
        config: Any = transformers.BitsAndBytesConfig
        options |= {"quantization_config": config(**bitsandbytes_options(quantization, dtype)),
                    "device_map": {"": "cpu"}}  # otherwise transformers would choose a GPU
    encoder = load_transformers(
        kind, files.encoders[name], spoken(name), trust_remote_code=False,
        size=lambda shapes: encoder_bytes(kind.__name__, shapes, quantization, dtype.itemsize), **options)
    for module in encoder.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # of a layer with 4 bits: on some processors bitsandbytes
            module.support_avx512bf16_for_cpu = False  # would repack it, with other numbers, or fail for small ones
    refuse_unknown_tokens(encoder, files.encoders[name].place)
    return encoder


def encoder_configs(model: Model, family: Family, files: TextFiles) -> dict[str, Any]:
    """The configs of the text encoders of `model`, as transformers reads them. Raises `ModelError`."""
    return {name: load_part(_encoder_class(model, family, name).config_class, encoder, f"config of the {spoken(name)}")
            for name, encoder in files.encoders.items()}


def _encoder_class(model: Model, family: Family, name: str) -> Any:
    return imported(_class_of(pipeline_index(model), name, model, family))


def tokenizers_of(model: Model, family: Family, files: TextFiles) -> dict[str, Any]:
    """The tokenizers of `model` by component name. Raises `ModelError`, and `UsageError` without a library."""
    index = pipeline_index(model)
    # A processor's tokenizer has the class of the other one, if there is one.
    named = {name: "tokenizer" if name == PROCESSOR and "tokenizer" in index else name for name in files.tokenizers}
    family.require_library()
    tokenizers = {name: load_tokenizer(_class_of(index, named[name], model, family)[1], component)
                  for name, component in files.tokenizers.items() if name != PICTURES_ALONE}
    for name, tokenizer in tokenizers.items():
        render_apart(tokenizer, files.tokenizers[name].folder)
    for name, encoder in files.encoders.items():
        tokenizer = tokenizers.get(tokenizer_name(name))
        if tokenizer is not None and _class_of(index, name, model, family)[1].startswith("CLIPText"):
            _check_length(tokenizer, encoder, name, model)
    if PROCESSOR in tokenizers:  # it has a tokenizer of its own, and the pipeline asks no other
        tokenizers["tokenizer"] = tokenizers[PROCESSOR]
        tokenizers[PROCESSOR] = load_processor(files.tokenizers[PROCESSOR], tokenizers[PROCESSOR])
    if PICTURES_ALONE in files.tokenizers:
        tokenizers[PICTURES_ALONE] = load_processor(files.tokenizers[PICTURES_ALONE], tokenizers["tokenizer"])
    return tokenizers


def assemble(model: Model, family: Family, parts: Mapping[str, Any], instead: str | None = None) -> Any:
    """The family's pipeline of `parts`, or one of the class `instead`; every other component is `None`. Plain values
    come from model_index.json.

    For a missing denoiser, the pipeline has those values of its config on which text depends. Raises `ModelError`, and
    `UsageError` without a library.
    """
    index = pipeline_index(model)
    name = index.get("_class_name")
    # A model may name a pipeline by a name that this release of diffusers no longer has.
    with known_warnings():
        known = name in family.pipelines and hasattr(diffusers, str(name))
    family.require_library()
    kind = imported(("diffusers", instead or (str(name) if known else family.pipelines[0])))
    if issubclass(kind, diffusers.ModularPipeline):
        return _modular(kind, parts, denoises=family.denoiser in parts)
    parameters = inspect.signature(kind.__init__).parameters.values()
    components = {parameter.name: parts.get(parameter.name) for parameter in parameters
                  if _is_component(parameter, index)}
    plain = {parameter.name: index[parameter.name] for parameter in parameters
             if parameter.name in index and parameter.name not in components and _is_plain(index[parameter.name])}
    pipeline = kind(**components, **{**plain, **_never(parameters)})
    values = {} if family.text.denoiser_config is None else family.text.denoiser_config(Configs(model))
    if values and family.denoiser not in parts:
        setattr(pipeline, family.denoiser, SimpleNamespace(config=SimpleNamespace(**values)))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _modular(kind: Any, parts: Mapping[str, Any], *, denoises: bool) -> Any:
    """The modular pipeline `kind` of `parts`; if it has a denoiser, it makes latents of embeddings, and nothing else.

    Its blocks are those of diffusers: a repository's own are code.
    """
    blocks = deepcopy(getattr(diffusers, kind.default_blocks_name)())  # all of a class share the blocks inside
    _without_bars(blocks)
    pipeline = kind(blocks=blocks.sub_blocks[DENOISING] if denoises else blocks)
    for name, part in parts.items():
        setattr(pipeline, name, part)
    return pipeline


def _without_bars(blocks: Any) -> None:
    """Hides the progress bars of the blocks inside, which a pipeline itself does only for the first level."""
    for block in blocks.sub_blocks.values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        _without_bars(block)


def _is_component(parameter: inspect.Parameter, index: Mapping[str, Any]) -> bool:
    """Whether a parameter of a pipeline's constructor is a component, not a plain option."""
    value = index.get(parameter.name)
    named = isinstance(value, list) and not _is_plain(value)
    return parameter.name != "self" and (named or parameter.default is inspect.Parameter.empty)


def _is_plain(value: Any) -> bool:
    """Whether a value of model_index.json is an option: a component is a list of two names, or of two nulls."""
    if isinstance(value, list):
        return all(type(item) is int for item in value)
    return isinstance(value, bool | int | str)


def _never(parameters: Any) -> dict[str, bool]:
    """Options that would load or require what text does not need."""
    off = ("requires_safety_checker", "add_watermarker")
    return {parameter.name: False for parameter in parameters if parameter.name in off}


def _class_of(index: Mapping[str, Any], name: str, model: Model, family: Family) -> Class:
    """Library and class of a text part, which must be one that the family has. Raises `ModelError`."""
    declared, known = class_of(index, name, model), family.components.get(name, ())
    if declared not in known:
        raise ModelError(f"{name} in {index_file(model)} is a {declared[1]}, expected "
                         f"{' or '.join(kind for _, kind in known) or 'no such component'} in family '{family.name}'",
                         hint="name another model, or set its family in [model]")
    return declared


def spoken(component: str) -> str:
    """A component's name for people: "text encoder 2"."""
    return component.replace("_", " ")


def tokenizer_name(encoder: str) -> str:
    """The name of a text encoder's tokenizer: tokenizer_2 for text_encoder_2."""
    return encoder.replace("text_encoder", "tokenizer")


def _check_length(tokenizer: Any, encoder: ComponentFiles, name: str, model: Model) -> None:
    """Raises `ModelError` if a tokenizer lets through more tokens than its CLIP text encoder has positions for."""
    most = encoder.config.get("max_position_embeddings", CLIP_POSITIONS)
    if isinstance(most, int) and tokenizer.model_max_length > most:
        raise ModelError(f"the {spoken(tokenizer_name(name))} of {model} takes {tokenizer.model_max_length} tokens, "
                         f"its {spoken(name)} only {most}", hint=TOO_LONG)
