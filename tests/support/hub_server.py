"""A server on this computer that plays the few addresses of the Hugging Face Hub that an upload asks for."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """Its repositories, and what is refused."""

    tokens: tuple[str, ...] = ("hf_good",)
    private: dict[str, bool] = field(default_factory=dict)  # repositories, and whether they are private
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by repository and name
    blobs: dict[str, bytes] = field(default_factory=dict)  # by digest
    refused: dict[str, int] = field(default_factory=dict)  # the status of an answer, by a part of the address
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes, base: str, token: str) -> tuple[int, dict, dict[str, str]]:
        """Status, document and headers."""
        self.asked.append(f"{method} {path}")
        for part, status in self.refused.items():
            if part in path:
                return status, {"error": f"refused with {status}"}, {}
        if token not in self.tokens:
            return 401, {"error": "Invalid credentials in Authorization header"}, {
                "X-Error-Message": "Invalid credentials in Authorization header"}
        words = path.strip("/").split("/")
        if "/commit/" in path:
            return 200, self.commit("/".join(words[2:4]), body, base), {}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [
                {**each, "authenticated": True, "actions": {"upload": {"href": f"{base}/blobs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]]}, {}
        return self.look_up(method, path, words, body, base)

    def commit(self, repo: str, body: bytes, base: str) -> dict:
        """Adds the files of a commit to a repository."""
        there = self.files.setdefault(repo, {})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                there[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                there[value["path"]] = self.blobs[value["oid"]]
        return {"commitUrl": f"{base}/{repo}/commit/{'a' * 40}", "commitOid": "a" * 40, "hookOutput": "",
                "success": True}

    def look_up(self, method: str, path: str, words: list[str], body: bytes,
                base: str) -> tuple[int, dict, dict[str, str]]:
        """What is asked before files are sent."""
        if method == "GET" and path.startswith("/api/models/"):
            repo = "/".join(words[2:4])
            if repo not in self.private:
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            return 200, {"id": repo, "private": self.private[repo], "siblings": [], "tags": []}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            public = asked.get("private") is False or asked.get("visibility") == "public"
            self.private[repo] = not public
            return 200, {"url": f"{base}/{repo}", "id": repo}, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if "/preupload/" in path:
            return 200, {"files": [{"path": each["path"], "shouldIgnore": False, "uploadMode":
                                    "lfs" if each["path"].endswith(".safetensors") else "regular"}
                                   for each in json.loads(body)["files"]]}, {}
        return 404, {"error": f"nothing at {path}"}, {}


@contextmanager
def served(hub: FakeHub):
    """The address at which it answers."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            base = f"http://{self.headers['Host']}"
            if path.startswith("/blobs/"):
                hub.blobs[path.rpartition("/")[2]] = body
                status, document, headers = 200, {}, {}
            else:
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                status, document, headers = hub.answer(self.command, path, body, base, token)
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_POST = do_PUT = do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
