"""Runs `prep` as `python -m prep`."""

from __future__ import annotations

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120, PTH100  # imports nothing else yet

# `-m` puts the current directory before Python's own modules; it may be that of a stranger's dataset.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != HOME:  # noqa: PTH109
    del sys.path[0]

from prep.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
