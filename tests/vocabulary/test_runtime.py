"""Ctrl-C is held back while libraries load, and has its effect afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prep.runtime import defer_interrupts, peak_resident, usable_cores

LOADING = """
import os, signal, sys, threading
from prep.runtime import defer_interrupts
threading.Timer({after}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    with defer_interrupts():
        import torch
        print("loaded", flush=True)
    import time
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_it_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_goes_first():
    with pytest.raises(ZeroDivisionError), defer_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing():
    found = []

    def run():
        with defer_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize("after", [0.3, *(pytest.param(after, marks=pytest.mark.slow) for after in (0.05, 0.6))])
def test_torch_loads_to_its_end(after):
    done = subprocess.run([sys.executable, "-c", LOADING.format(after=after)], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout) == (130, "loaded\n"), done.stderr


def test_the_peak_of_memory_is_this_process_s_own():
    """On Linux, getrusage also counts what the parent had."""
    held = b"x" * (300 << 20)
    grow = ("from prep.runtime import peak_resident; before = peak_resident(); held = b'x' * (100 << 20); "
            "print(before, peak_resident())")
    answer = subprocess.run([sys.executable, "-c", grow], capture_output=True, text=True, check=True)
    before, after = map(int, answer.stdout.split())
    assert 1 << 20 < before < 200 << 20 and 90 << 20 < after - before < 150 << 20 and held


def test_the_peak_of_memory_without_proc(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert peak_resident() > 1 << 20
    monkeypatch.setattr(sys, "platform", "win32")
    assert peak_resident() is None


@pytest.mark.parametrize(("files", "cores"), [
    ({}, 64), ({"cpu.max": "max 100000\n"}, 64), ({"cpu.max": "250000 100000\n"}, 3),
    ({"cpu.max": "9000000 100000"}, 64),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ({"cpu/cpu.cfs_quota_us": "50000\n"}, 64), ({"cpu.max": "0 0\n"}, 64), ({"cpu.max": ""}, 64),
])
def test_cores_that_a_group_allows(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_cores_of_a_system_that_binds_none(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processes bound to cores")
def test_a_job_bound_to_a_core_uses_one(tmp_path):
    one = min(os.sched_getaffinity(0))
    script = (f"import os; os.sched_setaffinity(0, [{one}]);"
              " from prep.runtime import usable_cores; print(usable_cores())")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
