"""The look-up file: nothing but speed. With it, half of it, or a wrong one, the ledger is the one without."""

from __future__ import annotations

import errno
import itertools
import os
import random
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rows import LATENT, put_shard

from prep.cache import damage, shard_format, store
from prep.cache.commits import read_commit
from prep.cache.damage import Damage
from prep.cache.ledger import inventory as census
from prep.cache.ledger.index import (
    COMMIT,
    EMPTY_INDEX,
    HEAD,
    MOST_BYTES,
    NAME,
    ROW_BYTES,
    SHARD,
    _parse,
    _read,
    _size,
    drop_index,
    load_index,
)
from prep.cache.ledger.ledger import Ledger, load_ledger, load_plainly, write_commit
from prep.cache.records import Reject, Shard, Task
from prep.cache.store import Cache, open_cache
from prep.digest import canonical, digest_bytes, seal
from prep.fs import atomic, stamps
from prep.parse import Unparsed

PROVENANCE = {"host": "h"}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change is worth a new file, and everything was at rest for long."""
    monkeypatch.setattr(census, "WORTH", 1)
    monkeypatch.setattr(stamps, "SETTLE_NS", -(10**12))


def put(cache: Cache, numbers: Any, task: int = 0, rejects: tuple[Reject, ...] = ()) -> Shard:
    """A shard of the rows with these numbers, and its commit."""
    rows = {name_of(number): values for number, values in zip(numbers, itertools.repeat({"latent": bytes(48)}))}
    shard = put_shard(cache, "latent", [LATENT], dict(sorted(rows.items())))
    write_commit(cache, task_of(task), shard, rejects, PROVENANCE)
    return shard


def name_of(number: int) -> str:
    return digest_bytes(b"row %d" % number)


def task_of(number: int) -> Task:
    return Task(key=digest_bytes(b"task %d" % number), field="latent", rows=())


def same(one: Ledger, other: Ledger) -> bool:
    arrays = all((getattr(one, name) == getattr(other, name)).all() and len(getattr(one, name)) == len(other.keys)
                 for name in ("keys", "shard", "row"))
    return arrays and all(getattr(one, name) == getattr(other, name)
                          for name in ("shards", "fields", "rejects", "commits"))


def touch_in_place(path: Path, change: Callable[[bytearray], Any]) -> None:
    """Rewrites a file's bytes in place; until the clock of the file system has moved, as it has in two seconds."""
    before, data = path.stat().st_ctime_ns, bytearray(path.read_bytes())
    changed = change(data)
    path.chmod(0o644)
    path.write_bytes(data if changed is None else changed)
    while path.stat().st_ctime_ns == before:
        path.write_bytes(data if changed is None else changed)


@pytest.fixture
def filled(cache: Cache) -> Cache:
    """A cache of three shards and a task without one, remembered."""
    put(cache, range(4), 0)
    put(cache, range(3, 9), 1, (Reject(key=name_of(50), code="bits", detail="é"),))
    put(cache, range(9, 11), 2)
    write_commit(cache, task_of(3), None, [Reject(key=name_of(51), code="truncated", detail="ends early")], PROVENANCE)
    assert same(load_ledger(cache, remember=True), load_plainly(cache))
    return cache


def test_nothing_is_opened_that_did_not_change(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_plainly(filled)
    for reader in ("read_keys", "read_commit", "recorded"):
        monkeypatch.setattr(census, reader, lambda *_: pytest.fail("something was read"))
    assert same(load_ledger(filled), plain)
    assert len(plain.keys) == 12 and len(plain.shards) == 3 and set(plain.rejects) == {name_of(50), name_of(51)}


def test_only_what_is_new_is_opened(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = put(filled, range(20, 22), 9)
    opened: list[str] = []
    keys, commit = census.read_keys, census.read_commit
    monkeypatch.setattr(census, "read_keys", lambda cache, name: opened.append(name) or keys(cache, name))
    monkeypatch.setattr(census, "read_commit", lambda cache, name: opened.append(name) or commit(cache, name))
    found = load_ledger(filled, remember=True)
    assert opened == [task_of(9).key, shard.digest]
    assert found.find(name_of(21)) is not None
    opened.clear()
    assert same(load_ledger(filled), found) and not opened


def harm_lose(cache: Cache, digest: str) -> None:
    atomic.remove_tree(cache.shard(digest))


def harm_retire(cache: Cache, digest: str) -> None:
    store.retire_shard(cache, digest)


def harm_collect(cache: Cache, digest: str) -> None:
    """What gc does: the commit, then the shard."""
    atomic.remove(cache.commit(task_of(1).key))
    store.retire_shard(cache, digest)


def harm_tear(cache: Cache, digest: str) -> None:
    touch_in_place(cache.shard(digest) / "latent" / "c.0.0.0.0", lambda data: data[:-1])


def harm_empty(cache: Cache, digest: str) -> None:
    touch_in_place(cache.shard(digest) / "latent" / "c.0.0.0.0", lambda data: b"")


def harm_lose_file(cache: Cache, digest: str) -> None:
    (cache.shard(digest) / "latent" / "zarr.json").unlink(missing_ok=True)


def harm_add_file(cache: Cache, digest: str) -> None:
    (cache.shard(digest) / "latent" / "c.0.0.0.1").write_bytes(b"x")


def harm_link_file(cache: Cache, digest: str) -> None:
    payload = cache.shard(digest) / "latent" / "c.0.0.0.0"
    payload.rename(cache.root / "elsewhere")
    payload.symlink_to(cache.root / "elsewhere")


def harm_flip_key(cache: Cache, digest: str) -> None:
    touch_in_place(cache.shard(digest) / "key" / "c.0.0", lambda data: data.__setitem__(0, data[0] ^ 1))


def harm_condemn(cache: Cache, digest: str) -> None:
    damage.record(cache, [Damage(shard=digest, field=None, array=None, row=None, what="gone")])


def harm_condemn_row(cache: Cache, digest: str) -> None:
    damage.record(cache, [Damage(shard=digest, field="latent", array="latent", row=2, what="bits")])


def harm_flip_commit(cache: Cache, digest: str) -> None:
    touch_in_place(cache.commit(task_of(1).key), lambda data: data.__setitem__(20, data[20] ^ 1))


def harm_remove_commit(cache: Cache, digest: str) -> None:
    atomic.remove(cache.commit(task_of(1).key))


def harm_replace_commit(cache: Cache, digest: str) -> None:
    """By one of the same length that says the shard has another size."""
    path = cache.commit(task_of(1).key)
    document = read_commit(cache, task_of(1).key)
    assert document is not None and document.shard is not None
    said = {"format": "latentry/commit", "version": 1, "task": task_of(1).key, "field": "latent", "shard": digest,
            "rows": 6, "bytes": document.shard.bytes + 1, "rejects": []}
    atomic.write_atomic(path, canonical(seal(said)))


HARMS = [harm_lose, harm_retire, harm_collect, harm_tear, harm_empty, harm_lose_file, harm_add_file, harm_link_file,
         harm_flip_key, harm_condemn, harm_condemn_row, harm_flip_commit, harm_remove_commit, harm_replace_commit]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_harm_done_after_the_file_was_written_is_seen(filled: Cache, harm: Any) -> None:
    before = load_ledger(filled)
    at = before.find(name_of(5))
    assert at is not None
    lost = name_of(5) if harm is not harm_condemn_row else ledger_name(before, at.shard, 2)
    harm(filled, at.shard)
    after = load_ledger(filled)
    assert same(after, load_plainly(filled))
    assert after.find(lost) is None and not after.has_commit(task_of(1).key)
    assert after.find(name_of(10)) is not None
    assert same(load_ledger(filled, remember=True), after) and same(load_ledger(filled), after)


def ledger_name(found: Ledger, shard: str, row: int) -> str:
    number = [one.digest for one in found.shards].index(shard)
    (place,) = np.flatnonzero((found.shard == number) & (found.row == row))
    return bytes(found.keys[place]).ljust(32, b"\0").hex()


def test_forgotten_damage_is_forgotten(filled: Cache) -> None:
    whole = load_ledger(filled)
    largest = max(whole.shards, key=lambda shard: shard.rows).digest
    for harm in (harm_condemn, harm_condemn_row):
        harm(filled, largest)
        less = load_ledger(filled, remember=True)
        assert len(less.keys) < len(whole.keys) and same(less, load_plainly(filled))
        damage.forget(filled, largest)
        assert same(load_ledger(filled), whole)


def test_what_changed_just_now_is_not_remembered(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps younger than two seconds may hide a second change within one tick of the file system's clock."""
    monkeypatch.setattr(stamps, "SETTLE_NS", 3600 * 10**9)
    put(cache, range(3))
    load_ledger(cache, remember=True)
    assert not (cache.root / NAME).exists()
    monkeypatch.setattr(stamps, "SETTLE_NS", -(10**12))
    load_ledger(cache, remember=True)
    assert len(load_index(cache).commits) == len(load_index(cache).shards) == 1


def test_a_few_changes_are_not_worth_a_new_file(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "WORTH", 4)
    put(cache, range(3))
    load_ledger(cache, remember=True)
    assert not (cache.root / NAME).exists()
    put(cache, range(3, 5), 1)  # a commit and a shard each
    load_ledger(cache)
    assert not (cache.root / NAME).exists()
    load_ledger(cache, remember=True)
    written = (cache.root / NAME).read_bytes()
    harm_collect(cache, load_ledger(cache).shards[0].digest)
    load_ledger(cache, remember=True)
    assert (cache.root / NAME).read_bytes() == written
    harm_collect(cache, load_ledger(cache).shards[0].digest)
    atomic.remove(cache.commit(task_of(0).key))
    load_ledger(cache, remember=True)
    assert not load_index(cache).commits


def test_dropped_it_is_built_again(filled: Cache) -> None:
    whole = load_ledger(filled)
    drop_index(filled)
    drop_index(filled)
    assert load_index(filled) == EMPTY_INDEX
    assert same(load_ledger(filled, remember=True), whole)
    assert len(load_index(filled).shards) == 3


def test_where_ctime_means_creation_commits_are_read_every_time(
    filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is named by its bytes; a commit could be replaced by another with the same stamp."""
    plain, read = load_plainly(filled), []
    commit = census.read_commit
    monkeypatch.setattr(census, "ctime_is_reliable", lambda: False)
    monkeypatch.setattr(census, "read_commit", lambda cache, task: read.append(task) or commit(cache, task))
    monkeypatch.setattr(census, "read_keys", lambda *_: pytest.fail("a shard was read"))
    assert same(load_ledger(filled), plain)
    assert read == sorted(task_of(number).key for number in range(4))


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_is_read_all_the_same(
    filled: Cache, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    old = (filled.root / NAME).read_bytes()
    put(filled, range(20, 22), 9)

    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(atomic, "write", refuse)
    monkeypatch.setattr(atomic, "remove", refuse)
    assert load_ledger(filled, remember=True).find(name_of(21)) is not None
    drop_index(filled)
    assert (filled.root / NAME).read_bytes() == old


def test_half_a_file_is_no_file(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing that ends midway leaves the old one."""
    old, write = (filled.root / NAME).read_bytes(), atomic.write
    put(filled, range(20, 22), 9)

    def die(handle: Any, data: Any) -> None:
        write(handle, data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "write", die)
    with pytest.raises(KeyboardInterrupt):
        load_ledger(filled, remember=True)
    assert (filled.root / NAME).read_bytes() == old
    assert load_ledger(filled).find(name_of(21)) is not None


def test_a_flipped_bit_and_a_cut_are_noticed(filled: Cache) -> None:
    """In the head all of them, else some; CRC-32C misses no single bit."""
    path, plain, rng = filled.root / NAME, load_plainly(filled), random.Random(0)
    data = path.read_bytes()
    assert load_index(filled) != EMPTY_INDEX
    for place in (*range(8 * HEAD.size), *rng.sample(range(8 * len(data)), 200)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert load_index(filled) is EMPTY_INDEX, place
    with pytest.raises(Unparsed, match="does not match its checksum"):
        _parse(bytes(flipped))
    for end in (*range(HEAD.size + 5), *rng.sample(range(len(data)), 100), len(data) - 1):
        path.write_bytes(data[:end])
        assert load_index(filled) is EMPTY_INDEX, end
    path.write_bytes(data + b"\0")
    assert load_index(filled) is EMPTY_INDEX
    assert same(load_ledger(filled, remember=True), plain)
    assert path.read_bytes() == data


def test_a_shard_with_names_of_others_is_not_remembered(filled: Cache) -> None:
    plain = load_plainly(filled)
    (filled.shard(plain.shards[0].digest) / "key" / ".Empty\udcff").touch()
    for _ in range(2):
        assert same(load_ledger(filled, remember=True), plain)
        assert len(load_index(filled).shards) == 2


def sealed(data: bytes | bytearray) -> bytes:
    """With a checksum that fits."""
    return bytes(data[: -shard_format.CRC_BYTES]) + shard_format.crc_bytes(bytes(data[: -shard_format.CRC_BYTES]))


def refilled(head: tuple[Any, ...], data: bytes) -> bytes:
    return sealed(HEAD.pack(*head) + data[HEAD.size :])


def peak_of_reading(cache: Cache) -> int:
    """Bytes that reading a file allocates which is not believed."""
    tracemalloc.start()
    try:
        assert load_index(cache) is EMPTY_INDEX
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_hostile_counts_and_holes_allocate_nothing(filled: Cache) -> None:
    """Also a checksum that fits makes no count believed that the file is too small for."""
    path = filled.root / NAME
    data = path.read_bytes()
    head = HEAD.unpack(data[: HEAD.size])
    for place, huge in itertools.product(range(2, 6), (1 << 40, (1 << 64) - 1, 1 << 31)):
        path.write_bytes(refilled((*head[:place], huge, *head[place + 1 :]), data))
        assert peak_of_reading(filled) < 1 << 20
    path.write_bytes(data)
    os.truncate(path, 1 << 30)  # longer than it says
    assert peak_of_reading(filled) < 1 << 20
    head = (*head[:4], MOST_BYTES // ROW_BYTES, 0)  # as long as it says, and all of it a hole
    path.write_bytes(HEAD.pack(*head))
    os.truncate(path, _size(HEAD.pack(*head)))
    assert peak_of_reading(filled) < 1 << 20


def places(data: bytes) -> dict[str, tuple[int, int]]:
    """Where each part of a file begins, and what one of it takes."""
    _, _, commits, shards, rows, _ = HEAD.unpack(data[: HEAD.size])
    found, place = {}, HEAD.size
    for name, size, number in (("commits", COMMIT.itemsize, commits), ("shards", SHARD.itemsize, shards),
                               ("keys", 32, rows), ("numbers", 4, rows), ("rows", 4, rows), ("words", 1, 0)):
        found[name] = (place, size)
        place += size * number
    return found


FOREIGN, UNEQUAL = "are in shards that it does not have", "have other numbers of rows than they say"
UNSORTED, TREES = "are not in their shards, or not sorted", "have trees that it does not have"
SHARDS, COMMITS = "are not sorted, or have no rows", "are not sorted, or have fewer than no rows"
FIELDS, PATH, WORDS = "have fields that it does not have", "expected a path in a shard", "are not JSON"


@pytest.mark.parametrize(("part", "offset", "value", "fault"), [
    ("numbers", 0, -1, FOREIGN), ("numbers", 0, 3, FOREIGN), ("numbers", 0, 1 << 30, FOREIGN),
    ("numbers", 0, 0, UNEQUAL), ("rows", 0, -1, UNSORTED), ("rows", 0, 9, UNSORTED), ("rows", 4, 1 << 30, UNSORTED),
    ("keys", 0, -1, UNSORTED),
    ("shards", 64, 0, SHARDS), ("shards", 64, -1, SHARDS), ("shards", 64, 1 << 30, UNEQUAL), ("shards", 0, -1, SHARDS),
    ("shards", 68, 1, TREES), ("commits", 0, -1, COMMITS), ("commits", 96, -5, COMMITS), ("commits", 108, -5, COMMITS),
    ("commits", 100, 5, FIELDS),
])  # fmt: skip
def test_hostile_numbers_are_refused(filled: Cache, part: str, offset: int, value: int, fault: str) -> None:
    path, plain = filled.root / NAME, load_plainly(filled)
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, places(data)[part][0] + offset, value)
    path.write_bytes(sealed(data))
    with pytest.raises(Unparsed, match=fault):
        _parse(path.read_bytes())
    assert load_index(filled) is EMPTY_INDEX
    assert same(load_ledger(filled), plain)


def test_another_version_is_no_look_up_file(filled: Cache) -> None:
    path = filled.root / NAME
    data = path.read_bytes()
    magic, version, *counts = HEAD.unpack(data[: HEAD.size])
    path.write_bytes(refilled((magic, version + 1, *counts), data))
    with pytest.raises(Unparsed, match=r"lookup.bin is of another version, expected 1"):
        _read(path)
    assert same(load_ledger(filled, remember=True), load_plainly(filled))
    assert path.read_bytes() == data


SOUND = {"fields": ["latent"], "trees": [["/"]], "rejects": {}}


def test_words_are_believed_when_they_are_sound(filled: Cache) -> None:
    """What the next test changes."""
    with_words(filled, canonical(SOUND))
    assert load_index(filled) is not EMPTY_INDEX


def with_words(cache: Cache, words: bytes) -> None:
    data = (cache.root / NAME).read_bytes()
    head = HEAD.unpack(data[: HEAD.size])
    changed = refilled((*head[:5], len(words)), data[: places(data)["words"][0]] + words + bytes(4))
    (cache.root / NAME).write_bytes(changed)


@pytest.mark.parametrize(("words", "fault"), [
    (b"", WORDS), (b"{", WORDS), (b"[" * 100_000, WORDS), (b"\xff", WORDS), (b"[]", "expected a table"),
    *((canonical({**SOUND, **wrong}), fault) for wrong, fault in (
        ({"fields": []}, FIELDS), ({"fields": ["../x"]}, "expected lower-case letters"), ({"fields": [1]}, "name in"),
        ({"fields": None}, "expected a list"), ({"rejects": []}, "expected a table"),
        ({"rejects": {"x": []}}, "64 lower"), ({"rejects": {"a" * 64: [1]}}, "expected a table"),
        ({"trees": []}, TREES), ({"trees": None}, "expected a list"),
        ({"rejects": {"a" * 64: [{"key": "x", "code": "c", "detail": "d"}]}}, "64 lower"),
        ({"trees": [["/../x"]]}, PATH), ({"trees": [["/", "//x"]]}, PATH), ({"trees": [["/a/b/c"]]}, PATH),
        ({"trees": [["x"]]}, PATH), ({"trees": [[1]]}, "expected a string"), ({"trees": ["/"]}, "expected a list"))),
])  # fmt: skip
def test_hostile_words_are_refused(filled: Cache, words: bytes, fault: str) -> None:
    with_words(filled, words)
    with pytest.raises(Unparsed, match=fault):
        _parse((filled.root / NAME).read_bytes())
    assert load_index(filled) is EMPTY_INDEX
    assert same(load_ledger(filled), load_plainly(filled))


def test_any_mutation_leads_to_a_ledger_of_rows_that_are_there(filled: Cache) -> None:
    """Whoever seals a wrong file anew may name wrong rows, as one who writes shards may; never a place outside them."""
    path, rng = filled.root / NAME, random.Random(0)
    data = path.read_bytes()
    for number in range(400):
        wrong = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            wrong[rng.randrange(len(wrong))] = rng.choice((0, 1, 127, 128, 255))
        path.write_bytes(sealed(wrong))
        found = load_ledger(filled)
        assert len(found.keys) == len(found.shard) == len(found.row), number
        sizes = np.array([filled_rows(filled, shard.digest) for shard in found.shards])
        assert ((found.row >= 0) & (found.row < sizes[found.shard])).all(), number


def filled_rows(cache: Cache, digest: str) -> int:
    return (cache.shard(digest) / shard_format.KEY_PATH).stat().st_size // 32


STEPS = st.sampled_from(["commit", "commit", "commit", "again", "reject", "lose", "tear", "key", "row", "shard",
                         "forget", "uncommit", "flip", "drop", "spoil", "retire"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 30)), min_size=3, max_size=14), st.integers(1, 5))
def test_after_any_history_the_ledger_is_the_one_without_the_file(history: list[tuple[str, int]], worth: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setattr(census, "WORTH", worth)
        patch.setattr(stamps, "SETTLE_NS", -(10**12))
        patch.setattr(atomic, "sync", lambda handle: handle.flush())
        patch.setattr(atomic, "sync_dir", lambda path: None)
        cache = open_cache(Path(scratch) / "cache", create=True)
        for place, (step, number) in enumerate(history):
            take_step(cache, step, number, place)
            plain = load_plainly(cache)
            assert same(load_ledger(cache, remember=place % 3 != 1), plain)
            assert same(load_ledger(cache), plain)
            names = [name_of(row) for row in range(40)]
            assert load_ledger(cache).resolve(names) == plain.resolve(names)


def take_step(cache: Cache, step: str, number: int, place: int) -> None:
    """Changes the cache; where a shard or a commit is needed, the one of that number, around and around."""
    shards = [one for one in cache.shards() if (cache.shard(one) / shard_format.KEY_PATH).exists()]
    tasks = list(cache.names("commits"))
    reject = Reject(key=name_of(number), code="x", detail=str(place))
    if step in ("commit", "again"):  # the second of the same rows is the same shard under another task
        put(cache, range(number, number + (3 if step == "again" else 1 + number % 5)), place, (reject,) * (number % 2))
    elif step == "reject":
        write_commit(cache, task_of(number), None, [reject], {})
    elif step == "drop":
        drop_index(cache)
    elif step == "spoil":
        spoil(cache.root / NAME, number)
    elif step in ("uncommit", "flip") and tasks:
        harm = {"uncommit": atomic.remove, "flip": lambda path: touch_in_place(path, lambda data: data[:-1])}[step]
        harm(cache.commit(tasks[number % len(tasks)]))
    elif shards:
        harms = {"lose": harm_lose, "tear": harm_lose_file, "key": harm_flip_key, "row": harm_condemn_row,
                 "shard": harm_condemn, "forget": damage.forget, "retire": harm_retire}
        harms.get(step, lambda *_: None)(cache, shards[number % len(shards)])


def spoil(path: Path, number: int) -> None:
    if path.exists():
        data = bytearray(path.read_bytes())
        data[number * 7 % len(data)] ^= 1
        path.write_bytes(data)
