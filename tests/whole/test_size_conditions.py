"""What SDXL's UNet is told of a picture in training is what diffusers' training script tells it, for each sample.

That script (examples/text_to_image/train_text_to_image_sdxl.py, preprocess_train) notes the size of the picture, scales
it, mirrors it, and only then crops: the corner that it notes is one of the mirrored picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image, ImageOps

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from train.check import check
from train.config.load import parse
from train.models.denoiser import load
from train.objectives.forward import forward
from train.setup import RunRequest

CPU = torch.device("cpu")
SIZES = [(300, 131), (131, 300), (200, 190), (97, 64)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache of SDXL: random crops, each also mirrored, of pictures in several shapes, one turned by its EXIF."""
    from prep.cli.console import run
    from prep.cli.main import app

    root = tmp_path_factory.mktemp("sizes")
    tiny_pipelines.save("sdxl", root / "model")
    for number, size in enumerate(SIZES):
        draw(root / "photos" / f"{number}.png", size, seed=number).with_suffix(".txt").write_text("a cat")
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn: the upright picture has 120 x 250 pixels
    with Image.open(draw(root / "drawn.png", (250, 120), seed=9)) as picture:
        picture.save(root / "photos" / "turned.jpg", exif=turned, quality=95)
    (root / "photos" / "turned.txt").write_text("a dog")
    words = ["encode", root / "photos", "--model", root / "model", "--cache", root / "cache", "-o", root / "m.json",
             "--resolution", 64, "--step", 32, "--crop", "random", "--views", 3, "--flip", "both", "--dtype", "float32",
             "--device", "cpu"]
    with pytest.raises(SystemExit) as ending:
        run(app, "prep", [str(word) for word in words])
    assert not ending.value.code
    return root / "m.json"


@pytest.fixture(scope="module")
def told(made) -> list[tuple[str, bool, list[int], torch.Tensor]]:
    """Of each sample of a few epochs: name, whether it is mirrored, time ids, and its latent as stored."""
    found = check(RunRequest(manifest=made), parse({"precision": "fp32", "batch_size": 2, "steps": 40}, "")).setup
    assert found is not None
    ours = load(found.model.path, found.config, found.prediction, CPU, adapt=False)
    seen: list[Any] = []
    ours.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    rows = Rows(found.index)
    requests = draws.training(found.index, found.plan, 0, 40, timesteps=ours.timesteps)
    result = []
    with batches(rows, requests, masked=False, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            forward(ours, batch, latents_of(found.manifest), found.config.loss)
            ids = seen.pop()["added_cond_kwargs"]["time_ids"]
            assert ids.shape == (len(batch.draws), 6) and ids.dtype is torch.float32
            result += [(found.index.samples.name(shot.sample), bool(found.index.samples.views["flip"][shot.view]),
                        ids[number].int().tolist(), batch.latent_BChw[number].clone())
                       for number, shot in enumerate(batch.draws)]
    return result


def upright(made: Path, name: str) -> Image.Image:
    with Image.open(made.parent / "photos" / name) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def as_diffusers_crops(picture: Image.Image, mirrored: bool, corner: tuple[int, int], target: tuple[int, int]) -> Any:
    """The pixels, from -1 to 1: scaled to cover the target, mirrored, then cropped at (top, left)."""
    (top, left), (height, width) = corner, target
    scale = max(width / picture.width, height / picture.height)
    scaled = picture.resize((max(width, round(picture.width * scale)), max(height, round(picture.height * scale))),
                            Image.Resampling.LANCZOS)
    shown = ImageOps.mirror(scaled) if mirrored else scaled
    pixels = np.asarray(shown.crop((left, top, left + width, top + height)), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1


def test_sizes_are_of_the_upright_picture_and_of_the_bucket(made, told):
    buckets = {tuple(size) for size in read_manifest(made).buckets}
    assert {name for name, *_ in told} == {"0.png", "1.png", "2.png", "3.png", "turned.jpg"} and len(buckets) > 2
    for name, _, (height, width, _, _, *target), _ in told:
        assert (width, height) == upright(made, name).size
        assert (target[1], target[0]) in buckets
    assert any(ids[:2] == [250, 120] for name, _, ids, _ in told if name == "turned.jpg")


def test_they_have_the_pipeline_s_order(told):
    pipeline = tiny_pipelines.build("sdxl")
    width = pipeline.text_encoder_2.config.projection_dim
    for _, _, ids, _ in told[:5]:
        original, corner, target = (tuple(ids[start:start + 2]) for start in (0, 2, 4))
        usual = pipeline._get_add_time_ids(original, corner, target, torch.float32, width)
        assert usual.int().tolist() == [ids]


def test_the_latent_is_of_the_crop_that_the_unet_is_told_of(made, told):
    vae = tiny_pipelines.load(made.parent / "model").vae
    seen = {(name, mirrored, tuple(ids)): latent for name, mirrored, ids, latent in told}
    assert {mirrored for _, mirrored, _ in seen} == {False, True}
    assert len({ids[2:4] for _, _, ids in seen}) > 10, "crops differ"

    def distance(name: str, mirrored: bool, corner: tuple[int, int], target: tuple[int, int], latent: Any) -> float:
        image = as_diffusers_crops(upright(made, name), mirrored, corner, target)
        with torch.no_grad():
            return float((vae.encode(image).latent_dist.mean[0] - latent).abs().mean())

    compared = 0
    for (name, mirrored, ids), latent in seen.items():
        top, left, height, width = ids[2:]
        near = distance(name, mirrored, (top, left), (height, width), latent)
        assert near < 0.01, (name, mirrored, ids)
        picture = upright(made, name)
        whole = round(picture.width * max(width / picture.width, height / picture.height))
        other = whole - width - left  # the corner in the picture that is not mirrored
        if mirrored and abs(other - left) > 4:
            compared += 1
            assert distance(name, mirrored, (top, other), (height, width), latent) > 5 * near
    assert compared > 3, "mirrored crops away from the middle"
