"""What `prep encode` would take for very many pictures on many devices, where there are none yet.

The code that plans and seals runs on assumed samples and keys, and is measured. What it takes for more samples is
computed from that as if linear in their number, which memory is (a million: within 6 %). Time grows faster: one of a
million samples takes twice as long to plan as one of 20,000, as sorting and memory get slower. Files and requests of
shards follow from their format, and how long they are waited for, from the store's latency.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from assumed import assumed, lines_of

from prep.cache.records import RowRef
from prep.cache.remote.stored import JOBS
from prep.cache.remote.upload import AT_ONCE, FILES
from prep.digest import digest_strings
from prep.encode.options import SHARD_BYTES
from prep.encode.plan import plan, rows_of_task
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import Targets
from prep.encode.text_groups import TextGroups
from prep.formatting import counted, duration, format_bytes, grouped
from prep.fs.remote.objects import LISTED, UPLOAD_PART
from prep.manifest.samples import Samples, build_samples
from prep.manifest.shards import MOST_OF_A_MANIFEST, manifests_for

TIMED, TRACED = 20_000, 4_000  # synthetic samples that are planned to measure time, and memory
ASSUMED = 1000  # pictures that are made where there are none; they are as many of each aspect ratio
LEDGER_ROW = 40  # bytes of a row in a ledger (`prep.cache.ledger.ledger`)
PARTS_AT_ONCE = 4  # of a file that is uploaded in parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What is simulated."""

    pictures: int
    gpus: int = 1
    latency: float | None = None  # seconds that a request to the store takes; None: the cache is on a disk
    rate: float | None = None  # pictures that a device encodes in a second; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldScale:
    """The rows of a field at that scale."""

    rows: int
    shards: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreScale:
    """What the store takes."""

    objects: int
    requests: int  # of all uploads, with what reads them back, and of commits
    waited: float  # seconds of latency for one shard and its commit, beside the device
    listing: float  # seconds to list the finished cache, as each start does
    catching_up: float  # seconds to fetch all commits and keys, as a machine does that has none of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What encoding so many pictures would take."""

    scale: Scale
    like: int  # samples that are planned
    fields: Mapping[str, FieldScale]
    planning: float  # CPU seconds at least, in each process that plans
    planning_memory: int  # bytes
    ledger: int  # bytes of the ledger of the finished cache, in such a process
    sealing: float  # CPU seconds at least, to make the table of samples
    table: int  # its bytes in memory
    store: StoreScale | None
    seconds: float | None  # of encoding on all devices together; None: not known
    per_shard: float | None  # seconds that a device takes for a shard, on average
    assumed: tuple[str, ...] = ()  # what the pictures are assumed to be

    def as_lines(self) -> list[str]:
        """The same for people."""
        shards = sum(one.shards for one in self.fields.values())
        lines = [*self.assumed, f"simulated: {counted(self.scale.pictures, 'picture')} on "
                 f"{counted(self.scale.gpus, 'device')}"]
        lines += [f"{name}: {counted(one.rows, 'row')} in {counted(one.shards, 'shard')}, {format_bytes(one.bytes)}"
                  for name, one in self.fields.items()]
        lines += [f"commits: {grouped(shards)}, one for each shard",
                  f"planning: at least {duration(self.planning)} and {format_bytes(self.planning_memory)} of memory in "
                  f"each process that plans, and {format_bytes(self.ledger)} for the ledger when all is encoded",
                  f"sealing: at least {duration(self.sealing)} for the manifest's table of samples, "
                  f"{format_bytes(self.table)}"]
        if self.store is not None:
            lines += [
                f"store: {counted(self.store.objects, 'object')}, {counted(self.store.requests, 'request')}; each "
                f"shard waits {self.store.waited:.2f} s for answers, beside the device",
                f"store: each start lists it, which takes {duration(self.store.listing)} when all is encoded; a "
                f"machine that has none of the commits fetches them in {duration(self.store.catching_up)}"]
        return [*lines, *self._time_lines(), *(f"note: {note}" for note in self.limits())]

    def _time_lines(self) -> list[str]:
        """How long encoding takes; if nobody knows how fast a device is, how that follows from its speed."""
        scale, devices = self.scale, counted(self.scale.gpus, "device")
        if scale.rate is not None and self.seconds is not None:
            return [f"time: about {duration(self.seconds)} on {devices} that encode "
                    f"{_pictures(scale.rate)} a second each"]
        lines = [f"time: {duration(scale.pictures / scale.gpus)} on {devices} if each encodes 1 picture a second, and "
                 "less in proportion if more: name it with --pictures-per-second"]
        if self.store is not None and self.store.waited:
            shards = sum(one.shards for one in self.fields.values())
            most = scale.pictures / shards / self.store.waited
            lines.append(f"store: it becomes the limit where a device encodes more than {_pictures(most)} a second, "
                         "since the upload of a shard then waits longer than encoding takes")
        return lines

    def limits(self) -> list[str]:
        """What would be the limit, and what helps."""
        found = []
        memory = self.planning_memory + self.ledger
        if memory > 64 << 30:
            most = self.scale.pictures * (32 << 30) // memory
            found.append(f"memory for planning is the limit: all keys are held at once. Several manifests of at most "
                         f"{grouped(_round(most))} pictures each need 32 GiB")
        shards = sum(one.shards for one in self.fields.values())
        if (least := manifests_for(shards, self.table)) > 1:
            found.append(f"{MOST_OF_A_MANIFEST}, so at least {grouped(least)} manifests are needed, which may share a "
                         "cache")
        store = self.store
        if store is not None and self.per_shard is not None and store.waited > self.per_shard:
            found.append(f"the store is the limit: a device encodes a shard in {self.per_shard:.2f} s, less than its "
                         "upload waits")
        if store is not None and self.seconds is not None and store.listing > self.seconds / 10:
            found.append("listing the store takes more than a tenth of the time of encoding: a cache for each part of "
                         "the pictures has fewer objects")
        return found


def simulate_assumed(family: str, scale: Scale, choices: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
                     ) -> Simulated:
    """What encoding `scale` pictures of a family would take, none of which is there."""
    wanted = assumed(family, min(scale.pictures, ASSUMED), choices)
    return replace(simulate(wanted, scale, shard_bytes), assumed=tuple(lines_of(wanted, shard_bytes)))


def simulate(wanted: ResolvedRecipe, scale: Scale, shard_bytes: int = SHARD_BYTES) -> Simulated:
    """What encoding `scale` pictures like those of `wanted` would take."""
    like = len(wanted.targets.samples)
    times = scale.pictures / len({one.index for one in wanted.bucketing.pictures})  # of several resolutions, once
    samples = round(like * times)
    fields, objects, requests, rounds = {}, 0, 0, 0
    for field, keys in wanted.targets.by_field().items():
        once = _rows_without_samples(wanted, field)
        groups = Counter((wanted.row_bytes(field, key), wanted.group_of(field, key)) for key in keys)
        few = Counter((wanted.row_bytes(field, key), wanted.group_of(field, key)) for key in once)
        arrays = len(wanted.specs.as_manifest(field))
        shards = stored = 0
        for (size, group), count in groups.items():
            alone = few[size, group]
            most, rows = rows_of_task(size, shard_bytes), ceil((count - alone) * times) + alone
            number = ceil(rows / most)
            shards, stored = shards + number, stored + rows * size
            asked, waits = requests_of(arrays, min(most, rows) * size)
            requests, rounds = requests + number * asked, rounds + number * waits
        objects += shards * (_files(arrays) + 1)
        if keys:
            fields[field] = FieldScale(rows=round((len(keys) - len(once)) * times) + len(once), shards=shards,
                                       bytes=stored)
    rows, shards = (sum(getattr(one, name) for one in fields.values()) for name in ("rows", "shards"))
    store = None if scale.latency is None else StoreScale(
        objects=objects, requests=requests, waited=rounds / shards * scale.latency,
        listing=objects / LISTED * scale.latency, catching_up=ceil(2 * shards / JOBS) * scale.latency)
    work = scale.pictures / scale.rate if scale.rate is not None else None  # of one device
    return Simulated(scale=scale, like=like, fields=fields, planning=_planning(wanted, shard_bytes) * samples,
                     planning_memory=round(_planning_memory(wanted, shard_bytes) * samples),
                     ledger=rows * LEDGER_ROW, store=store,
                     seconds=None if work is None else work / scale.gpus,
                     per_shard=None if work is None else work / shards, **_sealing(wanted, samples))


def _rows_without_samples(wanted: ResolvedRecipe, field: str) -> set[str]:
    """The keys of the row of no caption and of rows of prompts, which do not become more with the pictures."""
    if field != "text":
        return set()
    return set(wanted.targets.texts) - {text.key for sample in wanted.targets.samples for text in sample.texts}


def many_like(wanted: ResolvedRecipe, count: int) -> ResolvedRecipe:
    """`wanted` with about `count` samples: copies of its own, with keys of their own, for the same rows and groups."""
    targets, groups = wanted.targets, wanted.text_groups
    groups.count(targets.texts)
    samples = Samples()
    latents, masks, texts = dict(targets.latents), dict(targets.masks), dict(targets.texts)
    lengths = {key: groups.tokens(key) for key in targets.texts}
    for copy in range(ceil(count / len(targets.samples))):
        def other(key: str, copy: int = copy) -> str:
            return digest_strings([key, str(copy)])

        latents.update({other(key): target._replace(key=other(key)) for key, target in targets.latents.items()})
        masks.update({other(key): target._replace(key=other(key)) for key, target in targets.masks.items()})
        texts.update({other(key): replace(target, key=other(key)) for key, target in targets.texts.items()})
        lengths.update({other(key): groups.tokens(key) for key in targets.texts})
        for one in targets.samples:
            views = (view._replace(latent=other(view.latent), mask=None if view.mask is None else other(view.mask))
                     for view in one.views)
            samples.add(one._replace(id=other(one.id), views=tuple(views),
                                texts=tuple(text._replace(key=other(text.key)) for text in one.texts)))
    more = Targets(samples=samples, labels=(), prompts=(), unconditional=targets.unconditional, latents=latents,
                   masks=masks, texts=texts, findings=())
    return replace(wanted, targets=more, text_groups=TextGroups.known(groups, lengths))


def _planning(wanted: ResolvedRecipe, shard_bytes: int) -> float:
    """CPU seconds to plan a sample: other work here does not count."""
    many = many_like(wanted, TIMED)
    begun = time.process_time()
    plan(many, None, shard_bytes=shard_bytes, store=False)
    return (time.process_time() - begun) / len(many.targets.samples)


def _planning_memory(wanted: ResolvedRecipe, shard_bytes: int) -> float:
    """Bytes of a sample's targets and plan, at their peak."""
    tracemalloc.start()
    try:
        many = many_like(wanted, TRACED)
        planned = plan(many, None, shard_bytes=shard_bytes, store=False)
        assert planned.tasks
        return tracemalloc.get_traced_memory()[1] / len(many.targets.samples)
    finally:
        tracemalloc.stop()


def _sealing(wanted: ResolvedRecipe, samples: int) -> dict[str, Any]:
    """CPU seconds and bytes of the table of so many samples."""
    many = many_like(wanted, TRACED).targets
    refs = {key: RowRef(shard=key, row=0) for key in many.keys()}  # noqa: SIM118  # a method that sorts
    begun = time.process_time()
    table = build_samples(many.samples, many.samples.shapes, refs,
                          dict.fromkeys(refs, 0), {})
    times = samples / len(many.samples)
    return {"sealing": (time.process_time() - begun) * times, "table": round(table.nbytes * times)}


def _files(arrays: int) -> int:
    """Files of a shard (`prep.cache.shard_format`): the group's document; of keys and each array, document and data."""
    return 3 + 2 * arrays


def requests_of(arrays: int, size: int) -> tuple[int, int]:
    """Requests that upload a shard whose largest file has `size` bytes, and its commit; how many follow each other.

    The shard's place is listed, each file put and read back, the group's document last, and the commit created. A file
    of several parts is begun, put in parts and completed; one that is not read by one request is asked for its size.
    """
    parts = ceil(size / UPLOAD_PART)
    begun, asked = (2 if parts > 1 else 0), (1 if size > AT_ONCE else 0)
    more = (begun + parts - 1 if begun else 0) + asked
    follow = (begun + ceil(parts / PARTS_AT_ONCE) - 1 if begun else 0) + asked
    return 2 + 2 * _files(arrays) + more, 4 + 2 * ceil((_files(arrays) - 1) / FILES) + follow


def _pictures(rate: float) -> str:
    """A number of pictures, in three digits."""
    return "1 picture" if rate == 1 else f"{rate:,.0f} pictures" if rate >= 1000 else f"{rate:.3g} pictures"


def _round(number: int) -> int:
    """A number, rounded down to two digits."""
    power: int = 10 ** max(0, len(str(number)) - 2)
    return number // power * power
