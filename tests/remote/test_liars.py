"""Stores that lie: lists without an end, bodies of another length or speed than announced, and other hosts.

What never ends is given up, with what was seen; nothing is asked of another host.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from s3_server import ENVIRONMENT
from small_manifest import write_small

from prep.cache.remote.quota import NotFetched
from prep.digest import canonical, with_checksum
from prep.fs.remote import client, objects, retry, waiting
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.client import open_store
from prep.fs.remote.copies import DIRECTORY, LIMIT
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import delete_object, list_folder, list_objects, read_listed, read_object, size_of, stream
from train.runs.stored.reading import for_init

PREFIX = "photos/"


class Liar(BaseHTTPRequestHandler):
    """A store of the objects in `objects`; `lie` may answer in its place."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    asked: list[tuple[str, str, dict[str, str]]]
    lie = staticmethod(lambda handler, key: False)
    over: threading.Event

    def do_GET(self):
        key = urlsplit(self.path).path.lstrip("/").partition("/")[2]
        self.asked.append((self.command, self.path, dict(self.headers)))
        if self.lie(self, key):
            return
        data = self.objects.get(key)
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        given = self.headers.get("Range")
        first, _, last = (given or "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(first):int(last or len(data)) + 1]
        self.answer(206 if given else 200, part, **({} if not given else {
            "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}),
            ETag=f'"{md5(data).hexdigest()}"')

    do_HEAD = do_GET

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def answer(self, status, data=b"", length=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data) if length is None else length), "ETag": '"x"',
                            "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def page(self, names, more, size=1):
        listed = "".join(f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                         f"<ETag>\"1\"</ETag><Size>{size}</Size></Contents>" for name in names)
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        self.answer(200, f"<ListBucketResult><IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{listed}"
                    "</ListBucketResult>".encode())
        return True

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """`serve(objects, lie)`: the handler of a server that is the store of the environment, or with `other`, is not."""
    servers = []

    def go(objects=(), lie=Liar.lie, other=False):
        kind = type("Handler", (Liar,), {"objects": dict(objects), "asked": [], "lie": staticmethod(lie),
                                         "over": threading.Event()})
        server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append((server, kind))
        kind.port = server.server_port
        if not other:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        return kind

    for name, value in {**ENVIRONMENT, DIRECTORY: str(tmp_path / "copies"), retry.PATIENCE: "0.3"}.items():
        monkeypatch.setenv(name, value)
    for module in (waiting, retry):
        monkeypatch.setattr(module, "LONG", 0.4)
    monkeypatch.setattr(retry, "SHORTEST", 0.005)
    open_store.cache_clear()
    client._asked.clear()
    yield go
    for server, kind in servers:
        kind.over.set()
        server.shutdown()
        server.server_close()
    open_store.cache_clear()


def numbered(handler, count, new):
    """A page of names: always the same, or each time new ones."""
    asked = len(handler.asked)
    return handler.page([f"{PREFIX}{asked * count * new + number:09}.png" for number in range(count)], f"t{asked}")


ENDLESS = {
    "the same page": (lambda handler, key: numbered(handler, 3, False), "goes on without anything new, after 3 obj"),
    "the same long page": (lambda handler, key: numbered(handler, 1000, False), "anything new, after 1,?000 objects"),
    "empty pages": (lambda handler, key: handler.page([], f"t{len(handler.asked)}"), "nothing new came for 0 seconds"),
    "new names": (lambda handler, key: numbered(handler, 1000, True), "has more than 5,000 objects, as far as"),
    "names of elsewhere": (lambda handler, key: handler.page([f"x{len(handler.asked)}-{n}" for n in range(500)], "t"),
                           "goes on without anything new, after 0 obj"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_list_without_an_end_is_given_up(serve, monkeypatch, name):
    monkeypatch.setattr(objects, "MOST_LISTED", 5000)
    if name != "empty pages":
        monkeypatch.setattr(retry, "LONG", 10.0)
    lie, said = ENDLESS[name]
    store = serve(lie=lie)
    began = time.monotonic()
    with pytest.raises(StoreError, match=said):
        list_objects("s3://bucket/photos")
    assert time.monotonic() - began < 20 and len(store.asked) < 5000


def test_a_folder_without_an_end_is_given_up(serve):
    serve(lie=ENDLESS["empty pages"][0])
    with pytest.raises(StoreError, match="nothing new came for 0 seconds; given up"):
        list_folder("s3://bucket/photos")


def test_a_list_that_takes_long_says_how_far_it_is(serve, monkeypatch, caplog):
    monkeypatch.setattr(objects, "MOST_LISTED", 10**6)
    monkeypatch.setattr(waiting, "LOOK", 0.05)

    def lie(handler, key):
        handler.over.wait(0.1)
        return numbered(handler, 200, True) if len(handler.asked) < 10 else handler.page([], "")

    serve(lie=lie)
    assert len(list_objects("s3://bucket/photos")) == 1800
    assert [text for text in caplog.messages if text.startswith("listing s3://bucket/photos: ")]


def dripping(handler, key):
    handler.answer(200, length=500)
    try:
        for _ in range(500):
            if handler.over.wait(0.1):
                return True
            handler.wfile.write(b"x")
            handler.wfile.flush()
    except OSError:
        pass
    return True


def test_an_answer_that_drips_is_given_up(serve):
    serve(lie=dripping)
    for read in (lambda: read_object("s3://bucket/a", 1000), lambda: read_listed("s3://bucket/a", 1000)):
        with pytest.raises(StoreError, match=r"the answer came too slowly: \d+ bytes in [01] seconds; given up after"):
            read()


def test_a_long_answer_that_drips_is_announced(serve, caplog):
    store, stop = serve(lie=dripping), threading.Event()

    def read():
        with suppress(Exception):
            list(stream("s3://bucket/a", 500, stop=stop))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not any("waiting for s3://bucket/a: it comes slowly" in text for text in caplog.messages):
        assert time.monotonic() < until
        time.sleep(0.05)
    stop.set()
    store.over.set()
    thread.join()  # it would speak in the log of the next test


@pytest.fixture
def dataset(serve, tmp_path):
    """`dataset(lie)`: a store with a small dataset; the URL of its manifest."""
    (tmp_path / "home").mkdir()
    write_small(tmp_path / "home")
    files = {f"d/{path.relative_to(tmp_path / 'home').as_posix()}": path.read_bytes()
             for path in (tmp_path / "home").rglob("*") if path.is_file()}
    manifest = next(name for name in files if name.count("/") == 1 and name.endswith(".json"))

    def go(lie=Liar.lie, change=None):
        if change is not None:
            files[manifest] = canonical(with_checksum({**json.loads(files[manifest]), **change}))
        return serve(files, lie), f"s3://bucket/{manifest}"

    return go


def test_a_table_takes_no_more_room_than_copies_may(dataset, prep, tmp_path, monkeypatch):
    """Not of 14 kB, although the manifest is small and its shards fit."""
    def lie(handler, key):
        if "/tables/" not in key:
            return False
        handler.answer(200, b"" if handler.command == "HEAD" else bytes(1 << 16), length=5 << 30)
        return True

    monkeypatch.setenv(LIMIT, "10MB")
    store, url = dataset(lie)
    result = prep("pull", url, tmp_path / "here")
    assert result.code == 7 and "there is no room for 5.0 GiB in" in result.err and "10.0 MB" not in result.out
    assert not any(command == "GET" and "/tables/" in path for command, path, _ in store.asked)


@pytest.fixture
def elsewhere(dataset):
    """`elsewhere(cache)`: the URL of a manifest that names its cache so."""
    def go(cache):
        def lie(handler, key):
            name = key.replace(f"d/{cache}/", "d/cache/")
            if name != key and name in handler.objects:
                handler.objects[key] = handler.objects[name]
            return False

        return dataset(lie, {"cache": cache})[1]

    return go


@pytest.mark.parametrize("cache", ["lnk", "lnk/sub", "sub/lnk/x"])
def test_pull_follows_no_link_out_of_the_directory(elsewhere, prep, tmp_path, cache):
    outside, here = tmp_path / "outside", tmp_path / "here"
    outside.mkdir()
    (here / "sub").mkdir(parents=True)
    for link in (here / "lnk", here / "sub" / "lnk"):
        link.symlink_to(outside)
    result = prep("pull", elsewhere(cache), here)
    assert result.code == 5 and f"names the cache {cache}, which would lie outside" in result.err
    assert not list(outside.iterdir()) and {path.name for path in here.iterdir()} == {"lnk", "sub"}


def test_pull_follows_no_links_in_a_circle(elsewhere, prep, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "circle").symlink_to("circle")
    result = prep("pull", elsewhere("circle/cache"), tmp_path / "here")
    assert result.code in (5, 7) and f"{tmp_path / 'here' / 'circle' / 'cache'}: " in result.err, result.err


def test_a_cache_thousands_of_directories_deep_is_refused(dataset, prep, tmp_path):
    _, url = dataset(change={"cache": "x/" * 2000 + "x"})
    result = prep("pull", url, tmp_path / "here")
    assert result.code == 4 and "2000 directories deep, expected at most 100" in result.err
    assert not (tmp_path / "here").exists()


def away(other, after=0, host="http://localhost"):
    """A lie that sends requests on to the host `other`, once it was asked for `after` things."""
    def lie(handler, key):
        if sent := bool(key or "?" in handler.path) and len(handler.asked) > after:
            handler.answer(307, Location=f"{host}:{other.port}{handler.path}")
        return sent

    return lie


TOKENS = {"s3": {"AWS_SESSION_TOKEN": "a-token"}, "az": {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=a-token"}}
ASKED = {"read": lambda url: read_object(url, 100), "list": list_objects, "size": size_of, "delete": delete_object}


@pytest.fixture
def token(serve, monkeypatch):
    """`token(scheme, lie)`: a store of the scheme, whose credentials travel in what is sent on."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for given in (name, name.upper()):
            monkeypatch.delenv(given, raising=False)

    def go(scheme, lie):
        store = serve({"a": b"x"}, lie)
        for name, value in {"AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{store.port}", "AZURE_ALLOW_HTTP": "true",
                            "AZURE_STORAGE_ACCOUNT_NAME": "account", **TOKENS[scheme]}.items():
            monkeypatch.setenv(name, value)
        return store

    return go


@pytest.mark.parametrize("scheme", TOKENS)
@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("after", [0, 2])
def test_no_token_goes_to_another_host(token, serve, scheme, what, after):
    """Neither at once nor after answers of the store's own, whatever is asked."""
    other = serve(other=True)
    store = token(scheme, away(other, after))
    url = f"{scheme}://bucket/a"
    if after:
        assert size_of(url) == 1
    where = "another host" if after else f"http://localhost:{other.port}"
    with pytest.raises(StoreError, match=f"the store sends requests on to {where}, which would get the cred"):
        ASKED[what](url)
    assert not other.asked and len(store.asked) == after + 1


@pytest.mark.parametrize("scheme", TOKENS)
@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("host", ["http://127.0.0.1", "https://127.0.0.1"])
def test_no_token_goes_to_another_port_of_the_host(token, serve, scheme, what, host):
    """However often the store is asked."""
    other = serve(other=True)
    store = token(scheme, away(other, host=host))
    for number in (1, 2):
        with pytest.raises(StoreError, match=f"the store sends requests on to {host}:{other.port}, which would get"):
            ASKED[what](f"{scheme}://bucket/a")
        assert not other.asked and len(store.asked) == number


def test_a_store_may_send_on_to_itself(token):
    """By its whole address, whose host is spelled otherwise, or by a path alone."""
    def lie(handler, key):
        if sent := "again" not in handler.path:
            where = "" if len(handler.asked) % 2 else f"HTTP://127.0.0.1:{handler.server.server_port}"
            handler.answer(307, Location=f"{where}{handler.path}?again")
        return sent

    token("s3", lie)
    assert read_object("s3://bucket/a", 100) == read_object("s3://bucket/a", 100) == b"x"


def test_a_store_behind_a_proxy_is_asked_once_without_its_token(token, serve, monkeypatch):
    """The proxy alone knows which hosts it reaches."""
    other = serve(other=True)
    token("s3", away(other))
    monkeypatch.setenv("AWS_PROXY_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=f"on to http://localhost:{other.port}, which would get"):
        read_object("s3://bucket/a", 100)
    client._asked.clear()
    store = token("s3", Liar.lie)
    with pytest.raises(StoreError, match="no connection"):
        read_object("s3://bucket/a", 100)
    assert not other.asked and [(command, headers.get("authorization")) for command, _, headers in store.asked] == [
        ("HEAD", None)]


@pytest.mark.parametrize("bypassed", [True, False])
def test_hosts_that_bypass_a_proxy_of_the_system_are_reached_without_it(token, monkeypatch, bypassed):
    store = token("s3", Liar.lie)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*" if bypassed else "127.0.0.1")
    assert read_object("s3://bucket/a", 100) == b"x"
    assert [command for command, *_ in store.asked] == ["HEAD", "GET"] and bool(client._only_hosts("s3")) == bypassed


def test_keys_that_do_not_travel_follow_a_redirect(serve):
    """Some stores send readers on to where the bytes are, by links that need no credentials."""
    other = serve({"a": b"x"}, other=True)
    serve(lie=away(other))
    assert read_object("s3://bucket/a", 100) == b"x"
    assert not [name for _, _, headers in other.asked for name in headers if name.lower() == "authorization"]


BEYOND = 1 << 50  # bytes; more than any disk here has


@pytest.mark.parametrize("name", ["run.json", "config.json", "weights.safetensors"])
def test_weights_take_no_more_room_than_the_disk_has(serve, tmp_path, name):
    """Whatever a store announces, before a byte of it comes."""
    def lie(handler, key):
        if "list-type" in handler.path:
            return handler.page([f"run/{name}"], "", size=BEYOND)
        handler.answer(200, length=BEYOND)
        return True

    store = serve(lie=lie)
    for place in ("run", f"run/{name}") if name.endswith("tensors") else ("run",):
        with pytest.raises(NotFetched, match=rf"{name} has 1024.0 TiB, but .* has room for"):
            for_init(Bucket.parse(f"s3://bucket/{place}"))
    assert not [path for command, path, _ in store.asked if command == "GET" and "list-type" not in path]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
