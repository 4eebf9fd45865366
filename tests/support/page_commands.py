"""The commands that the pages in manifests/ show, and programs of this tree to run them with as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = {"prep": "prep", "train": "train", "torchrun": "torch.distributed.run", "ray": "ray.scripts.scripts"}


def commands(page: str, section: str = "") -> list[str]:
    """The lines of a page's code blocks, or of one section's, that are for a shell; lines that end in \\ are joined.

    In fenced blocks these begin with "$ ". In indented ones they are all but settings, `name = value`.
    """
    text = (ROOT / "manifests" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^(?:\$ |    )(\S.*)$", text, re.MULTILINE)
    return [re.sub(r" +", " ", line) for line in lines if not re.match(r"[\w.]+ = ", line)]


def programs(folder: Path) -> Path:
    """A directory for PATH with the programs of PROGRAMS, made here, so that none of another tree is run."""
    folder.mkdir()
    for name, module in PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    return folder
