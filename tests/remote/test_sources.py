"""Pictures, captions, masks and tables in a store: what comes out is what comes out of the same files on a disk."""

from __future__ import annotations

import json
import re
from itertools import cycle
from urllib.parse import quote

import pytest
from near_ray import NearRay
from pictures import draw, draw_mask

from prep import api
from prep.dataset.ingest import ingest
from prep.fs.blob import MOST_FETCHED, Blob, TooLarge, read_blob
from prep.fs.memo import Memo
from prep.fs.remote import objects
from prep.recipe.load import load_recipe


@pytest.fixture
def there(store, tmp_path):
    """A small data set, here and in the store: names of all kinds, a caption in a table, masks."""
    root = tmp_path / "photos"
    for number, name in enumerate(("a.png", "cats/b #1?.png", "cats/ü\\x 50%41.png", "dogs/c.jpg")):
        draw(root / name, (96 + 8 * number, 96), seed=number).with_suffix(".txt").write_text(f"a picture {number % 3}")
    (root / "dogs/c.txt").unlink()
    (root / "dogs/metadata.jsonl").write_text('{"file_name": "c.jpg", "text": "from a table"}\n')
    draw_mask(root / "a-masklabel.png", (96, 96))
    (root / "cats/notes.json").write_text("{}")
    (root / ".hidden.png").write_bytes(b"")
    for path in root.rglob("*"):
        if path.is_file():
            store.server.put(quote(f"{store.prefix}/photos/{path.relative_to(root).as_posix()}"), path.read_bytes())
    return root


def encode(prep, source, cache, manifest, model, *options, code=0):
    done = prep("encode", source, "--model", model, "--cache", cache, "-o", manifest, "--resolution", "96", "--json",
                *options)
    assert done.code == code, done.err
    return done.json


def gets(store):
    return [path for method, path, _ in store.proxy.asked if method == "GET" and "list-type" not in path]


def test_keys_and_manifest_are_those_of_the_same_files_on_a_disk(store, there, tiny_model, prep, tmp_path):
    url, cache = f"{store.url}/photos", tmp_path / "cache"
    encode(prep, there, cache, tmp_path / "here.json", tiny_model)
    found = encode(prep, url, cache, tmp_path / "there.json", tiny_model)
    assert sum(found["encoded"].values()) == 0 and found["samples"]["train"] == 4
    assert len(gets(store)) == len(set(gets(store))) == 9, "each object once"
    here, far = (json.loads((tmp_path / name).read_text()) for name in ("here.json", "there.json"))
    assert far["sources"] == [url] and here["sources"] == ["photos"]
    assert {**far, "sources": 0, "self": 0} == {**here, "sources": 0, "self": 0}
    near, dataset = (api.open_manifest(tmp_path / name) for name in ("here.json", "there.json"))
    for number in range(4):
        assert dataset.path(number) is None
        assert (api.picture(dataset, number) == api.picture(near, number)).all()
    store.proxy.forget()
    encode(prep, url, cache, tmp_path / "there.json", tiny_model)
    assert gets(store) == ["/bucket/" + quote(f"{store.prefix}/photos/dogs/metadata.jsonl")], "the rest is remembered"
    assert not {"a-key", "a-secret"} & set((tmp_path / "there.json").read_text().split('"'))


@pytest.mark.parametrize("stored", ["pictures", "references", "both"])
def test_references_in_a_store_are_those_on_a_disk(store, there, prep, tmp_path, stored):
    """Each object is read once; a changed one is noticed, and the others are remembered."""
    for number, name in enumerate(("a.png", "cats/b #1?.png", "cats/ü\\x 50%41.png", "dogs/c.png")):
        data = draw(tmp_path / "control" / name, (80, 64 + 8 * number), seed=50 + number).read_bytes()
        store.server.put(quote(f"{store.prefix}/control/{name}"), data)
    (tmp_path / "dataset.toml").write_text(
        f'[[source]]\npath = "{there if stored == "references" else f"{store.url}/photos"}"\n'
        f'references = ["{tmp_path / "control" if stored == "pictures" else f"{store.url}/control"}"]\n')
    here = ingest(load_recipe(there, choices={"references": (tmp_path / "control",)}), Memo(None), jobs=1)
    facts, recipe = Memo(tmp_path / "facts.sqlite"), load_recipe(tmp_path / "dataset.toml", choices={})
    store.proxy.forget()
    found = ingest(recipe, facts, jobs=1)
    assert [one.code for one in found.findings] == ["hidden-file"] and len(found.items) == 4
    assert len(gets(store)) == len(set(gets(store)))
    told = [[(item.picture, [one.picture for one in item.references]) for item in every.items]
            for every in (here, found)]
    assert told[0] == told[1] and all(references for _, references in told[0])
    names = {path for path in gets(store) if "/control/" in path}
    assert len(names) == (0 if stored == "pictures" else 4)
    if names:
        store.server.put(f"{store.prefix}/control/a.png", b"no picture")
        store.proxy.forget()
        _, error = ingest(recipe, facts, jobs=1).findings
        assert (error.path, error.code) == ("a.png", "not-an-image") and "its reference " in error.detail
        assert [path for path in gets(store) if "/control/" in path] == [f"/bucket/{store.prefix}/control/a.png"]
    facts.close()


@pytest.mark.slow
def test_encoding_from_the_store_makes_the_same_rows(store, there, tiny_model, prep, tmp_path):
    encode(prep, there, tmp_path / "cache", tmp_path / "here.json", tiny_model)
    found = encode(prep, f"{store.url}/photos", f"{store.url}/cache", f"{store.url}/m.json", tiny_model)
    assert found["encoded"] == {"latent": 4, "mask": 1, "text": 5}
    assert prep("verify", f"{store.url}/m.json").code == 0
    here, far = json.loads((tmp_path / "here.json").read_text()), json.loads(store.server.get(f"{store.prefix}/m.json"))
    assert far["tables"] == here["tables"] and far["sources"] == [f"{store.url}/photos"]


def test_an_object_in_the_place_of_a_directory_is_told(store, there, prep):
    """One of no bytes stands for the directory, as some programs make it, and is nobody's loss."""
    for name, data in {"cats/": b"a picture?", "dogs/": b"", "a.png/": b""}.items():
        store.server.put(f"{store.prefix}/photos/{name}", data)
    found = prep("scan", f"{store.url}/photos", "--json").json["findings"]
    assert [(one["path"], one["severity"]) for one in found if one["code"] == "directory-object"] == [("cats", "info")]


def test_a_scan_finds_what_it_finds_on_a_disk(store, there, prep):
    (there / "dogs/broken.png").write_bytes(b"no picture")
    store.server.put(f"{store.prefix}/photos/dogs/broken.png", b"no picture")
    here, far = prep("scan", there, "--json"), prep("scan", f"{store.url}/photos", "--json")
    assert far.json == here.json and far.code == here.code == 1
    store.proxy.forget()
    again = prep("scan", f"{store.url}/photos", "--json")
    assert again.json == here.json
    assert [path for path in gets(store) if not path.endswith("metadata.jsonl")] == [], "remembered"


def test_workers_of_a_cluster_read_pictures_themselves(store, there, prep, monkeypatch):
    (there / "dogs/broken.png").write_bytes(b"no picture")
    store.server.put(f"{store.prefix}/photos/dogs/broken.png", b"no picture")
    ray = NearRay()
    monkeypatch.setattr("prep.scan.crew.library", lambda _: ray)
    far = prep("scan", f"{store.url}/photos", "--json", "--engine", "ray", "--workers", 2)
    assert far.json == prep("scan", there, "--json").json and far.code == 1
    assert len(gets(store)) == len(set(gets(store))) == 10, "each object once"
    assert len(ray.travelled) > 4 and not [one for one in ray.travelled if b"IDAT" in one or b"JFIF" in one]
    store.proxy.forget()
    again = prep("scan", f"{store.url}/photos", "--json", "--engine", "ray")
    assert again.json == far.json
    assert [path for path in gets(store) if not path.endswith("metadata.jsonl")] == [], "remembered"


@pytest.mark.parametrize("fault", ["truncate", "flip", *(pytest.param(fault, marks=pytest.mark.slow)
                                                         for fault in ("500", "503", "drop", "403"))])
def test_each_request_goes_wrong_once(store, there, prep, fault):
    good = prep("scan", there, "--json").json
    store.proxy.rule = lambda method, path, before: fault if before == 0 and not (
        fault == "flip" and ("list-type" in path or method == "HEAD")) else ""
    found = prep("scan", f"{store.url}/photos", "--json")
    assert found.json == good, found.err
    wrong = {path for _, path, what in store.proxy.asked if what}
    assert len(wrong) > 9 - (fault == "flip"), "each object, and the list"


@pytest.mark.parametrize(("fault", "says"), [
    pytest.param("500", "the store answered 500", marks=pytest.mark.slow),
    ("403", r"the store answered 403 Forbidden \(ExpiredToken\)"),
    pytest.param("flip", "the answer is not what its ETag names", marks=pytest.mark.slow)])
def test_what_stays_wrong_is_one_message(store, there, tiny_model, prep, tmp_path, monkeypatch, fault, says):
    monkeypatch.setenv("LATENTRY_REMOTE_PATIENCE", "0.05")
    store.proxy.rule = lambda method, path, before: fault if path.endswith("c.jpg") else ""
    if fault == "flip":
        flipped = cycle(range(8))  # the store is asked as often as its patience allows
        monkeypatch.setattr("fault_proxy._flipped", lambda data: data[:-1] + bytes([data[-1] ^ 1 << next(flipped)]))
    to = ("--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json")
    for command in (("scan",), ("encode", *to)):
        done = prep(command[0], f"{store.url}/photos", *command[1:])
        assert done.code == 7 and done.out == "" and done.err.count("error: ") == 1, done.err
        assert re.search(says, done.err) and "a-key" not in done.err
        assert f"{store.url}/photos/dogs/c.jpg: " in done.err
    assert not (tmp_path / "m.json").exists()


def test_etags_that_are_no_digests_are_believed_after_a_second_look(store, there, monkeypatch):
    monkeypatch.setattr(objects, "_no_md5", set())
    url, data = f"{store.url}/photos/a.png", (there / "a.png").read_bytes()
    monkeypatch.setattr(objects, "_version_of", lambda meta: f"{'0' * 32} {meta['size']}")
    assert read_blob(Blob(file=url)) == data and len(gets(store)) == 2
    assert read_blob(Blob(file=url)) == data and len(gets(store)) == 3, "not asked twice again in this bucket"


def test_an_object_that_changes_after_it_was_listed_is_not_remembered(store, there, prep, tmp_path, tiny_model):
    key = f"{store.prefix}/photos/a.png"
    other = draw(tmp_path / "other.png", (96, 96), seed=99).read_bytes()
    old, new = store.server.get(key), other

    def replace(method, path, before):
        if "list-type" not in path and before == 0 and path.endswith("/a.png"):
            store.server.put(key, new)
        return ""

    store.proxy.rule = replace
    encode(prep, f"{store.url}/photos", tmp_path / "cache", tmp_path / "m.json", tiny_model)
    store.proxy.forget()
    store.server.put(key, old)
    encode(prep, f"{store.url}/photos", tmp_path / "cache", tmp_path / "again.json", tiny_model)
    encode(prep, there, tmp_path / "cache", tmp_path / "here.json", tiny_model)
    again, here = (json.loads((tmp_path / name).read_text()) for name in ("again.json", "here.json"))
    assert again["tables"] == here["tables"]


def test_an_object_that_changes_while_it_is_encoded_is_a_finding(store, there, prep, tmp_path, tiny_model):
    key = f"{store.prefix}/photos/a.png"
    other = draw(tmp_path / "other.png", (96, 96), seed=99).read_bytes()

    def replace(method, path, before):
        if path.endswith("/a.png") and before == 1:
            store.server.put(key, other)
        return ""

    store.proxy.rule = replace
    found = encode(prep, f"{store.url}/photos", tmp_path / "cache", tmp_path / "m.json", tiny_model, code=1)
    assert found["samples"]["train"] == 3
    assert [(one["path"], one["code"]) for one in found["rejected"]] == [("a.png", "changed-meanwhile")]


def test_an_object_that_goes_is_a_finding(store, there, prep):
    store.proxy.rule = lambda method, path, before: "404" if path.endswith("c.jpg") and method == "GET" else ""
    found = prep("scan", f"{store.url}/photos", "--json")
    assert [(one["path"], one["detail"]) for one in found.json["findings"] if one["code"] == "unreadable-file"] == \
        [("dogs/c.jpg", "cannot be read: there is no such object")]


def test_an_object_too_large_to_be_read_is_not_read(store, there, monkeypatch):
    monkeypatch.setattr("prep.fs.blob.MOST_FETCHED", 10)
    with pytest.raises(TooLarge, match="bytes, expected at most 10 of an object"):
        read_blob(Blob(file=f"{store.url}/photos/a.png"))
    assert MOST_FETCHED < 1 << 28, "a message to a worker holds it"


def test_a_recipe_takes_prefixes_masks_and_tables_of_stores(store, there, tiny_model, prep, tmp_path):
    (tmp_path / "masks/cats").mkdir(parents=True)
    mask = draw_mask(tmp_path / "masks/cats/b #1?.png", (104, 96)).read_bytes()
    store.server.put(quote(f"{store.prefix}/masks/cats/b #1?.png"), mask)
    (tmp_path / "extra.jsonl").write_text('{"file_name": "c.jpg", "text": "of another table", "mask": "c-mask.png"}\n')
    store.server.put(f"{store.prefix}/extra.jsonl", (tmp_path / "extra.jsonl").read_bytes())
    for place, masks, table, name in ((f"{store.url}/photos", f"{store.url}/masks", f"{store.url}/extra.jsonl", "far"),
                                      ("photos", "masks", "extra.jsonl", "here")):
        (tmp_path / f"{name}.toml").write_text(
            f'[[source]]\npath = "{place}/cats"\nmask = "{masks}/cats"\n[[source]]\npath = "{place}/dogs"\n'
            f'mask = "{masks}/cats"\ntable = "{table}"\n')
        encode(prep, tmp_path / f"{name}.toml", tmp_path / "cache", tmp_path / f"{name}.json", tiny_model)
    here, far = (json.loads((tmp_path / name).read_text()) for name in ("here.json", "far.json"))
    assert far["sources"] == [f"{store.url}/photos/{part}" for part in ("cats", "dogs")]
    assert here["tables"] == far["tables"] and here["fields"]["mask"]["rows"] == 1


@pytest.mark.parametrize(("key", "shown"), [("a//b.png", "a//b.png"), ("x/../../up.png", "x/../../up.png"),
                                            ("new\x01line.png", r"new\x01line.png")])
def test_a_key_that_is_no_path_is_one_message(store, there, prep, key, shown):
    store.server.put(quote(f"{store.prefix}/photos/{key}", safe="/"), b"x")
    done = prep("scan", f"{store.url}/photos")
    assert done.code == 7 and f"{store.url}/photos has an object with the key " in done.err and shown in done.err
    assert "rename or delete that object" in done.err


def test_names_that_differ_in_case_or_form_are_all_read(store, prep, tmp_path):
    names = ("cafe\u0301.png", "caf\u00e9.png", "CAF\u00c9.png", "a.png/b.png", "a.png", "photos")
    for number, name in enumerate(names):
        data = draw(tmp_path / f"{number}.png", (96, 96), seed=number).read_bytes()
        store.server.put(quote(f"{store.prefix}/photos/{name}"), data)
    store.server.put(f"{store.prefix}/photos/", b"")
    found = prep("scan", f"{store.url}/photos", "--json")
    assert found.json["pictures"] == 5 and not [one for one in found.json["findings"] if one["severity"] == "error"]


@pytest.mark.parametrize(("words", "code", "says"), [
    (("scan", "{}/none"), 5, "source {}/none does not exist: no object is below it"),
    (("scan", "{}/photos/a.png"), 5, "source {}/photos/a.png does not exist: no object is below it"),
    (("scan", "{}/photos?key=secret"), 5, "was given with a user, a query or a fragment"),
    (("scan", "{}/set.toml"), 5, "recipe {}/set.toml is in an object store, expected a path on this computer"),
    (("scan", "{}/a.tar"), 5, "source {}/a.tar does not exist: there is no such object"),
    (("scan", "{}/a-{{0..1}}.tar"), 5, "source {}/a-0.tar does not exist: there is no such object"),
    (("scan", "{}/photos/*.tar"), 5, "source {}/photos/*.tar matches no object"),
    (("scan", "{}/a**/*.tar"), 5, "source {}/a**/*.tar cannot be expanded: 'a**' mixes ** with other characters"),
    (("scan", "s3://*/a.tar"), 5, "source s3://*/a.tar cannot be expanded: '*' is no bucket"),
    (("init", "{}/photos"), 2, "SOURCE {}/photos is in an object store, expected a path on this computer"),
    (("mask", "{}/photos", "--with", "alpha", "-o", "{}/masks"), 5, "{}/masks is in an object store, expected a"),
    (("encode", "{}/photos", "--model", "m", "--cache", "{}/photos/cache", "-o", "m.json"), 5,
     "cache '{}/photos/cache' lies inside pictures '{}/photos'"),
])
def test_what_cannot_be_is_refused(store, there, prep, words, code, says):
    done = prep(*(word.format(store.url) for word in words))
    assert done.code == code and says.replace("{}", store.url) in done.err and "hint: " in done.err, done.err
    assert "secret" not in done.err


def test_a_cache_is_no_source(store, small_there, prep):
    done = prep("scan", f"{store.url}/cache")
    assert done.code == 5 and f"source {store.url}/cache is a cache, which holds no pictures" in done.err


@pytest.mark.slow
def test_masks_are_made_on_this_computer_from_pictures_in_a_store(store, there, prep, tmp_path):
    for place, output in ((there, "here"), (f"{store.url}/photos", "far")):
        done = prep("mask", place, "--with", "threshold", "--threshold", "0.5", "-o", tmp_path / output)
        assert done.code == 0, done.err
    here, far = ({path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.png")}
                 for name in ("here", "far"))
    assert here == far and here


@pytest.mark.slow
def test_a_page_shows_pictures_of_a_store(store, there, tiny_model, prep, tmp_path):
    for place, name in ((there, "here"), (f"{store.url}/photos", "far")):
        encode(prep, place, tmp_path / "cache", tmp_path / f"{name}.json", tiny_model)
        assert prep("inspect", tmp_path / f"{name}.json", "--html", tmp_path / f"{name}.html").code == 0
    here, far = ((tmp_path / f"{name}.html").read_text().count("data:image/jpeg") for name in ("here", "far"))
    assert here == far > 3
