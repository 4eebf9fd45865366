"""The digests by which files are compared with objects: those that are asked for, and no others."""

from __future__ import annotations

import hashlib

import pytest

from train.runs.stored import objects
from train.runs.stored.objects import UPLOAD_PART, digests_of

SIZES = (0, 1, UPLOAD_PART - 1, UPLOAD_PART, UPLOAD_PART + 1, 2 * UPLOAD_PART)


def md5(data: bytes):
    return hashlib.md5(data, usedforsecurity=False)


def in_parts(data: bytes) -> str:
    parts = [md5(data[start:start + UPLOAD_PART]).digest() for start in range(0, len(data), UPLOAD_PART)]
    return f"{md5(b''.join(parts)).hexdigest()}-{len(parts)}"


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_named_by_the_tag_of_its_bytes(tmp_path, size):
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    path = tmp_path / "file"
    path.write_bytes(data)
    for tag in (md5(data).hexdigest(), in_parts(data)):
        version, other = f"{tag} {size}", f"{tag.translate(str.maketrans('0123456789', '1234567890'))} {size}"
        assert digests_of(path, version).named_by(version)
        assert digests_of(path, version).sha256 == hashlib.sha256(data).hexdigest() == digests_of(path).sha256
        assert not digests_of(path, version).named_by(f"{tag} {size + 1}")
        assert not digests_of(path, other).named_by(other)
    for version in (f"@1700000000 {size}", f"tag-1 {size}"):
        assert not digests_of(path, version).named_by(version)


def test_only_what_is_asked_for_is_computed(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"data")
    asked = []
    monkeypatch.setattr(objects, "_md5", lambda data=b"": asked.append("md5") or md5(data))
    assert digests_of(path).tag == "" and asked == []
    assert digests_of(path, "@1700000000 4").tag == "" and asked == []
    version = f"{md5(b'data').hexdigest()} 4"
    found = digests_of(path, version, sha256=False)
    assert found.named_by(version) and found.sha256 == "" and asked == ["md5"]
