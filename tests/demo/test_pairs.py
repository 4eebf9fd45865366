"""The demo of pairs: what it writes, and that its model learns from references what it cannot know without them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from runs import events

from prep.demo import write_demo
from prep.demo.drawing import RGB
from prep.demo.editor import CHANNELS, LIVE, write_editor
from prep.demo.pairs import AFTER, BEFORE, GROUNDS, SIZE, Pair, pairs, write_pairs
from prep.demo.shipped import SHIPPED
from prep.fs.place import Local
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.recipe.prompts import parse_prompts
from train import sample
from train.sampling.prompts import CurrentPrompts
from train.sampling.text import encode_prompts

CPU = torch.device("cpu")
HEARTS = [Pair(stem=f"{number}", shape="heart", color=color, ground=GROUNDS[number % 2], seed=500_000 + number)
          for number, color in enumerate(AFTER)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("editor") / "model"
    write_editor(out)
    return out


def test_a_pair_differs_in_the_color_of_its_shape_alone():
    drawn = [*pairs(60), *HEARTS]
    assert {(pair.shape, pair.color) for pair in pairs(60)} == set(product(
        ("circle", "square", "triangle", "star", "ring", "cross"), AFTER)), "every shape in every color"
    for pair in drawn:
        before, after, mask = pair.drawn()
        assert before.size == after.size == mask.size == SIZE
        one, other, inside = (np.asarray(each, int) for each in (before, after, mask))
        assert (one == other)[inside == 0].all()
        assert np.abs(one[inside == 255] - RGB[BEFORE]).max() <= 11
        assert np.abs(other[inside == 255] - RGB[pair.color]).max() <= 11


def test_every_picture_has_its_reference(tmp_path):
    write_pairs(tmp_path, count=12)
    names = [sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.png"))
             for name in ("before", "after")]
    assert names[0] == names[1] and len(names[0]) == 12


def test_the_vae_is_the_shipped_one_with_channels_that_nothing_reads(model):
    wide, narrow = (AutoencoderKL.from_pretrained(folder / "vae", low_cpu_mem_usage=False, torch_dtype=torch.float32)
                    for folder in (model, SHIPPED))
    pixels = torch.rand(1, 3, *SIZE) * 2 - 1
    with torch.no_grad():
        latent, wanted = wide.encode(pixels).latent_dist, narrow.encode(pixels).latent_dist
        assert latent.mean.shape[1] == CHANNELS and not latent.mean[:, LIVE:].any()
        assert torch.allclose(latent.mean[:, :LIVE], wanted.mean, atol=1e-5)
        assert torch.allclose(latent.std[:, :LIVE], wanted.std, atol=1e-5) and latent.std[:, LIVE:].max() < 1e-4
        noise = torch.randn_like(latent.mean)
        assert torch.allclose(wide.decode(noise).sample, narrow.decode(noise[:, :LIVE]).sample, atol=1e-4)


def test_the_same_seed_makes_the_same_model_which_names_no_directory(model, tmp_path):
    write_editor(tmp_path / "again")
    for path in (path for path in model.rglob("*") if path.is_file()):
        assert (tmp_path / "again" / path.relative_to(model)).read_bytes() == path.read_bytes(), path
        assert path.suffix != ".json" or str(SHIPPED).encode() not in path.read_bytes()


def encode(prep, root, name, *options):
    result = prep("encode", root / "dataset.toml", "--cache", root / "cache", "-o", root / f"{name}.json",
                  "--device", "cpu", "--quiet", *options)
    assert result.code == 0, result.err
    return root / f"{name}.json"


def run(train, manifest, *options):
    out = manifest.with_suffix("")
    result = train("run", manifest, "-o", out, "--device", "cpu", "--quiet", *options)
    assert result.code == 0, result.err
    return out


def latent_of(model, pair):
    """What `prep encode` makes of a pair's reference."""
    vae = AutoencoderKL.from_pretrained(model / "vae", low_cpu_mem_usage=False)
    pixels = torch.from_numpy(np.array(pair.drawn()[0])).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        return vae.encode(pixels).latent_dist.mean


@pytest.mark.slow
def test_the_trained_demo_colors_shapes_that_it_never_saw(prep, train, tmp_path, monkeypatch):
    """The error of its pictures of hearts, which were in no pair, with eight sampler steps, against drawn ones."""
    root = tmp_path / "demo"
    write_demo(root, pairs=True)
    trained, index = run(train, encode(prep, root, "pairs")), open_index(read_manifest(root / "pairs.json"))
    asked = list(parse_prompts("\n".join(pair.caption for pair in HEARTS)))
    prompts = encode_prompts(index, root / "model", asked, CPU)
    wanted, own = [pair.drawn() for pair in HEARTS], [(latent_of(root / "model", pair),) for pair in HEARTS]

    def made(shown):
        changed = tuple(replace(prompt, references=each) for prompt, each in zip(prompts, shown, strict=True))
        monkeypatch.setattr(sample, "_prompts", lambda *_: CurrentPrompts(prompts=changed))
        grid = sample.show(sample.SampleRequest(run=Local(trained), which=("after",)), CPU, tmp_path / "grid.png")
        return [picture[:, -SIZE[0]:].astype(float) for picture in grid.pictures]

    def error(pictures):
        return np.mean([np.abs(picture - np.asarray(after, float)).mean()
                        for picture, (_, after, _) in zip(pictures, wanted, strict=True)])

    colored = made(own)
    others = {"without": error(made([()] * len(own))), "shuffled": error(made([*own[1:], own[0]]))}
    print(f"mean error of 255: with references {error(colored):.1f}, {others}")
    assert error(colored) <= min(others.values()) / 2, others
    for picture, pair, (_, _, mask) in zip(colored, HEARTS, wanted, strict=True):
        color = np.median(picture[np.asarray(mask) == 255], axis=0)
        assert min(RGB, key=lambda name: np.abs(color - RGB[name]).sum()) == pair.color


@pytest.mark.slow
def test_references_teach_what_is_their_negative_and_shuffled_ones_do_not(prep, train, tmp_path):
    """The loss of pictures that were held out; through encode, loader and loop."""
    root, losses = tmp_path / "demo", {}
    write_demo(root, pairs=True)
    recipe = (root / "dataset.toml").read_text()
    after = sorted((root / "after").rglob("*.png"))
    for path in after:
        path.with_suffix(".txt").write_text("as it is\n")
    for name, shift in (("without", None), ("shuffled", 48), ("with", 0)):
        shutil.rmtree(root / "before")
        for number, path in enumerate(after):
            out = root / "before" / path.relative_to(root / "after")
            out.parent.mkdir(parents=True, exist_ok=True)
            ImageOps.invert(Image.open(after[(number + (shift or 0)) % len(after)])).save(out)
        (root / "dataset.toml").write_text(recipe.replace('references = ["before"]', "references = []")
                                           if shift is None else recipe)
        trained = run(train, encode(prep, root, name), "--steps", 200, "--set", "sample.every=0", "--set",
                      "validation.every=200")
        losses[name] = [event["loss"] for event in events(trained) if event["event"] == "validation"][-1]
    print(losses)
    assert losses["with"] < 0.8 * min(losses["without"], losses["shuffled"])
