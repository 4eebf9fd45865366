"""Fingerprints: identify the weights and configs that made a row by their bytes, not by a name or revision.

    vae    SHA-256 over vae/config.json (without `_*` keys) and the safetensors file(s) of its weights
    text   the same over each text encoder, and over the files of each tokenizer

Of a single file, instead of a file of weights: over the component's tensors, their names, dtypes, shapes and bytes. So
files that differ only in other components have one VAE, wherever they lie. A directory of the same weights has another
fingerprint.

Every byte is read: a file in the Hub's cache links to a blob named by its SHA-256, but a write through the link changes
the bytes and not the name. Callers may remember digests by file stamps.

A digest is known before weights are loaded: it is part of keys, or compared by checks that come before. So the first
time, files are read twice. Of the five CPU seconds that the digest of SDXL's denoiser takes, one is of reading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from prep.digest import digest_bytes, digest_json, digest_parts
from prep.errors import ModelError
from prep.models.checkpoints.parts import is_harmless
from prep.models.components import numbered
from prep.models.configs import pipeline_index
from prep.models.families.registry import families_of_pipeline
from prep.models.files import WAIT, ComponentFiles, Model, StoredTensor, open_regular, unreadable
from prep.models.pipeline import APART, PROCESSOR, tokenizer_files, weighted_files
from prep.models.weights import scales_in
from prep.progress import Tick, uncounted

Part = tuple[tuple[str, StoredTensor], ...]  # tensors of a file by name, sorted; empty: the whole file
_BLOCK = 1 << 20


class FileDigest(Protocol):
    """`digest_file`, or what remembers its answers between runs."""

    def __call__(self, path: Path, part: Part = (), tick: Tick = uncounted) -> str: ...


def digest_file(path: Path, part: Part = (), tick: Tick = uncounted) -> str:
    """SHA-256 of the bytes of the file at `path`, or of some of its tensors; `tick` counts them. Raises `OSError`,
    `ModelError` if it is not a regular file, or shorter than its tensors.
    """
    with open_regular(path) as file:
        return digest_parts(_bytes_of(file, path, part, tick))


def _bytes_of(file: BinaryIO, path: Path, part: Part, tick: Tick) -> Iterator[bytes]:
    """All bytes, or a line for each tensor of the part, and its bytes."""
    while not part and (data := file.read(_BLOCK)):
        yield data
        tick(len(data))
    for name, tensor in part:
        yield json.dumps([name, tensor.dtype, list(tensor.shape)]).encode() + b"\n"
        file.seek(tensor.begin)
        for at in range(tensor.begin, tensor.end, _BLOCK):
            wanted = min(_BLOCK, tensor.end - at)
            data = file.read(wanted)
            if len(data) != wanted:
                raise ModelError(f"{path} changed while it was read", hint=WAIT)
            yield data
            tick(wanted)


def ticking(file_digest: FileDigest, count: Tick) -> FileDigest:
    """`file_digest`, with all bytes of files counted by `count`: those of a digest that is remembered at once."""
    def digest(path: Path, part: Part = (), tick: Tick = uncounted) -> str:
        left = _size(path, part)

        def read(bytes_read: int) -> None:
            nonlocal left
            left -= bytes_read
            tick(bytes_read)
            count(bytes_read)

        found = file_digest(path, part, read)
        count(left)
        return found

    return digest


def _size(path: Path, part: Part) -> int:
    return sum(tensor.end - tensor.begin for _, tensor in part) if part else path.stat().st_size


class Memory(Protocol):
    """What keeps facts about files between runs: `prep.fs.memo.Memo`."""

    def get_or_compute(self, path: Path, kind: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RememberedDigest:
    """`digest_file`, remembered for unchanged files. It can be sent to other processes if `memory` can."""

    memory: Memory
    kind: str  # of fact that the digest of a whole file is
    key: str  # of the digest in that fact

    def __call__(self, path: Path, part: Part = (), tick: Tick = uncounted) -> str:
        kind = self.kind
        if part:
            kind += f" {digest_json({'part': [[name, one.dtype, one.begin, one.end] for name, one in part]})}"
        return str(self.memory.get_or_compute(path, kind, lambda: {self.key: digest_file(path, part, tick)})[self.key])


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """The files of a pipeline's text encoders and tokenizers, by component name, in order of their numbers."""

    encoders: Mapping[str, ComponentFiles]
    tokenizers: Mapping[str, ComponentFiles]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The fingerprint that keys were made with; loaded files must match it."""

    digest: str
    file_digest: FileDigest

    def require(self, found: str, what: str) -> None:
        """Raises `ModelError` unless `found`, the fingerprint of the files that `what` was loaded from, matches."""
        if found != self.digest:
            raise ModelError(f"{what} changed while this command ran: its fingerprint is {found[:12]}, expected "
                             f"{self.digest[:12]}", hint=WAIT)


def vae_files(model: Model) -> ComponentFiles:
    """The files of the VAE of `model`. Raises `ModelError`."""
    return weighted_files(model, "vae")


def text_files(model: Model) -> TextFiles:
    """The files of the text encoders and tokenizers of `model`. Raises `ModelError`."""
    index = pipeline_index(model)
    families = families_of_pipeline(index.get("_class_name")).values()
    apart = [name for name in APART if any(name in family.components for family in families)]
    tokenizers = [name for name in numbered(index, "tokenizer") if name in index or PROCESSOR not in apart]
    return TextFiles(encoders={name: weighted_files(model, name) for name in numbered(index, "text_encoder")},
                     tokenizers={name: tokenizer_files(model, name) for name in [*tokenizers, *apart]})


def vae_fingerprint(model: Model, file_digest: FileDigest = digest_file) -> str:
    """The fingerprint of the VAE of `model`. Raises `ModelError`."""
    return digest_vae(vae_files(model), file_digest)


def text_fingerprint(model: Model, file_digest: FileDigest = digest_file) -> str:
    """The fingerprint of the text encoders and tokenizers of `model`. Raises `ModelError`."""
    return digest_text(text_files(model), file_digest)


def digest_vae(files: ComponentFiles, file_digest: FileDigest) -> str:
    """The fingerprint of a VAE with these files. Raises `ModelError` when one cannot be read."""
    return digest_json({"kind": "vae", "parts": digest_weighted(files, file_digest)})


def digest_text(files: TextFiles, file_digest: FileDigest) -> str:
    """The fingerprint of text encoders and tokenizers with these files. Raises `ModelError` when one cannot be read.

    A pipeline with one of each has no `more`, so its digest is the same as before several were supported. The tokenizer
    may be that of a processor.
    """
    encoders = {name: digest_weighted(found, file_digest) for name, found in files.encoders.items()}
    tokenizers = {name: digest_tokenizer(found) for name, found in files.tokenizers.items()}
    first = {"kind": "text", "parts": encoders.pop("text_encoder"), "tokenizer": tokenizers.pop(next(iter(tokenizers)))}
    more = sorted([name, digests] for name, digests in {**encoders, **tokenizers}.items())
    return digest_json({**first, "more": more} if more else first)


def digest_weighted(files: ComponentFiles, file_digest: FileDigest) -> list[list[str]]:
    """Names and digests of a component's config and weights. Raises `ModelError` when one cannot be read.

    Weights with scales beside them say so: before these were applied, the same files made other rows.
    """
    if files.part:
        part = _part_of(files)
        weights = [["tensors", digest_existing(files.weights[0], lambda path: file_digest(path, part))]]
    else:
        weights = [[files.weight_name(path), digest_existing(path, file_digest)] for path in files.weights]
    return [["config.json", digest_public(files.config)], *weights,
            *([["scales", "applied"]] if scales_in(files.tensors).of else [])]


def _part_of(files: ComponentFiles) -> Part:
    """The tensors of a single file that identify a component; empty: its files are its own."""
    return tuple(sorted((name, one) for name, one in files.tensors.items() if not is_harmless(files.part[name]))
                 if files.part else ())


def bytes_of(components: Iterable[ComponentFiles]) -> int:
    """Bytes of weights that the digests of these components are of. Raises `OSError`, `ModelError`."""
    return sum(_size(path, part) for files in components for part in [_part_of(files)] for path in files.weights)


def digest_tokenizer(files: ComponentFiles) -> list[list[str]]:
    """Names and digests of a tokenizer's files."""
    config = {key: value for key, value in files.config.items() if key not in _TOKENIZER_NOISE}
    return [[name, digest_public(config) if name == "tokenizer_config.json" else digest_bytes(data)]
            for name, data in files.small.items()]


def digest_existing(path: Path, file_digest: Callable[[Path], str]) -> str:
    """`file_digest` of the file at `path`. Raises `ModelError` when it cannot be read."""
    try:
        return file_digest(path)
    except OSError as error:
        raise unreadable(path, error) from None


def digest_public(config: Mapping[str, Any]) -> str:
    """Digest of a config without its `_*` keys (versions and origins), with numbers as Python writes them."""
    public = {key: value for key, value in config.items() if not key.startswith("_") and key not in _LIBRARY_KEYS}
    return digest_json({"config": json.dumps(public, sort_keys=True)})


_LIBRARY_KEYS = ("transformers_version", "torch_dtype", "dtype")  # written by the saving library; they affect no value
_TOKENIZER_NOISE: Iterable[str] = ("name_or_path", "special_tokens_map_file", "is_local", "backend", "local_files_only")
