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
PIPELINE = ("model_index.json", "*/*.json", "*/*.jinja", "*/*.txt", "*/*.model", "*/*.safetensors")
SINGLE = ("*.json", "*.txt", "*.model", "*.safetensors")


def locate(model: str | Path, *, download: bool = False, parts: tuple[str, ...] = PIPELINE) -> Path:
    """The directory of `model`. A Hub id is looked up in the local cache; with `download`, its `parts` are downloaded.

    `owner/name@revision` names a branch, tag or commit; without one, it is the branch `main`. A `Path` is never a Hub
    id: where a manifest names a directory that is gone, the Hub may have another model of that name.
    Raises `ModelError` (exit 6) if there is none.
    """
    if Path(model).is_dir():
        return Path(model)
    if isinstance(model, Path):
        raise ModelError(f"the model's directory {model} does not exist",
                         hint="name the model with --model DIR, or move its directory together with the manifest")
    try:
        named = hub_id(str(model), "model")
    except Unparsed:
        if str(model).endswith(".safetensors") and Path(model).is_file():
            raise ModelError(f"model {model} is a single file, expected a diffusers directory",
                             hint=f"convert it first: prep convert {shell_name(str(model))} --config DIR -o OUT"
                             ) from None
        raise ModelError(f"model {without_secrets(str(model))} is neither a directory nor a Hub id",
                         hint="name a diffusers pipeline directory, or a Hub id like owner/name" if parts == PIPELINE
                         else "name a directory with config.json and weights, or a Hub id like owner/name") from None
    return _snapshot(named, download, parts)


def _snapshot(named: str, download: bool, parts: tuple[str, ...]) -> Path:
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
                         hint="name a directory, or add --download to download it from the Hub") from None


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
