"""A `prep` for shell scripts that answers in 0.2 s: its processes are forked from one that has imported everything.

`PrepServer` has a program `prep` in its directory `bin`; the program hands its words, directory and environment over.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

CLIENT = """#!{python} -S
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    line.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    answer = json.loads(line.makefile().readline())
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["codes"][-1])
"""
KEPT = ("LATENTRY_USER_CACHE",)


class PrepServer:
    """Runs the commands of scripts by `launch`, one at a time; `task_rows` as in tests/faults/shim.py."""

    def __init__(self, launch, folder: Path, task_rows: int = 2) -> None:
        self._launch, self._rows = launch, task_rows
        self.commands: list[list[str]] = []
        self.bin = folder / "bin"
        self.bin.mkdir()
        address = f"/tmp/prep-{os.getpid()}-{id(self):x}"  # a socket's path is 107 characters at most
        self._address = Path(address)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen()
        program = self.bin / "prep"
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def environment(self, **more: str) -> dict[str, str]:
        """The environment for a script."""
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", **more}

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._address.unlink()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with line, line.makefile("rw") as stream:
                words, directory, environment = json.loads(stream.readline())
                self.commands.append(words)
                run = {"argv": [words], "shim": {"task_rows": self._rows}, "directory": directory,
                       "environment": {name: environment[name] for name in KEPT if name in environment}}
                print(json.dumps(self._launch(run)[0]), file=stream, flush=True)
