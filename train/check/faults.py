"""Collects faults, so that one check does not keep another from being made."""

from __future__ import annotations

from types import TracebackType

from prep.errors import Problem


class Noting:
    """Ends its block at a raised `Problem` and appends it to the faults, each message once."""

    def __init__(self, faults: list[Problem]) -> None:
        self._faults = faults

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, Problem) and error.message not in (fault.message for fault in self._faults):
            self._faults.append(error)
        return isinstance(error, Problem)
