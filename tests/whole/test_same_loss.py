"""The loss of a batch from the cache is the loss computed the usual way, from pictures and captions.

The usual way: Pillow, `AutoencoderKL.encode`, `encode_prompt`, `DDPMScheduler.add_noise`, `F.mse_loss`; with the noise
and timesteps of the batch. Here the whole road lies between the two: prep encode, shards, manifest, train's reader.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from prep.cache.store import Cache
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.manifest.samples import open_samples
from prep.manifest.tables import SAMPLES, read_table
from train.check import check
from train.config.load import parse
from train.objectives.forward import forward, sample_losses
from train.setup import RunRequest
from train.state import create_state


def usual_loss(pipeline, photos, samples, buckets, batch) -> tuple[float, float]:
    """Plain and masked loss of the batch's samples, computed from their files."""
    latents, texts, masks = [], [], []
    for shot in batch.draws:
        sample = samples[shot.sample]
        view, (width, height) = sample["views"][0], buckets[sample["bucket"]]
        box = (view["crop_x"], view["crop_y"], view["crop_x"] + width, view["crop_y"] + height)
        scaled = (view["scaled_width"], view["scaled_height"])
        picture = Image.open(photos / sample["name"]).convert("RGB").resize(scaled, Image.Resampling.LANCZOS).crop(box)
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        latents.append(pipeline.vae.encode(pixels).latent_dist.mean * pipeline.vae.config.scaling_factor)
        texts.append(pipeline.encode_prompt(sample["texts"][0]["caption"], "cpu", 1, False)[0])
        file = (photos / sample["name"]).with_name(f"{sample['name'][:-4]}-masklabel.png")
        mask = Image.open(file).crop(box) if file.exists() else Image.new("L", (width, height), 255)
        cells = np.asarray(mask, float).reshape(height // 8, 8, width // 8, 8).mean((1, 3)) / 255
        masks.append(torch.from_numpy(cells)[None, None].float())
    latent, text, mask = torch.cat(latents), torch.cat(texts), torch.cat(masks)
    noised = pipeline.scheduler.add_noise(latent, batch.noise_BChw, batch.timestep_B)
    error = (pipeline.unet(noised, batch.timestep_B, text).sample - batch.noise_BChw) ** 2
    return float(error.mean()), float((error * (0.1 + 0.9 * mask)).mean())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_loss_of_a_batch_from_the_cache(prep, photos, tiny_model, tmp_path, dtype, tolerance):
    (photos / "5.png").unlink()  # its transparency is another test's matter
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16, "--dtype", dtype, "--compute", "float32", "--mask", "sidecar",
                  "--device", "cpu")
    assert result.code == 0, result.err
    config = parse({"precision": "fp32", "batch_size": 2, "loss": {"masked": True}}, "test")
    setup = check(RunRequest(manifest=tmp_path / "m.json"), config).setup
    assert setup is not None
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, safety_checker=None, low_cpu_mem_usage=False)
    table = read_table(Cache(root=tmp_path / "cache"), setup.manifest.document["tables"]["samples"], SAMPLES)
    samples, trainee = table.to_pylist(), create_state(setup, torch.device("cpu"))
    assert len(open_samples(table)) == 7
    requests = draws.training(setup.index, setup.plan, 0, setup.plan.steps_per_epoch, timesteps=1000)
    seen = 0
    with batches(Rows(setup.index), requests, masked=True, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            found = forward(trainee.denoiser, batch, latents_of(setup.manifest), config.loss)
            ours = sample_losses(found, config.loss)
            plain, masked = usual_loss(pipeline, photos, samples, setup.manifest.buckets, batch)
            assert float(ours.mean()) == pytest.approx(masked, rel=tolerance, abs=tolerance)
            whole = float(((found.predicted_BChw - found.target_BChw) ** 2).mean())
            assert whole == pytest.approx(plain, rel=tolerance, abs=tolerance)
            seen += len(batch.draws)
    assert seen == 7
