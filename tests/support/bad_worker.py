"""A worker of a scan whose decoder obeys the pictures' names: `hang`, `crash`, `eat`, `leave`, `babble`, `bug`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from prep.scan import worker

usual = worker.check_item


def check_item(item):
    name = item.picture.name
    if name.startswith("hang"):
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


def pack_examined(examined):
    found = documents(examined)
    return {**found, "findings": "none"} if examined.name.startswith("babble") else found


worker.check_item = check_item
documents, worker.pack_examined = worker.pack_examined, pack_examined
worker.main()
