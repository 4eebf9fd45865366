"""`prep encode` keeps the look-up file and uses it; without it, or with a wrong one, the manifest is the same."""

from __future__ import annotations

import pytest

from prep.cache.ledger import inventory as census
from prep.cache.ledger.index import NAME
from prep.fs import stamps

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--mask", "sidecar", "--json")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(census, "WORTH", 1)
    monkeypatch.setattr(stamps, "SETTLE_NS", -(10**12))  # as if everything had been at rest for long

    def go(*options):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      *SMALL, *options)
        assert result.code == 0, result.err
        return (tmp_path / "m.json").read_bytes()

    return go


def test_a_run_with_nothing_to_do_opens_no_commit_and_no_keys(encode, tmp_path, monkeypatch):
    file, first = tmp_path / "cache" / NAME, encode()
    file.unlink(missing_ok=True)
    encode("--dry-run")
    assert not file.exists()
    assert encode() == first
    written = file.read_bytes()
    with monkeypatch.context() as patch:
        for reader in ("read_keys", "read_commit"):
            patch.setattr(census, reader, lambda *_: pytest.fail("something was read"))
        assert encode() == first
    assert file.read_bytes() == written
    for wrong in (b"", b"latentry/lookup\0", written[:-1], written[:100] + b"\xff" + written[101:]):
        file.write_bytes(wrong)
        assert encode() == first
        assert file.read_bytes() == written
