"""A directory with a component's files and nothing else, for libraries that load whatever lies in a directory.

transformers and diffusers look for adapters, other weights, other tokenizers, checkpoints of torch.distributed and code
beside what they are asked for, and each release for more. Here they find what the fingerprint covers.
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
    """A directory with the component's small files as they were read, and links to its weights; it goes afterwards.

    Weights must be copied out of their mapping before it ends: see `loading.unmap`. Raises `OSError`.
    """
    with tempfile.TemporaryDirectory(prefix="latentry-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / files.folder.name
        folder.mkdir()
        for small, data in files.small.items():
            kept = _without_paths(data) if small == "tokenizer_config.json" else data
            (folder / small).write_bytes(kept)
        for path in files.weights:
            link_or_copy(path.resolve(), folder / path.name)
        yield folder


def link_or_copy(target: Path, path: Path) -> None:
    """Makes `path` lead to the file `target`: a link where this user may make one, else a copy. Raises `OSError`."""
    try:
        os.symlink(target, path)  # noqa: PTH211  (a test replaces it)
    except (OSError, NotImplementedError):  # Windows allows it to developers and administrators alone
        shutil.copyfile(target, path)


def _without_paths(data: bytes) -> bytes:
    """A tokenizer's config without paths of files: transformers prefers them to the files beside the config."""
    return json.dumps({key: value for key, value in json.loads(data).items()
                       if not (key.endswith("_file") and value is not None) and key != "init_inputs"}).encode()
