"""A small manifest and its cache, to be attacked: every kind of record is there, and can be sealed again.

Whoever attacks knows the format: digests are made anew and named, so that only the readers' own checks are left.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from synthetic import Scale, build

from prep.cache import damage, plans
from prep.cache.damage import Damage
from prep.cache.ledger.ledger import write_commit
from prep.cache.records import Reject, Task
from prep.cache.store import Cache
from prep.digest import canonical, digest_bytes, digest_json
from prep.findings import Finding
from prep.fs.tree import tree_digest
from prep.manifest.document import write_manifest
from prep.manifest.tables import SAMPLES, SHARDS, build_findings, read_table, write_table

SCALE = Scale(samples=24, buckets=3, per_shard=9)
SMALLER = Scale(samples=10, buckets=2, per_shard=16)  # for those who attack it ten thousand times
Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Victim:
    """Where everything lies, and what stood there first."""

    root: Path
    document: Mapping[str, Any]
    plan: str  # its name
    damage: Mapping[Path, bytes]  # the damage records

    @property
    def path(self) -> Path:
        return self.root / "m.json"

    @property
    def cache(self) -> Cache:
        return Cache(root=self.root / "cache")

    def copy(self) -> dict[str, Any]:
        """The document, to be changed."""
        return json.loads(json.dumps(self.document))

    def write(self, document: Mapping[str, Any], raw: Mapping[str, str] | None = None) -> None:
        self.path.write_bytes(sealed(document, raw))

    def rows(self, name: str, schema: pa.Schema) -> list[dict[str, Any]]:
        """The rows of a table, to be changed."""
        return read_table(self.cache, self.document["tables"][name], schema).to_pylist()

    def put_table(self, name: str, data: bytes, document: dict[str, Any] | None = None) -> Undo:
        """The manifest names a table of these bytes."""
        document = document or self.copy()
        document["tables"][name] = digest_bytes(data)
        undo = replaced(self.cache.table(document["tables"][name]), data)
        self.write(document)
        return undo

    def restore(self) -> None:
        self.write(self.document)

    def restore_damage(self) -> None:
        """The damage records as they were: readers add what they find, and verify takes away what it does not."""
        for path in (self.root / "cache" / "damaged").glob("*"):
            if path not in self.damage:
                path.unlink()
        for path, data in self.damage.items():
            path.write_bytes(data)


def victim(root: Path, scale: Scale = SCALE) -> Victim:
    """The victim in a new directory."""
    made = build(root, scale)
    cache = Cache(root=root / "cache")
    document = json.loads(json.dumps(dict(made.document)))
    text = {"shard": document["prompts"]["unconditional"]["shard"], "row": 1}
    document["prompts"]["samples"] = [
        {"prompt": "a dog", "negative": None, "positive": text, "negative_row": document["prompts"]["unconditional"]},
        {"prompt": "a cat", "negative": "blurry", "positive": text, "negative_row": text}]
    document["options"] = ["--resolution", "512", {"path": "../masks"}, {"path": None}]
    document["sources"], document["recipe"] = ["photos", None, "../more"], "dataset.toml"
    document["fields"]["latent"]["context"] = {"meaning": 1, "image": {"meaning": 1, "filter": "x"}, "vae": "ab" * 32}
    document["latents"]["alpha"] = [255, 255, 255]
    findings = [Finding(path=f"{number}.png", code="truncated", severity=severity, detail="ends early")
                for number, severity in enumerate(("error", "warning", "info"))]
    document["tables"]["findings"] = write_table(cache, build_findings(findings))
    document["rejected"] = 1
    document.pop("self")
    write_manifest(root / "m.json", document)
    plan = _records(cache)
    records = {path: path.read_bytes() for path in (root / "cache" / "damaged").glob("*.json")}
    return Victim(root=root, document=document, plan=plan, damage=records)


def _records(cache: Cache) -> str:
    """A commit of rejects, a plan, a damage record; returns the plan's name."""
    keys = [digest_bytes(bytes([number])) for number in range(4)]
    reject = Reject(key=keys[0], code="truncated", detail="ends early")
    write_commit(cache, Task(key=keys[1], field="latent", rows=(keys[0],)), None, [reject], {"host": "x", "ms": 3})
    tasks = [Task(key=digest_json({"kind": "task", "field": field, "rows": keys[at:at + 2]}), field=field,
                  rows=tuple(keys[at:at + 2])) for at, field in ((0, "latent"), (2, "text"))]
    plans.write_plan(cache, keys[3], tasks)
    shard = next(cache.shards())
    damage.record(cache, [Damage(shard=shard, field="latent", array="latent", row=0, what="is damaged")])
    return keys[3]


def sealed(document: Mapping[str, Any], raw: Mapping[str, str] | None = None) -> bytes:
    """Canonical bytes with their `self`; `raw` has texts that stand for strings in it, which JSON may not even be."""
    body = {key: value for key, value in document.items() if key != "self"}
    data = _with(canonical(body), raw)
    return _with(canonical({**body, "self": hashlib.sha256(data).hexdigest()}), raw)


def _with(data: bytes, raw: Mapping[str, str] | None) -> bytes:
    for mark, text in (raw or {}).items():
        data = data.replace(canonical(mark), text.encode())
    return data


def replaced(path: Path, data: bytes) -> Undo:
    """Puts `data` at `path`; the undoing."""
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    _overwrite(path, data)
    return lambda: path.unlink() if before is None else _overwrite(path, before)


def _overwrite(path: Path, data: bytes) -> None:
    if path.exists():
        path.chmod(0o644)
    path.write_bytes(data)


def with_shard(victim: Victim, number: int, change: Callable[[Path], None]) -> Undo:
    """The shard of that number, changed by an attacker who then gives it its new name everywhere."""
    shards, samples = victim.rows("shards", SHARDS), victim.rows("samples", SAMPLES)
    staged = victim.root / "staged"
    shutil.copytree(victim.cache.shard(shards[number]["digest"].hex()), staged)
    change(staged)
    digest = tree_digest(staged)
    target = victim.cache.shard(digest)
    if target.exists():
        shutil.rmtree(staged)
        return lambda: None
    target.parent.mkdir(exist_ok=True)
    staged.rename(target)
    order = [row["digest"] for row in shards]
    shards[number]["digest"] = bytes.fromhex(digest)
    shards[number]["bytes"] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    shards.sort(key=lambda row: (row["field"], row["digest"]))
    order[number] = bytes.fromhex(digest)
    moved = {old: [row["digest"] for row in shards].index(name) for old, name in enumerate(order)}
    document = victim.copy()
    _renumber(samples, document, {**moved, -1: -1})
    undo = [victim.put_table("shards", file_of(pa.Table.from_pylist(shards, schema=SHARDS)), document),
            victim.put_table("samples", file_of(pa.Table.from_pylist(samples, schema=SAMPLES)), document)]
    return both(*undo, lambda: shutil.rmtree(target))


def _renumber(samples: list[dict[str, Any]], document: dict[str, Any], moved: Mapping[int, int]) -> None:
    for sample in samples:
        for view in sample["views"]:
            view.update(latent_shard=moved[view["latent_shard"]], mask_shard=moved[view["mask_shard"]])
        for text in sample["texts"]:
            text["shard"] = moved[text["shard"]]
    prompts = document["prompts"]
    for place in [prompts["unconditional"], *(each[name] for each in prompts["samples"]
                                              for name in ("positive", "negative_row"))]:
        place["shard"] = moved[place["shard"]]


def both(*undoing: Undo) -> Undo:
    """One undoing after another."""
    def undo() -> None:
        for one in undoing:
            one()

    return undo


def file_of(table: pa.Table, *, chunk: int = 1 << 16, **options: Any) -> bytes:
    """A table as an Arrow IPC file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return sink.getvalue().to_pybytes()
