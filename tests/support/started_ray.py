"""Nodes of a Ray cluster on this machine, started as a user does: by `ray start`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from page_commands import programs
from s3_server import free_port

MARK = "LATENTRY_TEST_CLUSTER"  # a variable by which the processes of a cluster are found again
PATIENCE = 120
# So that nodes of one machine do not take one another's ports, and little memory.
TOGETHER = ("--node-ip-address 127.0.0.1 --num-cpus 1 --object-store-memory 80000000 --min-worker-port 0 "
            "--max-worker-port 0")


class StartedRay:
    """A cluster that only programs with its `environment` find: HOME, with its token, and Ray's directory are its own.
    `close` ends its processes and no others, as `ray stop` would."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray.", dir="/tmp"))  # short, as paths of sockets have to be
        self.port = free_port()
        path = f"{programs(self.folder / 'bin')}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "HOME": str(self.folder), "RAY_TMPDIR": str(self.folder),
                            MARK: str(self.folder)}

    def run(self, line: str, **variables: str) -> None:
        """Runs a line that begins a cluster; what is in `variables` is in the environment of the node's workers."""
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self.environment[name] = value
            return
        if " --head" in line:
            line = f"{line} --port {self.port} --include-dashboard=false"
        if line.startswith("ray start "):
            line = f"{line.replace('HEAD:6379', f'127.0.0.1:{self.port}')} {TOGETHER}"
        log = self.folder / "start.txt"
        with log.open("ab") as out:  # no pipe: the node's processes keep it open
            done = subprocess.run(["sh", "-c", line], stdout=out, stderr=out, check=False, timeout=PATIENCE,
                                  env={**self.environment, **variables})
        assert done.returncode == 0, f"{line}\n{log.read_text()}"

    def close(self) -> None:
        until = time.monotonic() + PATIENCE
        while found := self._processes():
            assert time.monotonic() < until, found
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)  # until the kernel has ended them
        shutil.rmtree(self.folder)

    def _processes(self) -> list[int]:
        """Those with the cluster's mark in their environment, and their children: workers write over theirs."""
        parents, marked = {}, set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                environment = (path / "environ").read_bytes()
            except OSError:  # it has just ended, or belongs to somebody else
                continue
            if state != "Z":
                parents[int(path.name)] = int(parent)
                if f"{MARK}={self.folder}\0".encode() in environment:
                    marked.add(int(path.name))
        return [process for process, parent in parents.items() if process in marked or parent in marked]
