"""kohya's dataset TOML: what each of its keys becomes, and that none is lost in silence."""

from __future__ import annotations

import pytest
from told import said

from prep.buckets.sizes import step_buckets
from prep.captions.options import CaptionOptions
from prep.errors import ConfigError
from prep.recipe.schema import ImageOptions, Source

WHOLE = """
[general]
enable_bucket = true
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1

[[datasets]]
resolution = 768
batch_size = 4
min_bucket_reso = 320
max_bucket_reso = 1280

  [[datasets.subsets]]
  image_dir = "photos"
  num_repeats = 3
  class_tokens = "ohwx dog"
  keep_tokens = 2
  conditioning_data_dir = "masks"

  [[datasets.subsets]]
  image_dir = "reg"
  is_reg = true
  shuffle_caption = false
"""


def test_a_whole_file(convert_text, tmp_path):
    found = convert_text(WHOLE)
    assert found.recipe.sources == (
        Source(path=tmp_path / "photos", repeats=3, exclude=("*/*",), mask=tmp_path / "masks",
               caption=CaptionOptions(missing="constant", constant="ohwx dog", lines="first", shuffle=True,
                                      keep_tokens=2, keep_separator="")),
        Source(path=tmp_path / "reg", role="prior", exclude=("*/*",),
               caption=CaptionOptions(lines="first", keep_tokens=1, keep_separator="")))
    assert found.recipe.caption == CaptionOptions(lines="first", keep_separator=""), "what they share"
    assert found.recipe.image == ImageOptions(resolution=768, step=64, shortest=320, longest=1280, upscale="allow")
    assert set(said(found)) == {"datasets[0].batch_size", "general.shuffle_caption",
                                "datasets[0].subsets[0].conditioning_data_dir", "datasets[0].subsets[1].is_reg"}
    assert "as often as the training pictures, never more" in said(found)["datasets[0].subsets[1].is_reg"]


def test_what_all_subsets_share_stands_once(convert_text, tmp_path):
    found = convert_text("""
        [[datasets]]
        resolution = [640, 640]
        enable_wildcard = true
        [[datasets.subsets]]
        image_dir = "photos"
        alpha_mask = true
        [[datasets.subsets]]
        image_dir = "more"
        alpha_mask = true
    """)
    assert found.recipe.sources == (Source(path=tmp_path / "photos", exclude=("*/*",)),
                                    Source(path=tmp_path / "more", exclude=("*/*",)))
    assert found.recipe.mask == "alpha" and found.recipe.caption == CaptionOptions(wildcards=True, keep_separator="")
    assert found.recipe.image == ImageOptions(resolution=640, buckets="single", upscale="allow")


def test_buckets_are_those_of_its_defaults(convert_text):
    image = convert_text("[[datasets]]\nresolution = 1024\nenable_bucket = true\n"
                         "[[datasets.subsets]]\nimage_dir = 'photos'").recipe.image
    assert len(step_buckets(image.resolution, image.step, image.shortest, image.longest)) == 25


def test_pictures_of_a_metadata_file(convert_text, tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    found = convert_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'photos'\n"
                         "metadata_file = 'meta.json'\ncaption_prefix = 'art of'\ncaption_tag_dropout_rate = 0.1")
    assert found.recipe.sources == (Source(path=tmp_path / "photos", table=tmp_path / "meta.json"),)
    assert found.recipe.caption == CaptionOptions(missing="reject", lines="first", dropout=0.1, keep_separator="",
                                                  prefix="art of")
    assert "shuffles its tags" in said(found)["datasets[0].subsets[0].caption_prefix"]


def test_the_same_pictures_at_several_resolutions(convert_text, tmp_path):
    dataset = ("[[datasets]]\nresolution = {}\n[[datasets.subsets]]\nimage_dir = 'photos'\n"
               "[[datasets.subsets]]\nimage_dir = 'more'\ncolor_aug = true\n")
    found = convert_text(dataset.format(768) + dataset.format(512))
    assert found.recipe.image.resolution == (512, 768)
    assert [one.path.name for one in found.recipe.sources] == ["photos", "more"]
    assert [(one.key, one.at) for one in found.notes] == [
        ("datasets[0].subsets[1].color_aug", "source[1]"), ("datasets[1].subsets[1].color_aug", "source[1]")]


def test_other_pictures_at_another_resolution_are_told(convert_text):
    dataset = "[[datasets]]\nresolution = {}\n[[datasets.subsets]]\nimage_dir = '{}'\n"
    found = convert_text(dataset.format(512, "photos") + dataset.format(768, "more"))
    assert found.recipe.image.resolution == 512
    assert "make another recipe for this value" in said(found)["datasets[1].subsets[0]: resolution"]


def test_cuts_and_mirror_images(convert_text):
    subset = "[[datasets.subsets]]\nimage_dir = 'photos'\n"
    found = convert_text(f"[[datasets]]\nresolution = 512\nflip_aug = true\nrandom_crop = true\n{subset}")
    image = found.recipe.image
    assert (image.crop, image.views, image.flip) == ("random", 4, "both")
    assert "4 crops of each picture" in said(found)["datasets[0].random_crop"]
    found = convert_text(f"[[datasets]]\nresolution = 512\n{subset}flip_aug = true\n{subset}")
    assert found.recipe.image.flip == "both" and "make another recipe" in said(found)["datasets[0].subsets[1]: flip"]


def test_one_size_that_is_no_square(convert_text):
    found = convert_text("[[datasets]]\nresolution = [768, 1040]\n[[datasets.subsets]]\nimage_dir = 'photos'")
    assert found.recipe.image == ImageOptions(resolution=893, buckets="list", sizes=("768x1040",), step=16,
                                              upscale="allow")
    found = convert_text("[[datasets]]\nresolution = [768, 1024]\nenable_bucket = true\n"
                         "[[datasets.subsets]]\nimage_dir = 'photos'")
    assert found.recipe.image.resolution == 886 and "the square of one number" in said(found)["datasets[0].resolution"]


def test_alpha_here_and_files_there(convert_text, tmp_path):
    found = convert_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'photos'\n"
                         "conditioning_data_dir = 'masks'\n[[datasets.subsets]]\nimage_dir = 'more'\nalpha_mask = true")
    assert [one.mask for one in found.recipe.sources] == [tmp_path / "masks", None]
    assert "all alpha or all files" in said(found)["more: alpha as mask"]


VALUES = {
    "image_dir": "more", "metadata_file": "photos", "caption_extension": ".cap", "class_tokens": "dog",
    "num_repeats": 4, "is_reg": True, "keep_tokens": 2, "keep_tokens_separator": "|||", "secondary_separator": ";;;",
    "enable_wildcard": True, "shuffle_caption": True, "caption_separator": ";", "caption_prefix": "p",
    "caption_suffix": "s", "caption_dropout_rate": 0.1, "caption_dropout_every_n_epochs": 2,
    "caption_tag_dropout_rate": 0.2, "color_aug": True, "flip_aug": True, "face_crop_aug_range": [1.0, 2.0],
    "random_crop": True, "alpha_mask": True, "conditioning_data_dir": "masks", "cache_info": True,
    "resize_interpolation": "area", "token_warmup_min": 2, "token_warmup_step": 3, "custom_attributes": {"a": 1},
    "batch_size": 3, "resolution": 640, "enable_bucket": True, "min_bucket_reso": 128, "max_bucket_reso": 2048,
    "bucket_reso_steps": 32, "bucket_no_upscale": True, "validation_split": 0.1, "validation_seed": 1,
    "network_multiplier": 0.5, "skip_image_resolution": 256, "never_heard_of": 1,
}
OF_A_DATASET = [*VALUES][[*VALUES].index("batch_size"):]


@pytest.mark.parametrize("layer", ["general", "dataset", "subset"])
@pytest.mark.parametrize("key", VALUES)
def test_every_key_changes_the_recipe_or_has_a_note(convert_json, key, layer):
    def document(value):
        tables = {"general": {}, "dataset": {"resolution": 512}, "subset": {"image_dir": "photos"}}
        if value is not None:
            tables[layer][key] = value
        return convert_json({"general": tables["general"],
                             "datasets": [{**tables["dataset"], "subsets": [tables["subset"]]}]})

    without, found = document(None), document(VALUES[key])
    noted = any(one.key.rpartition(".")[2] == key for one in found.notes)
    if (key, layer) in (("resolution", "general"), ("image_dir", "general"), ("image_dir", "dataset")):
        assert found.recipe == without.recipe, "the nearer one stands above it"
    else:
        assert noted or found.recipe != without.recipe
    if key == "never_heard_of" or (key in OF_A_DATASET and layer == "subset"):
        assert noted and "unknown setting" in said(found)[next(one.key for one in found.notes if key in one.key)]


@pytest.mark.parametrize("value", [False, 0, None, ""])
def test_what_is_off_needs_no_note(convert_json, value):
    subset = {"image_dir": "photos", "color_aug": value, "face_crop_aug_range": value}
    assert not convert_json({"datasets": [{"resolution": 512, "subsets": [subset]}]}).notes


def test_secrets_are_not_repeated(convert_json):
    found = convert_json({"datasets": [{"resolution": 512, "subsets": [{"image_dir": "photos"}]}], "hub_token": "hf_x"})
    assert [one.text for one in found.notes] == ["hub_token: unknown setting; ignored"]


def test_a_subset_shown_never_is_left_out(convert_text):
    subsets = "[[datasets.subsets]]\nimage_dir = 'photos'\nnum_repeats = 0\n[[datasets.subsets]]\nimage_dir = 'more'"
    found = convert_text(f"[[datasets]]\nresolution = 512\n{subsets}")
    assert len(found.recipe.sources) == 1 and "num_repeats is 0" in said(found)["datasets[0].subsets[0]"]


def test_windows_paths_and_missing_ones(convert_text, tmp_path):
    dataset = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = {!r}\n"
    assert convert_text(dataset.format("photos\\sub")).recipe.sources[0].path == tmp_path / "photos/sub"
    found = convert_text(dataset.format("nowhere"))
    assert found.recipe.sources[0].path == tmp_path / "nowhere"
    assert said(found)["datasets[0].subsets[0].image_dir"] == "this path does not exist"


def test_a_path_below_the_directory_above(convert_text, tmp_path):
    (tmp_path / "config").mkdir()
    found = convert_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'photos'",
                         name="config/theirs.toml")
    assert found.recipe.sources[0].path == tmp_path / "photos" and not found.notes


def test_a_path_as_sd_scripts_would_find_it(convert_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "photos")
    found = convert_text("[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'sub'")
    assert found.recipe.sources[0].path == tmp_path / "photos/sub" and not found.notes


@pytest.mark.parametrize(("subset", "says"), [
    ("num_repeats = 'x'\nimage_dir = 'photos'", "subsets[0].num_repeats is 'x', expected a whole number"),
    ("num_repeats = 2", "datasets[0].subsets[0] has no image_dir, expected one: a source is a directory"),
    ("image_dir = ''", "datasets[0].subsets[0].image_dir is '', expected a path"),
    ("image_dir = 'photos'\nnum_repeats = 0", "it has no source that can be converted: datasets[0].subsets[0] = "),
])
def test_what_sd_scripts_would_refuse(convert_text, subset, says):
    with pytest.raises(ConfigError) as error:
        convert_text(f"[[datasets]]\nresolution = 512\n[[datasets.subsets]]\n{subset}")
    assert says in error.value.message


def test_a_resolution_of_three_sides(convert_json):
    with pytest.raises(ConfigError, match="expected one or two whole numbers"):
        convert_json({"datasets": [{"resolution": [1, 2, 3], "subsets": [{"image_dir": "photos"}]}]})
