"""A run may come from a stranger: nothing in it leads a command out of it, and no command waits for a pipe in it."""

from __future__ import annotations

import os
import shutil

import pytest
from runs import go

SMALL = {"steps": 2, "lora": {"rank": 2}, "sample": {"every": 2, "steps": 1, "size": [64, 64]},
         "checkpoint": {"every": 1}, "validation": {"every": 0}}
COMMANDS = [("run", "-o", "{run}", "--resume", "--steps", "3", "--device", "cpu"),
            ("check", "-o", "{run}", "--resume"), ("sample", "{run}", "-o", "{root}/grid.png", "--device", "cpu"),
            ("replay", "{run}", "--step", "1"), ("worst", "{run}"), ("report", "{run}"),
            ("merge", "{run}", "-o", "{root}/out"),
            ("merge", "{run}", "-o", "{root}/out", "--model", "{model}"),
            ("check", "{manifest}", "-o", "{root}/new", "--init-from", "{run}", "--rank", "2"), ("view", "{run}")]


@pytest.fixture
def trained(make, setup_of, tmp_path):
    made, run = make(), tmp_path / "run"
    go(setup_of(made, **SMALL), run)
    return made, run


def outside(tmp_path, path):
    """A copy of what a run has at `path`, elsewhere, and what it holds."""
    there = tmp_path / "mine" / path.name
    there.parent.mkdir(exist_ok=True)
    (shutil.copytree if path.is_dir() else shutil.copyfile)(path, there)
    return there


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_every_command_refuses_a_link_or_a_pipe_in_a_run(trained, tiny_model, prep, train, tmp_path, kind):
    made, run = trained
    words = {"run": run, "root": tmp_path, "model": tiny_model, "manifest": made.path}
    there = sorted(each.name for each in run.iterdir())
    for name in there if kind == "link" else ["manifest.json", "log.jsonl", "other"]:
        (tmp_path / "kept").mkdir(exist_ok=True)
        if (run / name).exists():
            mine = outside(tmp_path, run / name)
            (run / name).rename(tmp_path / "kept" / name)
        (run / name).symlink_to(mine) if kind == "link" else os.mkfifo(run / name)
        before = content(tmp_path / "mine") if kind == "link" else {}
        for command in COMMANDS:
            result = (prep if command[0] == "view" else train)(*(word.format(**words) for word in command))
            assert result.code == 7, (name, command, result.err)
            assert f"{run / name}: is a {kind}, expected a " in result.err
            assert "remove it: a run must not contain links; to keep a run elsewhere, name that directory" in result.err
        assert not before or content(tmp_path / "mine") == before
        (run / name).unlink()
        if (tmp_path / "kept" / name).exists():
            (tmp_path / "kept" / name).rename(run / name)
    link = tmp_path / "elsewhere"
    link.symlink_to(run)
    assert train("worst", link).code == 0


@pytest.mark.parametrize("place", ["checkpoints/step-000002", "checkpoints/step-000002/lora.safetensors",
                                   "checkpoints/step-000002/state.json"])
def test_a_checkpoint_behind_a_link_is_refused(trained, tiny_model, train, tmp_path, place):
    made, run = trained
    mine = outside(tmp_path, run / place)
    (shutil.rmtree if mine.is_dir() else os.unlink)(run / place)
    (run / place).symlink_to(mine)
    (run / "lora.safetensors").unlink()
    words = {"run": run, "root": tmp_path, "model": tiny_model, "manifest": made.path}
    before = content(tmp_path / "mine")
    for command in COMMANDS:
        if command[0] not in ("run", "sample", "merge") and "--init-from" not in command:
            continue
        result = train(*(word.format(**words) for word in command))
        assert result.code in (6, 7) and "is a link, expected a " in result.err + result.out, (command, result)
    assert content(tmp_path / "mine") == before
