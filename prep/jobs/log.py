"""What a job printed."""

from __future__ import annotations

from contextlib import suppress

from prep.jobs.job import Job


def tail(job: Job, most: int) -> str:
    """The last whole lines of a job's log, of at most this many bytes; "" if it has printed nothing."""
    with suppress(OSError), (job.folder / "log.txt").open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(max(0, size - most))
        text = handle.read(most).decode("utf-8", "replace")
        return text if size <= most else text.partition("\n")[2]
    return ""
