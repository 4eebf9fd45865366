"""A real S3 server for all tests here, and for each test a proxy before it and a place for copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from fault_proxy import FaultProxy
from s3_server import BUCKET, ENVIRONMENT, S3Server
from small_manifest import write_small

from prep.cache.remote import documents, gather, quota, shards, unsent
from prep.fs.remote import retry
from prep.fs.remote.client import open_store


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    found = S3Server(tmp_path_factory.mktemp("s3") / "log.txt")
    yield found
    found.close()


@dataclass(frozen=True)
class Store:
    """A place of a test's own in the server, which programs reach through the proxy."""

    server: S3Server
    proxy: FaultProxy
    prefix: str
    copies: Path

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def upload(self, root: Path) -> None:
        """Files as objects, as other programs would upload them."""
        self.server.upload(root, self.prefix)

    def keys(self, root: Path, part: str) -> list[str]:
        """The names below `root` that contain `part`."""
        return sorted(name for path in root.rglob("*") if path.is_file()
                      and part in (name := path.relative_to(root).as_posix()))


@pytest.fixture
def store(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    proxy = FaultProxy(server.port)
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url, "LATENTRY_REMOTE_DIR": str(tmp_path / "copies"),
                        "LATENTRY_REMOTE_PATIENCE": "20"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "SHORTEST", 0.005)
    own = quota.Quota()
    for module in (documents, shards, unsent, gather):
        monkeypatch.setattr(module, "QUOTA", own)
    retry._announced.clear()
    open_store.cache_clear()
    yield Store(server, proxy, f"{tmp_path.name}-{time.monotonic_ns()}", tmp_path / "copies")
    proxy.close()
    open_store.cache_clear()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A small dataset, here."""
    root = tmp_path / "home"
    root.mkdir()
    write_small(root)
    return root


@pytest.fixture
def small_there(store: Store, home: Path) -> Path:
    """A small dataset, here and in the store."""
    store.upload(home)
    return home
