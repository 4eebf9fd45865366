"""A store that accepts a request and then sends nothing is asked again soon; what moves, however slowly, is not cut."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prep.fs.remote import objects, retry
from prep.fs.remote.client import open_store
from prep.fs.remote.objects import list_objects, read_listed, read_object, stream, upload_file
from prep.fs.remote.retry import NEVER

DATA = bytes(range(256)) * 4096  # 1 MiB
URL = "s3://bucket/a.bin"
SOON = 0.3  # seconds, in place of those of the program


class Slow(BaseHTTPRequestHandler):
    """A store of one object. What it does with each request in turn is in `plan`: "", "silent" (no answer), "stalls"
    (in the midst of a body), "trickles" (a tenth of the body at a time, slower than SOON altogether)."""

    protocol_version = "HTTP/1.1"
    plan: list[str]
    asked: list[str]
    over: threading.Event

    def do_GET(self):
        fault = self.next(self.headers.get("Range", "all"))
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        listing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        body = listing if "list-type" in self.path else DATA[start:]
        if fault == "silent":
            self.over.wait(30)
            return
        self.send_response(206 if "Range" in self.headers else 200)
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        for name, value in (("Content-Length", str(len(body))), ("ETag", '"x"'),
                            ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")):
            self.send_header(name, value)
        self.end_headers()
        step = len(body) // 10 + 1
        for at in range(0, len(body), step):
            if fault == "stalls" and at >= len(body) // 2:
                self.over.wait(30)
                return
            if fault == "trickles":
                self.over.wait(SOON / 5)
            self.wfile.write(body[at : at + step])

    def do_PUT(self):
        fault, left = self.next("PUT"), int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, len(DATA) // 10)))
            if fault == "trickles":
                self.over.wait(SOON / 5)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"x"')
        self.end_headers()

    def next(self, what):
        self.asked.append(what)
        return self.plan.pop(0) if self.plan else ""

    def log_message(self, *_):
        pass


@pytest.fixture
def slow(store, monkeypatch) -> Iterator[type[Slow]]:
    handler = type("Handler", (Slow,), {"plan": [], "asked": [], "over": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(objects, "SILENT", SOON)
        open_store.cache_clear()
        yield handler
        handler.over.set()
        server.shutdown()


READS = {"whole": lambda: read_object(URL, len(DATA)), "listed": lambda: read_listed(URL, len(DATA))[0],
         "range": lambda: read_listed(URL, len(DATA), 0, len(DATA))[0],
         "stream": lambda: b"".join(map(bytes, stream(URL, len(DATA))))}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("fault", ["silent", "stalls"])
def test_bytes_of_an_object_that_do_not_come_are_asked_for_again_soon(slow, fault, read, caplog, monkeypatch):
    monkeypatch.setattr(retry, "QUIET", 0.0)
    slow.plan[:] = [fault]
    began = time.monotonic()
    assert READS[read]() == DATA and len(slow.asked) == 2
    assert time.monotonic() - began < retry.SILENT_AGAIN / 3
    (message,) = caplog.messages
    assert message.startswith(f"waiting for {URL}: no answer in time; asked 1 time in ")


@pytest.mark.parametrize("read", READS)
def test_bytes_that_come_slowly_are_not_cut(slow, read):
    slow.plan[:] = ["trickles"] * 9
    began = time.monotonic()
    assert READS[read]() == DATA and len(slow.asked) == 1
    assert time.monotonic() - began > SOON


@pytest.mark.slow
def test_a_store_that_needs_longer_for_each_answer_gets_it(slow, monkeypatch):
    """After one attempt without progress the next waits as long as other requests do; a list waits so at once."""
    monkeypatch.setattr(retry, "SILENT_AGAIN", 3 * SOON)
    for read in READS.values():
        slow.plan[:], slow.asked[:] = ["silent", "silent"], []
        began = time.monotonic()
        assert read() == DATA and len(slow.asked) == 3
        assert time.monotonic() - began > 4 * SOON, "of which the second took three times as long"
    slow.plan[:] = ["trickles"]
    assert list_objects("s3://bucket/none", stop=NEVER) == {}


def test_what_is_sent_slowly_is_not_cut(slow, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "SILENT_AGAIN", SOON)
    (tmp_path / "file").write_bytes(DATA)
    slow.plan[:] = ["trickles"] * 9
    began = time.monotonic()
    upload_file(URL, tmp_path / "file")
    assert slow.asked == ["PUT"] and time.monotonic() - began > SOON


def test_silence_counts_in_the_notice(slow, monkeypatch, caplog):
    """So it comes after the first attempt, and not after another one of half a minute."""
    caplog.set_level(logging.WARNING, "latentry.remote")
    monkeypatch.setattr(retry, "QUIET", SOON)
    for read in READS.values():
        caplog.clear()
        retry._announced.clear()
        slow.plan[:] = ["silent"]
        assert read() == DATA
        (message,) = caplog.messages
        assert message.startswith(f"waiting for {URL}: no answer in time; asked 1 time in ")
