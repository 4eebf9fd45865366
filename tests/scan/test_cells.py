"""Among so many pictures that each is compared with those in cells near it only, copies are found all the same."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from scenes import likely_pairs

from prep.scan.duplicates import signature
from prep.scan.duplicates.cells import PROBED, Cells
from prep.scan.duplicates.signature import LENGTH, Pair

COUNT = 3000  # pictures: 54 cells, of which each picture and its mirror image are looked for in 32
ACROSS = np.arange(1, LENGTH + 1) % 8 % 2 == 1  # mirroring flips these numbers of a signature


def signatures_of(rows: np.ndarray) -> list[bytes]:
    return [np.rint(row * (127 / np.abs(row).max())).astype(np.int8).tobytes() for row in rows]


@pytest.fixture(scope="module")
def many() -> tuple[list[bytes], dict[int, tuple[int, bool]]]:
    """Random signatures, some of pictures without contrast, and copies of them, plain and mirrored, whose products with
    their originals are 0.92 to 0.99: (signatures; original and whether mirrored, by copy)."""
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(COUNT, LENGTH)) * np.linspace(1.5, 0.5, LENGTH)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    copies = {}
    for number, copy in enumerate(range(COUNT // 2, COUNT, 15)):
        first, mirrored, likeness = number * 7, bool(number % 2), (0.92, 0.95, 0.99)[number % 3]
        original = np.where(ACROSS & mirrored, -rows[first], rows[first])
        other = rng.normal(size=LENGTH)
        other -= (other @ original) * original
        rows[copy] = likeness * original + np.sqrt(1 - likeness**2) * other / np.linalg.norm(other)
        copies[copy] = first, mirrored
    signatures = signatures_of(rows)
    for flat in range(5, COUNT // 2, 501):
        if flat not in {first for first, _ in copies.values()}:
            signatures[flat] = b""
    return signatures, copies


def found(pairs: Iterable[Pair]) -> dict[int, tuple[int, bool]]:
    return {pair.second: (pair.first, pair.mirrored) for pair in pairs}


def test_copies_are_found_as_by_comparing_all_with_all(many, monkeypatch):
    signatures, copies = many
    exhaustive = list(likely_pairs(signatures))
    monkeypatch.setattr(signature, "DIRECT", 100)
    by_cells = list(likely_pairs(signatures))
    assert found(by_cells) == copies == found(exhaustive)
    assert [pair.product for pair in by_cells] == pytest.approx([pair.product for pair in exhaustive])


def test_a_search_that_goes_on_finds_the_same(many, monkeypatch):
    signatures, copies = many
    monkeypatch.setattr(signature, "DIRECT", 100)
    half = COUNT * 3 // 4
    known = list(likely_pairs(signatures[:half]))
    assert found(likely_pairs(signatures, known=known, fresh=range(half, COUNT))) == copies


def test_old_pictures_are_compared_with_new_ones_that_come_before_them(many, monkeypatch):
    """A new picture that is larger than known ones has an earlier place, and is the original of what copies it."""
    signatures, copies = many
    monkeypatch.setattr(signature, "DIRECT", 100)
    originals = {first for first, _ in copies.values()}
    assert found(likely_pairs(signatures, fresh=originals)) == copies


def test_no_more_is_compared_than_the_cells_probed_hold(many):
    signatures, _ = many
    rows = signature._unit(signatures)
    cells = Cells(rows, np.ones(LENGTH, np.float32))
    every = np.arange(COUNT)
    members = cells.members(every)
    assert sorted(np.concatenate(members)) == [place for place in every if signatures[place]]
    assert all((np.diff(each) > 0).all() for each in members)
    probed = cells._probed(rows[:50])
    assert sum(len(places) for _, places in probed) == 50 * PROBED and len({cell for cell, _ in probed}) == len(probed)


@pytest.mark.parametrize("signatures", [[b""] * 9, [b"", bytes([1] * LENGTH)], [bytes([1] * LENGTH)] * 9],
                         ids=["none has contrast", "one has", "all the same"])
def test_sets_with_hardly_anything_to_compare(signatures, monkeypatch):
    exhaustive = found(likely_pairs(signatures))
    monkeypatch.setattr(signature, "DIRECT", 0)
    assert found(likely_pairs(signatures)).keys() == exhaustive.keys()
