"""SimpleTuner's backends: what each of their keys becomes, and that none is lost in silence."""

from __future__ import annotations

import pytest
from told import said

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError
from prep.recipe.schema import ImageOptions, Source

PLAIN = {"id": "a", "type": "local", "instance_data_dir": "photos", "caption_strategy": "textfile", "resolution": 768}


def backend(**keys):
    return {**PLAIN, **keys}


def test_a_whole_file(convert_json, tmp_path):
    found = convert_json([
        {"id": "cats", "type": "local", "instance_data_dir": "photos", "resolution": 768, "crop": True,
         "resolution_type": "pixel_area", "crop_style": "center", "crop_aspect": "square", "repeats": 2,
         "caption_strategy": "textfile", "instance_prompt": "ohwx", "prepend_instance_prompt": True,
         "conditioning_data": "cat-masks", "cache_dir_vae": "cache/vae",
         "caption_shuffle": {"enable": True, "count": 3, "split_on": "period", "position_start": 1,
                             "include_original": False}},
        {"id": "cat-masks", "type": "local", "dataset_type": "conditioning", "conditioning_type": "mask",
         "instance_data_dir": "masks"},
        {"id": "held back", "dataset_type": "eval", "type": "local", "instance_data_dir": "more", "crop": True,
         "crop_style": "center", "resolution": 768, "caption_strategy": "textfile"},
        {"id": "old", "type": "local", "instance_data_dir": "reg", "disabled": True},
        {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
        {"id": "bucket", "type": "aws", "instance_data_dir": "", "aws_secret_access_key": "do not tell"},
        {"id": "films", "type": "local", "dataset_type": "video", "instance_data_dir": "films"},
    ])
    tags = CaptionOptions(shuffle=True, variants=3, separator=".", keep_tokens=1, prefix="ohwx", keep_separator="")
    assert found.recipe.sources == (
        Source(path=tmp_path / "photos", repeats=3, mask=tmp_path / "masks", caption=tags),
        Source(path=tmp_path / "more", role="validation"))
    assert found.recipe.caption == CaptionOptions(keep_separator="")
    assert found.recipe.image == ImageOptions(resolution=768, buckets="single", upscale="allow")
    assert set(said(found)) == {"backends[0].cache_dir_vae", *(f"backends[{number}]" for number in (1, 3, 4, 5, 6))}
    assert "do not tell" not in str(found)
    assert said(found)["backends[5]"] == "skipped: its type is aws, expected local; download the pictures first"


VALUES = {
    "instance_data_dir": "more", "type": "csv", "dataset_type": "eval", "disabled": True, "disable": True,
    "default": True, "cache_dir": "c", "cache_dir_vae": "c", "cache_dir_conditioning_image_embeds": "c",
    "write_batch_size": 8, "text_encoder_batch_size": 8, "text_cache_ondemand": True, "text_cache_disable": True,
    "text_embeds": "t", "image_embeds": "t", "conditioning_image_embeds": "t", "conditioning_data": "m",
    "conditioning_type": "mask", "conditioning": [{"type": "canny"}], "source_dataset_id": "x",
    "conditioning_image_embed_batch_size": 2, "caption_strategy": "filename", "disable_multiline_split": True,
    "caption_shuffle": {"enable": True}, "metadata_update_interval": 3, "crop": True, "crop_style": "random",
    "resolution": 512, "resolution_type": "pixel", "minimum_image_size": 256, "minimum_aspect_ratio": 0.5,
    "maximum_aspect_ratio": 2.0, "maximum_image_size": 2048, "target_downsample_size": 1024,
    "crop_aspect_buckets": [1.0, 0.5], "max_upscale_threshold": 0.2, "prepend_instance_prompt": True,
    "only_instance_prompt": True, "instance_prompt": "y", "timestep_sampling_offset": 0.5, "repeats": 1,
    "max_num_samples": 10, "start_epoch": 2, "start_step": 5, "end_epoch": 3, "end_step": 9,
    "is_regularisation_data": True, "is_regularization_data": True, "delete_unwanted_images": True,
    "delete_problematic_images": True, "delete_nsfw_images": True, "slider_strength": 0.5,
    "vae_cache_clear_each_epoch": True, "vae_cache_ondemand": True, "vae_cache_disable": True, "probability": 0.5,
    "caption_filter_list": "f.txt", "skip_file_discovery": "vae", "hash_filenames": True,
    "preserve_data_backend_cache": True, "parquet": {"path": "more"}, "never_heard_of": 1, "video": {"num_frames": 2},
    "crop_aspect": "closest",
}
# A setting that only has an effect together with another is given with it.
WITH = {"crop_style": {"crop": True}, "crop_aspect": {"crop": True},
        "prepend_instance_prompt": {"instance_prompt": "x"},
        "instance_prompt": {"prepend_instance_prompt": True}, "only_instance_prompt": {"instance_prompt": "x"}}


@pytest.mark.parametrize("key", VALUES)
def test_every_key_changes_the_recipe_or_has_a_note(convert_json, key):
    other = {"id": "b", "instance_data_dir": "masks", "caption_strategy": "textfile", "resolution": 768}
    with_it, without = ({**WITH.get(key, {}), **given} for given in ({key: VALUES[key]}, {}))
    found, before = convert_json([backend(**with_it), other]), convert_json([backend(**without), other])
    assert any(one.key.rpartition(".")[2] == key for one in found.notes) or found.recipe != before.recipe


SHUFFLE = {"count": 5, "seed": 3, "split_on": "space", "position_start": 2, "include_original": True, "never": 1}
PARQUET = {"path": "more", "filename_column": "image_id", "caption_column": "words", "width_column": "w",
           "height_column": "h", "fallback_caption_column": "x", "identifier_includes_extension": True, "never": 1}


@pytest.mark.parametrize(("part", "key", "value"), [*[("caption_shuffle", *pair) for pair in SHUFFLE.items()],
                                                    *[("parquet", *pair) for pair in PARQUET.items()]])
def test_every_key_inside_a_key_does_so_too(convert_json, part, key, value):
    rest = {"enable": True} if part == "caption_shuffle" else {"path": "photos"}
    found = convert_json([backend(**{part: {**rest, key: value}})])
    before = convert_json([backend(**{part: rest})])
    noted = any(one.key == f"backends[0].{part}.{key}" for one in found.notes)
    assert noted or found.recipe != before.recipe


def test_sizes(convert_json):
    area = convert_json([backend(resolution=1.05, resolution_type="area")])
    assert area.recipe.image == ImageOptions(resolution=1024, upscale="allow")
    assert "is 1024" in said(area)["backends[0].resolution"]
    side = convert_json([backend(resolution=1024, resolution_type="pixel", minimum_image_size=512)])
    assert side.recipe.image == ImageOptions(resolution=1024, upscale="allow", min_side=512)
    assert convert_json([{"id": "a", "instance_data_dir": "photos"}]).recipe.image.resolution == 1024


def test_cuts(convert_json):
    found = convert_json([backend(crop=True, crop_aspect="closest", crop_aspect_buckets=[1.0, 0.75, 2],
                                  crop_style="random")])
    assert found.recipe.image == ImageOptions(
        resolution=768, buckets="list", sizes=("1088x512", "640x896", "768x768"), upscale="allow", crop="random",
        views=4)
    assert set(said(found)) == {"backends[0].crop_style"}
    unsaid = convert_json([backend(crop=True)])
    assert (unsaid.recipe.image.crop, unsaid.recipe.image.views) == ("random", 4), "SimpleTuner's default"
    assert "drawn once" in said(unsaid)["backends[0].crop_style"]
    assert "no effect" in said(convert_json([backend(crop_style="random")]))["backends[0].crop_style"]
    with pytest.raises(ConfigError, match=r"expected width / height, like 0\.75"):
        convert_json([backend(crop=True, crop_aspect="closest", crop_aspect_buckets=[0])])


@pytest.mark.parametrize(("threshold", "upscale"), [(None, "allow"), (0, 1.0), (0.25, 1.25)])
def test_enlarging(convert_json, threshold, upscale):
    chosen = {"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": [1.0]}
    assert convert_json([backend(max_upscale_threshold=threshold, **chosen)]).recipe.image.upscale == upscale
    without = convert_json([backend(max_upscale_threshold=threshold)])
    assert without.recipe.image.upscale == "allow"
    assert not threshold or "no effect" in said(without)["backends[0].max_upscale_threshold"]


def test_captions(convert_json):
    only = convert_json([backend(caption_strategy="instanceprompt", instance_prompt="a dog")])
    assert only.recipe.caption == CaptionOptions(missing="constant", constant="a dog", keep_separator="")
    assert "takes precedence" in said(only)["backends[0].caption_strategy"]
    joined = convert_json([backend(disable_multiline_split=True, caption_shuffle={"enable": True, "count": 2})])
    assert joined.recipe.caption == CaptionOptions(lines="join", shuffle=True, variants=3, keep_separator="")


def test_a_parquet_table(convert_json, tmp_path):
    (tmp_path / "t.parquet").touch()
    found = convert_json([backend(caption_strategy="parquet", metadata_backend="parquet",
                                  parquet={"path": "t.parquet", "filename_column": "file_name",
                                           "caption_column": "caption"})])
    assert found.recipe.sources[0].table == tmp_path / "t.parquet" and not found.notes


@pytest.mark.parametrize(("named", "says"), [
    ("none", "no backend with this id has them"), (["m", "n"], "the first of these that has masks is used"), ("m", ""),
    ("n", "the directory does not exist"), (["m"], ""), ({"id": 1}, "no backend with this id has them"),
    ([["m"], 7], "no backend with this id has them")])
def test_masks_that_cannot_all_be_used(convert_json, tmp_path, named, says):
    masks = [{"id": name, "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": place}
             for name, place in (("m", "masks"), ("n", "nowhere"))]
    found = convert_json([backend(conditioning_data=named), *masks])
    assert found.recipe.mask == (tmp_path / "masks" if "m" in named else "auto"), "only a name is one"
    assert said(found).get("backends[0].conditioning_data", "").endswith(says)
    assert ("backends[0].conditioning_data" in said(found)) == bool(says)


@pytest.mark.parametrize(("keys", "says"), [
    ({"instance_data_dir": None, "dataset_type": "image"},
     "backends[0] has no instance_data_dir, expected the directory of its pictures"),
    ({"resolution": -1}, "backends[0].resolution is -1.0, expected a side in pixels, or megapixels"),
    ({"caption_strategy": "guess"}, "backends[0].caption_strategy is 'guess', expected one of: textfile")])
def test_what_simpletuner_would_refuse(convert_json, keys, says):
    with pytest.raises(ConfigError) as error:
        convert_json([backend(**keys)])
    assert says in error.value.message
