"""Workers on Ray that die: of prep encode at a change of the disk, of prep scan before it examines pictures. They are
imported by name in the workers of a cluster.

`fault.json` beside the cache says where: {"kind": "actor" | "node" | "driver" | "none", "at": n}. The n-th change (or
call) of any worker leaves a file `reached` with the node's id; then an actor kills itself, others wait to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from prep.encode.engines.ray_worker import RayWorker
from prep.fs import atomic
from prep.scan.ray_worker import ScanWorker


class FaultyScanner(ScanWorker):
    """`fault.json` is in the directory in FAULTS, and so are the other files."""

    def examine(self, items):
        home = Path(os.environ["FAULTS"])
        with (home / "seen").open("a") as seen:
            seen.writelines(f"{item.name}\n" for item in items)
        return counted(super().examine, home, json.loads((home / "fault.json").read_text()))(items)


class FaultyWorker(RayWorker):
    def start(self, job, token, wanted, directory):
        home = job.cache.root.parent
        plan = json.loads((home / "fault.json").read_text())
        for name in atomic.PRIMITIVES:
            setattr(atomic, name, counted(getattr(atomic, name), home, plan))
        return super().start(job, token, wanted, directory)


def counted(plain, home: Path, plan):
    """A primitive that counts its calls in all processes, by the size of a file."""
    def step(*values, **options):
        descriptor = os.open(home / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        number = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.close(descriptor)
        if number == plan["at"]:
            reach(home, plan["kind"])
        return plain(*values, **options)

    return step


def reach(home: Path, kind: str) -> None:
    import ray

    (home / "reaching").write_text(ray.get_runtime_context().get_node_id())
    (home / "reaching").rename(home / "reached")
    if kind == "actor":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
