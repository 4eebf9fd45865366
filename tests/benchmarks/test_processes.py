"""What processes take is seen from outside: their own memory, that of their children, and the time of both."""

from __future__ import annotations

import time

import pytest
from processes import measured

HOLD = "held = b'x' * (64 << 20); import time; time.sleep(0.3); print('held')"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}], check=True)"


def test_memory_of_children_counts_apart_from_that_of_the_process(tmp_path):
    alone, parent = measured(["-c", HOLD], tmp_path), measured(["-c", PARENT], tmp_path)
    assert alone.out == parent.out == "held\n"
    assert min(alone.resident, alone.anonymous, parent.anonymous) > 64 << 20 > parent.resident


def test_time_of_children_counts(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}], check=True)"
    assert measured(["-c", parent], tmp_path).cpu >= 0.5


def test_a_process_is_killed_when_something_is_so(tmp_path):
    words = "from pathlib import Path; import time; Path('there').touch(); print('so', flush=True); time.sleep(60)"
    begun = time.monotonic()
    taken = measured(["-c", words], tmp_path, until=(tmp_path / "there").exists)
    assert time.monotonic() - begun < 50 and taken.resident > 1 << 20


def test_a_failure_ends_the_benchmark_with_what_it_said(tmp_path):
    with pytest.raises(SystemExit, match=r"failed with 3:\nbecause"):
        measured(["-c", "import sys; print('because', file=sys.stderr); sys.exit(3)"], tmp_path)
