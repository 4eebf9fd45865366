"""The HTML page: complete, escaped, self-contained, and honest about pictures that are not there any more."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import MappingProxyType

import numpy as np
import pytest

from prep.digest import digest_bytes
from prep.images.decode import decode_picture, encode_png, read_header
from prep.images.mask import decode_mask
from prep.manifest import describe as audit
from prep.report.pages.bucket_plot import bucket_plot
from prep.report.pages.gallery import from_sources, no_thumbnail
from prep.report.pages.manifest import page, write_page

VOID = {"meta", "img", "input", "br", "line"}


class Checker(HTMLParser):
    """Collects tags, and fails on tags that do not nest."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def plain(opened):
    return page(opened, cards=10, thumbnail=no_thumbnail)


def test_the_page_nests_and_has_all_sections(small):
    text = plain(small)
    checker = parse(text)
    assert re.findall("<h2>(.*?)</h2>", text) == ["Fields", "Buckets", "Samples", "Findings"]
    assert checker.tags.count("figure") == 3
    assert "3 of 3 samples" in text
    assert "prefers-color-scheme: dark" in text


def test_nothing_is_loaded_and_nothing_runs(small):
    text = plain(small)
    checker = parse(text)
    assert not {"script", "link", "iframe", "object", "form"} & set(checker.tags)
    for name, value in checker.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith("data:image/")
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_captions_names_and_findings_are_escaped(small):
    text = plain(small)
    assert "&lt;script&gt;alert(&#x27;caption&#x27;)&lt;/script&gt; &amp; \\x1b[31mred" in text
    assert "ends &lt;early&gt;" in text
    assert "\x1b" not in text


def test_crop_and_mask_are_drawn_where_they_are(small):
    text = plain(small)
    # 64x72 scaled, cut at (0, 4) to 64x64
    assert "left:0.000%;top:5.556%;width:100.000%;height:88.889%" in text
    (mask,) = re.findall('src="data:image/png;base64,([^"]*)"', text)
    pixels = np.asarray(decode_mask(base64.b64decode(mask)))
    assert pixels.tolist() == (np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).tolist()


def test_a_mask_that_cannot_be_read_is_not_drawn(small):
    (path,) = (small.cache.root / "shards").glob("*/*/mask/c*")
    path.chmod(0o600)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert "data:image" not in plain(small)


def test_without_its_source_a_card_says_the_size(small):
    text = page(small, cards=10, thumbnail=from_sources(small))
    assert text.count('128x144, source not here</div>') == 2


def test_fewer_cards_than_samples(small):
    text = page(small, cards=2, thumbnail=no_thumbnail)
    assert text.count("<figure>") == 2
    assert "2 of 3 samples" in text


def test_jpeg_and_png_thumbnails(small):
    text = page(small, cards=1, thumbnail=lambda _: b"\xff\xd8jpeg")
    assert 'src="data:image/jpeg;base64,' in text


@pytest.fixture
def photo(small):
    """The picture of a.png where its source is, and its sample as if it had been made from it."""
    data = encode_png(np.full((144, 128, 3), 200, np.uint8))
    path = small.manifest.path.parent / "photos" / "a.png"
    path.parent.mkdir()
    path.write_bytes(data)
    (sample,) = audit.describe_samples(small, "a.png")["samples"]
    return path, {**sample, "picture": digest_bytes(data)}


def test_a_thumbnail_is_the_whole_picture(small, photo):
    made = decode_picture(from_sources(small)(photo[1]), alpha="white")
    assert made.size == (128, 144)
    assert made.getpixel((5, 5)) == (200, 200, 200)


def test_large_pictures_shrink(small, photo):
    data = encode_png(np.zeros((100, 1000, 3), np.uint8))
    photo[0].write_bytes(data)
    made = from_sources(small)({**photo[1], "picture": digest_bytes(data)})
    assert read_header(made).size == (240, 24)


def test_another_picture_under_the_name_is_not_shown(small, photo):
    photo[0].write_bytes(encode_png(np.zeros((8, 8, 3), np.uint8)))
    assert from_sources(small)(photo[1]) is None


def test_bytes_that_are_no_picture_are_not_shown(small, photo):
    photo[0].write_bytes(b"text")
    assert from_sources(small)({**photo[1], "picture": digest_bytes(b"text")}) is None


@pytest.mark.parametrize("source", [1, 7])
def test_a_source_without_a_path_has_no_pictures(small, photo, source):
    document = MappingProxyType({**small.manifest.document, "sources": ["photos", None]})
    opened = replace(small, manifest=replace(small.manifest, document=document))
    assert from_sources(opened)({**photo[1], "source": source}) is None


def test_writing(small, tmp_path):
    write_page(small, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_plot_has_a_mark_for_each_size():
    text = bucket_plot({(500, 400): 3, (1000, 800): 1}, {(512, 384): 4})
    parse(text)
    assert text.count("<circle") == 2
    assert "<title>3 pictures of 500x400</title>" in text
    assert "<title>bucket 512x384: 4 samples</title>" in text
    # one aspect ratio is one diagonal: as far right as up
    (x1, y1), (x2, y2) = [(float(x), float(y)) for x, y in re.findall('cx="([^"]*)" cy="([^"]*)"', text)]
    assert x2 - x1 == pytest.approx(y1 - y2, abs=0.2)


def test_a_plot_of_nothing():
    assert bucket_plot({}, {}) == ""


@pytest.mark.parametrize("target", ["photos/0.png", "m.json", "cache/latentry.json", "cache/page.html", "mine.html"])
def test_a_page_replaces_nothing_that_is_not_a_page(prep, photos, tiny_model, tmp_path, target):
    prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
         "--resolution", 96, "--step", 16)
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = prep("inspect", tmp_path / "m.json", "--html", tmp_path / target)
    assert result.code == 5, result.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):  # a page of ours is replaced
        assert prep("inspect", tmp_path / "m.json", "--html", tmp_path / "new.html").code == 0
