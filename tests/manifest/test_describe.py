"""`prep inspect`: the promised shape, and everything about one sample."""

from __future__ import annotations

import json

import pytest

from prep.errors import CacheError, UsageError
from prep.keys import text_key
from prep.manifest import describe as audit
from prep.manifest.describe import describe_manifest
from prep.manifest.opened import open_manifest


def test_the_document_has_the_promised_shape(small):
    document = describe_manifest(small)
    assert json.loads(json.dumps(document)) == document
    assert document["samples"] == {"train": 2, "validation": 1, "prior": 0}
    assert document["fields"]["latent"] == {
        "rows": 3, "shards": 2, "bytes": document["fields"]["latent"]["bytes"],
        "arrays": {"latent": {"dtype": "bfloat16", "dims": ["c", "h", "w"], "shapes": [[4, 8, 8], [4, 8, 12]]}},
    }
    assert document["buckets"][0] == {"size": [64, 64], "train": 2, "validation": 0, "prior": 0}
    assert set(document["models"]) == {"vae", "text"}
    assert document["rejected"] == 1
    assert document["findings"][0]["path"] == "bad.png"
    assert document["masks"] == {"samples": 1, "coverage": 0.5}
    assert document["prompts"] == ["a prompt"]


def test_no_path_of_this_machine_is_said(small, tmp_path):
    assert str(tmp_path) not in json.dumps(describe_manifest(small))


def test_everything_about_a_sample(small):
    (sample,) = audit.describe_samples(small, "a.png")["samples"]
    assert (sample["size"], sample["bucket"], sample["coverage"]) == ([128, 144], [64, 64], 0.5)
    (view,), (text,) = sample["views"], sample["texts"]
    assert (view["scaled"], view["crop"], view["flip"]) == ([64, 72], [0, 4], False)
    assert text["row"]["key"] == text_key(text["caption"], {"meaning": 1})
    assert view["mask"]["row"] == 0
    (without,) = audit.describe_samples(small, "c.png")["samples"]
    assert without["views"][0]["mask"] is None
    assert without["coverage"] is None


def test_a_sample_by_its_file_name(small):
    assert audit.describe_samples(small, "b.png")["samples"][0]["name"] == "sub/b.png"


def test_a_rejected_picture_has_its_findings(small):
    found = audit.describe_samples(small, "bad.png")
    assert found["samples"] == []
    assert found["findings"][0]["code"] == "truncated"


def test_an_unknown_name(small):
    with pytest.raises(UsageError) as caught:
        audit.describe_samples(small, "a.pmg")
    assert caught.value.message == (
        "manifest has no sample 'a.pmg', expected one of its 3 names; did you mean 'a.png'?"
    )
    assert caught.value.hint == "prep inspect MANIFEST --json lists rejected pictures"


def test_keys_that_cannot_be_read_are_none(small):
    for path in (small.cache.root / "shards").rglob("key/c*"):
        path.chmod(0o600)
        path.write_bytes(b"")
    (sample,) = audit.describe_samples(small, "a.png")["samples"]
    assert sample["views"][0]["latent"]["key"] is None


def test_a_damaged_table(small):
    path = small.cache.table(small.manifest.document["tables"]["samples"])
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CacheError, match="is damaged: its bytes do not match its name"):
        describe_manifest(small)


def test_a_cache_that_is_gone(small, tmp_path):
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match=r"the cache of .* does not exist"):
        open_manifest(small.manifest)
