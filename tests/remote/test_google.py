"""Google Cloud Storage by the interface that obstore uses, which is S3's with headers of other names.

So the server is moto's, behind a proxy that translates these. Google's own answers have not been seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_scenes
from fault_proxy import FaultProxy, Headers
from s3_server import BUCKET, SIGNED, S3Server

from prep.errors import CacheError
from prep.fs.remote.client import open_store
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import create_object, read_object


def as_s3(headers: Headers) -> Headers:
    """The headers of a request to Google, for a server of S3."""
    found = {name.lower().replace("x-goog-", "x-amz-"): value for name, value in headers.items()}
    if found.pop("x-amz-if-generation-match", None) == "0":
        found["if-none-match"] = "*"
    return found | {"authorization": SIGNED}


@pytest.fixture
def google(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultProxy]]:
    """The URL of a place of the test's own, and the proxy."""
    proxy = FaultProxy(server.port, as_s3)
    account = {"gcs_base_url": proxy.url, "disable_oauth": True, "client_email": "", "private_key": "",
               "private_key_id": ""}
    for name, value in {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true",
                        "LATENTRY_REMOTE_DIR": str(tmp_path / "copies"), "LATENTRY_REMOTE_PATIENCE": "20",
                        "SOURCE_DATE_EPOCH": "1790000000"}.items():
        monkeypatch.setenv(name, value)
    open_store.cache_clear()
    yield f"gs://{BUCKET}/{tmp_path.name}-{time.monotonic_ns()}", proxy
    proxy.close()
    open_store.cache_clear()


def test_objects(google):
    url, _ = google
    store_scenes.objects(url)
    with pytest.raises(FileNotFoundError):
        read_object(f"{url}/none", 1)


def test_a_lost_answer_to_a_creation_is_recognized(google, monkeypatch):
    """Google's condition is another header than S3's."""
    url, proxy = google
    proxy.rule = lambda method, path, before: "lose" if method == "PUT" and not before else ""
    assert create_object(f"{url}/once", b"ours")
    proxy.forget()
    assert not create_object(f"{url}/once", b"another's") and read_object(f"{url}/once", 9) == b"ours"


@pytest.mark.parametrize(("fault", "said"), [("403", "the credentials"), ("404", "no such")])
def test_refusals_are_one_message(google, fault, said):
    url, proxy = google
    proxy.rule = lambda method, path, before: fault
    with pytest.raises((StoreError, FileNotFoundError, CacheError)) as caught:
        read_object(f"{url}/once", 9)
    assert said in f"{caught.value} {getattr(caught.value, 'hint', '')}", (str(caught.value), vars(caught.value))


@pytest.mark.slow
def test_pictures_encoding_and_runs(google, tiny_model, prep, train, tmp_path, monkeypatch):
    store_scenes.whole_way(google[0], prep, train, tiny_model, tmp_path, monkeypatch)
