"""Copies of a cache that several processes of one machine share: what one has finished, the others always find."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from small_rows import LATENT, draw_rows, put_shard

from prep.cache.ledger.ledger import is_finished, load_ledger, write_commit
from prep.cache.plans import remove_plan, write_plan
from prep.cache.records import Task
from prep.cache.remote import stored
from prep.cache.remote.headers import as_stored
from prep.cache.remote.opening import open_to_encode
from prep.cache.remote.shards import lock_shard
from prep.cache.remote.stored import refresh
from prep.cache.shard_check import verify_shard
from prep.cache.store import Cache
from prep.cache.writer import ShardWriter
from prep.fs import atomic
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import DIRECTORY, LIMIT
from prep.fs.remote.errors import Stopped
from prep.fs.remote.objects import list_objects
from prep.fs.remote.retry import NEVER
from prep.maintenance import repair
from prep.maintenance.recheck import recheck
from prep.progress import silent

ROWS = draw_rows([LATENT], 3)
TASK = Task(key="12" * 32, field="latent", rows=tuple(ROWS))


@pytest.fixture
def machine(store):
    return open_to_encode(Bucket.parse(f"{store.url}/cache"), create=True)


def encode(cache):
    """What a process does that encodes the task."""
    write_commit(cache, TASK, put_shard(cache, "latent", [LATENT], ROWS), [], {})


def found(cache):
    return set(load_ledger(cache).resolve(ROWS))


def test_a_finished_task_stays_finished_while_another_process_encodes_it_too(machine, monkeypatch):
    encode(machine)
    looks = []

    def watched(change):
        def changed(*words, **options):
            looks.append(is_finished(machine, TASK.key))
            result = change(*words, **options)
            looks.append(is_finished(machine, TASK.key))
            return result

        return changed

    with monkeypatch.context() as patched:
        for name in atomic.PRIMITIVES:
            patched.setattr(atomic, name, watched(getattr(atomic, name)))
        encode(machine)
    assert len(looks) > 20 and all(looks)
    assert list(machine.root.rglob("tmp/*")) == []


def test_a_shard_is_not_published_while_another_process_works_on_it(machine):
    """Who asks this process to stop does not wait for the other's upload."""
    shard = put_shard(machine, "latent", [LATENT], ROWS)
    before, stop = machine.unsent.shard(shard.digest).stat(), threading.Event()
    stop.set()
    with lock_shard(shard.digest, NEVER), pytest.raises(Stopped), ShardWriter(machine, "latent", [LATENT]) as writer:
        for key, values in ROWS.items():
            writer.add(key, values)
        writer.finish(stop=stop)
    assert machine.unsent.shard(shard.digest).stat() == before and list(machine.root.rglob("tmp/*")) == []


def test_a_shard_that_is_finished_while_it_is_adopted_is_not_damaged(machine, monkeypatch):
    """Who looks for rows without a commit sees the shard before the commit, and when it looks again it was moved."""
    shard, listed = put_shard(machine, "latent", [LATENT], ROWS), repair.tasks_by_shard

    def listed_before(cache):
        named = listed(cache)
        write_commit(machine, TASK, shard, [], {})
        return named

    ledger = load_ledger(machine)
    monkeypatch.setattr(repair, "tasks_by_shard", listed_before)
    assert repair.adopt_orphans(machine, ledger, ROWS) == []
    assert list(machine.names("damaged")) == []
    assert found(machine) == set(ROWS)


def test_a_shard_whose_process_died_before_it_was_a_copy_becomes_one(machine, monkeypatch):
    """The next run that has something to encode finds it."""
    with monkeypatch.context() as patched:
        patched.setattr("prep.cache.ledger.ledger.settle", lambda *_: None)
        encode(machine)
    (digest,) = machine.unsent.shards()
    assert not list(machine.shards()) and found(machine) == set(ROWS)
    assert repair.adopt_orphans(machine, load_ledger(machine), ROWS) == []
    assert list(machine.shards()) == [digest] and not list(machine.unsent.shards())
    assert verify_shard(Cache(root=machine.root), digest) == []


def test_a_header_that_is_damaged_here_is_fetched_again(machine):
    """As a power failure leaves it: files that are never synced."""
    encode(machine)
    (digest,) = machine.shards("headers")
    Path(machine.header_path(digest), "key", "c.0.0").write_bytes(b"")
    ledger = load_ledger(machine)
    assert not len(ledger.keys) and repair.incomplete_commits(machine, ledger) == [TASK.key]
    repair.repair_commits(machine, [TASK.key])
    assert found(machine) == set(ROWS)


def test_a_shard_without_room_for_a_copy_goes_once_it_is_uploaded(machine, monkeypatch):
    monkeypatch.setenv(LIMIT, "1")
    encode(machine)
    assert not list(machine.shards()) and not list(machine.unsent.shards())
    assert found(machine) == set(ROWS)


def test_a_shard_is_adopted_without_a_process_that_drops_its_rows_meanwhile(machine, monkeypatch):
    shard = put_shard(machine, "latent", [LATENT], ROWS)
    stop = threading.Event()
    stop.set()

    def verified(cache, digest, **options):
        with pytest.raises(Stopped), lock_shard(digest, stop):
            pass
        return verify_shard(cache, digest, **options)

    monkeypatch.setattr(repair, "verify_shard", verified)
    assert repair.adopt_orphans(machine, load_ledger(machine), ROWS) == [shard]
    assert found(machine) == set(ROWS)


def test_a_shard_that_another_machine_has_just_uploaded_stays(machine, store, tmp_path, monkeypatch):
    """One process takes it, and another one, which listed the shards of the store before, sees no commit of it yet."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(DIRECTORY, str(tmp_path / "another"))
        encode(open_to_encode(machine.store, create=False))
    take_shard = stored._take_shard

    def taken(*words):
        took = take_shard(*words)
        stored._drop_headers(machine, {})
        return took

    monkeypatch.setattr(stored, "_take_shard", taken)
    refresh(machine)
    assert is_finished(machine, TASK.key)


def test_a_plan_that_is_stored_while_another_process_removes_it_is_known_here(machine, store, monkeypatch):
    """Else nobody would remove it: who seals removes a plan of which there is a file here."""
    wanted, calls = "ab" * 32, []
    write_plan(machine, wanted, [TASK])
    remove_tree, delete = atomic.remove_tree, stored.delete_object

    def between(plain):
        def called(*words, **options):
            result = plain(*words, **options)
            calls.append(plain)
            if len(calls) == 1:
                write_plan(machine, wanted, [TASK])
            return result

        return called

    monkeypatch.setattr(atomic, "remove_tree", between(remove_tree))
    monkeypatch.setattr("prep.cache.store.delete_object", between(delete))
    remove_plan(machine, wanted)
    assert len(calls) == 2
    assert machine.plan(wanted).is_file() or not list_objects(f"{store.url}/cache/plans")


def test_rows_that_wait_for_their_upload_stay_when_the_shard_is_damaged_in_the_store(machine, store):
    """`prep encode --recheck` finds the damage while another process encodes the same task."""
    encode(machine)
    shard = put_shard(machine, "latent", [LATENT], ROWS)
    (name,) = [name for name in list_objects(store.url) if "/latent/c.0" in name]
    store.server.put(f"{store.prefix}/{name}", store.server.get(f"{store.prefix}/{name}")[::-1])
    recheck(machine, ROWS, jobs=1, progress=silent)
    write_commit(machine, TASK, shard, [], {})
    with as_stored(machine, shard.digest, rows=True) as stored:
        assert verify_shard(stored, shard.digest) == []
    assert found(machine) == set(ROWS)
