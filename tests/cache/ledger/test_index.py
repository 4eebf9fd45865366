"""The look-up file: nothing but speed. With it, half of it, or a wrong one, the ledger is the one without."""

from __future__ import annotations

import errno
import itertools
import os
import random
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_ledger import load_plainly
from small_rows import LATENT, put_shard

from prep.cache import damage, publish, shard_format
from prep.cache.commits import read_commit
from prep.cache.damage import Damage
from prep.cache.ledger import index
from prep.cache.ledger import inventory as census
from prep.cache.ledger.index import EMPTY_INDEX, NAME, SCHEMA, _parse, drop_index, load_index, sealed
from prep.cache.ledger.ledger import Ledger, load_ledger, write_commit
from prep.cache.records import Reject, Shard, Task
from prep.cache.store import Cache, open_cache
from prep.digest import canonical, digest_bytes, with_checksum
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
    publish.retire_shard(cache, digest)


def harm_collect(cache: Cache, digest: str) -> None:
    """What gc does: the commit, then the shard."""
    atomic.remove(cache.commit(task_of(1).key))
    publish.retire_shard(cache, digest)


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
    atomic.write_atomic(path, canonical(with_checksum(said)))


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
    """In the first bytes all of them, else some; CRC-32C misses no single bit."""
    path, plain, rng = filled.root / NAME, load_plainly(filled), random.Random(0)
    data = path.read_bytes()
    assert load_index(filled) != EMPTY_INDEX
    for place in (*range(8 * 64), *rng.sample(range(8 * len(data)), 200)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert load_index(filled) is EMPTY_INDEX, place
    with pytest.raises(Unparsed, match="does not match its checksum"):
        _parse(bytes(flipped))
    for end in (*range(64), *rng.sample(range(len(data)), 100), len(data) - 1):
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


Document = dict[str, Any]


def rewrite(cache: Cache, change: Callable[[Document], Any], schema: pa.Schema = SCHEMA, times: int = 1) -> bytes:
    """Puts another file in place of a cache's, with a checksum that fits: its only row, changed, so many times."""
    path = cache.root / NAME
    document = pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()[0]
    change(document)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        columns = [pa.array([document[field.name]] * times, field.type) for field in schema]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    data = sealed(sink.getvalue().to_pybytes())
    path.write_bytes(data)
    return data


def peak_of_reading(cache: Cache) -> int:
    """Bytes that reading a file allocates which is not believed."""
    tracemalloc.start()
    try:
        assert load_index(cache) is EMPTY_INDEX
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_it_is_an_arrow_stream_that_others_can_read(filled: Cache) -> None:
    table = pa.ipc.open_stream((filled.root / NAME).read_bytes()).read_all()
    (document,) = table.to_pylist()
    assert [one.hex() for one in document["commits.task"]] == sorted(task_of(number).key for number in range(4))
    assert len(document["keys.key"]) == 12 and sum(document["shards.rows"]) == 12


@pytest.mark.parametrize("size", [1 << 27, 6 << 30, 1 << 40])
def test_a_sparse_file_is_not_read(filled: Cache, size: int) -> None:
    """As large as it likes to be: no cache of twelve rows accounts for that."""
    path, plain = filled.root / NAME, load_plainly(filled)
    for data in (path.read_bytes(), b""):
        path.write_bytes(data)
        os.truncate(path, size)
        assert peak_of_reading(filled) < 1 << 20
    assert same(load_ledger(filled, remember=True), plain)
    assert path.stat().st_size < 1 << 16


def test_a_file_is_as_large_as_commits_and_keys_account_for(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "FREE_BYTES", (filled.root / NAME).stat().st_size)
    drop_index(filled)
    put(filled, range(100, 400), 7)
    plain = load_ledger(filled, remember=True)
    assert (filled.root / NAME).stat().st_size > 300 * 40
    assert len(load_index(filled).columns) == 312 and same(load_ledger(filled), plain)
    (filled.shard(max(plain.shards, key=lambda shard: shard.rows).digest) / shard_format.KEY_PATH).unlink()
    assert load_index(filled) is EMPTY_INDEX
    with pytest.raises(Unparsed, match=r"has \d+ bytes, more than commits and keys of its cache account for"):
        index._read(filled)
    monkeypatch.setattr(index, "FREE_BYTES", 1 << 26)
    assert load_index(filled) != EMPTY_INDEX


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_what_is_no_plain_file_is_no_look_up_file(filled: Cache, tmp_path: Path, kind: str) -> None:
    path, plain = filled.root / NAME, load_plainly(filled)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert load_index(filled) is EMPTY_INDEX
    assert same(load_ledger(filled), plain)


FOREIGN, UNEQUAL = "refer to shards that it does not have", "do not have as many rows as they state"
UNSORTED, TREES = "are outside their shards, or not sorted", "refer to trees that it does not have"
SHARDS, COMMITS = "are not sorted, or have no rows", "are not sorted, or have negative counts"
FIELDS, PATH, WORDS = "refer to fields that it does not have", "expected a path in a shard", "are not JSON"


@pytest.mark.parametrize(("column", "place", "value", "fault"), [
    ("keys.shard", 0, -1, FOREIGN), ("keys.shard", 0, 3, FOREIGN), ("keys.shard", 0, 1 << 30, FOREIGN),
    ("keys.shard", 0, "next", UNEQUAL), ("keys.row", 0, -1, UNSORTED), ("keys.row", 0, 9, UNSORTED),
    ("keys.row", 1, 1 << 30, UNSORTED), ("keys.key", 0, b"\xff" * 32, UNSORTED),
    ("shards.rows", 0, 0, SHARDS), ("shards.rows", 0, -1, SHARDS), ("shards.rows", 0, 1 << 30, UNEQUAL),
    ("shards.digest", 0, b"\xff" * 32, SHARDS), ("shards.tree", 0, 1, TREES), ("shards.tree", 0, -1, TREES),
    ("commits.task", 0, b"\xff" * 32, COMMITS), ("commits.rows", 0, -5, COMMITS), ("commits.bytes", 0, -5, COMMITS),
    ("commits.field", 0, 5, FIELDS), ("commits.field", 0, -1, FIELDS),
])  # fmt: skip
def test_hostile_numbers_are_refused(filled: Cache, column: str, place: int, value: Any, fault: str) -> None:
    plain = load_plainly(filled)

    def change(document: Document) -> None:
        found = (document[column][place] + 1) % 3 if value == "next" else value
        document[column][place] = found

    data = rewrite(filled, change)
    with pytest.raises(Unparsed, match=fault):
        _parse(data)
    assert load_index(filled) is EMPTY_INDEX
    assert same(load_ledger(filled), plain)


@pytest.mark.parametrize("column", [name for name in SCHEMA.names if name != "words"])
def test_columns_of_other_lengths_are_refused(filled: Cache, column: str) -> None:
    data = rewrite(filled, lambda document: document[column].pop())
    with pytest.raises(Unparsed, match="have columns of different lengths"):
        _parse(data)


@pytest.mark.parametrize("times", [0, 2])
def test_another_number_of_rows_is_refused(filled: Cache, times: int) -> None:
    data = rewrite(filled, lambda document: None, times=times)
    with pytest.raises(Unparsed, match=f"has {times} rows, expected 1"):
        _parse(data)


@pytest.mark.parametrize("column", SCHEMA.names)
def test_nulls_are_refused(filled: Cache, column: str) -> None:
    data = rewrite(filled, lambda document: document.update({column: None}), pa.schema(
        [field.with_nullable(True) for field in SCHEMA], SCHEMA.metadata))
    with pytest.raises(Unparsed, match="it has columns"):
        _parse(data)


def test_another_version_is_no_look_up_file(filled: Cache) -> None:
    path = filled.root / NAME
    before = path.read_bytes()
    data = rewrite(filled, lambda document: None, SCHEMA.with_metadata({**SCHEMA.metadata, b"version": b"99"}))
    with pytest.raises(Unparsed, match="it has columns"):
        _parse(data)
    assert same(load_ledger(filled, remember=True), load_plainly(filled))
    assert path.read_bytes() == before


def test_something_after_the_end_is_refused(filled: Cache) -> None:
    stream = (filled.root / NAME).read_bytes()[: -shard_format.CRC_BYTES]
    with pytest.raises(Unparsed, match="has data after its end"):
        _parse(sealed(stream + stream))


SOUND = {"fields": ["latent"], "trees": [["/"]], "rejects": {}}


def test_words_are_believed_when_they_are_sound(filled: Cache) -> None:
    """What the next test changes."""
    rewrite(filled, lambda document: document.update(words=canonical(SOUND)))
    assert load_index(filled) is not EMPTY_INDEX


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
    data = rewrite(filled, lambda document: document.update(words=words))
    with pytest.raises(Unparsed, match=fault):
        _parse(data)
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
        path.write_bytes(sealed(bytes(wrong[: -shard_format.CRC_BYTES])))
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
