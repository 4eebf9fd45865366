"""Pictures without captions, a memory of each test's own, and no pauses."""

from __future__ import annotations

import pytest
from pictures import draw


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "remembered"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("prep.captioning.endpoint.FIRST_PAUSE", 0.001)


@pytest.fixture
def bare(tmp_path):
    """Five pictures, one with a caption: two in a directory of their own, and two of the same bytes."""
    root = tmp_path / "photos"
    for number, name in enumerate(["0.png", "1.png", "10_grey_cats/2.png", "10_grey_cats/3.png", "4.png"]):
        draw(root / name, (96, 64), seed=number % 4)
    (root / "1.txt").write_text("written by hand\n")
    return root
