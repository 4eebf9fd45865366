"""Lists of objects: of many pages, of which some fail, and with what other programs put between the objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from prep.fs.remote import asking, objects
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import list_objects
from prep.fs.remote.opening import open_store

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
        monkeypatch.setattr(objects, "LISTED", PAGE)
        monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: handler.clock))
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
