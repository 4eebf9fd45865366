"""prep init over data sets as they come: kohya's projects, several sources, masks beside and inside."""

from __future__ import annotations

import pytest
from pictures import draw, draw_captioned
from tarred import member, tar_of

from prep.recipe.elsewhere import training_places
from prep.recipe.load import load_recipe
from prep.recipe.schema import SETTINGS
from prep.training import table as training
from prep.training.schema import Config


@pytest.fixture
def sources(written, folder):
    """`sources(*args)` runs prep init and gives role, repeats, mask and exclude of each source, by its path."""
    def go(*args):
        recipe = written(*args, "--force")
        return {one.path.resolve().relative_to(folder).as_posix():
                (one.role, one.repeats, at_mask(recipe, place, folder), one.exclude)
                for place, one in enumerate(recipe.sources)}

    return go


def at_mask(recipe, place, folder):
    mask = recipe.mask_of(place)
    return mask if isinstance(mask, str) else mask.resolve().relative_to(folder).as_posix()


@pytest.fixture
def project(folder):
    """What kohya's GUI makes: `img`, `reg`, `mask`, `model` and `log`."""
    draw_captioned(folder / "p/img/3_ohwx dog", 2)
    draw_captioned(folder / "p/img/1_ohwx cat", 1, captions=False)
    draw_captioned(folder / "p/reg/1_dog", 4, captions=False)
    draw_captioned(folder / "p/model/sample", 1)
    (folder / "p/log").mkdir()
    return folder / "p"


def test_a_project_of_kohyas(written, sources, project, prep):
    draw(project / "mask/0.png", (300, 300), seed=1)
    assert sources("p") == {
        "p/img/1_ohwx cat": ("train", 1, "p/mask", ()), "p/img/3_ohwx dog": ("train", 3, "p/mask", ()),
        "p/reg/1_dog": ("prior", 1, "auto", ())}, "names in reg are those of other pictures"
    assert "# Not read, though they hold pictures: model." in written.text
    assert "# regularization pictures: an epoch shows them as often as all training pictures" in written.text
    assert written.recipe.caption_of(2).constant == "dog" and written.recipe.validation == 0.0
    result = prep("bucket", "dataset.toml", "--batch-size", 1, "--json")
    assert result.code == 0 and result.json["steps_per_epoch"] == 2 * (2 * 3 + 1), result.err
    assert "note: the 4 regularization pictures are shown 7 times per epoch" in result.err


@pytest.mark.parametrize("place", ["mask/3_ohwx dog/0.png", "img/masks/3_ohwx dog/1.png", "img/3_ohwx dog/masks/1.png",
                                   "masks/3_ohwx dog/1.png"])
def test_masks_for_one_directory_of_a_project(written, sources, project, place):
    draw(project / place, (300, 300), seed=1)
    found = sources("p")
    assert found["p/img/3_ohwx dog"][2] == f"p/{place.rpartition('/')[0]}" and found["p/img/1_ohwx cat"][2] == "auto"
    assert set(found) == {"p/img/3_ohwx dog", "p/img/1_ohwx cat", "p/reg/1_dog"}, "masks are no pictures"
    assert found["p/img/3_ohwx dog"][3] == (("masks/**",) if "dog/masks" in place else ())
    assert "# 1 of 7 pictures have a mask" in written.text


def test_masks_inside_a_source(written, sources, folder, prep):
    draw_captioned(folder / "photos", 3)
    draw(folder / "photos/masks/1.png", (300, 300), seed=1)
    assert sources("photos") == {"photos": ("train", 1, "photos/masks", ("masks/**",))}
    assert "# 1 of 3 pictures have a mask" in written.text and "3 pictures." in written.text
    scanned = prep("scan", "dataset.toml", "--json").json
    assert scanned["pictures"] == 3 and not [one for one in scanned["findings"] if one["severity"] == "error"]


def test_masks_beside_directories_called_n_class(written, sources, folder):
    draw_captioned(folder / "photos/2_dog", 1)
    draw_captioned(folder / "photos", 1)
    draw(folder / "photos/masks/2_dog/0.png", (300, 300), seed=1)
    assert sources("photos") == {
        "photos/2_dog": ("train", 2, "photos/masks/2_dog", ()),
        "photos": ("train", 1, "auto", ("2_dog/**", "masks/2_dog/**"))}


def test_several_sources_and_tars(written, sources, folder, prep):
    draw_captioned(folder / "photos", 2)
    draw_captioned(folder / "reg", 3, captions=False)
    png = draw(folder / "x.png", (256, 256), seed=0).read_bytes()
    for number in range(2):
        (folder / f"{number}.tar").write_bytes(tar_of([member("a.png", png), member("a.txt", b"a cat")]))
    assert sources("photos", "0.tar", "reg", "1.tar") == {
        "photos": ("train", 1, "auto", ()), "0.tar": ("train", 1, "auto", ()), "reg": ("prior", 1, "auto", ()),
        "1.tar": ("train", 1, "auto", ())}
    assert "prep init from photos 0.tar reg 1.tar: 7 pictures" in written.text
    assert prep("bucket", "dataset.toml", "--json").json["buckets"]
    assert sources("reg") == {"reg": ("train", 1, "auto", ())}, "alone, it is a source like any other"


@pytest.mark.parametrize("args", [("reg", "mask"), ("reg", "reg")])
def test_sources_without_training_pictures(prep, folder, args):
    for name in ("reg", "mask"):
        draw_captioned(folder / name, 1)
    result = prep("init", *args)
    assert result.code == 5 and "have no training pictures" in result.err and not list(folder.glob("*.toml"))


@pytest.mark.parametrize("kind", ["bucket", "encode"])
def test_repeats_in_names_of_directories_come_from_a_recipe(prep, project, tiny_model, kind):
    more = ("--model", tiny_model, "--cache", "c", "-o", "m.json", "--dry-run") if kind == "encode" else ()
    args = (*more, "--resolution", 96, *(("--missing-caption", "empty") if kind == "encode" else ()))
    said = "note: '1_ohwx cat', '3_ohwx dog': repeats are not read from names of directories, only from a recipe"
    assert f"{said}; to write one, run prep init p/img" in prep(kind, "p/img", *args).err
    assert "note: 1_dog: repeats are not read" in prep(kind, "p/reg/1_dog", *args).err
    assert "repeats are not read" not in prep(kind, "p/model", *args).err
    assert prep("init", "p").code == 0
    assert "repeats are not read" not in prep(kind, "dataset.toml", *args).err


# ---- never over the file that is converted ---------------------------------------------------------------------------

KOHYA = '[[datasets]]\nresolution = 256\n[[datasets.subsets]]\nimage_dir = "photos"\n'


def test_the_file_that_is_converted_is_never_replaced(prep, folder):
    draw_captioned(folder / "photos", 1)
    for text in (KOHYA, f'{KOHYA}source = "x"\n'):
        (folder / "dataset.toml").write_text(text)
        for args in (("-o", "dataset.toml"), ("-o", folder / "dataset.toml", "--force")):
            result = prep("init", "--from", "dataset.toml", *args)
            assert result.code == 5 and "is the file to convert, which is never replaced" in result.err
            assert "hint: choose another name: -o recipe.toml" in result.err
        result = prep("init", "--from", "dataset.toml", "--force")
        assert result.code == 0 and "recipe.toml: 1 source" in result.out, result.err
        assert (folder / "dataset.toml").read_text() == text
        assert len(load_recipe(folder / "recipe.toml", choices={}).sources) == 1
    assert prep("init", "--from", "dataset.toml").code == 5, "recipe.toml is there now"


# ---- keys that belong elsewhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "says"), [
    ("[caption]\ncaption_dropout = 0.1", "'caption_dropout' in [caption]; it is a training setting: in train.toml "
     "it is caption_dropout"),
    ("[lora]\nrank = 4", "'lora' in the recipe; it is a training setting: in train.toml it is [lora]"),
    ("[image]\nmin_snr_gamma = 5\n[[source]]\npath = 'x'", "in [image]; it is a training setting: in train.toml it is "
     "[loss] min_snr"),
    ("[image]\nrslora = true\n[[source]]\npath = 'x'", "it is a training setting: in train.toml it is [lora] rslora"),
    ("[image]\nsize = 512\n[[source]]\npath = 'x'", "unknown key 'size' in [image]"),
    ("[image]\nflip_aug = true\n[[source]]\npath = 'x'", "'flip_aug' in [image]; here it is [image] flip = \"both\""),
    ("[[source]]\npath = 'x'\ncontrol_path = 'y'", "'control_path' in [source[0]]; here it is [[source]] references"),
    ("[[source]]\npath = 'x'\nnum_repeats = 3", "'num_repeats' in [source[0]]; here it is [[source]] repeats"),
    ("[[datasets]]\nresolution = 3", "prep init --from converts the file")])
def test_keys_that_belong_elsewhere(prep, folder, text, says):
    (folder / "r.toml").write_text(text)
    result = prep("bucket", "r.toml")
    assert result.code == 3 and says in result.err


def test_settings_of_training_are_those_of_the_trainer():
    for place in training_places().values():
        section, _, key = place.removeprefix("[").partition("]")
        record = getattr(Config(), section)
        assert not key.strip() or hasattr(record, key.strip()), place


def test_every_training_setting_has_one_place_unless_a_recipe_has_its_name():
    """A setting that is new is known here, too; a key that several tables or a recipe have says nothing."""
    ours = {part for name in SETTINGS for part in name.split(".")}
    for name in training.SETTINGS:
        table, _, key = name.rpartition(".")
        assert training_places().get(key, "") in ("", key, f"[{key}]", f"[{table}] {key}"), name
        assert (key in training_places()) == (key not in ours) or table, name
    assert [training_places()[key] for key in ("lr", "rank", "tf32", "timesteps")] == [
        "[optimizer] lr", "[lora] rank", "tf32", "[timesteps]"]
    assert not training_places().keys() & (ours | {"every", "name", "size"})


def edits(root, *references, count=3):
    """Captioned pictures in `main`, and as many in each of the directories."""
    draw_captioned(root / "main", count)
    for place in references:
        draw_captioned(root / place, count, captions=False)


@pytest.mark.parametrize("source, places", [
    ("a/main", tuple(f"control_{number}" for number in range(1, 11))), ("a", ("control_1", "control_2")),
    ("a/main", ("main_control",)), ("a/main", ("main/control_1", "main/control_2")), ("a", ("conditioning/main",)),
    ("a/main", ("references",))], ids=str)
def test_directories_of_references_are_found_and_explained(written, folder, prep, source, places):
    edits(folder / "a", *places)
    recipe = written(source)
    assert [one.path for one in recipe.sources] == [folder / "a/main"]
    assert [path.relative_to(folder / "a").as_posix() for path in recipe.references_of(0)] == list(places)
    assert "# conditions of the pictures, for edit training: 3 of 3 have one in each directory\n" in written.text
    assert "# captions: 3 .txt" in written.text, "references are no pictures without a caption"
    found = prep("scan", "dataset.toml", "--json").json
    assert (found["pictures"], found["samples"]) == (3, 3)
    assert not {one["code"] for one in found["findings"]} & {"missing-reference", "orphan-reference"}


def test_pictures_without_a_reference_are_counted_and_directories_of_others_are_none(written, folder, prep):
    edits(folder / "a", "control_1", "control_2", count=4)
    (folder / "a/control_1/3.png").unlink()
    for number in range(1, 4):
        (folder / f"a/control_2/{number}.png").unlink()
    draw_captioned(folder / "a/other", 1)
    recipe = written("a")
    assert [path.name for path in recipe.references_of(0)] == ["control_1"]
    assert '3 of 4 have one in each directory; the others are errors and not used: missing_reference = "none"' in (
        " ".join(written.text.replace("#", "").split()))
    assert "# Not read, though they hold pictures: other." in written.text
    assert prep("scan", "dataset.toml", "--json").json["samples"] == 3


def test_directories_called_n_class_have_their_own_references(written, folder):
    draw_captioned(folder / "img/3_cat", 2)
    draw_captioned(folder / "img/1_dog", 2)
    draw_captioned(folder / "img/control/3_cat", 2, captions=False)
    recipe = written("img")
    assert {one.path.name: one.references and [path.relative_to(folder).as_posix() for path in one.references]
            for one in recipe.sources} == {"1_dog": None, "3_cat": ["img/control/3_cat"]}


@pytest.mark.parametrize("way", ["table", "tar", "beside"])
def test_references_that_the_source_itself_has_are_said(written, folder, way):
    root = folder / "pairs"
    draw_captioned(root, 2)
    for number in range(2):
        draw(root / (f"before/{number}.png" if way == "table" else f"{number}.source.png"), (96, 96), seed=number)
    if way == "table":
        (root / "metadata.jsonl").write_text("\n".join(
            f'{{"file_name": "{number}.png", "control_path": "before/{number}.png"}}' for number in range(2)))
    (folder / "pairs.tar").write_bytes(tar_of([member(path.name, path.read_bytes()) for path in sorted(root.iterdir())
                                               if path.is_file()]))
    recipe = written("pairs.tar" if way == "tar" else "pairs")
    assert recipe.references_of(0) is None
    assert "# 2 of 2 pictures have references, conditions for edit training" in written.text
