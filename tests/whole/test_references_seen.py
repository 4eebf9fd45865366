"""References where people see and carry them: what every command says of a data set that was really encoded.

tests/whole/test_references.py tests what is encoded; tests/view/test_references.py the pages.
"""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pictures import draw
from PIL import Image
from viewing import viewing_here, viewing_source

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack the family")

import tiny_pipelines

from prep import api
from prep.batching.plan import step_plan
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.loader.index import open_index
from prep.manifest.document import read_manifest

SCHEMAS = Path(__file__).parents[2] / "manifests" / "schemas"
TARGETS = [(96, 64), (96, 64), (64, 96), (64, 96), (96, 64)]
RECIPE = """
[model]
path = "model"
dtype = "float32"
[image]
resolution = 80
step = 16
[references]
from = ["control 1", "control_2"]
missing = "none"
[validation]
fraction = 0.0
[[source]]
path = "photos"
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Pictures of which 0 and 2 have two references, 1 and 3 one, and 4 none; encoded by the first test."""
    root = tmp_path_factory.mktemp("edits")
    tiny_pipelines.save("flux2_klein", root / "model")
    for number, size in enumerate(TARGETS):
        draw(root / f"photos/{number}.png", size, seed=number).with_suffix(".txt").write_text(f"make it {number}")
    for number in range(4):
        draw(root / f"control 1/{number}.png", (80 + 16 * (number % 2), 70), seed=20 + number)
    for number in (0, 2):
        draw(root / f"control_2/{number}.jpg", (64, 128), seed=40)
    (root / "r.toml").write_text(RECIPE)
    return root


def encode(prep, root, *options, recipe="r.toml", to="m.json"):
    told = prep("encode", root / recipe, "--cache", root / "cache", "-o", root / to, "--device", "cpu", "--json",
                "--quiet", *options)
    assert told.code == 0, told.err
    return told.json


@pytest.fixture
def root(whole, prep, tmp_path):
    """A copy of these, encoded."""
    if not (whole / "m.json").exists():
        encode(prep, whole)
    shutil.copytree(whole, tmp_path / "edits")
    return tmp_path / "edits"


def fits(document, name):
    Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text())).validate(document)
    return document


@pytest.mark.slow
def test_the_preview_is_that_of_the_run(prep, root):
    index = open_index(read_manifest(root / "m.json"))
    told = fits(prep("bucket", root / "r.toml", "--batch-size", 2, "--underfill", "drop", "--seed", 7, "--json").json,
                "bucket")
    fits(prep("inspect", root / "m.json", "--json").json, "inspect")
    assert [((*one["size"],), *map(tuple, one.get("references", ()))) for one in told["buckets"]] == [
        (size, *references) for size, references in index.manifest.shapes]
    assert [one["showings"] for one in told["buckets"]] == index.counts == [1, 1, 1, 1, 1]
    plan = step_plan(index.counts, seed=7, batch_size=2, underfill="drop")
    assert told["steps_per_epoch"] == plan.steps_per_epoch == 0
    assert told["left_out"] == index.names(plan.left_out(0)) == [f"{number}.png" for number in range(5)]
    text = prep("bucket", root / "r.toml", "--batch-size", 2, "--underfill", "drop")
    assert text.code == 8 and "samples by bucket: 64x96+80x64+64x128: 1, 64x96+96x64: 1" in text.err, text.err
    assert "64x96+80x64+64x128 " in prep("inspect", root / "m.json").out
    assert "64x96+80x64+64x128" in text.out
    (root / "r.toml").write_text(RECIPE.replace('path = "model"\n', ""))
    text = prep("bucket", root / "r.toml")
    assert "note: 4 pictures with references, which count for nothing without a model" in text.err
    assert "+" not in text.out


def references_on(text):
    return [unescape(one.replace("<wbr>", "")) for one in re.findall(
        r'<span class="label">Reference \d</span><bdi>(.*?)</bdi>', text)]


NAMES = {"0.png": ["../control 1/0.png", "../control_2/0.jpg"], "1.png": ["../control 1/1.png"],
         "2.png": ["../control 1/2.png", "../control_2/2.jpg"], "3.png": ["../control 1/3.png"], "4.png": []}


def test_pages_and_texts_name_what_was_encoded(prep, root):
    told = prep("inspect", root / "m.json", "--sample", "0.png")
    assert "'../control 1/0.png'" in told.out and "scaled to 80x70, cropped to 80x64 at (0, 3)" in told.out
    assert prep("inspect", root / "m.json", "--html", root / "page.html").code == 0
    text = (root / "page.html").read_text()
    cards = text[text.index('id="cards"'):]
    assert sorted(references_on(cards)) == sorted(name for names in NAMES.values() for name in names)
    assert "not here" not in cards
    with viewing_here(root / "m.json") as after, viewing_source(root / "r.toml") as before:
        for running in (before, after):
            listed = running.get().text
            numbers = {name: int(number) for number, name in re.findall(
                r'/sample/(\d+)"><bdi>(\d\.(?:<wbr>)?png)</bdi>', listed)}
            for name, number in numbers.items():
                page = running.get(f"/sample/{number}").text
                assert all(unescape(one) in page.replace("<wbr>", "") for one in NAMES[name.replace("<wbr>", "")])
                for place, _ in enumerate(NAMES[name.replace("<wbr>", "")]):
                    assert running.get(f"/thumbnail/{number}/{place}").headers["content-type"] == "image/jpeg"
                    assert f"/picture/{number}/{place}" in page
            assert len(numbers) == 5 and len(references_on(listed)) == 6


def test_a_replay_says_which_references_were_shown(prep, train, root):
    done = train("run", root / "m.json", "-o", root / "run", "--device", "cpu", "--set", "reference_dropout=0.3",
                 "--set", "each_reference_dropout=0.4", "--set", "steps=4", "--set", "batch_size=5",
                 "--set", "micro_batch=1", "--set", "sample.every=0", "--set", "validation.every=0")
    assert done.code == 0, done.err
    shown = {True: 0, False: 0}
    for step in range(1, 5):
        for sample in fits(train("replay", root / "run", "--step", step, "--json").json, "replay")["samples"]:
            references = sample.get("references", [])
            assert [one["name"] for one in references] == NAMES[sample["name"]]
            assert all(Path(one["path"]).is_file() for one in references)
            for one in references:
                shown[one["shown"]] += 1
    assert min(shown.values()) > 3, shown
    text = "".join(train("replay", root / "run", "--step", step).out for step in range(1, 5))
    assert text.count("\n  reference ") == shown[True] and text.count("without its reference") == shown[False]
    worst = fits(train("worst", root / "run", "--json").json, "worst")["samples"]
    assert {one["name"]: [each["name"] for each in one.get("references", ())] for one in worst} == NAMES
    assert " + " in train("worst", root / "run").out
    assert train("report", root / "run").code == 0
    page = (root / "run" / "report.html").read_text()
    assert sorted(references_on(page)) == sorted(name for names in NAMES.values() for name in names)
    assert "not here" not in page


def test_the_library_has_them(root):
    dataset = api.open_manifest(root / "m.json")
    for number in range(len(dataset)):
        found = dataset.references(number)
        assert [one["name"] for one in found] == NAMES[dataset.name(number)]
        for place, one in enumerate(found):
            pixels = api.picture(dataset, number, reference=place)
            assert [*pixels.shape] == [one["bucket"][1], one["bucket"][0], 3]
            assert one["latent"].shape == (32, pixels.shape[0] // 8, pixels.shape[1] // 8)
            path = dataset.reference_path(number, place)
            assert digest_bytes(path.read_bytes()) == one["picture"]
            left, top = one["crop"]
            whole = np.asarray(Image.open(path).convert("RGB"))
            if path.suffix == ".png":
                assert (pixels == whole[top:top + pixels.shape[0], left:left + pixels.shape[1]]).all()
        with pytest.raises(IndexError, match=f"reference {len(found)} of sample {number}, which has {len(found)}"):
            api.picture(dataset, number, reference=len(found))
        assert [one["name"] for one in next(dataset.examples(number))["references"]] == NAMES[dataset.name(number)]
    (root / "control 1" / "3.png").unlink()
    number = next(number for number in range(5) if dataset.name(number) == "3.png")
    assert dataset.reference_path(number, 0) is None
    with pytest.raises(CacheError, match=r"the reference 0 of '3.png' is not in its source"):
        api.picture(dataset, number, reference=0)
    batch = next(iter(api.batches(root / "m.json", batch_size=1, seed=3, reference_dropout=1.0)))
    assert batch["references"] == []


@pytest.mark.slow
def test_a_folder_is_a_data_set_again(prep, root):
    assert prep("export", root / "m.json", "--to", "folder", "-o", root / "out").code == 0
    (root / "again.toml").write_text(RECIPE.replace('"photos"', '"out/train/1_photos"').replace(
        '"control 1", "control_2"', '"out/train/control_1/1_photos", "out/train/control_2/1_photos"'))
    told = encode(prep, root, recipe="again.toml", to="again.json")
    assert told["encoded"] == {"latent": 0, "mask": 0, "text": 0} and told["samples"]["train"] == 5
    compared = prep("diff", root / "m.json", root / "again.json", "--json").json
    assert compared["same"] is True, compared


@pytest.mark.slow
def test_parts_make_the_same_manifest(prep, root):
    shutil.rmtree(root / "cache")
    for part in ("0/2", "1/2"):
        told = prep("encode", root / "r.toml", "--cache", root / "cache", "-o", root / "p.json", "--device", "cpu",
                    "--quiet", "--part", part)
        assert told.code == 0, told.err
    told = prep("seal", root / "r.toml", "--cache", root / "cache", "-o", root / "p.json")
    assert told.code == 0, told.err
    assert prep("diff", root / "m.json", root / "p.json", "--exit-code").code in (0, 7)
    assert read_manifest(root / "p.json").document["tables"] == read_manifest(root / "m.json").document["tables"]
