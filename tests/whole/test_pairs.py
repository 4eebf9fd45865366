"""Pairs of pictures from directories to a slider: placed alike, left out by name, trained, shown, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from beside import scattered
from jsonschema import Draft202012Validator
from pictures import draw
from PIL import Image
from safetensors import safe_open

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from viewing import viewing_here, viewing_source

from prep import api
from prep.dataset.bucketing import least_step
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.manifest.consistency import cache_of, read_findings
from prep.manifest.document import read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import Conditions
from train.check import check
from train.config.load import parse
from train.models.denoiser import predict
from train.models.lora import at_weight
from train.objectives.loss import noised, target
from train.setup import RunRequest
from train.state import create_state, forward_backward

CPU = torch.device("cpu")
SCHEMA = Path(__file__).parents[2] / "manifests" / "manifest.schema.json"
RECIPE = """[model]
path = "model"
[image]
resolution = 64
step = 32
{image}
[references]
from = ["young"]
fit = "pair"
[[source]]
path = "old"
"""


def pairs_in(root, sizes, *, image="", recipe=RECIPE):
    """Pictures of `sizes` and the others of their pairs; of one without the second size there is none."""
    for number, (size, other) in enumerate(sizes):
        draw(root / f"old/{number}.png", size, seed=number).with_suffix(".txt").write_text(f"a person {number}")
        if other is not None:
            draw(root / f"young/{number}.png", other, seed=20 + number)
    (root / "d.toml").write_text(recipe.replace("{image}", image))
    return ("encode", root / "d.toml", "--cache", root / "cache", "-o", root / "m.json", "--device", "cpu")


def test_both_pictures_are_cropped_alike_and_others_left_out(tiny_model, prep, tmp_path):
    """Also mirrored, and of another size but the same shape. The rows of opposites are those of the pictures as
    samples, cropped so."""
    (tmp_path / "model").symlink_to(tiny_model)
    sizes = [((140, 70), (140, 70)), ((96, 96), (192, 192)), ((96, 96), (96, 64)), ((64, 64), None)]
    words = pairs_in(tmp_path, sizes, image='crop = "random"\nviews = 2\nflip = "both"')
    done = prep(*words, "--json")
    assert done.code == 0 and done.json["samples"]["train"] == 2, done.err
    index = open_index(manifest := read_manifest(tmp_path / "m.json"))
    assert index.paired and not index.referring
    assert index.manifest.shapes == tuple((size, (size,)) for size in ((64, 64), (96, 32)))
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(manifest.document)
    found = {each["path"]: (each["code"], each["detail"]) for each in read_findings(cache_of(manifest), manifest)}
    assert found["2.png"] == ("reference-size-mismatch", "it is 96x96, but the other picture of its pair, "
                              "young/2.png, 96x64")
    assert found["3.png"][0] == "missing-reference"
    samples, flips = index.samples, set()
    for sample in range(len(samples)):
        for view in range(*samples.view_offsets[sample:sample + 2].tolist()):
            (other,) = samples.references_of(sample, view)
            size = index.manifest.buckets[int(samples.bucket[sample])]
            assert samples.placement(view, size) == samples.reference_placement(other, size)
            flips.add(bool(samples.views["flip"][view]))
    assert flips == {True, False}
    assert prep("verify", tmp_path / "m.json").code == 0
    again = prep(*words, "--json")
    assert again.code == 0 and not any(again.json["encoded"].values())


def test_pictures_that_are_no_pairs(tiny_model, prep, tmp_path):
    """Each reason is named; the page that a hint names has them all."""
    (tmp_path / "model").symlink_to(tiny_model)
    words = pairs_in(tmp_path, [((64, 64), (64, 128)), ((64, 64), (96, 64))])
    refused = prep(*words)
    assert refused.code == 8 and "0.png, it is 64x64, but the other picture of its pair, young/0.png, " in refused.err
    assert "hint: prep view SOURCE shows the pictures left out, with the reason for each" in refused.err
    (tmp_path / "young/1.png").write_bytes((tmp_path / "old/1.png").read_bytes())
    same = "has the same bytes as the other picture of its pair, young/1.png, expected another picture"
    with viewing_source(tmp_path / "d.toml") as page:
        shown = page.get("/findings").text.replace("<wbr>", "")
        assert "but the other picture of its pair" in shown and same in shown
    (tmp_path / "d.toml").write_text(RECIPE.replace('from = ["young"]', "").replace("{image}", ""))
    assert "0.png, has 0 reference pictures, expected 1, the other one of its pair" in prep(*words).err


def test_pages_show_the_other_picture(tiny_model, prep, tmp_path):
    """Of what is encoded, and before."""
    (tmp_path / "model").symlink_to(tiny_model)
    assert prep(*pairs_in(tmp_path, [((64, 64), (64, 64))])).code == 0
    for viewing, shown in ((viewing_here, "m.json"), (viewing_source, "d.toml")):
        with viewing(tmp_path / shown) as page:
            assert "the other of its pair, 64x64 to 64x64" in page.get("/").text
            assert "The other picture of its pair, at weight -1" in page.get("/sample/0").text
    assert prep("inspect", tmp_path / "m.json", "--html", tmp_path / "m.html").code == 0
    assert "the other of its pair, 64x64 to 64x64" in (tmp_path / "m.html").read_text()


@pytest.mark.few("sd15-", "qwenimage_edit")
@pytest.mark.parametrize("family", [name for name in tiny_pipelines.FAMILIES if FAMILIES[name].inpainting is None],
                         ids=lambda name: f"{name}-")
def test_a_slider_of_any_family(prep, tmp_path, family):
    """Of A at weight 1 and of B at -1, in the loss; no picture is a condition, nor seen by the text encoder."""
    tiny_pipelines.save(family, tmp_path / "model")
    step = least_step(FAMILIES[family])
    size = (4 * step, 2 * step)
    words = pairs_in(tmp_path, [(size, size)] * 2, recipe=RECIPE.replace("32", str(step)).replace("64", str(3 * step)))
    assert prep(*words, "--dtype", "float32").code == 0 and prep("verify", tmp_path / "m.json").code == 0
    report = check(RunRequest(manifest=tmp_path / "m.json"), parse({"precision": "fp32", "lora": {"rank": 2}}, ""))
    assert report.setup is not None, report.faults
    setup, index = report.setup, report.setup.index
    assert np.diff(index.samples.text_offsets).tolist() == [1, 1]
    trainee = create_state(setup, CPU)
    scattered(trainee.denoiser.parameters, 3)
    denoiser = trainee.denoiser
    requests = draws.training(index, setup.plan, 0, 1, timesteps=denoiser.timesteps)
    with batches(Rows(index), requests, masked=False, pinned=False) as feed:
        batch = next(feed)
        losses = forward_backward(trainee, setup.config, batch)[1]
        conditions, level = Conditions(text=batch.text, sizes_B6=batch.sizes_B6), denoiser.levels[batch.timestep_B]
        each = []
        for latent, weight in ((batch.latent_BChw, 1.0), (batch.opposite_BChw, -1.0)):
            clean = trainee.latents.normalize(latent)
            with at_weight(denoiser.model, weight), torch.no_grad():
                said = predict(denoiser, noised(denoiser.prediction, clean, batch.noise_BChw, level), batch.timestep_B,
                               conditions)
            each.append(((said - target(denoiser.prediction, clean, batch.noise_BChw, level))**2).mean((1, 2, 3)))
    assert torch.allclose(losses, sum(each) / 2, rtol=1e-4) and not torch.allclose(*each, rtol=1e-4)


def test_a_run_and_what_it_is_shown_at(tiny_model, prep, train, tmp_path):
    """Through commands: three weights side by side, and what a check says."""
    (tmp_path / "model").symlink_to(tiny_model)
    assert prep(*pairs_in(tmp_path, [((64, 64), (64, 64))] * 2)).code == 0
    checked = train("check", tmp_path / "m.json", "--device", "cpu")
    said = " ".join((checked.out + checked.err).split())
    assert checked.code == 0 and "a slider is trained from 2 pairs of pictures: " in said
    assert train("run", tmp_path / "m.json", "-o", tmp_path / "run", "--device", "cpu", "--quiet", "--steps", 1,
                 "--set", "sample.every=0").code == 0
    assert train("sample", tmp_path / "run", "-o", tmp_path / "g.png", "--device", "cpu", "--quiet", "--steps", 2
                 ).code == 0
    with Image.open(tmp_path / "g.png") as grid:
        assert grid.width == 3 * 192
    assert "  at weight -1: " in train("replay", tmp_path / "run", "--step", 1).out
    assert train("report", tmp_path / "run").code == 0
    assert "the other of its pair, 64x64 to 64x64" in (tmp_path / "run/report.html").read_text()
    with safe_open(tmp_path / "run/lora.safetensors", "pt") as file:
        assert file.metadata()["latentry.slider"] == "pairs"
    assert "| Slider | of pairs of pictures" in (tmp_path / "run/README.md").read_text()


def test_pairs_for_other_programs(tiny_model, prep, tmp_path):
    """A batch of a stream has both pictures; no trainer is given one as a condition."""
    (tmp_path / "model").symlink_to(tiny_model)
    assert prep(*pairs_in(tmp_path, [((64, 64), (64, 64))] * 2, recipe=RECIPE.replace('"old"', '"old"\nrepeats = 2'))
                ).code == 0
    batch = next(iter(api.batches(tmp_path / "m.json", batch_size=2)))
    index = open_index(read_manifest(tmp_path / "m.json"))
    (one, *_), references = batch["names"], index.samples.references
    number = next(each for each in range(2) if index.samples.name(each) == one)
    place = index.ref(*(int(references[f"latent_{name}"][number]) for name in ("shard", "row")))
    latent = latents_of(index.manifest).normalize(Rows(index).latent(place))
    assert torch.equal(batch["opposites"][:1], latent) and batch["references"] == []
    refused = prep("export", tmp_path / "m.json", "--to", "ai-toolkit", "-o", tmp_path / "out")
    assert "the pictures are pairs for a slider, but ai-toolkit would take the others for conditions" in refused.err


def test_a_family_that_inpaints_makes_no_slider(prep, tmp_path):
    tiny_pipelines.save("sd15_inpaint", tmp_path / "model")
    words = pairs_in(tmp_path, [((64, 64), (64, 64))])
    refused = prep(*words, "--missing-mask", "draw")
    assert refused.code and ("references.fit is 'pair', which makes a slider of pairs of pictures, but family "
                             "'sd15_inpaint' learns to paint where masks are white") in refused.err
