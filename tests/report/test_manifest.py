"""The HTML page: complete, escaped, self-contained, and honest about pictures that are not there any more."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from types import MappingProxyType

import numpy as np
import pytest
from pictures import saved
from PIL import Image
from tarred import member, tar_of

from prep.digest import digest_bytes
from prep.images.decode import decode_picture, encode_png, read_header
from prep.images.thumbnail import SHADE, SHADED
from prep.manifest import describe as audit
from prep.pages.cards import source_thumbnails
from prep.pages.originals import Originals
from prep.report.snapshots.manifest import page, write_page

VOID = {"meta", "img", "input", "br", "wbr"}
MADE = date(2024, 2, 29)


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


def no_thumbnail(_):
    """Makes no thumbnail."""


def plain(opened):
    return page(opened, MADE, cards=10, thumbnail=no_thumbnail)


def cards_of(text):
    """The page after the card that its script fills copies of."""
    return text.split("</template>")[1]


def test_the_page_nests_and_has_all_sections(small):
    text = plain(small)
    parse(text)
    assert re.findall(r"<h2[^>]*>(.*?)(?: <span|</h2>)", text) == [
        "Contents", "Findings", "Buckets", "Sizes, masks and captions", "Samples"]
    assert cards_of(text).count('<li class="card') == 3
    assert "prefers-color-scheme: dark" in text


def test_the_page_says_what_it_is_of_and_when_it_was_made(small):
    text = plain(small)
    assert re.search(r"<title>manifest: Manifest, 2024-02-29, Latentry [0-9.]+</title>", text)
    head = text.split("</header>")[0]
    assert '<time datetime="2024-02-29">' in head and "2 for training, 1 for validation; 1 rejected" in head
    assert "Repair or remove the 1 picture in Findings" in head
    assert plain(small) == text, "the same bytes from the same inputs"


def test_charts_of_masks_and_captions(small):
    charts = plain(small).split('<figure class="bars">')[1:]
    rows = [dict(re.findall(r'<th scope="row">([^<]*)</th>.*?<span class="number">(\d+)</span>', one))
            for one in charts]
    assert {name: count for name, count in rows[0].items() if count != "0"} == {"0%": "1", "10–20%": "2"}
    assert {name for name, count in rows[1].items() if count != "0"} == {"50–60%"} and "2 samples without" in charts[1]
    assert rows[2] == {"0–4": "0", "5–9": "2", "10–14": "0", "15–19": "0", "20–24": "0", "25–29": "0", "30–34": "0",
                       "35–39": "0", "40–44": "1"}
    assert "Shortest 6, median 6, longest 44." in charts[2]


def test_nothing_is_loaded_and_nothing_runs_but_the_page_s_own_script(small):
    text = plain(small)
    checker = parse(text)
    assert not {"link", "iframe", "object", "form"} & set(checker.tags)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in text and text.count("script-src") == 1
    assert len(json.loads(data)["cards"]) == 3 and not set("<>&") & set(data)
    assert "innerHTML" not in script and "eval" not in script
    for name, value in checker.attributes:
        assert not name.startswith("on")
        if name == "src":
            assert value.startswith("data:")
        if name == "href":
            assert value.startswith(("#", "data:"))
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_captions_names_and_findings_are_escaped(small):
    text = plain(small)
    assert "&lt;script&gt;alert(&#39;caption&#39;)&lt;/script&gt; &amp; \\x1b[31mred" in text
    assert "ends &lt;early&gt;" in text
    assert "\x1b" not in text


def test_crop_and_mask_are_drawn_where_they_are(small):
    text = plain(small)
    # 64x72 scaled, cropped at (0, 4) to 64x64
    assert 'x="0.000%" y="5.556%" width="100.000%" height="88.889%"' in text
    (shade,) = re.findall('class="shade" href="data:image/png;base64,([^"]*)"', text)
    with Image.open(io.BytesIO(base64.b64decode(shade))) as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    assert (pixels[..., :3] == SHADE).all()
    assert np.abs(pixels[..., 3] - SHADED * (255 - mask.astype(float))).max() <= 0.5


def test_a_mask_that_cannot_be_read_is_not_drawn(small):
    (path,) = (small.cache.root / "shards").glob("*/*/mask/c*")
    path.chmod(0o600)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert '="data:image' not in plain(small)


def test_without_its_source_a_card_says_the_size(small):
    text = page(small, MADE, cards=10, thumbnail=source_thumbnails(small))
    assert text.count("128x144: the original picture was not found</span>") == 2


def test_fewer_cards_than_samples(small):
    text = page(small, MADE, cards=2, thumbnail=no_thumbnail)
    assert cards_of(text).count('<li class="card') == 2
    assert "2 of 3 samples, evenly spread" in text


def test_a_page_has_room_for_so_many_bytes_of_pictures(small, monkeypatch):
    monkeypatch.setattr("prep.pages.snapshot.MOST_BYTES", 5000)
    text = page(small, MADE, cards=10, thumbnail=lambda _: b"\xff\xd8\xff" + bytes(1500))
    assert text.count('href="data:image/jpeg;') == 1 and "The page has no room for 2 pictures." in text


def test_long_captions_and_many_of_them_are_cut(small, monkeypatch):
    monkeypatch.setattr("prep.report.snapshots.gallery.LETTERS", 10)
    monkeypatch.setattr("prep.report.snapshots.gallery.CAPTIONS", 0)
    assert plain(small).count("and 1 more captions") == 3
    monkeypatch.setattr("prep.report.snapshots.gallery.CAPTIONS", 1)
    assert "&lt;script&gt;al</bdi>" in plain(small) and "… 44 characters in all" in plain(small)


def test_jpeg_and_png_thumbnails(small):
    text = page(small, MADE, cards=1, thumbnail=lambda _: b"\xff\xd8\xffjpeg")
    assert 'href="data:image/jpeg;base64,' in text


def test_nothing_but_jpeg_and_png_is_shown(small):
    text = page(small, MADE, cards=1, thumbnail=lambda _: b"<svg onload=alert(1)>")
    assert '="data:image' not in text.replace('class="shade" href="data:image/png', "")


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
    made = decode_picture(source_thumbnails(small)(photo[1]), alpha="white")
    assert made.size == (128, 144)
    assert max(abs(level - 200) for level in made.getpixel((5, 5))) <= 2


def test_large_pictures_shrink(small, photo):
    data = encode_png(np.zeros((100, 1000, 3), np.uint8))
    photo[0].write_bytes(data)
    made = source_thumbnails(small)({**photo[1], "picture": digest_bytes(data)})
    assert read_header(made).size == (320, 32)


def test_another_picture_under_the_name_is_not_shown(small, photo):
    photo[0].write_bytes(encode_png(np.zeros((8, 8, 3), np.uint8)))
    assert source_thumbnails(small)(photo[1]) is None


def test_bytes_that_are_no_picture_are_not_shown(small, photo):
    photo[0].write_bytes(b"text")
    assert source_thumbnails(small)({**photo[1], "picture": digest_bytes(b"text")}) is None


@pytest.mark.parametrize("source", [1, 7])
def test_a_source_without_a_path_has_no_pictures(small, photo, source):
    document = MappingProxyType({**small.manifest.document, "sources": ["photos", None]})
    opened = replace(small, manifest=replace(small.manifest, document=document))
    assert source_thumbnails(opened)({**photo[1], "source": source}) is None


def test_writing(small, tmp_path):
    write_page(small, tmp_path / "page.html", MADE)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def in_tar(small, sources):
    document = MappingProxyType({**small.manifest.document, "sources": sources})
    return replace(small, manifest=replace(small.manifest, document=document))


@pytest.mark.parametrize(("source", "label"), [("one.tar", "one.tar"), ("{one,two}.tar", "one.tar"),
                                               ("*.tar", "one.tar"), ("?/same.tar", "a/same.tar")])
def test_pictures_in_tars_are_found_by_their_names(small, source, label):
    """Each in the tar that its name begins with, whose names may be braces, a glob, or need their directory."""
    root, data = small.manifest.path.parent, saved(Image.new("RGB", (60, 40), "teal"))
    for name in ("one.tar", "two.tar", "a/same.tar", "b/same.tar"):
        (root / name).parent.mkdir(exist_ok=True)
        mine = data if name == label else saved(Image.new("RGB", (60, 40), "red"))
        (root / name).write_bytes(tar_of([member("x/0.png", mine), member("x/0.txt", b"teal")]))
    opened = in_tar(small, [source])
    (sample,) = audit.describe_samples(small, "a.png")["samples"]
    sample |= {"name": f"{label}/x/0.png", "picture": digest_bytes(data)}
    assert Originals(opened).read(sample) == data
    assert decode_picture(source_thumbnails(opened)(sample), alpha="white").size == (60, 40)
    for change in ({"name": f"{label}/x/1.png"}, {"name": "three.tar/x/0.png"}, {"name": f"{label}/../x/0.png"},
                   {"picture": digest_bytes(b"another")}):
        assert Originals(opened).read({**sample, **change}) is None


@pytest.mark.parametrize("source", ["gone.tar", "{1..99999999}.tar", "[.tar", "s3://bucket/x.tar", "broken.tar"])
def test_tars_that_are_gone_or_cannot_be_read_have_no_pictures(small, source):
    (small.manifest.path.parent / "broken.tar").write_bytes(b"no tar")
    (sample,) = audit.describe_samples(small, "a.png")["samples"]
    assert Originals(in_tar(small, [source])).read({**sample, "name": f"{source}/a.png"}) is None


@pytest.mark.parametrize("target", [
    "photos/0.png", "mine.html", *(pytest.param(target, marks=pytest.mark.slow)
                                   for target in ("m.json", "cache/latentry.json", "cache/page.html"))])
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
