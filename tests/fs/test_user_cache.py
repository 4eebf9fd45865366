"""Where a user's caches are: by the system's custom, or as the environment says."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from prep.fs.user_cache import user_cache


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("LATENTRY_USER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("system", "variables", "wanted"), [
    (Unix, {}, ".cache/latentry"), (Unix, {"XDG_CACHE_HOME": "/x"}, "/x/latentry"),
    (Unix, {"XDG_CACHE_HOME": "relative"}, ".cache/latentry"), (MacOS, {}, "Library/Caches/latentry"),
])
def test_the_systems_custom(home, monkeypatch, system, variables, wanted):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: system(name, appauthor).user_cache_dir)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert user_cache() == home / wanted


def test_the_environment_names_another(monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


def test_a_user_without_a_home_has_none(monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/latentry")
    assert user_cache() is None
