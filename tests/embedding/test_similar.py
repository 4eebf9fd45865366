"""What embeddings say: told by `prep embed`, and on the pages of `prep view`."""

from __future__ import annotations

import re
import shutil
import threading

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from viewing import viewing_here

from prep.embedding.rows import embeddings_of
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.view import site
from prep.view.similar import pages
from prep.view.similar.state import Similar

SIZED = ("--resolution", 64, "--step", 8)


@pytest.fixture
def alike(photos):
    """The photos, with one that is nearly another, and one that is another."""
    first = photos / "3.png"
    ImageEnhance.Brightness(Image.open(first)).enhance(1.02).save(photos / "zz-nearly.png")
    shutil.copy(first, photos / "zz-copy.png")
    for name in ("zz-nearly", "zz-copy"):
        shutil.copy(first.with_suffix(".txt"), photos / f"{name}.txt")
    return photos


def test_look_alikes_are_told_and_copies_are_not(prep, alike, vision, tmp_path):
    photos = alike
    words = ("embed", photos, "--model", vision["dinov2"], "--cache", tmp_path / "cache", *SIZED)
    found = {each["path"]: each for each in prep(*words, "--json").json["findings"]}
    assert "zz-copy.png" not in found and "dominant-cluster" not in {each["code"] for each in found.values()}
    assert {each["severity"] for each in found.values()} == {"info"}
    assert found["zz-nearly.png"]["code"] == "semantic-duplicate" and found["zz-nearly.png"]["likeness"] > 0.99
    said = prep(*words)
    assert "\ninfo\tsemantic-duplicate\tzz-nearly.png\tshows nearly the same as " in said.out
    assert re.search(r"^.*cache: made 0 embeddings \(0 bytes\), reused 9, of 10 pictures in ", said.out, re.MULTILINE)
    (tmp_path / "r.toml").write_text(f"[embed]\nmodel = '{vision['dinov2']}'\n[similarity]\nclusters = 2\n"
                                     f"dominance = 1.0\n[[source]]\npath = '{photos}'\n")
    again = prep("embed", tmp_path / "r.toml", "--cache", tmp_path / "cache", *SIZED, "--json").json
    assert again["made"] == 0 and "dominant-cluster" in {each["code"] for each in again["findings"]}
    assert prep(*words, "--dry-run", "--json").json["findings"] == []


def test_few_pictures_say_nothing(prep, photos, vision, tmp_path):
    for number in range(2, 8):
        for path in photos.glob(f"{number}.*"):
            path.unlink()
    done = prep("embed", photos, "--model", vision["clip"], "--cache", tmp_path / "cache", *SIZED, "--json")
    assert done.json["pictures"] == 2 and done.json["findings"] == []


@pytest.fixture
def encoded(prep, alike, vision, tiny_model, tmp_path):
    """`encoded(*more)`: the path of a manifest of these pictures."""

    def go(*more):
        done = prep("encode", alike, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                    *SIZED, *more, "--json")
        assert done.code == 0, done.err
        return tmp_path / "m.json"

    return lambda *more: go(*(more or ("--embed", vision["dinov2"])))


def test_pages_show_the_set_and_what_is_like_a_sample(encoded):
    path = encoded()
    opened = open_manifest(read_manifest(path))
    rows = embeddings_of(opened)[0].astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    names = [opened.samples.name(number) for number in range(len(opened.samples))]
    with viewing_here(path) as server:
        page = server.get("/set").text
        assert "zz-nearly.png" in page and "<svg" in page and f'href="{server.base}/set"' in server.get().text
        found = re.findall(rf'href="{server.base}/sample/(\d+)"><bdi>([^<]*)', page.replace("<wbr>", ""))
        assert found and all(names[int(number)] == name for number, name in found), "of findings"
        links = {int(number) for number in re.findall(rf'href="{server.base}/like/(\d+)"', page)}
        assert links and links <= set(range(len(names)))
        for number in range(len(names)):
            assert f'href="{server.base}/like/{number}"' in server.get(f"/sample/{number}").text
            like = server.get(f"/like/{number}").text
            shown = [int(each) for each in re.findall(rf'href="{server.base}/sample/(\d+)"', like.partition("<ol")[2])]
            cosines = (rows @ rows[number]).round(9)
            assert list(dict.fromkeys(shown)) == [other for other in sorted(
                range(len(names)), key=lambda each: (-cosines[each], each)) if other != number]
        assert server.get(f"/like/{len(names)}").status == 404


def shown(page):
    """The names on the cards of a list, in order."""
    return [re.sub(r"<wbr>", "", name) for name in re.findall(r'<p class="name">.*?<bdi>(.*?)</bdi>', page)]


def test_the_list_is_sorted_and_filtered_by_what_embeddings_say(encoded, monkeypatch):
    path, go_on = encoded(), threading.Event()
    opened, compare = open_manifest(read_manifest(path)), Similar._compare
    names, similar = {opened.samples.name(number) for number in range(10)}, Similar(opened)
    assert similar.wait(30)
    nearly = [each.path for each in similar.found.findings if each.code == "semantic-duplicate"]
    monkeypatch.setattr(Similar, "_compare", lambda self: go_on.wait(30) and compare(self))
    monkeypatch.setattr(site, "PATIENCE", 0.01)
    asking = ("/?cluster=1", "/?sort=alike&order=down", "/?finding=semantic-duplicate")
    with viewing_here(path) as server:
        assert "likeness to the nearest picture" in server.get().text and 'name="cluster"' not in server.get().text
        for address in asking:
            assert "Comparing: 0 of 10 samples." in server.get(address).text, address
        go_on.set()
        monkeypatch.setattr(site, "PATIENCE", 30)
        assert shown(server.get(asking[2]).text) == sorted(nearly) and "zz-nearly.png" in nearly
        alike = server.get(asking[1]).text
        assert set(shown(alike)[:3]) == {"3.png", "zz-copy.png", "zz-nearly.png"} and set(shown(alike)) == names
        cosines = [float(found) for found in re.findall(r"cosine (-?[0-9.]+)", alike)]
        assert len(cosines) == 10 and cosines == sorted(cosines, reverse=True)
        parts = [shown(server.get(f"/?cluster={link}").text) for link in dict.fromkeys(
            re.findall(rf'href="{server.base}/\?cluster=(\d+)"', server.get("/set").text))]
        assert len(parts) > 1 and sorted(name for part in parts for name in part) == sorted(names)
        assert f'<option value="1">1 ({len(parts[0])})' in server.get().text
        said = server.get("/?cluster=0")
        assert said.status == 400 and "cluster is 0, expected the number of one, from 1" in said.text
        assert shown(server.get("/?cluster=99").text) == []
        assert f"semantic-duplicate ({len(nearly)})" in server.get().text
        assert "shows nearly the same as" in server.get("/findings?code=semantic-duplicate").text


def test_of_too_few_pictures_the_page_says_so(prep, photos, vision, tiny_model, tmp_path):
    for path in [*photos.iterdir()]:
        if path.stem not in ("0", "1"):
            path.unlink()
    done = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "few.json",
                *SIZED, "--embed", vision["dinov2"], "--json")
    assert done.code == 0, done.err
    with viewing_here(tmp_path / "few.json") as server:
        said = server.get("/set").text
        assert "Fewer than 3 pictures have an embedding" in said and "http-equiv" not in said
        assert len(shown(server.get("/?sort=typical").text)) == 2


def test_without_embeddings_there_are_no_such_pages(encoded):
    with viewing_here(encoded("--mask", "none")) as server:
        assert server.get("/set").status == 404 and server.get("/like/0").status == 404
        assert shown(server.get("/?cluster=1").text) == [] and "nearest picture" not in server.get().text
        assert len(shown(server.get("/?sort=alike").text)) == 10
        assert "/set" not in server.get().text and "/like/" not in server.get("/sample/0").text


def test_a_page_says_how_far_a_comparison_is(encoded, monkeypatch):
    path, go_on = encoded(), threading.Event()
    analysis = Similar._compare
    monkeypatch.setattr(Similar, "_compare", lambda self: go_on.wait(30) and analysis(self))
    monkeypatch.setattr(pages, "PATIENCE", 0.01)
    with viewing_here(path) as server:
        waiting = server.get("/set").text
        assert "Comparing: 0 of 10 samples." in waiting and 'http-equiv="refresh"' in waiting
        go_on.set()
        monkeypatch.setattr(pages, "PATIENCE", 30)
        assert "<svg" in server.get("/set").text


def test_a_damaged_row_is_said_on_the_page(encoded):
    path = encoded()
    opened = open_manifest(read_manifest(path))
    number = int(opened.samples.embeddings["embedding_shard"][0])
    folder = opened.cache.root / "shards"
    (shard,) = folder.rglob(f"{opened.shards[number]['digest']}*")
    for file in [shard] if shard.is_file() else [each for each in shard.rglob("*") if each.is_file()]:
        data = bytearray(file.read_bytes())
        file.chmod(0o644)
        file.write_bytes(bytes(data[:20]) + bytes(255 - value for value in data[20:]))
    with viewing_here(path) as server:
        answer = server.get("/set")
        assert answer.status == 500 and "prep verify" in answer.text
        assert server.get("/like/0").status == 500 and server.get().status == 200
