"""Ranks: processes that train one model together, each on a part of every step's samples.

A step's gradient is a sum over samples, so ranks add theirs, and each makes the same update. The weights of all ranks
are equal at every step, and only the first rank writes. torchrun starts the processes, says in environment variables
how they find each other, and ends all when one has failed: so no rank waits long for one that is gone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prep.errors import EXIT_BUG, ConfigError, Problem, UsageError, first_line
from prep.formatting import printable
from train.parallel.errors import RankFailed, RankLost, lost, record, report_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Seconds that ranks wait for one that loads, encodes prompts or draws more pictures. One that dies is noticed at once.
PATIENCE = 7200.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
LOCAL_WORLD = "LOCAL_WORLD_SIZE"  # torchrun sets it, too; other launchers may not


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those that train together. All of them call each method that exchanges something."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine
    local_world: int = 1  # how many there are on this machine, as far as that is known
    nodes: int = 1  # machines, as far as that is known

    @property
    def first(self) -> bool:
        """Whether this process writes the run and prints."""
        return self.rank == 0

    @property
    def longest(self) -> float:
        """Seconds that one rank may keep the others waiting by choice."""
        return math.inf if self.world == 1 else PATIENCE / 2

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A part that succeeds on all ranks or fails on all: they meet where it ends. Others must not be inside.

        Raises `RankFailed` on all ranks, with the message of the first one that failed. One process raises its error.
        """
        try:
            yield
            failed = None
        except Exception as error:
            if self.world == 1 or isinstance(error, RankFailed | RankLost):  # the others know
                raise
            failed = error
        try:
            reports = self.gather({"failed": None if failed is None else report_of(failed)})
        except RankLost as error:
            raise failed or error from None
        for rank, each in enumerate(reports):
            if report := each.get("failed"):
                raise RankFailed(f"rank {rank} of {self.world} failed: {report['text']}", rank=rank,
                                 hint=report["hint"], exit_code=report["code"]) from failed

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return bool(self.total([float(flag)])[0])

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of each rank's numbers, in the order of ranks. Raises `RankLost`."""
        if self.world == 1:
            return list(numbers)
        from train.parallel import collectives

        with self._connected():
            return [sum(column) for column in zip(*collectives.exchange(numbers), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. They travel as JSON, in which every float keeps its bits."""
        if self.world == 1:
            return [value]
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order. Raises `RankLost`."""
        if self.world == 1:
            return [data]
        from train.parallel import collectives

        with self._connected():
            return collectives.gather(data, [int(size) for size, in collectives.exchange([len(data)])])

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on each rank, in their order, as JSON keeps it. If it fails on one, fails on all, as
        `collective`."""
        with self.collective():
            own = work()
        return self.gather(own)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by its sum over the ranks. A parameter without one on every rank keeps none."""
        if self.world == 1:
            return
        from train.parallel import collectives

        values = list(parameters)
        buckets = list(collectives.buckets(collectives.used(values, self.gather_bytes(collectives.used_here(values)))))
        with self._connected():
            collectives.add(buckets, collectives.room_for(buckets))

    def divide(self, model: nn.Module, device: torch.device, rows: dict[str, Tensor] | None = None) -> None:
        """Divides the parameters of a model among the ranks, on `device`; `rows` as in `train.parallel.division`.
        Raises `ConfigError`."""
        try:
            from train.parallel.division import divide
        except ImportError as error:  # it needs what torch keeps under names of its own
            raise ConfigError(f"this torch cannot divide a model among processes: {first_line(error)}",
                              hint="--no-shard, or another torch") from None
        divide(model, device, rows)

    def save_rows(self, rows: Mapping[str, Tensor], divided: Mapping[str, Any],
                  write: Callable[[Mapping[str, Tensor], Mapping[str, str]], None]) -> None:
        """Calls `write` with the rows of this rank and what says where they belong (`train.parallel.pieces`)."""
        from train.parallel.pieces import save_rows

        save_rows(rows, divided, write)

    def ask(self, number: int) -> int:
        """The first rank's number, on every rank."""
        return int(self.gather(number)[0])

    def join_rows(self, own: Tensor, whole: Tensor) -> Tensor | None:
        """The whole tensor in host memory, on the first rank, from the rows of each. Raises `RankLost`."""
        from train.parallel import collectives

        with self._connected():
            return collectives.join_rows(own, whole)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on every rank unless all have the same facts: {name: value}."""
        all_facts = self.gather(dict(facts))
        for rank, theirs in enumerate(all_facts):
            other = [name for name in all_facts[0] if theirs.get(name) != all_facts[0][name]]
            if other:
                raise ConfigError(f"rank {rank} has another {' and '.join(other)} than rank 0, so they cannot train "
                                  "together", hint="give all ranks the same files, settings and version of Latentry")

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """An exchange, which raises `RankLost` if the connection to another rank breaks."""
        from train.parallel import collectives

        try:
            yield
        except Exception as error:
            if collectives.is_lost(error):
                raise lost(self.world, error) from None
            raise


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started, connected to them; `ALONE` without torchrun.

    The rank that failed raises its error. The others exit silently: those that know of it, when that rank has ended, so
    that torchrun gives it the time to save and to say why. Raises `UsageError` if the environment is not what torchrun
    sets, or the others cannot be reached.
    """
    ranks = of_environment(os.environ)
    if ranks.world == 1:
        yield ranks
        return
    from train.parallel import collectives

    try:
        collectives.connect(ranks.local, PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank {ranks.rank} cannot reach the other {ranks.world - 1}: {first_line(error)}",
                         hint="start all ranks with torchrun") from None
    try:
        yield ranks
    except RankFailed as error:
        if error.rank != ranks.rank:
            collectives.wait_for(error.rank)
            raise SystemExit(error.exit_code) from None
        assert isinstance(error.__cause__, Exception)
        raise _said(error.__cause__, ranks) from None
    except Exception as error:
        raise _said(lost(ranks.world, error) if collectives.is_lost(error) else error, ranks) from None
    collectives.disconnect()


def _said(error: Exception, ranks: Ranks) -> BaseException:
    """What a rank raises that failed: its error; silently, if another one of this machine has failed before."""
    if not record(error):
        return SystemExit(getattr(error, "exit_code", EXIT_BUG))
    if isinstance(error, Problem) and not isinstance(error, RankLost) and not ranks.first:
        error.message = f"rank {ranks.rank} of {ranks.world} failed: {error.message}"
        error.args = (error.message,)
    return error


def of_environment(environment: Mapping[str, str]) -> Ranks:
    """The rank that torchrun's variables describe. Raises `UsageError` if they contradict each other."""
    if "WORLD_SIZE" not in environment:
        return ALONE
    texts = [environment.get(name, "") for name in VARIABLES]
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise UsageError(f"{', '.join(VARIABLES)} are {', '.join(map(repr, texts))}, expected what torchrun sets",
                         hint="start it with torchrun --nproc-per-node 2 --no-python train run …, or unset them")
    here = environment.get(LOCAL_WORLD) or "1"
    if not here.isdecimal() or not 1 <= int(here) <= int(texts[1]):
        raise UsageError(f"{LOCAL_WORLD} is '{printable(here)}', expected 1 to WORLD_SIZE, which is {texts[1]}",
                         hint="start it with torchrun --nproc-per-node 2 --no-python train run …, or unset it")
    return Ranks(rank=int(texts[0]), world=int(texts[1]), local=int(texts[2]), local_world=int(here),
                 nodes=int(texts[1]) // int(here) if environment.get(LOCAL_WORLD) else 1)
