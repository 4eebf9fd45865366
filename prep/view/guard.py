"""Stands before the pages: only this computer, only with the token, only GET, and headers that forbid everything else.

With `--edit`, and for a run's buttons, POST is answered, too, if it comes from one of our own pages: with the right
`Origin`, with a second token in a header of its own, which no other site can send, and with a body of a stated size.

A page of another site must neither read nor steer this server:

- it listens on the loopback address only, so no other computer reaches it;
- `Host` must name this computer, so a name that an attacker resolves to 127.0.0.1 (DNS rebinding) gets nothing;
- `Origin`, and what browsers say of a request's origin (`Sec-Fetch-Site`), must not be another site;
- every address begins with a token of 256 random bits, which no other site, user or program knows; a browser that we
  start gets a ticket instead, good for one request, because other users can see the command lines of programs;
- the policy of each answer allows our own style, script and pictures, nothing inline and nothing from elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOSTS = (b"127.0.0.1", b"localhost")  # any port: a tunnel through SSH may use another one here
LONGEST = 8192  # bytes of path and query
MOST_SENT = 1 << 26  # bytes of a body: a mask
EDIT_HEADER = b"x-latentry-edit"
POLICY = ("default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; form-action 'self'; "
          "base-uri 'none'; frame-ancestors 'none'")
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "x-frame-options": "DENY",
    "cache-control": "no-store", "referrer-policy": "same-origin", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin", "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def new_token() -> str:
    """43 letters, digits, "-" and "_": 256 random bits."""
    return secrets.token_urlsafe(32)


class Guard:
    """Passes requests with the token on to `app`, whose paths begin after the token; answers all others itself."""

    def __init__(self, app: App, token: str, edit_token: str = "") -> None:
        self._app = app
        self._edit_token = edit_token.encode()  # "": nothing is sent
        fetching = b"connect-src 'self'; script-src" if edit_token else b"script-src"
        self._headers = [(name, value.replace(b"script-src", fetching)) for name, value in _HEADERS]
        self._token = token.encode()
        self._ticket: bytes | None = None
        self._first = b""

    def ticket(self, first: str = "") -> str:
        """A path that leads to the page `first` once; it replaces the one before."""
        ticket = new_token()
        self._ticket, self._first = ticket.encode(), first.encode()
        return f"/open/{ticket}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, as ASGI has it."""
        refused = self._refusal(scope)
        if refused is not None:
            status, words = refused
            more = [(b"allow", b"GET, HEAD, POST" if self._edit_token else b"GET, HEAD")] if status == 405 else []
            if status == 404 and scope["method"] == "GET" and self._redeems(scope["path"]):
                status, words, more = 303, "This way.", [(b"location", b"/" + self._token + b"/" + self._first)]
            await _answer(status, words, more, head=scope["method"] == "HEAD", send=send)
            return
        rest = scope["path"].partition("/")[2].partition("/")[2]

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, with_headers)

    def _redeems(self, path: str) -> bool:
        """Whether a path is the ticket's, which is then used up."""
        ticket, self._ticket = self._ticket, self._ticket if not path.startswith("/open/") else None
        return ticket is not None and secrets.compare_digest(path.encode(), b"/open/" + ticket)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and words of an answer to a request that goes no further."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        host, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(host) != 1 or not _is_here(host[0]):
            return 403, "This server answers to 127.0.0.1 and localhost only."
        if any(origin != b"http://" + host[0] for origin in origins) or _from_elsewhere(headers):
            return 403, "This server answers to its own pages only."
        if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > LONGEST:
            return 414, f"The address is longer than {LONGEST} bytes."
        token, slash, _ = scope["path"][1:].partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self._token):
            return 404, "Nothing is here. Use the whole address that the command printed."
        if scope["method"] == "POST" and self._edit_token:
            return self._unposted(headers)
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This server only shows: GET and HEAD."
        return None

    def _unposted(self, headers: dict[bytes, list[bytes]]) -> tuple[int, str] | None:
        """The refusal of a POST, beyond the reasons that hold for every request."""
        tokens, size = headers.get(EDIT_HEADER, []), headers.get(b"content-length", [])
        if not headers.get(b"origin") or headers.get(b"sec-fetch-site", [b"same-origin"]) != [b"same-origin"]:
            return 403, "Only a page of this server can send something."
        if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._edit_token):
            return 403, "The token of the page is missing, or of an earlier start: load the page again."
        if len(size) != 1 or not size[0].isdigit() or headers.get(b"transfer-encoding"):
            return 411, "The size of what is sent is missing."
        if len(size[0]) > 9 or int(size[0]) > MOST_SENT:
            return 413, f"More than {MOST_SENT} bytes are sent."
        return None


def _is_here(host: bytes) -> bool:
    name, colon, port = host.partition(b":")
    return name.lower() in HOSTS and (not colon or port.isdigit())


def _from_elsewhere(headers: dict[bytes, list[bytes]]) -> bool:
    """Whether a browser says that another site asks. A link that the user followed, in a new page, may be anywhere."""
    sites = headers.get(b"sec-fetch-site", [])
    if all(site in (b"same-origin", b"none") for site in sites):
        return False
    return headers.get(b"sec-fetch-mode") != [b"navigate"] or headers.get(b"sec-fetch-dest") != [b"document"]


async def _answer(status: int, words: str, more: list[tuple[bytes, bytes]], *, head: bool, send: Send) -> None:
    body = f"{words}\n".encode()
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"), *more, *_HEADERS]})
    await send({"type": "http.response.body", "body": b"" if head else body})
