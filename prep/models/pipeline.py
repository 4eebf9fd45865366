"""A diffusers pipeline directory: its configs, weight files, family, prediction type and text width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.family import family_of_pipeline


def prediction_of(model: Path) -> str:
    """What the pipeline's denoiser predicts, from its scheduler's config. Raises `ModelError`."""
    kind = read_config(model / "scheduler" / "scheduler_config.json").get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction"):
        raise ModelError(f"{model} predicts {kind!r}, expected epsilon or v_prediction")
    return str(kind)


def text_width(model: Path) -> int:
    """Channels of the text encoder's hidden states, from its config. Raises `ModelError`."""
    width = read_config(model / "text_encoder" / "config.json").get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise ModelError(f"{model / 'text_encoder' / 'config.json'} has hidden_size {width!r}, expected a whole number")
    return width


def pipeline_index(model: Path) -> dict[str, Any]:
    """model_index.json of the pipeline directory `model`. Raises `ModelError`."""
    if not model.is_dir():
        raise ModelError(f"model {model} is not a directory", hint="--model takes a diffusers pipeline directory "
                         "(with model_index.json), or a Hub id like owner/name")
    return read_config(model / "model_index.json")


def infer_family(model: Path) -> str:
    """The family of the pipeline directory `model`, from its class name. Raises `ModelError`."""
    name = str(pipeline_index(model).get("_class_name"))
    family = family_of_pipeline(name)
    if family is None:
        raise ModelError(f"{model} is a {name}, which belongs to no family known here", hint="set family in [model]")
    return family


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError`."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}",
                         hint="a model is a diffusers pipeline directory with model_index.json") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, expected an object")
    return config


def weight_files(folder: Path, stem: str) -> tuple[Path, ...]:
    """The safetensors files that diffusers and transformers would load from `folder`. Raises `ModelError`.

    Where a single file lies beside an index, transformers takes the file and diffusers the index: refused.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file() and index.is_file():
        raise ModelError(f"{folder} has two sets of weights, {single.name} and {index.name}",
                         hint="libraries differ in which they load; remove one")
    if single.is_file():
        return (single,)
    if index.is_file():
        names = sorted(set(read_config(index).get("weight_map", {}).values()))
        if names and all(isinstance(name, str) and Path(name).name == name for name in names):
            return tuple(folder / name for name in names)
    raise ModelError(f"{folder} has no {single.name}", hint="only safetensors are read; convert .bin weights with "
                     "diffusers: pipeline.save_pretrained(DIR, safe_serialization=True)")
