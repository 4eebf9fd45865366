"""A scan compares only what is new with all pictures; it finds the same as one that compares all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import COPIES, likely_pairs, scene, thumb
from walking import walk

from prep.parse import Unparsed
from prep.scan import compare
from prep.scan import memo as remembered
from prep.scan import scanner as scans
from prep.scan.duplicates import copies
from prep.scan.duplicates.compared import DIGEST, Compared, Link, compared_from
from prep.scan.duplicates.correlation import Near, near_duplicates
from prep.scan.duplicates.signature import LENGTH, Pair
from prep.scan.memo import ScanMemo
from prep.scan.scanner import scan

CENTRES = np.random.default_rng(0).integers(-127, 128, (5, LENGTH))
SIGNATURES = [np.clip(CENTRES[number % 5] + np.random.default_rng(number).integers(-20, 21, LENGTH), -127, 127)
              .astype(np.int8).tobytes() for number in range(40)]  # pairs of one centre are likely, all differ
THUMBS = [thumb(picture) for picture in (*COPIES.values(), *(scene(seed) for seed in range(6)))]
SETS = st.lists(st.sampled_from(range(len(SIGNATURES))), unique=True, max_size=25)


def names(numbers: list[int]) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(DIGEST, "big") for number in numbers)


def pairs_of(links: list[Link]) -> list[Pair]:
    return [Pair(first=link.near.first, second=link.near.second, mirrored=link.near.mirrored, product=link.product)
            for link in links]


def compared_of(numbers: list[int], pairs: list[Pair]) -> Compared:
    links = (Link(near=Near(first=pair.first, second=pair.second, score=0.5, mirrored=pair.mirrored),
                  product=pair.product) for pair in pairs)
    return Compared(every=False, pictures=names(numbers), links=tuple(links))


def ends(pairs: list[Pair]) -> set[tuple[int, int, bool]]:
    return {(pair.first, pair.second, pair.mirrored) for pair in pairs}


@settings(deadline=None)
@given(SETS, SETS, st.integers(1, 7), st.booleans())
def test_the_likely_pairs_after_any_change_are_those_of_a_search_among_all(before, after, block, same_order):
    if same_order:
        before, after = sorted(before), sorted(after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prep.scan.duplicates.signature.BLOCK", block)
        old = list(likely_pairs([SIGNATURES[number] for number in before]))
        known, fresh = compared_of(before, old).among(names(after))
        signatures = [SIGNATURES[number] for number in after]
        found = list(likely_pairs(signatures, known=pairs_of(known), fresh=fresh))
        assert ends(found) == ends(list(likely_pairs(signatures))) and len(found) == len(ends(found))
    if same_order and set(before) <= set(after):
        assert fresh == {after.index(number) for number in set(after) - set(before)}


@settings(deadline=None, max_examples=6)
@given(st.data(), st.integers(1, 9))
def test_the_near_duplicates_after_any_change_are_those_of_a_comparison_of_all(data, block):
    subset = st.lists(st.sampled_from(range(len(THUMBS))), unique=True, max_size=9)
    before, after = data.draw(subset), data.draw(subset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prep.scan.duplicates.correlation.AT_ONCE", block * 2000)
        links = [Link(near=near) for near in near_duplicates([THUMBS[number] for number in before])]
        known, fresh = Compared(every=True, pictures=names(before), links=tuple(links)).among(names(after))
        assert fresh == {after.index(number) for number in set(after) - set(before)}
        thumbs, ticks = [THUMBS[number] for number in after], []
        found = [link.near for link in known] + list(near_duplicates(thumbs, ticks.append, fresh))
        assert sorted(found, key=lambda near: (near.first, near.second)) == list(near_duplicates(thumbs))
    assert sum(ticks) == (len(after) if fresh else 0)


LINKS = st.lists(st.builds(lambda first, more, score, product, mirrored: Link(
    near=Near(first=first, second=first + more, score=score, mirrored=mirrored), product=product),
    st.integers(0, 5), st.integers(1, 4), st.floats(-1, 1), st.floats(0, 1, width=32), st.booleans()))


@given(LINKS, st.booleans(), st.data())
def test_a_record_comes_back_the_same_and_a_damaged_one_is_none(links, every, data):
    compared = Compared(every=every, pictures=names(list(range(10))), links=tuple(links))
    record = compared.as_bytes()
    assert compared_from(record) == compared
    with pytest.raises(Unparsed, match="record of a comparison"):
        compared_from(record[: data.draw(st.integers(0, len(record) - 1))])
    with pytest.raises(Unparsed, match="names pictures that it lacks"):
        compared_from(replace(compared, pictures=(), links=(Link(
            near=Near(first=0, second=1, score=0.9, mirrored=False)),)).as_bytes())


@pytest.fixture(params=["few", "many"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "many":
        for module in (scans, compare, copies, remembered):
            monkeypatch.setattr(module, "LIMIT", 2)
    root = tmp_path / "pictures"
    root.mkdir()
    for seed in range(4):
        scene(seed).save(root / f"{seed}.png")
        (root / f"{seed}.txt").write_text("a scene")
    return root


def scanned(folder, memory: ScanMemo) -> dict[str, tuple[str, str]]:
    report = scan(walk(folder, source=0, mask_from="none"), jobs=1, memory=memory)
    memory.close()
    return {one.path: (one.code, one.detail) for one in report.findings if one.code == "near-duplicate"}


def test_a_scan_after_changes_finds_what_a_first_one_finds(folder, tmp_path):
    def both() -> dict[str, tuple[str, str]]:
        again = scanned(folder, ScanMemo(tmp_path / "memory.sqlite", sources=["a"]))
        assert again == scanned(folder, ScanMemo(None))
        return again

    assert both() == {}
    scene(2).resize((150, 125)).save(folder / "copy.png")
    assert set(both()) == {"copy.png"}
    scene(2).resize((180, 150)).save(folder / "middle.png")
    assert set(both()) == {"copy.png", "middle.png"}
    (folder / "2.png").unlink()
    (found,) = both().items()
    assert found[0] == "copy.png" and "middle.png" in found[1][1]
    (folder / "middle.png").rename(folder / "another name.png")
    assert "another name.png" in both()["copy.png"][1]


def test_pictures_that_were_compared_are_not_compared_again(folder, tmp_path, monkeypatch):
    compared = []
    for name in ("near_duplicates", "likely_blocks"):
        search = getattr(compare, name)
        monkeypatch.setattr(compare, name, lambda *call, search=search: (compared.append(call[-1]), search(*call))[1])
    for sources in (["a"], ["a"], ["b"]):
        scanned(folder, ScanMemo(tmp_path / "memory.sqlite", sources=sources))
        scene(len(compared) + 10).save(folder / f"new {len(compared)}.png")
    assert list(map(len, compared)) == [4, 1, 6]


@pytest.mark.parametrize(("count", "stops"), [(4, (3,)), (6, (3, 5))])
def test_a_first_comparison_that_is_interrupted_goes_on(tmp_path, monkeypatch, count, stops):
    for module in (scans, compare, copies, remembered):
        monkeypatch.setattr(module, "LIMIT", 2)
    for name in ("prep.scan.duplicates.signature.BLOCK", "prep.scan.compare.BLOCK", "prep.scan.compare.SAVED"):
        monkeypatch.setattr(name, 2)
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(count):
        scene(number).save(root / f"{number}.png")
        scene(number).resize((180 - 6 * number, 150 - 5 * number)).save(root / f"{number} copy.png")
    search, whole = compare.likely_blocks, scanned(root, ScanMemo(None))

    def interrupted(stop, *call):
        for number, block in enumerate(search(*call)):
            if number == stop:
                raise KeyboardInterrupt
            yield block

    known = count - 1
    for stop in stops:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(compare, "likely_blocks", partial(interrupted, stop))
            scanned(root, ScanMemo(tmp_path / "memory.sqlite"))
        before = ScanMemo(tmp_path / "memory.sqlite").compared()
        assert before is not None and known < len(before.pictures) < 2 * count
        assert bool(before.links) == (len(before.pictures) > count), "the originals alone, which are no copies, count"
        known = len(before.pictures)
    assert scanned(root, ScanMemo(tmp_path / "memory.sqlite")) == whole and len(whole) == count
