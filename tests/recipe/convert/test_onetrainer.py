"""OneTrainer's concepts: what each of their keys becomes, and that none is lost in silence."""

from __future__ import annotations

import pytest
from pictures import draw
from told import said

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError, PathError
from prep.recipe.schema import ImageOptions, Source

# The settings of a concept that does nothing special, as far as they are not off.
PLAIN = {"path": "photos", "include_subdirectories": True, "text": {"keep_tags_count": 0},
         "image": {"enable_crop_jitter": False, "enable_random_flip": False}}


def concept(**keys):
    return {**PLAIN, **keys}


def test_a_whole_file(convert_json, tmp_path):
    found = convert_json([
        {"name": "a cat", "path": "photos", "enabled": True, "type": "STANDARD", "include_subdirectories": True,
         "text_variations": 4, "balancing": 3.0, "balancing_strategy": "REPEATS", "loss_weight": 0.5,
         "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "tag_delimiter": ";", "keep_tags_count": 2,
                  "tag_dropout_enable": True, "tag_dropout_mode": "RANDOM", "tag_dropout_probability": 0.1}},
        {"name": "held back", "path": "more", "type": "VALIDATION"},
        {"name": "others", "path": "reg", "type": "PRIOR_PREDICTION"},
        {"name": "not now", "path": "masks", "enabled": False},
    ])
    tags = CaptionOptions(variants=4, shuffle=True, dropout=0.1, separator=";", keep_tokens=2, keep_separator="")
    other = CaptionOptions(keep_tokens=1, keep_separator="")
    assert found.recipe.sources == (
        Source(path=tmp_path / "photos", repeats=3, weight=0.5, caption=tags),
        Source(path=tmp_path / "more", role="validation", exclude=("*/*",), caption=other),
        Source(path=tmp_path / "reg", role="prior", exclude=("*/*",), caption=other))
    assert found.recipe.image == ImageOptions(buckets="ratio", upscale="allow", crop="random", flip="none"), (
        "crops are random where a concept does not say")
    assert said(found)["concepts[3].enabled"] == "skipped: concept 'not now'"
    assert "with preserve.prior = true in train.toml" in said(found)["concepts[2].type"]
    assert {"resolution", "masked_training"} <= set(said(found)), "what the main configuration says is asked for"


IMAGE = {"enable_crop_jitter": True, "enable_random_flip": True, "enable_fixed_flip": True,
         "enable_random_rotate": True, "enable_fixed_rotate": True, "random_rotate_max_angle": 5.0,
         "enable_random_circular_mask_shrink": True, "enable_random_mask_rotate_crop": True,
         "resolution_override": "512,768", "never_heard_of": 1,
         **{f"{kind}_{name}": True for kind in ("enable_random", "enable_fixed")
            for name in ("brightness", "contrast", "saturation", "hue")},
         **{f"random_{name}_max_strength": 0.2 for name in ("brightness", "contrast", "saturation", "hue")}}
TEXT = {"prompt_source": "filename", "enable_tag_shuffling": True, "tag_delimiter": ";", "keep_tags_count": 3,
        "tag_dropout_enable": True, "tag_dropout_mode": "FULL", "tag_dropout_probability": 0.3,
        "tag_dropout_special_tags_mode": "WHITELIST", "tag_dropout_special_tags": "a",
        "tag_dropout_special_tags_regex": True, "caps_randomize_enable": True, "caps_randomize_mode": "title",
        "caps_randomize_probability": 0.5, "caps_randomize_lowercase": True, "never_heard_of": 1}
WHOLE = {"name": "x", "path": "more", "seed": 7, "enabled": False, "type": "PRIOR_PREDICTION",
         "validation_concept": True, "include_subdirectories": False, "image_variations": 3, "text_variations": 3,
         "balancing": 2.5, "repeats": 2, "balancing_strategy": "SAMPLES", "loss_weight": 2.0, "never_heard_of": 1}
# A setting that only has an effect together with another is given with it.
WITH = {"tag_dropout_mode": {"tag_dropout_enable": True, "tag_dropout_probability": 0.1},
        "tag_dropout_probability": {"tag_dropout_enable": True, "tag_dropout_mode": "RANDOM"},
        **{f"caps_randomize_{name}": {"caps_randomize_enable": True} for name in ("mode", "probability", "lowercase")},
        **{f"tag_dropout_special_tags{end}": {"tag_dropout_special_tags_mode": "BLACKLIST"} for end in ("", "_regex")},
        "resolution_override": {"enable_resolution_override": True}}


@pytest.mark.parametrize(("part", "key", "value"), [
    *[("", *pair) for pair in WHOLE.items()], *[("image", *pair) for pair in IMAGE.items()],
    *[("text", *pair) for pair in TEXT.items()]])
def test_every_key_changes_the_recipe_or_has_a_note(convert_json, part, key, value):
    rest = {**PLAIN.get(part, {}), **WITH.get(key, {})} if part else {}
    without = convert_json([concept(**({part: rest} if part else {})), concept(path="masks")])
    given = {part: {**rest, key: value}} if part else {key: value}
    found = convert_json([concept(**given), concept(path="masks")])
    noted = any(one.key.rpartition(".")[2] == key for one in found.notes)
    assert noted or found.recipe != without.recipe or key == "name", "a name is for people"


@pytest.mark.parametrize(("text", "resolution", "sizes", "noted"), [
    ("768", 768, (), False), ("768,512", (512, 768), (), True), ("1024x512", 724, ("1024x512",), False),
    (" 1000x520 ", 724, ("1024x512",), True), ("many", 512, (), True), ("512x512,768", 512, (), True)])
def test_a_resolution_of_its_own(convert_json, text, resolution, sizes, noted):
    image = {"enable_resolution_override": True, "resolution_override": text}
    found = convert_json([concept(image=image)])
    assert (found.recipe.image.resolution, found.recipe.image.sizes) == (resolution, sizes)
    assert (found.recipe.image.buckets == "list") == bool(sizes)
    assert ("concepts[0].image.resolution_override" in said(found)) == noted


@pytest.mark.parametrize("keys", [
    {"balancing": 0.0}, {"balancing": -1.0}, {"balancing": 1e-320}, {"balancing": 0.3, "path": "reg"},
    {"balancing_strategy": "SAMPLES", "balancing": 0.5}])
def test_a_concept_that_is_shown_never_is_left_out(convert_json, tmp_path, keys):
    draw(tmp_path / "reg" / "0.png", (16, 16), seed=0)
    draw(tmp_path / "reg" / "1.png", (16, 16), seed=1)
    found = convert_json([concept(**keys, name="none"), concept(path="more")])
    assert [one.path.name for one in found.recipe.sources] == ["more"]
    assert "skipped: concept 'none' is shown never" in said(found).values()


@pytest.mark.parametrize(("count", "image", "views"), [
    (3, {"enable_crop_jitter": True, "enable_random_flip": False}, ("random", 3, "none")),
    (99, {"enable_crop_jitter": True, "enable_random_flip": True,
          "enable_fixed_flip": True}, ("random", 64, "both")),
    (1, {"enable_crop_jitter": False, "enable_random_flip": False, "enable_fixed_flip": True},
     ("centre", 1, "always"))])
def test_variations_are_cuts_and_mirror_images(convert_json, count, image, views):
    found = convert_json([concept(image_variations=count, image=image)])
    assert (found.recipe.image.crop, found.recipe.image.views, found.recipe.image.flip) == views
    assert ("concepts[0].image_variations" in said(found)) == (count > 64)


def test_what_is_written_and_off_needs_no_note(convert_json):
    text = {"caps_randomize_enable": False, "caps_randomize_mode": "title", "tag_dropout_special_tags_mode": "NONE",
            "tag_dropout_special_tags": "a", "tag_dropout_enable": False, "tag_dropout_mode": "FULL"}
    assert set(said(convert_json([concept(text=text)]))) == {"resolution", "masked_training"}


def test_names_as_captions(convert_json):
    found = convert_json([concept(text={"prompt_source": "filename"})])
    assert found.recipe.caption.missing == "filename"
    assert "takes precedence" in said(found)["concepts[0].text.prompt_source"]


@pytest.mark.parametrize(("text", "constant", "wildcards", "variants"), [
    ("a cat\n", "a cat", False, 8), ("a cat\n\na dog\n", "{a cat|a dog}", True, 8),
    ("\n".join(f"cat {number}" for number in range(20)), "{" + "|".join(f"cat {n}" for n in range(20)) + "}", True, 20),
    ("a {cat}\na dog", "a {cat}", False, 8)])
def test_a_list_of_captions_for_all(convert_json, tmp_path, text, constant, wildcards, variants):
    (tmp_path / "prompts.txt").write_text(text)
    caption = convert_json([concept(text={"prompt_source": "concept", "prompt_path": "prompts.txt"})]).recipe.caption
    assert (caption.missing, caption.constant, caption.wildcards, caption.variants) == (
        "constant", constant, wildcards, variants)


@pytest.mark.parametrize(("data", "says"), [
    (b" \n", "has no text, expected captions, one per line"), (b"\xff", "byte 0 is not UTF-8, expected UTF-8 text")])
def test_a_list_of_captions_that_is_none(convert_json, tmp_path, data, says):
    (tmp_path / "prompts.txt").write_bytes(data)
    with pytest.raises(ConfigError) as error:
        convert_json([concept(text={"prompt_source": "concept", "prompt_path": "prompts.txt"})])
    assert says in error.value.message


def test_a_list_of_captions_that_is_not_there(convert_json):
    with pytest.raises(PathError, match=r"concepts\[0\].text.prompt_path .* cannot be read"):
        convert_json([concept(text={"prompt_source": "concept", "prompt_path": "nothing.txt"})])


@pytest.mark.parametrize(("keys", "says"), [
    ({"path": None}, "concepts[0] has no 'path', expected the directory of its pictures"),
    ({"type": "OTHER"}, "concepts[0].type is 'OTHER', expected one of: STANDARD"),
    ({"loss_weight": "1"}, "concepts[0].loss_weight is '1', expected a number")])
def test_what_onetrainer_would_refuse(convert_json, keys, says):
    with pytest.raises(ConfigError) as error:
        convert_json([concept(**keys), concept()])
    assert says in error.value.message
