"""What a job printed."""

from __future__ import annotations

from contextlib import suppress

from prep.fs.untrusted import open_regular, size_regular, stream_of
from prep.jobs.job import Job

LOG = "log.txt"


def tail(job: Job, most: int) -> str:
    """The last whole lines of a job's log, of at most this many bytes, or the end of its last line; "" if it has
    printed nothing."""
    with suppress(OSError), stream_of(open_regular(job.folder / LOG)) as handle:
        size = handle.seek(0, 2)
        handle.seek(max(0, size - most))
        text = handle.read(most).decode("utf-8", "replace")
        return text if size <= most else text.partition("\n")[2] or text
    return ""


def size_of(job: Job) -> int:
    """The bytes of a job's log."""
    with suppress(OSError):
        return size_regular(job.folder / LOG)
    return 0
