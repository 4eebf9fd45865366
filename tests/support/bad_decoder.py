"""A worker of `prep encode` whose decoder obeys the files' names: `hang`, `crash`, `leave`, `eat`, `babble`, `bug`.

`odd mask` crashes it as a mask.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from prep.encode.engines import decoding
from prep.encode.engines.protocol import PixelsMessage
from prep.workers.worker import main

usual = decoding.pixels_of


def pixels_of(asked):
    name = Path(asked.blob().file).name
    if name.startswith("hang"):
        if directory := os.environ.get("HANGING"):
            (Path(directory) / name).touch()
        while True:
            pass
    if name.startswith("crash") or (name.startswith("odd mask") and asked.reading == "mask"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("leave"):
        os._exit(3)
    if name.startswith("eat"):
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))
    if name.startswith("babble"):
        return PixelsMessage(pixels=memoryview(b"few"))
    if name.startswith("bug"):
        raise ZeroDivisionError("of a decoder")
    return usual(asked)


decoding.pixels_of = pixels_of
main()
