"""Repeats requests to object stores, and makes many of them side by side.

Requests that fail in a way that may pass are repeated, with growing pauses of random length, for `retry_timeout`
seconds; longer waits are announced.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from prep.errors import CacheError, ConfigError
from prep.formatting import counted, printable
from prep.fs.remote.bucket import split_url
from prep.fs.remote.client import open_store, refuse_redirect
from prep.fs.remote.errors import NO_CREDENTIALS, Denied, Passing, Stopped, StoreError, credentials_hint, sort_out
from prep.fs.remote.waiting import LONG

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
Item = TypeVar("Item")
PATIENCE = "LATENTRY_REMOTE_PATIENCE"
SHORTEST, LONGEST = 0.2, 15.0  # seconds between attempts
# Seconds without a byte of an answer, after which a request is repeated: the first for bytes of an object; any other,
# as listing a large bucket may take some stores longer; and one that sends much, whose sending counts.
SILENT, SILENT_AGAIN, SILENT_SENDING = 10.0, 30.0, 300.0
QUIET, PACE = 5.0, 60.0  # seconds of waiting before the first notice, and between notices
NEVER = threading.Event()  # a `stop` that is never set
_log = logging.getLogger("latentry.remote")  # a notice is a line on stderr


def retry_timeout() -> float:
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


def with_retries(url: str, action: Callable[[ObjectStore, str], T], stop: threading.Event,
                 look: Callable[[Exception], None] = lambda _: None, retries: int = 0, waits: Backoff | None = None,
                 silence: float | None = None) -> T:
    """What `action` returns for the object's store and key. `look` sees each error of obstore first. `silence`: seconds
    that the first attempt may take without a byte of an answer.

    An action that takes long, and goes on where it was interrupted, says so to `waits` whenever it has progressed.
    """
    scheme, bucket, key = split_url(url)
    waits, usual = waits or Backoff(url, stop), SILENT_SENDING if retries else SILENT_AGAIN
    refuse_redirect(scheme, bucket, key)
    while True:
        if stop.is_set():
            raise Stopped
        waits.begin_attempt()
        try:
            return action(open_store(scheme, bucket, retries, silence or usual), key)
        except (Stopped, CacheError):
            raise
        except Passing as passing:
            waits.wait(str(passing))
        except Exception as error:
            silence = None
            look(error)
            try:
                sort_out(error, url)
            except Passing as passing:
                waits.wait(str(passing))
            except Denied as denied:
                if waits.renewed:
                    raise StoreError(f"{url}: {denied}", hint=credentials_hint(url)) from None
                waits.renewed = True
                open_store.cache_clear()  # credentials may have been renewed where they come from


class Backoff:
    """The pauses between attempts at one thing. Raises `ConfigError` for a time that is no number, before any."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        self._url, self._stop, self._timeout = url, stop, retry_timeout()
        self.progressed()

    def progressed(self) -> None:
        """Begins anew: what follows is another failure."""
        self._begun: float | None = None
        self._first = self._last = time.monotonic()  # when the first of the attempts that fail began, and the latest
        self._tries = 0
        self.renewed = False  # whether credentials were read again

    @property
    def longest(self) -> float:
        """Seconds that an answer under way may take without anything new in it."""
        return max(self._timeout, LONG)

    @property
    def failed(self) -> bool:
        """Whether an attempt has failed since there was progress."""
        return self._tries > 0

    def begin_attempt(self) -> None:
        """Notes that an attempt begins, whose time a notice counts."""
        self._last = time.monotonic()

    def wait(self, what: str) -> None:
        """Waits before the next attempt; `what` happened. Raises `StoreError` when the time for it ends, `Stopped`."""
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._first = now, self._last
        waited = now - self._begun
        if waited >= self._timeout:
            raise StoreError(f"{self._url}: {what}; given up after {waited:.0f} seconds and "
                             f"{self._tries + 1} attempts",
                             hint=credentials_hint(self._url) if what == NO_CREDENTIALS else
                             f"check the network and the store, then run the same command again; {PATIENCE}=SECONDS "
                             "waits longer") from None
        since = now - self._first
        if since >= QUIET and _may_announce(self._url, now):
            _log.warning("waiting for %s: %s; asked %s in %.0f seconds", self._url, what,
                         counted(self._tries + 1, "time"), since)
        pause = min(LONGEST, SHORTEST * 2 ** min(self._tries, 10)) * random.uniform(0.5, 1)
        self._tries += 1
        if self._stop.wait(pause):
            raise Stopped


_announced: dict[tuple[str, str], float] = {}  # when a wait for a bucket was last announced


def _may_announce(url: str, now: float) -> bool:
    """Whether a wait may be announced: one in `PACE` seconds for each bucket, however many threads wait."""
    scheme, bucket, _ = split_url(url)
    if now - _announced.get((scheme, bucket), -PACE) < PACE:
        return False
    _announced[scheme, bucket] = now
    return True


def side_by_side(work: Callable[[Item], T], items: Sequence[Item], jobs: int, stop: threading.Event) -> list[T]:
    """`work` of each item, `jobs` at a time. The first that raises sets `stop` and ends the others; it is raised."""
    with ThreadPoolExecutor(jobs, "store") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
