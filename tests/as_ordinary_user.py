"""Runs commands as an ordinary user, in one process: `python as_ordinary_user.py HOME USER`, a plan on stdin.

The plan is {"warm": [command…], "cases": {name: [command…]}}, a command a list that begins with prep or train. What is
in "warm" runs as we are, so that everything is imported before rights are lost (an ordinary user may not be able to
read this Python); then the process becomes USER (0: stays who it is). Answers {name: [[exit code, stdout, stderr]…]}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys


def run(command: list[str]) -> tuple[int, str, str]:
    from prep.cli import app as prep
    from prep.console import run as go
    from train.cli import app as train

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            go({"prep": prep, "train": train}[command[0]], command[0], command[1:])
        except SystemExit as ending:
            code = int(ending.code or 0)
    return code, out.getvalue(), err.getvalue()


def main() -> None:
    user = int(sys.argv[1])
    plan = json.load(sys.stdin)
    for command in plan["warm"]:
        code, _, err = run(command)
        if code:
            sys.exit(f"{command}: {err}")
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    json.dump({name: [run(command) for command in commands] for name, commands in plan["cases"].items()}, sys.stdout)


if __name__ == "__main__":
    main()
