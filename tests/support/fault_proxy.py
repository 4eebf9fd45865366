"""A proxy that fails on purpose: it passes requests to a server, and spoils those that a test chooses."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Headers = Mapping[str, str]
Rule = Callable[[str, str, int], str]  # (method, path, how many such requests before): what goes wrong, or ""
ERRORS = {"500": "InternalError", "503": "SlowDown", "403": "ExpiredToken", "404": "NoSuchKey", "400": "BadRequest",
          "403 clock": "RequestTimeTooSkewed", "403 key": "InvalidAccessKeyId",
          "409": "ConditionalRequestConflict", "409 aborted": "OperationAborted"}


class FaultProxy:
    """What goes wrong is `rule`'s word for each request; `asked` lists them all.

        "500", "503", "403" …   an answer of the proxy's own
        "403 clock"             as a store refuses a computer whose clock is wrong
        "403 key"               as it refuses a key that it does not know
        "409", "409 aborted"    as it ends a write that meets another one of the same object, which may fail as well
        "drop"                  the connection ends before an answer
        "truncate"              it ends in the middle of the answer
        "flip"                  one bit of the answer is another
        "flip sent"             one bit of what is sent is another when it arrives
        "lose"                  the server does what was asked, but its answer is lost
        "hang"                  no answer until `forget`
    """

    def __init__(self, upstream: int, translated: Callable[[Headers], Headers] = dict) -> None:
        """`upstream`: the server's port. `translated`: the headers of a request as the server knows them."""
        self.rule: Rule = lambda method, path, before: ""
        self.asked: list[tuple[str, str, str]] = []  # method, path, what went wrong
        self.ranges = 0  # requests for a part of an object
        self.sent = 0  # bytes of bodies that were passed to the client
        self._lock = threading.Lock()
        self.hung = threading.Event()
        self._released = threading.Event()
        handler = type("Handler", (_Handler,), {"proxy": self, "upstream": upstream,
                                                "translated": staticmethod(translated)})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forget(self) -> None:
        """From now on, nothing goes wrong, and nothing was asked."""
        self._released.set()
        with self._lock:
            self._released, self.hung = threading.Event(), threading.Event()
            self.rule, self.asked, self.ranges, self.sent = (lambda method, path, before: ""), [], 0, 0

    def count(self, method: str = "", part: str = "") -> int:
        return sum(method in (one, "") and part in path for one, path, _ in self.asked)

    def judge(self, method: str, path: str) -> str:
        with self._lock:
            before = sum((one, _lasting(other)) == (method, _lasting(path)) for one, other, _ in self.asked)
            fault, released = self.rule(method, path, before), self._released
            self.asked.append((method, path, fault))
        if fault == "hang":
            self.hung.set()
            released.wait(30)
        return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultProxy
    upstream: int
    translated: Callable[[Headers], Headers]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.ranges += "Range" in self.headers
        fault = self.proxy.judge(self.command, self.path)
        if fault in ERRORS:
            data = f"<Error><Code>{ERRORS[fault]}</Code><Message>a secret: a-key</Message></Error>".encode()
            self._send(int(fault[:3]), {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else data)
            return
        if fault == "drop":
            self._break()
            return
        if fault == "flip sent" and body:
            body = _flipped(body)
        try:
            status, headers, data = self._ask(body)
        except (OSError, http.client.HTTPException):  # the server was stopped
            self._break()
            return
        if fault == "lose":
            self._break()
        elif fault == "flip" and data:
            self._send(status, headers, _flipped(data))
        elif fault == "truncate" and data:
            self._send(status, headers, data, most=len(data) // 2)
            self._break()
        else:
            self._send(status, headers, data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=30)
        try:
            kept = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            upstream.request(self.command, self.path, body or None, dict(self.translated(kept)))
            answer = upstream.getresponse()
            length = answer.getheader("Content-Length")
            data = answer.read()
            headers = {name: value for name, value in answer.getheaders()
                       if name.lower() not in ("connection", "transfer-encoding", "content-length")}
            if self.command == "HEAD" and length is not None:
                headers["Content-Length"] = length
            return answer.status, headers, data
        finally:
            upstream.close()

    def _send(self, status: int, headers: dict[str, str], data: bytes, most: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        with suppress(OSError):  # a client that was killed, or has enough
            self.end_headers()
            self.wfile.write(data[:most])
            self.proxy.sent += len(data[:most])

    def _break(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(2)

    def log_message(self, *_: object) -> None:
        pass


def _lasting(path: str) -> str:
    """A path without the number of an upload, which is another at each attempt."""
    return re.sub(r"uploadId=[^&]*", "", path)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
