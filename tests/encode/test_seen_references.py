"""References that the text encoder sees: in rows and keys of text, in steps, prompts and checks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from counted_steps import counted
from pictures import draw
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.cache.store import open_cache
from prep.errors import ConfigError
from prep.loader.batches import batches
from prep.loader.draws import NO_TEXT, Dropout, require_shown, training
from prep.loader.index import open_index
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest, write_manifest
from prep.manifest.tables import SAMPLES_WITH_REFERENCES, read_table, write_table
from prep.models.family import ATTENTION_MASK
from prep.models.text.places import positions_by_place
from prep.recipe.prompts import parse_prompt
from train.check import check
from train.check.data import planned_by
from train.config.load import parse
from train.memory.room import room_of
from train.memory.step import count
from train.models.denoiser import load
from train.objectives.forward import forward, sample_losses
from train.sampling.prompts import look_up, of_captions
from train.sampling.text import encode_prompts
from train.setup import RunRequest

CPU = torch.device("cpu")

RECIPE = """[model]
path = "model"
dtype = "float32"
compute = "float32"
[image]
resolution = 64
step = 32
[references]
resolution = 64
missing = "none"
[[source]]
path = "photos"
references = ["before", "style"]
"""
SIZES = {"before": [(96, 64), (80, 64), (96, 64)], "style": [(64, 90), (64, 64), (96, 64)]}
PICTURES = 4  # the last one has no references


def recipe_in(root, text=RECIPE):
    (root / "d.toml").write_text(text)
    return ["encode", root / "d.toml", "--cache", root / "cache", "-o", root / "m.json", "--device", "cpu"]


@pytest.fixture(scope="module", params=["qwenimage_edit", "qwenimage21"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def whole(family, tmp_path_factory):
    """A model, pictures with references, and their cache."""
    from prep.cli.console import run
    from prep.cli.main import app

    root = tmp_path_factory.mktemp("seen")
    tiny_pipelines.save(family, root / "model")
    for number in range(PICTURES):
        draw(root / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text(f"edit {number}")
    for place, sizes in SIZES.items():
        for number, size in enumerate(sizes):
            draw(root / place / f"{number}.png", size, seed=10 * len(place) + number)
    with pytest.raises(SystemExit) as ending:
        run(app, "prep", [str(word) for word in recipe_in(root)])
    assert not ending.value.code
    return root


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "data")


def shown_with(root, name):
    """A sample's references, as the pipeline scales them for its text encoder."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions

    found = [Image.open(root / place / name).convert("RGB") for place in SIZES if (root / place / name).exists()]
    edit = "EditPlus" in (root / "model" / "model_index.json").read_text()
    area = CONDITION_IMAGE_SIZE if edit else 64**2  # that of the recipe, which Qwen-Image-2.1 has for both encoders
    return [each.resize(calculate_dimensions(area, each.width / each.height)[:2], Image.Resampling.LANCZOS)
            for each in found]


def row_of(pipeline, words, shown):
    """What the pipeline returns, without the pictures themselves if it says where they are."""
    with torch.no_grad(), positions_by_place(pipeline):
        hidden, _, *places = pipeline.encode_prompt(words, image=shown or None, device="cpu")
    return hidden[0][~places[0][0]] if places else hidden[0]


def test_rows_are_of_words_and_references_also_where_captions_are_dropped(whole):
    index, pipeline = open_index(read_manifest(whole / "m.json")), tiny_pipelines.load(whole / "model")
    rows, plan = Rows(index), planned_by(parse({"batch_size": 1}, ""), index.counts)
    seen = set()
    for dropped in (0.0, 1.0):
        for request in training(index, plan, 0, PICTURES, dropout=Dropout(caption=dropped), timesteps=1000):
            places = rows.places(request.draws, masked=False)
            for draw_, place in zip(request.draws, places.texts, strict=True):
                name = index.samples.name(draw_.sample)
                row, words = rows.text([place]), " " if dropped else f"edit {name[0]}"
                wanted = row_of(pipeline, words, shown_with(whole, name))
                length = int(row[ATTENTION_MASK].sum())
                assert length == len(wanted) and torch.allclose(row["hidden"][0, :length], wanted, atol=1e-5), name
                assert (draw_.text == NO_TEXT) == bool(dropped)
                seen.add((name, dropped))
    assert len(seen) == 2 * PICTURES


@pytest.mark.few("qwenimage_edit")
def test_a_changed_reference_encodes_the_texts_that_it_is_seen_with(copy, prep):
    again = prep(*recipe_in(copy), "--json")
    assert json.loads(again.out)["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    draw(copy / "style" / "1.png", (64, 64), seed=99)
    changed = prep(*recipe_in(copy), "--json")
    assert json.loads(changed.out)["encoded"] == {"latent": 1, "mask": 0, "text": 2}, "of no prompt, too"
    (copy / "photos" / "0.txt").write_text("other words")
    assert json.loads(prep(*recipe_in(copy), "--json").out)["encoded"] == {"latent": 0, "mask": 0, "text": 1}
    assert not prep("verify", copy / "m.json").code


@pytest.mark.slow
def test_another_size_encodes_the_texts_again_where_the_encoder_has_that_of_the_vae(copy, prep, family):
    changed = RECIPE.replace("[references]\nresolution = 64", "[references]\nresolution = 96")
    encoded = json.loads(prep(*recipe_in(copy, changed), "--json").out)["encoded"]
    assert encoded == {"latent": 6, "mask": 0, "text": 6 if family == "qwenimage21" else 0}
    assert not prep("verify", copy / "m.json").code


def test_references_cropped_as_each_view_are_refused_where_the_encoder_sees_them_so(copy, prep, family):
    for number in range(PICTURES):
        draw(copy / "photos" / f"{number}.png", (96, 80), seed=number)
    text = RECIPE.replace("step = 32", 'step = 32\nbuckets = "list"\nsizes = ["64x64"]\ncrop = "random"\nviews = 3')
    result = prep(*recipe_in(copy, text.replace("[references]", '[references]\nfit = "bucket"')), "--dry-run")
    assert (result.code == 3) == (family == "qwenimage21"), result.err
    if result.code:
        assert "references.fit is 'bucket', which crops the references of" in result.err
    assert not prep(*recipe_in(copy, text), "--dry-run").code


def test_a_batch_has_the_losses_of_its_samples_alone(whole):
    """Of none to two references, in several sizes."""
    found = check(RunRequest(manifest=whole / "m.json"), parse({"precision": "fp32", "batch_size": PICTURES}, "")).setup
    denoiser = load(found.model.path, found.config, found.prediction, CPU, family=found.family.name)
    losses = []
    for most in (None, 1):
        requests = training(found.index, found.plan, 0, 2, timesteps=denoiser.timesteps, most=most)
        lost, passes = {}, 0
        with batches(Rows(found.index), requests, masked=False, pinned=False) as feed, torch.no_grad():
            for batch in feed:
                made = sample_losses(forward(denoiser, batch, latents_of(found.manifest), found.config.loss),
                                     found.config.loss)
                lost |= {shot.noise: float(loss) for shot, loss in zip(batch.draws, made, strict=True)}
                passes += 1
        losses.append((lost, passes))
    (together, fewer), (alone, more) = losses
    assert fewer < more and together == pytest.approx(alone, rel=1e-4) and len(set(alone.values())) == len(alone)


@pytest.mark.few("qwenimage_edit")
def test_the_memory_of_a_step_with_references_is_known_before_weights_are_loaded(whole):
    found = check(RunRequest(manifest=whole / "m.json"), parse({"precision": "fp32", "batch_size": 2}, "")).setup
    (wanted, _), given = counted(found), count(found, room_of("cpu")).parts
    assert sum(given.values()) == pytest.approx(sum(wanted.values()), rel=0.05)


@pytest.mark.parametrize("change", [
    lambda record: record["references"][0].update(picture=bytes(32)),
    lambda record: record["texts"][0].update(caption="never encoded"),
    lambda record: record["texts"].reverse(),
    lambda record: record["references"].reverse()], ids=["picture", "caption", "no prompt", "order"])
def test_verify_knows_the_keys_of_texts_with_references(copy, prep, change):
    """A table that says other pictures, or other words, is not believed."""
    cache, document = open_cache(copy / "cache", create=False), json.loads((copy / "m.json").read_bytes())
    records = read_table(cache, document["tables"]["samples"], SAMPLES_WITH_REFERENCES).to_pylist()
    change(next(record for record in records if record["name"] == "1.png"))
    document["tables"]["samples"] = write_table(cache, pa.Table.from_pylist(records, SAMPLES_WITH_REFERENCES))
    write_manifest(copy / "m.json", {name: value for name, value in document.items() if name != "self"})
    result = prep("verify", copy / "m.json")
    assert result.code and "1.png" in result.out + result.err


@pytest.mark.slow
def test_prompts_with_references_are_found_by_what_is_seen(copy, prep, family):
    words = "make it blue"
    (copy / "p.txt").write_text(f"{words} --ref before/0.png\n{words}\n{words} --n bad --ref before/1.png --ref "
                                "before/0.png\n")
    result = prep("prompts", copy / "p.txt", "--manifest", copy / "m.json", "--device", "cpu")
    assert not result.code, result.err
    assert not prep("verify", copy / "m.json").code
    index = open_index(read_manifest(copy / "m.json"))
    prompts = [replace(parse_prompt(line, ""), line=number) for number, line in enumerate(
        (copy / "p.txt").read_text().splitlines(), 1)]
    found = look_up(index, prompts, copy / "p.txt")
    assert not found.warnings and not found.lacking
    places = [(each.positive, each.negative) for each in found.prompts]
    assert len({place for pair in places for place in pair}) == 6, "each has its own rows, also of no prompt"
    pipeline = tiny_pipelines.load(copy / "model")
    wanted = row_of(pipeline, " ", shown_with(copy, "0.png")[:1])
    row = Rows(index).text([places[0][1]])
    assert torch.allclose(row["hidden"][0, :len(wanted)], wanted, atol=1e-5)
    typed = encode_prompts(index, copy / "model", [parse_prompt(f"{words} --ref {copy / 'before' / '0.png'}", "")], CPU)
    assert typed[0].positive == found.prompts[0].positive and typed[0].negative == found.prompts[0].negative
    with pytest.raises(ConfigError, match=f"that the text encoder of family '{family}' sees"):
        encode_prompts(index, copy / "model", [parse_prompt(f"new --ref {copy / 'before' / '0.png'}", "")], CPU)
    unseen = look_up(index, [replace(parse_prompt("make it blue --ref before/2.png", ""), line=1)], copy / "p.txt")
    assert not unseen.prompts and not unseen.lacking and "has no text row yet" in unseen.warnings[0]


def test_captions_as_prompts_have_the_row_of_no_prompt_of_their_sample(whole):
    index = open_index(read_manifest(whole / "m.json"))
    prompts, _ = of_captions(index)
    assert len({prompt.negative for prompt in prompts}) == len(prompts) == PICTURES
    assert all(prompt.prompt.startswith("edit ") for prompt in prompts)


def test_the_row_of_no_prompt_is_no_caption(whole, prep, tmp_path):
    index = open_index(read_manifest(whole / "m.json"))
    captions = [index.samples.captions(sample) for sample in range(len(index.samples))]
    assert sorted(captions) == [[f"edit {number}"] for number in range(PICTURES)]
    result = prep("export", whole / "m.json", "--to", "folder", "-o", tmp_path / "out")
    assert not result.code, result.err
    assert {path.read_text() for path in (tmp_path / "out").rglob("*.txt")} == {
        f"edit {number}\n" for number in range(PICTURES)}


def test_what_would_not_fit_the_rows_is_refused(whole, copy, prep):
    index = open_index(read_manifest(whole / "m.json"))
    for name in ("references", "each_reference"):
        with pytest.raises(ConfigError, match="its text encoder sees the references"):
            require_shown(index, Dropout(**{name: 0.1}))
    require_shown(index, Dropout(caption=0.5))
    flipped = RECIPE.replace("step = 32", 'step = 32\nflip = "both"')
    result = prep(*recipe_in(copy, flipped))
    assert result.code == 3 and "image.flip is 'both', expected 'none'" in result.err


def test_a_damaged_reference_costs_its_sample_alone(copy, prep):
    path = copy / "before" / "2.png"
    path.write_bytes(path.read_bytes()[:-40])
    result = prep(*recipe_in(copy))
    assert "2.png" in result.out + result.err
    index = open_index(read_manifest(copy / "m.json"))
    assert sorted(map(index.samples.name, range(len(index.samples)))) == ["0.png", "1.png", "3.png"]
