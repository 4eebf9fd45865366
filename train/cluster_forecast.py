"""What the computers of a run would download and hold in memory, also for larger data sets: from counts alone.

A node downloads the whole of each shard that one of its ranks needs a row of. Which rank shows a sample in an epoch is
drawn at random, so with N nodes each of a shard's showings falls to a given node with probability 1 / N, and shards
with more than a few rows go to almost every node: the shuffle is over all samples, and keeps no order on the disk. With
a partitioned shuffle, a node shows its own part of each bucket and needs the shards with rows of that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from prep.batching.plan import StepPlan, require_steps
from prep.cache.ledger.columns import Column
from prep.cache.remote.headers import JOBS as HEADERS
from prep.cache.remote.headers import cost_of
from prep.loader.draws import ranks_of
from prep.loader.index import Index
from prep.loader.prefetch import bytes_by_part

TRIED = 64  # steps that are planned to see how long that takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What each node takes. Bytes are expected values; nodes differ by chance."""

    world: int
    nodes: int
    samples: int  # in an epoch
    steps: int  # of an epoch
    idle: int  # ranks without a sample of a full micro-batch
    shards: int  # that training reads
    bytes: int  # of these shards
    begin: int  # bytes of the shards that a node needs for the first step, at most over the nodes
    first: int  # bytes that a node downloads in its first epoch, with room for all
    later: int  # bytes that a node downloads in each later epoch, with the room that it has
    memory: int  # bytes of the index, on a node
    planning: float  # seconds to plan a step
    tables: int  # bytes of the manifest's tables
    headers: int  # bytes of the headers of all shards, which a node reads before its first step
    requests: int  # to an object store for these headers
    rounds: int  # of them that wait for one another


def outlook_of(index: Index, plan: StepPlan, *, world: int, nodes: int, masked: bool, room: int | None = None,
               samples: int | None = None) -> Outlook:
    """The outlook for a run with this plan on `nodes` computers with `world` ranks in all.

    `room`: bytes for copies of shards on a node; `None`: enough. `samples`: of a larger data set like this one. Raises
    `EmptyPlanError` if that has no step.
    """
    times = 1.0 if samples is None else samples / max(sum(plan.counts), 1)
    costs = (cost_of(facts.remote) for facts in index.shards)
    requests, header_bytes = (sum(part) for part in zip(*costs, strict=True))
    parts = sum(bytes_by_part(index, nodes, masked=masked)) / nodes * times if plan.partitioned else None
    counts = plan.counts
    plan = replace(plan, counts=tuple(round(count * times) for count in counts))
    require_steps(plan, index.manifest.shapes)
    showings = _showings(index, masked=masked)
    sizes = np.array([facts.bytes for facts in index.shards], np.float64)
    used = showings > 0
    whole = float(sizes[used].sum()) * times
    own = whole if parts is None else parts  # what a node reads sooner or later
    first = float((sizes * -np.expm1(showings * np.log1p(-1 / nodes)))[used].sum()) * times if (
        nodes > 1 and parts is None) else own
    missing = 0.0 if room is None else max(0.0, 1 - room / own)
    # With room for a part of its shards, a row's shard is there with the probability of that part.
    again = float((sizes * showings)[used].sum()) * times / nodes * missing
    return Outlook(
        world=world, nodes=nodes, samples=sum(plan.counts), steps=plan.steps_per_epoch,
        idle=max(0, world - plan.micro_batch), shards=round(int(used.sum()) * times), bytes=round(whole),
        begin=_to_begin(index, plan, counts, world=world, nodes=nodes, masked=masked),
        first=round(max(first, again)), later=round(again),
        memory=round(_index_bytes(index) * times) * (world // nodes), planning=_planning(plan),
        tables=round(_table_bytes(index) * times),
        headers=round(header_bytes * times), requests=round(requests * times), rounds=ceil(requests * times / HEADERS))


def _to_begin(index: Index, plan: StepPlan, counts: Sequence[int], *, world: int, nodes: int, masked: bool) -> int:
    """Bytes of the shards with the rows of the first step, of the node that has the most of them.

    `plan` may be of a larger data set: its occurrences are those of `counts`, again and again, in shards of their own.
    A sample's first view and text stand for all.
    """
    samples, needed = index.samples, set[tuple[int, int, int]]()  # node, copy of the data set, shard
    for number, part in enumerate(plan.at(0)):
        copies, places = np.divmod(part.occurrences, counts[part.bucket])
        ranks = ranks_of(number, part, plan, world)
        shown = index.samples_of(part.bucket, places)
        views, texts = samples.view_offsets[shown], samples.text_offsets[shown]
        for shards in (samples.views["latent_shard"][views], samples.texts["shard"][texts],
                       *([samples.views["mask_shard"][views]] if masked else [])):
            needed |= {(node, copy, shard) for node, copy, shard in zip(
                (ranks // (world // nodes)).tolist(), copies.tolist(), shards.tolist(), strict=True) if shard >= 0}
        nodes_of = (ranks // (world // nodes)).tolist()
        shown_places = zip(nodes_of, copies.tolist(), shown.tolist(), views.tolist(), strict=True)
        for node, copy, sample, view in shown_places:
            needed |= {(node, copy, int(samples.references["latent_shard"][reference]))
                       for reference in samples.references_of(sample, view)}
    sizes = np.zeros(nodes, np.int64)
    for node, _, shard in needed:
        sizes[node] += index.shards[shard].bytes
    return int(sizes.max())


def _showings(index: Index, *, masked: bool) -> Column:
    """[shards]: how often an epoch reads a row of each shard, on average over the draws of views and texts."""
    samples = index.samples
    shown = np.zeros(len(samples))
    for members in index.training:
        shown[members] = samples.repeats[members]
    reads = np.zeros(len(index.shards))
    view_counts, text_counts = np.diff(samples.view_offsets), np.diff(samples.text_offsets)
    of_views = np.repeat(shown / np.maximum(view_counts, 1), view_counts)
    weights = samples.texts["weight"].astype(np.float64)
    totals = np.add.reduceat(weights, samples.text_offsets[:-1]) if len(weights) else weights
    of_texts = np.repeat(shown / np.maximum(totals, 1e-30), text_counts) * weights
    each = np.diff(samples.reference_offsets) // np.maximum(view_counts, 1)  # of a view
    of_references = np.repeat(of_views, np.repeat(each, view_counts))
    for shards, counts in ((samples.views["latent_shard"], of_views), (samples.texts["shard"], of_texts),
                           (samples.references["latent_shard"], of_references),
                           *([(samples.views["mask_shard"], of_views)] if masked else [])):
        stored = shards >= 0
        reads += np.bincount(shards[stored], counts[stored], minlength=len(reads))
    return reads


def _index_bytes(index: Index) -> int:
    """What a process keeps of the sample table in memory; names and captions stay on the disk."""
    samples = index.samples
    columns = (samples.ids, samples.source, samples.role, samples.width, samples.height, samples.bucket,
               samples.repeats, samples.weight, samples.coverage, samples.view_offsets, samples.text_offsets,
               *samples.views.values(), *samples.texts.values(), *samples.references.values(),
               *index.training, *index._ends)
    return sum(column.nbytes for column in columns)


def _table_bytes(index: Index) -> int:
    tables = index.manifest.document["tables"].values()
    return sum(index.cache.table(digest).stat().st_size for digest in tables)


def _planning(plan: StepPlan) -> float:
    """Seconds that a step of the real plan takes, measured in the middle of an epoch."""
    first = max(0, plan.steps_per_epoch // 2 // TRIED * TRIED)
    begun = time.perf_counter()
    for step in range(first, first + TRIED):
        plan.at(step)
    return (time.perf_counter() - begun) / TRIED
