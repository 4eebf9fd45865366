"""`prep view` of what is in a store shows what it shows of the same files on a disk, and writes nothing there."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from pictures import draw
from small_manifest import write_small
from tarred import member, tar_of
from viewed_runs import write_run
from viewing import viewing, viewing_here

from prep.cli.view import _sources_of
from prep.fs.remote.bucket import Bucket
from prep.manifest.document import read_manifest, write_manifest
from prep.manifest.opened import open_manifest
from prep.view.pictures import Pictures

PAGES = ("/", "/?q=shared", "/sample/0", "/sample/1", "/sample/2", "/findings")
PICTURES = tuple(f"/{kind}/{number}{rest}" for number in range(3) for kind, rest in (
    ("thumbnail", ""), ("picture", ""), ("view", "/0"), ("mask", "/0"), ("shade", "/0"), ("latent", "/0/1")))


@pytest.fixture
def data(request, store, tmp_path):
    """A manifest here and in the store, whose pictures are in the store: two of three samples have one."""
    pictures = {name: draw(tmp_path / name, size, seed=seed).read_bytes()
                for seed, (name, size) in enumerate({"a.png": (128, 144), "c.png": (96, 64)}.items())}
    home = tmp_path / "home"
    home.mkdir()
    if getattr(request, "param", "directory") == "directory":
        path, source = write_small(home, pictures=pictures), "photos"
    else:
        names = ("one.tar/a.png", "two.tar/b.png", "two.tar/sub/c.png")
        path, source = write_small(home, (*names, *"xyz", "bad.png"), pictures), "tars/{one,two}.tar"
        (home / "tars").mkdir()
        (home / "tars/one.tar").write_bytes(tar_of([member("a.png", pictures["a.png"])]))
        (home / "tars/two.tar").write_bytes(tar_of([member("sub/c.png", pictures["c.png"])]))
    document = {**read_manifest(path).document, "sources": [f"{store.url}/{source}"]}
    document.pop("self")
    write_manifest(path, document)
    store.upload(home)
    return path


def shown(server):
    """Every page and picture, without what tells one server from another."""
    pages = {path: server.get(path) for path in (*PAGES, *PICTURES)}
    assert {answer.status for answer in pages.values()} == {200}
    return {path: answer.body.replace(server.base.encode(), b"") for path, answer in pages.items()}


@pytest.mark.parametrize("data", ["directory", pytest.param("tars", marks=pytest.mark.slow)], indirect=True)
def test_a_manifest_in_a_store(store, data):
    """Of the shards just the rows that are looked at are read; nothing is listed, or written to the store."""
    with viewing_here(data) as server:
        here = shown(server)
    assert sum(body.startswith(b"\xff\xd8") for path, body in here.items() if path.startswith("/picture")) == 2
    store.proxy.forget()
    with viewing(f"{store.url}/manifest.json") as server:
        assert server.get().status == 200 and not store.proxy.count(part="/c.0"), "the list needs no rows"
        there = shown(server)  # with the next command, which names the manifest
        assert {path: body.replace(f"{store.url}/manifest.json".encode(), b"MANIFEST") for path, body in there.items()
                } == {path: body.replace(str(data).encode(), b"MANIFEST") for path, body in here.items()}
        assert server.interrupt() == (0, "", "Ctrl-C ends it\n")
    assert {method for method, _, _ in store.proxy.asked} <= {"GET", "HEAD"}
    assert store.proxy.count("GET", "/latent/c.0") and not store.proxy.count(part="list-type")
    assert not list(store.copies.glob("whole/*/*/*/cache/shards")), "no whole shard was needed"


@pytest.mark.parametrize("harm", ["flip", "gone", "short"])
def test_a_row_that_is_damaged_there_is_not_shown(store, small_there, harm):
    (name,) = store.keys(small_there, "mask/c.0")
    data = store.server.get(f"{store.prefix}/{name}")
    store.server.delete(f"{store.prefix}/{name}")
    if harm != "gone":
        store.server.put(f"{store.prefix}/{name}", bytes([data[0] ^ 1]) + data[1:] if harm == "flip" else b"")
    opened = open_manifest(read_manifest(Bucket.parse(f"{store.url}/manifest.json")))
    pictures = Pictures(opened)
    (masked,) = [number for number in range(3) if pictures.describe(number)["views"][0]["mask"] is not None]
    assert pictures.mask(masked, 0, shade=False) is None and pictures.latent(masked, 0) is not None
    pictures.close()


@pytest.mark.slow
def test_beside_an_earlier_one_and_of_a_cache_there(store, data, tmp_path):
    """A manifest on this computer that names its cache by a URL, too."""
    document = {**read_manifest(data).document, "cache": f"{store.url}/cache", "prediction": "v_prediction"}
    document.pop("self")
    far = tmp_path / "far.json"
    write_manifest(far, document)
    with viewing_here(data) as server:
        here = shown(server)
    with viewing(far, "--since", f"{store.url}/manifest.json") as server:
        assert {path: body for path, body in shown(server).items() if path in PICTURES} == {
            path: body for path, body in here.items() if path in PICTURES}
        assert server.get("/diff").status == 200 and server.get("/before/sample/0").status == 200


def test_pictures_in_a_store_before_they_are_encoded(store, data):
    prefix = f"{store.prefix}/photos"
    store.server.put(quote(f"{prefix}/z.png"), draw(data.parent / "z.png", (96, 96), seed=7).read_bytes())
    edits = data.parent / "edits"
    with viewing(f"{store.url}/photos", "--resolution", 64, "--step", 16, "--edit", "--edits", edits) as server:
        found = server.get("/").text
        assert '<p class="kind">Source</p>' in found and "z.png" in found.replace("<wbr>", "")
        assert server.get("/thumbnail/0").headers["content-type"] == "image/jpeg"
        assert server.save(0, "caption", b"new").status == 200
    assert [path.read_text() for path in edits.rglob("[!.]*.txt")] == ["new\n"]


@pytest.mark.parametrize(("words", "told"), [
    (("manifest.json", "--edit"), "error: --edit is for a SOURCE, but {url}/manifest.json is none\n"),
    (("manifest.json", "--scan"), "error: --scan is for a SOURCE, but {url}/manifest.json is none\n"),
    (("none.json",), "error: cannot read manifest {url}/none.json: there is no such object\n"),
    (("photos", "--since", "m.json"), "error: --since is for a MANIFEST or RUN, but {url}/photos is a source of"),
    (("nothing",), "error: source {url}/nothing does not exist: no object is below it\n"),
    (("runs/cat",), "error: {url}/runs/cat is a training run in an object store"),
    (("manifest.json", "--manifest", "m.json"), "error: --manifest is for a RUN, but {url}/manifest.json is not a dir"),
    (("texts",), "error: {url}/texts has no picture that can be used, and is no training run\nhint: prep scan "
                 "{url}/texts says what is there; of a manifest, name its file, which in an "
                 "object store ends in .json\n"),
    (("photos", "--edit"), "error: --edit is given, but {url}/photos is in a store, where no edits are written\n"),
    (("set.toml",), "error: recipe {url}/set.toml is in an object store"),
])
def test_what_cannot_be_shown_is_told(prep, store, small_there, words, told):
    store.server.put(f"{store.prefix}/photos/a.png", draw(small_there / "a.png", (64, 64), seed=0).read_bytes())
    store.server.put(f"{store.prefix}/texts/a.txt", b"no picture")
    store.server.put(f"{store.prefix}/runs/cat/run.json", b"{}")
    done = prep("view", f"{store.url}/{words[0]}", *words[1:])
    assert done.code in (2, 4, 5) and done.out == "" and done.err.startswith(told.format(url=store.url)), done.err
    assert "s3:/b" not in done.err.replace("s3://", "")


def test_a_run_on_this_computer_whose_manifest_is_there(store, tmp_path):
    run = write_run(tmp_path)
    store.upload(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with viewing(run, "--manifest", f"{store.url}/manifest.json") as server:
        base = server.base.removesuffix("/run")
        assert {server.ask("GET", f"{base}/{path}").status for path in ("run", "sample/0", "latent/0/0/1")} == {200}


def test_sources_and_cache_of_a_manifest_to_edit(prep, store, data, tmp_path):
    """They are named by their URLs; edits need a place on this computer."""
    document = {**read_manifest(data).document, "cache": f"{store.url}/cache"}
    document.pop("self")
    write_manifest(far := tmp_path / "far.json", document)
    asked = _sources_of(far, {}, None)
    assert (str(asked.what), str(asked.cache)) == (document["sources"][0], document["cache"])
    done = prep("view", far, "--edit")
    assert done.code == 2 and "hint: name a directory of this computer for them: --edits DIR\n" in done.err, done.err
