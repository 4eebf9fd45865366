"""A run's directory: claimed once, resumed when it fits, never inside pictures or cache; it moves with its manifest."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from crashes import Crashed, Disk, state

from prep.errors import CacheError, PathError
from prep.fs.place import Local
from prep.manifest.document import read_manifest
from prep.models.families.sd15 import PRESETS
from prep.runs.documents import with_checksum
from train.config.load import as_table
from train.models.targets import read_weights, trained_shapes
from train.runs import checkpoint_files as files
from train.runs import directory as rundir
from train.runs.directory import check_writable, claim_run, lock_run, read_records, read_run, require_manifest
from train.runs.stored.stored import OnDisk
from train.state_files import state_of


@pytest.fixture
def claim(make, setup_of):
    """What was made, and `claim(folder, step=…, model=…, **settings)`, which returns the setup."""
    made = make()

    def go(folder, *, step=None, model=None, **settings):
        setup = setup_of(made, **settings)
        if model is not None:
            setup = replace(setup, request=replace(setup.request, model=model))
        claim_run(Local(folder), setup, step=step)
        return setup

    return made, go


def test_a_claimed_run_is_read_back(claim, tmp_path, tiny_model):
    made, go = claim
    setup = go(tmp_path / "run", steps=3)
    run = read_run(Local(tmp_path / "run"))
    assert run.config == setup.config and run.request.manifest.resolve() == made.path.resolve()
    assert tiny_model.samefile(run.request.model) and not run.request.other_encoders
    assert read_manifest(tmp_path / "run" / "manifest.json").document == made.manifest.document
    assert read_records(tmp_path / "run", len(setup.index.samples)) == setup.identity.records


def test_run_and_manifest_move_together(claim, tmp_path_factory):
    made, go = claim
    go(made.root / "run")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "all"
    shutil.copytree(made.root, elsewhere)
    assert read_run(Local(elsewhere / "run")).request.manifest.samefile(elsewhere / "m.json")


def test_a_model_of_one_s_own_is_remembered_relative_or_by_its_hub_id(claim, tmp_path, tiny_model):
    _, go = claim
    go(tmp_path / "a", model=str(tiny_model))
    assert not json.loads((tmp_path / "a" / "run.json").read_text())["model"]["path"].startswith("/")
    assert tiny_model.samefile(read_run(Local(tmp_path / "a")).request.model)
    go(tmp_path / "b", model="owner/name")
    assert read_run(Local(tmp_path / "b")).request.model == "owner/name"


def keep(folder, setup, step):
    """A checkpoint without a file of weights."""
    return files.save(folder, state_of(setup, step), [], keep=0)


@pytest.mark.parametrize("what", ["checkpoint", "result"])
def test_a_run_is_not_begun_twice(claim, tmp_path, what):
    _, go = claim
    setup = go(tmp_path / "run")
    go(tmp_path / "run")  # nothing is lost yet
    if what == "checkpoint":
        keep(tmp_path / "run", setup, 1)
    else:
        (tmp_path / "run" / "lora.safetensors").touch()
    with pytest.raises(PathError, match="already holds a run") as caught:
        go(tmp_path / "run")
    assert caught.value.hint.startswith("add --resume to continue it") and caught.value.exit_code == 5
    go(tmp_path / "run", step=1)


def test_a_start_that_was_killed_starts_again(make, setup_of, tmp_path, monkeypatch):
    """Killed before each change of the disk: the directory is one that the same command takes, and then complete."""
    setup, disk = setup_of(make()), Disk(monkeypatch)
    claim_run(Local(tmp_path / "whole"), setup)
    points = len(disk.seen)
    assert points > 10
    for point in range(points):
        folder = tmp_path / f"run-{point}"
        disk.left = point
        with pytest.raises(Crashed):
            claim_run(Local(folder), setup)
        disk.left = 1 << 30
        claim_run(Local(folder), setup)
        assert state(folder) == state(tmp_path / "whole"), disk.seen[point]


def test_partial_files_beside_others_do_not_make_a_run(claim, tmp_path):
    _, go = claim
    (tmp_path / "full").mkdir()
    for name in (".0123456789abcdef.partial", "manifest.json"):
        (tmp_path / "full" / name).write_text("x")
    with pytest.raises(PathError, match="is not empty and is not a training run"):
        go(tmp_path / "full")
    assert len(list((tmp_path / "full").iterdir())) == 2


def test_a_run_that_goes_on_from_an_older_checkpoint_sets_newer_ones_aside(claim, tmp_path):
    _, go = claim
    setup = go(tmp_path / "run")
    for step in (1, 2):
        keep(tmp_path / "run", setup, step)
    assert claim_run(Local(tmp_path / "run"), setup, step=1) == [
        "a newer checkpoint was set aside: checkpoints/aside-step-000002 (--from aside-step-000002 tells the way back)"]


def draw(run, *steps):
    (run / "samples").mkdir(exist_ok=True)
    for step in steps:
        (run / "samples" / f"step-{step:06d}.png").write_bytes(f"of step {step}".encode())


def drawn(run):
    return {path.name: path.read_bytes() for path in (run / "samples").iterdir()}


def test_pictures_go_where_the_checkpoints_of_their_steps_go(claim, tmp_path):
    """Set aside with newer checkpoints, each time under another name; the user's own files are left alone."""
    _, go = claim
    setup, run = go(tmp_path / "run"), tmp_path / "run"
    told = []
    for _ in range(2):
        for step in (2, 4):
            keep(run, setup, step)
        draw(run, 0, 2, 3, 4)
        (run / "samples" / "mine-step-000009.png").write_bytes(b"mine")
        told.append(claim_run(Local(run), setup, step=2))
    assert told == [[f"a newer checkpoint was set aside: checkpoints/{aside}-step-000004 (--from {aside}-step-000004 "
                     "tells the way back)",
                     f"the sample pictures of later steps were set aside: samples/{aside}-step-000003.png and 1 more"]
                    for aside in ("aside", "aside-2")]
    assert drawn(run) == {
        "step-000000.png": b"of step 0", "step-000002.png": b"of step 2", "mine-step-000009.png": b"mine",
        **{f"{aside}-step-00000{step}.png": f"of step {step}".encode()
           for aside in ("aside", "aside-2") for step in (3, 4)}}


@pytest.mark.parametrize("step", [None, 2])
def test_pictures_of_steps_that_are_made_again_are_forgotten_like_their_events(claim, tmp_path, step):
    """After a run was killed: of the steps since its newest checkpoint, or of all if it has none."""
    _, go = claim
    setup, run = go(tmp_path / "run"), tmp_path / "run"
    if step is not None:
        keep(run, setup, step)
    draw(run, 0, 2, 3)
    assert claim_run(Local(run), setup, step=step) == []
    assert drawn(run) == ({} if step is None else {"step-000000.png": b"of step 0", "step-000002.png": b"of step 2"})


def test_other_people_s_directories_are_left_alone(claim, tmp_path):
    _, go = claim
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(PathError, match="is not empty and is not a training run"):
        go(tmp_path / "full", step=1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(PathError, match="is a file, expected a directory for the run"):
        go(tmp_path / "file")


@pytest.mark.parametrize("place", ["cache/run", "photos/run", "cache", "photos"])
def test_a_run_lies_apart_from_pictures_and_cache(claim, tmp_path, place):
    made, go = claim
    (made.root / "photos").mkdir()
    with pytest.raises(PathError):
        go(made.root / place)
    assert not (made.root / place / "run.json").exists()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(PathError, match=r"is not a training run: it has no run.json") as caught:
        read_run(Local(tmp_path))
    assert caught.value.hint == "name the directory that train run wrote (-o)"
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match=r"file is not a training run: it is not a directory"):
        read_run(Local(tmp_path / "file"))


@pytest.mark.parametrize(("changes", "said"), [
    ({"manifest": ""}, "run.json: manifest is '', expected a path"),
    ({"manifest": 3}, "run.json: manifest is 3, expected "),
    ({"model": {"hub": "a/b", "path": "x"}},
     "run.json: model is {'hub': 'a/b', 'path': 'x'}, expected exactly one of 'path' and 'hub'"),
    ({"model": {"hub": "../../x"}}, "run.json: model.hub is "),
    ({"config": {"lora": {"rank": 0}}}, "run.json: lora.rank is 0, expected "),
    ({"other_encoders": 1}, "run.json: other_encoders is 1, expected true or false"),
], ids=str)
def test_a_damaged_run_json_is_refused(claim, tmp_path, changes, said):
    _, go = claim
    go(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    body = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(body))
    with pytest.raises(CacheError, match=r"run.json: it does not match its own digest"):
        read_run(Local(tmp_path / "run"))
    body.pop("self")
    path.write_bytes(with_checksum(body))
    with pytest.raises(CacheError) as caught:
        read_run(Local(tmp_path / "run"))
    assert said in caught.value.message and caught.value.hint.startswith("remove it; --resume then takes the settings")


def test_a_run_of_version_1_is_read(claim, tmp_path):
    made, go = claim
    setup = go(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({
        "format": "latentry/run", "version": 1, "manifest": "../m.json", "manifest_digest": made.manifest.digest,
        "model": None, "other_encoders": False, "config": as_table(setup.config)}, indent=1))
    run = read_run(Local(tmp_path / "run"))
    assert run.config == setup.config and run.request.model is None and run.request.manifest.samefile(made.path)


def test_records_that_cannot_be_read_are_none(tmp_path):
    assert read_records(tmp_path, 1) is None
    (tmp_path / "samples.bin").mkdir()
    assert read_records(tmp_path, 1) is None
    (tmp_path / "samples.bin").rmdir()
    (tmp_path / "samples.bin").write_bytes(bytes(1 << 20))
    assert read_records(tmp_path, 1) is None  # no memory for more than there can be


def test_a_manifest_that_is_gone(claim, tmp_path):
    made, go = claim
    go(tmp_path / "run")
    run = read_run(Local(tmp_path / "run"))
    require_manifest(run)
    made.path.unlink()
    with pytest.raises(CacheError, match=r"the manifest of .*run is gone: .*m.json is not a file") as caught:
        require_manifest(run)
    assert caught.value.hint == "name it with --manifest"


@pytest.mark.skipif(os.name != "posix", reason="no modes")
def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "run")
    monkeypatch.setattr(rundir.os, "access", lambda path, mode: False)  # also for a superuser
    with pytest.raises(PathError, match=r"run .*run cannot be written: no permission to write in ") as caught:
        check_writable(tmp_path / "new" / "run")
    assert caught.value.hint == "name another directory with -o"


def test_two_programs_never_train_in_one_directory(claim, tmp_path):
    _, go = claim
    setup = go(tmp_path / "run")
    with lock_run(Local(tmp_path / "run"), setup.manifest):
        with pytest.raises(PathError, match=r"another program is training in .*run") as caught, \
                lock_run(Local(tmp_path / "run"), setup.manifest):
            pass
        assert caught.value.hint.endswith(f"name another directory: -o {tmp_path / 'run-2'}")
    with lock_run(Local(tmp_path / "run"), setup.manifest):  # it is free again
        pass


def test_a_directory_that_may_not_become_a_run_is_not_made(claim, tmp_path):
    made, go = claim
    setup = go(tmp_path / "run")
    inside = Local(made.root / "cache" / "run")
    with pytest.raises(PathError, match="lies inside cache"), lock_run(inside, setup.manifest):
        pass
    assert not (made.root / "cache" / "run").exists()


def test_where_the_disk_has_no_locks_nobody_is_kept_out(claim, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    _, go = claim
    setup = go(tmp_path / "run")

    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock_run(Local(tmp_path / "run"), setup.manifest), lock_run(Local(tmp_path / "run"), setup.manifest):
        pass


def test_a_manifest_on_another_drive_is_remembered_as_it_stands(claim, tmp_path, monkeypatch):
    """As on Windows, where nothing relative leads from C: to D:."""
    made, go = claim

    def no_way(*args):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(rundir.os.path, "relpath", no_way)
    go(tmp_path / "run")
    assert read_run(Local(tmp_path / "run")).request.manifest == made.path.resolve()


def test_a_run_lies_in_no_cache_not_even_another_one(claim, tmp_path):
    _, go = claim
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latentry.json").touch()
    with pytest.raises(PathError, match=r"lies in the cache .*other$") as caught:
        go(tmp_path / "other" / "run", steps=3)
    assert caught.value.hint == "name a directory outside with -o"


def test_a_run_lies_in_no_other_run(claim, train, tmp_path):
    made, go = claim
    go(tmp_path / "run", steps=3)
    for place in ("run/new", "run/checkpoints/new"):
        with pytest.raises(PathError) as caught:
            go(tmp_path / place, steps=3)
        assert caught.value.message == f"run {tmp_path / place} would lie in the run {tmp_path / 'run'}"
        assert caught.value.hint == (f"name a directory outside: -o {tmp_path / 'run-2'}; --resume -o "
                                     f"{tmp_path / 'run'} continues that run")
        for command in ("check", "run"):
            result = train(command, made.path, "-o", tmp_path / place, "--steps", 3)
            assert result.code == 5 and f"error: {caught.value.message}\n" in result.err
        assert not (tmp_path / place).exists()
    go(tmp_path / "run", step=3, steps=3)  # itself


def test_a_run_in_another_one_that_was_begun_earlier_goes_on(claim, tmp_path):
    _, go = claim
    go(tmp_path / "run" / "new", steps=3)
    go(tmp_path / "run-2", steps=3)
    (tmp_path / "run-2" / "run.json").rename(tmp_path / "run" / "run.json")
    go(tmp_path / "run" / "new", step=3, steps=3)


def test_the_run_json_of_another_program_makes_no_run(claim, tmp_path):
    _, go = claim
    (tmp_path / "run.json").write_text('{"name": "mine"}')
    go(tmp_path / "run", steps=3)


@pytest.mark.parametrize(("settings", "done", "kept", "wanted"), [
    ({"steps": 100, "checkpoint": {"every": 10, "keep": 3}}, 0, 0, 4),
    ({"steps": 100, "checkpoint": {"every": 10, "keep": 3}}, 30, 3, 1),
    ({"steps": 100, "checkpoint": {"every": 0, "keep": 3}}, 0, 0, 1),
    ({"steps": 100, "checkpoint": {"every": 10, "keep": 0}}, 0, 0, 10),
    ({"steps": 100, "checkpoint": {"every": 10, "keep": 0}, "ema": {"decay": 0.9}}, 75, 7, 3),
], ids=["new", "resumed", "last", "all", "rest"])
def test_room_for_the_checkpoints_to_come(make, setup_of, tmp_path, monkeypatch, settings, done, kept, wanted):
    setup = setup_of(make(), **settings)
    for step in range(1, kept + 1):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    size = rundir.checkpoint_bytes(setup)
    parameters = len(trained_shapes(read_weights(setup.model.path, setup.family), setup.config, PRESETS))
    assert size == setup.model.numbers * (16 if "ema" in settings else 12) + 4 * parameters  # with each one's steps
    needed = wanted * size + 4 * setup.model.numbers
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    OnDisk(Local(tmp_path / "run")).check_space(setup, done)
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(PathError) as caught:
        OnDisk(Local(tmp_path / "run")).check_space(setup, done)
    plural = "checkpoint" if wanted == 1 else "checkpoints"
    assert re.search(r" has \S+ \S+ of free space, expected \S+ \S+ for \d+ checkpoints? of about \S+ \S+ and the "
                     "result", caught.value.message)
    assert f" for {wanted} {plural} of about " in caught.value.message
    assert caught.value.hint == ("free some space, name another directory with -o, or keep fewer checkpoints: "
                                 "--set checkpoint.keep=1")
