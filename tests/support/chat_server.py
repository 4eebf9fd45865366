"""A server of chat completions on the loopback, which answers as a test says, and lists what it was asked."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(kw_only=True)
class Request:
    """What the server was asked."""

    path: str
    headers: Mapping[str, str]
    document: dict[str, Any]

    @property
    def prompt(self) -> str:
        return self.document["messages"][0]["content"][0]["text"]

    @property
    def picture(self) -> bytes:
        kind, _, data = self.document["messages"][0]["content"][1]["image_url"]["url"].partition(",")
        assert kind == "data:image/jpeg;base64"
        return base64.b64decode(data)


@dataclass(kw_only=True)
class Reply:
    """What the server answers; `body` of bytes is sent as it is, and a text is what the model says."""

    body: str | bytes | dict[str, Any] = "a picture"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    half: bool = False  # the answer breaks off
    hangs: bool = False  # no answer comes until the server ends, or no second half


Rule = Callable[[Request, int], Reply | str]  # a request, and how many there were before


def completion(text: str | None, ending: str = "stop", **message: Any) -> dict[str, Any]:
    return {"object": "chat.completion", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": ending}]}


def failure(message: str, code: str = "") -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "code": code}}


class ChatServer:
    """`rule` decides each answer; `asked` has all requests."""

    def __init__(self, rule: Rule = lambda request, before: "a picture") -> None:
        self.rule, self.asked = rule, list[Request]()
        self.ended, self.hung, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"chat": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: Request) -> Reply:
        with self._lock:
            before = len(self.asked)
            self.asked.append(request)
        said = self.rule(request, before)
        return Reply(body=said) if isinstance(said, str) else said


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        reply = self.chat.answer(Request(path=self.path, headers=dict(self.headers), document=json.loads(data)))
        if reply.hangs and not reply.half:
            self._hang()
            return
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(
            completion(reply.body) if isinstance(reply.body, str) else reply.body).encode()
        with suppress(OSError):  # the client has gone
            self.send_response(reply.status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)),
                                **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:len(body) // 2] if reply.half else body)
            if reply.hangs:
                self._hang()

    def _hang(self) -> None:
        self.chat.hung.set()
        self.chat.ended.wait(60)
