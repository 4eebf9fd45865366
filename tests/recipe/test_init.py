"""prep init: looks at pictures, or at another tool's file, and writes a recipe that prep encode takes as it is."""

from __future__ import annotations

import json
import shutil
import tomllib

import pytest
from pictures import draw, draw_captioned, draw_mask
from tarred import member, tar_of

from prep.captions.options import CaptionOptions
from prep.fs import atomic
from prep.recipe.convert import draft
from prep.recipe.schema import Source


def test_a_source_that_cannot_be_read_says_why(prep, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar" * 200)
    result = prep("init", tmp_path / "a.tar", "-o", tmp_path / "r.toml")
    assert result.code == 5 and not (tmp_path / "r.toml").exists()
    assert f"source {tmp_path / 'a.tar'} has no pictures that can be read: a.tar: the tar cannot be read" in result.err
    assert f"hint: prep scan {tmp_path / 'a.tar'} lists what is wrong" in result.err


def test_encode_takes_it_as_it_is(written, photos, prep, tiny_model, folder):
    recipe = written(photos, "--model", tiny_model)
    assert recipe.mask == "sidecar" and recipe.image.resolution <= 96
    assert (folder / recipe.model.path).resolve() == tiny_model.resolve()
    result = prep("encode", "dataset.toml", "--cache", "cache", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    assert result.json["encoded"]["latent"] == 8 and result.json["rejected"] == []
    assert not list(photos.parent.glob("photos/*.toml")) and not list(folder.glob(".*")), "nothing is left behind"


def test_resolution_is_what_most_pictures_reach_and_the_model_too(written, tmp_path, tiny_model):
    for number, side in enumerate([400, 800, 800, 800, 800, 900]):
        draw(tmp_path / f"photos/{number}.png", (side, side), seed=number)
    assert written(tmp_path / "photos").image.resolution == 768
    assert "# pictures are 400x400 to 900x900, median 800x800; 1 of 6 have a smaller area than 768x768" in written.text
    recipe = written(tmp_path / "photos", "--force", "--model", tiny_model)
    assert recipe.image.resolution == 512 and "(trained at 512)" in written.text
    (tmp_path / "photos/0.png").unlink()
    written(tmp_path / "photos", "--force")
    assert "# pictures are 800x800 to 900x900, median 800x800; none has a smaller area than 768x768\n" in written.text


def test_small_pictures_get_finer_steps_and_tiny_ones_are_told(written, tmp_path):
    for number, size in enumerate([(100, 100), (100, 100), (300, 12)]):
        draw(tmp_path / f"photos/{number}.png", size, seed=number)
    image = written(tmp_path / "photos").image
    assert (image.resolution, image.step) == (64, 16)
    assert "# pictures skipped because a side is below 16: 1" in written.text


def test_captions_that_are_missing(written, tmp_path):
    draw_captioned(tmp_path / "photos", 4)
    assert written(tmp_path / "photos").caption.missing == "stop" and "# captions: 4 .txt" in written.text
    (tmp_path / "photos/0.txt").unlink()
    (tmp_path / "photos/1.txt").write_text("\n")
    assert written(tmp_path / "photos", "--force").caption.missing == "reject"
    assert "# 2 of 4 pictures have no caption, or an empty one, and are skipped" in written.text
    draw_captioned(tmp_path / "bare", 3, captions=False)
    assert written(tmp_path / "bare", "--force").caption.missing == "empty" and "names say little" in written.text
    draw(tmp_path / "spoken/red_round_ball.png", (300, 300), seed=1)
    assert written(tmp_path / "spoken", "--force").caption.missing == "filename"


@pytest.mark.parametrize(("caption", "says"), [
    ("one\ntwo", "# captions with several lines: 1 (each line is a caption;"),
    ("a {red|blue} ball", "# captions with {a|b}: 1 (wildcards = true"),
    ("girl, red hair, hat, smile", "# captions that look like tags: 1 (shuffle = true, keep_tokens = 1"),
    ("ohwx ||| a, b", "# captions with |||: 1 (with shuffle = true"),
    ("a [trigger] dog", '# captions with [trigger]: 1 (trigger = "WORD"')])
def test_what_captions_could_become_is_said(written, tmp_path, caption, says):
    draw_captioned(tmp_path / "photos", 2)
    (tmp_path / "photos/0.txt").write_text(caption)
    recipe = written(tmp_path / "photos")
    assert says in written.text and recipe.caption == CaptionOptions()
    assert sum(line.startswith("# captions ") for line in written.text.splitlines()) == 1


def test_kohyas_directories(written, tmp_path):
    draw_captioned(tmp_path / "train/10_ohwx dog", 2)
    draw_captioned(tmp_path / "train/1_[a] cat", 1, captions=False)
    draw_captioned(tmp_path / "train/0_never", 1)
    draw_captioned(tmp_path / "train/99999_much", 1)
    draw_captioned(tmp_path / "train/others", 3)
    recipe = written(tmp_path / "train")
    named = {one.path.name: (one.repeats, recipe.caption_of(place).constant, one.exclude)
             for place, one in enumerate(recipe.sources)}
    rest = ("0_never/**", "10_ohwx dog/**", "1_[[]a] cat/**", "99999_much/**")
    assert named == {"10_ohwx dog": (10, "ohwx dog", ()), "1_[a] cat": (1, "[a] cat", ()),
                     "99999_much": (10000, "much", ()), "train": (1, "", rest)}
    assert "# 0_never is skipped: it has 0 repeats" in written.text
    assert "99999 repeats are above the limit of 10000" in written.text
    assert "# 3 pictures in no such directory" in written.text


def test_kohyas_directories_are_each_shown_once_per_repeat(written, tmp_path, prep):
    draw_captioned(tmp_path / "train/3_dog", 2, captions=False)
    draw_captioned(tmp_path / "train/1_[a] cat", 1)
    draw_captioned(tmp_path / "train/others", 1)
    written(tmp_path / "train")
    result = prep("bucket", "dataset.toml", "--batch-size", 1, "--json")
    assert result.code == 0 and result.json["steps_per_epoch"] == 3 * 2 + 1 + 1, result.err
    told = " ".join((tmp_path / "here/dataset.toml").read_text().replace("\n#", "").split())
    assert ("2 of 4 pictures have no caption, or an empty one; in a directory named N_class they get the class as "
            "caption; elsewhere they are skipped") in told


def test_a_table_beside_the_pictures_is_named(written, tmp_path):
    draw_captioned(tmp_path / "photos", 3, captions=False)
    rows = [{"file_name": f"{number}.png", "caption": "x"} for number in range(3)]
    (tmp_path / "photos/captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "photos/other.json").write_text('{"nothing": {"caption": "x"}}')
    recipe = written(tmp_path / "photos")
    assert recipe.sources == (Source(path=tmp_path / "here/../photos",
                                     table=tmp_path / "here/../photos/captions.jsonl"),)
    assert recipe.caption.missing == "stop" and "# captions: 3 table" in written.text


def test_a_table_and_kohyas_directories(written, tmp_path):
    draw_captioned(tmp_path / "photos/2_x", 1, captions=False)
    (tmp_path / "photos/metadata.jsonl").write_text('{"file_name": "2_x/0.png", "text": "a cat"}')
    recipe = written(tmp_path / "photos")
    assert len(recipe.sources) == 1 and "since a table names pictures relative to this path" in written.text


def test_transparency_can_be_kept_where_the_vae_takes_it(prep, tmp_path):
    pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")
    import tiny_pipelines

    tiny_pipelines.save("qwenimage21", tmp_path / "model")
    draw(tmp_path / "photos/3.png", (300, 300), seed=3, alpha=True)
    result = prep("init", tmp_path / "photos", "--model", tmp_path / "model", "-o", tmp_path / "d.toml")
    assert result.code == 0, result.err
    assert '"keep" gives it to the VAE, and "reject" skips' in " ".join(
        (tmp_path / "d.toml").read_text().replace("#", "").split())


def test_masks_transparency_and_what_cannot_be_read(written, tmp_path):
    draw_captioned(tmp_path / "photos", 2)
    (tmp_path / "photos/2.png").write_bytes(b"no picture")
    draw(tmp_path / "photos/3.png", (300, 300), seed=3, alpha=True)
    assert written(tmp_path / "photos").mask == "auto"
    assert '# "alpha" would train only the opaque parts' in written.text
    assert "# Files that cannot be read as pictures: 1." in written.text and 'alpha = "white"' in written.text
    draw_mask(tmp_path / "photos/0-masklabel.png", (300, 300))
    assert written(tmp_path / "photos", "--force").mask == "sidecar"
    assert "# 1 of 4 pictures have a mask" in written.text


@pytest.mark.parametrize("name", ["masks", "photos-masks"])
def test_masks_in_a_directory_beside(written, tmp_path, name):
    draw_captioned(tmp_path / "photos/sub", 2)
    draw(tmp_path / "mask/other.png", (300, 300), seed=1)  # no picture of that name
    draw(tmp_path / f"{name}/sub/1.png", (300, 300), seed=1)
    recipe = written(tmp_path / "photos")
    assert recipe.mask.resolve() == tmp_path / name and "# 1 of 2 pictures have a mask" in written.text
    assert written(tmp_path / name, "--force").mask == "auto", "masks have none of their own"


def test_nothing_that_can_be_read(written, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/0.png").write_bytes(b"no picture")
    assert written(tmp_path / "photos").image.resolution == 512
    assert "# no picture could be read, so these are the defaults" in written.text


def test_tars(written, tmp_path):
    png = draw(tmp_path / "x.png", (256, 256), seed=0).read_bytes()
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tar_of([member("a.png", png), member("a.txt", b"a cat")]))
    recipe = written(f"{tmp_path}/{{0..1}}.tar")
    assert "2 pictures" in written.text and str(recipe.sources[0].path).endswith("{0..1}.tar")


def test_few_of_many_are_opened(written, tmp_path, monkeypatch):
    from prep.recipe import sampled

    draw_captioned(tmp_path / "photos", 7)
    monkeypatch.setattr(sampled, "MOST_OPENED", 3)
    written(tmp_path / "photos", "--json")
    assert written.result.json["seen"]["opened"] == 3
    assert "read from 3 of them, evenly spread" in written.text


def test_validation_grows_with_the_data(written, tmp_path):
    draw_captioned(tmp_path / "photos", 19, size=(64, 64))
    assert written(tmp_path / "photos").validation == 0.0
    draw_captioned(tmp_path / "photos", 20, size=(64, 64))
    assert written(tmp_path / "photos", "--force").validation == 0.1
    assert "# about 2 of 20 pictures, held out for validation" in written.text


@pytest.mark.parametrize(("pictures", "held_out"), [(19, 0), (20, 2), (200, 10), (1280, 64), (4000, 64), (200_000, 64),
                                                    (3_000_000, 63)])
def test_no_more_is_held_out_than_a_validation_looks_at(pictures, held_out):
    from fractions import Fraction

    from prep.recipe.suggest import MOST_HELD_OUT, _fraction
    from prep.training.schema import Validation

    assert round(Fraction(str(_fraction(pictures))) * pictures) == pytest.approx(held_out, abs=1)
    assert Validation().most == MOST_HELD_OUT


def test_json_says_what_was_seen(written, tmp_path):
    draw_captioned(tmp_path / "2_cat", 2)
    written(tmp_path / "2_cat", "--json")
    found = written.result.json
    assert (found["format"], found["version"], found["sources"]) == ("latentry/init", 1, 1)
    assert found["seen"]["captions"] == {".txt": 2} and found["seen"]["sizes"]["median"] == "300x300"


# ---- another tool's file ---------------------------------------------------------------------------------------------


def test_another_tools_file(written, folder, prep, tmp_path):
    draw_captioned(tmp_path / "photos", 2)
    (tmp_path / "kohya.toml").write_text("""
        [general]
        color_aug = true
        [[datasets]]
        resolution = 256
        enable_bucket = true
        [[datasets.subsets]]
        image_dir = "photos"
        num_repeats = 3
        resize_interpolation = "area"
        [[datasets.subsets]]
        image_dir = "photos"
        resize_interpolation = "area"
    """)
    recipe = written("--from", tmp_path / "kohya.toml")
    assert [one.path.resolve() for one in recipe.sources] == [tmp_path / "photos"] * 2
    assert written.result.err.splitlines() == [
        "note: general.color_aug = True: colors are never changed: no counterpart",
        "note: datasets[0].subsets[0].resize_interpolation = 'area': pictures are resized by Lanczos (and 1 more)"]
    source = written.text.partition("[[source]]")[2]
    assert source.startswith("\n# datasets[0].subsets[0].resize_interpolation = 'area'"), "each note at its place"
    assert prep("bucket", "dataset.toml", "--json").json["buckets"][0]["samples"] == 4
    result = prep("init", "--from", tmp_path / "kohya.toml", "-o", "b.toml", "--json", "--quiet")
    assert result.err == "" and [one["key"] for one in result.json["notes"]] == [
        "general.color_aug", "datasets[0].subsets[0].resize_interpolation",
        "datasets[0].subsets[1].resize_interpolation"]  # fmt: skip


@pytest.mark.parametrize(("tool", "document"), [
    ("kohya", {"datasets": [{"resolution": 256, "subsets": [{"image_dir": "photos", "num_repeats": 3}]}]}),
    ("onetrainer", [{"path": "photos", "balancing": 3.0, "image": {"enable_resolution_override": True,
                                                                   "resolution_override": "256"}}]),
    ("simpletuner", [{"id": "a", "instance_data_dir": "photos", "resolution": 256, "repeats": 2}])])
def test_the_same_pictures_from_each_tool(prep, folder, tool, document):
    draw_captioned(folder / "photos", 2)
    (folder / "theirs.json").write_text(json.dumps(document))
    result = prep("init", "--from", "theirs.json", "--json")
    assert result.code == 0 and result.json["from"] == tool, result.err
    bucket = prep("bucket", "dataset.toml", "--batch-size", 1, "--json")
    assert bucket.code == 0 and bucket.json["steps_per_epoch"] == 6, "three showings of each of two"


def test_names_are_spelled_out_where_they_are_told(prep, folder):
    draw_captioned(folder / "photos", 1)
    (folder / "theirs.json").write_text(json.dumps([{"path": "photos", "caf\x1b[2J\nrm -r": "\x1b]0;x\x07\u202e"}]))
    result = prep("init", "--from", "theirs.json")
    assert result.code == 0 and "caf\\x1b[2J\\nrm -r" in result.err
    assert not {"\x1b", "\x07", "\u202e"} & set(result.err + (folder / "dataset.toml").read_text())


def test_a_file_that_makes_no_recipe_of_ours(prep, folder, monkeypatch):
    monkeypatch.setattr(draft, "_OF_SOURCES", {})  # else the number would be replaced by the nearest valid one
    (folder / "c.json").write_text(json.dumps([{"path": ".", "balancing": 20000}]))
    result = prep("init", "--from", "c.json")
    assert result.code == 3 and list(folder.iterdir()) == [folder / "c.json"]
    assert result.err.splitlines()[-1].startswith(
        "error: c.json does not convert to a valid recipe: source[0].repeats is 20000, expected a number from 1 to "
        "10000")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "code", "says"), [
    ([], 2, "prep init needs a SOURCE or --from FILE, not both"),
    (["photos", "--from", "x.json"], 2, "prep init needs a SOURCE or --from FILE, not both"),
    (["--from", "x.json", "--model", "m"], 2, "--model needs a SOURCE"),
    (["old.toml"], 2, "SOURCE is old.toml, expected a directory of pictures or tars"),
    (["photos", "-o", "x.txt"], 5, "recipe x.txt has the wrong extension, expected NAME.toml"),
    (["photos", "-o", "old.toml"], 5, "recipe old.toml already exists"),
    (["photos", "-o", "other.toml", "--force"], 5, "other.toml exists and is no recipe, so it is not replaced"),
    (["nothing"], 5, "source nothing does not exist"),
    (["empty"], 5, "source empty has no pictures, expected .png"),
    (["tars"], 5, "hint: it has 1 tars: prep init 'tars/*.tar'"),
    (["photos", "--model", "a b"], 6, "is neither a directory nor a Hub id"),
])
def test_what_cannot_be(prep, folder, args, code, says):
    draw_captioned(folder / "photos", 1)
    (folder / "empty").mkdir()
    (folder / "tars").mkdir()
    (folder / "tars" / "a.tar").write_bytes(b"")
    before = {"old.toml": "[[source]]\npath = 'x'\n", "other.toml": "[tool]\nname = 'x'\n"}
    for name, text in before.items():
        (folder / name).write_text(text)
    result = prep("init", *args)
    assert result.code == code and says in result.err, result.err
    assert {path.name: path.read_text() for path in folder.glob("*.toml")} == before
    assert not list(folder.glob(".*"))


def test_a_recipe_is_replaced_whole_or_not_at_all(prep, folder, monkeypatch):
    draw_captioned(folder / "photos", 1)
    (folder / "dataset.toml").write_text("[[source]]\npath = 'x'\n")
    for primitive in ("write", "sync", "rename"):
        def broken(*args):
            raise OSError(28, "No space left on device", "dataset.toml")

        with monkeypatch.context() as patched:
            patched.setattr(atomic, primitive, broken)
            assert prep("init", "photos", "--force").code == 7
        assert (folder / "dataset.toml").read_text() == "[[source]]\npath = 'x'\n"
        assert sorted(path.name for path in folder.iterdir()) == ["dataset.toml", "photos"]
    assert prep("init", "photos", "--force").code == 0
    assert tomllib.loads((folder / "dataset.toml").read_text())["source"] == [{"path": "photos"}]


@pytest.mark.real_data
def test_the_real_photos(written, real_data, prep, folder):
    shutil.copytree(real_data / "photos", folder / "photos")
    recipe = written("photos")
    assert (recipe.image.resolution, recipe.validation, recipe.caption.missing) == (768, 0.1, "stop")
    shutil.copytree(real_data / "masks", folder / "masks")
    assert written("photos", "--force").mask == folder / "masks" and "# 24 of 63 pictures have a mask" in written.text
    assert "63 pictures" in written.text and "# captions: 63 .txt" in written.text
    result = prep("bucket", "dataset.toml", "--json")
    assert result.code == 0 and not result.json["left_out"], result.err


@pytest.mark.parametrize("place", ["prompts.txt", "sample_prompts.txt", "photos/prompts.txt"])
def test_a_prompt_file_is_found(prep, folder, place):
    draw_captioned(folder / "photos", 2)
    (folder / place).write_text("a red heart --n blurry\na blue star\n")
    result = prep("init", "photos")
    assert result.code == 0 and f"sample prompts of {folder / place}" in result.out
    assert tomllib.loads((folder / "dataset.toml").read_text())["prompts"] == {"file": place}


def test_what_is_no_prompt_file_is_not_taken_for_one(prep, folder):
    draw_captioned(folder / "photos", 2)
    (folder / "prompts.txt").write_text("a heart --w wide\n")  # a fault: no number
    (folder / "photos" / "prompts.txt").write_text("the caption of a picture")
    (folder / "photos" / "prompts.png").write_bytes((folder / "photos" / "0.png").read_bytes())
    assert prep("init", "photos").code == 0
    assert "prompts" not in tomllib.loads((folder / "dataset.toml").read_text())


def test_a_zip_is_unpacked_first(prep, tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK\3\4")
    for arguments in (("init", tmp_path / "data.zip"), ("scan", tmp_path / "data.zip"),
                      ("init", "--from", tmp_path / "data.zip")):
        told = prep(*arguments)
        assert told.code in (3, 5) and f"python -m zipfile -e {tmp_path}/data.zip data" in told.err, told
