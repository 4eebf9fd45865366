"""Opens object stores. What the environment says of credentials, endpoints and connections is read here."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from prep.errors import ConfigError
from prep.fs.mirror import ENDPOINTS
from prep.fs.remote.errors import VARIABLES, StoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}  # of variables


@lru_cache(maxsize=32)
def open_store(scheme: str, bucket: str, retries: int, silence: float) -> ObjectStore:
    """The store of a bucket, with the credentials that the environment has now; obstore itself repeats `retries` times.

    A request ends after `silence`, seconds without a byte of the answer. While something is sent, none comes: the time
    to send it counts. A slow answer is not cut as long as it moves.
    """
    url = f"{scheme}://{bucket}"
    require_library(url)
    given = next(((name, os.environ[name]) for name in ENDPOINTS[scheme] if os.environ.get(name)), ("", ""))
    if given[0].startswith("AWS_") and not re.match(r"https?://[^/]", given[1]):  # obstore panics
        raise StoreError(f"{url} cannot be opened: {given[0]} is no URL", hint=f"export {given[0]}=https://HOST:PORT")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        return from_url(url, retry_config={"max_retries": retries, "retry_timeout": timedelta(minutes=2)},
                        client_options=_client_options(scheme, silence))
    except (BaseError, ValueError):
        raise StoreError(f"{url} cannot be opened: the settings of the store are not valid",
                         hint=f"check the environment: {VARIABLES[scheme]}, {', '.join(ENDPOINTS[scheme])}") from None


def require_library(url: str) -> None:
    """Raises `ConfigError` unless obstore is installed."""
    if find_spec("obstore") is None:
        raise ConfigError(f"{url} is in an object store, which needs the library obstore",
                          hint="pip install 'latentry[remote]'")


def _client_options(scheme: str, silence: float) -> ClientConfig:
    """How to connect. What the environment says of it is read here: obstore does not once options are given."""
    options: dict[str, Any] = {"timeout": timedelta(hours=1), "read_timeout": timedelta(seconds=silence),
                               "connect_timeout": timedelta(seconds=10)}
    for name in ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate"):
        given = os.environ.get(f"{PREFIX[scheme]}_{name.upper()}")
        if given:
            options[name] = given.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else given
    return cast("ClientConfig", options)
