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

from prep.models.files import ComponentFiles
from prep.models.weights import scales_in


@contextmanager
def staged(files: ComponentFiles) -> Iterator[Path]:
    """Yields a temporary directory with the component's small files, as they were read, and links to its weights.

    Weights that no library reads as they lie there, of a single file or with scales, are not among them: these are
    given to it (`converted.weights_to_give`).
    Weights must be copied out of their mapping before it is removed: see `loading.unmap`. Raises `OSError`.
    """
    given = bool(files.part) or bool(scales_in(files.tensors).beside)
    with tempfile.TemporaryDirectory(prefix="latentry-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / files.folder.name
        folder.mkdir()
        for small, data in files.small.items():
            if not (given and ".index." in small):
                kept = _WITHOUT_PATHS.get(small, bytes)(data)
                (folder / small).write_bytes(_of_plain(kept) if given and small == "config.json" else kept)
        for path in () if given else files.weights:
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


def _of_plain(data: bytes) -> bytes:
    """A config for weights that have been multiplied by their scales: without what tells of these."""
    return json.dumps({key: value for key, value in json.loads(data).items() if key != "quantization_config"}).encode()
