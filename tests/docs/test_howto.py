"""The commands of manifests/howto.md work, typed one after another, and do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "manifests" / "howto.md").read_text(encoding="utf-8")
PROGRAMS = ("prep", "train", "cp", "mkdir", "echo", "cd")


def commands() -> list[str]:
    """Lines of indented blocks that begin with a program."""
    return [line.strip() for line in re.findall(r"^    (.+)$", PAGE, re.MULTILINE) if line.split()[0] in PROGRAMS]


def test_every_section_has_commands_or_settings():
    for section in PAGE.split("\n## ")[1:]:
        assert re.search(r"^    \S", section, re.MULTILINE), section.splitlines()[0]
    assert len(commands()) > 25


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sh") is None, reason="the page is for a shell")
def test_the_page_works_from_its_beginning_to_its_end(tmp_path):
    here, told = tmp_path, {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for line in commands():
        words = shlex.split(line)
        if words[0] == "cd":
            here = here / words[1]
            continue
        program = f"{shlex.quote(sys.executable)} -m {line}" if words[0] in ("prep", "train") else line
        done = subprocess.run(["sh", "-c", program], cwd=here, env=environment, capture_output=True, text=True,
                              check=False, timeout=300)
        assert done.returncode == (1 if line.startswith("prep scan") else 0), f"{line}\n{done.stdout}\n{done.stderr}"
        told[line] = done.stdout + done.stderr
    assert "encoded: 0 latent, 0 mask, 1 text" in told["prep encode dataset.toml --cache cache -o corrected.json"]
    assert "encoded: 0 latent, 0 mask, 0 text" in told["prep encode dataset.toml --cache cache -o more.json"]
    assert "encoded: 0 latent, 0 mask, 0 text" in next(said for line, said in told.items() if "of-file.json" in line)
    assert "046" in told["prep diff demo.json corrected.json"]
    assert (here / "merged" / "model_index.json").is_file() and (here / "heart.png").is_file()
    assert list((here / "tars").glob("*.tar")) and list((here / "files").rglob("*.safetensors"))
    assert (here / "fast.png").is_file() and (here / "smaller.safetensors").is_file()
    assert "beside the training adapter " in told[next(line for line in told if "base.adapter" in line)]
    masked = json.loads((here / "masked.json").read_text())
    assert "mask" in masked["fields"]
