"""`train check --simulate`: what is assumed of a cluster, and the plan of a data set that is assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from prep.cli.console import put, put_json
from prep.errors import UsageError
from prep.formatting import counted, grouped
from train.cli.summary import outlook_lines, reading_line

if TYPE_CHECKING:
    from prep.training.schema import Config

RANKS = 8  # of a node, at most, unless --nodes says otherwise
ALL = "train check --simulate --samples 1e9 --world-size 1024"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Ranks and nodes, as given or assumed."""

    world: int | None  # None: not given
    nodes: int
    batch: int | None  # samples of a step, if they are assumed
    notes: tuple[str, ...]  # on what is assumed


def cluster_of(world: int | None, nodes: int | None, micro_batch: int | None, *, simulated: bool, batch_named: bool
               ) -> Cluster:
    """The cluster of a command; in a simulation, batch and nodes that are not named fit the ranks."""
    notes, batch = list[str](), None
    if world is None or not simulated:
        return Cluster(world=world, nodes=nodes or 1, batch=None, notes=())
    if not batch_named:
        batch = -(-world // (micro_batch or 1)) * (micro_batch or 1)
        each = "one for each rank" if batch == world else f"the fewest for {grouped(world)} ranks"
        notes.append(f"steps of {counted(batch, 'sample')} are assumed, {each}; --batch-size says otherwise")
    if nodes is None:
        ranks = max(number for number in range(1, RANKS + 1) if world % number == 0)
        nodes = world // ranks
        notes.append(f"{counted(nodes, 'node')} of {counted(ranks, 'rank')} {'is' if nodes == 1 else 'are'} assumed; "
                     "--nodes says otherwise")
    return Cluster(world=world, nodes=nodes, batch=batch, notes=tuple(notes))


def names_batch(config: object, batch_size: int | None, settings: Sequence[str] | None) -> bool:
    """Whether a command names the samples of a step, or a file that may."""
    given = (text.partition("=")[0].strip() for text in settings or ())
    return config is not None or batch_size is not None or "batch_size" in given


def require_multiple(world: int | None, nodes: int) -> None:
    """Raises `UsageError` for numbers of ranks and nodes that do not fit."""
    if world is None and nodes > 1:
        raise UsageError(f"--nodes is {nodes}, but --world-size is not given", hint=f"--world-size {8 * nodes}, for "
                         "nodes of eight GPUs")
    if world is not None and world % nodes:
        raise UsageError(f"--world-size is {world}, expected a multiple of --nodes, which is {nodes}",
                         hint=f"--world-size {-(-world // nodes) * nodes}")


def room_of(size: str | None) -> int | None:
    """The bytes of --node-cache. Raises `UsageError`."""
    from prep.parse import Unparsed, bytes_of

    try:
        return None if size is None else bytes_of(size)
    except Unparsed as error:
        raise UsageError(f"--node-cache {error}") from None


def require_world(world: int | None) -> int:
    """The number of ranks of a simulation. Raises `UsageError`."""
    if world is None:
        raise UsageError("--simulate, --node-cache or --samples is given without --world-size, expected both",
                         hint="add --world-size, the number of ranks")
    return world


def _require_manifest_or_none(simulated: bool, given: Mapping[str, object]) -> None:
    """Raises `UsageError` if a command without MANIFEST needs one."""
    if not simulated:
        raise UsageError("no MANIFEST is given, expected one to check", hint="name the manifest.json that prep encode "
                         f"wrote; to plan without one: {ALL}")
    first = next((name for name, value in given.items() if value), None)
    if first is not None:
        raise UsageError(f"{first} is given without MANIFEST, expected both", hint=f"name a MANIFEST, or omit {first} "
                         "to plan for a data set that is not there yet")


def tell_assumed(config: Config, cluster: Cluster, *, family: str | None, model: str | None, samples: float | None,
                 node_cache: str | None, latency: float | None, as_json: bool, simulated: bool,
                 others: Mapping[str, object]) -> None:
    """Plans a run on a data set that is assumed, and writes what it would take to stdout.

    `others`: options that need a manifest. Raises many a `Problem`, also unless the run is `simulated`.
    """
    from train.check.requirements import idle_ranks
    from train.synthetic import assumed_data, assumed_outlook

    _require_manifest_or_none(simulated, others)
    world, room = require_world(cluster.world), room_of(node_cache)
    require_multiple(world, cluster.nodes)
    if samples is None:
        raise UsageError("--simulate is given without MANIFEST and without --samples, expected one of them", hint=ALL)
    if (fault := idle_ranks(config.batch_size, world)) is not None:
        raise fault
    masked = config.loss.masked is True
    data = assumed_data(family, model, int(samples), masked=masked)
    told = assumed_outlook(data, config, world=world, nodes=cluster.nodes, masked=masked, room=room)
    if as_json:
        put_json({"format": "latentry/check", "version": 1, "ok": True, "faults": [], "steps_per_epoch": told.steps,
                  "step_sizes": {}, "masked": masked, "left_out": [], "repeated": [], "notes": list(cluster.notes),
                  "assumed": data.assumed.as_json(), "outlook": asdict(told)})
    else:
        put("\n".join([*data.assumed.as_lines(), *(f"note: {note}" for note in cluster.notes),
                       *outlook_lines(told, latency), *([] if latency is not None else [reading_line(told)])]))
