"""S3 on the loopback: moto's server in a process of its own, and what tests ask of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_REGION": "us-east-1",
               "AWS_ALLOW_HTTP": "true"}
SIGNED = ("AWS4-HMAC-SHA256 Credential=a-key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
          "Signature=0")  # which moto does not check
# moto's own warnings are not ours.
CODE = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class S3Server:
    """A server, and its objects seen without obstore and without the proxy."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        with log.open("wb") as out:
            self._process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", CODE, str(self.port)], stdout=out,
                                             stderr=out, env={**os.environ, **ENVIRONMENT})
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            self.request("PUT", "", b"")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def request(self, method: str, key: str, data: bytes | None = None) -> bytes:
        """The answer's body. Raises `urllib.error.HTTPError`, an `OSError`."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/{BUCKET}/{key}", data=data, method=method,
                                       headers={"Content-Type": "application/octet-stream", "Authorization": SIGNED})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.read()

    def put(self, key: str, data: bytes) -> None:
        self.request("PUT", key, data)

    def get(self, key: str) -> bytes:
        return self.request("GET", key)

    def delete(self, key: str) -> None:
        self.request("DELETE", key)

    def upload(self, root: Path, prefix: str) -> None:
        """Every file below `root`, but what encoders alone use."""
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.name != "lock":
                self.put(f"{prefix}/{path.relative_to(root).as_posix()}", path.read_bytes())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["BUCKET", "ENVIRONMENT", "S3Server", "free_port", "urllib"]
