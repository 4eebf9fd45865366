"""Sends a document to a server, and reads its answer: one connection a request, ended after its time or by `close`.

Nothing is followed: an answer that sends elsewhere is an answer like any other. Proxies are those of the environment
(HTTPS_PROXY, HTTP_PROXY, NO_PROXY), never for this computer itself.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from prep.captioning.engine import Stopped
from prep.fs.untrusted import read_up_to

CONNECTING = 10.0  # seconds until a server must have taken a connection
MOST_ANSWERED = 4 << 20  # bytes of an answer; a caption has some hundreds


class NoAnswer(Exception):
    """There was no whole answer: what happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer of a server."""

    status: int
    headers: Mapping[str, str]  # by names in small letters
    body: bytes


def is_this_computer(host: str) -> bool:
    """Whether a host of an address is this computer itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Client:
    """Posts to one address. Threads may share it."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        """`url` is of HTTP or HTTPS, with a host; a request takes `seconds` at most."""
        self._at, self._headers, self._seconds = urlsplit(url), headers, seconds
        self._lock, self._open = threading.Lock(), set[socket.socket]()
        self.closed = threading.Event()

    def post(self, body: bytes) -> Reply:
        """The answer to a JSON document. Raises `NoAnswer`, `Stopped`."""
        connection, path = _connection(self._at)
        late = threading.Event()
        try:
            connection.connect()
            with self._under_way(connection.sock, late):
                return _exchange(connection, path, body, self._headers)
        except Stopped:
            raise
        except Exception as error:  # a connection that was aborted meanwhile raises anything
            if self.closed.is_set():
                raise Stopped from None
            if not late.is_set() and not isinstance(error, OSError | http.client.HTTPException | ValueError):
                raise
            raise NoAnswer(f"no answer within {self._seconds:g} seconds" if late.is_set() else _said(error)) from None
        finally:
            connection.close()

    @contextmanager
    def _under_way(self, line: socket.socket, late: threading.Event) -> Iterator[None]:
        """Inside, the socket is shut down after the time of a request, and by `close`. Raises `Stopped`."""
        def end() -> None:
            late.set()
            _abort(line)

        line.settimeout(None)
        timer = threading.Timer(self._seconds, end)
        timer.daemon = True
        with self._lock:
            if self.closed.is_set():
                raise Stopped
            self._open.add(line)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(line)

    def close(self) -> None:
        """Ends all requests under way; they raise `Stopped`."""
        with self._lock:
            self.closed.set()
            for line in self._open:
                _abort(line)


def _connection(at: SplitResult) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not open yet, to the server or to a proxy, and the target of its requests."""
    host, path = at.hostname or "", at.path + (f"?{at.query}" if at.query else "")
    proxy = None if is_this_computer(host) or proxy_bypass(host) else getproxies().get(at.scheme)
    own = at.port or {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[at.scheme]
    try:
        through = None if proxy is None else urlsplit(proxy if "//" in proxy else f"//{proxy}")
        first, port = (host, own) if through is None else (through.hostname or "", through.port or 80)
    except ValueError:
        raise NoAnswer(f"{at.scheme.upper()}_PROXY is no address") from None
    if at.scheme == "http":
        return (http.client.HTTPConnection(first, port, timeout=CONNECTING),
                path if through is None else at.geturl())
    connection = http.client.HTTPSConnection(first, port, timeout=CONNECTING, context=ssl.create_default_context())
    if through is not None:
        connection.set_tunnel(host, own)
    return connection, path


def _exchange(connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    connection.request("POST", path, body, {"Content-Type": "application/json", "Accept": "application/json",
                                            "Connection": "close", **headers})
    with connection.getresponse() as reply:
        data = read_up_to(reply, MOST_ANSWERED + 1)
        if len(data) > MOST_ANSWERED:
            raise ValueError(f"an answer of more than {MOST_ANSWERED >> 20} MiB")
        if reply.length:  # bytes that its header promised
            raise http.client.IncompleteRead(data, reply.length)
        return Reply(status=reply.status, headers={name.lower(): value for name, value in reply.getheaders()},
                     body=data)


def _abort(line: socket.socket) -> None:
    """Wakes the thread that waits for the socket."""
    with suppress(OSError):  # closed
        line.shutdown(socket.SHUT_RDWR)


def _said(error: Exception) -> str:
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection ended before an answer"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    if isinstance(error, ssl.SSLError):
        return f"no secure connection: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECTING:g} seconds"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error) or type(error).__name__
