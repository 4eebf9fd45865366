"""Opens object stores. What the environment says of credentials, endpoints and connections is read here."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urljoin, urlsplit

from prep.errors import ConfigError
from prep.formatting import printable
from prep.fs.remote.bucket import ENDPOINTS
from prep.fs.remote.errors import NOWHERE, VARIABLES, StoreError, sent_on

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
    variable = next(((name, os.environ[name]) for name in ENDPOINTS[scheme] if os.environ.get(name)), ("", ""))
    if variable[0].startswith("AWS_") and not re.match(r"https?://[^/]", variable[1]):  # obstore panics
        raise StoreError(f"{url} cannot be opened: {variable[0]} is no URL", hint=f"export {variable[0]}=https://HOST:PORT")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        return from_url(url, retry_config={"max_retries": retries, "retry_timeout": timedelta(minutes=2)},
                        client_options=_client_options(scheme, silence))
    except (BaseError, ValueError):
        raise StoreError(f"{url} cannot be opened: the settings of the store are not valid",
                         hint=f"check the environment: {VARIABLES[scheme]}, {', '.join(ENDPOINTS[scheme])}") from None


# Where credentials travel otherwise than in the header Authorization, which is not sent on to another host.
_TRAVELS = {"s3": ("AWS_SESSION_TOKEN", "AWS_TOKEN"), "az": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")}
# Who gives credentials: hosts, and variables that name others.
_GIVERS = {"s3": ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"),
           "az": ("169.254.169.254", "login.microsoftonline.com")}
_NAMED_GIVERS = {"s3": ("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
                 "az": ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST", "AZURE_MSI_ENDPOINT")}
_asked: set[tuple[str, str]] = set()  # endpoints and buckets that send nobody on
_PORTS = {"http": 80, "https": 443}


def _guarded(scheme: str) -> str:
    """The endpoint whose redirects to other hosts would take credentials there; "" where there is none.

    obstore follows redirects, with all headers but Authorization, and names where it was in the header Referer.
    """
    endpoint = next((os.environ[name] for name in ENDPOINTS[scheme] if os.environ.get(name)), "")
    roles = scheme == "s3" and not any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"))
    secret = roles or any(os.environ.get(name) for name in _TRAVELS.get(scheme, ()))
    return endpoint if secret and re.match("https?://", endpoint) else ""


def _only_hosts(scheme: str) -> list[str]:
    """The hosts that obstore may talk to; none if it may talk to any, or has to by a proxy, which decides itself."""
    endpoint = _guarded(scheme)
    if not endpoint or os.environ.get(f"{PREFIX[scheme]}_PROXY_URL"):
        return []
    from urllib.request import getproxies, proxy_bypass

    named = [os.environ[name] for name in _NAMED_GIVERS[scheme] if os.environ.get(name)]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    hosts = [urlsplit(endpoint).hostname or "", *(urlsplit(url).hostname or url for url in named), *_GIVERS[scheme],
             *([f"sts.{region}.amazonaws.com"] if scheme == "s3" else [])]
    return [] if getproxies() and not all(proxy_bypass(host) for host in hosts) else hosts


def refuse_redirect(scheme: str, bucket: str, key: str) -> None:
    """Raises `StoreError` if the store sends a request for an object on to another origin, which would get credentials.

    An endpoint is asked once for each bucket, without any credentials. Whatever it answers later, obstore reaches no
    other host unless a proxy is in between, which decides that itself.
    """
    endpoint = _guarded(scheme)
    if not endpoint or (endpoint, bucket) in _asked:
        return
    address = f"{endpoint.rstrip('/')}/{bucket}/{quote(key)}"
    target = urljoin(address, _location(address))
    if _origin(target) != _origin(address):
        host = urlsplit(target).netloc.rpartition("@")[2]
        raise sent_on(f"{scheme}://{bucket}", printable(f"{urlsplit(target).scheme}://{host}")[:200])
    _asked.add((endpoint, bucket))


def _origin(address: str) -> tuple[str, str, int | None]:
    """Scheme, host and port, as RFC 6454 compares them; a port that is none is -1."""
    parts = urlsplit(address)
    try:
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return parts.scheme, parts.hostname or "", -1


def _location(address: str) -> str:
    """Where a server sends a request on to; "" if it answers, or does not."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        build_opener(Stay).open(Request(address, method="HEAD"), timeout=10).close()
    except HTTPError as error:
        return str(error.headers.get("Location") or "") if 300 <= error.code < 400 else ""
    except (OSError, ValueError, HTTPException):  # what is wrong shows when it is asked for bytes
        pass
    return ""


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
        value = os.environ.get(f"{PREFIX[scheme]}_{name.upper()}")
        if value:
            options[name] = value.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else value
    if hosts := _only_hosts(scheme):
        options.update(proxy_url=f"http://{NOWHERE}", proxy_excludes=",".join(hosts))
    return cast("ClientConfig", options)
