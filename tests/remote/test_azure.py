"""Azure Blob Storage, as its emulator has it: `npm install azurite`, then azurite-blob on the path or in
LATENTRY_AZURITE. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import store_scenes
from s3_server import free_port

from prep.fs.remote.client import open_store
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import read_object

AZURITE = os.environ.get("LATENTRY_AZURITE") or shutil.which("azurite-blob")
ACCOUNT, CONTAINER = "devstoreaccount1", "container"
KEY = base64.b64encode(b"a key that only this emulator knows").decode()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(AZURITE is None, reason="azurite is not installed")]


def make_container(port: int) -> None:
    """What the owner of an account does, without obstore: signed with the shared key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    signed = (f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\n"
              "restype:container")
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{CONTAINER}?restype=container", method="PUT",
        headers={"x-ms-date": date, "x-ms-version": "2021-08-06",
                 "Authorization": f"SharedKey {ACCOUNT}:{signature}"})
    urllib.request.urlopen(asked, timeout=10).close()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, root = free_port(), tmp_path_factory.mktemp("azurite")
    with (root / "log.txt").open("wb") as out:
        server = subprocess.Popen([AZURITE, "--blobPort", str(port), "--location", root, "--silent",
                                   "--skipApiVersionCheck", "--disableTelemetry"], stdout=out, stderr=out,
                                  env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                make_container(port)
                break
            except ConnectionError:
                pass
            except OSError as error:  # urllib's own wraps the refused connection
                assert "refused" in str(error), error
            assert server.poll() is None and time.monotonic() < deadline, (root / "log.txt").read_text()
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def azure(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a place of the test's own."""
    for name, value in {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}", "AZURE_ALLOW_HTTP": "true",
                        "LATENTRY_REMOTE_DIR": str(tmp_path / "copies"), "LATENTRY_REMOTE_PATIENCE": "20",
                        "SOURCE_DATE_EPOCH": "1790000000"}.items():
        monkeypatch.setenv(name, value)
    open_store.cache_clear()
    yield f"az://{CONTAINER}/{tmp_path.name}-{time.monotonic_ns()}"
    open_store.cache_clear()


def test_objects(azure):
    store_scenes.objects(azure)
    with pytest.raises(FileNotFoundError):
        read_object(f"{azure}/none", 1)
    with pytest.raises((FileNotFoundError, StoreError)):
        read_object("az://another/none", 1)


def test_pictures_encoding_and_runs(azure, tiny_model, prep, train, tmp_path, monkeypatch):
    store_scenes.whole_way(azure, prep, train, tiny_model, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode(), "credentials"),
    ("AZURE_STORAGE_ACCOUNT_NAME", "", "AZURE_STORAGE_ACCOUNT_NAME"),
])
def test_what_is_missing_is_one_message(azure, prep, tmp_path, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    open_store.cache_clear()
    told = prep("inspect", f"{azure}/m.json")
    assert told.code != 0 and said in told.err and "Traceback" not in told.err and KEY not in told.err
