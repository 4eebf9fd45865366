"""Runs commands as an ordinary user, in one process: `python as_ordinary_user.py USER`, two lines of JSON on stdin.

The first has commands to be run as we are, each a list that begins with prep or train, so that everything is imported
before rights are lost (an ordinary user may not be able to read this Python); it is answered by a line. The second has
commands by case, {name: [command…]}; they are run when the process has become USER (0: stays who it is) and answered by
{name: [[exit code, stdout, stderr]…]}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys


def run(command: list[str]) -> tuple[int, str, str]:
    from prep.cli.console import run as go
    from prep.cli.main import app as prep
    from train.cli.main import app as train

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            go({"prep": prep, "train": train}[command[0]], command[0], command[1:])
        except SystemExit as ending:
            code = int(ending.code or 0)
    return code, out.getvalue(), err.getvalue()


def main() -> None:
    user = int(sys.argv[1])
    for command in json.loads(sys.stdin.readline()):
        code, _, err = run(command)
        if code:
            sys.exit(f"{command}: {err}")
    print("ready", flush=True)
    cases = json.loads(sys.stdin.readline())
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    print(json.dumps({name: [run(command) for command in commands] for name, commands in cases.items()}), flush=True)


if __name__ == "__main__":
    main()
