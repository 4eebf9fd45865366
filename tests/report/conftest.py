"""The small manifest of these tests as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_manifest import write_small

from prep.manifest.document import read_manifest
from prep.manifest.opened import Audit, open_audit


@pytest.fixture
def small(tmp_path: Path) -> Audit:
    """The small manifest, opened."""
    return open_audit(read_manifest(write_small(tmp_path)))
