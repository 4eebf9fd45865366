"""Implements `prep gc`: removes everything that no kept manifest needs and that is old enough."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.cache.remote.shards import shard_bytes
from prep.cache.remote.working import open_to_encode
from prep.cache.store import Cache, open_cache
from prep.errors import CacheError, UsageError
from prep.formatting import counted, format_bytes, join_names, printable
from prep.fs import atomic
from prep.fs.lock import lock_directory
from prep.fs.paths import resolve
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.maintenance import sweep
from prep.maintenance.gc_store import check_no_plan, find_garbage_in_store, remove_from_store
from prep.maintenance.others import OtherManifest, find_others, find_others_in_store, replaced_in, searched_folders
from prep.maintenance.sweep import KINDS, Needed, Sweep
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.tables import FINDINGS, SAMPLES, SHARDS, read_table
from prep.progress import Progress

MEND = "to repair, run prep encode again as it was first run; then run prep gc again"


@dataclass(frozen=True, kw_only=True, slots=True)
class GcReport:
    """What `prep gc` found, and removed unless it was a dry run."""

    sweep: Sweep
    manifests: int  # kept
    guard: str  # as the user wrote it
    dry_run: bool
    others: tuple[OtherManifest, ...] = ()  # manifests that are not kept and lose rows or tables
    replaced: tuple[Path, ...] = ()  # replaced manifests, which gc removes
    searched: tuple[Place, ...] = ()  # the directories that were searched for these

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        removed = {kind: len(self.sweep.remove[kind]) for kind in KINDS} | {"staging": self.sweep.staging}
        kept = {kind: len(self.sweep.keep[kind]) for kind in KINDS}
        return {"format": "latentry/gc", "version": 1, "dry_run": self.dry_run, "removed": removed,
                "bytes": sum(self.sweep.sizes.values()), "sizes": dict(self.sweep.sizes),
                "kept": {"manifests": self.manifests, **kept, "bytes": self.sweep.kept_bytes},
                "guarded": self.sweep.guarded,
                "others": [{"manifest": str(one.path), "shards": one.shards, "tables": one.tables}
                           for one in self.others],
                "replaced": [str(one) for one in self.replaced],
                "searched": [str(one) for one in self.searched]}

    def as_text(self) -> str:
        """The report as a few lines of text."""
        document = self.as_json()
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"{verb} {_count(count, kind)}: {format_bytes(self.sweep.sizes[kind])}"
                 for kind, count in document["removed"].items() if count]
        lines += [f"{verb} {counted(len(self.replaced), 'replaced manifest')}: {join_names(names, 4)}"
                  for names in [[str(one) for one in self.replaced]] if names]
        kept = document["kept"]
        lines += [describe_other(one, dry_run=self.dry_run) for one in self.others]
        if self.searched and any(document["removed"].values()):
            places = join_names([str(one) for one in self.searched], None)
            lines.append(f"other manifests were searched for only in {places}; name those elsewhere with --keep")
        elif any(document["removed"].values()):
            lines.append("other manifests were not searched for; name all of them with --keep")
        lines.append(f"{_count(kept['shards'], 'shards')} and {_count(kept['tables'], 'tables')} kept "
                     f"({format_bytes(kept['bytes'])}) for {_count(self.manifests, 'manifests')}")
        if self.sweep.guarded:
            lines.append(f"of these, {self.sweep.guarded} shards, commits, tables and plans are kept only because they "
                         f"are newer than {self.guard}")
        if not any(document["removed"].values()) and not self.replaced:
            return "\n".join(["nothing to remove", *lines])
        total = format_bytes(document["bytes"])
        return "\n".join([*lines, f"{total} would be freed; nothing was removed: add --yes to remove" if self.dry_run
                          else f"{total} freed"])


WORDS = {"commits": ("commit", "commits"), "shards": ("shard", "shards"), "tables": ("table", "tables"),
         "plans": ("plan", "plans"), "damaged": ("damage record", "damage records"),
         "staging": ("leftover", "leftovers"), "manifests": ("manifest", "manifests")}


def describe_other(other: OtherManifest, *, dry_run: bool) -> str:
    """What a manifest that is not kept loses, and how to prevent or repair that."""
    name = printable(str(other.path))
    needed = f"{_count(other.shards, 'shards')} and {_count(other.tables, 'tables')}"
    if dry_run:
        return (f"{name} uses this cache and is not kept: {needed} that it needs would be removed; "
                f"--keep {shlex.quote(name)} keeps them")
    return (f"{name} uses this cache and is not kept: {needed} that it needs are removed; delete it, or run its "
            "prep encode again to restore them")


def _count(count: int, kind: str) -> str:
    return f"{count} {WORDS[kind][count != 1]}"


def collect_garbage(path: Place, keep: Sequence[Place], *, guard: float, asked: str, dry_run: bool,
                    progress: Progress, abandon: Sequence[str] = (), notice: Callable[[str], None] = lambda _: None
                    ) -> GcReport:
    """Removes from the cache at `path` what no manifest in `keep` needs and is older than `guard` seconds, and the
    plans that `abandon` names by their first digits.

    Reads everything before removing anything; removes nothing if a kept manifest or its cache is damaged, or another
    process uses the cache. Calls `notice` for each other manifest that loses something, before the removal. Raises
    `UsageError`, `ManifestError`, `CacheError`, `PathError`.
    """
    if not keep:
        raise UsageError("no manifest to keep was named, expected --keep MANIFEST at least once",
                         hint="prep gc CACHE --keep MANIFEST shows what no kept manifest needs; --yes removes it")
    if isinstance(path, Bucket):
        return _collect_in_store(path, keep, guard=guard, asked=asked, dry_run=dry_run, progress=progress,
                                 abandon=abandon, notice=notice)
    cache = open_cache(path, create=False)
    with contextlib.nullcontext() if dry_run else lock_directory(cache.root, exclusive=True):
        manifests = [read_manifest(one) for one in keep]  # not before the lock: an encoder may be writing one
        found = sweep.find_garbage(cache, _needed(cache, manifests), guard=guard, abandon=abandon)
        others = find_others(cache, manifests, found)
        folders, kept = searched_folders(cache, manifests), {resolve(manifest.path) for manifest in manifests}
        replaced = tuple(one for one in replaced_in(folders, cache) if one.resolve() not in kept)
        if not dry_run:
            for one in others:
                notice(describe_other(one, dry_run=False))
            for path in replaced:  # before what they need
                atomic.remove(path)
            with progress("removing", sum(map(len, found.remove.values())), "things") as tick:
                sweep.remove(cache, found, tick)
    return GcReport(sweep=found, manifests=len(keep), guard=asked, dry_run=dry_run, others=others, replaced=replaced,
                    searched=folders)


def _collect_in_store(path: Bucket, keep: Sequence[Place], *, guard: float, asked: str, dry_run: bool,
                      progress: Progress, abandon: Sequence[str], notice: Callable[[str], None]) -> GcReport:
    """As `collect_garbage`, of a cache in an object store."""
    cache = open_to_encode(path, create=False)
    manifests = [read_manifest(one) for one in keep]
    shards: dict[str, int] = {}
    tables: set[str] = set()
    for manifest in manifests:
        if manifest.cache != path:
            raise _of_another_cache(manifest, cache)
        named = manifest.document["tables"]
        shards |= {row["digest"].hex(): row["bytes"] for row in read_table(cache, named["shards"], SHARDS).to_pylist()}
        tables |= set(named.values())
    found = find_garbage_in_store(cache, Needed(shards=frozenset(shards), tables=frozenset(tables)), shards,
                                  guard=guard, abandon=abandon)
    others = find_others_in_store(cache, manifests, found.sweep)
    for line in (*others.notices, *(() if dry_run else (describe_other(one, dry_run=False) for one in others.found))):
        notice(line)

    def unchanged() -> None:
        for one, manifest in zip(keep, manifests, strict=True):
            if read_manifest(one).digest != manifest.digest:
                raise CacheError(f"{one} was replaced while prep gc ran, so nothing more is removed",
                                 hint="run prep gc again")
        check_no_plan(cache, found)

    if not dry_run:
        with progress("removing", sum(map(len, found.sweep.remove.values())), "things") as tick:
            remove_from_store(cache, found, unchanged, tick)
    return GcReport(sweep=found.sweep, manifests=len(keep), guard=asked, dry_run=dry_run, others=others.found,
                    searched=others.searched)


def _needed(cache: Cache, keep: Sequence[Manifest]) -> Needed:
    shards: set[str] = set()
    tables: set[str] = set()
    for manifest in keep:
        path, root = manifest.path, manifest.cache_root
        if not root.is_dir() or not root.samefile(cache.root):
            raise _of_another_cache(manifest, cache)
        named = manifest.document["tables"]
        for name, schema in (("samples", SAMPLES), ("findings", FINDINGS)):
            read_table(cache, named[name], schema)
        for row in read_table(cache, named["shards"], SHARDS).to_pylist():
            _check_shard(cache, path, row["digest"].hex(), row["bytes"])
            shards.add(row["digest"].hex())
        tables |= set(named.values())
    return Needed(shards=frozenset(shards), tables=frozenset(tables))


def _of_another_cache(manifest: Manifest, cache: Cache) -> CacheError:
    return CacheError(f"{manifest.path} is a manifest of the cache {manifest.cache}, "
                      f"expected one of {cache.place}",
                      hint="name only manifests of this cache, and run prep gc for the other cache separately")


def _check_shard(cache: Cache, path: Place, digest: str, size: int) -> None:
    """Raises unless a shard has its full size: otherwise its rows may be in shards that no manifest names yet."""
    try:
        found = shard_bytes(cache, digest)
    except OSError:
        raise CacheError(f"{path} needs shard {digest}, which is missing, so nothing is removed", hint=MEND) from None
    if found != size:
        raise CacheError(f"{path} needs shard {digest} of {size} bytes, which has {found}, so nothing is removed",
                         hint=MEND)
