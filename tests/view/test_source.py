"""`prep view` of pictures that are not encoded: what is shown is what `prep encode` and `prep scan` would find."""

from __future__ import annotations

import io
import json
import os
import re
import time

import numpy as np
import pytest
from pictures import draw, draw_mask
from PIL import Image
from viewing import viewing, viewing_source

from prep.images.decode import decode_picture
from prep.scan.memo import usual_path

SMALL = {"image.resolution": 64, "image.step": 16, "image.shortest": 32}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Eight pictures of three shapes, masks for some, one without a caption, and a file that is no picture."""
    photos = tmp_path_factory.mktemp("pictures") / "photos"
    for at, size in enumerate([(96, 96), (100, 96), (144, 64), (140, 66), (64, 144), (96, 97), (97, 96), (150, 90)]):
        draw(photos / f"{at}.png", size, seed=at).with_suffix(".txt").write_text(f"picture number {at % 6}")
        if at in (0, 2, 5):
            draw_mask(photos / f"{at}-masklabel.png", size)
    (photos / "6.txt").unlink()
    (photos / "bad.png").write_bytes(b"no picture")
    (photos / "7.txt").write_text("<script>alert('caption')</script>\nanother line")
    return photos


@pytest.fixture(scope="module")
def server(pictures):
    with viewing_source(pictures, **SMALL) as running:
        yield running


def names(text):
    return {one.replace("<wbr>", "") for one in re.findall(r'<p class="name"><a [^>]*><bdi>(.*?)</bdi>', text)}


def number(server, name):
    found = re.findall(r'<p class="name"><a href="[^"]*/sample/(\d+)"><bdi>(.*?)</bdi>', server.get().text)
    return {name.replace("<wbr>", ""): int(at) for at, name in found}[name]


def test_the_list(server):
    text = server.get().text
    assert names(text) == {f"{one}.png" for one in range(8)}
    assert "<p class=\"kind\">Source</p>" in text and "8 for training, 0 for validation; 1 rejected" in text
    assert "9 pictures were not scanned yet; findings may be missing" in text and "<script>alert" not in text


@pytest.mark.parametrize(("query", "found"), [
    ("q=NUMBER+1", {"1.png"}), ("mask=yes", {"0.png", "2.png", "5.png"}),
    ("from=50&to=50", {"0.png", "2.png", "5.png"}),
    ("finding=missing-caption", {"6.png"}), ("finding=not-an-image", set()), ("split=validation", set()),
    ("bucket=64x64&mask=no", {"1.png", "6.png"}), ("source=0&sort=pixels&q=2.png", {"2.png"}),
])
def test_searches_and_filters(server, query, found):
    assert names(server.get(f"/?{query}").text) == found


def test_a_sample_is_in_the_bucket_that_encode_chooses(server, prep, pictures):
    chosen = json.loads(prep("bucket", pictures, "--resolution", 64, "--step", 16, "--json", "--quiet").out)["pictures"]
    for one in chosen:
        text = server.get(f"/sample/{number(server, one['name'])}").text
        (wide, high), (left, top), (width, height) = one["scaled"], one["crop"], one["bucket"]
        assert f"scaled to {wide}x{high}, cropped to {width}x{height} at {left}, {top}" in text
        assert "Latent:" not in text and "<h4>Latent" not in text and "key <code>" not in text


def test_the_pictures(server, pictures):
    at = number(server, "2.png")
    text = server.get(f"/sample/{at}").text
    wide, high, width, height, left, top = map(int, re.search(
        r"scaled to (\d+)x(\d+), cropped to (\d+)x(\d+) at (\d+), (\d+)", text).groups())
    picture = decode_picture((pictures / "2.png").read_bytes(), alpha="white")
    picture = picture.resize((wide, high), Image.Resampling.LANCZOS)
    seen = np.asarray(Image.open(io.BytesIO(server.get(f"/view/{at}/0").body)))
    assert np.array_equal(seen, np.asarray(picture)[top:top + height, left:left + width])
    mask = np.asarray(Image.open(io.BytesIO(server.get(f"/mask/{at}/0").body)))
    assert mask.shape == (height, width) and mask[:, 0].all() and not mask[:, -1].any()
    assert Image.open(io.BytesIO(server.get(f"/shade/{at}/0").body)).info["transparency"]
    assert Image.open(io.BytesIO(server.get(f"/thumbnail/{at}").body)).size == (144, 64)
    assert server.get(f"/mask/{number(server, '1.png')}/0").headers["content-type"] == "image/svg+xml"
    for nowhere in ("latent/0/0/0", "decode/0/0", "run", "cell/0/0", "view/0/1", "sample/8"):
        assert server.get(f"/{nowhere}").status == 404


def test_captions_and_their_weights(server):
    text = server.get(f"/sample/{number(server, '7.png')}").text
    assert text.count("shown 50.0% of the time (weight 0.5)") == 2 and "&lt;script&gt;alert(&#39;caption" in text


def test_a_picture_that_has_changed_is_not_shown(tmp_path):
    picture = draw(tmp_path / "a.png", (96, 96), seed=1)
    with viewing_source(tmp_path, **SMALL) as running:
        draw(picture, (50, 50), seed=9)
        assert running.get("/view/0/0").headers["content-type"] == "image/svg+xml"


def test_a_recipe_with_several_sources(tmp_path):
    for folder, seed in (("one", 1), ("two", 2)):
        draw(tmp_path / folder / "a.png", (150, 96), seed=seed).with_suffix(".txt").write_text(f"of {folder}")
    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[image]\nresolution = 64\nstep = 16\ncrop = "random"\nviews = 2\n[validation]\nfraction = 0.5\n'
                      '[[source]]\npath = "one"\n[[source]]\npath = "two"\nrepeats = 3\n')
    with viewing_source(recipe) as running:
        assert len(re.findall('class="card"', running.get("/?source=1").text)) == 1
        text = running.get().text
        assert "1 for training, 1 for validation" in text and "one, two" in text
        pages = [running.get(f"/sample/{at}").text for at in range(2)]
        assert sorted(page.count('<article class="view"') for page in pages) == [1, 2]  # validation has one view


def test_transparency_as_mask(tmp_path):
    draw(tmp_path / "a.png", (96, 96), seed=1, alpha=True).with_suffix(".txt").write_text("a")
    with viewing_source(tmp_path, mask="alpha", **SMALL) as running:
        assert "% of the picture" in running.get("/sample/0").text
        assert running.get("/mask/0/0").headers["content-type"] == "image/png"


@pytest.mark.slow
def test_what_a_scan_found_is_shown(prep, photos, monkeypatch, tmp_path):
    """Nothing is decoded again for it."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "own"))
    Image.new("RGB", (96, 96)).save(photos / "black.png")
    (photos / "black.txt").write_text("black")
    (photos / "copy.png").write_bytes((photos / "0.png").read_bytes())
    (photos / "copy.txt").write_text("a copy")
    long_ago = time.time() - 600
    for path in photos.iterdir():
        os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)  # their times of change are those of this test
    with viewing_source(photos, **SMALL) as running:
        assert not names(running.get("/?finding=blank").text) and "10 pictures were not scanned" in running.get().text
    assert "exact-duplicate" in prep("scan", photos, "--quiet").out
    monkeypatch.setattr("prep.scan.worker.EXAMINE", None)
    with viewing_source(photos, **SMALL) as running:
        assert names(running.get("/?finding=blank").text) == {"black.png"}
        assert names(running.get("/?finding=exact-duplicate").text) and "not scanned" not in running.get().text
    assert usual_path().parent.parent == tmp_path / "own"


@pytest.mark.slow
def test_the_command(photos):
    with viewing(photos, "--resolution", 64, "--step", 16, "--scan", "--quiet") as running:
        assert running.get().status == 200 and "not scanned" not in running.get().text
        assert running.interrupt() == (0, "", "Ctrl-C ends it\n")


def test_a_picture_that_cannot_be_decoded_is_rejected(prep, photos, monkeypatch, tmp_path):
    """As by prep encode, and once a scan has seen it; its finding leads to no sample, others do, with a picture."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "own"))
    Image.effect_noise((96, 96), 50).convert("RGB").save(photos / "whole.jpg")
    Image.new("L", (96, 50)).save(photos / "0-masklabel.png")
    whole = (photos / "whole.jpg").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[:-400] + whole[-2:])  # has an end
    long_ago = time.time() - 600
    for path in photos.iterdir():
        os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    with viewing_source(photos, **SMALL) as running:
        assert "cut.jpg" in names(running.get().text)
        address = f"/thumbnail/{number(running, 'cut.jpg')}"
        assert "this picture cannot be decoded:" in running.get(address).text
        text = running.get(address.replace("thumbnail", "sample")).text
        assert "cannot be decoded." in text and "The original with" not in text and 'class="whole"' not in text
        text = running.get(f"/sample/{number(running, 'whole.jpg')}").text
        assert "The original with its crops and masks" in text and 'class="whole"' in text
    with viewing_source(photos, **SMALL) as running:
        (photos / "cut.jpg").rename(tmp_path / "cut.jpg")
        assert "this picture was not found," in running.get(address).text
        (tmp_path / "cut.jpg").rename(photos / "cut.jpg")
    assert "truncated\tcut.jpg" in prep("scan", photos, "--quiet", "--all").out
    with viewing_source(photos, **SMALL) as running:
        text = running.get().text
        assert "cut.jpg" not in names(text) and "whole.jpg" in names(text)
        assert re.search(r"class=\"lead\">(.*?)<", text)[1].endswith("; 1 rejected")
        assert "/thumbnail/" not in running.get("/findings?code=truncated").text
        assert f'/sample/{number(running, "0.png")}"><bdi>0-masklabel.png' in running.get("/findings").text
        at = number(running, "whole.jpg")
        text = running.get("/findings?code=missing-caption").text
        assert f'/sample/{at}"><bdi>whole.jpg</bdi>' in text and f'/thumbnail/{at}"' in text
    (photos / "whole.jpg").write_bytes((photos / "0.png").read_bytes())
    with viewing_source(photos, **SMALL) as running:
        assert "1 picture changed since the last scan; findings may be missing" in running.get().text


@pytest.mark.parametrize("kind", ["jpg", "gif", "bmp", "tif"])
def test_a_picture_without_its_end_is_rejected_from_the_start(prep, photos, kind):
    """With what a scan says of it; one that only lacks the mark of its end is not."""
    Image.effect_noise((96, 96), 50).save(photos / f"whole.{kind}")
    whole = (photos / f"whole.{kind}").read_bytes()
    (photos / f"cut.{kind}").write_bytes(whole[:-400])
    (photos / f"marked.{kind}").write_bytes(whole[:-2] + bytes(16) if kind == "jpg" else whole)
    with viewing_source(photos, **SMALL) as running:
        text, told = running.get().text, running.get("/findings?code=truncated").text
        assert f"cut.{kind}" not in names(text) and {f"whole.{kind}", f"marked.{kind}"} <= names(text)
        assert re.search(r"class=\"lead\">(.*?)<", text)[1].endswith("; 1 rejected")
    (line,) = [line for line in prep("scan", photos, "--quiet", "--all").out.splitlines() if "truncated\t" in line]
    assert line.split("\t")[-1] in told and f"cut.{kind}" in line


def test_options_of_another_kind(prep, photos, small):
    result = prep("view", photos, "--since", "m.json")
    assert result.code == 2 and result.err == (f"error: --since is for a MANIFEST or RUN, but {photos} is a source of "
                                               "pictures\nhint: leave --since out\n")
    for words in (("--resolution", 64), ("--scan",), ("--mask", "none")):
        result = prep("view", small.manifest.path, *words)
        assert result.code == 2 and f"{words[0]} is for a SOURCE, but {small.manifest.path} is none" in result.err
    assert prep("view", photos, "--resolution", 5).code == 3
    assert prep("view", photos / "none.toml").code == 5
    missing = photos.with_name("phots")
    result = prep("view", missing, "--resolution", 64)
    assert (result.code, result.err) == (5, f"error: there is no file or directory {missing}\n"
                                         "hint: name pictures, a recipe, a manifest or a run\n")
