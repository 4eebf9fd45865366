"""The ranks, nodes and copies of shards that `train check` is asked about."""

from __future__ import annotations

from dataclasses import dataclass

from prep.errors import UsageError

MOST_SAMPLES = 1e15  # of a larger data set


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Ranks and nodes, as given."""

    world: int | None  # None: not given
    nodes: int

    def require_multiple(self) -> None:
        """Raises `UsageError` for numbers of ranks and nodes that do not fit."""
        if self.world is None and self.nodes > 1:
            raise UsageError(f"--nodes is {self.nodes}, but --world-size is not given",
                             hint=f"--world-size {8 * self.nodes}, for nodes of eight GPUs")
        if self.world is not None and self.world % self.nodes:
            raise UsageError(f"--world-size is {self.world}, expected a multiple of --nodes, which is {self.nodes}",
                             hint=f"--world-size {-(-self.world // self.nodes) * self.nodes}")

    def require_world(self) -> int:
        """The number of ranks. Raises `UsageError` if it is not given."""
        if self.world is None:
            raise UsageError("--node-cache or --samples is given without --world-size, expected both",
                             hint="add --world-size, the number of ranks")
        return self.world


def latency_of(text: str) -> float:
    """The seconds of --store-latency. Raises `UsageError`."""
    from prep.parse import Unparsed, seconds_of

    try:
        return seconds_of(text)
    except Unparsed as error:
        raise UsageError(f"--store-latency {error}") from None
