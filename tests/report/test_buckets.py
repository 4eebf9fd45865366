"""`prep bucket --html` and `--png`: every size and bucket is drawn, names are escaped, nothing else is written over."""

from __future__ import annotations

import io
import itertools
import re
from datetime import date

import numpy as np
import pytest
from PIL import Image

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.preview import TrainSample, preview_epoch
from prep.findings import finding
from prep.pages.bucket_plot import HALF, HEIGHT, WIDTH, Dot, Label, Line, Square, bucket_shapes
from prep.pages.snapshot import PageOrigin
from prep.report.snapshots.bucket_png import UNIT, bucket_png
from prep.report.snapshots.buckets import bucket_page

ORIGIN = PageOrigin(name="holiday", places=("photos/holiday",), made=date(2024, 2, 29))


def page_of(pictures, **rules):
    result = assign_buckets(pictures, Rules(**{"resolution": 512, **rules}))
    showings = [TrainSample(id=str(one.index).zfill(4), name=one.name, bucket=one.placement.bucket, repeats=1)
                for one in result.pictures]  # fmt: skip
    return bucket_page(preview_epoch(result, showings, batch_size=4), ORIGIN)


def section(page, id_):
    return page.split(f'<section id="{id_}"')[1].split("</section>")[0]


def test_every_size_and_bucket_is_drawn_once():
    page = page_of([("a", (640, 480)), ("b", (640, 480)), ("c", (900, 300)), ("tiny", (20, 20))])
    dots = re.findall(r"<title>(\d+) pictures? of (\d+x\d+)</title>", page)
    assert sorted(dots) == [("1", "900x300"), ("2", "640x480")]
    assert len(re.findall(r"<title>bucket ", page)) == 2
    assert "too-small" in page and "picture is 20x20, expected at least 64 pixels" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_worst_come_first_and_names_are_escaped():
    page = page_of([("<b>wide</b>", (1024, 512)), ("wider", (2048, 512)), ("small", (256, 256))], kind="single",
                   upscale="allow")  # fmt: skip
    cut = section(page, "cut")
    assert "<b>" not in cut and cut.index("wider") < cut.index("&lt;b&gt;wide&lt;/<wbr>b&gt;") and "small" not in cut
    enlarged = section(page, "enlarged")
    assert "small" in enlarged and "2.00" in enlarged and "wide" not in enlarged


def test_a_picture_at_two_resolutions_is_one_dot():
    result = assign_buckets([("a", (1100, 1100))], Rules(resolution=512), Rules(resolution=1024))
    page = bucket_page(preview_epoch(result, [], batch_size=4), ORIGIN)
    assert re.findall(r"<title>(\d+) picture of", page) == ["1"]
    assert len(re.findall(r"<title>bucket ", page)) == 2


def test_the_head_says_what_there_is_how_much_fits_and_what_to_do():
    wide = page_of([("a", (512, 512)), ("wide", (1024, 512))], kind="single")
    head = wide.split("</header>")[0]
    assert "2 pictures, 1 bucket at resolution 512," in head and "photos/<wbr>holiday" in head
    assert "2 of 2 pictures fit a bucket: 1 step per epoch" in head
    assert "1 picture lose 10% or more" not in head and "1 picture loses 10% or more" in head
    assert "Run prep encode." in page_of([("a", (512, 512))]).split("</header>")[0]


def test_rejected_pictures_are_counted_and_listed():
    result = assign_buckets([("a", (512, 512))], Rules(resolution=512))
    page = bucket_page(preview_epoch(result, [], batch_size=4), ORIGIN, [finding("b.png", "empty-file", "0 bytes")])
    assert "1 of 2 pictures fit a bucket" in page and "Repair or remove the 1 file with errors in Findings." in page
    assert "empty-file" in section(page, "findings") and "b.png" in section(page, "findings")


def test_histograms_count_every_picture_once():
    page = page_of([("a", (512, 512)), ("b", (1024, 512)), ("c", (256, 256))], kind="single", upscale="allow")
    cut, scale = (re.findall(r'<th scope="row">([^<]*)</th>.*?<span class="number">(\d+)</span>', one)
                  for one in page.split('<figure class="bars">')[1:])
    assert dict(cut) == {"0%": "2", "0–1%": "0", "1–5%": "0", "5–10%": "0", "10–20%": "0", "20–40%": "0",
                         "above 40%": "1"}
    assert {name for name, count in scale if count != "0"} == {"0.75–1", "1.5–2"}


def test_the_command_writes_a_page_and_nothing_over_anything_else(prep, photos, tmp_path):
    options = ("--resolution", 96, "--step", 16, "--html")
    assert prep("bucket", photos, *options, tmp_path / "page.html").code == 0
    assert prep("bucket", photos, *options, tmp_path / "page.html").code == 0, "a page of ours may be written again"
    assert '<svg class="plot"' in (tmp_path / "page.html").read_text()
    (tmp_path / "notes.html").write_text("mine")
    refused = prep("bucket", photos, *options, tmp_path / "notes.html")
    assert refused.code == 5 and (tmp_path / "notes.html").read_text() == "mine"
    inside = prep("bucket", photos, *options, photos / "page.html")
    assert inside.code == 5 and not (photos / "page.html").exists()


def test_the_plot_as_a_picture(prep, photos, tmp_path):
    """Read back: a bucket's square is where the plot's own scale has it, and every dot has left something."""
    plot = tmp_path / "plot.png"
    options = ("--resolution", 96, "--step", 16, "--png", plot)
    assert prep("bucket", photos, *options).code == 0
    first = plot.read_bytes()
    assert prep("bucket", photos, *options).code == 0 and plot.read_bytes() == first, "a plot of ours is replaced"
    pictures, buckets = {(600, 500): 3, (400, 700): 1}, {(512, 512): 4}
    shown = np.asarray(Image.open(io.BytesIO(bucket_png(pictures, buckets))))
    assert shown.shape == (UNIT * HEIGHT, UNIT * WIDTH, 3)
    for shape in bucket_shapes(pictures, buckets):
        if isinstance(shape, Square):
            edge = shown[round(shape.y * UNIT), round((shape.x - HALF) * UNIT) + 1].astype(int)
            assert edge[0] > edge[2] + 60, "red"
        if isinstance(shape, Dot):
            blue = shown[round(shape.y * UNIT), round(shape.x * UNIT)].astype(int)
            assert blue[2] > blue[0] + 30, "blue"
    assert bucket_png({}, {}) != first


def labels(shapes, tone):
    return [one for one in shapes if isinstance(one, Label) and one.tone == tone]


def test_the_plot_says_what_its_marks_mean():
    shapes = bucket_shapes({(600, 500): 40, (400, 700): 1}, {(512, 512): 41})
    words = [one.words for one in labels(shapes, "legend")]
    assert words == ["1", "6", "40", "pictures of one size", "bucket, on the line of its aspect ratio",
                     "width = height"]
    assert {one.words for one in labels(shapes, "axis")} == {"height, in pixels",
                                                             "width of picture or bucket, in pixels"}
    sizes = {one.says: one.radius for one in shapes if isinstance(one, Dot) and one.says}
    samples = [one.radius for one in shapes if isinstance(one, Dot) and not one.says]
    assert sorted(sizes.values()) == [min(samples), max(samples)], "the legend has dots of the sizes that are drawn"


def test_each_bucket_has_the_line_of_its_aspect_ratio():
    shapes = bucket_shapes({(600, 500): 1}, {(512, 512): 1, (1024, 256): 1})
    lines = [one.ends for one in shapes if isinstance(one, Line) and one.kind == "aspect"]
    for square in (one for one in shapes if isinstance(one, Square) and one.says):
        assert any(abs((square.x - x1) - (y1 - square.y)) < 0.3 and x1 <= square.x <= x2 for x1, y1, x2, _ in lines)
    for x1, y1, x2, y2 in lines:
        assert abs((x2 - x1) - (y1 - y2)) < 0.3, "a diagonal"
        assert min(x1, x2, y1, y2) >= 0 and max(x1, x2) <= WIDTH and max(y1, y2) <= HEIGHT


@pytest.mark.parametrize("sides", [(512, 513), (300, 3000), (1, 60000), (64, 1 << 28)])
def test_the_numbers_of_an_axis_do_not_touch(sides):
    shapes = bucket_shapes({(sides[0], sides[1]): 1}, {(sides[1], sides[0]): 1})
    across = sorted(one.x for one in labels(shapes, "tick") if one.anchor == "middle")
    assert 1 <= len(across) <= 11 and all(b - a >= 40 for a, b in itertools.pairwise(across))


def test_bucket_names_cover_nothing():
    buckets = {(wide, high): 1 for wide in range(256, 1025, 64) for high in range(256, 1025, 192)}
    shapes = bucket_shapes({(64, 64): 5}, buckets)
    names = [(one, one.x - 7 * len(one.words) * (one.anchor == "end")) for one in labels(shapes, "name")]
    boxes = [(left, one.y - 10, left + 7 * len(one.words), one.y + 2) for one, left in names]
    squares = [(one.x - HALF, one.y - HALF, one.x + HALF, one.y + HALF) for one in shapes
               if isinstance(one, Square) and one.says]
    assert boxes, "some have room"
    for number, one in enumerate(boxes):
        for other in boxes[number + 1:] + squares:
            assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]


def test_buckets_at_the_left_border_have_their_names_to_the_right():
    shapes = bucket_shapes({(1000, 1000): 5}, {(256, 1024): 1, (512, 512): 1})
    assert {one.words: one.anchor for one in labels(shapes, "name")} == {"256x1024": "start", "512x512": "end"}


def test_a_plot_replaces_nothing_else(prep, photos, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "mine.png")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target in (tmp_path / "mine.png", photos / "plot.png", next(photos.rglob("*.png")), tmp_path / "no/plot.png"):
        refused = prep("bucket", photos, "--resolution", 96, "--step", 16, "--png", target)
        assert refused.code == 5 and "plot" in refused.err
    refused = prep("bucket", photos, "--resolution", 96, "--step", 16, "--html", tmp_path / "one",
                   "--png", tmp_path / "one")
    assert refused.code == 5 and "are the same place" in refused.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
