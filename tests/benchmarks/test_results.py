"""RESULTS.md: a section is replaced, the others stay, and the head is made anew; every benchmark is found."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OLD = "# What was measured\n\nan old head\n\n## Reading\n\n| a | b |\n\nold words\n\n## Notes\n\ntried by hand\n"


@pytest.fixture
def results() -> Any:
    """The module, loaded from its file: benchmarks are scripts, not a package."""
    spec = importlib.util.spec_from_file_location("benchmark_results", HERE / "results.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_section_is_replaced_where_it_stands(results: Any) -> None:
    new = results.with_section(OLD, "Reading", "new words\n", "a new head")
    assert new == "# What was measured\n\na new head\n\n## Reading\n\nnew words\n\n## Notes\n\ntried by hand\n"


def test_a_new_section_comes_last(results: Any) -> None:
    new = results.with_section(OLD, "Writing", "figures", "a new head")
    assert new.endswith("## Notes\n\ntried by hand\n\n## Writing\n\nfigures\n")
    assert "old words" in new


def test_writing_is_asked_for(results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    results.emit("Reading", "figures", write=False)
    assert not results.RESULTS.exists()
    results.emit("Reading", "figures", write=True)
    written = results.RESULTS.read_text()
    assert written.startswith("# What was measured\n") and written.endswith("## Reading\n\nfigures\n")
    assert "## Reading\n\nfigures" in capsys.readouterr().out


def test_the_machine_is_described_without_names_of_places(results: Any) -> None:
    import platform

    words = results.machine()
    assert "cores" in words and "numpy" in words and platform.python_version() in words
    assert str(Path.home()) not in words and (platform.node() or "no name") not in words


def test_tables_line_up(results: Any) -> None:
    assert results.table(("reader", "GB/s"), [("a", "12.5"), ("longer one", "1")]).splitlines() == [
        "| reader     | GB/s |", "| ---------- | ---: |", "| a          | 12.5 |", "| longer one |    1 |"]


READ = """
import sys
sys.path[:0] = sys.argv[1:3]
import bench_read, peers
from prep.arrays import ArraySpec

def few(kind, data, scratch):
    return {"memcpy": bench_read.Contender(open=peers.memcpy(data, scratch), root=scratch)}

bench_read.contenders = few
kind = {"latent": [ArraySpec(name="latent", dtype="bfloat16", shape=(4, 2, 2))]}
bench_read.run("tiny", kind, 20, 1, 0, None, False)
"""


def test_reading_is_measured_without_cold_rounds() -> None:
    """`--cold 0`: no section of them, and no median of nothing."""
    done = subprocess.run([sys.executable, "-c", READ, HERE, HERE.parent.parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n## ") + done.stdout.startswith("## ") == 2 and "cold" not in done.stdout


def test_options_of_one_benchmark_want_its_name() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "--cold", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 2 and "expected --only NAME with them" in done.stderr
