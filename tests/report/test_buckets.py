"""`prep bucket --html` and `--png`: every size and bucket is drawn, names are escaped, nothing else is written over."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.preview import TrainSample, preview_epoch
from prep.report.pages.bucket_plot import HALF, WHOLE, Dot, Square, bucket_shapes
from prep.report.pages.bucket_png import UNIT, bucket_png
from prep.report.pages.buckets import bucket_page


def page_of(pictures, **rules):
    result = assign_buckets(pictures, Rules(**{"resolution": 512, **rules}))
    showings = [TrainSample(id=str(one.index).zfill(4), name=one.name, bucket=one.placement.bucket, repeats=1)
                for one in result.pictures]  # fmt: skip
    return bucket_page(preview_epoch(result, showings, batch_size=4))


def test_every_size_and_bucket_is_drawn_once():
    page = page_of([("a", (640, 480)), ("b", (640, 480)), ("c", (900, 300)), ("tiny", (20, 20))])
    dots = re.findall(r"<title>(\d+) pictures of (\d+x\d+)</title>", page)
    assert sorted(dots) == [("1", "900x300"), ("2", "640x480")]
    assert len(re.findall(r'<rect class="bucket"', page)) == 2
    assert "too-small" in page and "picture is 20x20, expected at least 64 pixels" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_worst_come_first_and_names_are_escaped():
    page = page_of([("<b>wide</b>", (1024, 512)), ("wider", (2048, 512)), ("small", (256, 256))], kind="single",
                   upscale="allow")  # fmt: skip
    cut = page.split("<h2>Most cut away</h2>")[1].split("</section>")[0]
    assert "<b>" not in cut and cut.index("wider") < cut.index("&lt;b&gt;wide&lt;/b&gt;") and "small" not in cut
    enlarged = page.split("<h2>Most enlarged</h2>")[1].split("</section>")[0]
    assert "small" in enlarged and "2.00" in enlarged and "wide" not in enlarged


def test_a_picture_at_two_resolutions_is_one_dot():
    result = assign_buckets([("a", (1100, 1100))], Rules(resolution=512), Rules(resolution=1024))
    page = bucket_page(preview_epoch(result, [], batch_size=4))
    assert re.findall(r"<title>(\d+) pictures of", page) == ["1"]
    assert len(re.findall(r'<rect class="bucket"', page)) == 2


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
    assert shown.shape == (UNIT * WHOLE, UNIT * WHOLE, 3)
    for shape in bucket_shapes(pictures, buckets):
        if isinstance(shape, Square):
            edge = shown[round(shape.y * UNIT), round((shape.x - HALF) * UNIT) + 1].astype(int)
            assert edge[0] > edge[2] + 60, "red"
        if isinstance(shape, Dot):
            blue = shown[round(shape.y * UNIT), round(shape.x * UNIT)].astype(int)
            assert blue[2] > blue[0] + 30, "blue"
    assert bucket_png({}, {}) != first


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
