"""Fingerprints: which weights and configs made a row, told by their bytes and not by a name or revision.

    vae    SHA-256 over vae/config.json (without `_*` keys) and the safetensors file(s) that would be loaded
    text   the same over each text encoder, and over the files of each tokenizer

A file in the Hub's cache is a link to a blob named by its SHA-256 (large files), so its digest costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prep.digest import digest_json, digest_parts
from prep.errors import ModelError
from prep.models.pipeline import read_config, weight_files

FileDigest = Callable[[Path], str]  # so that callers can remember digests between runs
_BLOCK = 1 << 22
_HEX64 = re.compile("[0-9a-f]{64}")

# What a tokenizer is made of, in transformers: vocabularies, merges, and the configs that change its output.
_TOKENIZER_FILES = ("added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json",
                    "tokenizer_config.json", "vocab.json")


def digest_file(path: Path) -> str:
    """SHA-256 of the file at `path`, or what its Hub blob's name says it is."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _HEX64.fullmatch(target.name):
        return target.name
    with path.open("rb") as file:
        return digest_parts(iter(lambda: file.read(_BLOCK), b""))


def vae_fingerprint(model: Path, file_digest: FileDigest = digest_file) -> str:
    """The fingerprint of the VAE below the pipeline directory `model`. Raises `ModelError`."""
    return digest_json({"kind": "vae", "parts": _weights(model / "vae", "diffusion_pytorch_model", file_digest)})


def text_fingerprint(model: Path, file_digest: FileDigest = digest_file) -> str:
    """The fingerprint of the tokenizer and text encoder below `model`. Raises `ModelError`."""
    parts = _weights(model / "text_encoder", "model", file_digest)
    tokenizer = [[path.name, _digest_config(path, file_digest)] for path in _tokenizer_files(model / "tokenizer")]
    return digest_json({"kind": "text", "parts": parts, "tokenizer": tokenizer})


def _tokenizer_files(folder: Path) -> list[Path]:
    """Those of its files that are there. Without its config a tokenizer has no length, without words it has no ids:
    transformers loads it nevertheless, and what is wrong shows late or never."""
    names = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if "tokenizer_config.json" not in names:
        raise ModelError(f"{folder} has no tokenizer_config.json", hint=_SAVE_TOKENIZER)
    if not any(vocabulary <= set(names) for vocabulary in _VOCABULARIES):
        raise ModelError(f"{folder} has no vocabulary, expected tokenizer.json, vocab.json with merges.txt, or "
                         "spiece.model", hint=_SAVE_TOKENIZER)
    return [folder / name for name in names]


_VOCABULARIES = ({"tokenizer.json"}, {"vocab.json", "merges.txt"}, {"spiece.model"})
_SAVE_TOKENIZER = "fetch the model again, or save its tokenizer with transformers: tokenizer.save_pretrained(DIR)"


def _weights(folder: Path, stem: str, file_digest: FileDigest) -> list[list[str]]:
    config = read_config(folder / "config.json")
    return [["config.json", _digest_public(config)],
            *([path.name, _digest_existing(path, file_digest)] for path in weight_files(folder, stem))]


def _digest_existing(path: Path, file_digest: FileDigest) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def _digest_public(config: dict[str, Any]) -> str:
    """Digest of a config without its `_*` keys (versions and origins), numbers spelled as Python spells them."""
    public = {key: value for key, value in config.items() if not key.startswith("_") and key not in _LIBRARY_KEYS}
    return digest_json({"config": json.dumps(public, sort_keys=True)})


_LIBRARY_KEYS = ("transformers_version", "torch_dtype", "dtype")  # written by the saving library; decide no value


def _digest_config(path: Path, file_digest: FileDigest) -> str:
    if path.name == "tokenizer_config.json":
        return _digest_public({k: v for k, v in read_config(path).items() if k not in _TOKENIZER_NOISE})
    return _digest_existing(path, file_digest)


_TOKENIZER_NOISE: Iterable[str] = ("name_or_path", "special_tokens_map_file", "is_local", "backend", "local_files_only")
