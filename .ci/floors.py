"""Prints what `make test-floors` installs: each dependency at the lowest version that pyproject.toml allows.

torch keeps the version of the constraints: PyPI has old releases of it for Linux with gigabytes of CUDA libraries only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("hypothesis", "pytest", "pytest-timeout")  # at the versions of the constraints, as torch


def main() -> None:
    """One requirement a line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in (ROOT / ".ci" / "constraints.txt").read_text().split())
    floors = dict(re.fullmatch(r"([\w-]+)>=([\w.]+)", one).groups() for one in project["dependencies"])
    wanted = {**floors, **{name: pinned[name] for name in ("torch", *TOOLS)}}
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in wanted.items())


if __name__ == "__main__":
    main()
