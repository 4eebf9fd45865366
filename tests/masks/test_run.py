"""`prep mask` as a user types it: sources of every kind, names that other trainers read, pages to look at."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import segmenters
from hub_caches import hub_cache
from pictures import draw, draw_mask, saved
from PIL import Image
from tarred import member, tar_of

from prep.sources.tree import PICTURES

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--quiet")


@pytest.fixture(scope="session")
def clipseg_model(tmp_path_factory):
    return segmenters.build_clipseg(tmp_path_factory.mktemp("models") / "clipseg")


def read(path):
    with Image.open(path) as picture:
        assert picture.mode == "L"
        return np.asarray(picture)


def names(out):
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())


def test_clipseg_from_the_command_line(prep, photos, clipseg_model, tmp_path):
    """Every option on the way to a mask, and the same from the map by hand."""
    from prep.masks.methods import MaskOptions
    from prep.masks.pixels import finish_map, scaled
    from prep.masks.segmentation import clipseg

    result = prep("mask", photos, "--with", "clipseg", "--prompt", "cat", "--prompt", "a dog", "-o", tmp_path / "out",
                  "--model", clipseg_model, "--threshold", 0.6, "--smooth", 2.5, "--expand", -1, "--invert",
                  "--batch-size", 3, "--jobs", 2, "--device", "cpu", "--mask", "none", "--json")
    assert result.code == 0, result.err
    assert result.json == {"format": "latentry/mask", "version": 1,
                           "directory": str(tmp_path / "out"), "written": 8, "kept": 0, "skipped": 0, "black": [],
                           "pages": [], "findings": []}
    segmenter = clipseg(clipseg_model, prompts=["cat", "a dog"], device="cpu")
    choice = MaskOptions(method="clipseg", prompts=("cat",), threshold=0.6, smooth=2.5, expand=-1, invert=True)
    for number in (0, 2, 7):
        with Image.open(photos / f"{number}.png") as picture:
            (gray,) = segmenter.maps([segmenter.prepare(np.asarray(picture))])
            wanted = finish_map(scaled(gray, picture.size), choice)
        found = read(tmp_path / "out" / f"{number}-masklabel.png")
        assert (found == wanted).all() and set(np.unique(found)) == {0, 255}


def test_the_published_clipseg_is_taken_from_the_local_cache(prep, photos, clipseg_model, tmp_path, monkeypatch):
    hub_cache(tmp_path / "hub", clipseg_model, "CIDAS/clipseg-rd64-refined")
    for module in ("huggingface_hub.constants", "huggingface_hub._snapshot_download.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    call = ("--with", "clipseg", "--prompt", "cat", "--device", "cpu", "--threshold", 0.5)
    assert prep("mask", photos, *call, "-o", tmp_path / "named").code == 0
    assert prep("mask", photos, *call, "-o", tmp_path / "here", "--model", clipseg_model).code == 0
    assert [(tmp_path / "named" / name).read_bytes() for name in names(tmp_path / "here")] == [
        (tmp_path / "here" / name).read_bytes() for name in names(tmp_path / "named")]


def test_a_second_run_writes_nothing(prep, photos, tmp_path):
    call = ("mask", photos, "--with", "threshold", "-o", tmp_path / "out")
    first = prep(*call)
    assert first.out == f"{tmp_path}/out: 8 masks written, 0 existing kept, 0 pictures need none (all white)\n"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prep(*call).out == (f"{tmp_path}/out: 0 masks written, 8 existing kept (--force replaces them), "
                               "0 pictures need none (all white)\n")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_black_masks_are_told(prep, tmp_path):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "in" / "night.png")
    result = prep("mask", tmp_path / "in", "--with", "threshold", "-o", tmp_path / "out")
    assert "entirely black, so they would not train: night.png\n" in result.out


def test_kohya_reads_what_is_named_for_it(prep, photos, tiny_model, tmp_path):
    prep("mask", photos, "--with", "threshold", "-o", tmp_path / "out", "--naming", "kohya")
    assert names(tmp_path / "out") == [f"{number}.png" for number in range(8)]
    for number in range(8):
        with Image.open(photos / f"{number}.png") as picture:
            assert read(tmp_path / "out" / f"{number}.png").shape == picture.size[::-1]
    encoded = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                   "--mask", tmp_path / "out", *SMALL, "--dry-run", "--json")
    assert encoded.json["encoded"]["mask"] == 8


def test_masks_of_tars_are_found_again(prep, tiny_model, tmp_path):
    """Two tars with members of one name: each picture gets the mask made from it."""
    for name, rows in (("one", 24), ("two", 72)):
        pixels = np.zeros((96, 96, 3), np.uint8)
        pixels[:rows] = 255
        members = [member("deep/a.png", saved(Image.fromarray(pixels))), member("deep/a.txt", b"words")]
        (tmp_path / f"{name}.tar").write_bytes(tar_of(members))
    made = prep("mask", tmp_path / "{one,two}.tar", "--with", "threshold", "-o", tmp_path / "out", "--json")
    assert made.json["written"] == 2
    assert names(tmp_path / "out") == ["one.tar/deep/a-masklabel.png", "two.tar/deep/a-masklabel.png"]
    prep("encode", tmp_path / "{one,two}.tar", "--model", tiny_model, "--cache", tmp_path / "cache",
         "-o", tmp_path / "m.json", "--mask", tmp_path / "out", *SMALL)
    for name, share in (("one", 0.25), ("two", 0.75)):
        told = prep("inspect", tmp_path / "m.json", "--sample", f"{name}.tar/deep/a.png", "--json").json
        assert [one["coverage"] for one in told["samples"]] == [share]


def test_names_that_are_not_unicode_have_masks_too(prep, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    odd = bytes(folder) + b"/caf\xe9.png"
    draw(tmp_path / "a.png", (96, 96), seed=3)
    shutil.copy(tmp_path / "a.png", odd)
    assert prep("mask", folder, "--with", "threshold", "-o", tmp_path / "out").code == 0
    assert names(tmp_path / "out") == ["caf\\xe9-masklabel.png"]
    assert prep("mask", folder, "--with", "threshold", "-o", tmp_path / "again", "--mask", tmp_path / "out",
                "--json").json["written"] == 1
    both = [read(tmp_path / out / "caf\\xe9-masklabel.png") for out in ("again", "out")]
    assert (both[0] == both[1]).all()


def test_masks_that_a_table_names_are_taken_over(prep, photos, tmp_path):
    (photos / "more").mkdir()
    draw_mask(photos / "more" / "m.png", (100, 96))
    row = {"file_name": "1.png", "text": "t", "mask_file_name": "more/m.png"}
    (photos / "metadata.jsonl").write_text(json.dumps(row))
    prep("mask", photos, "--with", "alpha", "-o", tmp_path / "out")
    assert (read(tmp_path / "out" / "1-masklabel.png") == read(photos / "more" / "m.png")).all()


# What `prep encode` does with masks of another size.

def test_masks_of_another_size_are_scaled_or_rejected(prep, photos, tiny_model, tmp_path):
    draw_mask(photos / "0-masklabel.png", (192, 192))  # of its picture's shape
    draw_mask(photos / "2-masklabel.png", (64, 144))  # of another
    (photos / "5-masklabel.png").write_bytes(b"no mask")
    recipe = tmp_path / "r.toml"
    found = {}
    for policy in ("allow", "reject"):
        recipe.write_text(f"[mask]\nfrom = 'sidecar'\nresize = '{policy}'\n[[source]]\npath = 'photos'\n")
        for run in range(2):  # the second remembers the files
            report = prep("encode", recipe, "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                          tmp_path / "m.json", *SMALL, "--json")
            assert report.code == 0, report.err
            found[policy, run] = {(one["path"], one["code"]): one["detail"] for one in report.json["rejected"]}
    assert found["allow", 0] == found["allow", 1] and found["reject", 0] == found["reject", 1]
    assert list(found["allow", 0]) == [("2.png", "mask-size-mismatch"), ("5.png", "not-an-image")]
    assert sorted(found["reject", 0]) == [("0.png", "mask-size-mismatch"), *found["allow", 0]]
    assert found["reject", 1]["0.png", "mask-size-mismatch"] == (
        'mask has 192x192 pixels, expected 96x96, since [mask] resize is "reject"')


def test_the_policy_is_written_into_recipes_that_are_written(photos, tmp_path):
    from prep.recipe.load import load_recipe
    from prep.recipe.write import render_recipe

    for policy in ("allow", "reject"):
        (tmp_path / "r.toml").write_text(f"[mask]\nresize = '{policy}'\n[[source]]\npath = 'photos'\n")
        recipe = load_recipe(tmp_path / "r.toml", choices={})
        assert recipe.mask_resize == policy
        (tmp_path / "again.toml").write_text(render_recipe(recipe, base=tmp_path))
        assert load_recipe(tmp_path / "again.toml", choices={}).mask_resize == policy
        assert ("resize" in (tmp_path / "again.toml").read_text()) == (policy == "reject")


def test_a_policy_that_is_none(prep, photos, tmp_path):
    (tmp_path / "r.toml").write_text("[mask]\nresize = 'alow'\n[[source]]\npath = 'photos'\n")
    result = prep("scan", tmp_path / "r.toml")
    assert result.code == 3 and "mask.resize is 'alow', expected one of: allow, reject; did you mean" in result.err


# Several sources.

@pytest.fixture
def two(tmp_path):
    """A recipe of two sources, whose pictures have names of their own."""
    for source, name in (("one", "a.png"), ("two", "sub/b.png")):
        draw(tmp_path / source / name, (96, 96), seed=len(name))
    recipe = tmp_path / "r.toml"
    recipe.write_text("[[source]]\npath = 'one'\n[[source]]\npath = 'two'\n")
    return recipe


def test_sources_whose_names_differ_share_a_directory(prep, two, tmp_path):
    assert prep("mask", two, "--with", "threshold", "-o", tmp_path / "out").code == 0
    assert names(tmp_path / "out") == ["a-masklabel.png", "sub/b-masklabel.png"]


def test_sources_of_the_same_names_do_not(prep, two, tmp_path):
    draw(tmp_path / "two" / "a.webp", (64, 64), seed=3)
    result = prep("mask", two, "--with", "threshold", "-o", tmp_path / "out")
    assert (result.code, result.out) == (3, "") and not (tmp_path / "out").exists()
    assert result.err == (
        "error: one/a.png and two/a.webp would share the mask a-masklabel.png\n"
        "hint: run prep mask for each source, and set its directory as mask in that [[source]]\n")


# What makes no sense, told before anything is written.

@pytest.mark.parametrize(("options", "code", "said"), [
    (("--with", "alpha", "--model", "m"), 2, "--model is for methods with a model, not for --with alpha"),
    (("--with", "segment", "--label", "dog"), 2, "--with segment has no --model, expected a segmentation model"),
    (("--with", "alpha", "--mask", "alpha"), 2, "--mask is 'alpha', expected auto, none, sidecar or a directory"),
    (("--with", "clipseg"), 2, "--with clipseg has no --prompt, expected at least one: parts that a prompt names"),
    (("--with", "clipseg", "--prompt", "a"), 6, "model 'CIDAS/clipseg-rd64-refined' is neither a directory nor in the"),
    (("--with", "clipseg", "--prompt", "a", "--model", "a b"), 6, "model a b is neither a directory nor a Hub id"),
])
def test_options_that_make_no_sense(prep, photos, tmp_path, options, code, said):
    result = prep("mask", photos, "-o", tmp_path / "out", *options)
    assert (result.code, result.out) == (code, "") and result.err.startswith(f"error: {said}")
    assert not (tmp_path / "out").exists()


def test_masks_and_pages_are_kept_apart_from_pictures(prep, photos, tmp_path):
    for option in (("-o", photos / "masks"), ("-o", tmp_path / "out", "--html", photos / "page.html")):
        result = prep("mask", photos, "--with", "threshold", "-o", tmp_path / "out", *option)
        assert result.code == 5 and "lies inside pictures" in result.err
    (tmp_path / "mine.html").write_text("a page of mine")
    result = prep("mask", photos, "--with", "threshold", "-o", tmp_path / "out", "--html", tmp_path / "mine.html")
    assert result.code == 5 and "mine.html exists and is no page, so it is not replaced" in result.err
    assert not (tmp_path / "out").exists()


# Pages.

def test_pages_show_pictures_with_their_masks_over_them(prep, photos, tmp_path):
    import base64
    import io

    result = prep("mask", photos, "--with", "threshold", "-o", tmp_path / "out", "--html", tmp_path / "look.html")
    assert result.out.endswith(f"page: {tmp_path}/look.html\n")
    page = (tmp_path / "look.html").read_text()
    shown = re.findall(r'aria-label="([^"]*)"><svg>.*?<image class="whole" href="data:image/jpeg;base64,([^"]*)".*?'
                       r'<image class="shade" href="data:image/png;base64,([^"]*)"', page, re.DOTALL)
    assert [name for name, _, _ in shown] == [f"{number}.png" for number in range(8)]
    picture, shade = (Image.open(io.BytesIO(base64.b64decode(data))) for data in shown[0][1:])
    with picture, shade, Image.open(photos / "0.png") as original:
        assert picture.size == shade.size == original.size == (96, 96)
        assert np.abs(np.asarray(picture).astype(float) - np.asarray(original)).mean() < 3, "the picture itself"
        alpha = np.asarray(shade.convert("RGBA"))[..., 3]
    mask = read(tmp_path / "out" / "0-masklabel.png") == 255
    assert (alpha[mask] == 0).all() and (alpha[~mask] == 166).all(), "shaded where the mask is black"
    assert page.count(f"{100 * mask.mean():.0f}% trains") >= 1


def test_pages_are_bounded_and_linked(prep, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.report.snapshots.masks.CARDS", 3)
    result = prep("mask", photos, "--with", "alpha", "-o", tmp_path / "out", "--html", tmp_path / "a b.html", "--json")
    pages = [tmp_path / name for name in ("a b.html", "a b-2.html", "a b-3.html")]
    assert result.json["pages"] == [str(page) for page in pages]
    texts = [page.read_text() for page in pages]
    assert [text.count('<li class="card') for text in texts] == [3, 3, 2]
    titles = [re.search("<title>([^<]*), [0-9-]*, Latentry [^<]*</title>", text)[1] for text in texts]
    assert titles == [f"photos: Masks, page {number} of 3" for number in (1, 2, 3)]
    assert all(text.count('aria-current="page"') == 2 for text in texts), "above and below"
    for before, after in itertools.pairwise(range(3)):
        assert f'<a rel="next" href="./{quote(pages[after].name)}">' in texts[before]
        assert f'<a rel="prev" href="./{quote(pages[before].name)}">' in texts[after]
    assert 'rel="prev"' not in texts[0] and 'rel="next"' not in texts[2]
    assert "no mask: the whole picture trains" in texts[0] and "Pictures 4 to 6 of 8, in order." in texts[1]


def test_pages_may_have_names_that_are_not_unicode(prep, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.report.snapshots.masks.CARDS", 4)
    page = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.html")
    assert prep("mask", photos, "--with", "alpha", "-o", tmp_path / "out", "--html", page).code == 0
    assert '<a rel="next" href="./%FF-2.html">' in Path(page).read_text()


def test_nothing_of_a_name_is_obeyed_by_a_page(prep, tmp_path):
    evil = "<img src=x onerror=alert(1)>\u202e&amp;\".png"
    (tmp_path / "in").mkdir()
    draw(tmp_path / "a.png", (64, 64), seed=1).rename(tmp_path / "in" / evil)
    (tmp_path / "in" / "<b>.png").write_bytes(b"no picture")
    prep("mask", tmp_path / "in", "--with", "threshold", "-o", tmp_path / "out", "--html", tmp_path / "<i>.html")
    page = (tmp_path / "<i>.html").read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;\\u202e&amp;amp;&#34;.png" in page and "&lt;b&gt;.png" in page
    assert not re.search(r"<(script|iframe|i>|b>\.png)|<img src=x", page)
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; " in page


# Real pictures.

@pytest.mark.slow
@pytest.mark.real_data
def test_every_photo_gets_a_mask_of_its_size(prep, real_data, clipseg_model, tmp_path):
    result = prep("mask", real_data / "photos", "--with", "clipseg", "--prompt", "a cat", "-o", tmp_path / "out",
                  "--model", clipseg_model, "--threshold", 0.5, "--json", "--html", tmp_path / "look.html")
    assert result.code == 0 and result.json["findings"] == [] and result.json["kept"] == 0
    photos = [path for path in (real_data / "photos").rglob("*") if path.suffix.lower() in PICTURES]
    assert result.json["written"] + result.json["skipped"] == len(photos) == 63
    for path in photos:
        mask = tmp_path / "out" / path.relative_to(real_data / "photos").with_name(f"{path.stem}-masklabel.png")
        with Image.open(path) as picture:
            assert not mask.exists() or read(mask).shape == picture.size[::-1], path
    assert result.json["pages"] == [str(tmp_path / "look.html")]


@pytest.mark.real_data
@pytest.mark.parametrize("method", ["alpha", "color", "threshold"])
@pytest.mark.parametrize("combine", [None, "add", "intersect"])
def test_masks_that_are_faulty_are_findings(prep, real_data, tmp_path, method, combine):
    options = () if combine is None else ("--combine", combine)
    result = prep("mask", real_data / "bad" / "masks", "--with", method, "-o", tmp_path / "out", *options, "--json")
    assert result.code == 0
    found = {(one["path"], one["code"]) for one in result.json["findings"]}
    wanted = {("mask_truncated.jpg", "truncated")}
    assert found == (wanted if combine is None else wanted | {("mask_wrong_aspect.jpg", "mask-size-mismatch")})
    assert not any("orphan" in name for name in names(tmp_path / "out"))


def test_files_that_cannot_be_read_now_end_with_1_and_are_done_by_the_same_command(prep, photos, tmp_path, monkeypatch):
    from prep.fs import blob

    real = blob.read_blob

    def failing(one, *rest, **options):
        if one.path.name == "3.png":
            raise OSError(5, "Input/output error", str(one.path))
        return real(one, *rest, **options)

    call = ("mask", photos, "--with", "threshold", "-o", tmp_path / "out", "--jobs", 1)
    with monkeypatch.context() as patch:
        for module in ("prep.masks.picture", "prep.masks.generate", "prep.masks.pixels"):
            patch.setattr(f"{module}.read_blob", failing, raising=False)
        failed = prep(*call)
    assert failed.code == 1 and "3.png: unreadable-file: cannot be read: Input/output error" in failed.out
    assert prep(*call).code == 0 and (tmp_path / "out" / "3-masklabel.png").exists()
