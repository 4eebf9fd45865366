"""The small manifest of these tests as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_manifest import write_small

from prep.manifest import document as manifests
from prep.manifest.describe import Audit, open_audit


@pytest.fixture
def small(tmp_path: Path) -> Audit:
    """The small manifest, opened."""
    return open_audit(manifests.read(write_small(tmp_path)))
