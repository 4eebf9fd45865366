"""`image.alpha = "keep"`: a VAE that takes opacity is given it, in rows, keys, prompts, and what it decodes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from model_files import change_json
from pictures import draw
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.api import open_manifest, picture
from prep.dataset.bucketing import require_alpha, rules_of
from prep.errors import ConfigError, ModelError
from prep.manifest.document import read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.latents import latent_facts
from prep.recipe.load import load_recipe

RECIPE = """[model]
path = "model"
dtype = "float32"
compute = "float32"
[image]
resolution = 64
step = 32
{image}
[references]
resolution = 64
missing = "none"
[[source]]
path = "photos"
references = ["before"]
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model, an opaque and two transparent pictures, of which one is opaque everywhere and one has a transparent
    reference; and prompts."""
    root = tmp_path_factory.mktemp("alpha")
    tiny_pipelines.save("qwenimage21", root / "model")
    for number in range(3):
        draw(root / "photos" / f"{number}.png", (96, 80), seed=number, alpha=number == 1)
        (root / "photos" / f"{number}.txt").write_text(f"edit {number}")
    with Image.open(root / "photos/2.png") as opaque:
        opaque.convert("RGBA").save(root / "photos/2.png")
    draw(root / "before" / "2.png", (64, 96), seed=9, alpha=True)
    (root / "prompts.txt").write_text("red\nmake it red --ref before/2.png\n")
    return root


def encode(prep, root, image, name="m", *options):
    (root / f"{name}.toml").write_text(RECIPE.format(image=image))
    result = prep("encode", root / f"{name}.toml", "--cache", root / "cache", "-o", root / f"{name}.json", "--device",
                  "cpu", "--prompts", root / "prompts.txt", "--json", *options)
    assert result.code == 0, result.err
    return result.json


def test_only_rows_of_transparent_pictures_are_others(prep, whole):
    """Texts see references over white, as the pipeline does; a picture without a channel of opacity keeps its key."""
    assert encode(prep, whole, 'alpha = "white"')["encoded"] == {"latent": 4, "mask": 0, "text": 7}
    assert encode(prep, whole, 'alpha = "keep"')["encoded"] == {"latent": 3, "mask": 0, "text": 0}
    manifest = read_manifest(whole / "m.json")
    assert manifest.document["latents"]["alpha"] == manifest.alpha == "keep"
    assert encode(prep, whole, "", "other", "--alpha", "keep")["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert prep("verify", whole / "m.json").code == 0


@torch.no_grad()
def test_latents_are_what_the_vae_makes_of_four_channels(prep, whole):
    encode(prep, whole, 'alpha = "keep"')
    dataset, pipeline = open_manifest(whole / "m.json"), tiny_pipelines.load(whole / "model")
    numbers = {dataset.name(number): number for number in range(len(dataset))}
    shown = [(dataset.latent(number), picture(dataset, number, alpha="keep")) for number in numbers.values()]
    number = numbers["2.png"]
    shown.append((dataset.references(number)[0], picture(dataset, number, reference=0, alpha="keep")))
    for row, pixels in shown:
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        wanted = pipeline.vae.encode(image[:, :, None]).latent_dist.mean[0, :, 0].numpy()
        assert np.allclose(row["latent"], wanted, atol=1e-5) and pixels.shape[2] == 4
    with Image.open(whole / "before/2.png") as reference:  # as the pipeline does
        height, width = image.shape[2:]
        assert torch.allclose(image, pipeline.image_processor.preprocess(reference, width=width, height=height))
    assert [bool((pixels[..., 3] < 255).any()) for _, pixels in shown] == [
        *(name == "1.png" for name in numbers), True]


def test_prompts_keep_what_the_manifest_keeps(prep, whole):
    encode(prep, whole, 'alpha = "keep"')
    draw(whole / "more.png", (64, 80), seed=5, alpha=True)
    (whole / "more.txt").write_text("make it red --ref more.png\n")
    result = prep("prompts", whole / "more.txt", "--manifest", whole / "m.json", "--device", "cpu", "--json")
    assert result.code == 0, result.err
    assert result.json["encoded"] == 3  # the reference, and beside it the prompt and its negative
    encode(prep, whole, 'alpha = "keep"', "m", "--prompts", whole / "more.txt")
    assert prep("verify", whole / "m.json").code == 0


def test_a_transparent_reference_of_a_prompt_is_an_error_where_transparency_is_refused(prep, whole):
    """Also where a sample with it is left out, with a finding: a prompt is never lost in silence."""
    (whole / "words.txt").write_text("red\n")
    encode(prep, whole, 'alpha = "reject"', "r", "--prompts", whole / "words.txt")
    assert {finding.path for finding in open_manifest(whole / "r.json").findings if finding.code == "has-alpha"} == {
        "1.png", "2.png"}
    refused = [prep("prompts", whole / "prompts.txt", "--manifest", whole / "r.json", "--device", "cpu"),
               prep("encode", whole / "r.toml", "--cache", whole / "cache", "-o", whole / "r.json", "--device", "cpu",
                    "--prompts", whole / "prompts.txt")]
    for result in refused:
        assert result.code == 3 and result.err.startswith(
            'error: the prompt in line 2 names the reference before/2.png: has transparency, and [image] alpha is '
            '"reject"\nhint: ')


@pytest.mark.parametrize("name", FAMILIES)
def test_a_vae_without_opacity_is_one_clear_error(name, tmp_path):
    family = FAMILIES[name]
    (tmp_path / "photos").mkdir()
    recipe = load_recipe(tmp_path / "photos", choices={"model.family": name, "image.alpha": "keep"})
    if family.keeps_alpha:
        require_alpha(recipe, family)
        assert family.inpainting is None, "a fourth channel says what is cut out, too"
        return
    with pytest.raises(ConfigError) as caught:
        rules_of(recipe)
    assert caught.value.message == f"image.alpha is 'keep', but the VAE of family '{name}' takes no transparency"
    assert caught.value.hint.startswith("families whose VAE does: qwenimage21; ")


@pytest.mark.parametrize("command", [("bucket",), ("scan",), ("encode", "--cache", "cache", "-o", "m.json")],
                         ids=lambda command: command[0])
def test_commands_refuse_it_before_they_read_pictures(command, prep, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/0.png").write_bytes(b"no picture")
    (tmp_path / "d.toml").write_text(f"[model]\npath = {str(tiny_model)!r}\n[image]\nalpha = 'keep'\n"
                                     "[[source]]\npath = 'photos'\n")
    result = prep(command[0], "d.toml", *command[1:])
    assert result.code == 3 and "but the VAE of family 'sd15' takes no transparency" in result.err


def test_another_vae_in_the_model_is_refused(whole, tmp_path):
    model = shutil.copytree(whole / "model", tmp_path / "model")
    change_json(model / "vae/config.json", in_channels=3)
    with pytest.raises(ModelError, match="takes pictures of 3 channels, expected 4, of which one is their opacity"):
        latent_facts(model, FAMILIES["qwenimage21"])
