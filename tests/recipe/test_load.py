"""Recipes: what a file and the options above it come to, and what each wrong one is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pictures import draw

from prep.dataset.bucketing import rules_of
from prep.dataset.listing import walk_recipe
from prep.errors import ConfigError, PathError
from prep.fs.place import place_below
from prep.models.families.registry import FAMILIES
from prep.recipe.load import load_recipe
from prep.recipe.schema import Recipe, Source

WHOLE = """
[model]
path = "models/x"
family = "sd15"
dtype = "float16"
[image]
resolution = 768
min_bucket = 4
alpha = "black"
[caption]
missing = "filename"
[mask]
from = "masks"
[[source]]
path = "photos"
repeats = 3
[[source]]
path = "more"
role = "validation"
weight = 2
[validation]
fraction = 0.05
[prompts]
file = "prompts.txt"
"""


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text, **choices)` loads the text as dataset.toml."""
    (tmp_path / "masks").mkdir()

    def go(text, **choices):
        path = tmp_path / "dataset.toml"
        path.write_text(text)
        return load_recipe(path, choices=choices)

    return go


def test_a_whole_recipe(recipe, tmp_path):
    found = recipe(WHOLE)
    assert found.sources == (Source(path=tmp_path / "photos", repeats=3),
                             Source(path=tmp_path / "more", role="validation", weight=2.0))
    assert (found.model.path, found.model.dtype, found.model.family) == ("models/x", "float16", "sd15")
    assert (found.image.resolution, found.image.min_bucket, found.image.alpha) == (768, 4, "black")
    assert (found.mask, found.prompts) == (tmp_path / "masks", tmp_path / "prompts.txt")
    assert (found.validation, found.caption.missing) == (0.05, "filename")


def test_a_directory_is_a_recipe_of_defaults(tmp_path):
    assert load_recipe(tmp_path, choices={"image.resolution": None}) == Recipe(sources=(Source(path=tmp_path),))


def test_options_stand_above_the_file(recipe):
    found = recipe(WHOLE, **{"image.resolution": 512, "mask": "none", "validation": 0.2, "caption.missing": "stop"})
    assert (found.image.resolution, found.mask, found.validation, found.caption.missing) == (512, "none", 0.2, "stop")


def test_a_local_model_is_relative_to_the_recipe(recipe, tmp_path):
    (tmp_path / "models" / "x").mkdir(parents=True)
    assert recipe(WHOLE).model.path == str(tmp_path / "models" / "x")


WRONG = {
    "no source": ("", "the recipe has no [[source]]"),
    "source without path": ("[[source]]\nrepeats = 2", "source[0] has no 'path'"),
    "unknown section": ("[imag]\n[[source]]\npath='p'", "unknown key 'imag' in the recipe; did you mean 'image'?"),
    "unknown key": ("[image]\nresolutoin=5\n[[source]]\npath='p'", "did you mean 'resolution'?"),
    **{name: (f"[image]\nresolution=512\n{name}=1000000000000\n[[source]]\npath='p'",
              f"image.{name} is 1000000000000, expected a number from 0 to 32768")
       for name in ("shortest", "longest", "min_side")},
    "string for number": ("[image]\nresolution='5'\n[[source]]\npath='p'",
                          "image.resolution is '5', expected a whole number"),
    "bool for number": ("[image]\nresolution=true\n[[source]]\npath='p'", "is True, expected a whole number"),
    "choice": ("[caption]\nmissing='skip'\n[[source]]\npath='p'", "caption.missing is 'skip', expected one of: stop"),
    "dtype": ("[model]\ndtype='bf16'\n[[source]]\npath='p'", "model.dtype is 'bf16', expected one of: bfloat16"),
    "family": ("[model]\nfamily='sd2'\n[[source]]\npath='p'",
               f"model.family is 'sd2', expected one of: {', '.join(FAMILIES)}; did you mean 'sd21'? (prep models "
               "describes them)"),
    "range": ("[validation]\nfraction=1.5\n[[source]]\npath='p'", "validation.fraction is 1.5, expected a number from"),
    "alpha": ("[image]\nalpha='purple'\n[[source]]\npath='p'",
              "image.alpha is 'purple', expected #rrggbb, white, black, gray, grey, keep, reject"),
    "mask": ("[mask]\nfrom='nowhere'\n[[source]]\npath='p'", "mask.from is"),
    "role": ("[[source]]\npath='p'\nrole='test'", "source[0].role is 'test', expected one of: train"),
    "not TOML": ("[image", "is not TOML"),
    "too deep": ("a = " + "[" * 3000 + "]" * 3000, "is not TOML: maximum recursion depth"),
    "too many digits": ("a = " + "9" * 5000, "is not TOML: Exceeds the limit"),
    "no float": (f"[[source]]\npath='p'\nweight=1{'0' * 400}", "source[0].weight is 10000"),
    "NUL in a path": ("[[source]]\npath='p'\ntable=\"a\\u0000b\"",
                      "source[0].table is 'a\\x00b', expected a path without NUL"),
    "NUL in a source": ("[[source]]\npath=\"p\\u0000\"", "source[0].path is 'p\\x00', expected a path"),
    "NUL in prompts": ("prompts.file=\"\\u0000\"\n[[source]]\npath='p'", "prompts.file is '\\x00', expected a path"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(recipe, text, message):
    with pytest.raises(ConfigError) as error:
        recipe(text)
    assert message in error.value.message and error.value.exit_code == 3


@pytest.mark.parametrize(("key", "value", "said"), [
    ("image.buckets", "foo", "--buckets: image.buckets is 'foo', expected one of: "),
    ("image.resolution", 0, "--resolution: image.resolution is 0, expected "),
    ("image.crop", "left", "--crop: image.crop is 'left', expected "),
    ("image.flip", "yes", "--flip: image.flip is 'yes', expected "),
    ("model.dtype", "bf16", "--dtype: model.dtype is 'bf16', expected "),
    ("model.posterior", "x", "--posterior: model.posterior is 'x', expected "),
    ("caption.missing", "skip", "--missing-caption: caption.missing is 'skip', expected "),
    ("mask", "nowhere", "--mask: mask.from is 'nowhere', expected "),
    ("validation", 2.0, "--validation: validation.fraction is 2.0, expected ")])
def test_a_wrong_value_of_an_option_names_the_option(recipe, key, value, said):
    with pytest.raises(ConfigError) as error:
        recipe("[[source]]\npath='p'", **{key: value})
    assert error.value.message.startswith(said) and error.value.exit_code == 3


def test_a_wrong_value_in_a_file_names_the_file_beside_options(recipe):
    for text in ("[image]\ncrop='left'", "[image]\nresolution='5'"):
        with pytest.raises(ConfigError, match=r"\.toml: image\.(crop|resolution) is "):
            recipe(f"{text}\n[[source]]\npath='p'", **{"image.resolution": 512})


def test_a_source_that_is_not_there(tmp_path):
    (tmp_path / "file.jpg").touch()
    for path in ("nothing", "file.jpg", "nothing.toml"):
        with pytest.raises(PathError) as error:
            load_recipe(tmp_path / path, choices={})
        assert error.value.exit_code == 5 and path in error.value.message


@pytest.mark.parametrize("alpha", ["white", "grey", "#0a1B2c", "keep", "reject"])
def test_colors_below_transparency(recipe, alpha):
    assert recipe("[[source]]\npath='p'", **{"image.alpha": alpha}).image.alpha == alpha


def test_an_option_that_is_no_color_shows_before_any_picture_is_read(prep, photos, tiny_model, tmp_path):
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "--alpha", "purple")
    assert result.code == 3 and "image.alpha is 'purple', expected #rrggbb" in result.err
    assert not (tmp_path / "cache").exists()


def test_a_step_that_no_latent_grid_has(prep, photos):
    result = prep("bucket", photos, "--step", 20, "--resolution", 100)
    assert result.code == 3 and "image.step is 20, expected a multiple of 8" in result.err


def test_the_recipes_in_manifests_are_read():
    for path in sorted((Path(__file__).parents[2] / "manifests").glob("dataset*.toml")):
        assert load_recipe(path, choices={"mask": "none"}).sources


def test_a_list_of_sizes(recipe):
    found = recipe("[image]\nbuckets = 'list'\nsizes = ['512x512', '384x640']\n[[source]]\npath = 'photos'")
    assert found.image.sizes == ("512x512", "384x640")
    given = recipe("[[source]]\npath = 'photos'", **{"image.buckets": "list", "image.sizes": ("512x512", "64x64")})
    assert given.options == ("--buckets", "list", "--sizes", "512x512,64x64")


@pytest.mark.parametrize(
    ("image", "says"),
    [("sizes = ['512x512']", "image.buckets is 'step' and image.sizes has 1 sizes, expected sizes with 'list'"),
     ("buckets = 'list'", "image.buckets is 'list' and image.sizes has 0 sizes"),
     ("buckets = 'list'\nsizes = ['512']",
      "image.sizes has '512', expected a width and a height in pixels, like 1024x768"),
     ("buckets = 'list'\nsizes = [512]", "image.sizes[0] is 512, expected a string")],
)  # fmt: skip
def test_lists_of_sizes_that_are_none(recipe, image, says):
    with pytest.raises(ConfigError) as caught:
        recipe(f"[image]\n{image}\n[[source]]\npath = 'photos'")
    assert says in str(caught.value)


def test_the_step_is_the_familys_unless_the_recipe_says_one(prep, photos, tiny_model, monkeypatch):
    """A family that takes sides of 16 gets buckets between those of 64."""
    fine = replace(FAMILIES["sd15"], step=16)
    monkeypatch.setattr("prep.dataset.bucketing.FAMILIES", {"sd15": fine})
    assert {rules_of(load_recipe(photos, choices={"model.path": str(tiny_model)}))[0].step} == {16}
    assert rules_of(load_recipe(photos, choices={"model.family": "sd15"}))[0].step == 16
    assert rules_of(load_recipe(photos, choices={"model.path": str(tiny_model), "image.step": 32}))[0].step == 32
    assert rules_of(load_recipe(photos, choices={"model.path": "somebody/some-model"}))[0].step == 64
    (photos.parent / "other").mkdir()
    (photos.parent / "other/model_index.json").write_text('{"_class_name": "AnotherPipeline"}')
    assert rules_of(load_recipe(photos, choices={"model.path": str(photos.parent / "other")}))[0].step == 64
    assert rules_of(load_recipe(photos, choices={}))[0].step == 64
    for module in ("prep.dataset.ingest", "prep.encode.resolve"):
        monkeypatch.setattr(f"{module}.ingest", lambda *_, **__: pytest.fail("all pictures are read before it is said"))
    for done in (prep("bucket", photos, "--resolution", 32),
                 prep("encode", photos, "--resolution", 8, "--model", tiny_model, "--cache", "cache")):
        assert done.code == 3 and ", expected at least the step, " in done.err


TWO = "[[source]]\npath = 'a/cats'\n[[source]]\npath = 'b/dogs'\nenabled = false\n[[source]]\npath = 'b/cats'\n"


@pytest.fixture
def two(tmp_path):
    (tmp_path / "dataset.toml").write_text(TWO)
    for name in ("a/cats", "b/dogs", "b/cats"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "dataset.toml"


def used(recipe):
    return ["/".join(one.path.parts[-2:]) for one in recipe.sources]


@pytest.mark.parametrize(("named", "wanted"), [
    (None, ["a/cats", "b/cats"]), (("dogs",), ["b/dogs"]), (("b/cats", "a/cats/"), ["a/cats", "b/cats"]),
    (("dogs", "a/cats"), ["a/cats", "b/dogs"])])
def test_sources_are_switched_off_in_the_recipe_and_chosen_by_name(two, named, wanted):
    recipe = load_recipe(two, choices={"sources": named})
    assert used(recipe) == wanted and len(recipe.unused) == 3 - len(wanted)
    usual = wanted == ["a/cats", "b/cats"]
    assert recipe.options == (() if usual else ("--sources", ",".join(named or ())))


@pytest.mark.parametrize(("named", "says"), [
    (("cats",), "--sources: sources is 'cats', which names 2 of them, expected one of: a/cats, b/dogs, b/cats"),
    (("birds",), "--sources: sources is 'birds', which names none of them, expected one of: a/cats")])
def test_a_name_of_no_source_or_of_several_is_refused(two, named, says):
    with pytest.raises(ConfigError) as error:
        load_recipe(two, choices={"sources": named})
    assert says in error.value.message


def test_a_recipe_needs_a_source_that_is_used(two):
    two.write_text("[[source]]\npath = 'a/cats'\nenabled = false\n")
    with pytest.raises(ConfigError, match=r"no \[\[source\]\] is used: each has enabled = false"):
        load_recipe(two, choices={})


def test_edits_of_a_source_stay_its_own_when_others_are_switched_off(two, tmp_path):
    (tmp_path / "edits" / "dogs").mkdir(parents=True)
    for name in ("a/cats", "b/dogs", "b/cats"):
        draw(tmp_path / name / "1.png", (64, 64), seed=1)
    (tmp_path / "edits" / "dogs" / "1.txt").write_text("a dog")
    captions = {}
    for named in (("dogs",), ("a/cats",)):
        recipe = load_recipe(two, choices={"sources": named, "edits": tmp_path / "edits"})
        (captions[named],) = list(walk_recipe(recipe))  # one item, and no finding on an edit without a picture
    assert captions["dogs",].caption.path.name == "1.txt" and captions["a/cats",].caption is None


@pytest.mark.parametrize(("text", "wanted"), [
    ("", None), ("[cache]\npath = '../shared cache'\n", "../shared cache"), ("[cache]\npath = 's3://b/c'\n", "s3://b/c")])
def test_a_recipe_says_where_its_cache_is(tmp_path, text, wanted):
    (tmp_path / "photos").mkdir()
    (tmp_path / "dataset.toml").write_text(f"[[source]]\npath = 'photos'\n{text}")
    cache = load_recipe(tmp_path / "dataset.toml", choices={}).cache
    assert cache == (wanted and place_below(tmp_path, wanted))
