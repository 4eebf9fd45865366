"""Listens on this computer's loopback address until Ctrl-C: the room of uvicorn."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from prep.errors import OUT_OF_FILES, UsageError, first_line
from prep.view.guard import App

HOST = "127.0.0.1"
WAITING = 128  # connections that are not yet accepted
AT_ONCE = 256  # requests; more are turned away
PATIENCE = 2  # seconds for answers under way after Ctrl-C
IDLE = 30  # seconds after which a connection without requests is closed
SILENT = 10.0  # seconds for which a new connection may be without its first request
STRANGERS = 64  # connections without a first request; a further one closes the oldest of them


def listen(port: int) -> socket.socket:
    """A socket on the loopback address; port 0 takes any free one. Raises `UsageError` if the port is taken."""
    here = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on: 40 ms
    try:
        here.bind((HOST, port))
        here.listen(WAITING)
    except OSError as error:
        here.close()
        if error.errno in OUT_OF_FILES or error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UsageError(f"--port {port} cannot be used: {first_line(error)}",
                         hint="leave --port out: a free port is taken") from None
    return here


class Connection(H11Protocol):
    """A connection that keeps its place only if it asks something: any user of this computer can open many.

    Requests without the token are answered by `Guard`, which closes their connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes the oldest of too many connections that have asked nothing."""
        super().connection_made(transport)
        self.begun = self.loop.time()
        self.loop.call_later(SILENT, self.close_if_silent)
        strangers = [other for other in self.connections if isinstance(other, Connection) and other.is_silent()]
        for stranger in sorted(strangers, key=lambda stranger: stranger.begun)[:-STRANGERS]:
            stranger.close_if_silent()

    def is_silent(self) -> bool:
        """Whether it has asked nothing yet."""
        return not (self.cycle or self.transport.is_closing())

    def close_if_silent(self) -> None:
        """Closes it, if it has asked nothing yet."""
        if self.is_silent():
            self.transport.close()


class Server(uvicorn.Server):
    """Answers requests once it runs; calls `ready` as soon as it does."""

    def __init__(self, app: App, ready: Callable[[], None]) -> None:
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        super().__init__(uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", http=Connection, loop="asyncio",
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=PATIENCE, limit_concurrency=AT_ONCE,
            timeout_keep_alive=IDLE))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets=sockets)
        self._ready()

    def run_until_stopped(self, here: socket.socket) -> None:
        """Answers requests until Ctrl-C, SIGTERM, or another thread's `should_exit = True`, and closes the socket."""
        with here, suppress(KeyboardInterrupt):  # uvicorn ends in order, then raises the signal again
            self.run(sockets=[here])
