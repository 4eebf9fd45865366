"""Pictures: equal to the diffusers pipeline's own, keyed noise, and what `train sample` shows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
from PIL import Image

from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.models.denoiser.samplers import DIFFUSION, LIBRARIES
from prep.models.families.registry import FAMILIES
from prep.recipe.prompts import PromptSettings
from prep.training.schema import Sampling
from train.models.denoiser import load, quiet
from train.sampling.grid import beside, grid_png
from train.sampling.prompts import cached
from train.sampling.sampler import _whole, pictures

WHOLE_STEP = DDIMScheduler.step
CPU = torch.device("cpu")
QUICK = Sampling(steps=4, guidance=3.0, seed=1, size=(64, 48))


@pytest.fixture
def asked(make, setup_of):
    """A base model, its rows and prompts."""
    made = make()
    setup = setup_of(made)
    denoiser = load(setup.model.path, setup.config, setup.prediction, CPU, adapt=False)
    return made, setup, denoiser, Rows(setup.index), cached(setup.index)


def test_pictures_are_the_pipeline_s(asked, tiny_model, monkeypatch):
    """diffusers' own pipeline, given our text rows and our noise, makes the same pixels."""
    made, setup, denoiser, rows, prompts = asked
    ours = pictures(denoiser, rows, tiny_model, prompts, QUICK)
    quiet()
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, low_cpu_mem_usage=False, safety_checker=None)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    pipeline.vae.register_to_config(scaling_factor=0.5, shift_factor=0.125)  # the manifest's
    pipeline.set_progress_bar_config(disable=True)
    from train.sampling.sampler import _noise

    for prompt, picture in zip(prompts, ours, strict=True):
        positive, negative = (rows.text([row])["hidden"].float() for row in (prompt.positive, prompt.negative))
        latent = pipeline(prompt_embeds=positive, negative_prompt_embeds=negative, num_inference_steps=4,
                          guidance_scale=3.0, output_type="latent", height=48, width=64,
                          latents=torch.from_numpy(_noise(prompt.prompt, (4, 6, 8), 1))[None]).images
        with torch.no_grad():
            decoded = pipeline.vae.decode(latent / 0.5 + 0.125).sample[0]
        usual = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).numpy()
        assert np.abs(usual - picture).max() <= 1
    assert made.manifest.document["latents"]["shift_factor"] == "0.125" and setup.model.others == {}


def test_a_rescaled_schedule_is_sampled_from_its_last_timestep(make, setup_of, tiny_model, monkeypatch):
    """As Lin et al. 2024 say in 3.3 and 3.2: trailing timesteps of the schedule that was trained."""
    setup = setup_of(make(prediction="v_prediction"), zero_terminal_snr=True)
    denoiser = load(setup.model.path, setup.config, setup.prediction, CPU, adapt=False)
    seen = []
    monkeypatch.setattr(DDIMScheduler, "step",
                        lambda self, *args, **rest: seen.append(self) or WHOLE_STEP(self, *args, **rest))
    (picture, *_) = pictures(denoiser, Rows(setup.index), tiny_model, cached(setup.index), QUICK)
    assert seen[0].timesteps.tolist() == [999, 749, 499, 249] and picture.shape == (48, 64, 3)
    assert torch.allclose(seen[0].alphas_cumprod, denoiser.levels)


def test_sizes_are_those_that_the_denoiser_takes(asked):
    _, _, denoiser, _, _ = asked
    assert _whole(denoiser, (100, 47)) == (96, 40) and _whole(denoiser, (3, 8)) == (8, 8)
    sd3 = SimpleNamespace(family=FAMILIES["sd3"], model=SimpleNamespace(config={"pos_embed_max_size": 24}))
    assert _whole(sd3, (1000, 100)) == (384, 96)
    sd3.model.config["pos_embed_max_size"] = None
    assert _whole(sd3, (1000, 100)) == (992, 96)


def test_guidance_one_asks_once(asked, tiny_model):
    _, _, denoiser, rows, prompts = asked
    sizes = []
    denoiser.model.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    pictures(denoiser, rows, tiny_model, prompts[:1], Sampling(steps=2, guidance=1.0, size=(64, 64)))
    pictures(denoiser, rows, tiny_model, prompts[:1], Sampling(steps=2, guidance=2.0, size=(64, 64)))
    assert sizes == [1, 1, 2, 2]


def test_seed_and_prompt_decide_the_noise(asked, tiny_model):
    _, _, denoiser, rows, prompts = asked

    def one(number, seed):
        return pictures(denoiser, rows, tiny_model, prompts[number : number + 1],
                        Sampling(steps=2, seed=seed, size=(64, 64)))[0]

    assert np.array_equal(one(0, 1), one(0, 1))
    assert not np.array_equal(one(0, 1), one(0, 2)) and not np.array_equal(one(0, 1), one(1, 1))


def test_the_vae_is_loaded_to_decode_and_freed(asked, tiny_model):
    import gc

    _, _, denoiser, rows, prompts = asked
    def alive() -> set[int]:
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) is AutoencoderKL}

    before = alive()
    made = pictures(denoiser, rows, tiny_model, prompts, QUICK)
    assert made[0].shape == (48, 64, 3) and made[0].dtype == np.uint8
    assert alive() <= before


def test_the_usual_size_is_the_fullest_bucket_s(make):
    assert open_index(make(counts=(2, 5)).manifest).usual_size == (80, 48)


def test_the_usual_size_counts_samples_with_and_without_references(make):
    """Five of one size are more than four of the other, though no bucket has so many."""
    index = open_index(make(counts=(5, 4), references=((48, 32),)).manifest)
    assert sorted(map(len, index.training)) == [2, 2, 2, 3] and index.usual_size == (64, 64)


def test_a_grid_has_a_label_above_each_picture(tmp_path):
    red, blue = np.full((20, 100, 3), (255, 0, 0), np.uint8), np.full((20, 100, 3), (0, 0, 255), np.uint8)
    (tmp_path / "g.png").write_bytes(grid_png([red, blue, red], ["a long label of 火 words", "b", "c"], 2))
    grid = np.asarray(Image.open(tmp_path / "g.png"))
    assert grid.shape == (2 * 54, 400, 3)  # twice as large, so that the words can be read
    assert (grid[14:54, :200] == (255, 0, 0)).all() and (grid[14:54, 200:] == (0, 0, 255)).all()
    assert (grid[:14, :200] < 128).any() and (grid[68:, 200:] == 255).all()


def test_a_grid_has_room_for_pictures_of_several_sizes(tmp_path):
    wide, tall = np.full((8, 200, 3), 9, np.uint8), np.full((300, 16, 3), 9, np.uint8)
    (tmp_path / "g.png").write_bytes(grid_png([wide, tall], ["a", "b"], 2))
    grid = np.asarray(Image.open(tmp_path / "g.png"))
    assert grid.shape == (314, 400, 3)
    assert (grid[14:22, :200] == 9).all() and (grid[14:, 200:216] == 9).all() and (grid[22:, :200] == 255).all()


def test_a_grid_keeps_what_is_transparent(tmp_path):
    """Between labels that can be read; a grid that is opaque everywhere is as one of pictures without opacity."""
    opaque, clear = np.full((64, 200, 4), 255, np.uint8), np.full((64, 200, 4), (9, 8, 7, 100), np.uint8)
    (tmp_path / "g.png").write_bytes(grid_png([beside([opaque, clear], 64), opaque], ["a", "b"], 1))
    grid = np.asarray(Image.open(tmp_path / "g.png"))
    assert grid.shape == (156, 400, 4) and (grid[:14, :, 3] == 255).all()
    assert (grid[14:78, :200] == 255).all() and (grid[14:78, 200:] == (9, 8, 7, 100)).all()
    assert grid_png([opaque], ["a"], 1) == grid_png([opaque[..., :3]], ["a"], 1)


def test_a_prompt_s_own_settings_take_precedence(asked, tiny_model):
    _, _, denoiser, rows, prompts = asked

    def one(settings, **own):
        prompt = replace(prompts[0], settings=PromptSettings(**own))
        return pictures(denoiser, rows, tiny_model, [prompt], settings)[0]

    wanted = one(Sampling(steps=3, guidance=2.0, seed=5, size=(80, 64)))
    assert np.array_equal(one(QUICK, width=80, height=64, seed=5, steps=3, guidance=2.0), wanted)
    assert one(QUICK, width=80).shape == (48, 80, 3) and one(QUICK, height=80).shape == (80, 64, 3)
    usual = one(QUICK)
    for own in ({"seed": 2}, {"steps": 3}, {"guidance": 1.0}):
        assert not np.array_equal(one(QUICK, **own), usual), own


@pytest.mark.few("DDIM", "Euler", "Heun", "DEIS")
@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # of diffusers with NumPy 2
@pytest.mark.parametrize("sampler", DIFFUSION)
def test_every_sampler_makes_pictures_that_are_the_same_again(asked, tiny_model, sampler):
    """For the same seed, and torch's own generator is none of theirs."""
    pytest.importorskip(LIBRARIES.get(sampler, "torch"))
    _, _, denoiser, rows, prompts = asked
    before = torch.get_rng_state()
    usual, (one,), (other,) = (pictures(denoiser, rows, tiny_model, prompts[:1], replace(QUICK, sampler=named))
                               for named in (None, sampler, sampler))
    assert np.array_equal(one, other) and one.shape == usual[0].shape
    assert sampler == "DDIMScheduler" or not np.array_equal(one, usual[0])
    assert torch.equal(torch.get_rng_state(), before)
    (seeded,) = pictures(denoiser, rows, tiny_model, prompts[:1], replace(QUICK, sampler=sampler, seed=2**63 - 1))
    assert not np.array_equal(one, seeded)


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # of diffusers with NumPy 2
def test_a_sampler_that_draws_its_noise_says_nothing(asked, tiny_model, tmp_path):
    """torchsde warns where diffusers rounds the ends of its interval, as with the schedule of Stable Diffusion."""
    pytest.importorskip(LIBRARIES["DPMSolverSDEScheduler"])
    _, _, denoiser, rows, prompts = asked
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "beta_start": 0.00085, "beta_end": 0.012,
                                "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
                                "timestep_spacing": "linspace"}))
    (picture,) = pictures(denoiser, rows, model, prompts[:1], replace(QUICK, sampler="DPMSolverSDEScheduler", steps=25))
    assert picture.std() > 1
