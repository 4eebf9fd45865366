"""Remembered file facts: trusted only where the stamps can be, and disposable."""

from __future__ import annotations

import os
import sqlite3
import struct
import time

import pytest

from prep.fs import memo as facts
from prep.fs.blob import Blob
from prep.fs.memo import Memo


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def store(tmp_path):
    return tmp_path / "facts.sqlite"


def ask(known: Memo, file) -> tuple[str, int]:
    """What is said of the file, and how many files had to be read."""
    value = known.get_or_read(Blob(file=str(file)), "text", lambda data: {"text": data.decode()})
    return value["text"], known.read


def test_an_unchanged_file_is_not_read_again(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    assert ask(first, file) == ("one", 1)
    first.save()
    assert ask(Memo(store), file) == ("one", 0)
    assert ask(Memo(store, trust=False), file) == ("one", 1)
    file.rename(file.with_name("b"))
    assert ask(Memo(store), file.with_name("b"))[0] == "one"


def test_a_file_written_just_now_is_not_trusted(file, store):
    first = Memo(store)
    ask(first, file)
    first.save()
    assert ask(Memo(store), file) == ("one", 1)


def test_a_slow_read_does_not_put_a_file_to_rest(file, store, monkeypatch):
    """Written once more in the same tick of a coarse clock, while it is being read: then its stamp says nothing."""
    now = file.stat().st_ctime_ns
    clock = iter([now + 10**9, now + 10**11])  # as the reading begins, and whenever it is asked again
    monkeypatch.setattr(facts.time, "time_ns", lambda: next(clock, now + 10**11))
    first = Memo(store)
    ask(first, file)
    first.save()
    assert ask(Memo(store), file) == ("one", 1)


def test_same_size_and_mtime_but_other_bytes(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert ask(Memo(store), file) == ("two", 1)


def test_where_ctime_is_creation_nothing_is_remembered(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    monkeypatch.setattr(facts, "ctime_is_reliable", lambda: False)
    first = Memo(store)
    ask(first, file)
    first.save()
    assert not store.exists()
    assert ask(Memo(store), file) == ("one", 1)


def test_kinds_are_apart(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    known = Memo(store)
    ask(known, file)
    known.save()
    assert Memo(store).get_or_read(Blob(file=str(file)), "size", lambda data: {"size": len(data)}) == {"size": 3}


@pytest.mark.parametrize("damage", [b"", b"not a database at all, but long enough to be looked at" * 40])
def test_a_damaged_table_is_made_again(file, store, monkeypatch, damage):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    store.write_bytes(damage)
    first = Memo(store)
    assert ask(first, file) == ("one", 1)
    first.save()
    assert ask(Memo(store), file) == ("one", 0)


def test_a_table_that_another_process_has_locked_stays_and_is_not_waited_for(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    before = store.read_bytes()
    other = sqlite3.connect(store, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    begun = time.monotonic()
    second = Memo(store)
    assert ask(second, file) == ("one", 1)
    second.save()
    assert time.monotonic() - begun < 5 and store.read_bytes() == before
    other.execute("ROLLBACK")
    other.close()
    assert ask(Memo(store), file) == ("one", 0)


@pytest.mark.parametrize("message", ["attempt to write a readonly database", "unable to open database file",
                                     "disk I/O error"])
def test_what_is_wrong_with_the_place_and_not_the_table_removes_nothing(file, store, monkeypatch, message):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    before = store.read_bytes()

    def refuse(*_, **__):
        raise sqlite3.OperationalError(message)

    with monkeypatch.context() as patch:
        patch.setattr(facts.sqlite3, "connect", refuse)
        second = Memo(store)
        assert ask(second, file) == ("one", 1)
        second.save()
    assert store.read_bytes() == before


def test_a_damaged_table_that_cannot_be_removed_is_no_fault(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    store.write_bytes(b"not a database at all" * 100)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    known = Memo(store)
    assert ask(known, file) == ("one", 1)
    known.save()


def test_a_table_damaged_in_the_middle_is_made_again(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    data = store.read_bytes()
    store.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    second = Memo(store)
    assert ask(second, file) == ("one", 1)
    second.save()
    assert ask(Memo(store), file) == ("one", 0)


def test_a_huge_file_is_not_read(file, store):
    with file.open("wb") as stream:
        stream.truncate(1 << 41)
    with pytest.raises(OSError, match="it has 2199023255552 bytes"):
        ask(Memo(store), file)


def test_another_version_is_thrown_away(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    connection = sqlite3.connect(store)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert ask(Memo(store), file) == ("one", 1)


def test_without_a_store_nothing_is_kept(file):
    known = Memo(None)
    assert ask(known, file) == ("one", 1)
    known.save()


def test_an_unwritable_store_is_no_fault(file, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    known = Memo(tmp_path / "no" / "such" / "directory" / "facts.sqlite")
    assert ask(known, file) == ("one", 1)
    known.save()


def test_stamps_of_more_bits_than_are_packed(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    monkeypatch.setattr("prep.fs.stamps.STAMP", struct.Struct("<BBBBB"))
    first = Memo(store)
    assert ask(first, file) == ("one", 1)
    first.save()
    assert ask(Memo(store), file) == ("one", 0)
    file.write_bytes(b"another")
    assert ask(Memo(store), file) == ("another", 1)


def test_two_ranges_of_a_file_are_two_things(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    file.write_bytes(b"one two three")
    ranges = [Blob(file=str(file)), *(Blob(file=str(file), offset=start, length=3) for start in (0, 4)),
              Blob(file=str(file), offset=4)]
    first = Memo(store)
    wanted = [first.get_or_read(blob, "text", lambda data: {"text": data.decode()})["text"] for blob in ranges]
    assert wanted == ["one two three", "one", "two", "two three"]
    first.save()
    again = Memo(store)
    assert [again.get(blob, "text") for blob in ranges] == [{"text": words} for words in wanted]


def test_what_is_noted_by_digest(store):
    known = Memo(store)
    assert known.get_digest("mean", "ab" * 32) is None
    known.put_digest("mean", "ab" * 32, b"")
    known.put_digest("mean", "cd" * 32, b"value")
    known.save()
    again = Memo(store)
    assert (again.get_digest("mean", "ab" * 32), again.get_digest("mean", "cd" * 32)) == (b"", b"value")
    assert again.get_digest("means", "ab" * 32) is None


def test_what_is_remembered_is_asked_for_without_reading(file, store, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    first = Memo(store)
    assert first.get(Blob(file=str(file)), "text") is None
    ask(first, file)
    first.save()
    assert Memo(store).get(Blob(file=str(file)), "text") == {"text": "one"}
    file.unlink()
    with pytest.raises(FileNotFoundError):
        Memo(store).get(Blob(file=str(file)), "text")


# ---- flipped bits ----------------------------------------------------------------------------------------------------


class Flips:
    """A table of facts on files and shards; any bit of it can be flipped, and what follows is checked."""

    def __init__(self, root) -> None:
        self.store = root / "facts.sqlite"
        self.files = {root / name: name for name in ("one", "two", "three")}
        for path, name in self.files.items():
            path.write_text(name)
        self.ask(made := Memo(self.store))
        made.put_digest("mean", "ab" * 32, b"0123456789abcdef")
        made.save()
        self.whole = self.store.read_bytes()
        self.there = set(root.iterdir())

    def ask(self, known: Memo) -> int:
        """How many files had to be read; what is said of each must be true."""
        for path, name in self.files.items():
            assert known.get_or_read(Blob(file=str(path)), "text",
                                     lambda data: {"text": data.decode()}) == {"text": name}
        return known.read

    def check(self, bit: int) -> int:
        """With this bit flipped: nothing false, and after one more run everything is remembered again."""
        spoiled = bytearray(self.whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        self.store.write_bytes(spoiled)
        again = Memo(self.store)
        noted = again.get_digest("mean", "ab" * 32)
        assert noted in (None, b"0123456789abcdef")
        lost = self.ask(again) + (noted is None)
        if lost:
            again.put_digest("mean", "ab" * 32, b"0123456789abcdef")
            again.save()
            mended = Memo(self.store)
            assert self.ask(mended) == 0, bit
            assert mended.get_digest("mean", "ab" * 32) == b"0123456789abcdef"
        assert set(self.store.parent.iterdir()) == self.there
        return lost


@pytest.fixture
def flips(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "SETTLE_NS", 0)
    return Flips(tmp_path)


def test_no_flipped_bit_of_a_record_says_anything_false(flips):
    """One bit of every byte of the records that is not zero; most of them are noticed."""
    used = [place for place in range(4096, len(flips.whole)) if flips.whole[place]]
    assert len(used) > 200
    lost = sum(flips.check(8 * place + place % 8) > 0 for place in used)
    assert lost > len(used) * 0.9


def test_no_flipped_bit_of_the_head_is_an_error_or_stays(flips):
    for bit in range(0, 8 * 112, 7):
        flips.check(bit)


@pytest.mark.slow
def test_no_flipped_bit_anywhere_says_anything_false(flips):
    """Every bit of every byte that is not zero, and of each 64th of the others."""
    for place in (place for place, byte in enumerate(flips.whole) if byte or not place % 64):
        for bit in range(8):
            flips.check(8 * place + bit)
