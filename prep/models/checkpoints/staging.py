"""Stages a component's files, and nothing else, for libraries that load whatever lies in a directory.

transformers and diffusers also look for adapters, other weights, other tokenizers, torch.distributed checkpoints and
code, and each release looks for more. In a staged directory they find only files that the fingerprint covers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from prep.models.checkpoints.stored import Stored, write_plain
from prep.models.files import ComponentFiles
from prep.models.weights import Scales, read_tensors


@contextmanager
def staged(files: ComponentFiles, dtype: torch.dtype = torch.float32) -> Iterator[Path]:
    """Yields a temporary directory with the component's small files, as they were read, and links to its weights.

    Files with scales beside their weights are written anew, with the weights that they mean, as `dtype`: for the time
    of loading, that takes as much room as the model has in `dtype`.
    Weights must be copied out of their mapping before it is removed: see `loading.unmap`. Raises `OSError`, and
    `ModelError` for scales that are not understood.
    """
    stored = Stored.of(read_tensors(files.weights))
    with tempfile.TemporaryDirectory(prefix="latentry-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / files.folder.name
        folder.mkdir()
        for small, data in files.small.items():
            kept = _WITHOUT_PATHS.get(small, bytes)(data)
            (folder / small).write_bytes(_of_plain(small, kept, stored.scales) if stored.scales.beside else kept)
        for path in files.weights:
            if stored.scales.beside:
                write_plain(stored, path, folder / files.weight_name(path), dtype)
            else:
                link_or_copy(path.resolve(), folder / files.weight_name(path))
        yield folder


def link_or_copy(target: Path, path: Path) -> None:
    """Makes `path` a link to the file `target` if this user may create links, else a copy. Raises `OSError`."""
    try:
        os.symlink(target, path)  # noqa: PTH211  (a test replaces it)
    except (OSError, NotImplementedError):  # Windows allows links only to developers and administrators
        shutil.copyfile(target, path)


def _config_without_paths(data: bytes) -> bytes:
    """A tokenizer's config without file paths: transformers prefers these to the files beside the config."""
    return json.dumps({key: value for key, value in json.loads(data).items()
                       if not (key.endswith("_file") and value is not None) and key != "init_inputs"}).encode()


def _tokens_alone(data: bytes) -> bytes:
    """A tokenizer's special tokens, without the other arguments that transformers would take from their file."""
    return json.dumps({key: value for key, value in json.loads(data).items()
                       if key.endswith(("_token", "_tokens"))}).encode()


_WITHOUT_PATHS: Mapping[str, Callable[[bytes], bytes]] = {
    "tokenizer_config.json": _config_without_paths, "special_tokens_map.json": _tokens_alone}


def _of_plain(name: str, data: bytes, scales: Scales) -> bytes:
    """A small file for weights that have been multiplied by their scales: a config without what tells of these, and an
    index that does not place them.
    """
    if name == "config.json":
        return json.dumps({key: value for key, value in json.loads(data).items() if key != "quantization_config"}
                          ).encode()
    if ".index." in name:
        index = json.loads(data)
        index["weight_map"] = {key: file for key, file in index["weight_map"].items() if key not in scales.beside}
        return json.dumps(index).encode()
    return data
