"""Reads RUN/log.jsonl: a JSON object per line, an event each (train/runs/log.py writes them and says which)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prep.runs.documents import open_plain, refused

NAME = "log.jsonl"
MOST_LINE = 1 << 20  # bytes
Event = Mapping[str, Any]


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, also of one that a run is writing; skips lines that are not events. None without a file.

    Raises `CacheError` if it is not a regular file, or cannot be read.
    """
    try:
        yield from (event for event, _ in event_lines(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(path, error, "remove it; only the record of the steps so far is lost") from None


def event_lines(path: Path) -> Iterator[tuple[Event, bytes]]:
    """Every event with its line; skips lines that are not events."""
    with open_plain(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if not line.endswith(b"\n"):
                continue  # cut off, or part of a line that is too long
            event = _parse(line)
            if event is not None:
                yield event, line.rstrip(b"\n")


def _parse(line: bytes) -> Event | None:
    try:
        body = json.loads(line)
        if isinstance(body, dict) and type(body.get("step")) is int and isinstance(body.get("event"), str):
            return body
    except (ValueError, RecursionError):
        pass
    return None
