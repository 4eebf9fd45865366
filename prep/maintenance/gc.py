"""Implements `prep gc`: removes everything that no kept manifest needs and that is old enough."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.errors import CacheError, UsageError
from prep.formatting import counted, format_bytes, join_names, printable
from prep.fs import atomic
from prep.fs.lock import lock_directory
from prep.fs.paths import resolve
from prep.fs.place import Place
from prep.maintenance.others import OtherManifest, find_others, is_of, replaced_in
from prep.maintenance.stock import KINDS, stock_of
from prep.maintenance.sweep import Needed, Sweep, check_no_plan, find_garbage
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.tables import FINDINGS, SHARDS, read_table, samples_schema
from prep.progress import Progress


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
        counts, sizes = {kind: len(self.sweep.keep[kind]) for kind in KINDS}, self.sweep.sizes
        return {"format": "latentry/gc", "version": 1, "dry_run": self.dry_run, "removed": removed,
                "bytes": sum(sizes.values()), "sizes": sizes,
                "kept": {"manifests": self.manifests, **counts, "bytes": self.sweep.kept_bytes},
                "guarded": self.sweep.guarded,
                "others": [{"manifest": str(other.path), "shards": other.shards, "tables": other.tables}
                           for other in self.others],
                "replaced": [str(path) for path in self.replaced],
                "searched": [str(place) for place in self.searched]}

    def as_text(self) -> str:
        """The report as a few lines of text."""
        document = self.as_json()
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"{verb} {_count(count, kind)}: {format_bytes(document['sizes'][kind])}"
                 for kind, count in document["removed"].items() if count]
        lines += [f"{verb} {counted(len(self.replaced), 'replaced manifest')}: {join_names(names, 4)}"
                  for names in [[str(path) for path in self.replaced]] if names]
        needed = document["kept"]
        lines += [describe_other(other, dry_run=self.dry_run) for other in self.others]
        if self.searched and any(document["removed"].values()):
            places = join_names([str(place) for place in self.searched], None)
            lines.append(f"other manifests were searched for only in {places}; name those elsewhere with --keep")
        elif any(document["removed"].values()):
            lines.append("other manifests were not searched for; name all of them with --keep")
        lines.append(f"{_count(needed['shards'], 'shards')} and {_count(needed['tables'], 'tables')} kept "
                     f"({format_bytes(needed['bytes'])}) for {_count(self.manifests, 'manifests')}")
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


def collect_garbage(path: Place, keep: Sequence[Place], *, guard: float, older_than: str, dry_run: bool,
                    progress: Progress, abandon: Sequence[str] = (), notice: Callable[[str], None] = lambda _: None
                    ) -> GcReport:
    """Removes from the cache at `path`, a directory or a URL, what no manifest in `keep` needs and is older than
    `guard` seconds, and the plans that `abandon` names by their first digits.

    Reads everything before removing anything; removes nothing if a kept manifest or its cache is damaged, or another
    process uses the cache. Calls `notice` for each other manifest that loses something, before the removal. Raises
    `UsageError`, `ManifestError`, `CacheError`, `PathError`.
    """
    if not keep:
        raise UsageError("no manifest to keep was named, expected --keep MANIFEST at least once",
                         hint="prep gc CACHE --keep MANIFEST shows what no kept manifest needs; --yes removes it")
    cache = open_to_encode(path, create=False)
    with contextlib.nullcontext() if dry_run else lock_directory(cache.root, exclusive=True):
        manifests = [read_manifest(place) for place in keep]  # not before the lock: an encoder may be writing one
        sweep = find_garbage(cache, _needed(cache, manifests), guard=guard, abandon=abandon)
        others = find_others(cache, manifests, sweep)
        named = {resolve(manifest.path) for manifest in manifests}
        replaced = tuple(path for path in replaced_in(others.searched, cache) if path.resolve() not in named)
        for line in (*others.notices, *(() if dry_run else (describe_other(other, dry_run=False)
                                                            for other in others.manifests))):
            notice(line)

        def unchanged() -> None:
            for manifest in manifests:
                if read_manifest(manifest.path).digest != manifest.digest:
                    raise CacheError(f"{manifest.path} was replaced while prep gc ran, so nothing more is removed",
                                     hint="run prep gc again")
            check_no_plan(cache, sweep)

        if not dry_run:
            for file in replaced:  # before what they need
                atomic.remove(file)
            with progress("removing", sum(map(len, sweep.remove.values())), "things") as tick:
                stock_of(cache).remove(sweep.remove, sweep.things, unchanged, tick)
    return GcReport(sweep=sweep, manifests=len(keep), guard=older_than, dry_run=dry_run, others=others.manifests,
                    replaced=replaced, searched=others.searched)


def _needed(cache: Cache, keep: Sequence[Manifest]) -> Needed:
    """What manifests need. Raises `CacheError` if one is of another cache, or its tables are damaged."""
    shards: dict[str, tuple[int, str]] = {}
    tables: set[str] = set()
    for manifest in keep:
        if not is_of(manifest, cache):
            raise CacheError(f"{manifest.path} is a manifest of the cache {manifest.cache}, "
                             f"expected one of {cache.place}",
                             hint="name only manifests of this cache, and run prep gc for the other cache separately")
        named = manifest.document["tables"]
        samples = samples_schema(manifest.shapes, embedded=manifest.embedded)
        for name, schema in (("samples", samples), ("findings", FINDINGS)):
            read_table(cache, named[name], schema)
        for row in read_table(cache, named["shards"], SHARDS).to_pylist():
            shards[row["digest"].hex()] = row["bytes"], str(manifest.path)
        tables |= set(named.values())
    return Needed(shards=shards, tables=frozenset(tables))
