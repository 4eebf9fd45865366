"""RESULTS.md: a section is replaced, the others stay, and the head is made anew; every benchmark is found."""

from __future__ import annotations

import importlib.util
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
