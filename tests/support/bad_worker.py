"""A worker of a scan whose decoder obeys the pictures' names: `hang`, `crash`, `eat`, `leave`, `babble`, `bug`.

`HANGING` names a directory for a file from each that hangs.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from prep.scan import worker
from prep.scan.protocol import ExaminedMessage
from prep.workers.worker import main

usual = worker.check_item
babbling = False


def check_item(item):
    global babbling
    name = item.picture.name
    babbling = name.startswith("babble")
    if name.startswith("hang"):
        if directory := os.environ.get("HANGING"):
            (Path(directory) / name).touch()
        while True:
            pass
    if name.startswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("eat"):
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))
    if name.startswith("leave"):
        os._exit(3)
    if name.startswith("bug"):
        raise ZeroDivisionError("of a check")
    return usual(item)


class Message:
    """In place of `ExaminedMessage`."""

    @staticmethod
    def of(examined):
        return ["none", None, None, []] if babbling else ExaminedMessage.of(examined)


worker.check_item, worker.ExaminedMessage = check_item, Message
main()
