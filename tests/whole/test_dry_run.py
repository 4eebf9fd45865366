"""What only looks writes nothing at all: not into the cache, not beside pictures, not into the user's caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tarred import member, tar_of
from vision_models import build

from prep.cli.main import app
from prep.fs import memo


def snapshot(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below `root`: kind and mode, inode, time of the last change, content."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_ino, status.st_mtime_ns, data)
    return found


@pytest.fixture
def home(tmp_path, monkeypatch):
    """All places that a command could write to, in one tree; files are as if at rest."""
    root = tmp_path / "home"
    root.mkdir()
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.setenv("HF_HOME", str(root / "hub"))
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(root / "caches"))
    monkeypatch.chdir(root)
    monkeypatch.setattr(memo, "REST_NS", 0)
    return root


@pytest.fixture
def places(home, photos, tiny_model):
    """Pictures, the same in a tar, a model, and one that embeds pictures."""
    shutil.move(photos, home / "photos")
    shutil.copytree(tiny_model, home / "model")
    build(home / "seeing", "siglip")
    files = sorted(path for path in (home / "photos").iterdir())
    (home / "p.tar").write_bytes(tar_of([member(path.name, path.read_bytes()) for path in files]))
    return home


def encode(source: str, *options: object) -> list[object]:
    return ["encode", source, "--model", "model", "--cache", "cache", "-o", "m.json", "--resolution", 96, "--step", 16,
            *options]


def commands_with(option: str) -> set[str]:
    import typer

    group = typer.main.get_command(app)
    return {name for name, command in group.commands.items()
            if any(option in parameter.opts for parameter in command.params)}


LOOKS = {
    "encode": [encode("photos", "--dry-run"), encode("p.tar", "--dry-run"), encode("photos", "--dry-run", "--rehash"),
               encode("photos", "--dry-run", "--mask", "sidecar", "--json")],
    "embed": [["embed", "photos", "--model", "seeing", "--cache", "cache", "--dry-run"],
              ["embed", "p.tar", "--model", "seeing", "--cache", "cache", "--dry-run", "--rehash", "--json"]],
    "compact": [["compact", "cache", "--dry-run"]],
    "clean": [["clean", "--dry-run"], ["clean", "--dry-run", "--json"]],
    "gc": [["gc", "cache", "--keep", "m.json"], ["gc", "cache", "--keep", "m.json", "--older-than", "0", "--json"]],
}


def test_every_command_that_can_only_look_is_tested_here():
    assert commands_with("--dry-run") | commands_with("--yes") == {*LOOKS, "caption"}  # tests/captioning has that


@pytest.mark.parametrize("state", ["nothing", pytest.param("encoded", marks=pytest.mark.slow), "damaged"])
def test_nothing_is_written(prep, places, state):
    if state != "nothing":
        for source, output in (("photos", "m.json"), ("p.tar", "tar.json")):
            words = encode(source)
            words[words.index("m.json")] = output
            assert prep(*words).code == 0
        (places / "photos" / "3.txt").write_text("another caption")
    if state == "damaged":
        for path in memo.memory_folder().iterdir():
            path.write_bytes(b"SQLite format 3\0 and then nothing of that kind")
        (places / "cache" / "lock").unlink()
        (places / "cache" / "tmp" / "leftover").mkdir(parents=True)
    before = snapshot(places)
    for name, commands in LOOKS.items():
        for words in commands if name not in ("compact", "gc") or state != "nothing" else ():
            result = prep(*words)
            assert result.code == 0, result.err
            assert snapshot(places) == before, words


def test_a_dry_run_downloads_nothing(prep, places, monkeypatch):
    asked = []

    def snapshot_download(name, *, local_files_only, **_):
        asked.append(local_files_only)
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    words = encode("photos", "--dry-run", "--download")
    words[words.index("model")] = "owner/name"
    assert prep(*words).code == 6 and asked == [True]
