"""Holds the keys and places of rows as sorted columns: 40 bytes per row, without strings, searched by bisection.

Keys are NumPy byte strings of length 32 (S32). NumPy drops trailing zeros when it converts them to bytes, but compares
them as if padded: two keys are equal exactly if their 32 bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

Column = np.ndarray[Any, Any]
KEY = "S32"
BLOCK = 1 << 12  # keys that are converted at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Rows by key; a key that is in two shards appears twice, in the order of shard numbers."""

    keys: Column  # S32 [N], sorted
    shard: Column  # int32 [N]: number of the row's shard
    row: Column  # int32 [N]: row number in that shard

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The place of each of N wanted keys, in their order."""

    shard: Column  # int32 [N]: index into the ledger's shards; -1: not found
    row: Column  # int32 [N]; -1: not found

    @property
    def present(self) -> Column:
        """Whether each key was found, bool [N]."""
        present: Column = self.shard >= 0
        return present


def packed(names: Iterable[str]) -> Column:
    """Converts keys of 64 hex digits each to S32 [N]. Raises `ValueError` for anything else."""
    data, rest = bytearray(), iter(names)
    while block := list(islice(rest, BLOCK)):  # the digits of a million keys at once would take 64 MB more
        data += bytes.fromhex("".join(block))
    return np.frombuffer(data, dtype=KEY)


def unpacked(keys: Column) -> list[str]:
    """Converts S32 [N] to keys of 64 hex digits each."""
    digits = keys.tobytes().hex()
    return [digits[place : place + 64] for place in range(0, len(digits), 64)]


def gather(parts: Sequence[tuple[int, Column, Column]]) -> Columns:
    """Merges the rows of several shards, each given as (number, keys, rows) with ascending numbers and rows."""
    keys = np.concatenate([np.empty(0, KEY), *(keys for _, keys, _ in parts)])
    row = np.concatenate([np.empty(0, np.int32), *(rows for _, _, rows in parts)])
    shard = np.repeat(np.array([number for number, _, _ in parts], np.int32), [len(keys) for _, keys, _ in parts])
    order = _order(keys)
    return Columns(keys=keys[order], shard=shard[order], row=row[order])


def _order(keys: Column) -> Column:
    """The places of keys in ascending order."""
    # Sort by the first eight bytes only, which usually suffices: a million keys in 0.2 s instead of 0.6.
    order = np.argsort(keys.view(">u8")[::4].astype(np.uint64), kind="stable")
    return order if in_order(keys[order]) else np.argsort(keys, kind="stable")


def ordered(keys: Column) -> Column:
    """The keys, sorted."""
    return keys[_order(keys)]


def among(keys: Column, wanted: Column) -> Column:
    """Whether each wanted key is one of `keys`, which are sorted, bool [N]. (256 of a million: 0.5 ms; `np.isin`, which
    sorts all of them each time, takes 0.7 s.)"""
    return _held(keys, np.searchsorted(keys, wanted), wanted)


def in_order(keys: Column) -> bool:
    """Whether keys are sorted; repeated keys are allowed."""
    return bool((keys[1:] >= keys[:-1]).all())


def select(columns: Columns, numbers: Column) -> Columns:
    """Renumbers shards and drops some: numbers[n] is the new number of shard n, ascending, or -1 to drop it."""
    shard = numbers[columns.shard]
    mask = shard >= 0
    if mask.all():
        return Columns(keys=columns.keys, shard=shard, row=columns.row)
    return Columns(keys=columns.keys[mask], shard=shard[mask], row=columns.row[mask])


def merge(many: Columns, few: Columns) -> Columns:
    """Merges the rows of different shards, with the same result as one `gather`."""
    at = np.searchsorted(many.keys, few.keys)
    keys = np.insert(many.keys, at, few.keys)
    shard, row = np.insert(many.shard, at, few.shard), np.insert(many.row, at, few.row)
    same = keys[1:] == keys[:-1]
    if (same & (shard[1:] < shard[:-1])).any():
        twice = np.flatnonzero(np.append(same, False) | np.append(False, same))
        group = np.append(0, np.cumsum(~same))[twice]
        order = twice[np.lexsort((shard[twice], group))]  # all keys of a group are equal
        shard[twice], row[twice] = shard[order], row[order]
    return Columns(keys=keys, shard=shard, row=row)


def locate(columns: Columns, wanted: Column, shards: int) -> Places:
    """The place of every wanted key (S32 [N], in any order) among the rows of that many shards.

    If two shards hold a row, the shard with more of the wanted rows is chosen, then the smaller number. (300,000 keys
    of a million: 0.1 s if they are sorted.)
    """
    if len(wanted) > 1 and not (wanted[1:] > wanted[:-1]).all():
        distinct, back = np.unique(wanted, return_inverse=True)
        places = locate(columns, distinct, shards)
        return Places(shard=places.shard[back], row=places.row[back])
    first = np.searchsorted(columns.keys, wanted, "left")
    past = first + _held(columns.keys, first, wanted)
    twice = np.flatnonzero(_held(columns.keys, past, wanted) & (past > first))
    past[twice] = np.searchsorted(columns.keys, wanted[twice], "right")
    if len(twice):
        first[twice] = _preferred(columns, first, past, shards)[twice]
    present = past > first
    place = first[present]
    shard, row = np.full(len(wanted), -1, np.int32), np.full(len(wanted), -1, np.int32)
    shard[present], row[present] = columns.shard[place], columns.row[place]
    return Places(shard=shard, row=row)


def _held(keys: Column, place: Column, wanted: Column) -> Column:
    """Whether keys[place] is the wanted key, for each."""
    if not len(keys):
        return np.zeros(len(wanted), bool)
    equal: Column = (place < len(keys)) & (keys[np.minimum(place, len(keys) - 1)] == wanted)
    return equal


def _preferred(columns: Columns, first: Column, past: Column, shards: int) -> Column:
    """From each span, the place whose shard has most places in all spans, then the smallest number."""
    places = _spans(first, past)
    counts = np.bincount(columns.shard[places], minlength=shards)
    rank = np.empty(shards, dtype=np.int64)
    rank[np.lexsort((np.arange(shards), -counts))] = np.arange(shards)
    ranked = rank[columns.shard[places]] << 32 | places  # two int32 in one number: the smallest is preferred
    best, some = first.copy(), past > first
    starts = np.cumsum(past - first) - (past - first)
    best[some] = np.minimum.reduceat(ranked, starts[some]) & 0xFFFFFFFF
    return best


def _spans(first: Column, past: Column) -> Column:
    """All integers in the half-open spans, one span after another."""
    counts = past - first
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    return starts + np.arange(counts.sum())
