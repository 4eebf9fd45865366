"""Reads and writes objects in S3, Google Cloud Storage and Azure: the room of obstore.

Requests that fail in a way that may pass are repeated, with growing pauses of random length, for `patience` seconds;
longer waits are announced. Credentials come from the environment, and no message has any: it names objects by bucket
and key only, and of a store's answer just its status.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from prep.errors import CacheError, ConfigError
from prep.formatting import printable
from prep.fs.mirror import ENDPOINTS, ListedUrl, split_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

T = TypeVar("T")
Item = TypeVar("Item")
PATIENCE = "LATENTRY_REMOTE_PATIENCE"
CHUNK = 1 << 20  # bytes handed out at a time, at least
UPLOAD_PART = 1 << 23
MOST_PARTS = 9_000  # of an upload; S3 takes 10,000
COPIED_BY_STORE = 5_000_000_000  # bytes of an object that S3 copies by one request
LISTED = 1000  # objects in an answer to a list request, as S3 has it
PART_TRIES = 5  # of a part, before the whole file is sent again
SHORTEST, LONGEST = 0.2, 15.0  # seconds between attempts
QUIET, PACE = 5.0, 60.0  # seconds of waiting before the first notice, and between notices
STALLED = timedelta(seconds=30)  # without a byte
DENIED = ("check the credentials in the environment ({}), what they allow, and this computer's clock; then run the "
          "same command again")
VARIABLES = {"s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; AWS_SKIP_SIGNATURE=true "
             "for a public bucket", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
             "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"}
PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}  # of variables
NO_CREDENTIALS = "the environment has no credentials, and this machine has no role that gives some"
# Where machines in clouds are asked for credentials of their role: AWS, Google, Azure.
_METADATA = re.compile(r"//(?:169\.254\.169\.254|metadata|metadata\.google\.internal)/|/latest/api/token")
NEVER = threading.Event()  # a `stop` that is never set
_log = logging.getLogger("latentry.remote")  # a notice is a line on stderr


class StoreError(CacheError):
    """A store does not answer, or refuses."""


class Stopped(Exception):
    """The caller's `stop` was set."""


class _Passing(Exception):
    """A failure that may pass: what happened."""


class _Denied(Exception):
    """The store refuses the credentials: what it answered."""


def require_library(url: str) -> None:
    """Raises `ConfigError` unless obstore is installed."""
    if find_spec("obstore") is None:
        raise ConfigError(f"{url} is in an object store, which needs the library obstore",
                          hint="pip install 'latentry[remote]'")


def patience() -> float:
    """Seconds for which a store that does not answer is asked again. Raises `ConfigError`."""
    text = os.environ.get(PATIENCE) or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < 1e9:
        raise ConfigError(f"{PATIENCE} is '{printable(text)}', expected a number of seconds",
                          hint=f"export {PATIENCE}=300")
    return seconds


def read_object(url: str, most: int, *, stop: threading.Event = NEVER) -> bytes:
    """The bytes of an object. Raises `FileNotFoundError`, `StoreError`, and `OSError` if it has more than `most`."""
    def read(store: ObjectStore, key: str) -> bytes:
        from obstore import get

        found = get(store, key)
        size = int(found.meta["size"])
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {most}", url)
        data = bytes(found.bytes())
        if len(data) != size:
            raise _Passing(f"the answer ended after {len(data)} of {size} bytes")
        return data

    return _patiently(url, read, stop)


def read_range(url: str, start: int, end: int, *, stop: threading.Event = NEVER) -> bytes:
    """The bytes of an object from `start` to `end`. Raises `FileNotFoundError`, `StoreError`."""
    return b"".join(bytes(part) for part in stream(url, end, start=start, stop=stop))


def read_listed(url: str, most: int, start: int = 0, length: int | None = None, *,
                stop: threading.Event = NEVER) -> tuple[bytes, str]:
    """The bytes of an object, or `length` of them from `start`, and its version as `Listed` has it, by one request.

    `url` is taken as a listing gave it. Bytes of a whole object that are not those of its ETag are asked for again:
    most stores make that of the MD5 of the bytes. Where they do not, the same bytes come twice, and are taken. Raises
    `FileNotFoundError`, `StoreError`, and `OSError` for more than `most` bytes, or for fewer than `length`.
    """
    before, url = "", ListedUrl(url)

    def read(store: ObjectStore, key: str) -> tuple[bytes, str]:
        from obstore import get

        nonlocal before
        found = get(store, key, options={} if length is None else {"range": (start, start + length)})
        size, version = int(found.meta["size"]), _version_of(found.meta)
        wanted = size if length is None else min(length, max(0, size - start))
        if wanted > most:
            raise OSError(errno.EFBIG, f"it has {wanted} bytes, expected at most {most} of an object", url)
        data = bytes(found.bytes())
        if len(data) != wanted:
            raise _Passing(f"the answer ended after {len(data)} of {wanted} bytes")
        named = _MD5.fullmatch(version.partition(" ")[0])
        if length is None and named and split_url(url)[:2] not in _no_md5:
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if digest not in (named[0], before):
                before = digest
                raise _Passing("the answer is not what its ETag names")
            if digest == before != named[0]:
                _no_md5.add(split_url(url)[:2])
        return data, version

    if length == 0:
        return b"", ""
    try:
        return _patiently(url, read, stop, _ranged)
    except _NoRanges:
        raise StoreError(f"{url}: the store sends whole objects only, and no ranges of them, which reading a member of "
                         "a tar takes", hint="download the tar first; or unpack it into the store") from None


def version_of(url: str, *, stop: threading.Event = NEVER) -> str:
    """An object's version, as `Listed` has it. `url` as in `read_listed`. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> str:
        from obstore import head

        return _version_of(head(store, key))

    return _patiently(ListedUrl(url), ask, stop)


def size_in(version: str) -> int:
    """The size of an object, bytes, in its version."""
    return int(version.rpartition(" ")[2])


_MD5 = re.compile("[0-9a-f]{32}")
_no_md5: set[tuple[str, str]] = set()  # buckets, by scheme and name, whose ETags look like MD5 and are not


def _version_of(meta: Mapping[str, Any]) -> str:
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return f"{tag or '@'}{'' if tag else int(meta['last_modified'].timestamp())} {meta['size']}"


def size_of(url: str, *, stop: threading.Event = NEVER) -> int:
    """The size of an object in bytes. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> int:
        from obstore import head

        return int(head(store, key)["size"])

    return _patiently(url, ask, stop)


def stream(url: str, end: int, *, start: int = 0, stop: threading.Event = NEVER) -> Iterator[Any]:
    """The bytes of an object from `start` to `end`, in parts; fewer if the object is shorter.

    Where a connection breaks, only the rest is asked for again. Raises `FileNotFoundError`, `StoreError`, `Stopped`.
    """
    at, whole, waits = start, False, _Waits(url, stop)
    while at < end:
        try:
            for part in _answer(url, at, end, whole, stop):
                at += len(part)
                waits.progressed()
                yield part
            if at < end:
                size = size_of(url, stop=stop)
                if at >= size:
                    return
                raise _Passing(f"the answer ended after {at} of {min(end, size)} bytes")
        except _NoRanges:
            whole = True
        except _Passing as passing:
            waits.wait(str(passing))


class _NoRanges(Exception):
    """The server sends whole objects only (rclone serve s3 does)."""


def _answer(url: str, start: int, end: int, whole: bool, stop: threading.Event) -> Iterator[Any]:
    """One answer's bytes from `start` to `end`. Raises `_Passing`, `_NoRanges`."""
    def ask(store: ObjectStore, key: str) -> Any:
        from obstore import get

        return get(store, key) if whole or start == 0 else get(store, key, options={"range": (start, end)})

    found = _patiently(url, ask, stop, _ranged)
    at = 0 if whole else start
    try:
        for chunk in found.stream(min_chunk_size=CHUNK):
            if stop.is_set():
                raise Stopped
            view = memoryview(chunk)
            first, last = max(start - at, 0), max(end - at, 0)
            at += len(view)
            if len(part := view[first:last]):
                yield part
            if at >= end:
                return
    except (Stopped, GeneratorExit):
        raise
    except Exception as error:  # obstore's own classes
        raise _Passing(_told(error)) from None


def _ranged(error: Exception) -> None:
    if "non-partial response" in str(error):
        raise _NoRanges


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """What a list of objects says of one."""

    size: int  # bytes
    written: float  # seconds since 1970
    version: str  # another one after each change: ETag and size; of a store without ETags, @, the time, and size


def _prefix_of(url: str) -> str:
    """What the keys of the objects below a URL begin with: it ends with a slash, or is empty for a whole bucket."""
    return "/".join((*split_url(url)[2:], "")).lstrip("/")


def list_objects(url: str, *, stop: threading.Event = NEVER) -> dict[str, Listed]:
    """The objects below a URL, by their names relative to it, sorted. Raises `StoreError`."""
    prefix = _prefix_of(url)
    found: dict[str, Listed] = {}

    def ask(store: ObjectStore, _: str) -> None:
        from obstore import list as list_pages

        for page in list_pages(store, prefix or None, offset=prefix + max(found) if found else None, chunk_size=LISTED):
            for one in page:
                name = one["path"].removeprefix(prefix)
                if one["path"] == name and prefix:  # an object KEY/ of no bytes, which some programs make for KEY
                    continue
                found[name] = Listed(size=int(one["size"]), written=one["last_modified"].timestamp(),
                                     version=_version_of(one))

    def check_key(error: Exception) -> None:
        if named := _NO_PATH.search(str(error)):
            raise StoreError(f"{url} has an object with the key {printable(named[1])[:200]}, which is no path: it has "
                             "//, a part . or .., or a control character",
                             hint="rename or delete that object, or name a prefix without it") from None

    _patiently(url, ask, stop, check_key)
    return dict(sorted(found.items()))


def list_folder(url: str, *, stop: threading.Event = NEVER) -> dict[str, int]:
    """The sizes of the objects directly below a URL, by their names, sorted: none that has another / in its name.

    Raises `StoreError`.
    """
    prefix = _prefix_of(url)

    def ask(store: ObjectStore, _: str) -> dict[str, int]:
        from obstore import list_with_delimiter

        objects = list_with_delimiter(store, prefix or None)["objects"]
        return {one["path"].removeprefix(prefix): int(one["size"]) for one in objects}

    return dict(sorted(_patiently(url, ask, stop).items()))


_NO_PATH = re.compile(r'invalid path: (?:Error parsing )?Path "(.*?)"(?: contained|: )', re.DOTALL)


def delete_object(url: str, *, stop: threading.Event = NEVER) -> None:
    """Removes an object, if there is one. Raises `StoreError`."""
    def ask(store: ObjectStore, key: str) -> None:
        from obstore import delete

        with suppress(FileNotFoundError):  # S3 does not mind, others do
            delete(store, key)

    _patiently(url, ask, stop)


def copy_object(url: str, target: str, *, stop: threading.Event = NEVER) -> None:
    """Copies an object to another key of its bucket: in the store, or, if it is too large for that, by way of this
    computer. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> None:
        from obstore import copy, head, open_writer

        to, size = split_url(target)[2], int(head(store, key)["size"])
        if size <= COPIED_BY_STORE:
            copy(store, key, to)
            return
        writer = open_writer(store, to, buffer_size=_part_of(size), max_concurrency=4)
        for part in stream(url, size, stop=stop):
            writer.write(part)
        with _lost_completion():
            writer.close()  # not after a failure: it would publish what there is

    _patiently(url, ask, stop, retries=PART_TRIES)


def create_object(url: str, data: bytes, *, stop: threading.Event = NEVER) -> bool:
    """Creates an object, on the condition that there is none; returns False, and writes nothing, if there is one.

    If the answer to a write is lost, the next attempt finds the object: it counts as created if its bytes are these.
    Raises `StoreError`.
    """
    tries = 0

    def write(store: ObjectStore, key: str) -> bool:
        from obstore import put
        from obstore.exceptions import AlreadyExistsError

        nonlocal tries
        tries += 1
        try:
            put(store, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    created = _patiently(url, write, stop)
    return created or (tries > 1 and read_range(url, 0, len(data) + 1, stop=stop) == data)


def replace_object(url: str, data: bytes, *, stop: threading.Event = NEVER) -> None:
    """Writes an object, whether or not there is one. Raises `StoreError`."""
    def write(store: ObjectStore, key: str) -> None:
        from obstore import put

        put(store, key, data, use_multipart=False)

    _patiently(url, write, stop)


def upload_file(url: str, path: Path, *, stop: threading.Event = NEVER) -> None:
    """Writes a file as an object, in parts if it is large; others see all of it or nothing. Raises `StoreError`.

    Whoever must be sure reads it back.
    """
    def write(store: ObjectStore, key: str) -> None:
        from obstore import put

        with _lost_completion():
            put(store, key, path, chunk_size=_part_of(path.stat().st_size), max_concurrency=4)

    _patiently(url, write, stop, retries=PART_TRIES)


@contextmanager
def _lost_completion() -> Iterator[None]:
    """Passes over the answer that there is no such upload: that to its completion was lost, and the object is there."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchUpload" not in str(error):
            raise


def _part_of(size: int) -> int:
    """The bytes of a part, when so many are uploaded."""
    return max(UPLOAD_PART, -(-size // MOST_PARTS))


def side_by_side(work: Callable[[Item], T], items: Sequence[Item], jobs: int, stop: threading.Event) -> list[T]:
    """`work` of each item, `jobs` at a time. The first that raises sets `stop` and ends the others; it is raised."""
    with ThreadPoolExecutor(jobs, "store") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _patiently(url: str, action: Callable[[ObjectStore, str], T], stop: threading.Event,
               look: Callable[[Exception], None] = lambda _: None, retries: int = 0) -> T:
    """What `action` returns for the object's store and key. `look` sees each error of obstore first."""
    scheme, bucket, key = split_url(url)
    waits, renewed = _Waits(url, stop), False
    while True:
        if stop.is_set():
            raise Stopped
        try:
            return action(_store(scheme, bucket, retries), key)
        except (_NoRanges, Stopped, CacheError):
            raise
        except _Passing as passing:
            waits.wait(str(passing))
        except Exception as error:
            look(error)
            try:
                _sort_out(error, url)
            except _Passing as passing:
                waits.wait(str(passing))
            except _Denied as denied:
                if renewed:
                    raise StoreError(f"{url}: {denied}", hint=DENIED.format(VARIABLES[scheme])) from None
                renewed = True
                _store.cache_clear()  # credentials may have been renewed where they come from


def _sort_out(error: Exception, url: str) -> None:
    """Raises what an error of obstore means: `FileNotFoundError`, `_Denied`, `_Passing`, or a `StoreError`."""
    from obstore import exceptions

    what = _told(error)
    if isinstance(error, FileNotFoundError):
        name = "there is no such bucket" if "NoSuchBucket" in str(error) else "there is no such object"
        raise FileNotFoundError(errno.ENOENT, name, url) from None
    if isinstance(error, ValueError) and "Could not parse path" in str(error):
        raise FileNotFoundError(errno.ENOENT, "no object can have such a name", url) from None
    if "<Code>RequestTimeTooSkewed</Code>" in str(error):
        raise StoreError(f"{url}: the store refuses requests of this computer, whose clock differs too much from the "
                         "store's", hint="set the clock (timedatectl set-ntp true on Linux), then run the same command "
                         "again") from None
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        raise _Denied(what) from None
    if "ExpiredToken" in str(error) or "TokenRefreshRequired" in str(error):
        raise _Denied(what) from None
    if not isinstance(error, exceptions.BaseError):
        raise error
    status = re.search(r"status code: (\d{3})", str(error))
    if isinstance(error, exceptions.GenericError) and (status is None or status[1] in ("408", "429") or
                                                       status[1].startswith("5")):
        if status is None and _is_configuration(str(error)):
            raise StoreError(f"{url}: {what}", hint=DENIED.format(VARIABLES[split_url(url)[0]])) from None
        raise _Passing(what) from None
    if status is not None and status[1] in ("401", "403"):  # of a request that obstore does not sort out itself
        raise _Denied(what) from None
    hint = DENIED.format(VARIABLES[split_url(url)[0]]) if what == NO_CREDENTIALS else (
        "check bucket, region and endpoint in the environment")
    raise StoreError(f"{url}: {what}", hint=hint) from None


def _is_configuration(text: str) -> bool:
    return "builder error" in text or "onfiguration" in text or "BadScheme" in text


def _told(error: Exception) -> str:
    """An error of obstore in a few words, of which none can be a secret: the store's status, or the kind of failure."""
    text = str(error)
    if (status := re.search(r"status code: (\d{3}[\w ]*)", text)) and not _METADATA.search(text):
        code = re.search(r"<Code>(\w{1,64})</Code>", text)
        return f"the store answered {status[1].strip()}{f' ({code[1]})' if code else ''}"
    if _METADATA.search(text):
        return NO_CREDENTIALS
    for mark, what in (("Connect", "no connection"), ("imed", "no answer in time"), ("non-partial", "no ranges")):
        if mark in text:
            return what
    if "BadScheme" in text:
        return "the endpoint is plain http, which is not allowed without AWS_ALLOW_HTTP=true"
    if _is_configuration(text):
        return "the store's settings are not valid"
    return "the connection broke"


class _Waits:
    """The pauses between attempts at one thing."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        self._url, self._stop = url, stop
        self.progressed()

    def progressed(self) -> None:
        """Begins anew: what follows is another failure."""
        self._begun: float | None = None
        self._tries = 0

    def wait(self, what: str) -> None:
        """Waits before the next attempt; `what` happened. Raises `StoreError` when patience ends, `Stopped`."""
        now = time.monotonic()
        self._begun = self._begun or now
        waited = now - self._begun
        if waited >= patience():
            raise StoreError(f"{self._url}: {what}; given up after {waited:.0f} seconds and "
                             f"{self._tries + 1} attempts",
                             hint=DENIED.format(VARIABLES[split_url(self._url)[0]]) if what == NO_CREDENTIALS else
                             f"check the network and the store, then run the same command again; {PATIENCE}=SECONDS "
                             "waits longer") from None
        if waited >= QUIET and _may_announce(self._url, now):
            _log.warning("waiting for %s: %s; asked %d times in %.0f seconds", self._url, what, self._tries + 1, waited)
        pause = min(LONGEST, SHORTEST * 2 ** min(self._tries, 10)) * random.uniform(0.5, 1)
        self._tries += 1
        if self._stop.wait(pause):
            raise Stopped


def _client_options(scheme: str) -> ClientConfig:
    """How to connect. What the environment says of it is read here: obstore does not once options are given."""
    options: dict[str, Any] = {"timeout": timedelta(hours=1), "read_timeout": STALLED,
                               "connect_timeout": timedelta(seconds=10)}
    for name in ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate"):
        given = os.environ.get(f"{PREFIX[scheme]}_{name.upper()}")
        if given:
            options[name] = given.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else given
    return cast("ClientConfig", options)


_announced: dict[tuple[str, str], float] = {}  # when a wait for a bucket was last announced


def _may_announce(url: str, now: float) -> bool:
    """Whether a wait may be announced: one in `PACE` seconds for each bucket, however many threads wait."""
    scheme, bucket, _ = split_url(url)
    if now - _announced.get((scheme, bucket), -PACE) < PACE:
        return False
    _announced[scheme, bucket] = now
    return True


@lru_cache(maxsize=16)
def _store(scheme: str, bucket: str, retries: int) -> ObjectStore:
    """The store of a bucket, with the credentials that the environment has now; obstore itself repeats `retries` times.
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
                        client_options=_client_options(scheme))
    except (BaseError, ValueError):
        raise StoreError(f"{url} cannot be opened: the settings of the store are not valid",
                         hint=f"check the environment: {VARIABLES[scheme]}, {', '.join(ENDPOINTS[scheme])}") from None
