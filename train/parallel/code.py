"""A digest of Latentry's own code: ranks with different code would train different models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from prep.digest import digest_parts


def code_digest() -> str:
    """The digest of every module of `prep` and `train`, with their names."""
    parts = []
    for package in ("prep", "train"):
        spec = find_spec(package)
        assert spec is not None and spec.origin
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            parts += [path.relative_to(root.parent).as_posix().encode(), path.read_bytes()]
    return digest_parts(parts)
