"""A cache that somebody else can write to says nothing about one's own files, and names no file to be deleted."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from pathlib import Path
from zlib import crc32

import pytest

from prep.fs import memo
from prep.fs.lock import lock_directory


@pytest.fixture
def words(photos, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)
    return ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
            "--resolution", "96", "--step", "16", "--json"]


def facts_of_old(cache: Path, captions: dict[Path, str]) -> Path:
    """`facts.sqlite` as earlier versions left it in a cache, which says these captions of files."""
    path = cache / "facts.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE facts (name BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
    connection.execute("PRAGMA user_version = 3")
    for file, caption in captions.items():
        status = file.stat()
        name = b"caption:" + struct.pack("<QQqqq", status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
                                         status.st_ctime_ns)
        value = json.dumps({"captions": [caption]}).encode()
        connection.execute("INSERT INTO facts VALUES (?, ?)",
                           (name, struct.pack("<I", crc32(value, crc32(name))) + value))
    connection.commit()
    connection.close()
    return path


def hot_journal(database: Path, victim: Path) -> Path:
    """A rollback journal that names `victim` as its super-journal, which SQLite deletes when it rolls back."""
    page = struct.unpack(">H", database.read_bytes()[16:18])[0]
    name, magic = os.fsencode(victim), bytes.fromhex("d9d505f920a163d7")
    head = magic + struct.pack(">IIIII", 0, 0, database.stat().st_size // page, 512, page)
    body = struct.pack(">I", 0x40000000 // page + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    journal = database.with_name(database.name + "-journal")
    journal.write_bytes(head.ljust(512, b"\0") + body)
    return journal


@pytest.mark.parametrize("options", [
    (), *(pytest.param((option,), marks=pytest.mark.slow) for option in ("--dry-run", "--rehash"))])
def test_old_facts_in_a_cache_are_never_opened(prep, words, tmp_path, options):
    """The caption stays one's own, and no file outside of the cache is deleted."""
    assert prep(*words).code == 0
    victim = tmp_path / "precious.txt"
    victim.write_text("precious")
    old = facts_of_old(tmp_path / "cache", {})
    journal = hot_journal(old, victim)
    before = old.read_bytes(), journal.read_bytes()
    with lock_directory(tmp_path / "cache", exclusive=False):  # else what is never opened would be removed
        result = prep(*words, *options)
    assert result.code == 0 and set(result.json["encoded"].values()) == {0}
    assert victim.read_text() == "precious"
    assert (old.read_bytes(), journal.read_bytes()) == before


@pytest.mark.slow
@pytest.mark.parametrize("cleaner", ["encode", "gc"])
def test_old_facts_are_removed_unopened(prep, words, tmp_path, cleaner):
    assert prep(*words).code == 0
    victim = tmp_path / "precious.txt"
    victim.write_text("precious")
    old = facts_of_old(tmp_path / "cache", {})
    (tmp_path / "cache" / "lookup.bin").write_bytes(b"latentry/lookup")  # of earlier versions, too
    size = old.stat().st_size + hot_journal(old, victim).stat().st_size + 15
    gc = ["gc", tmp_path / "cache", "--keep", tmp_path / "m.json"]
    seen = prep(*gc, "--json").json
    assert (seen["removed"]["staging"], seen["sizes"]["staging"]) == (3, size) and old.exists()
    assert prep(*(words if cleaner == "encode" else [*gc, "--yes"])).code == 0
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert not left & {"facts.sqlite", "facts.sqlite-journal", "lookup.bin"} and victim.exists()


def test_the_journal_of_this_test_deletes_a_file_when_sqlite_opens_it(tmp_path):
    victim = tmp_path / "precious.txt"
    victim.write_text("precious")
    old = facts_of_old(tmp_path, {})
    hot_journal(old, victim)
    connection = sqlite3.connect(old)
    connection.execute("SELECT count(*) FROM facts").fetchall()
    connection.close()
    assert not victim.exists()


def test_others_do_not_say_what_my_captions_are(prep, words, photos, tmp_path):
    assert prep(*words).code == 0
    mine = photos / "3.txt"
    mine.write_text("my own caption")
    facts_of_old(tmp_path / "cache", {mine: "what somebody else wants to be learned"})
    assert prep(*words).json["encoded"]["text"] == 1
    shown = prep("inspect", tmp_path / "m.json", "--sample", "3.png").out
    assert "my own caption" in shown and "somebody else" not in shown


def test_nothing_about_files_is_kept_in_a_cache(prep, words, tmp_path):
    """What is remembered lies with the user: for each cache a file of its own."""
    assert prep(*words).code == 0
    assert not list((tmp_path / "cache").rglob("*sqlite*"))
    assert len(list(memo.memory_folder().glob("files-*.sqlite"))) == 1
    words[words.index(tmp_path / "cache")] = tmp_path / "other"
    assert prep(*words).code == 0
    assert len(list(memo.memory_folder().glob("files-*.sqlite"))) == 2
