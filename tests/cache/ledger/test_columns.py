"""Rows by key as columns: gathered, selected, merged and located as plain Python would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.cache.ledger.columns import (
    BLOCK,
    KEY,
    Columns,
    among,
    gather,
    in_order,
    locate,
    merge,
    ordered,
    packed,
    select,
    unpacked,
)

# Keys that differ in their first byte, only behind their first eight, or in zeros at the end.
HEX = st.sampled_from([f"{head:02x}" + "00" * 30 + f"{tail:02x}" for head in (0, 1, 255) for tail in (0, 1, 128)])
PARTS = st.lists(st.lists(HEX, max_size=6, unique=True).map(sorted), max_size=6)
Row = tuple[bytes, int, int]


def part(number: int, keys: list[str]) -> tuple[int, np.ndarray, np.ndarray]:
    return number, packed(keys), np.arange(len(keys), dtype=np.int32)


def rows_of(columns: Columns) -> list[Row]:
    keys = [key.ljust(32, b"\0") for key in columns.keys.tolist()]
    return list(zip(keys, columns.shard.tolist(), columns.row.tolist(), strict=True))


def plainly(parts: dict[int, list[str]]) -> list[Row]:
    return sorted((bytes.fromhex(key), number, row) for number, keys in parts.items() for row, key in enumerate(keys))


@pytest.mark.parametrize("count", [0, 1, BLOCK, BLOCK + 1])
def test_packed_keys_are_unpacked(count: int) -> None:
    keys = [f"{number:08x}" * 8 for number in range(count)]
    assert len(packed(iter(keys))) == count and unpacked(packed(keys)) == keys


@pytest.mark.parametrize("wrong", ["ab" * 31, "ab" * 33, "xy" * 32])
def test_what_is_no_key_is_not_packed(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"buffer size|hexadecimal"):
        packed(["ab" * 32, wrong])


@given(PARTS)
def test_gathered_rows_are_sorted_by_key_then_shard(parts: list[list[str]]) -> None:
    columns = gather([part(number, keys) for number, keys in enumerate(parts)])
    assert rows_of(columns) == plainly(dict(enumerate(parts)))
    assert in_order(columns.keys)
    assert (columns.keys.dtype, columns.shard.dtype, columns.row.dtype) == (np.dtype(KEY), np.int32, np.int32)


@given(PARTS, st.data())
def test_selected_shards_keep_their_rows_under_new_numbers(parts: list[list[str]], data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(0, max(0, len(parts) - 1))))) if parts else []
    numbers = np.full(len(parts), -1, np.int32)
    numbers[kept] = np.arange(len(kept)) * 3
    found = select(gather([part(number, keys) for number, keys in enumerate(parts)]), numbers)
    assert rows_of(found) == plainly({3 * place: parts[number] for place, number in enumerate(kept)})


@given(PARTS, st.sets(st.integers(0, 5)))
def test_merged_rows_are_as_if_gathered_at_once(parts: list[list[str]], few: set[int]) -> None:
    made = [part(number, keys) for number, keys in enumerate(parts)]
    merged = merge(gather([one for one in made if one[0] not in few]), gather([one for one in made if one[0] in few]))
    assert rows_of(merged) == rows_of(gather(made))


@given(PARTS, st.lists(HEX, max_size=12))
def test_located_is_the_shard_with_most_of_the_wanted(parts: list[list[str]], wanted: list[str]) -> None:
    """In any order, and a key may be asked for twice."""
    columns = gather([part(number, keys) for number, keys in enumerate(parts)])
    places = locate(columns, packed(wanted), len(parts))
    for key, shard, row, there in zip(wanted, places.shard, places.row, places.present, strict=True):
        holders = [number for number, keys in enumerate(parts) if key in keys]
        best = min(holders, key=lambda number: (-len(set(wanted) & set(parts[number])), number), default=-1)
        assert (shard, row, there) == (best, parts[best].index(key) if holders else -1, bool(holders))


@given(st.lists(HEX, max_size=12), st.lists(HEX, max_size=12))
def test_wanted_keys_are_found_among_sorted_ones(keys: list[str], wanted: list[str]) -> None:
    rows = ordered(packed(keys))
    assert in_order(rows) and sorted(rows.tolist()) == sorted(packed(keys).tolist())
    assert among(rows, packed(wanted)).tolist() == [key in keys for key in wanted]
