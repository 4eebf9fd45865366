"""A model whose weights are divided among ranks, by `train.parallel.division`.

Each rank keeps some rows of every weight, of its gradient, and of what the optimizer and the average keep for it. The
weights of a block are whole only while it computes.

Optimizers and averages see plain tensors, `Shards.own`, in the memory that FSDP gathers from. In a checkpoint of all
weights each rank writes its rows (`train.parallel.pieces`). A LoRA and the result of a run have whole tensors, which
the others hand to the first rank one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from train.parallel.ranks import Ranks

Fetch = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The trained parameters of a divided model, by name."""

    ranks: Ranks
    whole: Mapping[str, Tensor]  # on the meta device: dtype and shape
    own: Mapping[str, nn.Parameter]  # the rows that this rank has
    divided: Mapping[str, Any]  # FSDP's parameters, whose memory `own` shares

    def span(self, length: int) -> range:
        """Which of so many rows this rank has."""
        each = -(-length // self.ranks.world)
        return range(length)[each * self.ranks.rank : each * (self.ranks.rank + 1)]

    def rows(self, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that this rank has."""
        span = self.span(len(whole))
        return whole[span.start : span.stop]

    def save(self, like: Mapping[str, str], rows: Mapping[str, Tensor],
             write: Callable[[Mapping[str, Tensor], Mapping[str, str]], None]) -> None:
        """Calls `write` with rows of this rank and with what says where they belong; raises what it raises.

        `like`: for each tensor, the parameter of which it has a value in every place.
        """
        self.ranks.save_rows(rows, {name: self.divided[like[name]] for name in rows}, write)

    def take_gradients(self) -> None:
        """Moves the sums of the gradients from FSDP's parameters to those of this rank."""
        for name, own in self.own.items():
            grad = self.divided[name].grad
            own.grad = None if grad is None else grad.to_local()
            self.divided[name].grad = None

    def drop_gradients(self) -> None:
        """Frees all gradients."""
        for value in (*self.own.values(), *self.divided.values()):
            value.grad = None

    @contextmanager
    def handing(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Fetch | None]:
        """Lets the first rank fetch whole tensors in any order inside the `with` block; all ranks call this.

        `parts`: this rank's rows, and the whole tensor on the meta device, by which it is asked for. Yields `None` to
        the other ranks, whose block begins when the first rank's has ended well.
        """
        numbers = {id(whole): number for number, (_, whole) in enumerate(parts)}
        if self.ranks.first:
            def fetch(whole: Tensor) -> Tensor:
                number = numbers[id(whole)]
                self.ranks.ask(number)
                found = self.ranks.join_rows(parts[number][0], whole)
                assert found is not None
                return found

            yield fetch  # if the block fails, it is that which the others hear where they wait to be asked
            self.ranks.ask(-1)
            return
        while (number := self.ranks.ask(-1)) >= 0:
            self.ranks.join_rows(*parts[number])
        yield None


def shards_of(parameters: Mapping[str, Any], ranks: Ranks) -> Shards:
    """The shards of the parameters of a divided model."""
    own = {name: nn.Parameter(value.to_local().detach(), requires_grad=value.requires_grad)
           for name, value in parameters.items()}
    whole = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in parameters.items()}
    return Shards(ranks=ranks, whole=whole, own=own, divided=parameters)
