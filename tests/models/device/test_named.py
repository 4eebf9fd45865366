"""A device that is not there is refused before a command does anything, also when it has nothing to compute."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pictures import draw

from prep.errors import UsageError
from prep.models.device.named import require_device

NONE = "error: --device is 'cuda', but this machine has no such device: torch finds cpu\n"


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def made(without_gpu, prep, tiny_model, tmp_path, monkeypatch):
    """A place with pictures, prompts, and a cache that lacks nothing."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "photos" / "cat.png", (64, 64), seed=0).with_suffix(".txt").write_text("a cat")
    Path("prompts.txt").write_text("a cat\n")
    shutil.copytree(tiny_model, "model")
    done = prep(*ENCODE, "--device", "cpu")
    assert done.code == 0, done.err


ENCODE = ("encode", "photos", "--model", "model", "--cache", "cache", "-o", "m.json", "--resolution", 64, "--step", 32,
          "--prompts", "prompts.txt", "--quiet")
COMMANDS = {
    "encode": ENCODE, "dry run that measures": (*ENCODE, "--dry-run", "--measure"),
    "import": ("import", "photos", "--from", "kohya", *ENCODE[2:8]),
    "prompts": ("prompts", "prompts.txt", "--manifest", "m.json"),
    "mask": ("mask", "photos", "--with", "alpha", "-o", "masks"),
    "inspect": ("inspect", "m.json"),
}


def test_every_command_refuses_it(made, prep):
    for name, words in COMMANDS.items():
        done = prep(*words, "--device", "cuda")
        assert (done.code, done.out, done.err.partition("hint: ")[0]) == (2, "", NONE), name
        done = prep(*words, "--device", "gpu")
        assert done.code == 2 and done.err.endswith("\nhint: a GPU of NVIDIA or AMD is --device cuda\n"), name
    assert not Path("masks").exists()


def test_nothing_is_read_before(without_gpu, prep):
    done = prep("prompts", "absent.txt", "--manifest", "absent.json", "--device", "cuda")
    assert (done.code, done.err.partition("hint: ")[0]) == (2, NONE)


def test_a_plan_may_be_looked_at_without_the_gpu(made, prep):
    done = prep(*ENCODE, "--dry-run", "--device", "cuda")
    assert done.code == 0, done.err


def test_several_devices(without_gpu):
    require_device("cpu,auto", several=True)
    for text in ("all", "cpu,cuda"):
        with pytest.raises(UsageError, match=f"^--device is '{text.rpartition(',')[2]}', "):
            require_device(text, several=True)
    with pytest.raises(UsageError, match=r"^--device is 'all', expected .*cuda:N or mps: torch finds cpu$"):
        require_device("all")


def test_what_every_machine_has_needs_no_torch():
    code = ("import sys; from prep.models.device.named import require_device as need; need('auto'); need('cpu'); "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
