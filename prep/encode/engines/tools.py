"""Holds what encodes on one device, from one block of tasks to the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from prep.encode.engines.decoding import SERVICE
from prep.workers.pool import WorkerPool

FETCHERS = 16  # threads beyond those whose pictures are being decoded


class Tools:
    """`jobs` worker processes that decode, threads that wait for them, and one loaded encoder.

    There are more threads than workers, so that pictures in a store are read while others are decoded.
    """

    def __init__(self, jobs: int) -> None:
        self.pool = ThreadPoolExecutor(jobs + FETCHERS, thread_name_prefix="decode")
        self.workers = WorkerPool(SERVICE, most=jobs)
        self._field, self._encoder, self._held = "", None, ExitStack()

    def encoder(self, field: str, load: Callable[[], Any]) -> Any:
        """Returns the encoder of a field; frees that of another field before it loads one."""
        if self._field != field:
            self._free()
            self._encoder = load()
            self._field = field
        return self._encoder

    def hold(self, context: AbstractContextManager[object]) -> None:
        """Enters a context that ends when the encoder is freed: it lasts for all blocks of tasks that it encodes."""
        self._held.enter_context(context)

    def _free(self) -> None:
        self._field, self._encoder = "", None
        self._held.close()

    def __enter__(self) -> Tools:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.workers.close()  # first: threads of the pool may wait for them
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._free()
