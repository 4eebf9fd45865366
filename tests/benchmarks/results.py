"""Where figures go: a section on stdout, and with `write` the section of that title in RESULTS.md.

The file's head describes the machine and is made anew with every section that is written; the other sections stay, in
their order, so that what was tried by hand can stand beside what a benchmark wrote.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from prep.runtime import ask_for_huge_pages

ask_for_huge_pages()  # as the commands do, before libraries that benchmarks import make tensors

RESULTS = Path(__file__).with_name("RESULTS.md")
TITLE = "# What was measured"
LIBRARIES = (  # those whose version moves a figure; what is not installed is left out
    "numpy", "torch", "awscrt", "pyarrow", "zarr", "zarrs", "tensorstore", "safetensors", "webdataset",
    "mosaicml-streaming", "litdata", "datasets", "pylance",
)  # fmt: skip


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's options begin with those that all have: `--write` and `--quick`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the figures into RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds: a look, not a result")
    return parser


def emit(title: str, text: str, write: bool) -> None:
    """Prints a section; with `write` it replaces the section `## title` of RESULTS.md, or becomes the last one."""
    print(f"\n## {title}\n\n{text.strip()}", flush=True)
    if write:
        old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
        RESULTS.write_text(with_section(old, title, text, machine()), encoding="utf-8")


def with_section(old: str, title: str, text: str, head: str) -> str:
    """The document with a new head and the one section replaced; a `## ` begins a section, everywhere."""
    parts = re.split(r"(?m)^## (.*)\n", old)
    sections = {name.strip(): body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    sections[title] = text.strip()
    return "\n\n".join([TITLE, head.strip(), *(f"## {name}\n\n{body}" for name, body in sections.items())]) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as text; the first is words, the others are figures."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
             for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def machine() -> str:
    """What the figures depend on, in words; no names of hosts or places."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0
    words = (
        "`make bench` prints these sections anew, `make bench BENCH=--write` puts them here. Ratios are medians of "
        "interleaved rounds within one run; absolute figures move more than they do.",
        f"Machine of the last section written: {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {_versions()}.",
    )
    return "\n\n".join(textwrap.fill(one, 119, break_long_words=False, break_on_hyphens=False) for one in words)


def _processor() -> str:
    """The processor's own name where Linux tells it, and its largest cache."""
    name, last = platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"(?m)^model name\s*: (.+)$", info.read_text())):
        name = found[1].strip()
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if sizes:
        last = f" ({sizes[-1].read_text().strip().removesuffix('K')} KiB of last-level cache)"
    return f"{name}{last}"


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
