"""Among many pictures, copies of whole ones are found by signature; everything else of a scan is as among few."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from scenes import COPIES, ORIGINAL, jpeg, likely_pairs, scene, thumb
from walking import walk

from prep.scan import compare as alike
from prep.scan import memo as remembered
from prep.scan import scanner as scans
from prep.scan.duplicates import copies
from prep.scan.duplicates.correlation import whole_correlation
from prep.scan.duplicates.identity import identify, sampled, thumb_of
from prep.scan.duplicates.signature import LENGTH, LIKELY, likely_blocks, signature_of
from prep.scan.memo import ScanMemo
from prep.scan.scanner import scan

WHOLE = [how for how in COPIES if not any(word in how for word in ("part", "half"))]
SIGNATURES = st.lists(st.one_of(st.just(b""), st.binary(min_size=LENGTH, max_size=LENGTH)), max_size=12)


def brute(signatures: list[bytes], least: float) -> set[tuple[int, bool]]:
    """(picture, mirrored) of each whose best product with an earlier one is `least`, from one at a time in float64."""
    across = np.array([place % 8 for place in range(1, 64)])
    rows = [np.frombuffer(one or bytes(LENGTH), np.int8).astype(float) for one in signatures]
    rows = [row / max(np.linalg.norm(row), 1e-6) for row in rows]
    return {(second, mirrored) for mirrored in (False, True) for second, row in enumerate(rows)
            if max(((np.where(across % 2, -row, row) if mirrored else row) @ other for other in rows[:second]),
                   default=0) >= least}  # fmt: skip


@given(SIGNATURES, st.data(), st.integers(1, 5))
def test_pairs_are_those_of_a_plain_search(signatures, data, block):
    signatures += [data.draw(st.sampled_from(signatures)) for _ in range(3) if signatures]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prep.scan.duplicates.signature.BLOCK", block)
        found = list(likely_pairs(signatures))
    places = {(pair.second, pair.mirrored) for pair in found}
    assert brute(signatures, LIKELY + 1e-5) <= places <= brute(signatures, LIKELY - 1e-5)
    assert len(places) == len(found) and all(pair.first < pair.second for pair in found)


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("mirrored", [False, True])
def test_copies_of_whole_pictures_are_likely_and_alike(how, mirrored):
    copy = ImageOps.mirror(COPIES[how]) if mirrored else COPIES[how]
    thumbs = [thumb(scene(1)), thumb(ORIGINAL), thumb(scene(2)), thumb(copy)]
    (pair,) = likely_pairs([signature_of(one) for one in thumbs])
    assert (pair.first, pair.second, pair.mirrored) == (1, 3, mirrored)
    assert whole_correlation(thumbs[1], thumbs[3], mirrored=mirrored) >= 0.93 > whole_correlation(
        thumbs[0], thumbs[3], mirrored=mirrored)


def test_other_pictures_and_other_shapes_are_not_alike():
    thumbs = [thumb(scene(seed, (200 + 10 * seed, 300))) for seed in range(30)]
    assert [pair for pair in likely_pairs([signature_of(one) for one in thumbs])
            if whole_correlation(thumbs[pair.first], thumbs[pair.second], mirrored=pair.mirrored) >= 0.93] == []
    stretched = thumb(ORIGINAL.resize((360, 200)))
    assert whole_correlation(thumb(ORIGINAL), stretched, mirrored=False) == 0.0


@pytest.mark.parametrize("picture", [
    Image.new("RGB", (64, 64), (90, 90, 90)), Image.new("RGB", (1, 1)),
    Image.fromarray(np.indices((256, 256)).sum(axis=0).astype(np.uint8) % 2 * 255).convert("RGB"),
], ids=["flat", "one pixel", "fine pattern"])  # fmt: skip
def test_what_has_nothing_to_compare(picture):
    assert signature_of(thumb(picture)) == b""
    assert list(likely_pairs([b"", b"", b""])) == []


def test_a_signature_is_small_and_the_same_of_mirrored_but_for_signs():
    plain, mirror = (np.frombuffer(signature_of(thumb(one)), np.int8).astype(int)
                     for one in (ORIGINAL, ImageOps.mirror(ORIGINAL)))
    across = np.array([place % 8 for place in range(1, 64)])
    assert len(plain) == LENGTH and np.abs(np.where(across % 2, -plain, plain) - mirror).max() <= 6
    assert identify(b"x", ORIGINAL)[0].signature == signature_of(thumb_of(sampled(ORIGINAL), ORIGINAL.size))


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A directory of seven pictures, three of them copies in one way or another, and a scan that calls that many."""
    for module in (scans, alike, copies, remembered):
        monkeypatch.setattr(module, "LIMIT", 2)
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(4):
        scene(number).save(root / f"{number}.png")
    jpeg(scene(0).resize((180, 150))).save(root / "small.jpg")
    ImageOps.mirror(scene(1)).save(root / "turned.png")
    scene(2).crop((120, 0, 360, 300)).save(root / "cut.png")
    for path in sorted(root.iterdir()):
        path.with_suffix(".txt").write_text("a scene")
    return root


def codes(report) -> dict[str, str]:
    return {one.path: one.code for one in report.findings if "duplicate" in one.code}


def test_a_scan_of_many(many, tmp_path):
    ticks = []

    class Progress:
        def __init__(self, title, total, unit):
            self.title = title

        def __enter__(self):
            return lambda count: ticks.append((self.title, count))

        def __exit__(self, *_):
            return None

    report = scan(walk(many, source=0, mask_from="none"), jobs=2, progress=Progress)
    assert codes(report) == {"small.jpg": "near-duplicate", "turned.png": "mirrored-duplicate",
                             ".": "duplicates-skipped"}  # fmt: skip
    (told,) = [one.detail for one in report.findings if one.code == "duplicates-skipped"]
    assert told == ("7 pictures; cropped near-duplicates are searched for among at most 2, those of whole pictures "
                    "among all")
    assert sum(count for title, count in ticks if title == "comparing") == 7


def test_a_second_scan_says_the_same_and_decodes_nothing(many, tmp_path, monkeypatch):
    table = tmp_path / "scan.sqlite"
    scene(3).save(many / "same.bmp")
    reports = []
    for number in range(3):
        memory = ScanMemo(table)
        if number == 1:
            monkeypatch.setattr("prep.workers.pool._start", lambda *_: pytest.fail("a worker was started"))
        if number == 2:  # another picture: the old ones are known, two of their thumbnails are not
            monkeypatch.undo()
            for module in (scans, alike, copies, remembered):
                monkeypatch.setattr(module, "LIMIT", 2)
            scene(9).save(many / "nine.png")
        reports.append(scan(walk(many, source=0, mask_from="none"), jobs=1, memory=memory))
        memory.close()
    assert codes(reports[0]) == codes(reports[1]) == codes(reports[2])
    assert codes(reports[0])["same.bmp"] == "pixel-duplicate"


def test_more_than_are_ever_compared(many, monkeypatch):
    for module in (alike, copies):
        monkeypatch.setattr(module, "MOST", 3)
    report = scan(walk(many, source=0, mask_from="none"), jobs=1)
    assert codes(report) == {".": "duplicates-skipped"}
    (told,) = [one.detail for one in report.findings if one.code == "duplicates-skipped"]
    assert told == "7 pictures; near-duplicates are searched for among at most 3"


def test_a_picture_that_is_gone_when_it_is_looked_at_again(many, monkeypatch):
    monkeypatch.setattr(alike, "likely_blocks", lambda *search: _removing(many, *search))
    report = scan(walk(many, source=0, mask_from="none"), jobs=1)
    assert codes(report) == {".": "duplicates-skipped", "turned.png": "mirrored-duplicate"}


def test_what_is_said_of_a_lost_picture_is_not_remembered(many, tmp_path):
    found = []
    for lost in (True, False):
        memory = ScanMemo(tmp_path / "scan.sqlite")
        with pytest.MonkeyPatch.context() as patch:
            if lost:
                patch.setattr(alike, "_decoded_again", lambda _, __, pictures: iter([None] * len(pictures)))
            found.append(codes(scan(walk(many, source=0, mask_from="none"), jobs=1, memory=memory)))
        memory.close()
    assert "small.jpg" not in found[0] and found[1]["small.jpg"] == "near-duplicate"


def test_a_picture_that_is_another_by_now_is_lost(many, tmp_path, monkeypatch):
    def changing(*search):
        (many / "small.jpg").write_bytes((many / "3.png").read_bytes())
        yield from likely_blocks(*search)

    monkeypatch.setattr(alike, "likely_blocks", changing)
    before = (many / "small.jpg").read_bytes()
    scan(walk(many, source=0, mask_from="none"), jobs=1, memory=(memory := ScanMemo(tmp_path / "scan.sqlite")))
    memory.close()
    monkeypatch.undo()
    (many / "small.jpg").write_bytes(before)
    for module in (scans, alike, copies, remembered):
        monkeypatch.setattr(module, "LIMIT", 2)
    report = scan(walk(many, source=0, mask_from="none"), jobs=1, memory=ScanMemo(tmp_path / "scan.sqlite"))
    assert codes(report)["small.jpg"] == "near-duplicate"


def _removing(root, *search):
    (root / "small.jpg").unlink()
    yield from likely_blocks(*search)


def test_a_thumbnail_as_a_png_comes_out_the_same():
    stream = io.BytesIO()
    ORIGINAL.save(stream, "PNG")
    assert signature_of(thumb(Image.open(stream).convert("RGB"))) == signature_of(thumb(ORIGINAL))
