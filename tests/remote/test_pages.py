"""The commands of manifests/object-storage.md, and torchrun's of manifests/scale.md, as they are written: against a
store that has nothing but pictures."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess

import pytest
from page_commands import ROOT, commands, programs
from pictures import draw, draw_mask
from runs import events
from s3_server import S3Server, free_port
from tarred import member, tar_of
from viewing import viewing

EVERY = commands("object-storage.md")
# tests/remote/test_rclone.py runs these.
OF_RCLONE = slice(EVERY.index("mkdir -p store/bucket"), EVERY.index("kill %1") + 1)
PAGE = [*EVERY[: OF_RCLONE.start], *EVERY[OF_RCLONE.stop :]]
INLINE = re.findall(r"`((?:prep|train) [a-z]+ [^`]*s3://[^`]*)`", (ROOT / "manifests/object-storage.md").read_text())
LEFT_OUT = {"pip install": "nothing is installed by a test"}  # by their first words, and why
# What a page leaves to defaults that are for larger data sets; and one thread.
SMALL = ("--batch-size", 4, "--precision", "fp32", "--device", "cpu", "--set", "sample.every=0")
STEPS = ("--steps", 2)
MORE_STEPS = ("--steps", 4)  # for a run that is continued
TARS = 11


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A store of these tests' own: the pages write to the root of a bucket."""
    found = S3Server(tmp_path_factory.mktemp("s3") / "log.txt")
    yield found
    found.close()


@pytest.fixture
def here(store, tmp_path, tiny_model, monkeypatch):
    """A directory with `models/sd15`; in the store, `photos` and the same in `shards`."""
    photos = tmp_path / "photos"
    for number, size in enumerate([(512, 512), (640, 512), (512, 640)] * 2):
        draw(photos / f"{number:03}.png", size, seed=number).with_suffix(".txt").write_text(f"picture number {number}")
    draw_mask(photos / "000-masklabel.png", (512, 512))
    for path in photos.iterdir():
        store.server.put(f"photos/{path.name}", path.read_bytes())
    for number in range(TARS):
        store.server.put(f"shards/{number:03}.tar", tar_of(
            member(path.name, path.read_bytes()) for path in sorted(photos.glob(f"{number:03}*"))))
    (tmp_path / "here" / "models").mkdir(parents=True)
    (tmp_path / "here" / "models" / "sd15").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def left_out(line: str) -> bool:
    return any(line.startswith(f"{words} ") for words in LEFT_OUT)


def test_every_command_is_run_or_left_out_for_a_reason():
    assert [line for line in PAGE if line.split()[0] not in ("prep", "train") and not left_out(line)] == []
    assert len(PAGE) >= 27 and len(INLINE) >= 1


@pytest.mark.slow
def test_the_page_works_from_its_beginning_to_its_end(here, store, prep, train):
    said, kept = {}, {}
    (here / "FILE").write_text("another prompt\n")
    for line in [*(line for line in PAGE if not left_out(line)), *INLINE]:
        program, name, *words = shlex.split(line)
        if name == "view":
            with viewing(*words) as server:
                assert server.get().status == 200
                assert server.interrupt()[0] == 0
            continue
        if (program, name) == ("train", "run"):
            words += [*SMALL, *(MORE_STEPS if "--resume" in words else STEPS)]
        told = {"prep": prep, "train": train}[program](name, *words)
        assert told.code == 0, f"{line}\n{told.out}\n{told.err}"
        said[line] = told.out + told.err
        if name == "encode" and not kept:
            kept["manifest"] = store.server.get("dataset/manifest.json")
        if name == "seal":
            assert store.server.get("manifest.json") == kept["manifest"], "by parts, and into another cache"
        if "--init-from" in line:
            assert "cat-2" in said[line] and store.server.get("runs/cat-2/lora.safetensors")
    there = [json.loads(one) for one in store.server.get("runs/cat/log.jsonl").splitlines()]
    assert [one["step"] for one in there if one["event"] == "step"] == [1, 2, 3, 4], "the second command continued it"
    assert "encoded: 0 latent" in next(told for line, told in said.items() if "*.tar" in line)
    assert "another prompt" in store.server.get("manifest.json").decode()
    for made in ("grid.png", "report.html", "merged/model_index.json", "here/manifest.json"):
        assert (here / made).is_file(), made


@pytest.mark.slow
def test_torchrun_on_several_machines(here, store, prep, train, tmp_path):
    """The command of each machine, with two ranks on each, on the loopback."""
    command, = (line for line in commands("scale.md", "Training on many machines") if line.startswith("torchrun "))
    encode = next(line for line in PAGE if line.startswith("prep encode "))
    assert prep(*shlex.split(encode)[1:]).code == 0
    count = int(command.split("--nnodes ")[1].split()[0])
    path = f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}"
    own = {"--master-addr 10.0.0.1": "--master-addr 127.0.0.1", "--master-port 29500": f"--master-port {free_port()}",
           "--nproc-per-node 8": "--nproc-per-node 2"}
    machines = []
    for number in range(count):
        line = command
        for told, meant in {**own, "--node-rank 0": f"--node-rank {number}"}.items():
            assert line.count(told) == 1, command
            line = line.replace(told, meant)
        directory = tmp_path / f"machine{number}"
        directory.mkdir()
        (directory / "MODEL").symlink_to(here / "models/sd15")
        machines.append(subprocess.Popen(
            ["sh", "-c", f"exec {line} {' '.join(map(str, [*SMALL, *STEPS]))}"], cwd=directory, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, "LATENTRY_REMOTE_DIR": str(directory / "copies")}))
    try:
        said = [one.communicate(timeout=200)[0] for one in machines]
    finally:
        for one in machines:
            with one:
                one.terminate()  # if it has not ended; torchrun passes it on
    assert [one.returncode for one in machines] == [0] * count, said
    assert list(tmp_path.glob("machine*/RUN")) == [tmp_path / "machine0" / "RUN"]
    done = train("run", "s3://bucket/dataset/manifest.json", "--model", "models/sd15", "-o", "one", *SMALL, *STEPS)
    assert done.code == 0, done.err
    losses = [[one["loss"] for one in events(run) if one["event"] == "step"]
              for run in (tmp_path / "machine0" / "RUN", here / "one")]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
