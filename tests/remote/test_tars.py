"""Tars in a store: what is listed, read and remembered of them is what it is of the same tars on a disk."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
from pictures import draw
from tarred import member, tar_of

from prep.fs.blob import Blob, error_code, fetched, read_blob
from prep.fs.remote import objects
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import version_of
from prep.scan import scanner
from prep.sources import readers
from prep.sources.tar_members import TarMessage, TarPart, read_parts
from prep.sources.walk import tars_at

sys.path.append(str(Path(__file__).parents[1] / "hostile"))
import seeds
import spoil


@pytest.fixture
def tars(store, tmp_path):
    """Three tars of two pictures each, here and in the store."""
    root = tmp_path / "tars"
    root.mkdir()
    for number in range(3):
        members = []
        for key in (f"{number}0", f"{number}1"):
            picture = draw(tmp_path / f"{key}.png", (96, 96), seed=int(key)).read_bytes()
            members += [member(f"in/{key}.png", picture), member(f"in/{key}.txt", f"picture {key}".encode())]
        (root / f"{number}.tar").write_bytes(tar_of(members))
    store.upload(root)
    return root


def encode(prep, source, cache, manifest, model):
    done = prep("encode", source, "--model", model, "--cache", cache, "-o", manifest, "--resolution", "96", "--json")
    assert done.code == 0, done.err
    return done.json


def gets(store):
    return [path for method, path, _ in store.proxy.asked if method == "GET" and "list-type" not in path]


def test_keys_are_those_of_the_same_tars_on_a_disk(store, tars, tiny_model, prep, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    encode(prep, tars / "*.tar", tmp_path / "cache", tmp_path / "here.json", tiny_model)
    here = json.loads((tmp_path / "here.json").read_text())
    for pattern in ("{0..2}.tar", "*.tar", "[0-9].tar"):
        found = encode(prep, f"{store.url}/{pattern}", tmp_path / "cache", tmp_path / "there.json", tiny_model)
        assert sum(found["encoded"].values()) == 0 and found["samples"]["train"] == 6
        there = json.loads((tmp_path / "there.json").read_text())
        assert there["tables"] == here["tables"] and there["sources"] == [f"{store.url}/{pattern}"]
        if pattern == "{0..2}.tar":
            assert len(gets(store)) == 3 + 12, "each tar once through, and each member"
            store.proxy.forget()
    assert gets(store) == [], "all is remembered, whatever names the tars"


def test_a_question_mark_in_a_glob_is_told(store, prep):
    done = prep("scan", f"{store.url}/shards/?.tar")
    assert done.code == 5 and done.err == (
        f"error: {store.url}/shards/… has a question mark, with which a query begins in a URL, expected a name or a "
        "glob without one\nhint: a glob of tars in a store has * or a range like [0-9] in its place\n")
    secret = prep("scan", f"{store.url}/shards?key=secret/a.tar")
    assert secret.code == 5 and "secret" not in secret.err


@pytest.mark.slow
def test_rows_are_encoded_from_members_and_pages_show_them(store, tars, tiny_model, prep, tmp_path):
    found = encode(prep, f"{store.url}/*.tar", tmp_path / "cache", tmp_path / "m.json", tiny_model)
    assert found["encoded"] == {"latent": 6, "mask": 0, "text": 7}
    assert prep("inspect", tmp_path / "m.json", "--html", tmp_path / "m.html").code == 0
    assert (tmp_path / "m.html").read_text().count("data:image/jpeg") >= 6


@pytest.mark.parametrize("name", [
    "b#1.tar", "ü*.tar", *(pytest.param(name, marks=pytest.mark.slow)
                           for name in ("c?2.tar", "d\\3.tar", "e %41.tar"))])
def test_keys_of_all_kinds_are_tars_where_a_glob_finds_them(store, tars, prep, name):
    """What follows the bucket is the key; in a URL that a user typed, a query may be a secret."""
    store.server.put(quote(f"{store.prefix}/odd/{name}"), (tars / "1.tar").read_bytes())
    found = prep("scan", f"{store.url}/odd/*.tar", "--json")
    assert found.code == 0, found.err
    assert found.json["pictures"] == found.json["samples"] == 2
    (tar,) = tars_at(Bucket.parse(f"{store.url}/odd/*.tar"))
    assert (tar.whole.file, tar.label) == (f"{store.url}/odd/{name}", name)


@pytest.mark.parametrize("fault", ["truncate", *(pytest.param(one, marks=pytest.mark.slow) for one in ("500", "drop"))])
def test_what_goes_wrong_once_is_asked_again(store, tars, prep, fault):
    good = prep("scan", tars / "*.tar", "--json").json
    store.proxy.rule = lambda method, path, before: fault if before == 0 else ""
    assert prep("scan", f"{store.url}/*.tar", "--json").json == good


def test_a_tar_that_changes_is_listed_again(store, tars, prep):
    assert prep("scan", f"{store.url}/0.tar", "--json").json["pictures"] == 2
    store.server.put(f"{store.prefix}/0.tar", (tars / "1.tar").read_bytes() + bytes(10240))
    found = prep("scan", f"{store.url}/0.tar", "--json").json
    assert found["pictures"] == found["samples"] == 2 and not any("00.png" in one["path"] for one in found["findings"])


def test_a_store_without_ranges_is_told(store, tars, prep, monkeypatch):
    def whole(error):
        raise objects._NoRanges

    asked = objects.with_retries
    monkeypatch.setattr(objects, "with_retries", lambda *words, **more: whole(None) if words[-1] is objects._ranged and
                        words[1].__name__ == "read" else asked(*words, **more))
    done = prep("scan", f"{store.url}/0.tar")
    assert done.code == 7 and "0.tar: the store sends whole objects only, and no ranges of them" in done.err


def test_a_tar_that_ends_before_a_member_does(store, tars):
    url = f"{store.url}/0.tar"
    version, data = version_of(url), (tars / "0.tar").read_bytes()
    assert read_blob(Blob(file=url, offset=512, length=100, version=version)) == data[512:612]
    with pytest.raises(OSError, match="object ends after 10 of 100 bytes"):
        read_blob(Blob(file=url, offset=len(data) - 10, length=100, version=version))
    for beyond in (len(data), len(data) + 10):
        held = fetched(Blob(file=url, offset=beyond, length=100, version=version))
        with pytest.raises(OSError, match="object ends before the bytes that were asked for") as caught:
            read_blob(held)
        assert error_code(caught.value) == "unreadable-file"
    with pytest.raises(FileNotFoundError, match="no object can have such a name"):
        read_blob(Blob(file="s3://bucket/none/../x", offset=0, length=1))


def test_a_tar_that_a_shorter_one_replaces_after_it_was_listed_is_a_finding(store, tars, prep, monkeypatch):
    examined = scanner._examined

    def late(items, *work):
        listed = list(items)
        store.server.put(f"{store.prefix}/0.tar", (tars / "0.tar").read_bytes()[:600])
        return examined(listed, *work)

    monkeypatch.setattr(scanner, "_examined", late)
    done = prep("scan", f"{store.url}/0.tar", "--json")
    found = [one for one in done.json["findings"] if one["severity"] == "error"]
    assert {one["code"] for one in found} == {"unreadable-file"} and len(found) == 4, done.err
    assert any("object ends before the bytes that were asked for" in one["detail"] for one in found)


def test_a_tar_that_a_shorter_one_replaces_while_it_is_listed_is_a_finding(store):
    store.server.put(f"{store.prefix}/a.tar", tar_of([member("a.png", bytes(4 << 20))])[:600])
    with readers.readers() as pool:
        (said,) = readers.read_tar(pool, Blob(file=f"{store.url}/a.tar", version=f"x {5 << 20}"))
    assert said.code == "unreadable-file"
    assert said.detail == "cannot be read: object ends before the bytes that were asked for"


# ---- listings --------------------------------------------------------------------------------------------------------


def listed(data, monkeypatch, tmp_path):
    """What is listed of a tar on a disk, and of its headers alone."""
    asked = []

    def stream(_url, end, *, start, stop):
        asked.append(start)
        for at in range(start, end, 700):
            yield data[at : min(at + 700, end)]

    monkeypatch.setattr(readers, "stream", stream)
    (tmp_path / "a.tar").write_bytes(data)
    here = whole(read_parts(TarMessage(str(tmp_path / "a.tar").encode())))
    headers = readers.headers_of("s3://bucket/a.tar", len(data))
    return here, whole(read_parts(TarMessage(b"s3://bucket/a.tar", len(data), headers))), headers, asked


def whole(parts):
    parts = list(parts)
    return TarPart([one for part in parts for one in part.members], [one for part in parts for one in part.said])


def kinds():
    """A tar of each kind that programs write."""
    long = "d" * 120 + "/" + "n" * 120 + ".png"
    members = ["a.png", "a.txt", member("big.png", bytes(range(256)) * 40), member(long, b"x" * 513), "ü.png",
               member("dir/", kind=tarfile.DIRTYPE), member("l.png", kind=tarfile.SYMTYPE, target="a.png"),
               member("h.png", kind=tarfile.LNKTYPE, target="a.png"), "z.png"]
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
            for one in members:
                info, data = one if isinstance(one, tuple) else member(one)
                if kind == tarfile.PAX_FORMAT:
                    info.pax_headers = {"size": str(info.size), "comment": "x" * 600} if info.isreg() else {}
                if kind != tarfile.USTAR_FORMAT or len(info.name) < 200:
                    tar.addfile(info, io.BytesIO(data))
        yield stream.getvalue()
    yield from (b"", b"\x1f\x8b" + bytes(600), b"no tar at all", bytes(10240), tar_of(["a.png"])[:512])


@pytest.mark.parametrize("skip", [0, 600, 1 << 21])
def test_headers_alone_give_what_the_whole_tar_gives(monkeypatch, tmp_path, skip):
    monkeypatch.setattr(readers, "SKIP", skip)
    for data in kinds():
        here, there, headers, asked = listed(data, monkeypatch, tmp_path)
        assert there == here
        assert sum(len(part) for _, part in headers) < max(2048, len(data)) and (len(asked) < 2 or skip < 1000)


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_headers_of_spoiled_tars_give_the_same_or_say_so(monkeypatch, tmp_path, count):
    monkeypatch.setattr(readers, "SKIP", 1000)
    same = 0
    for number in range(count):
        rng = Random(f"tar {number}")
        here, there, *_ = listed(spoil.tar(rng.choice(seeds.tars()), rng), monkeypatch, tmp_path)
        same += there == here
        told = [code for name, code, _ in there.said if not name]
        assert there == here or (there.members == here.members[: len(there.members)] and
                                 {"corrupt-data", "truncated", "not-an-archive"} & set(told)), number
    assert same > 0.8 * count
