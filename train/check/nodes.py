"""What the computers of a run need of a cache in an object store."""

from __future__ import annotations

from prep.cache.remote.quota import quota
from prep.formatting import format_bytes
from prep.fs.remote.copies import DIRECTORY, LIMIT
from prep.loader.prefetch import bytes_by_part
from train.setup import Setup

WORTH = 0.8  # of the bytes of all shards: a part that is smaller is told


def notes_on_nodes(setup: Setup, nodes: int, *, begins: bool = True) -> list[str]:
    """What is worth knowing of a cache in an object store, for a run on so many nodes.

    That what a node reads does not fit on this computer all at once; and, if the run `begins`, by which order of
    samples a node would read less.
    """
    if setup.index.cache.is_whole:
        return []
    whole, room = sum(shard.bytes for shard in setup.index.shards), quota()
    partitioned = setup.plan.partitioned
    less = begins and nodes > 1 and not partitioned  # perhaps; parts take a look at each sample for each node
    parts = bytes_by_part(setup.index, nodes, masked=setup.reads_masks) if partitioned or less else [whole]
    needed, notes = max(parts) if partitioned else whole, list[str]()
    if needed > room:
        notes.append(f"{'a node reads' if nodes > 1 else 'the shards have'} {format_bytes(needed)}, but copies of "
                     f"shards may take {format_bytes(room)} here, so they are downloaded again and again; "
                     f"{DIRECTORY}=DIR names a larger disk, {LIMIT}=SIZE allows more")
    if less and max(parts) < WORTH * whole:
        least, most = format_bytes(min(parts)), format_bytes(max(parts))
        notes.append(f"each of {nodes} nodes comes to read all shards, {format_bytes(whole)}; with --set "
                     f"shuffle=partitioned, which is another order of the samples, "
                     f"{least if least == most else f'{least} to {most}'}")
    return notes
