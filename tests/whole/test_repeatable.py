"""A command that refuses an output which is there already can be repeated after it failed, however late."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from small_manifest import write_small

OUTPUTS = {
    "prep pack": ("manifest.json", "-o", "set.tar"),
    "prep init": ("photos", "-o", "recipe.toml"),
    "prep init --from": ("other.toml", "-o", "recipe.toml"),
    "prep export": ("manifest.json", "--to", "webdataset", "-o", "exported"),
    "train init": ("-o", "train.toml"),
}


def fails_at(monkeypatch, number):
    """Lets the `number`-th request to sync anything to the disk fail, from 1; the list that it returns counts them."""
    real, asked = os.fsync, []

    def fsync(descriptor):
        asked.append(descriptor)
        if len(asked) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return asked


@pytest.mark.parametrize("call", OUTPUTS)
def test_a_command_that_failed_at_its_end_can_be_repeated(prep, train, photos, tmp_path, monkeypatch, call):
    write_small(tmp_path)
    (tmp_path / "other.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{photos}'")
    monkeypatch.chdir(tmp_path)
    program, *words = call.split()
    args, output = (*words, *OUTPUTS[call]), tmp_path / OUTPUTS[call][-1]
    command = train if program == "train" else prep

    def fresh():
        shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        asked = fails_at(patch, 0)
        assert command(*args).code == 0
    assert asked, "it syncs what it writes"
    for number in range(len(asked), max(0, len(asked) - 4), -1):
        fresh()
        with monkeypatch.context() as patch:
            fails_at(patch, number)
            failed = command(*args)
        assert failed.code in (5, 7) and "Input/output error" in failed.err
        assert command(*args).code == 0


def test_a_demo_that_failed_can_be_repeated(prep, tmp_path, monkeypatch):
    def full(root):
        raise OSError(errno.ENOSPC, "No space left on device", str(root))

    with monkeypatch.context() as patch:
        patch.setattr("prep.demo.shipped.write_model", full)
        assert prep("demo", tmp_path / "demo").code == 7
    assert not list((tmp_path / "demo").iterdir())
    assert prep("demo", tmp_path / "demo").code == 0
