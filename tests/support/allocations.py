"""What torch's CPU allocator gives out, also within kernels: temporaries that no operation returns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType


class Allocations:
    """Within it, what this thread allocates is recorded by torch's profiler. What was there before is not counted."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True,
                                               acc_events=True)
        self._since = 0

    def __enter__(self) -> Allocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def reset_peak(self) -> None:
        """Forgets the peak so far."""
        self._since = time.time_ns()

    @property
    def peak(self) -> int:
        """The bytes that were allocated at a time, at the most, since `reset_peak`; known once it has ended."""
        results: Any = self._profile.profiler
        found = sorted((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size)
                       for event in _all(results.kineto_results.experimental_event_tree())
                       if event.tag == _EventType.Allocation)
        before = found[0][1] - found[0][2]  # of earlier profiles in this process
        return max(total for at, total, _ in found if at >= self._since) - before


def _all(events: Iterable[Any]) -> Iterator[Any]:
    left = list(events)
    while left:
        event = left.pop()
        yield event
        left += event.children
