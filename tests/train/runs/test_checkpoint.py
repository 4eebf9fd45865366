"""Checkpoints: whole or not at all, the newest whole one counts, and every byte is compared with what was written."""

from __future__ import annotations

import json
import os

import pytest
import torch

from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.place import Local
from prep.parse import Unparsed
from prep.runs.documents import MOST, with_checksum
from train.config.load import as_table, parse
from train.runs import checkpoint
from train.runs import checkpoint_files as files
from train.runs.checkpoint import DataFacts, State, files_of, piece_name, read_state
from train.runs.checkpoint_files import CheckpointFile, read_tensors

MANIFEST = "a" * 64
FACTS = {"latents": {"channels": 4}, "prediction": "epsilon", "masked": False, "buckets": [[64, 64]],
         "unconditional": "00", "samples": 3}
WANTED = {"x": (torch.float32, (3,))}


def state(step=1, **settings):
    return State(step=step, manifest=MANIFEST, config=as_table(parse(settings, "x")), base={"denoiser": "c" * 64},
                 data=DataFacts(digest="b" * 64, facts=FACTS), micro_batch=4)


def parts():
    return [CheckpointFile(name="a.safetensors", tensors={"x": torch.arange(3.0)}, metadata={"rank": "4"}),
            CheckpointFile(name="unet/config.json", data=b"{}")]


def save(run, step=1, keep=0):
    return files.save(run, state(step), parts(), keep)


def reseal(folder, **changes):
    """Edits state.json as somebody would who knows how."""
    body = json.loads((folder / "state.json").read_text())
    body.pop("self", None)
    (folder / "state.json").write_bytes(with_checksum({**body, **changes}))


def test_what_is_saved_comes_back(tmp_path):
    folder = save(tmp_path, 7)
    assert folder.name == "step-000007" and checkpoint.list_checkpoints(tmp_path) == [folder]
    found = read_state(folder)
    assert set(found.files) == {"a.safetensors", "unet/config.json"}
    assert found == State(**{**{name: getattr(state(7), name) for name in State.__slots__}, "files": found.files})
    assert torch.equal(read_tensors(folder, found, "a.safetensors", WANTED)["x"], torch.arange(3.0))
    assert files.tensor_names(folder, found, "a.safetensors") == {"x"}


def test_pieces_of_a_file():
    name = "unet/w.safetensors"
    pieces = [piece_name(name, number, 2) for number in range(2)]
    assert pieces == ["unet/w/shard-00001-of-00002.safetensors", "unet/w/shard-00002-of-00002.safetensors"]
    others = ["w/shard-00001-of-00001.safetensors", "unet/w/a.safetensors", "unet/config.json"]
    assert files_of(name, [*others, *reversed(pieces)]) == tuple(pieces)
    assert files_of(name, [*others, *pieces, name]) == (name,)
    assert files_of(name, others) == ()
    for there, said in (([pieces[0]], f"its piece {pieces[1]} is missing"),
                        ([pieces[1]], f"its piece {pieces[0]} is missing"),
                        ([*pieces, piece_name(name, 2, 3)], f"it has 3 pieces, expected 2 as {pieces[0]} says")):
        with pytest.raises(Unparsed) as caught:
            files_of(name, there)
        assert said in str(caught.value)


def test_pieces_that_state_json_lacks(tmp_path):
    """It is sealed, but a run that was killed never wrote it so."""
    folder = tmp_path / "checkpoints" / "step-000001"
    found = State(step=1, manifest=MANIFEST, config={}, files={piece_name("a.safetensors", 1, 2): None})
    with pytest.raises(CacheError, match=r"a.safetensors: its piece a/shard-00001-of-00002"):
        files.has(folder, found, "a.safetensors")
    with pytest.raises(CacheError, match=r"b.safetensors: it is missing"):
        files.tensor_names(folder, found, "b.safetensors")


def test_only_the_newest_are_kept_and_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, keep=2)
    assert [folder.name for folder in checkpoint.list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize("primitive", ["sync", "rename", "sync_dir", "write"])
def test_a_crash_leaves_the_old_checkpoint_and_no_half_new_one(tmp_path, monkeypatch, primitive):
    old = save(tmp_path, 1)
    real, calls = getattr(atomic, primitive), []

    def crash(*args):
        calls.append(args)
        raise OSError("no power")

    monkeypatch.setattr(atomic, primitive, crash)
    with pytest.raises(OSError, match="no power"):
        save(tmp_path, 2)
    monkeypatch.setattr(atomic, primitive, real)
    assert calls and checkpoint.list_checkpoints(tmp_path) in ([old], [old, old.with_name("step-000002")])
    for folder in checkpoint.list_checkpoints(tmp_path):
        read_tensors(folder, read_state(folder), "a.safetensors", WANTED)


def test_what_a_crash_left_is_swept_away(tmp_path):
    whole = save(tmp_path)
    left = atomic.temporary_name(whole)
    left.mkdir()
    (left / "state.json").write_text("{}")
    assert checkpoint.list_checkpoints(tmp_path) == [whole]
    checkpoint.remove_partial(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]


@pytest.mark.parametrize(("text", "said"), [
    ("{", "state.json: it is not JSON: "),
    ("[" * 100_000, "state.json: it is not JSON: "),
    ("[]", "state.json: it is [], expected a table"),
    ('{"format": "latentry/checkpoint", "version": 9}', "version 9, this program reads 'latentry/checkpoint' version "
                                                         "1 or 2 or 3 or 4"),
    ('{"format": "latentry/checkpoint", "version": 2}', "state.json: it has the keys ['format', 'version'], expected "),
    (" " * MOST + "{}", f"state.json: has {MOST + 2} bytes, expected at most {MOST}"),
], ids=["cut", "brackets", "list", "version", "keys", "large"])
def test_a_damaged_state_is_refused(tmp_path, text, said):
    folder = save(tmp_path, 3)
    (folder / "state.json").write_text(text)
    with pytest.raises(CacheError) as caught:
        read_state(folder)
    assert said in caught.value.message and caught.value.exit_code == 7
    assert caught.value.hint == f"it is the only checkpoint of {tmp_path}; train again into another RUN with -o"


@pytest.mark.parametrize("change", [
    lambda text: text.replace('"step": 3', '"step": 4'), lambda text: text.replace('"step": 3', '"step": 1e400'),
    lambda text: text.replace('"step": 3', '"step": NaN'), lambda text: text.replace('"lr": 0.0001', '"lr": 0.001'),
    lambda text: text + "\n", lambda text: text.replace('"step": 3', '"step":3'),
], ids=["step", "infinite", "nan", "lr", "newline", "spelling"])
def test_an_edited_state_is_refused(tmp_path, change):
    folder = save(tmp_path, 3)
    before = (folder / "state.json").read_text()
    (folder / "state.json").write_text(change(before))
    assert (folder / "state.json").read_text() != before
    with pytest.raises(CacheError, match=r"state.json: it does not match its own digest; it was edited or damaged"):
        read_state(folder)


@pytest.mark.parametrize(("changes", "said"), [
    ({"step": 4}, "it is the state of step 4, expected step-000003"),
    ({"step": -3}, "step is -3, expected "),
    ({"config": 3}, "config is 3, expected a table"),
    ({"micro_batch": "4"}, "micro_batch is '4', expected "),
    ({"init": {"name": "x", "sha256": "y"}}, "init.sha256 is 'y', expected "),
    ({"meaning": 3}, "meaning is 3, expected 1 or 2"),
    ({"base": {"denoiser": "x"}}, "base.denoiser is 'x', expected "),
    ({"files": {"../out": {"bytes": 1, "sha256": "0" * 64}}}, "it lists the file '../out', expected a path in the "
                                                              "checkpoint"),
    ({"files": {"state.json": {"bytes": 1, "sha256": "0" * 64}}}, "it lists the file 'state.json', expected a path"),
    ({"data": {"digest": "0" * 64, "facts": {**FACTS, "latents": {"channels": {}}}}},
     "data.facts.latents.channels is {}, expected a string, a whole number or a list"),
    ({"data": {"digest": "0" * 64, "facts": {**FACTS, "latents": {"mean": [1]}}}},
     "data.facts.latents.mean[0] is 1, expected a string"),
    ({"adopted": [{"step": 1}]}, "adopted[0].changes is None, expected "),
], ids=lambda value: None if isinstance(value, str) else str(next(iter(value))))
def test_values_are_checked_although_the_seal_is_right(tmp_path, changes, said):
    folder = save(tmp_path, 3)
    reseal(folder, **changes)
    with pytest.raises(CacheError) as caught:
        read_state(folder)
    assert said in caught.value.message


def test_files_are_those_of_the_state_and_of_its_sizes(tmp_path):
    folder = save(tmp_path, 3)
    (folder / "more.txt").write_text("x")
    with pytest.raises(CacheError, match=r"step-000003: more.txt is not listed in state.json"):
        read_state(folder)
    (folder / "more.txt").unlink()
    with (folder / "a.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CacheError, match=r"step-000003: a.safetensors has \d+ bytes, expected \d+"):
        read_state(folder)
    (folder / "a.safetensors").unlink()
    with pytest.raises(CacheError, match=r"step-000003: a.safetensors is missing"):
        read_state(folder)


@pytest.mark.skipif(os.name != "posix", reason="links need a privilege there")
@pytest.mark.parametrize("name", ["a.safetensors", "unet", "state.json", "."])
def test_links_are_refused(tmp_path, name):
    folder = save(tmp_path / "run", 3)
    path = folder / name if name != "." else folder
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="is a link, expected a"):
        read_state(folder)


def test_every_flipped_bit_of_a_file_is_found(tmp_path):
    folder = save(tmp_path, 3)
    path, found = folder / "a.safetensors", read_state(folder)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        with pytest.raises(CacheError, match=r"a.safetensors: "):
            read_tensors(folder, found, "a.safetensors", WANTED)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 8]))
    with pytest.raises(CacheError, match=r"a.safetensors: its bytes do not match their digest"):
        read_tensors(folder, found, "a.safetensors", WANTED)


def test_a_file_that_the_state_does_not_list_is_missing(tmp_path):
    folder = save(tmp_path, 3)
    for read in (lambda name: read_tensors(folder, read_state(folder), name, WANTED),
                 lambda name: files.tensor_names(folder, read_state(folder), name)):
        with pytest.raises(CacheError, match=r"ema.safetensors: it is missing"):
            read("ema.safetensors")


def test_the_way_out_names_the_checkpoint_before(tmp_path):
    save(tmp_path, 2)
    folder = save(tmp_path, 3)
    (folder / "state.json").unlink()
    with pytest.raises(CacheError) as caught:
        read_state(folder)
    assert caught.value.hint == "--resume --from step-000002 continues from another checkpoint"


def test_a_checkpoint_of_version_1_is_read(tmp_path):
    """As earlier commits wrote it: no digests, so sizes are those that are there."""
    folder = save(tmp_path, 3)
    (folder / "state.json").write_text(json.dumps({
        "format": "latentry/checkpoint", "version": 1, "step": 3, "manifest": MANIFEST,
        "config": as_table(parse({}, "x"))}, indent=1) + "\n")
    found = read_state(folder)
    assert (found.version, found.step, found.data, found.micro_batch) == (1, 3, None, None)
    assert {facts.sha256 for facts in found.files.values()} == {None}
    assert torch.equal(read_tensors(folder, found, "a.safetensors", WANTED)["x"], torch.arange(3.0))


def test_a_checkpoint_is_found_by_its_number(tmp_path):
    for step in (2, 10):
        save(tmp_path, step)
    for named, step in ((None, 10), ("step-2", 2), ("2", 2), ("step-000002", 2)):
        assert checkpoint.find_checkpoint(Local(tmp_path), named).name == f"step-{step:06d}"
    for named in ("3", "step-", "x", "\u0662"):
        with pytest.raises(PathError, match="expected one of: step-000002, step-000010"):
            checkpoint.find_checkpoint(Local(tmp_path), named)


def test_newer_checkpoints_are_set_aside_and_never_taken_for_the_newest(tmp_path):
    for _ in range(2):
        for step in (1, 2, 3):
            save(tmp_path, step)
        moved = checkpoint.set_aside(tmp_path, 1)
        assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-000001"]
    assert moved == ["aside-2-step-000002", "aside-2-step-000003"]
    assert len(list((tmp_path / "checkpoints").glob("aside-*"))) == 4


def test_half_written_pictures_and_results_are_swept_away_too(tmp_path):
    (tmp_path / "samples").mkdir()
    for path in (tmp_path / "lora.safetensors", tmp_path / "samples" / "step-000001.png"):
        atomic.temporary_name(path).write_bytes(b"half")
    atomic.temporary_name(tmp_path / "unet").mkdir()
    (tmp_path / "samples" / "step-000000.png").write_bytes(b"whole")
    checkpoint.remove_partial(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["step-000000.png"]
    assert not list(tmp_path.glob(".*"))
