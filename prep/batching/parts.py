"""Parts of a bucket, one for each place of a micro-batch, so that a place always shows samples of its own part.

The parts follow one another in the order of the samples' table. A rank has neighboring places of every micro-batch
(`prep.loader.draws.RankShare`), so it reads neighboring samples, nearly the same ones in each epoch, whatever the
number of ranks: a computer downloads its own part of a cache and no more. MosaicML Streaming calls such parts canonical
nodes.

Parts are equally large. What does not fill the last micro-batch, the rest, is drawn anew for each epoch, by systematic
sampling: every k-th occurrence, from a random start. All occurrences are in it equally often, and each part has at most
one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Slots(NamedTuple):
    """The samples of a micro-batch, [n] each."""

    places: Indices  # in a full micro-batch: the numbers of their parts
    rows: Indices  # in the order of the part
    known: Indices  # the occurrence, where no order decides it; else -1
    turns: Indices  # as in a `MicroBatch`


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The division of the `count` occurrences of a bucket in one epoch."""

    count: int
    micro_batch: int
    start: int  # of the rest; 0 to `count` - 1
    fill: int  # start of what is repeated to fill the last micro-batch

    @property
    def size(self) -> int:
        """Occurrences of a part, without the rest: the full micro-batches."""
        return self.count // self.micro_batch

    def rest(self) -> Indices:
        """[count modulo micro_batch]: the occurrences outside the parts, sorted."""
        return _systematic(self.count % self.micro_batch, self.count, self.start)

    def slots(self, number: int, *, fill: bool) -> Slots:
        """Micro-batch `number`. With `fill`, the last one repeats occurrences at the places that have none of the rest.
        """
        places = np.arange(self.micro_batch)
        nothing = np.zeros(self.micro_batch, np.int64)
        if number < self.size:
            return Slots(places, nothing + number, nothing - 1, nothing)
        rest = self.rest()
        own = self._places_of(rest)
        if not fill:
            return Slots(own, nothing[own], rest, nothing[own])
        free = np.delete(places, own)
        again = _systematic(len(free), self.count, self.fill)
        known, turns = nothing.copy(), nothing.copy()
        known[own], known[free] = rest, again
        turns[free] = np.arange(1, len(free) + 1) - np.searchsorted(again, again)  # of equal ones: 1, 2, …
        return Slots(places, nothing, known, turns)

    def _places_of(self, rest: Indices) -> Indices:
        """The part in which each of the rest lies, in order and none twice."""
        number, size = np.arange(len(rest)), len(rest)
        if not self.size:
            return number * self.micro_batch // max(size, 1)
        places: Indices = np.minimum((rest - number) // self.size, self.micro_batch - size + number)
        return places


def _systematic(some: int, count: int, start: int) -> Indices:
    """[some]: a sorted sample of 0 to `count` - 1, in which each is equally often over all starts below `count`."""
    return (np.arange(some) * count + start) // max(some, 1)


def outside_rest(numbers: Indices, count: Indices, rest: Indices, start: Indices) -> Indices:
    """The occurrences that are the `numbers`-th outside a rest of `rest` of `count` with that start; [n] each.

    Before number y there are the i for which the i-th of the rest, less i, is at most y: i·(count - rest) + start is
    below (y + 1)·rest.
    """
    before = -((start - (numbers + 1) * rest) // np.maximum(count - rest, 1))
    occurrences: Indices = numbers + np.clip(before, 0, rest)
    return occurrences
