"""The collector of cyclic garbage rests while records are made, and works while rows are."""

from __future__ import annotations

import gc
import weakref

import pytest

from prep.runtime import gc_disabled, gc_enabled


class Knot:
    """A cycle of one object."""

    def __init__(self) -> None:
        self.itself = self


def tie() -> weakref.ref:
    return weakref.ref(Knot())


freeze, unfreeze = gc.freeze, gc.unfreeze  # which other tests' processes do without


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    gc.unfreeze()
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


def make_many() -> None:
    """More objects than any threshold of a generation."""
    for _ in range(3):
        _ = [[number] for number in range(200_000)]


@pytest.mark.slow
def test_nothing_is_collected_at_rest():
    with gc_disabled():
        knot = tie()
        make_many()
        assert knot() is not None
    make_many()
    assert knot() is None and gc.isenabled()


@pytest.mark.slow
def test_at_work_only_what_is_new_is_looked_at():
    with gc_disabled():
        old = tie()
        with gc_enabled():
            new = tie()
            make_many()
            assert new() is None and old() is not None
        assert not gc.isenabled()
    gc.collect()
    assert old() is None and gc.get_freeze_count() == 0


def test_an_error_leaves_it_as_it_was():
    with pytest.raises(KeyError), gc_disabled(), gc_enabled():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    with gc_disabled():
        pass
    assert not gc.isenabled()


def test_encode_rests_but_for_the_encoders(prep, photos, tiny_model, tmp_path, monkeypatch):
    from prep.encode import prepare, run
    from prep.encode.engines import local

    seen = {}

    def watch(module, name):
        real = getattr(module, name)

        def watched(*args, **options):
            seen[name] = gc.isenabled()
            return real(*args, **options)

        monkeypatch.setattr(module, name, watched)

    for module, name in ((prepare, "resolve_recipe"), (local, "run"), (run, "assemble_manifest")):
        watch(module, name)
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
                  "--resolution", "96")
    assert result.code == 0, result.err
    assert seen == {"resolve_recipe": False, "run": True, "assemble_manifest": False} and gc.isenabled()
