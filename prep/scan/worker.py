"""A process that decodes for a scan, so that a decoder which hangs, crashes or eats memory takes nothing else with it.

    python -P -c 'from prep.scan.worker import main; main()' SECONDS BYTES

Requests come on stdin and answers go to stdout, as frames of `prep.scan.protocol`; the first frame says that it is
ready. It ends when its input does, when one request takes more than SECONDS (where there is SIGALRM), and may
map no more than BYTES. What decoders print is lost.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from prep.images.decode import quiet_pillow
from prep.scan.examine import check_item, exact_pixels, preview_jpeg, thumbnail
from prep.scan.protocol import (
    pack,
    pack_examined,
    pack_thumb,
    read_frame,
    unpack,
    unpack_blob,
    unpack_item,
    write_frame,
)

READY = b"latentry worker 1"
LAST_TO_LIVE = "1000"  # of -1000 to 1000: whom Linux ends first when memory runs out


def answer(request: bytes) -> bytes:
    """The answer to a request: `examine` items; `pixels`, `thumb` or `preview` of a picture. Files alone decide."""
    document, _ = unpack(request)
    if document["do"] == "examine":
        found = [check_item(unpack_item(item)) for item in document["items"]]
        thumbs = [pack_thumb(one.thumb) for one in found]
        return pack({"found": [pack_examined(one) for one in found], "lengths": list(map(len, thumbs))},
                    b"".join(thumbs))
    if document["do"] == "thumb":
        return pack({}, pack_thumb(thumbnail(unpack_blob(document["picture"]), document.get("file"))))
    if document["do"] == "pixels":
        return pack({"pixels": exact_pixels(unpack_blob(document["picture"]), document.get("file"))})
    return pack({}, preview_jpeg(unpack_blob(document["picture"]), document["side"]))


def main() -> None:
    """Answers until the input ends. An exception is an answer, too: `bug`."""
    seconds, most = map(int, sys.argv[1:])
    quiet_pillow()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # decoders of C may print
        os.dup2(nowhere.fileno(), 2)
    _limit(most)
    gc.freeze()  # what is here now stays
    write_frame(answers, READY)
    while (request := read_frame(requests)) is not None:
        _alarm(seconds)
        try:
            reply = answer(request)
        except MemoryError:
            reply = pack({"memory": most})
        except Exception:
            reply = pack({"bug": traceback.format_exc()})
        _alarm(0)
        write_frame(answers, reply)


def _limit(most: int) -> None:
    """As little as one process may take, where the system lets it say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the scan, which ends us
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(LAST_TO_LIVE)
    for name, value in (("RLIMIT_AS", most), ("RLIMIT_CORE", 0)):
        _set_limit(name, value)


def _set_limit(name: str, value: int) -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        kind: Any = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, hard))


def _alarm(seconds: int) -> None:
    """Ends this process, whatever it is doing, unless it says otherwise before."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
