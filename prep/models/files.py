"""Reads the files of a pipeline component, once: libraries load only files that the fingerprint covers.

Model directories are untrusted. Files are opened without blocking, because a pipe may never answer; size and depth of
configs are limited, far above real ones; keys that make a library load other files are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from prep.errors import ModelError, first_line
from prep.parse import brief

KOLORS = "kolors"  # the library, in model_index.json, of the text encoder and tokenizer that diffusers itself has
VOCABULARY = "tokenizer.model"  # of that tokenizer: sentencepiece's
INDEX, MODULAR = "model_index.json", "modular_model_index.json"  # what names the components of a pipeline
CONFIG_BYTES = 1 << 22  # limit for a config or a weight index; the largest known index has half a megabyte
TOKENIZER_BYTES = 1 << 28  # limit for a tokenizer file; Gemma's has 33 MB
DEPTH = 32  # limit for nested objects and lists; real configs have 5
FETCH_AGAIN = "download the model again, or save it again with diffusers: pipeline.save_pretrained(DIR)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleFile:
    """A model in one file, with the pipeline directory that has what files lack: configs, tokenizers, other parts.

    `model / "vae"` is a place in that directory; as text it is the file. Made by `pipeline.open_single`.
    """

    path: Path
    config: Path

    def __truediv__(self, name: str) -> Path:
        return self.config / name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name


Model = Path | SingleFile  # Path: a pipeline directory


Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor's entry in the header of a file."""

    path: Path
    dtype: str  # as safetensors or GGUF spell it: F32, Q4_K
    shape: Shape
    begin: int  # in the file
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentFiles:
    """The files that a component is loaded from."""

    folder: Path
    config: Mapping[str, Any]  # of config.json, or of tokenizer_config.json
    small: Mapping[str, bytes]  # file name → its bytes
    weights: tuple[Path, ...]  # safetensors files; none for a tokenizer
    usual_name: str = ""  # that libraries look for, if `weights` is one file of a variant, like model.fp16.safetensors
    kind: tuple[str, str] = ("", "")  # library and class; empty for a model that lies alone in its directory
    # Of a single file: the component's tensors by their names without what tells components apart → as the file has it.
    part: Mapping[str, str] = field(default_factory=dict)
    # Each tensor in the headers of `weights`, by the names in `part` if there is one.
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """Where its weights are, for messages."""
        return self.weights[0] if self.part else self.folder

    def weight_name(self, path: Path) -> str:
        """The name of one of `weights` as if it were of no variant: what variants differ in is their bytes."""
        return self.usual_name or path.name


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError`."""
    return parse_config(read_small(path, CONFIG_BYTES), path)


def parse_config(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `path`. Raises `ModelError`."""
    try:
        config = json.loads(data)
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {first_line(error)[:200]}", hint=FETCH_AGAIN) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, expected an object", hint=FETCH_AGAIN)
    level: list[Any] = [config]
    for _ in range(DEPTH):
        level = [value for one in level for value in (one.values() if isinstance(one, dict) else one)
                 if isinstance(value, dict | list)]
    if level:
        raise _too_deep(path)
    return config


def _too_deep(path: Path) -> ModelError:
    return ModelError(f"{path} is nested too deeply, expected at most {DEPTH} levels", hint=FETCH_AGAIN)


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes; links are followed. Raises `ModelError`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size + 1) if size <= most else b""
    except OSError as error:
        raise unreadable(path, error) from None
    if size > most:
        raise ModelError(f"{path} has {size} bytes, expected at most {most}", hint=FETCH_AGAIN)
    if data is None or len(data) != size:  # None: a file of /proc or FUSE without data at the moment
        raise ModelError(f"{path} changed while it was read", hint=WAIT)
    return data


WAIT = "wait until no program writes to the model, then run the same command again; finished work is kept"


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading, without waiting for a writer. Raises `OSError`, `ModelError` for a pipe."""
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))
    file = os.fdopen(os.open(path, flags), "rb")
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelError(f"{path} is a pipe or a device, expected a regular file", hint=FETCH_AGAIN)
    return file


def unreadable(path: Path, error: OSError) -> ModelError:
    """The error to raise for a model file that the system cannot read."""
    return ModelError(f"cannot read {path}: {error.strerror or error}",
                      hint=elsewhere(path.parent) or "a model is a diffusers pipeline directory with model_index.json")


def distilled(model: Model) -> ModelError:
    """The error to raise for a model whose denoiser is told where each step ends, as no step of training is."""
    return ModelError(f"{model} was distilled to few steps: its denoiser is also told where each step ends, and cannot "
                      "be trained", hint="name the model that it was distilled from: of FLUX.3 klein, klein-base")


# ---- modular repositories, which may name components of others ------------------------------------------------------


def entry_in(value: object) -> Mapping[str, Any]:
    """Where a value of modular_model_index.json says that its component is; empty: it is none."""
    return value[2] if isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict) else {}


def class_in(value: list[Any]) -> list[Any]:
    """The library and class of a component of modular_model_index.json: those that it was saved as, else expected as.
    """
    saved, expected = value[:2], value[2].get("type_hint")
    return saved if saved != [None, None] or not isinstance(expected, list) else expected


def elsewhere(folder: Path) -> str:
    """What to do about the folder of a component, if it is missing, and a modular repository names another for it."""
    model = folder.parent
    if os.path.lexists(folder) or os.path.lexists(model / INDEX) or not os.path.lexists(model / MODULAR):
        return ""
    entry = entry_in(read_config(model / MODULAR).get(folder.name))
    repository, inside = entry.get("pretrained_model_name_or_path"), entry.get("subfolder")
    if not isinstance(repository, str):
        return ""
    there = f"{brief(inside)} of {brief(repository)}" if inside else brief(repository)
    return f"{MODULAR} says that it is {there}: download that into {folder}"


# ---- adapters and config keys that lead a library to other files -----------------------------------------------------

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# Config keys that make transformers load code, or weights and tokenizers that the fingerprint does not cover.
LEADS_ELSEWHERE = {
    "auto_map": "asks for custom code, which is never run",
    "transformers_weights": "names weights that the fingerprint does not cover",
    "fast_tokenizer_files": "names tokenizers that the fingerprint does not cover",
}


def refuse_adapter(folder: Path) -> None:
    """Raises `ModelError` if a PEFT adapter lies beside the weights: transformers would load it and its base model."""
    for name in ADAPTERS:
        if os.path.lexists(folder / name):
            raise ModelError(f"{folder} has {name}: an adapter beside the weights is not in the fingerprint",
                             hint="merge it with peft (merge_and_unload) and save the model again, or remove it")


def refuse_redirection(config: Mapping[str, Any], path: Path, kind: tuple[str, str] = ("", "")) -> None:
    """Raises `ModelError` if a config makes a library load code or files that no fingerprint covers; `kind`: library
    and class of its component.

    The published configs of ChatGLM name the code of its authors. diffusers' classes, which are that code, ignore it.
    """
    for key, what in LEADS_ELSEWHERE.items():
        if config.get(key) and not (key == "auto_map" and kind[0] == KOLORS):
            raise ModelError(f"{path} {what}: {key} is {brief(config[key])}",
                             hint=f"name another model, or remove {key} if the other files are complete")
    for key, value in config.items():
        if "attn_implementation" in key and "/" in str(value):
            raise ModelError(f"{path} asks for an attention kernel from the Hub: {key} is {brief(value)}",
                             hint=f"remove {key} to use the library's own attention")
