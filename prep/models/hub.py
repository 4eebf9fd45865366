"""Finds a model: a local directory, or a snapshot in the Hub's cache; uses the network only on request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from prep.errors import ModelError
from prep.formatting import shell_name, without_secrets
from prep.parse import Unparsed, hub_id

# The files we use of a pipeline, or of a single model: configs, tokenizers and safetensors; never pickles or code.
CONFIGS = ("model_index.json", "modular_model_index.json", "*/*.json", "*/*.jinja", "*/*.txt", "*/*.model")
PIPELINE = (*CONFIGS, "*/*.safetensors")
SINGLE = ("*.json", "*.txt", "*.model", "*.safetensors")


def locate(model: str | Path, *, download: bool | None = False, parts: tuple[str, ...] = PIPELINE) -> Path:
    """The directory of `model`. A Hub id is looked up in the local cache; with `download`, its `parts` are downloaded.

    `owner/name@revision` names a branch, tag or commit; without one, it is the branch `main`. A `Path` is never a Hub
    id: where a manifest names a directory that is gone, the Hub may have another model of that name. `download=None` is
    for commands that have no --download. Raises `ModelError` (exit 6) if there is none.
    """
    if Path(model).is_dir():
        return Path(model)
    if not isinstance(model, str):
        raise ModelError(f"the model's directory {model} does not exist",
                         hint="name the model with --model DIR, or move its directory together with the manifest")
    return _snapshot(checked_id(model, parts), download, parts)


def checked_id(model: str, parts: tuple[str, ...] = PIPELINE) -> str:
    """`model`, which is no directory, if it is a Hub id. Raises `ModelError`, also for the name of a single file."""
    if is_single_file(model):
        raise _single_file(model, parts)
    try:
        return hub_id(model, "model")
    except Unparsed:
        raise ModelError(f"model {without_secrets(model)} is neither a directory nor a Hub id",
                         hint="name a directory with config.json and weights, or a Hub id like owner/name" if
                         parts == SINGLE else "name a diffusers pipeline directory, or a Hub id like owner/name"
                         ) from None


_SINGLE_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


def is_single_file(model: str) -> bool:
    """Whether `model` is a file or, if there is none, has the name of one: the Hub has no models of such names."""
    return "://" not in model and (Path(model).suffix.lower() in _SINGLE_FILES or Path(model).is_file())


def convert_command(file: str) -> str:
    """The command that makes a directory of a single file."""
    return f"prep convert {shell_name(file)} --config DIR -o OUT"


def _single_file(model: str, parts: tuple[str, ...]) -> ModelError:
    """The error to raise for a model that is a single file: every command says the same."""
    gone = "" if Path(model).is_file() else "there is no such file; "
    if parts == SINGLE:
        return ModelError(f"model {model} is a single file, expected a directory with config.json and weights",
                          hint=f"{gone}name its directory, or a Hub id like owner/name")
    if Path(model).suffix.lower() != ".safetensors":
        hint = ("only safetensors are read, since other files can run code or are quantized: look for "
                f"NAME.safetensors, then {convert_command('NAME.safetensors')}")
    else:
        hint = (f"convert it first: {convert_command(model)} (DIR: a diffusers directory or Hub id of the same "
                "architecture)")
    return ModelError(f"model {model} is a single file, expected a diffusers directory", hint=gone + hint)


def _snapshot(named: str, download: bool | None, parts: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # here: most runs name a directory, and this import takes 0.3 s

    try:
        name, _, revision = named.partition("@")
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(parts),
                                      ignore_patterns=_unused(name, revision) if download else None,
                                      local_files_only=not download))
    except Exception as error:  # also of the library that connects, which has no class in common with others
        if download:
            raise ModelError(f"model '{named}' could not be downloaded: {error}",
                             hint="check the network; a model that is in the Hub's cache needs no --download") from None
        raise ModelError(f"model '{named}' is neither a directory nor in the local Hub cache",
                         hint="name a directory; this command downloads nothing" if download is None else
                         "name a directory, or add --download to download it from the Hub") from None


def _unused(name: str, revision: str) -> list[str]:
    """The files of a Hub model that are not worth downloading, as patterns; none if the Hub does not list its files."""
    from huggingface_hub import list_repo_files

    try:
        return [escape(file) for file in unused_variants(list_repo_files(name, revision=revision or None))]
    except Exception:  # as above; the download says what is wrong, or finds the model in the cache
        return []


_OF_VARIANT = re.compile(r"(?P<stem>(?:.*/)?[^/.]+?)(?:\.\w+(?:-\d+-of-\d+)?\.safetensors|-\d+-of-\d+\.\w+\.safetensors"
                         r"|\.safetensors\.index\.\w+\.json)", re.ASCII)


def unused_variants(files: Iterable[str]) -> list[str]:
    """Those of `files` that are weights of a variant beside weights without one: `variant_of` never chooses them."""
    there = set(files)
    return [file for file in sorted(there) if (found := _OF_VARIANT.fullmatch(file))
            and there & {f"{found['stem']}.safetensors", f"{found['stem']}.safetensors.index.json"}]
