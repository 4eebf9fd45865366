"""A dataset with a table that is large beside all else, and how much memory something takes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from prep.cache.publish import publish_table
from prep.cache.store import open_cache
from prep.digest import canonical, with_checksum

LARGE = 32 << 20  # bytes


def enlarge(home: Path) -> None:
    """Replaces a table of a dataset by a large one, which only its digest says to be right."""
    document = json.loads((home / "manifest.json").read_bytes())
    cache = open_cache(home / "cache", create=False)
    cache.table(document["tables"]["findings"]).unlink()
    digest = publish_table(cache, lambda: [bytes(LARGE)])
    tables = {**document["tables"], "findings": digest}
    (home / "manifest.json").write_bytes(canonical(with_checksum({**document, "tables": tables})))


def peak_of(action: Callable[[], object]) -> int:
    """The most bytes that Python allocates at a time for `action`."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
