"""Ranks: processes that train one model together, each on a part of every step's samples.

A step's gradient is a sum over samples, so ranks add theirs, and each makes the same update. The weights of all ranks
are equal at every step, and only the first rank writes. torchrun starts the processes and says how they find each
other, in environment variables.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from prep.cache.remote.room import NotFetched
from prep.errors import EXIT_BUG, ConfigError, OutOfMemoryError, Problem, UsageError, first_line
from prep.formatting import printable
from prep.fs.remote.errors import StoreError
from train.parallel.errors import RankFailed, RankLost, code_of, is_told, mark_told, report_of, text_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Seconds that ranks wait for one that loads, encodes prompts or draws more pictures. One that dies is noticed at once.
PATIENCE = 7200.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
LOCAL_WORLD = "LOCAL_WORLD_SIZE"  # torchrun sets it, too; other launchers may not


class _Says(IntEnum):
    """What a rank says first, wherever ranks meet."""

    FAILED = 1  # in a part that all ranks end then
    ENDS = 2  # it failed alone, or leaves the run
    SUCCEEDED = 3  # in such a part
    SUM = 4
    GATHER = 5
    ASK = 6
    READY = 7  # to exchange weights or gradients, in which no rank can say anything


@dataclass(slots=True)
class _Connection:
    lost: str = ""  # how the connection to the other ranks broke; "": it has not


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine
    local_world: int = 1  # how many there are on this machine, as far as that is known
    nodes: int = 1  # machines, as far as that is known
    # Whether the model is divided among the ranks (`train.parallel.shards`): each forward pass then needs all of them.
    sharded: bool = False
    connection: _Connection = field(default_factory=_Connection, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this process writes the run and prints."""
        return self.rank == 0

    @property
    def longest(self) -> float:
        """Seconds that one rank may keep the others waiting by choice."""
        return math.inf if self.world == 1 else PATIENCE / 2

    @contextmanager
    def together(self, explained: Callable[[Exception], Exception] = lambda error: error) -> Iterator[None]:
        """A part that succeeds on all ranks or fails on all: an error of one ends the part for every rank.

        The others are told of it as `explained`.
        On the first rank raises its own error, or `RankFailed` with that of another; the others exit silently with the
        same code.
        """
        if self.world == 1:
            yield
            return
        try:
            yield
            self._meet(_Says.SUCCEEDED)
        except RankLost:
            raise
        except Exception as error:
            told = self._tell(_Says.FAILED, error, explained)
            if self.first or not told:
                raise
            raise SystemExit(code_of(explained(error))) from None

    @contextmanager
    def telling(self, explained: Callable[[Exception], Exception] = lambda error: error) -> Iterator[None]:
        """A part after whose failure this rank ends. If the others do not know of it, they are told where they meet
        next, which raises `RankLost` there."""
        try:
            yield
        except Exception as error:
            self._tell(_Says.ENDS, error, explained)
            raise

    @contextmanager
    def passing(self, explained: Callable[[Exception], Exception] = lambda error: error, *, reading: bool = False
                ) -> Iterator[None]:
        """Forward passes, whose batches come from `each`: `together`, unless the passes themselves need all ranks.

        A rank that then fails in a pass tells the others where they begin the next exchange of weights or gradients, or
        meet after it. They raise `RankLost`, and it raises its own error if that has an explanation, else also
        `RankLost`: without its part of the pass nothing goes on. `reading`: also of files that all ranks read, so that
        all have the same `Problem` with them.
        """
        if not self.sharded:
            with self.together(explained):
                yield
            return
        try:
            yield
        except Exception as error:
            if is_told(error) or self.connection.lost or (reading and _of_all(error)):
                raise
            if (ending := self._alone(error, explained)) is error:
                raise
            raise ending from error

    def each(self, feed: Iterator[Any], explained: Callable[[Exception], Exception] = lambda error: error
             ) -> Iterator[Any]:
        """The items of `feed`, for `passing`. If passes need all ranks, these agree before each that all have an item.
        """
        while True:
            with self.together(explained) if self.sharded else nullcontext():
                item = next(feed, None)
            if item is None:
                return
            yield item

    def _alone(self, error: Exception, explained: Callable[[Exception], Exception]) -> Exception:
        """Tells the others that this rank failed in a pass; what it raises then."""
        from train.parallel import collectives

        if not self._tell(_Says.ENDS, error, explained) and collectives.is_lost(error):
            return self._ended()
        if explained(error) is not error:
            return error
        return RankLost(text_of(error), hint=getattr(error, "hint", ""), exit_code=code_of(error))

    @contextmanager
    def staying(self) -> Iterator[None]:
        """A part whose failure ends no run: a rank that `together` would end goes on after it, as the first one does.
        """
        try:
            yield
        except SystemExit:
            if self.first:
                raise
            raise RankFailed("the first rank tells what failed") from None

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return bool(self.total([float(flag)])[0])

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of each rank's numbers, of which there are at most two."""
        if self.world == 1:
            return list(numbers)
        said = self._meet(_Says.SUM, *numbers)
        return [sum(column) for column in zip(*said, strict=True)][:len(numbers)]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. They travel as JSON, in which every float keeps its bits."""
        if self.world == 1:
            return [value]
        return [json.loads(one) for one in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order."""
        if self.world == 1:
            return [data]
        said = self._meet(_Says.GATHER, len(data))
        return self._exchange_bytes(data, [int(size) for size, _ in said])

    def share(self, work: Callable[[], Any], explained: Callable[[Exception], Exception] = lambda error: error
              ) -> list[Any]:
        """What `work` returns on each rank, in their order, as JSON keeps it. If it fails on one, fails on all.

        Raises its own error where it failed, and `RankFailed` on the others.
        """
        try:
            mine = work()
        except Exception as error:
            if is_told(error):
                raise
            failed = explained(error)
            self._tell(_Says.FAILED, failed)
            raise failed from (None if failed is error else error)
        return self.gather(mine)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by its sum over the ranks. A parameter without one on every rank keeps none.

        What needs memory is done before the sums, for which the others would wait in vain.
        """
        if self.world == 1:
            return
        from train.parallel import collectives

        values = list(parameters)
        buckets = list(collectives.buckets(collectives.used(values, self.gather_bytes(collectives.used_here(values)))))
        room = collectives.room_for(buckets)
        with self._ready():
            collectives.add(buckets, room)

    def divide(self, model: nn.Module, device: torch.device) -> None:
        """Divides the parameters of a model among the ranks, on `device`. Raises `ConfigError`."""
        try:
            from train.parallel.division import divide
        except ImportError as error:  # it needs what torch keeps under names of its own
            raise ConfigError(f"this torch cannot divide a model among processes: {first_line(error)}",
                              hint="--no-shard, or another torch") from None
        divide(model, device, self._ready)

    def save_rows(self, rows: Mapping[str, Tensor], divided: Mapping[str, Any],
                  write: Callable[[Mapping[str, Tensor], Mapping[str, str]], None]) -> None:
        """Calls `write` with the rows of this rank and what says where they belong (`train.parallel.pieces`)."""
        from train.parallel.pieces import save_rows

        save_rows(rows, divided, write)

    def ask(self, number: int) -> int:
        """The first rank's number, on every rank."""
        return int(self._meet(_Says.ASK, number)[0][0])

    def join_rows(self, own: Tensor, whole: Tensor) -> Tensor | None:
        """The whole tensor in host memory, on the first rank, from the rows of each."""
        from train.parallel import collectives

        with self._lost():
            return collectives.join_rows(own, whole)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on every rank unless all have the same facts: {name: value}."""
        all_facts = self.gather(dict(facts))
        for rank, theirs in enumerate(all_facts):
            other = [name for name in all_facts[0] if theirs.get(name) != all_facts[0][name]]
            if other:
                raise ConfigError(f"rank {rank} has another {' and '.join(other)} than rank 0, so they cannot train "
                                  "together", hint="give all ranks the same files, settings and version of Latentry")

    def leave(self) -> None:
        """Returns when the first rank has ended. If it still meets this one before, it is told that this one has ended.
        """
        from train.parallel import collectives

        while not self.connection.lost:
            with suppress(RankLost):
                self._meet(_Says.ENDS, report={"text": "it has ended", "hint": "", "code": EXIT_BUG})
        collectives.wait_for_first()

    def _tell(self, says: _Says, error: Exception,
              explained: Callable[[Exception], Exception] = lambda error: error) -> bool:
        """Tells the others of an error of this rank, unless they know. Whether they know now."""
        if self.world > 1 and not is_told(error):
            with suppress(RankLost):  # another one ends as well, and has heard this, or they have ended
                self._meet(says, report=report_of(explained(error)))
            if not self.connection.lost:
                mark_told(error)
        return is_told(error)

    def _meet(self, says: _Says, first: float = 0.0, second: float = 0.0, *, report: Mapping[str, Any] | None = None
              ) -> list[list[float]]:
        """The two numbers of each rank. All exchanges through the host begin here, with one message of one shape.

        So no rank waits for one that has failed alone: wherever they meet, it says so. Then raises `RankFailed`, or
        `RankLost` if that rank ends.
        """
        if self.connection.lost:
            raise self._ended()
        told = json.dumps(report).encode() if report else b""
        said = self._exchange([says, len(told), first, second])
        failed = [rank for rank, each in enumerate(said) if each[0] in (_Says.FAILED, _Says.ENDS)]
        if failed:
            reports = self._exchange_bytes(told, [int(each[1]) for each in said])
            self._hear(says, {rank: (_Says(int(said[rank][0])), json.loads(reports[rank])) for rank in failed})
        elif len({each[0] for each in said}) > 1:
            self.connection.lost = "the ranks do not do the same"
            raise self._ended()
        return [each[2:] for each in said]

    def _hear(self, says: _Says, reports: Mapping[int, tuple[_Says, Mapping[str, Any]]]) -> None:
        """Raises what other ranks report, unless this one is no better off."""
        for kind, error in ((_Says.ENDS, RankLost), (_Says.FAILED, RankFailed)):
            if says is kind:
                return
            for rank, (what, report) in reports.items():
                if what is kind:
                    found = error(f"rank {rank} of {self.world} failed: {report['text']}", hint=report["hint"],
                                  exit_code=report["code"])
                    mark_told(found)
                    raise found

    def _exchange(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of each rank, of which all have equally many."""
        from train.parallel import collectives

        with self._lost():
            return collectives.exchange(numbers)

    def _exchange_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """The data of each rank, of these sizes."""
        from train.parallel import collectives

        with self._lost():
            return collectives.gather(data, sizes)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """An exchange on devices, in which ranks would wait in vain for one that has failed: all say before that they
        take part. Raises as `_meet`."""
        self._meet(_Says.READY)
        with self._lost():
            yield

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """An exchange after whose failure there can be no other. Turns the error of a connection that broke into one
        that says what happened."""
        try:
            yield
        except Exception as error:
            from prep.models.device.memory import is_out_of_memory

            self.connection.lost = first_line(error)
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise self._ended() from None
            raise

    def _ended(self) -> RankLost:
        return RankLost(f"another of the {self.world} ranks ended without a message ({self.connection.lost})",
                        hint="its process was killed, or its machine is gone; --resume continues")


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started, connected to them; `ALONE` without torchrun.

    Raises `UsageError` if the environment is not what torchrun sets, or the others cannot be reached.
    """
    found = of_environment(os.environ)
    if found.world == 1:
        yield found
        return
    from train.parallel import collectives

    try:
        collectives.connect(found.local, PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank {found.rank} cannot reach the other {found.world - 1}: {first_line(error)}",
                         hint="start all ranks with torchrun") from None
    try:
        with found.telling():
            yield found
    except (Exception, SystemExit) as error:
        if found.first or not (isinstance(error, SystemExit) or is_told(error)):
            raise
        # A failure that all know of. torchrun ends all as soon as one has ended, and the first must keep its steps and
        # tell the error before: its connection stays open until its process ends.
        found.leave()
        raise (error if isinstance(error, SystemExit) else SystemExit(code_of(error))) from None
    collectives.disconnect()


def _of_all(error: Exception) -> bool:
    """Whether all ranks that read the same files have this error, and not one alone, as of its network or its disk."""
    return isinstance(error, Problem) and not isinstance(error, StoreError | NotFetched | OutOfMemoryError)


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

