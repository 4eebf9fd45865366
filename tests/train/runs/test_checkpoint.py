"""Checkpoints: whole or not at all, the newest whole one counts, and what does not fit is refused."""

from __future__ import annotations

import json

import pytest
import torch

from prep.errors import CacheError, ConfigError
from prep.fs import atomic
from train.config.load import as_table, parse
from train.runs import checkpoint
from train.runs.checkpoint import Part, State

MANIFEST = "a" * 64


def state(step=1, **settings):
    return State(step=step, manifest=MANIFEST, config=as_table(parse(settings, "x")))


def parts():
    return [Part(name="a.safetensors", tensors={"x": torch.arange(3.0)}, metadata={"rank": "4"}),
            Part(name="unet/config.json", data=b"{}")]


def test_what_is_saved_comes_back(tmp_path):
    folder = checkpoint.save(tmp_path, state(7), parts(), keep=0)
    assert folder.name == "step-000007" and checkpoint.list_checkpoints(tmp_path) == [folder]
    assert checkpoint.read_state(folder) == state(7)
    assert torch.equal(checkpoint.read_tensors(folder / "a.safetensors")["x"], torch.arange(3.0))
    assert (folder / "unet" / "config.json").read_bytes() == b"{}"


def test_only_the_newest_are_kept_and_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoint.save(tmp_path, state(step), parts(), keep=2)
    assert [folder.name for folder in checkpoint.list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize("primitive", ["sync", "rename", "sync_dir", "write"])
def test_a_crash_leaves_the_old_checkpoint_and_no_half_new_one(tmp_path, monkeypatch, primitive):
    old = checkpoint.save(tmp_path, state(1), parts(), keep=0)
    real, calls = getattr(atomic, primitive), []

    def crash(*args):
        calls.append(args)
        raise OSError("no power")

    monkeypatch.setattr(atomic, primitive, crash)
    with pytest.raises(OSError, match="no power"):
        checkpoint.save(tmp_path, state(2), parts(), keep=0)
    monkeypatch.setattr(atomic, primitive, real)
    assert calls and checkpoint.list_checkpoints(tmp_path) in ([old], [old, old.with_name("step-000002")])
    for folder in checkpoint.list_checkpoints(tmp_path):
        checkpoint.read_state(folder)
        assert len(checkpoint.read_tensors(folder / "a.safetensors")) == 1


def test_what_a_crash_left_is_swept_away(tmp_path):
    whole = checkpoint.save(tmp_path, state(1), parts(), keep=0)
    left = atomic.temporary_name(whole)
    left.mkdir()
    (left / "state.json").write_text("{}")
    assert checkpoint.list_checkpoints(tmp_path) == [whole]
    checkpoint.remove_partial(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]


def test_a_damaged_state_is_said(tmp_path):
    folder = checkpoint.save(tmp_path, state(3), parts(), keep=0)
    (folder / "state.json").write_text("{")
    with pytest.raises(CacheError, match=r"cannot read checkpoint .*state.json") as caught:
        checkpoint.read_state(folder)
    assert caught.value.hint.startswith("remove ")
    (folder / "state.json").write_text(json.dumps({"format": "latentry/checkpoint", "version": 9}))
    with pytest.raises(CacheError, match="version 9, this program reads 'latentry/checkpoint' version 1"):
        checkpoint.read_state(folder)


def test_damaged_tensors_are_said(tmp_path):
    folder = checkpoint.save(tmp_path, state(3), parts(), keep=0)
    (folder / "a.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CacheError, match=r"cannot read .*a.safetensors"):
        checkpoint.read_tensors(folder / "a.safetensors")


def test_tensors_that_do_not_fit_are_said(tmp_path):
    with pytest.raises(CacheError, match=r"'x' is missing in .*f, expected shape \[2\]"):
        checkpoint.copy_into({"x": torch.zeros(2)}, {}, tmp_path / "f")
    with pytest.raises(CacheError, match=r"'x' has shape \[3\] in .*f, expected shape \[2\]"):
        checkpoint.copy_into({"x": torch.zeros(2)}, {"x": torch.zeros(3)}, tmp_path / "f")


def same(old, **new):
    checkpoint.check_same(state(1, **old), MANIFEST, as_table(parse(new, "x")))


def test_another_manifest_is_refused():
    with pytest.raises(CacheError, match="made from manifest aaaaaaaaaaaa, and this is bbbbbbbbbbbb"):
        checkpoint.check_same(state(), "b" * 64, state().config)


def test_settings_that_decide_weights_may_not_change():
    with pytest.raises(ConfigError) as caught:
        same({"optimizer": {"lr": 0.1}}, optimizer={"lr": 0.2})
    assert caught.value.message == "optimizer.lr is 0.2, and the checkpoint was trained with 0.1"
    assert "another RUN with -o" in caught.value.hint
    with pytest.raises(ConfigError, match=r"lora.rank is 4, and the checkpoint was trained with 16"):
        same({}, lora={"rank": 4})


def test_settings_that_decide_no_weight_may_change():
    same({"steps": 5}, steps=10, sample={"every": 7}, checkpoint={"keep": 1}, validation={"every": 3})


def test_a_cosine_schedule_keeps_its_length():
    cosine = {"schedule": {"name": "cosine"}}
    same({"steps": 5, **cosine}, steps=5, **cosine)
    with pytest.raises(ConfigError, match="steps is 10, and the checkpoint was trained with 5"):
        same({"steps": 5, **cosine}, steps=10, **cosine)


def test_a_damaged_file_of_a_full_fine_tune_names_the_whole_checkpoint(tmp_path):
    folder = checkpoint.save(tmp_path, state(3), [Part(name="unet/w.safetensors", tensors={"x": torch.ones(9)})], 0)
    path = folder / "unet" / "w.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CacheError, match=r"cannot read .*w.safetensors") as caught:
        checkpoint.read_tensors(path)
    assert caught.value.hint == f"remove {folder}; --resume then goes on from the checkpoint before it"


def test_half_written_pictures_and_results_are_swept_away_too(tmp_path):
    (tmp_path / "samples").mkdir()
    for path in (tmp_path / "lora.safetensors", tmp_path / "samples" / "step-000001.png"):
        atomic.temporary_name(path).write_bytes(b"half")
    atomic.temporary_name(tmp_path / "unet").mkdir()
    (tmp_path / "samples" / "step-000000.png").write_bytes(b"whole")
    checkpoint.remove_partial(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["step-000000.png"]
    assert not list(tmp_path.glob(".*"))
