"""Attacks kinds of records again and again, in a process of its own: `fuzz.py DIR KIND:FIRST:COUNT … [--as USER]`.

Prints the kind and seed that it is at, so that a crash can be told; ends with code 0 when every answer was clean. The
process may not grow by more than a gigabyte (where the system has such a limit), and must not by more than 200 MB.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import pyarrow as pa  # noqa: E402
from mutations import mutate_bytes, mutate_json, mutate_table  # noqa: E402
from onlookers import Watch, look_at, look_at_records  # noqa: E402
from victims import SMALLER, Undo, Victim, both, replaced, sealed, victim, with_shard  # noqa: E402

from prep.cache import plans, shard_format  # noqa: E402
from prep.formatting import printable  # noqa: E402
from prep.manifest.tables import FINDINGS, SAMPLES, SHARDS  # noqa: E402
from prep.runtime import peak_resident  # noqa: E402

GROWTH = 200 << 20  # bytes of resident memory, over all attacks
ROOM = 1 << 30  # bytes of address space that an attack may ask for
SCHEMAS = {"samples": SAMPLES, "shards": SHARDS, "findings": FINDINGS}
Attack = Callable[[Victim, Random], Undo]


def manifest(target: Victim, rng: Random) -> Undo:
    document = target.copy()
    raw = mutate_json(document, rng)
    target.write(document, raw)
    return target.restore


def manifest_bytes(target: Victim, rng: Random) -> Undo:
    target.path.write_bytes(mutate_bytes(sealed(target.document), rng))
    return target.restore


def table_values(target: Victim, rng: Random) -> Undo:
    name = rng.choice(("samples", "samples", "shards", "shards", "findings"))
    return _table(target, name, mutate_table(target.rows(name, SCHEMAS[name]), SCHEMAS[name], rng))


def table_bytes(target: Victim, rng: Random) -> Undo:
    name = rng.choice(("samples", "samples", "shards", "findings"))
    data = target.cache.table(target.document["tables"][name]).read_bytes()
    return _table(target, name, mutate_bytes(data, rng))


def _table(target: Victim, name: str, data: bytes) -> Undo:
    undo = target.put_table(name, data)
    return both(undo, target.restore)


def commit(target: Victim, rng: Random) -> Undo:
    return _document(target.cache.commit(rng.choice(list(target.cache.names("commits")))), rng)


def damage(target: Victim, rng: Random) -> Undo:
    return _document(target.cache.damaged(next(target.cache.names("damaged"))), rng)


def marker(target: Victim, rng: Random) -> Undo:
    return _document(target.root / "cache" / "latentry.json", rng)


def _document(path: Path, rng: Random) -> Undo:
    import json

    data = path.read_bytes()
    if rng.random() < 0.2:
        return replaced(path, mutate_bytes(data, rng))
    document = json.loads(data)
    raw = mutate_json(document, rng)
    return replaced(path, sealed(document, raw))


def plan(target: Victim, rng: Random) -> Undo:
    path = target.cache.plan(target.plan)
    data = path.read_bytes()[:-plans.TRAILER]
    if rng.random() < 0.5:
        body = mutate_bytes(data, rng)
    else:
        rows = pa.ipc.open_stream(data).read_all().to_pylist()
        table = pa.ipc.open_file(mutate_table(rows, plans.SCHEMA, rng)).read_all()
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, None, "zstd")))
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        body = sink.getvalue().to_pybytes()
    return replaced(path, body + hashlib.sha256(body).digest())


def shard(target: Victim, rng: Random) -> Undo:
    """A shard's file, with its own checksums made anew half of the time, and then its name."""
    number = rng.randrange(len(target.rows("shards", SHARDS)))

    def change(staged: Path) -> None:
        path = rng.choice(sorted(one for one in staged.rglob("*") if one.is_file()))
        data = path.read_bytes()
        if path.name == "zarr.json" and rng.random() < 0.7:
            import json

            document = json.loads(data)
            raw = mutate_json(document, rng)
            data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
            for mark, text in raw.items():
                data = data.replace(f'"{mark}"'.encode(), text.encode())
        else:
            data = mutate_bytes(data, rng)
            if rng.random() < 0.5 and path.parent.name == "key":
                data = data[:-4] + shard_format.crc_bytes(data[:-4])
        path.chmod(0o644)
        path.write_bytes(data)

    undo = with_shard(target, number, change)
    return both(undo, target.restore)


def links(target: Victim, rng: Random) -> Undo:
    """Something in the cache is a link to the same outside, or a pipe, a device, an endless file, the other kind."""
    root, outside = target.root / "cache", target.root.with_name(f"{target.root.name}-outside")
    path = rng.choice([root / "latentry.json", *sorted(one for one in root.rglob("*") if rng.random() < 0.5)])
    aside = outside / "aside"
    outside.mkdir(exist_ok=True)
    path.rename(aside)
    kind = rng.choice(("link", "link", "link", "pipe", "device", "endless", "loop", "other", "nothing"))
    if kind in ("link", "device", "loop"):
        path.symlink_to({"link": aside, "device": "/dev/zero", "loop": path}[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "other" and not aside.is_dir():
        path.mkdir()
    elif kind in ("other", "endless"):
        path.touch()
        os.truncate(path, 1 << (30 if path.name.startswith("c.") else 40))  # whatever rows there are, are read

    def undo() -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)

    return undo


KINDS: dict[str, tuple[Attack, bool, bool]] = {  # attack, whether the manifest is looked at, whether records are
    "manifest": (manifest, True, False), "manifest_bytes": (manifest_bytes, True, False),
    "table_values": (table_values, True, False), "table_bytes": (table_bytes, True, False),
    "shard": (shard, True, False), "marker": (marker, True, False), "commit": (commit, False, True),
    "damage": (damage, True, True), "plan": (plan, False, True), "links": (links, True, True),
}  # fmt: skip


def attack(target: Victim, watch: Watch, kind: str, seed: int, user: int | None = None) -> bool:
    """One attack, looked at by ourselves or by an ordinary user; whether it was refused."""
    change, of_manifest, of_records = KINDS[kind]

    def look() -> bool:
        codes: list[int] = []
        with watch.look():
            if of_manifest:
                codes += look_at(target, whole=seed % 8 == 0, quick=seed % 2 == 0)
            if of_records:
                codes += look_at_records(target)
        return bool(codes)

    undo = change(target, Random(f"{kind} {seed}"))
    try:
        return look() if user is None else as_user(target, look, user)
    finally:
        undo()
        target.restore_damage()


def as_user(target: Victim, look: Callable[[], bool], user: int) -> bool:
    """The same by an ordinary user, who may write nothing in the cache."""
    places = [one for one in (target.root, *target.root.rglob("*")) if one.is_dir() and not one.is_symlink()]
    for place in places:
        place.chmod(0o555)
    child = os.fork()
    if not child:
        code = 2
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            code = int(look())
        except BaseException:
            print(f"\n{told(traceback.format_exc())}", flush=True)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for place in places:
        place.chmod(0o755)
    if code not in (0, 1):
        raise AssertionError(f"as an ordinary user it ended with code {code}")
    return bool(code)


def told(text: str) -> str:
    """A traceback whose lines are no longer than anybody reads."""
    return "\n".join(line[:300] for line in text.splitlines()[-30:])


def limit() -> None:
    import resource

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))


def main(root: Path, jobs: list[str], user: int | None = None) -> None:
    target, watch = victim(root, SMALLER), Watch(root)
    assert look_at(target, whole=True) == [] and look_at_records(target) == [], "the victim itself is refused"
    target.restore_damage()
    printable("\x1b")
    for kind in KINDS:  # what is imported late is imported now: an ordinary user may not be able to read this Python
        for seed in (-1, -2, -8):
            attack(target, watch, kind, seed, None)
    before = peak_resident()
    if sys.platform == "linux":
        limit()
    for job in jobs:
        kind, first, count = job.split(":")
        refused = 0
        for seed in range(int(first), int(first) + int(count)):
            os.write(1, f"\r{kind} {seed}".encode())
            try:
                refused += attack(target, watch, kind, seed, user)
            except BaseException:
                print(f"\n{kind} {seed} failed:\n{told(traceback.format_exc())}", flush=True)
                sys.exit(1)
            grown = peak_resident() - before
            if grown > GROWTH:
                print(f"\n{kind} {seed}: memory grew by {grown >> 20} MB", flush=True)
                sys.exit(1)
        print(f"\n{kind}: {count} attacks, {refused} refused", flush=True)
    assert look_at(target) == [] and look_at_records(target) == [], "the victim was left damaged"


class TooLong(BaseException):
    """A look takes for ever; nobody may catch that by mistake."""


def too_long(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_long)
    words, given = sys.argv[1:], "--as" in sys.argv
    main(Path(words[0]), words[1:-2] if given else words[1:], int(words[-1]) if given else None)
