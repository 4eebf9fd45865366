"""Ranks: processes that train one model together, each on a part of every step's samples.

A step's gradient is a sum over samples, so ranks add theirs, and each makes the same update. The weights of all ranks
are equal at every step, and only the first rank writes. torchrun starts the processes and says how they find each
other, in environment variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prep.errors import EXIT_BUG, ConfigError, Problem, UsageError, first_line
from prep.formatting import printable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
LOCAL_WORLD = "LOCAL_WORLD_SIZE"  # torchrun sets it, too; other launchers may not


class RankFailed(Problem):
    """Another rank failed, with this message and exit code; the code of a bug if it could not tell its own."""

    exit_code = EXIT_BUG
    kind = "rank"

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_BUG) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class RankLost(RankFailed):
    """The connection to another rank broke, or must, since this one failed alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine
    local_world: int = 1  # how many there are on this machine, as far as that is known
    # Whether the model is divided among the ranks (`train.parallel.shards`): each forward pass then needs all of them.
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this process writes the run and prints."""
        return self.rank == 0

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
        except Exception as error:
            self._share(explained(error))
            if self.first:
                raise
            raise SystemExit(_code(explained(error))) from None
        self._share(None)

    @contextmanager
    def passing(self, explained: Callable[[Exception], Exception] = lambda error: error) -> Iterator[None]:
        """Forward passes, whose batches come from `each`: `together`, unless the passes themselves need all ranks.

        A rank that then fails in a pass cannot tell the others, which wait for its part of the model. It ends with its
        own error, and they end silently, when their connection to it breaks.
        """
        if not self.sharded:
            with self.together(explained):
                yield
            return
        try:
            yield
        except _Told as ending:
            raise ending.error from None
        except Exception as error:
            raise self._alone(explained(error)) from error

    def each(self, feed: Iterator[Any], explained: Callable[[Exception], Exception] = lambda error: error
             ) -> Iterator[Any]:
        """The items of `feed`, for `passing`. If passes need all ranks, these agree before each that all have an item.
        """
        while True:
            try:
                with self.together(explained) if self.sharded else nullcontext():
                    item = next(feed, None)
            except Exception as error:
                raise (_Told(error) if self.sharded else error) from None
            if item is None:
                return
            yield item

    def _alone(self, error: Exception) -> BaseException:
        """What this rank raises after it failed in a pass, or after another one did."""
        from train.parallel import collectives

        if not collectives.is_lost(error):
            collectives.tell(_code(error))
            # A problem is one of files that all read, so all have it; of anything else the others know nothing.
            return error if isinstance(error, Problem) else RankLost(_text(error), exit_code=_code(error))
        code = collectives.told()
        return self._ended(error) if code is None else _Silent(code)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """A part whose failure ends no run: a rank that `together` would end goes on after it, as the first one does.
        """
        try:
            yield
        except SystemExit as ending:
            if self.first or isinstance(ending, _Silent):
                raise
            raise RankFailed("the first rank tells what failed") from None

    def any(self, flag: bool) -> bool:
        """Whether the flag of any rank is set."""
        return bool(self.total([float(flag)])[0])

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of each rank's numbers."""
        if self.world == 1:
            return list(numbers)
        from train.parallel import collectives  # here: a run of one process needs none of it

        with self._lost():
            return collectives.total(numbers)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order. They travel as JSON, in which every float keeps its bits."""
        if self.world == 1:
            return [value]
        return [json.loads(one) for one in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order."""
        if self.world == 1:
            return [data]
        from train.parallel import collectives

        sizes = self.total([len(data) * (rank == self.rank) for rank in range(self.world)])
        with self._lost():
            return collectives.gather(data, [int(size) for size in sizes])

    def share(self, work: Callable[[], Any], explained: Callable[[Exception], Exception] = lambda error: error
              ) -> list[Any]:
        """What `work` returns on each rank, in their order, as JSON keeps it. If it fails on one, fails on all.

        Raises its own error where it failed, and `RankFailed` on the others.
        """
        failed: Exception | None = None
        try:
            mine = {"value": work()}
        except Exception as error:
            failed = explained(error)
            mine = {"failure": _told_of(failed)}
        found = self.gather(mine)
        if failed is not None:
            raise failed
        for rank, each in enumerate(found):
            if "failure" in each:
                raise self._failed(rank, each["failure"])
        return [each["value"] for each in found]

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces each gradient by its sum over the ranks. A parameter without one on every rank keeps none."""
        if self.world == 1:
            return
        from train.parallel import collectives

        with self._lost():
            collectives.add_gradients(list(parameters))

    def divide(self, model: nn.Module, device: torch.device) -> None:
        """Divides the parameters of a model among the ranks, on `device`. Raises `ConfigError`."""
        from train.parallel.division import divide

        divide(model, device)

    def save_rows(self, rows: Mapping[str, Tensor], divided: Mapping[str, Any],
                  write: Callable[[Mapping[str, Tensor], Mapping[str, str]], None]) -> None:
        """Calls `write` with the rows of this rank and what says where they belong (`train.parallel.pieces`)."""
        from train.parallel.pieces import save_rows

        save_rows(rows, divided, write)

    def ask(self, number: int) -> int:
        """The first rank's number, on every rank."""
        from train.parallel import collectives

        with self._lost():
            return collectives.ask(number)

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

    def _share(self, error: Exception | None) -> None:
        """Tells the others whether this rank failed. Raises `RankFailed` if only others did; exits where not first."""
        if not self.any(error is not None):
            return
        told = self.gather(None if error is None else _told_of(error))
        if error is not None:
            return
        rank, found = next((rank, one) for rank, one in enumerate(told) if one is not None)
        if not self.first:
            raise SystemExit(found["code"])
        raise self._failed(rank, found)

    def _failed(self, rank: int, told: Mapping[str, Any]) -> RankFailed:
        return RankFailed(f"rank {rank} of {self.world} failed: {told['text']}", hint=told["hint"],
                          exit_code=told["code"])

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Turns the error of a connection that broke into one that says what happened."""
        try:
            yield
        except RuntimeError as error:
            raise self._ended(error) from None

    def _ended(self, error: Exception) -> RankLost:
        return RankLost(f"another of the {self.world} ranks ended without a message ({first_line(error)})",
                        hint="its process was killed, or its machine is gone; --resume continues")


class _Silent(SystemExit):
    """The end of a rank after another one failed in the middle of a pass, and told it."""


class _Told(Exception):
    """An error that all ranks know of."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


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
        collectives.connect(found.local)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank {found.rank} cannot reach the other {found.world - 1}: {first_line(error)}",
                         hint="start all ranks with torchrun") from None
    try:
        yield found
    except SystemExit:
        # A failure that all know of. torchrun ends all as soon as one has ended, and the first must keep its steps and
        # tell the error before: its connection stays open until its process ends.
        if not found.first:
            collectives.wait_for_first()
        raise
    collectives.disconnect()


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
    return Ranks(rank=int(texts[0]), world=int(texts[1]), local=int(texts[2]), local_world=int(here))


def _told_of(error: Exception) -> dict[str, Any]:
    return {"text": _text(error), "hint": getattr(error, "hint", ""), "code": _code(error)}


def _text(error: Exception) -> str:
    return error.message if isinstance(error, Problem) else f"{type(error).__name__}: {first_line(error)}"


def _code(error: Exception) -> int:
    code = getattr(error, "exit_code", EXIT_BUG)
    return code if isinstance(code, int) else EXIT_BUG
