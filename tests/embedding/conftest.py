"""Models of random weights, built once."""

from __future__ import annotations

import pytest
from vision_models import KINDS, build


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    """The folder of a model of each kind, by name."""
    root = tmp_path_factory.mktemp("vision")
    return {kind: build(root / kind, kind) for kind in KINDS}
