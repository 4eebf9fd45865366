"""A diffusers pipeline directory: its components' files, family, prediction type and text width."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.components import class_of
from prep.models.family import Family, family_of_pipeline
from prep.models.files import (
    CONFIG_BYTES,
    FETCH_AGAIN,
    TOKENIZER_BYTES,
    ComponentFiles,
    parse_config,
    read_config,
    read_small,
    refuse_adapter,
    refuse_redirection,
)
from prep.models.weights import check_sizes, read_shapes, weight_files
from prep.parse import brief

MOST_WIDTH = 1 << 16  # channels of a text encoder's hidden states; T5-XXL has 4,096

# The files of a transformers tokenizer: vocabularies, merges, and the configs that change its output.
_TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json",
                    "tokenizer_config.json", "vocab.json")
_VOCABULARIES = ({"tokenizer.json"}, {"vocab.json", "merges.txt"}, {"spiece.model"})
_SAVE_TOKENIZER = "download the model again, or save its tokenizer with transformers: tokenizer.save_pretrained(DIR)"


def prediction_of(model: Path) -> str:
    """What the pipeline's denoiser predicts, from its scheduler's config. Raises `ModelError`."""
    kind = read_config(model / "scheduler" / "scheduler_config.json").get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction"):
        raise ModelError(f"{model} predicts {brief(kind)}, expected epsilon or v_prediction")
    return str(kind)


def text_width(model: Path) -> int:
    """Channels of the text encoder's hidden states, from its config. Raises `ModelError`."""
    path = model / "text_encoder" / "config.json"
    width = read_config(path).get("hidden_size")
    if type(width) is not int or not 1 <= width <= MOST_WIDTH:
        raise ModelError(f"{path} has hidden_size {brief(width)}, expected a whole number from 1 to {MOST_WIDTH}")
    return width


def latent_factors(model: Path, family: Family) -> dict[str, str]:
    """`scaling_factor` and `shift_factor` of the VAE's config as the shortest decimals that read back the same.

    If the config has none, those of `family`. Raises `ModelError`, also if the VAE's latents do not fit the family.
    """
    path = model / "vae" / "config.json"
    config = read_config(path)
    blocks = config.get("block_out_channels", [64])  # the defaults of AutoencoderKL; each block but the last halves
    factor = 1 << (len(blocks) - 1) if isinstance(blocks, list) and 1 <= len(blocks) <= 8 else 0
    for name, seen, wanted in (("channels", config.get("latent_channels", 4), family.latent_channels),
                               ("pixels a side", factor, family.factor)):
        if seen != wanted:
            raise ModelError(f"latents of the VAE in {path.parent} have {brief(seen)} {name}, expected {wanted}",
                             hint="name another model, or set its family in [model]")
    return {"scaling_factor": _decimal(config, path, "scaling_factor") or family.scaling_factor,
            "shift_factor": _decimal(config, path, "shift_factor") or family.shift_factor}


SMALLEST = 1e-4  # smallest latent factor, and the inverse of the largest; published models have 0.1 to 2


def _decimal(config: Mapping[str, Any], path: Path, key: str) -> str | None:
    value = config.get(key)
    if value is None:
        return None
    zero = key == "shift_factor" and value == 0
    if type(value) not in (int, float) or not (zero or SMALLEST <= abs(value) <= 1 / SMALLEST) or (
            value < 0 and key == "scaling_factor"):
        raise ModelError(f"{path} has {key} {brief(value)}, expected a number from {SMALLEST} to {1 / SMALLEST:.0f}",
                         hint=FETCH_AGAIN)
    return repr(float(value)).removesuffix(".0")


def pipeline_index(model: Path) -> dict[str, Any]:
    """model_index.json of the pipeline directory `model`. Raises `ModelError`."""
    if not model.is_dir():
        raise ModelError(f"model {model} is not a directory", hint="--model takes a diffusers pipeline directory "
                         "(with model_index.json), or a Hub id like owner/name")
    return read_config(model / "model_index.json")


def infer_family(model: Path) -> str:
    """The family of the pipeline directory `model`, from its class name. Raises `ModelError`."""
    name = pipeline_index(model).get("_class_name")
    family = family_of_pipeline(name) if isinstance(name, str) else None
    if family is None:
        raise ModelError(f"{model} is a {name if isinstance(name, str) and len(name) < 80 else brief(name)}, which "
                         "belongs to no known family", hint="set family in [model]")
    return family


def weighted_files(model: Path, name: str) -> ComponentFiles:
    """The files of the component `name`, which has weights, in the pipeline directory `model`.

    Raises `ModelError` if files are missing, damaged, inconsistent, or lead to other files.
    """
    library, _ = class_of(pipeline_index(model), name, model)
    stem, folder = ("model" if library == "transformers" else "diffusion_pytorch_model"), model / name
    small = {"config.json": read_small(folder / "config.json", CONFIG_BYTES)}
    config = parse_config(small["config.json"], folder / "config.json")
    refuse_redirection(config, folder / "config.json")
    refuse_adapter(folder)
    weights = weight_files(folder, stem)
    if weights != (folder / f"{stem}.safetensors",):
        index = f"{stem}.safetensors.index.json"
        small[index] = read_small(folder / index, CONFIG_BYTES)
    check_sizes(config, folder / "config.json", read_shapes(weights))
    return ComponentFiles(folder=folder, config=config, small=small, weights=weights)


def tokenizer_files(model: Path, name: str) -> ComponentFiles:
    """The files of the tokenizer `name` of the pipeline directory `model`. Raises `ModelError`.

    Without a config a tokenizer has no length, without a vocabulary no ids: transformers loads it all the same, and the
    fault shows late or never.
    """
    class_of(pipeline_index(model), name, model)
    folder = model / name
    names = [one for one in _TOKENIZER_FILES if os.path.lexists(folder / one)]
    if "tokenizer_config.json" not in names:
        raise ModelError(f"{folder} has no tokenizer_config.json", hint=_SAVE_TOKENIZER)
    if not any(vocabulary <= set(names) for vocabulary in _VOCABULARIES):
        raise ModelError(f"{folder} has no vocabulary, expected tokenizer.json, vocab.json with merges.txt, or "
                         "spiece.model", hint=_SAVE_TOKENIZER)
    small = {one: read_small(folder / one, TOKENIZER_BYTES) for one in names}
    config = parse_config(small["tokenizer_config.json"], folder / "tokenizer_config.json")
    refuse_redirection(config, folder / "tokenizer_config.json")
    return ComponentFiles(folder=folder, config=config, small=small, weights=())


def single_model_files(folder: Path) -> ComponentFiles:
    """The files of a transformers model that lies alone in `folder`, as on the Hub. Raises `ModelError`."""
    if not os.path.lexists(folder / "config.json"):
        raise ModelError(f"{folder} has no config.json", hint="name the directory of a transformers model")
    refuse_adapter(folder)
    weights = weight_files(folder, "model")
    read_shapes(weights)
    several = weights != (folder / "model.safetensors",)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".txt", ".model"))
    small = {name: read_small(folder / name, TOKENIZER_BYTES) for name in names
             if several or not name.endswith(".index.json")}
    configs = {name: parse_config(data, folder / name) for name, data in small.items() if name.endswith("config.json")}
    return ComponentFiles(folder=folder, config=configs["config.json"], small=small, weights=weights)
