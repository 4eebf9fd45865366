"""Where the weights of a model are: `Whole` on each rank, or `Sharded`: divided among ranks.

`train.parallel.division` divides them. Each rank keeps some rows of every weight, of its gradient, and of what the
optimizer and the average keep for it. The weights of a block are whole only while it computes. Optimizers and averages
see plain tensors, `Sharded.own`, in the memory that FSDP gathers from. In a checkpoint of all weights each rank writes
its rows (`train.parallel.pieces`). A LoRA and the result of a run have whole tensors, which the others hand to the
first rank one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from prep.loader.device import to_host
from train.parallel.ranks import ALONE, Ranks

Fetch = Callable[[Tensor], Tensor]
Tensors = Mapping[str, Tensor]
Write = Callable[[Tensors, Mapping[str, str]], None]


class OwnRows:
    """What this rank keeps of a model that is read a parameter at a time: its rows of each, in host memory."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rows: dict[str, Tensor] = {}

    def __call__(self, name: str, whole: Tensor) -> Tensor:
        """Keeps a copy of the rows; returns the parameter's shape and dtype, on the meta device."""
        own = span(len(whole) if whole.ndim else 0, self.ranks)  # FSDP refuses numbers without dimensions
        self.rows[name] = whole[own.start : own.stop].clone() if whole.ndim else whole
        return whole.to("meta")


class Whole:
    """Each rank has all weights, `own`."""

    sharded = False  # whether each forward pass needs all ranks

    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: Ranks = ALONE) -> None:
        self.own, self.ranks = weights, ranks

    def passes(self) -> AbstractContextManager[None]:
        """Forward passes apart from steps, which succeed on all ranks or fail on all."""
        return self.ranks.collective()

    def shapes(self, names: Mapping[str, Any]) -> Tensors:
        """The whole weights of these names; of a divided model their dtypes and shapes, on the meta device."""
        return {name: self.own[name] for name in names}

    def spans(self, like: Tensors) -> dict[str, range]:
        """Which rows this rank has of what has the shapes of `like`, if not all."""
        return {}

    def rows(self, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that this rank has."""
        return whole

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Leaves the sums of the gradients over the ranks in the parameters."""
        self.ranks.add_gradients(parameters.values())

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients, [], without waiting for it where they are whole."""
        if all(value.dtype == torch.float32 for value in gradients):
            return torch.nn.utils.get_total_norm(gradients)
        return norm_of_norms([norm_of(value) for value in gradients])

    def hold_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Gives each parameter a gradient of zeros, to which a pass adds, as it does to that of a pass before."""
        for value in parameters.values():
            value.grad = torch.zeros_like(value)

    def drop_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Frees all gradients."""
        for value in parameters.values():
            value.grad = None

    @contextmanager
    def handing(self, *kinds: tuple[Tensors, Tensors]) -> Iterator[tuple[list[Tensors], Fetch] | None]:
        """Whole tensors for the first rank, in the order of `kinds`, and what brings one of them to host memory inside
        the `with` block; `None` for the others. All ranks call this.

        `kinds`: tensors of this rank, and for each that has the rows of a weight, that one of `shapes`. Of a divided
        model the others wait inside until the first rank's block has ended well.
        """
        yield ([values for values, _ in kinds], to_host) if self.ranks.first else None


class Sharded(Whole):
    """The weights of a divided model: each rank has some rows, `own`, of each."""

    sharded = True

    def __init__(self, divided: Mapping[str, Any], ranks: Ranks) -> None:
        """`divided`: FSDP's parameters, whose memory `own` shares."""
        super().__init__({name: nn.Parameter(value.to_local().detach(), requires_grad=value.requires_grad)
                          for name, value in divided.items()}, ranks)
        self.divided = divided
        self._whole = {name: torch.empty(value.shape, dtype=value.dtype, device="meta")
                       for name, value in divided.items()}

    def passes(self) -> AbstractContextManager[None]:
        """As `Whole.passes`, by themselves: ranks meet within each pass, and do not wait for each other after it."""
        return nullcontext()

    def shapes(self, names: Mapping[str, Any]) -> Tensors:
        """As `Whole.shapes`."""
        return {name: self._whole[name] for name in names}

    def spans(self, like: Tensors) -> dict[str, range]:
        """As `Whole.spans`."""
        return {name: span(len(value), self.ranks) for name, value in like.items()}

    def rows(self, whole: Tensor) -> Tensor:
        """As `Whole.rows`."""
        own = span(len(whole), self.ranks)
        return whole[own.start : own.stop]

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Moves the sums of the gradients, which FSDP has made, to this rank's parameters."""
        for name, own in self.own.items():
            grad = self.divided[name].grad
            own.grad = None if grad is None else grad.to_local()
            self.divided[name].grad = None

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """As `Whole.norm`, but the host waits for it."""
        own = torch.nn.utils.get_total_norm(gradients)
        return torch.tensor(math.sqrt(self.ranks.total([float(own) ** 2])[0]))

    def hold_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """As `Whole.hold_gradients`."""
        for name in parameters:
            self.divided[name].grad = torch.zeros_like(self.divided[name])

    def drop_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """As `Whole.drop_gradients`."""
        for value in (*self.own.values(), *self.divided.values()):
            value.grad = None

    def save(self, like: Mapping[str, str], rows: Tensors, write: Write) -> None:
        """Calls `write` with rows of this rank and with what says where they belong; raises what it raises.

        `like`: for each tensor, the parameter of which it has a value in every place.
        """
        self.ranks.save_rows(rows, {name: self.divided[like[name]] for name in rows}, write)

    @contextmanager
    def handing(self, *kinds: tuple[Tensors, Tensors]) -> Iterator[tuple[list[Tensors], Fetch] | None]:
        """As `Whole.handing`: tensors on the meta device, by which the first rank asks for them in any order."""
        parts: list[tuple[Tensor, Tensor]] = []

        def whole(values: Tensors, shapes: Tensors) -> Tensors:
            wholes = {name: torch.empty_like(shapes[name], dtype=value.dtype) if name in shapes else value
                      for name, value in values.items()}
            parts.extend((value, wholes[name]) for name, value in values.items())
            return wholes

        all_whole = [whole(values, shapes) for values, shapes in kinds]
        numbers = {id(whole): number for number, (_, whole) in enumerate(parts)}
        if self.ranks.first:
            def fetch(whole: Tensor) -> Tensor:
                number = numbers[id(whole)]
                self.ranks.ask(number)
                joined = self.ranks.join_rows(parts[number][0], whole)
                assert joined is not None
                return joined

            yield all_whole, fetch
            self.ranks.ask(-1)
            return
        while (number := self.ranks.ask(-1)) >= 0:
            self.ranks.join_rows(*parts[number])
        yield None


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient, [], in float32: torch's own has the gradient's dtype."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, [], from that of each, as torch computes it; 0 without any."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros(())
    return norm


def span(length: int, ranks: Ranks) -> range:
    """Which of so many rows a rank of a divided model has."""
    each = -(-length // ranks.world)
    return range(length)[each * ranks.rank : each * (ranks.rank + 1)]
