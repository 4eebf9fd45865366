"""ai-toolkit's datasets, in YAML or JSON: what each key becomes, and that none is lost in silence."""

from __future__ import annotations

import json

import pytest
from told import said

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError
from prep.recipe.schema import ImageOptions, Source

HEAD = "job: extension\nconfig:\n  name: edit\n  process:\n    - type: sd_trainer\n"
WHOLE = f"""---
{HEAD}      trigger_word: p3r5on  # a comment
      model:
        name_or_path: owner/name
        quantize: true
        assistant_lora_path: ostris/adapter
      train:
        steps: 3000
      datasets:
        - folder_path: "photos"
          control_path: "masks"
          control_path_2: more
          caption_ext: txt
          default_caption: a person
          resolution: [1024, 512, 768]
          num_repeats: 2
          loss_multiplier: 0.5
          caption_dropout_rate: 0.05
          cache_latents_to_disk: true
        - folder_path: reg
          resolution: [512, 768, 1024]
          is_reg: true
          strange: 1
"""


def test_a_whole_file(convert_text, tmp_path):
    found = convert_text(WHOLE)
    assert found.tool == "ai-toolkit" and found.recipe.model.path == "owner/name"
    caption = CaptionOptions(missing="empty", lines="join", trigger="p3r5on", keep_separator="")
    first, second = found.recipe.sources
    assert (first.path, first.references, first.repeats, first.weight, first.role) == (
        tmp_path / "photos", (tmp_path / "masks", tmp_path / "more"), 2, 0.5, "train")
    assert found.recipe.caption_of(0) == CaptionOptions(missing="constant", constant="a person", lines="join",
                                                        trigger="p3r5on", keep_separator="")
    assert (second.path, second.references, second.role) == (tmp_path / "reg", None, "prior")
    assert found.recipe.caption_of(1) == caption
    assert found.recipe.image == ImageOptions(resolution=(512, 768, 1024))
    assert (found.training.settings["steps"], found.training.settings["caption_dropout"]) == (3000, 0.05)
    assert {key: text for key, text in said(found).items() if key != "datasets[1].is_reg"} == {
        "datasets[0].cache_latents_to_disk": "prep manages caches: nothing to set",
        "datasets[1].strange": "unknown setting; ignored"}


def dataset(convert_text, **keys):
    return convert_text(json.dumps({"job": "extension", "config": {"process": [
        {"type": "ui_trainer", "datasets": [{"folder_path": "photos", **keys}]}]}}))


@pytest.mark.parametrize(("keys", "expected"), [
    ({"control_path": ["masks", "more"]}, {"references": ["masks", "more"]}),
    ({"control_path": "masks", "control_path2": "more", "control_path3": "reg"},
     {"references": ["masks", "more", "reg"]}),
    ({"control_path_1": "more"}, {"references": ["more"]}), ({"control_path": None}, {"references": None}),
    ({"mask_path": "masks"}, {"mask": "masks"}), ({"alpha_mask": True}, {"mask": "alpha"})])
def test_directories(convert_text, tmp_path, keys, expected):
    recipe = dataset(convert_text, **keys).recipe
    wanted = {name: [tmp_path / one for one in value] if isinstance(value, list) else value
              for name, value in expected.items()}
    if "references" in wanted:
        assert recipe.references_of(0) == (wanted["references"] and tuple(wanted["references"]))
    else:
        assert recipe.mask_of(0) == (wanted["mask"] if wanted["mask"] == "alpha" else tmp_path / wanted["mask"])


@pytest.mark.parametrize(("keys", "image"), [
    ({}, ImageOptions()), ({"resolution": 768}, ImageOptions(resolution=768)),
    ({"buckets": False}, ImageOptions(buckets="single")), ({"square_crop": True}, ImageOptions(buckets="single")),
    ({"flip_x": True}, ImageOptions(flip="both")), ({"random_crop": True}, ImageOptions(crop="random", views=4))])
def test_sizes(convert_text, keys, image):
    assert dataset(convert_text, **keys).recipe.image == image


@pytest.mark.parametrize(("keys", "says"), [
    ({"control_path": "nowhere"}, "no references are read from what is not a directory"),
    ({"mask_path": "nowhere"}, "no masks are read: it is not a directory"),
    ({"caption_ext": ".md"}, "rename the files"),
    ({"flip_y": True}, "no counterpart"), ({"invert_mask": True}, "invert the files"),
    ({"controls": ["depth"]}, "name it in references"),
    ({"inpaint_path": "masks"}, "inpainting model (sdxl_inpaint, flux_fill)"),
    ({"scale": 0.5}, "no counterpart"), ({"batch_size": 2}, "batch_size in train.toml")])
def test_what_cannot_be_converted_is_said(convert_text, keys, says):
    assert said(dataset(convert_text, **keys))[f"datasets[0].{next(iter(keys))}"].endswith(says)


def test_a_file_of_captions_is_a_table(convert_text, tmp_path):
    (tmp_path / "photos" / "captions.json").write_text('{"a.png": {"caption": "words"}}')
    (source,) = dataset(convert_text, folder_path="photos/captions.json").recipe.sources
    assert source == Source(path=tmp_path / "photos", table=tmp_path / "photos" / "captions.json")


@pytest.mark.parametrize(("text", "says"), [
    (HEAD + "      datasets: &all\n        - folder_path: photos\n      more: *all\n", "it has aliases"),
    (HEAD + "      datasets: [", "it is not YAML"),
    (HEAD + "      device: a\n      device: b\n", "the key 'device' occurs twice in a table"),
    ("job: !!python/object/apply:os.system ['true']\n", "it is not YAML"),
    (HEAD + "      datasets: 5\n", "datasets is 5, expected a list"),
    (HEAD + "      datasets:\n        - control_path: [5]\n          folder_path: photos\n", "is 5, expected a string"),
    (HEAD.replace("sd_trainer", "generate"), "it is not in a format that can be converted"),
    (HEAD, "it has no source that can be converted"), ("job: " + "[" * 3000, "nested deeper than 100"),
    (HEAD + "#" * (1 << 20), "it is YAML of more than 1048576 characters")])
def test_files_that_are_refused(convert_text, text, says):
    with pytest.raises(ConfigError) as error:
        convert_text(text)
    assert says in error.value.message
