"""The Dockerfile, read: what it copies exists and is sent, what it installs is what is tested, who runs is not root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "manifests" / "docker"
TEXT = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines()
              if "==" in line)


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its words, without comments."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def arguments() -> dict[str, str]:
    return dict(words.split("=", 1) for name, words in instructions() if name == "ARG")


def test_each_path_that_is_copied_exists_and_is_sent():
    """What the list beside it leaves out is not there for docker."""
    sent = {line.removeprefix("!") for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
            if line.startswith("!")}
    copied = {path for name, words in instructions() if name == "COPY" and not words.startswith("--from")
              for path in words.split()[:-1]}
    assert copied == sent and {"prep", "train", "pyproject.toml", ".ci/constraints.txt"} <= copied
    assert all((ROOT / path).exists() for path in copied)
    for path in (PROJECT["readme"], *PROJECT["license-files"]):  # which a wheel is made of, too
        assert path in copied


def test_versions_are_those_that_are_tested():
    pins = re.findall(r"([a-z_]+)==(\S+)", TEXT)
    assert pins == [("torch", PINNED["torch"])]
    assert "--constraint .ci/constraints.txt" in TEXT
    least = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, arguments()["PYTHON"].split("."))) >= least
    assert set(arguments()["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys() - {"dev", "bench"}


def test_the_cpu_is_the_default_and_cuda_an_argument():
    assert arguments()["TORCH"] == "cpu"
    torch = next(words for name, words in instructions() if name == "RUN" and "torch==" in words)
    assert 'https://download.pytorch.org/whl/${TORCH}"' in torch
    named = re.findall(r"--build-arg (\w+)=", TEXT + (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named and set(named) <= arguments().keys()
    stages = TEXT.split("\nFROM ")
    for name in ("TORCH", "EXTRAS"):  # an argument is known in the stage that declares it only
        assert [f"ARG {name}" in stage for stage in stages] == [f"${{{name}}}" in stage for stage in stages]


def test_who_runs_is_no_root_and_has_one_volume():
    last = [(name, words) for name, words in instructions()][-5:]
    assert [name for name, _ in last] == ["ENV", "USER", "WORKDIR", "VOLUME", "CMD"]
    found = dict(last)
    assert found["USER"] not in ("root", "0") and f"useradd --uid 1000 --create-home {found['USER']}" in TEXT
    assert found["VOLUME"] == found["WORKDIR"] == "/data"
    assert sum(name == "VOLUME" for name, _ in instructions()) == 1
    assert all(f"{name}=/data/" in found["ENV"] for name in ("HF_HOME", "XDG_CACHE_HOME"))
    assert found["CMD"].split('"')[1] in PROJECT["scripts"]


def test_all_extras_are_in_all():
    """But those for who works on the code."""
    extras = PROJECT["optional-dependencies"]
    named = re.fullmatch(r"latentry\[(.+)\]", extras["all"][0])
    assert set(named[1].split(",")) == extras.keys() - {"all", "dev", "bench"}
