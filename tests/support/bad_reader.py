"""A worker that reads facts, and obeys the words in a file's bytes: `crash`, `hang`, `lie`, or `code`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from prep.dataset import reading
from prep.workers.worker import main


def obeyed(data):
    if b"crash" in data:
        os.kill(os.getpid(), signal.SIGSEGV)
    while b"hang" in data:
        pass
    if b"lie" in data:
        return {"digest": "0" * 64, "width": 7, "height": 5, "alpha": False}
    if b"code" in data:
        return {"digest": "", "code": "no such code", "detail": ""}
    return usual(data)


usual = reading.READERS["picture"]
reading.READERS = {**reading.READERS, "picture": obeyed}
main()
