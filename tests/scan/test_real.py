"""The real pictures: nothing to complain of in the good ones, the right verdict on each of the bad ones.

    LATENTRY_REAL_DATA=/path/to/data python -m pytest tests/test_scan_real.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from walking import walk

from prep.images.decode import decode_picture, read_header
from prep.images.mask import decode_mask
from prep.scan.scanner import scan
from prep.sources.item import Item
from prep.sources.walk import walk_source

pytestmark = pytest.mark.real_data


@pytest.fixture(scope="module")
def photos(real_data):
    return scan(walk(real_data / "photos", source=0, mask_from=real_data / "masks"), jobs=2)


def test_photos_are_clean(photos):
    assert (photos.pictures, photos.samples) == (63, 63)
    told = [(one.path, one.code) for one in photos.findings]
    assert told == [("cat/cat_02.jpg", "near-duplicate"), ("dog5/dog5_02.jpg", "mirrored-duplicate")]


def test_every_mask_finds_its_photo(real_data):
    items = [one for one in walk(real_data / "photos", source=0, mask_from=real_data / "masks")
             if isinstance(one, Item)]
    index = {photo["file"].removeprefix("photos/"): photo for photo in
             json.loads((real_data / "photos_index.json").read_text(encoding="utf-8"))["photos"]}
    assert {item.name for item in items} == set(index)
    for item in items:
        wanted = index[item.name].get("mask")
        assert (item.mask.path if item.mask else None) == (real_data / wanted if wanted else None)
        header = read_header(item.picture.path.read_bytes())
        assert header.size == tuple(index[item.name]["size"])


def test_mask_areas(real_data):
    """White fractions as the data's own index states them."""
    for photo in json.loads((real_data / "photos_index.json").read_text(encoding="utf-8"))["photos"]:
        if "mask" in photo:
            mask = np.asarray(decode_mask((real_data / photo["mask"]).read_bytes()))
            assert abs((mask > 127).mean() - photo["mask_white_fraction"]) < 0.01, photo["file"]


# ---- the bad ones ----------------------------------------------------------------------------------------------------


NO_CAPTION = "missing-caption"


def verdicts(root, mask_from="sidecar"):
    """(verdict by path below root, report). `skip` is what the walk passes over."""
    found = list(walk(root, source=0, mask_from=mask_from))
    report = scan(found, jobs=2)
    result = {one.name: "ok" for one in found if isinstance(one, Item)}
    result |= {f"{item.name.rpartition('/')[0]}/{item.mask.path.name}": "ok"
               for item in found if isinstance(item, Item) and item.mask}
    order = ["ok", "warning", "error"]
    for one in report.findings:
        if one.severity == "info" or (one.code == NO_CAPTION and one.path.startswith("images/")):
            continue  # pictures in bad/images have no captions on purpose
        level = "warning" if result.get(one.path) == "warn" else result.get(one.path, "ok")
        result[one.path] = max(level, one.severity, key=order.index).replace("warning", "warn")
    return result, report


@pytest.fixture(scope="module")
def bad(real_data):
    entries = json.loads((real_data / "bad" / "expected.json").read_text(encoding="utf-8"))["entries"]
    return verdicts(real_data / "bad"), {one["path"].removeprefix("bad/"): one for one in entries
                                         if not one["path"].startswith("bad/tars/")}


# Files that resemble others of the folder on purpose, though their own entry does not say so.
COPIES = {"exact-duplicate", "pixel-duplicate", "near-duplicate", "stem-collision"}


def test_verdicts_on_bad_files(bad):
    (result, report), entries = bad
    wrong = {}
    for path, entry in entries.items():
        accepted = {entry["verdict"], *entry.get("also_acceptable", [])}
        codes = {one.code for one in report.findings if one.path == path and one.severity != "info"} - {NO_CAPTION}
        given = result.get(path, "skip")
        if given == "warn" and "warn" not in accepted and codes <= COPIES and not path.startswith("pairs/dup_"):
            given = "ok"
        if given not in accepted:
            wrong[path] = (given, sorted(codes), sorted(accepted))
    assert wrong == {}
    assert len(entries) == 96


@pytest.mark.parametrize(
    ("path", "code"),
    [("images/truncated_half.jpg", "truncated"), ("images/truncated_last_2_bytes.jpg", "missing-eoi"),
     ("images/zero_byte.jpg", "empty-file"), ("images/html_404_saved_as.png", "not-an-image"),
     ("images/bomb_20000x20000.png", "too-many-pixels"), ("images/bomb_text_chunk.png", "metadata-bomb"),
     ("images/cmyk.jpg", "not-rgb"), ("images/rgb_16bit.png", "high-bit-depth"), ("images/gray.jpg", "grayscale"),
     ("images/rgba_cutout.png", "has-alpha"), ("images/palette_transparency.png", "has-alpha"),
     ("images/rgb_colour_key.png", "has-alpha"), ("images/rgba_fully_transparent.png", "fully-transparent"),
     ("images/solid_gray_blank.png", "blank"), ("images/animated_apng.png", "animated"),
     ("images/multipage.tif", "multi-page"), ("images/exif_corrupt.jpg", "exif-invalid"),
     ("images/one_by_one.png", "too-small"), ("images/huge_aspect_4096x64.jpg", "extreme-aspect"),
     ("images/icc_display_p3.jpg", "non-srgb-profile"), ("images/icc_corrupt_profile.jpg", "invalid-profile"),
     ("images/trailing_garbage.jpg", "trailing-data"), ("images/png_named.jpg", "wrong-extension"),
     ("images/drawing.svg", "unsupported-format"), ("pairs/dup_exact_copy.jpg", "exact-duplicate"),
     ("pairs/dup_same_pixels.png", "pixel-duplicate"), ("pairs/dup_near_resized.jpg", "near-duplicate"),
     ("pairs/caption_utf16le.jpg", "caption-utf16"), ("pairs/caption_nul_bytes.jpg", "caption-control-characters"),
     ("pairs/orphan_caption.txt", "orphan-caption"), ("pairs/same_stem.jpg", "stem-collision"),
     ("masks/mask_wrong_aspect-masklabel.png", "mask-size-mismatch"),
     ("masks/mask_in_alpha-masklabel.png", "mask-not-gray"), ("masks/mask_orphan-masklabel.png", "orphan-mask")],
)  # fmt: skip
def test_codes_on_bad_files(bad, path, code):
    (_, report), _ = bad
    assert code in {one.code for one in report.findings if one.path == path}


def pixels(real_data, name, alpha="white"):
    return np.asarray(decode_picture((real_data / "bad" / "images" / name).read_bytes(), alpha=alpha)).astype(float)


def test_eight_orientations_show_one_picture(real_data):
    upright = pixels(real_data, "exif_orientation_1.jpg")
    for orientation in range(2, 9):
        other = pixels(real_data, f"exif_orientation_{orientation}.jpg")
        assert other.shape == upright.shape
        assert np.abs(other - upright).mean() < 3, orientation


@pytest.mark.parametrize("name", ["icc_adobe_rgb.jpg", "icc_display_p3.jpg", "icc_wide_gamut_prophoto.jpg"])
def test_profiles_give_one_picture(real_data, name):
    assert np.abs(pixels(real_data, name) - pixels(real_data, "icc_reference_srgb.png")).mean() < 4


def test_brightness_survives_16_bits_and_floats(real_data):
    assert abs(pixels(real_data, "gray_16bit.png").mean() - 143) < 2
    assert pixels(real_data, "float32_0_to_1.tif").mean() > 50


def test_no_magenta_behind_transparency(real_data):
    shown = pixels(real_data, "palette_transparency.png")
    assert not ((shown[..., 0] > 200) & (shown[..., 1] < 60) & (shown[..., 2] > 200)).any()


# ---- the two tars that are to be unpacked ----------------------------------------------------------------------------


@pytest.fixture
def unpacked(real_data):
    if shutil.which("tar") is None:
        pytest.skip("no tar to unpack with")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)

        def unpack(name):
            tar = real_data / "bad" / "tars" / f"{name}.tar"
            subprocess.run(["tar", "xf", str(tar), "-C", str(root), "--no-same-owner"], check=True)
            return root

        yield unpack
        for path in root.rglob("no_permission.jpg"):
            path.chmod(0o644)


def test_odd_names(unpacked):
    result, report = verdicts(unpacked("odd_names"))
    assert set(result.values()) <= {"ok", "warn"}
    assert {one.code for one in report.findings if one.severity != "info"} <= COPIES
    assert report.samples == report.pictures == 28
    json.dumps([one.path for one in report.findings]).encode("ascii")


def test_links_and_special_files_end_for_an_ordinary_user(unpacked):
    """A pipe that nobody writes to, links in circles, a file without permission: told, and the scan ends."""
    root = unpacked("links_and_special")
    script = Path(__file__).parents[1] / "support" / "as_ordinary_user.py"
    user = "65534" if hasattr(os, "getuid") and os.getuid() == 0 else "0"
    cases = {"scan": [["prep", "scan", str(root), "--json", "--quiet"]]}
    with tempfile.TemporaryDirectory() as warm:  # imports everything, while this Python can still be read
        Image.new("RGB", (64, 64)).save(Path(warm) / "one.png")
        lines = [json.dumps([["prep", "scan", warm, "--quiet"]]), json.dumps(cases)]
        done = subprocess.run([sys.executable, str(script), user], input="\n".join(lines) + "\n", capture_output=True,
                              text=True, timeout=120, check=True, env={**os.environ, "LATENTRY_USER_CACHE": str(warm)})
    ((code, out, err),) = json.loads(done.stdout.splitlines()[-1])["scan"]
    assert (code, err) == (1, "")
    found = {(one["path"].removeprefix("links/"), one["code"]) for one in json.loads(out)["findings"]
             if one["severity"] == "error"}
    assert found == {("loop_a.jpg", "link-loop"), ("loop_b.jpg", "link-loop"), ("self.jpg", "link-loop"),
                     ("dangling.jpg", "dangling-link"), ("outside.jpg", "dangling-link"), ("fifo.jpg", "special-file"),
                     ("no_permission.jpg", "unreadable-file"), ("sub/inner.jpg", "too-small")}


# ---- the tars that are read as they are ------------------------------------------------------------------------------


TARS = {
    "wds_path_traversal": {"path-traversal"}, "wds_truncated": {"truncated"}, "empty": {"empty-archive"},
    "wds_mixed_faults": {"missing-caption", "orphan-caption", "truncated", "empty-file", "duplicate-key", "bad-json"},
    "wds_gzip_named": {"packed-archive"}, "zero_byte": {"empty-file"},
}


@pytest.mark.parametrize("name", TARS)
def test_bad_tars(real_data, name):
    entries = {one["path"]: one for one in
               json.loads((real_data / "bad" / "expected.json").read_text(encoding="utf-8"))["entries"]}
    report = scan(walk_source(real_data / "bad" / "tars" / f"{name}.tar", source=0, masks="sidecar"), jobs=1)
    worst = "error" if report.count("error") else "warn" if report.count("warning") else "ok"
    entry = entries[f"bad/tars/{name}.tar"]
    assert worst in {entry["verdict"], *entry.get("also_acceptable", [])}
    assert TARS[name] <= {one.code for one in report.findings}
    assert report.samples == entry.get("whole_samples", report.samples) or name == "wds_gzip_named"


def test_good_tars(real_data):
    report = scan(walk_source(real_data / "tars" / "photos-{000000..000001}.tar", source=0, masks="sidecar"), jobs=2)
    assert (report.pictures, report.samples, report.count("error")) == (24, 24, 0)


def test_every_entry_has_its_test(real_data):
    """96 files, six tars that are read and two that are unpacked: 104."""
    entries = json.loads((real_data / "bad" / "expected.json").read_text(encoding="utf-8"))["entries"]
    tars = {Path(one["path"]).stem for one in entries if one["path"].startswith("bad/tars/")}
    assert tars == {*TARS, "odd_names", "links_and_special"} and len(entries) == 104
