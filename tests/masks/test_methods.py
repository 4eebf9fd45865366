"""Mask pictures: what they hold, where they go, and that they are whole or absent."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from PIL import Image
from walking import walk

from prep.errors import PathError, UsageError
from prep.masks.generate import make_masks
from prep.masks.methods import MaskOptions, mask_path
from prep.sources.item import Item

ALPHA = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
RGB = np.full((30, 40, 3), (0, 255, 0), np.uint8)
RGB[5:15, 10:20] = 200, 30, 40
RGB[0, 0] = 10, 250, 5


@pytest.fixture
def pictures(tmp_path):
    """`in/` with a transparent picture, a green-screen one, one without either, and one that is broken."""
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    Image.fromarray(np.dstack([RGB, ALPHA])).save(root / "clear.png")
    Image.fromarray(RGB).save(root / "sub" / "green.png")
    Image.fromarray(RGB[5:15, 10:20]).save(root / "plain.png")
    (root / "broken.jpg").write_bytes(b"")
    return root


def items(root):
    return [one for one in walk(root, source=0, mask_from="none") if isinstance(one, Item)]


def make(items, *, out, tick=lambda _: None, **choice):
    return make_masks(items, MaskOptions(**choice), out=out, tick=tick)


def read(path):
    with Image.open(path) as picture:
        assert picture.mode == "L"
        return np.asarray(picture)


def names(out):
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def test_alpha(pictures, tmp_path):
    out, ticks = tmp_path / "masks", []
    made = make(items(pictures), method="alpha", out=out, tick=ticks.append)
    assert (made.written, made.kept, made.skipped) == (1, 0, 2)
    assert [(one.path, one.code) for one in made.findings] == [("broken.jpg", "empty-file")]
    assert names(out) == ["clear-masklabel.png"]
    assert (read(out / "clear-masklabel.png") == ALPHA).all()
    assert len(ticks) == 4


def test_color(pictures, tmp_path):
    out = tmp_path / "masks"
    made = make(items(pictures), method="color", color="#00ff00", tolerance=16, out=out)
    assert made.written == 2
    wanted = np.zeros((30, 40), np.uint8)
    wanted[5:15, 10:20] = 255
    assert (read(out / "sub" / "green-masklabel.png") == wanted).all()
    strict = make(items(pictures), method="color", color="#00ff00", tolerance=9, out=out, force=True)
    assert strict.written == 2
    assert read(out / "sub" / "green-masklabel.png")[0, 0] == 255


def test_masks_that_are_there_are_kept(pictures, tmp_path):
    out = tmp_path / "masks"
    make(items(pictures), method="alpha", out=out)
    edited = out / "clear-masklabel.png"
    edited.write_bytes(b"edited by hand")
    assert make(items(pictures), method="alpha", out=out).kept == 1
    assert edited.read_bytes() == b"edited by hand"
    assert make(items(pictures), method="alpha", out=out, force=True).written == 1
    assert (read(edited) == ALPHA).all()


def test_masks_pair_with_their_pictures(pictures, tmp_path):
    out = tmp_path / "masks"
    make(items(pictures), method="color", color="#00ff00", out=out)
    paired = {one.name for one in walk(pictures, source=0, mask_from=out) if isinstance(one, Item) and one.mask}
    assert paired == {"clear.png", "sub/green.png"}


def test_nothing_half_written_stays(pictures, tmp_path):
    out = tmp_path / "masks"
    out.write_bytes(b"a file where the directory should be")
    with pytest.raises(PathError, match=r"cannot write mask .*clear-masklabel\.png") as caught:
        make(items(pictures), method="alpha", out=out)
    assert "choose another directory" in caught.value.hint


def test_a_failed_write_leaves_nothing(pictures, tmp_path):
    out = tmp_path / "masks"
    (out / "clear-masklabel.png").mkdir(parents=True)
    with pytest.raises(PathError):
        make(items(pictures), method="alpha", out=out, force=True)
    assert names(out) == []


def test_two_pictures_of_one_stem_share_the_first_ones_mask(tmp_path):
    (tmp_path / "in").mkdir()
    for name, level in (("a.png", 10), ("a.webp", 200)):
        Image.new("LA", (8, 8), (0, level)).save(tmp_path / "in" / name, lossless=True)
    made = make(items(tmp_path / "in"), method="alpha", out=tmp_path / "masks", force=True)
    assert (made.written, made.kept) == (1, 1)
    assert (read(tmp_path / "masks" / "a-masklabel.png") == 10).all()


def test_names_with_and_without_room_for_a_mask(tmp_path):
    """255 bytes are the most; what is staged on the way is no longer than the mask."""
    (tmp_path / "in").mkdir()
    for name in ("a.png", "x" * 251 + ".png", "y" * 241 + ".png", "z.png"):
        Image.new("LA", (8, 8), (0, 10)).save(tmp_path / "in" / name)
    made = make(items(tmp_path / "in"), method="alpha", out=tmp_path / "masks")
    assert names(tmp_path / "masks") == ["a-masklabel.png", "y" * 241 + "-masklabel.png", "z-masklabel.png"]
    (finding,) = made.findings
    assert (finding.path, finding.code) == ("x" * 251 + ".png", "name-too-long")
    assert finding.detail == "the name or path of its mask would be longer than the file system allows"


def test_a_file_system_of_shorter_names(pictures, tmp_path, monkeypatch):
    def short(path, data):
        raise OSError(errno.ENAMETOOLONG, "File name too long", str(path))

    monkeypatch.setattr("prep.masks.picture.write_atomic", short)
    made = make(items(pictures), method="alpha", out=tmp_path / "masks")
    assert (made.written, [one.code for one in made.findings]) == (0, ["empty-file", "name-too-long"])


@pytest.mark.parametrize("target", ["in/sub", "elsewhere", "in"])
def test_links_never_lead_masks_out_of_their_directory(pictures, tmp_path, target):
    out = tmp_path / "masks"
    out.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (out / "sub").symlink_to(tmp_path / target)
    before = names(tmp_path)
    green = [one for one in items(pictures) if one.name == "sub/green.png"]
    with pytest.raises(PathError, match=r"masks/sub leads to .*, expected a directory below .*masks") as caught:
        make(green, method="color", color="#00ff00", out=out)
    assert caught.value.hint == "remove the link, or choose another directory: -o DIR"
    assert names(tmp_path) == before


def test_links_inside_the_masks_directory_and_to_it_are_fine(pictures, tmp_path):
    (tmp_path / "real" / "other").mkdir(parents=True)
    (tmp_path / "real" / "sub").symlink_to("other")
    (tmp_path / "masks").symlink_to("real")
    made = make(items(pictures), method="color", color="#00ff00", out=tmp_path / "masks")
    assert made.written == 2
    assert names(tmp_path / "real") == ["clear-masklabel.png", "other/green-masklabel.png"]


def test_a_link_for_a_mask_is_replaced_and_not_followed(pictures, tmp_path):
    out, original = tmp_path / "masks", (pictures / "plain.png").read_bytes()
    out.mkdir()
    (out / "clear-masklabel.png").symlink_to(pictures / "plain.png")
    assert make(items(pictures), method="alpha", out=out, force=True).written == 1
    assert (pictures / "plain.png").read_bytes() == original
    assert (read(out / "clear-masklabel.png") == ALPHA).all()


def test_files_that_are_gone(pictures, tmp_path):
    (gone,) = [one for one in items(pictures) if one.name == "clear.png"]
    gone.picture.path.unlink()
    (finding,) = make([gone], method="alpha", out=tmp_path / "masks").findings
    assert (finding.code, finding.detail) == ("unreadable-file", "cannot be read: No such file or directory")


def test_the_originals_are_not_touched(pictures, tmp_path):
    before = {path: path.read_bytes() for path in pictures.rglob("*") if path.is_file()}
    make(items(pictures), method="color", color="#00ff00", out=tmp_path / "masks")
    assert {path: path.read_bytes() for path in pictures.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "says"),
    [({"method": "magic"}, "--with is 'magic', expected one of: alpha, color, threshold, clipseg, segment, rembg"),
     ({"method": "color", "tolerance": 255}, "--tolerance is 255, expected a number from 0 to 254"),
     ({"method": "color", "color": "greenish"}, "--color is 'greenish', expected #rrggbb"),
     ({"method": "threshold", "threshold": 0.0}, "--threshold is 0.0, expected a number from 0.001 to 1"),
     ({"method": "alpha", "smooth": 300.0}, "--smooth is 300.0, expected a number from 0 to 256"),
     ({"method": "alpha", "expand": -2000}, "--expand is -2000, expected a number from -1024 to 1024"),
     ({"method": "alpha", "combine": "ad"}, "--combine is 'ad', expected one of: .*; did you mean 'add'?"),
     ({"method": "alpha", "naming": "khoya"}, "--naming is 'khoya', expected one of: onetrainer, kohya; did you mean"),
     ({"method": "alpha", "prompts": ("a",)}, "--prompt is for --with clipseg, not for --with alpha"),
     ({"method": "clipseg", "prompts": ("a",), "labels": ("b",)},
      "--label is for --with segment, not for --with clipseg"),
     ({"method": "clipseg", "prompts": (" ",)}, "--with clipseg has no --prompt, expected at least one: parts")],
)  # fmt: skip
def test_bad_options(tmp_path, options, says):
    with pytest.raises(UsageError, match=says) as caught:
        make([], out=tmp_path, **options)
    assert ("--color '#00ff00'" in caught.value.hint) == ("--color" in says)


def test_mask_paths():
    assert str(mask_path("cat/cat.v2.jpg")) == "cat/cat.v2-masklabel.png"
    assert str(mask_path("cat/cat.v2.jpg", "kohya")) == "cat/cat.v2.png"
    with pytest.raises(AssertionError, match="leads out of its source"):
        mask_path("../cat.jpg")
