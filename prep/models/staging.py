"""Stages a component's files, and nothing else, for libraries that load whatever lies in a directory.

transformers and diffusers also look for adapters, other weights, other tokenizers, torch.distributed checkpoints and
code, and each release looks for more. In a staged directory they find only files that the fingerprint covers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prep.models.files import ComponentFiles


@contextmanager
def staged(files: ComponentFiles) -> Iterator[Path]:
    """Yields a temporary directory with the component's small files, as they were read, and links to its weights.

    Weights must be copied out of their mapping before it is removed: see `loading.unmap`. Raises `OSError`.
    """
    with tempfile.TemporaryDirectory(prefix="latentry-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / files.folder.name
        folder.mkdir()
        for small, data in files.small.items():
            kept = _without_paths(data) if small == "tokenizer_config.json" else data
            (folder / small).write_bytes(kept)
        for path in files.weights:
            link_or_copy(path.resolve(), folder / files.weight_name(path))
        yield folder


def link_or_copy(target: Path, path: Path) -> None:
    """Makes `path` a link to the file `target` if this user may create links, else a copy. Raises `OSError`."""
    try:
        os.symlink(target, path)  # noqa: PTH211  (a test replaces it)
    except (OSError, NotImplementedError):  # Windows allows links only to developers and administrators
        shutil.copyfile(target, path)


def _without_paths(data: bytes) -> bytes:
    """A tokenizer's config without file paths: transformers prefers these to the files beside the config."""
    return json.dumps({key: value for key, value in json.loads(data).items()
                       if not (key.endswith("_file") and value is not None) and key != "init_inputs"}).encode()
