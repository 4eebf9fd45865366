"""musubi-tuner's dataset TOML: what each of its keys becomes, and that none is lost in silence."""

from __future__ import annotations

import json

import pytest
from told import said

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError
from prep.recipe.schema import ImageOptions, Source

WHOLE = """
[general]
resolution = [1024, 768]
caption_extension = ".txt"
batch_size = 2
enable_bucket = true
bucket_no_upscale = true

[[datasets]]
image_directory = "photos"
control_directory = "masks"
cache_directory = "cache"
num_repeats = 3
control_resolution = [1024, 1024]
no_resize_control = true

[[datasets]]
image_directory = "more"
multiple_target = true

[[datasets]]
video_directory = "films"
target_frames = [1, 25]
"""
CAPTION = CaptionOptions(lines="join", keep_separator="")


def test_a_whole_file(convert_text, tmp_path):
    found = convert_text(WHOLE)
    assert found.tool == "musubi-tuner"
    assert found.recipe.sources == (
        Source(path=tmp_path / "photos", repeats=3, exclude=("*/*",), references=(tmp_path / "masks",)),
        Source(path=tmp_path / "more", exclude=("*/*",)))
    assert found.recipe.caption == CAPTION
    assert found.recipe.image == ImageOptions(resolution=886, step=16, upscale="never")
    assert (found.recipe.reference_fit, found.recipe.reference_resolution) == ("family", 1024)
    assert set(said(found)) == {"general.batch_size", "datasets[0].cache_directory", "datasets[1].multiple_target",
                                "datasets[2]"}
    assert "videos have no counterpart" in said(found)["datasets[2]"]


@pytest.mark.parametrize(("lines", "image"), [
    ("resolution = 512", ImageOptions(resolution=512, buckets="single", upscale="allow")),
    ("resolution = 512\nenable_bucket = true", ImageOptions(resolution=512, step=16, upscale="allow")),
    ("resolution = [512, 768]", ImageOptions(resolution=627, buckets="list", sizes=("512x768",), step=64,
                                             upscale="allow")),
    ("", ImageOptions(resolution=722, buckets="list", sizes=("960x544",), step=32, upscale="allow"))])
def test_sizes(convert_text, lines, image):
    found = convert_text(f'[[datasets]]\nimage_directory = "photos"\n{lines}\n')
    assert found.recipe.image == image
    assert ("datasets[0].resolution" in said(found)) == (not lines)


@pytest.mark.parametrize(("lines", "fit"), [
    ('control_directory = "masks"', ("bucket", 0)),
    ('control_directory = "masks"\nno_resize_control = true', ("exact", 0)),
    ('control_directory = "masks"\nqwen_image_edit_no_resize_control = true', ("exact", 0)),
    ('control_directory = "masks"\ncontrol_resolution = 512', ("family", 512)),
    ('control_directory = "masks"\ncontrol_resolution = [512, 2048]\nno_resize_control = true', ("family", 1024)),
    ("control_resolution = 512", ("family", 0))])
def test_how_control_pictures_are_scaled(convert_text, lines, fit):
    found = convert_text(f'[[datasets]]\nimage_directory = "photos"\nresolution = 64\n{lines}\n')
    assert (found.recipe.reference_fit, found.recipe.reference_resolution) == fit and not found.notes


def test_datasets_that_scale_control_pictures_differently(convert_text):
    both = '[[datasets]]\nimage_directory = "photos"\ncontrol_directory = "masks"\nresolution = 64\n'
    found = convert_text(f"{both}{both}no_resize_control = true\n")
    assert found.recipe.reference_fit == "bucket"
    assert "a recipe has one [references] fit" in said(found)["datasets[1]: control pictures"]
    with pytest.raises(ConfigError, match="control_resolution is 'large', expected a whole number"):
        convert_text(f"{both}control_resolution = 'large'\n")


@pytest.mark.parametrize(("key", "says"), [
    ('control_directory = "nowhere"', "no references are read from what is not a directory"),
    ('caption_extension = ".json"', "captions are .txt or .caption; rename the files"),
    ("fp_1f_target_index = 9", "FramePack's videos have no counterpart"), ("colors = 9", "unknown setting; ignored")])
def test_what_cannot_be_converted_is_said(convert_text, key, says):
    found = convert_text(f'[[datasets]]\nimage_directory = "photos"\n{key}\n')
    assert said(found)[f"datasets[0].{key.partition(' ')[0]}"] == says
    assert found.recipe.sources[0].references is None


def lines_in(path, names):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"image_path": first, "control_path": second, "caption": "words"}) + "\n"
                            for first, second in names))


LISTED = '[[datasets]]\nresolution = 64\nimage_jsonl_file = "{}"\ncache_directory = "cache"\n'


def test_json_lines_have_the_directory_of_their_pictures(convert_text, tmp_path):
    lines_in(tmp_path / "rows.jsonl", [(str(tmp_path / "photos/a.png"), str(tmp_path / "more/a.png"))])
    found = convert_text(LISTED.format("rows.jsonl")).recipe
    assert (found.sources[0].path, found.sources[0].table, found.sources[0].exclude) == (
        tmp_path, tmp_path / "rows.jsonl", ())
    assert found.caption == CaptionOptions(lines="join", keep_separator="", missing="reject")
    lines_in(tmp_path / "photos/rows.jsonl", [("a.png", "b/a.png")])
    assert convert_text(LISTED.format("photos/rows.jsonl")).recipe.sources[0].path == tmp_path / "photos"
    (tmp_path / "elsewhere/run").mkdir()
    (tmp_path / "elsewhere/run/a.png").write_bytes(b"")  # it resolves paths against the directory where it runs first
    lines_in(tmp_path / "photos/rows.jsonl", [("run/a.png", "run/b.png")])
    found = convert_text(LISTED.format("photos/rows.jsonl"))
    assert found.recipe.sources[0].path == tmp_path / "elsewhere"
    told = [one.said for one in found.notes]
    assert f"its paths are relative to {tmp_path / 'elsewhere'}, where prep init runs" in told


@pytest.mark.parametrize("text", ["", "{nothing", '["a"]', '{"image_path": 5}', '{"image_path": "nowhere.png"}'])
def test_json_lines_that_say_nothing(convert_text, tmp_path, text):
    (tmp_path / "photos/rows.jsonl").write_text(text)
    assert convert_text(LISTED.format("photos/rows.jsonl")).recipe.sources[0].path == tmp_path / "photos"


def test_pictures_in_no_common_directory(convert_text, tmp_path):
    lines_in(tmp_path / "photos/rows.jsonl", [("/data/a.png", "/elsewhere/b.png")])
    found = convert_text(LISTED.format("photos/rows.jsonl"))
    assert found.recipe.sources[0].path == tmp_path / "photos"
    assert any("have no directory in common" in one.said for one in found.notes)


def test_videos_alone_are_refused(convert_text):
    with pytest.raises(ConfigError, match=r"no source that can be converted.*videos have no counterpart"):
        convert_text('[[datasets]]\nvideo_directory = "films"\n')
