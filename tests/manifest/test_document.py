"""The manifest: small, canonical, relative, and nothing but itself is accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.digest import canonical, with_checksum
from prep.errors import ManifestError
from prep.manifest.document import read_manifest, write_manifest
from prep.models.checkpoints.contents import PUBLISHED

SCHEMA = json.loads((Path(__file__).parents[2] / "manifests" / "manifest.schema.json").read_text())
D = "ab" * 32
ROW = {"shard": 0, "row": 0}
DOCUMENT = {
    "format": "latentry/manifest", "version": 1, "cache": "cache", "model": {"path": "../model"}, "family": "sd15",
    "latents": {"channels": 4, "factor": 8, "scaling_factor": "0.18215", "shift_factor": "0",
                "alpha": [255, 255, 255]},
    "prediction": "epsilon", "models": {"vae": D, "text": D},
    "fields": {
        "latent": {"context": {"vae": D}, "arrays": {"latent": {"dtype": "bfloat16", "dims": ["c", "h", "w"]}},
                   "rows": 1, "shards": 1, "bytes": 10},
        "text": {"context": {"text": D}, "arrays": {"hidden": {"dtype": "float32", "dims": ["token", "channel"]}},
                 "rows": 1, "shards": 1, "bytes": 10},
    },
    "buckets": [{"size": [96, 64], "train": 1, "validation": 0, "prior": 0}],
    "samples": {"train": 1, "validation": 0, "prior": 0}, "sources": ["photos", None], "recipe": None,
    "options": ["--resolution", "512", "--mask", {"path": "../masks"}],
    "prompts": {"file": "prompts.txt", "digest": D, "unconditional": ROW,
                "samples": [{"prompt": "a", "negative": None, "positive": ROW, "negative_row": ROW}]},
    "tables": {"samples": D, "shards": D, "findings": D}, "rejected": 0,
}


def test_what_is_written_is_read(tmp_path):
    written = write_manifest(tmp_path / "m.json", DOCUMENT)
    found = read_manifest(tmp_path / "m.json")
    assert found == written and found.buckets == ((96, 64),)
    assert found.cache_root == tmp_path / "cache" and found.model == tmp_path / "../model"
    assert found.fields["latent"].arrays["latent"]["dtype"] == "bfloat16"
    assert found.digest == found.document["self"] and found.sources == (tmp_path / "photos", None)


def test_the_same_document_is_not_written_again(tmp_path):
    path = tmp_path / "m.json"
    write_manifest(path, DOCUMENT)
    stamp = path.stat().st_mtime_ns
    write_manifest(path, DOCUMENT)
    assert path.stat().st_mtime_ns == stamp


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path):
    samples = [{"prompt": "a" * 1000, "negative": None, "positive": ROW, "negative_row": ROW}] * 1000
    with pytest.raises(ManifestError, match=r"the manifest would have 10\d{5} bytes, expected at most 1048576"):
        write_manifest(tmp_path / "m.json", {**DOCUMENT, "prompts": {**DOCUMENT["prompts"], "samples": samples}})
    assert not (tmp_path / "m.json").exists()


def test_the_schema_accepts_it():
    jsonschema.validate(with_checksum(DOCUMENT), SCHEMA)


def test_a_real_manifest_fits_the_schema_and_is_small(prep, photos, tiny_model, tmp_path):
    (tmp_path / "prompts.txt").write_text("a dog --n ugly\n")
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16, "--mask", "sidecar", "--prompts", tmp_path / "prompts.txt")
    assert result.code == 0, result.err
    data = (tmp_path / "m.json").read_bytes()
    jsonschema.validate(json.loads(data), SCHEMA)
    assert len(data) < 8192 and str(tmp_path).encode() not in data


def test_a_manifest_moves_with_its_cache_without_the_originals(prep, photos, tiny_model, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    shutil.copytree(tiny_model, home / "model")
    prep("encode", photos, "--model", home / "model", "--cache", home / "cache", "-o", home / "m.json",
         "--resolution", 96, "--step", 16)
    home.rename(tmp_path / "moved")
    shutil.rmtree(photos)
    assert prep("verify", tmp_path / "moved" / "m.json").code == 0
    assert prep("inspect", tmp_path / "moved" / "m.json").code == 0


WRONG = {
    "format": ({"format": "other"}, "has format 'other', expected 'latentry/manifest'"),
    "version": ({"version": 4}, "has version 4, this program reads versions 1 to 3"),
    "extra key": ({"extra": 1}, "unknown key 'extra'"),
    "absolute cache": ({"cache": "/etc"}, "cache is '/etc', expected a path relative to the manifest"),
    "drive": ({"cache": "C:/cache"}, "expected a path relative"),
    "backslash": ({"cache": "a\\b"}, "expected a path relative"),
    "empty cache": ({"cache": ""}, "expected a path relative"),
    "hub revision": ({"model": {"hub": "a/b@../c"}}, "expected a Hub id like 'owner/name'"),
    "no hub revision": ({"model": {"hub": "a/b@"}}, "expected a Hub id like 'owner/name'"),
    "hub id": ({"model": {"hub": "../../etc"}}, "expected a Hub id like 'owner/name'"),
    "configs of a directory": ({"model": {"path": "c", "configs": {"own": "none"}}},
                               "model.configs.own is 'none', which is not in this package"),
    "configs of a Hub's": ({"model": {"hub": "a/b", "configs": {"own": "sd15"}}}, "expected exactly one of 'path' and"),
    "configs elsewhere": ({"model": {"path": "c", "configs": {"path": "/etc"}}}, "model.configs.path is '/etc'"),
    "two models": ({"model": {"hub": "a/b", "path": "c"}}, "expected exactly one of 'path' and 'hub'"),
    "table": ({"tables": {**DOCUMENT["tables"], "samples": "../../x"}}, "expected 64 lower-case hex digits"),
    "fingerprint": ({"models": {"vae": "x", "text": D}}, "models.vae is 'x'"),
    "dtype": ({"fields": {"latent": {**DOCUMENT["fields"]["latent"],
                                     "arrays": {"latent": {"dtype": "int4", "dims": []}}}}},
              "fields.latent.arrays.latent.dtype is 'int4'"),
    "negative count": ({"rejected": -1}, "rejected is -1, expected a count"),
    "huge count": ({"rejected": 1 << 60}, "expected a count"),
    "bool count": ({"rejected": True}, "rejected is True, expected a whole number"),
    "scale": ({"latents": {**DOCUMENT["latents"], "scaling_factor": "much"}}, "expected a decimal number as a string"),
    "color": ({"latents": {**DOCUMENT["latents"], "alpha": [255, 255, 256]}},
               "latents.alpha is [255, 255, 256], expected red, green and blue from 0 to 255"),
    "color of two": ({"latents": {**DOCUMENT["latents"], "alpha": [0, 0]}}, "expected red, green and blue"),
    "color in words": ({"latents": {**DOCUMENT["latents"], "alpha": "white"}}, "latents.alpha is 'white'"),
    "imported from elsewhere": ({"latents": {**DOCUMENT["latents"], "imported": {
        "from": "x", "verified": 0, "options": []}}}, "latents.imported.from is 'x', expected one of: kohya-npz"),
    "imported, with an option": ({"latents": {**DOCUMENT["latents"], "imported": {
        "from": "kohya-npz", "verified": 0, "options": ["--cache"]}}}, "latents.imported.options"),
    "imported, half": ({"latents": {**DOCUMENT["latents"], "imported": {"from": "kohya-npz", "verified": 0}}},
                       "latents.imported lacks 'options'"),
    "scale not finite": ({"latents": {**DOCUMENT["latents"], "scaling_factor": "nan"}}, "expected a decimal number"),
    "prediction": ({"prediction": "sample"}, "prediction is 'sample', expected one of: epsilon, v_prediction"),
    "bucket": ({"buckets": [{"size": [1, 2, 3], "train": 0, "validation": 0, "prior": 0}]}, "buckets[0].size"),
    "family": ({"family": "sd99"}, "family is 'sd99', expected one of: sd15"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(tmp_path, change, message):
    path = tmp_path / "m.json"
    path.write_bytes(canonical(with_checksum({**DOCUMENT, **change})))
    with pytest.raises(ManifestError) as error:
        read_manifest(path)
    assert message in error.value.message and error.value.exit_code == 4
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(with_checksum({**DOCUMENT, **change}), SCHEMA)


@pytest.mark.parametrize("name", sorted(folder.name for folder in PUBLISHED.iterdir() if folder.is_dir()))
def test_a_single_file_may_have_configs_of_the_package(tmp_path, name):
    document = with_checksum({**DOCUMENT, "model": {"path": "x.safetensors", "configs": {"own": name}}})
    (tmp_path / "m.json").write_bytes(canonical(document))
    assert read_manifest(tmp_path / "m.json").model == f"{tmp_path / 'x.safetensors'}@{name}"
    jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("key", sorted(DOCUMENT))
def test_every_key_is_needed(tmp_path, key):
    path = tmp_path / "m.json"
    path.write_bytes(canonical(with_checksum({name: value for name, value in DOCUMENT.items() if name != key})))
    with pytest.raises(ManifestError):
        read_manifest(path)


def test_other_bytes_are_refused(tmp_path):
    path = tmp_path / "m.json"
    whole = canonical(with_checksum(DOCUMENT))
    for spoiled in (b"", b"{}", whole[:-1], whole + b"\n", whole.replace(b'"rejected":0', b'"rejected":1'),
                    json.dumps(json.loads(whole), indent=1).encode(), b"\x00" * 100, b"[" * 100000, b"1" * (2 << 20)):
        path.write_bytes(spoiled)
        with pytest.raises(ManifestError):
            read_manifest(path)
    with pytest.raises(ManifestError, match="cannot read manifest") as error:
        read_manifest(tmp_path / "nothing.json")
    assert "prep encode" in error.value.hint


leaves = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.text(max_size=20) | st.just(D)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner,
                                                                                          max_size=4), max_leaves=8)


def paths_in(value, path=()):
    """Every place in a document."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in inner:
        yield from paths_in(below, (*path, name))


PLACES = [path for path in paths_in(DOCUMENT) if path]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), values)
def test_any_value_anywhere_is_accepted_or_a_clean_error(tmp_path_factory, place, value):
    """A sealed and canonical document by somebody hostile: the reader's own checks are all that is left."""
    document = json.loads(json.dumps(DOCUMENT))
    target = document
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    path = tmp_path_factory.mktemp("hostile") / "m.json"
    path.write_bytes(canonical(with_checksum(document)))
    try:
        found = read_manifest(path)
    except ManifestError:
        return
    assert isinstance(found.cache_root, Path) and not Path(document["cache"]).is_absolute()


def test_the_example_is_one():
    path = Path(__file__).parents[2] / "manifests" / "example.json"
    jsonschema.validate(json.loads(path.read_bytes()), SCHEMA)
    assert read_manifest(path).document["samples"]["train"] > 40


@pytest.mark.parametrize("caches", [("store/cache",), ("links/cache",), ("store/cache", "links/cache"), ()])
def test_paths_start_from_the_file_behind_a_link(tmp_path, caches):
    """But from the link's own directory, where only that has the cache: a store may link each file."""
    for folder in ("store", "links", *caches):
        (tmp_path / folder).mkdir()
    for cache in caches:
        (tmp_path / cache / "latentry.json").touch()
    write_manifest(tmp_path / "store" / "m.json", DOCUMENT)
    (tmp_path / "links" / "m.json").symlink_to(tmp_path / "store" / "m.json")
    read = read_manifest(tmp_path / "links" / "m.json")
    wanted = tmp_path / ("links" if caches == ("links/cache",) else "store")
    assert read.path == tmp_path / "links" / "m.json" and read.folder == wanted
    assert read.cache_root == wanted / "cache" and read.sources == (wanted / "photos", None)
    assert read.options[-1] == wanted / "../masks"
    assert read_manifest(tmp_path / "store" / "m.json").folder == tmp_path / "store"
