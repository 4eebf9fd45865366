"""`make check` is quick because it loads no torch: few tests of its folders are skipped for that, and none unawares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Modules of tests in these folders that need torch; `make test` runs them.
NEED_TORCH = {"tests/buckets/test_views.py", "tests/cache/test_values.py", "tests/sources/test_tars.py"}


def folders() -> list[str]:
    """The folders that the Makefile names."""
    (named,) = re.findall(r"^CORE := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return [f"tests/{name}" for name in named.replace("\\\n", " ").split()]


@pytest.mark.slow
def test_tests_of_the_core_are_collected_without_torch():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--without-torch", "--collect-only", "-q", "-p", "no:cacheprovider",
         *folders()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = set(re.findall(r"^(tests/[^:]+\.py)::", done.stdout, flags=re.MULTILINE))
    there = {path.relative_to(ROOT).as_posix() for name in folders() for path in (ROOT / name).rglob("test_*.py")}
    assert len(seen) > 80
    assert there - seen == NEED_TORCH, "move what needs torch out of these folders, or into modules of its own"
