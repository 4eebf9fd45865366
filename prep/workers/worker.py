"""A worker process: answers questions about untrusted files, so that a file which hangs it, crashes it or exhausts its
memory harms nothing else.

    python -P -c 'from prep.workers.worker import main; main()' MODULE

Questions arrive on stdin and answers leave on stdout, as frames of `prep.workers.protocol`; the first frame says that
the worker is ready. It ends at the end of its input, or when a question exceeds its time (on systems with SIGALRM); it
maps no more memory than the question allows (on systems with RLIMIT_AS). Output of libraries is discarded.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from prep.parse import Unparsed
from prep.workers.protocol import (
    BUG,
    END,
    HEADER,
    MEMORY,
    PART,
    QUESTION,
    READY,
    VERSION,
    TaskHeader,
    decode,
    frame_of,
    read_frame,
    write_frame,
)
from prep.workers.service import Service, Task

LAST_TO_LIVE = "1000"  # of -1000 to 1000: Linux kills the highest first when memory runs out
GRACE = 10.0  # seconds past its limit after which a worker ends itself, if its command is gone


def main() -> None:
    """Answers questions until the input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # C libraries may print
        os.dup2(nowhere.fileno(), 2)
    _step_back()
    service: Service = importlib.import_module(sys.argv[1]).SERVICE
    service.prepare()
    gc.freeze()  # keeps the collector off objects that stay
    write_frame(answers, READY, VERSION)
    answers.flush()
    serve(service, questions, answers)


def serve(service: Service, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answers each question in turn, within its limits. Raises `Unparsed` for frames that are not a question."""
    tasks = {task.name: task for task in service.tasks}
    while (head := read_frame(questions)) is not None and (body := read_frame(questions)) is not None:
        if (head[0], body[0]) != (HEADER, QUESTION):
            raise Unparsed(f"frames of kind {head[0]} and {body[0]}, expected a question")
        header = decode(head[1], TaskHeader)
        _alarm(header.seconds)
        _set_limit("RLIMIT_AS", header.memory)
        _answer(tasks[header.task], body[1], answers)
        _alarm(0)
        answers.flush()


def _answer(task: Task[Any, Any], body: bytes, answers: BinaryIO) -> None:
    """Writes the parts of an answer, then a frame for how it ended, also if that was an exception."""
    try:
        for part in task.work(decode(body, task.question)):
            answers.write(frame_of(PART, part))
        write_frame(answers, END)
    except MemoryError:
        write_frame(answers, MEMORY)
    except Exception:
        write_frame(answers, BUG, traceback.format_exc()[-4000:].encode("utf-8", "backslashreplace"))


def _step_back() -> None:
    """Ignores Ctrl-C, since the command ends its workers, and offers to be killed first when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(LAST_TO_LIVE)
    _set_limit("RLIMIT_CORE", 0)


def _set_limit(name: str, value: int) -> None:
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind: int = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _alarm(seconds: float) -> None:
    """Ends this process after `seconds` plus `GRACE`, whatever it is doing; 0 cancels that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds and seconds + GRACE)
