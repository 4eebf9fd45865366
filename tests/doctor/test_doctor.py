"""`prep doctor`: what it sees, on systems that lack something."""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

from prep.doctor import disk, libraries, machine
from prep.fs import atomic
from prep.models.device import allocator, present

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "manifests" / "schemas" / "doctor.schema.json"


def named(checks):
    return {check.name: check for check in checks}


@pytest.fixture
def fine(monkeypatch):
    """Whatever computer runs the tests is good enough."""
    for module, name in ((disk, "SLOW"), (disk, "LITTLE"), (machine, "MEMORY"), (machine, "FILES")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(disk, "LATE", 1e9)
    monkeypatch.setattr(present, "hidden_gpu", lambda: "")


def test_a_computer_with_all_that_is_needed(prep, tmp_path, fine):
    told = prep("doctor", tmp_path, "--json")
    assert told.code == 0, told.err
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(told.json)
    checks = {check["name"]: check for check in told.json["checks"]}
    assert checks["torch"]["what"] == torch.__version__ and checks["cpu"]["what"] == "the only device"
    assert checks["room"]["what"].endswith(f" free in {tmp_path}") and list(tmp_path.iterdir()) == []
    text = prep("doctor", tmp_path)
    assert text.code == 0 and text.out.splitlines()[-1] == "no problems found"
    assert {line.split("\t")[0] for line in text.out.splitlines()[:-1]} == set(checks)


def test_without_a_directory_the_users_cache_is_measured(prep, monkeypatch, tmp_path, fine):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "own"))
    told = prep("doctor")
    assert told.code == 0 and f" free in {tmp_path / 'own'}" in told.out and list((tmp_path / "own").iterdir()) == []
    monkeypatch.delenv("LATENTRY_USER_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: "~/.cache/latentry")
    told = prep("doctor")
    assert told.code == 5 and "there is no home directory to measure the disk in" in told.err


def test_a_place_that_is_no_directory(prep, tmp_path):
    told = prep("doctor", tmp_path / "nowhere")
    assert told.code == 5 and f"{tmp_path / 'nowhere'} is not a directory" in told.err
    assert prep("doctor", "s3://bucket/cache").code == 5


def test_warnings_are_counted_and_end_with_1(prep, tmp_path, monkeypatch, fine):
    monkeypatch.setattr(disk, "SLOW", 1e15)
    monkeypatch.setattr(disk, "LATE", 0.0)
    told = prep("doctor", tmp_path)
    assert told.code == 1 and told.out.splitlines()[-1] == "2 warnings"
    assert re.search(r"writing\twarning\t64.0 MiB written and synced at .*/s. Try: put --cache on a local", told.out)
    assert "syncing\twarning\t" in told.out and "each shard needs two: put --cache on a local disk" in told.out


def test_a_disk_that_is_nearly_full_and_one_without_links(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(1 << 40, (1 << 40) - 5, 5))
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no")))
    found = named(disk.check_disk(tmp_path))
    assert found["room"].state == "warning" and "5 bytes free" in found["room"].what
    assert found["hard links"].state == "note" and list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(atomic, "write", full)
    with pytest.raises(OSError, match="No space left"):
        disk.check_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("files", "most"), [
    ({"memory.max": "max\n"}, None), ({"memory.max": f"{3 << 30}\n"}, 3 << 30),
    ({"memory/memory.limit_in_bytes": f"{5 << 30}"}, 5 << 30),
    ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None)])
def test_a_container_has_less_memory(tmp_path, files, most):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory_limit(tmp_path) == (whole if most is None else min(most, whole))


def test_a_small_computer_and_one_that_says_nothing(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit", lambda: 4 << 30)
    assert named(machine.check_machine())["memory"].state == "warning"
    monkeypatch.undo()
    monkeypatch.setattr(os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert named(machine.check_machine())["memory"].what == "this system does not say how much there is"


@pytest.mark.parametrize(("soft", "state", "what"), [(256, "warning", "256 at a time"), (-1, "ok", "no limit"),
                                                     (4096, "ok", "4096 at a time")])
def test_open_files(monkeypatch, soft, state, what):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    found = named(machine.check_machine())["open files"]
    assert (found.state, found.what) == (state, what)


GPU = namedtuple("GPU", "name total_memory major")


@pytest.mark.parametrize(("major", "state"), [(9, "ok"), (7, "note")])
def test_gpus_are_named(monkeypatch, major, state):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: GPU(f"Card {number}", 80 << 30, major))
    found = named(machine.check_devices())
    assert found["cuda:1"].what.startswith("Card 1, 80.0 GiB") and found["cuda:0"].state == state
    assert ("emulated" in found["cuda:0"].what) == (state == "note") and found["cpu"].what == "used with --device cpu"


@pytest.mark.parametrize(("cuda", "words"), [(None, "is built without CUDA"),
                                             ("12.8", "built for CUDA 12.8, finds no GPU")])
def test_a_driver_whose_gpu_torch_does_not_see(monkeypatch, cuda, words):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = named(machine.check_devices())["GPU"]
    assert found.state == "warning" and words in found.what and "pip install torch" in found.hint
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert present.hidden_gpu() == ""


def test_a_system_without_glibc(monkeypatch):
    monkeypatch.setattr(allocator, "glibc", lambda name: None)
    assert named(machine.check_devices())["allocator"].state == "note"


def test_a_broken_torch(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prep.models.device.present", None)
    found, = machine.check_devices()
    assert found.name == "torch" and found.state == "warning" and "it cannot be imported: " in found.what


def test_a_library_or_an_extra_that_is_missing(monkeypatch):
    missing = named(libraries.check_libraries(("no-such-library",)))["no-such-library"]
    assert missing.state == "warning" and missing.what == "not installed"
    monkeypatch.setattr(libraries, "EXTRAS", {"none": (("numpy", "no-such-library"), "nothing")})
    found, = libraries.check_extras()
    assert found.what == "not installed: needed for nothing" and found.hint == "pip install 'latentry[none]'"


def test_every_extra_is_listed_with_its_libraries():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {name: tuple(re.match(r"[A-Za-z0-9_-]+", one)[0] for one in needs)
              for name, needs in project["optional-dependencies"].items() if name not in ("all", "dev", "bench")}
    assert {name: brought for name, (brought, _) in libraries.EXTRAS.items()} == wanted
