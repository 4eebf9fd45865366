"""A run's directory: claimed once, resumed when it fits, never inside pictures or cache; it moves with its manifest."""

from __future__ import annotations

import errno
import json
import shutil

import pytest

from prep.errors import CacheError, ConfigError, PathError
from train.config.load import as_table
from train.runs import checkpoint
from train.runs import directory as rundir
from train.runs.checkpoint import State
from train.runs.directory import claim_run, lock_run, read_run
from train.setup import RunRequest


@pytest.fixture
def claim(make, setup_of):
    """What was made, and `claim(folder, resume=…, **settings)`."""
    made = make()

    def go(folder, *, resume=False, model=None, **settings):
        setup = setup_of(made, **settings)
        claim_run(folder, setup, RunRequest(manifest=made.path, model=model), resume=resume)
        return setup

    return made, go


def test_a_claimed_run_is_read_back(claim, tmp_path):
    made, go = claim
    setup = go(tmp_path / "run", steps=3)
    run = read_run(tmp_path / "run")
    assert run.config == setup.config and run.asked.manifest.resolve() == made.path.resolve()
    assert run.asked.model is None and not run.asked.other_encoders


def test_run_and_manifest_move_together(claim, tmp_path_factory):
    made, go = claim
    go(made.root / "run")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "all"
    shutil.copytree(made.root, elsewhere)
    assert read_run(elsewhere / "run").asked.manifest.samefile(elsewhere / "m.json")


def test_a_model_of_one_s_own_is_remembered_relative_or_by_its_hub_id(claim, tmp_path, tiny_model):
    _, go = claim
    go(tmp_path / "a", model=str(tiny_model))
    assert not json.loads((tmp_path / "a" / "run.json").read_text())["model"]["path"].startswith("/")
    assert tiny_model.samefile(read_run(tmp_path / "a").asked.model)
    go(tmp_path / "b", model="owner/name")
    assert read_run(tmp_path / "b").asked.model == "owner/name"


def test_a_run_is_not_begun_twice(claim, tmp_path):
    _, go = claim
    go(tmp_path / "run")
    with pytest.raises(PathError, match="holds a run already") as caught:
        go(tmp_path / "run")
    assert caught.value.hint.startswith("--resume goes on with it") and caught.value.exit_code == 5
    go(tmp_path / "run", resume=True)


def test_other_people_s_directories_are_left_alone(claim, tmp_path):
    _, go = claim
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(PathError, match="is not empty and is no run of train"):
        go(tmp_path / "full", resume=True)
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


def test_a_checkpoint_that_does_not_fit_is_told_before_run_json_changes(claim, tmp_path):
    made, go = claim
    setup = go(tmp_path / "run", steps=4)
    before = (tmp_path / "run" / "run.json").read_bytes()
    table = as_table(setup.config)
    checkpoint.save(tmp_path / "run", State(step=2, manifest=made.manifest.digest, config=table), [], 0)
    with pytest.raises(ConfigError, match="batch_size is 2, and the checkpoint was trained with 4"):
        go(tmp_path / "run", resume=True, batch_size=2)
    checkpoint.save(tmp_path / "run", State(step=3, manifest="0" * 64, config=table), [], 0)
    with pytest.raises(CacheError, match="made from manifest 000000000000"):
        go(tmp_path / "run", resume=True, steps=4)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(PathError, match=r"is no run of train: cannot read run.json") as caught:
        read_run(tmp_path)
    assert "-o" in caught.value.hint
    (tmp_path / "run.json").write_text('{"format": "latentry/run", "version": 2}')
    with pytest.raises(PathError, match="version 2, this program reads 'latentry/run' version 1"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(PathError, match="is no run of train"):
        read_run(tmp_path)


def test_two_programs_never_train_in_one_directory(claim, tmp_path):
    _, go = claim
    setup = go(tmp_path / "run")
    with lock_run(tmp_path / "run", setup):
        with pytest.raises(PathError, match=r"another program is training in .*run") as caught, \
                lock_run(tmp_path / "run", setup):
            pass
        assert caught.value.hint.endswith("name another directory with -o, like run-2")
    with lock_run(tmp_path / "run", setup):  # it is free again
        pass


def test_a_directory_that_may_not_become_a_run_is_not_made(claim, tmp_path):
    made, go = claim
    setup = go(tmp_path / "run")
    with pytest.raises(PathError, match="lies inside cache"), lock_run(made.root / "cache" / "run", setup):
        pass
    assert not (made.root / "cache" / "run").exists()


def test_where_the_disk_has_no_locks_nobody_is_kept_out(claim, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    _, go = claim
    setup = go(tmp_path / "run")

    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock_run(tmp_path / "run", setup), lock_run(tmp_path / "run", setup):
        pass


def test_a_manifest_on_another_drive_is_remembered_as_it_stands(claim, tmp_path, monkeypatch):
    """As on Windows, where nothing relative leads from C: to D:."""
    made, go = claim

    def no_way(*args):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(rundir.os.path, "relpath", no_way)
    go(tmp_path / "run")
    assert read_run(tmp_path / "run").asked.manifest == made.path.resolve()


def test_a_run_lies_in_no_cache_not_even_another_one(claim, tmp_path):
    _, go = claim
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latentry.json").touch()
    with pytest.raises(PathError, match=r"lies in the cache .*other$") as caught:
        go(tmp_path / "other" / "run", steps=3)
    assert caught.value.hint == "name a directory outside with -o"


def test_a_run_that_is_further_than_the_settings_end(claim, tmp_path):
    _, go = claim
    setup = go(tmp_path / "run", steps=9)
    checkpoint.save(tmp_path / "run", State(step=7, manifest=setup.manifest.digest, config=as_table(setup.config)), [],
                    keep=0)
    with pytest.raises(ConfigError) as caught:
        go(tmp_path / "run", resume=True, steps=5)
    assert caught.value.message == f"{tmp_path / 'run'} is at step 7 already, and the settings end at step 5"
    assert caught.value.hint == "--steps 7 or more, or another RUN with -o"
