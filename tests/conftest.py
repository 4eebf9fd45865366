"""Fixtures for every test: no network, no GPU, one place for the real pictures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any library reads them: tests never reach the network, and tiny models are quicker on few threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real pictures named by LATENTRY_REAL_DATA; without it the test is skipped."""
    named = os.environ.get("LATENTRY_REAL_DATA")
    if not named or not (Path(named) / "photos").is_dir():
        pytest.skip("LATENTRY_REAL_DATA does not name a folder with photos/")
    return Path(named).resolve()
