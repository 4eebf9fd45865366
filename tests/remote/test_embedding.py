"""Embeddings in a store: made there, found there by `prep encode`, downloaded and uploaded as other rows."""

from __future__ import annotations

import numpy as np
from vision_models import build

from prep.embedding.rows import embeddings_of
from prep.fs.place import place_of
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


def test_embeddings_from_a_store_and_back(prep, store, photos, tiny_model, tmp_path):
    seeing, url = build(tmp_path / "seeing", "siglip"), f"{store.url}/m.json"
    options = ("--cache", f"{store.url}/cache", "--resolution", 64, "--step", 8, "--json")
    for made in (8, 0):
        done = prep("embed", photos, "--model", seeing, *options)
        assert (done.code, done.json["made"], done.json["reused"]) == (0, made, 8 - made), done.err
    done = prep("encode", photos, "--embed", seeing, "--model", tiny_model, "-o", url, *options)
    assert done.code == 0 and done.json["reused"]["embedding"] == 8, done.err
    rows, there = embeddings_of(open_manifest(read_manifest(place_of(url))))
    assert there.all() and prep("verify", url).code == 0
    assert prep("pull", url, tmp_path / "here").code == 0
    path = tmp_path / "here" / "m.json"
    np.testing.assert_array_equal(embeddings_of(open_manifest(read_manifest(path)))[0], rows)
    assert prep("push", path, f"{store.url}/again").code == 0
    again = read_manifest(place_of(f"{store.url}/again/m.json"))
    np.testing.assert_array_equal(embeddings_of(open_manifest(again))[0], rows)
