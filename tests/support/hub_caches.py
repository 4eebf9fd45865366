"""Caches of the Hub, laid out as huggingface_hub does."""

from __future__ import annotations

import shutil
from pathlib import Path

from prep.models.fingerprint import digest_file


def hub_cache(home: Path, model: Path, name: str) -> Path:
    """A Hub cache as huggingface_hub lays it out: large files are links to blobs named by their SHA-256."""
    repo = home / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("a" * 40)
    for path in sorted(model.rglob("*")):
        if path.is_file():
            blob = repo / "blobs" / digest_file(path)
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, blob)
            link = snapshot / path.relative_to(model)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    return snapshot
