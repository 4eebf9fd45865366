"""Lists of objects: of many pages, of which some fail, and with what other programs put between the objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from prep.cache.remote.opening import open_to_encode
from prep.cache.remote.stored import refresh, refresh_task
from prep.cache.remote.unsent import upload_shard
from prep.cache.store import open_cache
from prep.fs.remote import objects, retry
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.client import open_store
from prep.fs.remote.copies import DIRECTORY
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import list_folder, list_objects

PAGE = 2  # objects in an answer


class Lister(BaseHTTPRequestHandler):
    """A store with small pages, which moto's server does not make: each takes 15 seconds of a clock of its own."""

    protocol_version = "HTTP/1.1"
    keys: list[str]
    faults: dict[int, str]  # by the number of the request
    asked = 0
    clock = 0.0

    def do_GET(self):
        kind, query = type(self), parse_qs(urlsplit(self.path).query)
        kind.asked, kind.clock = kind.asked + 1, kind.clock + 15
        if fault := self.faults.get(kind.asked):
            self.answer(int(fault), f"<Error><Code>{'ExpiredToken' if fault == '403' else 'SlowDown'}</Code></Error>")
            return
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        left = [key for key in self.keys if key > after]
        page, more = left[:PAGE], len(left) > PAGE
        listed = "".join(f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                         '<ETag>"1"</ETag><Size>1</Size></Contents>' for key in page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        self.answer(200, f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{listed}"
                         "</ListBucketResult>")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def lister(store, monkeypatch) -> Iterator[type[Lister]]:
    handler = type("Handler", (Lister,), {"keys": [f"c/{number}" for number in range(9)], "faults": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(objects, "PIECE", PAGE)
        monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: handler.clock))
        open_store.cache_clear()
        yield handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", ["503", "403"])
def test_pages_that_fail_once_each_do_not_end_a_list(lister, fault):
    """However far they are from each other: patience is for a store that stays away, also for its credentials."""
    lister.faults = {2: fault, 5: fault, 7: fault}
    assert list(list_objects("s3://bucket/c")) == [str(number) for number in range(9)]
    assert lister.asked == 8, "what was listed is not listed again"


def test_a_page_that_fails_again_and_again_ends_it(lister):
    lister.faults = dict.fromkeys(range(4, 99), "503")
    with pytest.raises(StoreError, match=r"given up after 30 seconds and 3 attempts$"):
        list_objects("s3://bucket/c")
    lister.faults, lister.asked = dict.fromkeys(range(4, 99), "403"), 0
    with pytest.raises(StoreError, match="the store answered 403 Forbidden"):
        list_objects("s3://bucket/c")
    assert lister.asked == 5, "credentials are read again once"


def sizes(url):
    return {name: one.size for name, one in list_objects(url).items()}


def test_objects_that_stand_for_directories_are_not_listed(store):
    """As s3fs and rclone make them; nor as Azure has directories, without a slash."""
    objects_of = {"a.png": b"1", "a.png/z": b"22", "sub/x/y": b"333", "sub/x-z": b"", "azure/y": b"1"}
    for name, data in {**objects_of, "": b"", "a.png/": b"", "sub/": b"", "sub/x/": b"", "azure": b"", "empty/": b"",
                       "nothing": b""}.items():
        store.server.put(f"{store.prefix}/c/{name}", data)
    assert sizes(f"{store.url}/c") == {"a.png": 1, "a.png/z": 2, "azure/y": 1, "empty": 0, "nothing": 0, "sub/x-z": 0,
                                       "sub/x/y": 3}
    assert sizes(f"{store.url}/c/sub") == {"x-z": 0, "x/y": 3}
    assert list_folder(f"{store.url}/c") == {"a.png": 1, "azure": 0, "nothing": 0}
    assert list_folder(f"{store.url}/c/sub") == {"x-z": 0}


def test_a_cache_with_objects_for_its_directories_is_what_it_was(store, home, prep, tmp_path, monkeypatch):
    """No commit counts less, and a shard that is there is not uploaded again."""
    assert prep("push", home / "manifest.json", store.url).code == 0
    names = list(list_objects(store.url))
    for folder in {f"{name.rpartition('/')[0]}/" for name in names if "/" in name} | {"cache/shards/"}:
        store.server.put(f"{store.prefix}/{folder}", b"")
    shards = {name.rpartition("/zarr.json")[0] for name in names if name.count("/") == 4}
    for shard in shards:
        store.server.put(f"{store.prefix}/{shard}/mine/", b"")
        assert f"{shard}/zarr.json" in names
    here = open_cache(home / "cache", create=False)
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    refresh(cache)
    assert list(cache.names("commits")) == list(here.names("commits")) and len(shards) == 4
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "another"))
    other = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    for task in here.names("commits"):
        refresh_task(other, task)
    assert list(other.names("commits")) == list(here.names("commits"))
    store.proxy.forget()
    for digest in cache.shards():
        upload_shard(cache, digest)
    assert not store.proxy.count("PUT")
    found = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/manifest.json", "--older-than", 0, "--json")
    assert found.code == 0 and not any(found.json["removed"].values())
