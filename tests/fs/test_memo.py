"""Remembered file facts: trusted only where the stamps can be, and disposable."""

from __future__ import annotations

import os
import sqlite3
import struct
import time

import pytest

from prep.fs import memo as facts
from prep.fs.blob import Blob
from prep.fs.memo import Memo, memo_path, memory_folder


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def store(tmp_path):
    return tmp_path / "files.sqlite"


def ask(known: Memo, file) -> tuple[str, int]:
    """What is said of the file, and how many files had to be read."""
    value = known.get_or_read(Blob(file=str(file)), "text", lambda data: {"text": data.decode()})
    return value["text"], known.read


def test_an_unchanged_file_is_not_read_again(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
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
    clock = iter([now + 10**9, now + 10**12])  # as the reading begins, and whenever it is asked again
    monkeypatch.setattr(facts.time, "time_ns", lambda: next(clock, now + 10**12))
    first = Memo(store)
    ask(first, file)
    first.save()
    assert ask(Memo(store), file) == ("one", 1)


def test_a_stamp_that_stands_still_is_not_trusted_within_a_minute(file, store, monkeypatch):
    """As the one of a file does that is written through a mapping, until its pages are written back."""
    now = 10**18
    monkeypatch.setattr(facts, "blob_stamp", lambda blob: (b"the same", now))
    for seconds, text in ((3, "one"), (35, "two"), (61, "new")):
        file.write_text(text)
        monkeypatch.setattr(facts.time, "time_ns", lambda seconds=seconds: now + seconds * 10**9)
        known = Memo(store)
        assert ask(known, file) == (text, 1)
        known.close()
    assert ask(Memo(store), file) == ("new", 0)


def test_same_size_and_mtime_but_other_bytes(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    first = Memo(store)
    ask(first, file)
    first.save()
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert ask(Memo(store), file) == ("two", 1)


def test_where_ctime_is_creation_nothing_is_remembered(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setattr(facts, "ctime_is_reliable", lambda: False)
    first = Memo(store)
    ask(first, file)
    first.save()
    assert not store.exists()
    assert ask(Memo(store), file) == ("one", 1)


def test_kinds_are_apart(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    known = Memo(store)
    ask(known, file)
    known.save()
    assert Memo(store).get_or_read(Blob(file=str(file)), "size", lambda data: {"size": len(data)}) == {"size": 3}


@pytest.mark.parametrize("damage", [b"", b"not a database at all, but long enough to be looked at" * 40])
def test_a_damaged_table_is_made_again(file, store, monkeypatch, damage):
    monkeypatch.setattr(facts, "REST_NS", 0)
    store.write_bytes(damage)
    first = Memo(store)
    assert ask(first, file) == ("one", 1)
    first.save()
    assert ask(Memo(store), file) == ("one", 0)


def test_a_table_that_another_process_has_locked_stays_and_is_not_waited_for(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
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
    monkeypatch.setattr(facts, "REST_NS", 0)
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
    monkeypatch.setattr(facts, "REST_NS", 0)
    store.write_bytes(b"not a database at all" * 100)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    known = Memo(store)
    assert ask(known, file) == ("one", 1)
    known.save()


def test_a_table_damaged_in_the_middle_is_made_again(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
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


def test_another_version_or_scope_starts_empty_and_leaves_the_first_alone(file, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    places = [memo_path("files", "1"), memo_path("files", "2"), memo_path("scan", "1"),
              memo_path("files", "1", scope="/a"), memo_path("files", "1", scope="/b")]
    monkeypatch.setattr(facts, "FORMAT", 99)
    places.append(memo_path("files", "1"))
    for place in places:
        known = Memo(place)
        assert ask(known, file) == ("one", 1)
        known.save()
    assert [ask(Memo(place), file) for place in places] == [("one", 0)] * len(places)


def test_without_a_store_nothing_is_kept(file):
    known = Memo(None)
    assert ask(known, file) == ("one", 1)
    known.save()


def test_an_unwritable_store_is_no_fault(file, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    (tmp_path / "file").touch()
    known = Memo(tmp_path / "file" / "directory" / "files.sqlite")
    assert ask(known, file) == ("one", 1)
    known.save()
    assert (tmp_path / "file").read_bytes() == b""


def test_stamps_of_more_bits_than_are_packed(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setattr("prep.fs.stamps.STAMP", struct.Struct("<BBBBB"))
    first = Memo(store)
    assert ask(first, file) == ("one", 1)
    first.save()
    assert ask(Memo(store), file) == ("one", 0)
    file.write_bytes(b"another")
    assert ask(Memo(store), file) == ("another", 1)


def test_two_ranges_of_a_file_are_two_things(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
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
    monkeypatch.setattr(facts, "REST_NS", 0)
    first = Memo(store)
    assert first.get(Blob(file=str(file)), "text") is None
    ask(first, file)
    first.save()
    assert Memo(store).get(Blob(file=str(file)), "text") == {"text": "one"}
    file.unlink()
    with pytest.raises(FileNotFoundError):
        Memo(store).get(Blob(file=str(file)), "text")


# ---- where it lies, and how much of it -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    return memory_folder()


def opened(place, *, preload: bool = False, **options) -> Memo:
    known = Memo(place, **options)
    if preload:
        known.preload()
    return known


def remember(file, place, **options) -> tuple[str, int]:
    """What is said of the file, and how many files had to be read for it."""
    known = opened(place, **options)
    said = ask(known, file)
    known.close()
    return said


@pytest.mark.parametrize("preload", [True, False])
def test_the_folder_is_closed_to_others(file, folder, preload):
    place = memo_path("files", "1")
    assert remember(file, place, preload=preload) == ("one", 1)
    assert folder.stat().st_mode & 0o7777 == 0o700
    folder.chmod(0o755)  # nobody could have written there
    assert remember(file, place, preload=preload) == ("one", 0)
    file.write_text("two")
    assert remember(file, place, preload=preload) == ("two", 1)
    assert folder.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o722])
def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(file, folder, monkeypatch, mode):
    place = memo_path("files", "1")
    remember(file, place)
    before = place.read_bytes()
    folder.chmod(mode)
    with monkeypatch.context() as patch:
        patch.setattr(facts.sqlite3, "connect", lambda *_, **__: pytest.fail("it was opened"))
        for preload in (True, False):
            assert remember(file, place, preload=preload) == ("one", 1)
    assert place.read_bytes() == before and folder.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_folder_of_another_user_is_neither_read_nor_written(file, folder, monkeypatch):
    place = memo_path("files", "1")
    remember(file, place)
    before, mine = place.read_bytes(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert remember(file, place) == ("one", 1)
    assert place.read_bytes() == before


def test_a_folder_that_is_a_link_is_not_used(file, folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    assert remember(file, memo_path("files", "1")) == ("one", 1)
    assert list(elsewhere.iterdir()) == []


def test_a_file_that_is_a_link_is_not_used(file, folder, tmp_path):
    place = memo_path("files", "1")
    remember(file, place)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    file.write_text("two")
    assert remember(file, place) == remember(file, place) == ("two", 1)
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_without_owners_every_folder_is_the_users(file, folder, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "geteuid", raising=False)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert remember(file, memo_path("files", "1")) == ("one", 1)
    assert remember(file, memo_path("files", "1")) == ("one", 0)


def test_in_a_dry_run_nothing_is_written(file, folder):
    place = memo_path("files", "1")
    with facts.dry_run():
        assert remember(file, place) == ("one", 1)
        assert not folder.parent.exists()
    assert remember(file, place) == ("one", 1)
    place.write_bytes(b"damaged")
    with facts.dry_run():
        assert remember(file, place) == ("one", 1)
        assert place.read_bytes() == b"damaged"


def days_later(monkeypatch, days: int) -> None:
    real = time.time
    monkeypatch.setattr(facts.time, "time", lambda: real() + days * 86400)


@pytest.mark.parametrize("preload", [True, False])
def test_what_no_run_used_for_long_goes(tmp_path, folder, monkeypatch, preload):
    place = memo_path("files", "1")
    used, unused, new = (tmp_path / name for name in ("used", "unused", "new"))
    for path in (used, unused, new):
        path.write_text(path.name)
    known = Memo(place)
    ask(known, used)
    ask(known, unused)
    known.close()
    with monkeypatch.context() as patch:
        days_later(patch, facts.DAYS - 1)
        assert remember(used, place, preload=preload) == ("used", 0)
    days_later(monkeypatch, facts.DAYS + 1)
    assert remember(new, place, preload=preload) == ("new", 1)
    assert [remember(path, place, preload=preload)[1] for path in (used, unused)] == [0, 1]


def test_a_file_has_a_bound_and_the_oldest_records_go_first(folder, monkeypatch):
    monkeypatch.setattr(facts, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(facts, "_PAGE", 8192)
    place, large = memo_path("files", "1"), os.urandom(10_000)
    for day in range(4):
        with monkeypatch.context() as patch:
            days_later(patch, day)
            known = Memo(place)
            for number in range(60):
                known.note(b"%d %d" % (day, number), large)
            known.close()
        assert place.stat().st_size < 1.2 * (1 << 20)
    known = Memo(place)
    kept = [sum(known.recall(b"%d %d" % (day, number)) == large for number in range(60)) for day in range(4)]
    known.close()
    assert kept == sorted(kept) and kept[0] == 0 and kept[3] == 60


def test_all_files_have_a_bound_and_the_oldest_go_first(folder, monkeypatch):
    monkeypatch.setattr(facts, "MOST_IN_ALL", 150_000)
    monkeypatch.setattr(facts, "_PAGE", 8192)
    places = [memo_path("files", str(number)) for number in range(4)]
    for number, place in enumerate(places):
        known = Memo(place)
        known.note(b"x", bytes(30_000))
        known.close()
        os.utime(place, (number, time.time() - 10 + number))
        (folder / "another's.sqlite").write_bytes(bytes(1 << 20))
    assert [place.exists() for place in places] == [False, True, True, True]
    days_later(monkeypatch, facts.DAYS + facts.REFRESH + 1)
    known = Memo(places[3])
    known.note(b"y", b"")
    known.close()
    assert [place.exists() for place in places] == [False, False, False, True]
    assert (folder / "another's.sqlite").stat().st_size == 1 << 20


def test_rehashing_corrects_what_is_remembered(file, store, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setattr(facts, "blob_stamp", lambda blob: (b"the same", 0))
    assert remember(file, store) == ("one", 1)
    file.write_text("two")
    assert remember(file, store) == ("one", 0)
    assert remember(file, store, trust=False) == ("two", 1)
    assert remember(file, store) == ("two", 0)


# ---- flipped bits ----------------------------------------------------------------------------------------------------


class Flips:
    """A table of facts on files and shards; any bit of it can be flipped, and what follows is checked."""

    def __init__(self, root, preload: bool) -> None:
        self.store, self.preload = root / "files.sqlite", preload
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
        lost = self.run()
        if lost and not self.preload:  # what was found intact in a damaged file is lost with it
            self.run()
        assert not lost or self.run() == 0, bit
        assert set(self.store.parent.iterdir()) == self.there
        return lost

    def run(self) -> int:
        """How many records are lost; remembers them again."""
        known = opened(self.store, preload=self.preload)
        noted = known.get_digest("mean", "ab" * 32)
        assert noted in (None, b"0123456789abcdef")
        lost = self.ask(known) + (noted is None)
        if noted is None:
            known.put_digest("mean", "ab" * 32, b"0123456789abcdef")
        known.close()
        return lost


@pytest.fixture(params=[True, False], ids=["preloaded", "one by one"])
def flips(tmp_path, monkeypatch, request):
    monkeypatch.setattr(facts, "REST_NS", 0)
    monkeypatch.setattr(facts, "_PAGE", 1024)
    return Flips(tmp_path, request.param)


def test_no_flipped_bit_of_a_record_says_anything_false(flips):
    """One bit of every byte of the records that is not zero; most of them are noticed."""
    used = [place for place in range(1024, len(flips.whole)) if flips.whole[place]]
    assert len(used) > 100  # digests have some zeros, too
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
