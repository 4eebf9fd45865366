"""Plans a run on a data set that is assumed, where there is no manifest yet: what `prep encode` would make of pictures.

Shards, rows and steps are made by the code that encodes and trains, for a sample that is small, and of whole shards;
what a larger data set takes is computed from that as for any other (`train.cluster_forecast`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prep.cache.store import Cache
from prep.encode.forecast.assumed import Assumed, assumed, assumptions, family_of, sealed
from prep.loader.index import Index
from prep.models.hub import locate
from prep.training.schema import Config
from train.check.data import planned_by
from train.cluster_forecast import Outlook, outlook_of

SAMPLES = 40 * 256  # a shard of each aspect ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedData:
    """A data set that is assumed: its index, without a cache."""

    assumed: Assumed
    index: Index
    tables: int  # bytes of its manifest's tables
    samples: int  # of the whole of it, of which `index` is a part


def assumed_data(family: str | None, model: str | None, samples: int, *, masked: bool) -> AssumedData:
    """So many samples of a family, or of a model's; with masks if the loss uses them.

    Raises `UsageError`, `ModelError`.
    """
    path = None if model is None else locate(model, download=None)
    choices = {"mask": "sidecar"} if masked else {}
    wanted = assumed(family_of(family, path), path, min(samples, SAMPLES), choices=choices)
    made = sealed(wanted)
    index = Index(manifest=made.manifest, cache=Cache(root=Path("cache")), samples=made.samples, shards=made.shards)
    return AssumedData(assumed=assumptions(wanted, model or ""), index=index, tables=made.tables, samples=samples)


def assumed_outlook(data: AssumedData, config: Config, *, world: int, nodes: int, masked: bool, room: int | None
                    ) -> Outlook:
    """What a run on it takes, with these settings. Raises `ConfigError`, `EmptyPlanError`."""
    return outlook_of(data.index, planned_by(config, data.index.counts), world=world, nodes=nodes, masked=masked,
                      room=room, samples=data.samples, tables=data.tables, part=_part(data, nodes))


def _part(data: AssumedData, nodes: int) -> int | None:
    """Bytes of the shards with a node's part of all samples, of a data set that is larger than the planned sample.

    Neighbors in the manifest's table share shards, so a part has its share of the shards of each shape, and on average
    one more: both at its ends are shared with others. Of the sample alone such ends would be most. That is a little
    too few, since the parts of several buckets do not end at the same captions: on 8 nodes, of 6,000 samples in shards
    of 5 rows by 14 %, of 48,000 by 7 %, and less and less as there are more.
    """
    times = data.samples / len(data.index.samples)
    if times <= 1:
        return None
    shapes = {(one.field, tuple(one.shapes.items())): one.bytes for one in data.index.shards}
    whole = sum(one.bytes for one in data.index.shards) * times
    return round(min(whole, whole / nodes + sum(shapes.values())))
