"""ai-toolkit's training settings: what train.toml comes of them, against a reading of their meaning made here."""

from __future__ import annotations

import json
import re
from math import ceil

import pytest

from prep.recipe.prompts import parse_prompts
from train.config.load import load_config
from train.models.targets import targeted

UI = {  # what its page writes for a new job, shortened
    "network": {"type": "lora", "linear": 32, "linear_alpha": 16, "conv": 16, "conv_alpha": 16, "lokr_full_rank": True,
                "lokr_factor": -1, "network_kwargs": {"ignore_if_contains": []}},
    "save": {"dtype": "bf16", "save_every": 250, "max_step_saves_to_keep": 4, "push_to_hub": False},
    "train": {"batch_size": 2, "steps": 3000, "gradient_accumulation": 4, "train_unet": True,
              "gradient_checkpointing": True, "noise_scheduler": "flowmatch", "optimizer": "adamw8bit",
              "timestep_type": "sigmoid", "content_or_style": "balanced", "optimizer_params": {"weight_decay": "1e-4"},
              "lr": "1e-4", "ema_config": {"use_ema": True, "ema_decay": 0.99}, "dtype": "bf16",
              "diff_output_preservation": False, "diff_output_preservation_multiplier": 1.0,
              "diff_output_preservation_class": "person", "switch_boundary_every": 1, "loss_type": "mse"},
    "model": {"name_or_path": "owner/name", "arch": "flux", "quantize": True, "qtype": "qfloat8"},
    "sample": {"sampler": "flowmatch", "sample_every": 250, "width": 1024, "height": 1030, "neg": "", "seed": 42,
               "walk_seed": True, "guidance_scale": 4, "sample_steps": 20, "samples": [{"prompt": "a [trigger]"}]},
}


@pytest.fixture
def convert_job(convert_json, tmp_path):
    """`convert_job(section={…})`: what a job of `UI` comes to with changed sections, and its checked train.toml."""
    def go(**sections):
        process = {"type": "ui_trainer", "trigger_word": "ohwx", "datasets": [{"folder_path": "photos"}]}
        for name in {**UI, **sections}:
            own = sections.get(name, {})
            process[name] = {**UI.get(name, {}), **own} if isinstance(own, dict) else own
        found = convert_json({"job": "extension", "config": {"name": "mine", "process": [process]}})
        (tmp_path / "train.toml").write_text(found.training.rendered("head"))
        return found, load_config(tmp_path / "train.toml")

    return go


def notes(found):
    return {one.key: one.said for one in found.training.notes}


def test_a_job_of_its_page(convert_job):
    found, config = convert_job()
    assert (config.method, config.steps, config.batch_size, config.micro_batch) == ("lora", 3000, 8, 2)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 32, "kohya")  # alpha is the rank
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw-8bit", 1e-4, 1e-4)
    assert (config.optimizer.eps, config.optimizer.clip, config.schedule.name) == (1e-6, 1, "constant")
    assert (config.ema.decay, config.precision, config.quantization) == (0.99, "bf16", "fp8")
    assert (config.timesteps.distribution, config.guidance_embedding) == ("logit-normal", 1)
    assert (config.checkpoint.every, config.checkpoint.keep, config.result.dtype) == (250, 4, "bfloat16")
    assert (config.sample.every, config.sample.size, config.sample.guidance) == (250, (1024, 1024 // 8 * 8), 4)
    assert (config.loss.masked, config.gradient_checkpointing, config.result.title) == (False, True, "mine")
    assert found.prompts == "a ohwx --d 42\n" and found.recipe.model.path == "owner/name"
    assert set(notes(found)) == {"network.linear_alpha", "network.conv", "network.conv_alpha"}


def independent(train, save):
    """Steps, batch and intervals by the tool's documented rules: with gradient_accumulation a step is an update, with
    gradient_accumulation_steps it is a batch."""
    batches = train.get("gradient_accumulation_steps", 1)
    return {"samples": train.get("batch_size", 1) * train.get("gradient_accumulation", 1) * batches,
            "updates": train.get("steps", 1000) // batches, "saved": save.get("save_every", 1000) // batches}


@pytest.mark.parametrize("train", [{}, {"gradient_accumulation": 3}, {"gradient_accumulation_steps": 4, "steps": 1200},
                                   {"batch_size": 5, "gradient_accumulation": 1, "steps": 17}])
def test_steps_are_updates(convert_job, train):
    full = {**UI["train"], "gradient_accumulation": 1, **train}
    _, config = convert_job(train=full)
    wanted = independent(full, UI["save"])
    assert (config.batch_size, config.steps, config.checkpoint.every) == tuple(wanted.values())
    assert ceil(config.batch_size / config.micro_batch) * config.micro_batch == config.batch_size


@pytest.mark.parametrize(("arch", "alpha"), [
    ("flux", 32), ("qwen_image:2509", 32), ("zimage", 32), ("sd3", 32), ("krea2", 32), ("sdxl", 16), ("sd1", 16)])
def test_only_a_unet_has_an_alpha(convert_job, arch, alpha):
    found, config = convert_job(model={"arch": arch})
    assert config.lora.alpha == alpha and ("network.linear_alpha" in notes(found)) == (alpha == 32)


def test_a_unet_by_its_switch(convert_job):
    found, config = convert_job(model={"arch": None, "is_xl": True}, network={"conv": 8, "conv_alpha": 4},
                                train={"noise_scheduler": "ddpm", "min_snr_gamma": 5, "noise_offset": 0.05,
                                       "max_denoising_steps": 899})
    assert (config.lora.targets, config.lora.conv_rank, config.lora.conv_alpha) == ("kohya-conv", 8, 4)
    assert (config.loss.min_snr, config.noise.offset) == (5, 0.05)
    assert (config.timesteps.distribution, config.timesteps.low, config.timesteps.high) == ("uniform", 0.1, 1)
    assert set(notes(found)) == {"network"}


NAMES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mod.1", "single_transformer_blocks.7.proj_out",
         "single_transformer_blocks.20.norm.linear", "x_embedder", "norm_out.linear")


@pytest.mark.parametrize(("arch", "words", "theirs"), [
    ("qwen_image", {}, "transformer_blocks"),
    ("flux", {"only_if_contains": ["transformer.single_transformer_blocks.7"]}, r"single_transformer_blocks\.7"),
    ("flux", {"ignore_if_contains": ["norm", "attn"]}, r"^(?!.*(norm|attn)).*transformer_blocks"),
    ("flux", {"only_if_contains": ["to_q", "proj_out"], "ignore_if_contains": ["single"]}, "^(?!.*single).*to_q")])
def test_layers(convert_job, arch, words, theirs):
    _, config = convert_job(model={"arch": arch}, network={"network_kwargs": words})
    expected = [name for name in NAMES if re.search(theirs, name)]
    if arch == "qwen_image":
        expected = [name for name in NAMES if name.startswith("transformer_blocks")]
    assert targeted(NAMES, config.lora, {}) == expected


def test_lokr_is_whole_unless_the_file_says_otherwise(convert_job):
    _, config = convert_job(network={"type": "lokr", "lokr_factor": 8})
    assert (config.lora.kind, config.lora.rank, config.lora.alpha, config.lora.factor) == ("lokr", 4096, 4096, 8)
    found, config = convert_job(network={"type": "lokr", "lokr_full_rank": False})
    assert (config.lora.rank, config.lora.alpha, config.quantization) == (32, 32, "none")
    assert "not written" in notes(found)["model.quantize"]


def test_no_network_is_a_full_fine_tune(convert_job):
    _, config = convert_job(network=None)
    assert config.method == "full"


@pytest.mark.parametrize(("train", "distribution", "by_size"), [
    ({"timestep_type": "sigmoid"}, "logit-normal", "none"), ({"timestep_type": "linear"}, "uniform", "none"),
    ({"timestep_type": "shift"}, "uniform", "schedule"), ({"timestep_type": "weighted"}, "uniform", "none"),
    ({"timestep_type": "one_step"}, "uniform", "none"), ({"linear_timesteps": True}, "uniform", "none")])
def test_timesteps(convert_job, train, distribution, by_size):
    found, config = convert_job(train=train)
    assert (config.timesteps.distribution, config.timesteps.shift_by_size) == (distribution, by_size)
    said = [key for key in notes(found) if key.startswith("train.")]
    assert bool(said) == (train.get("timestep_type") in ("weighted", "one_step") or "linear_timesteps" in train)


@pytest.mark.parametrize(("train", "wanted"), [
    ({"lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 1e-5}}, ("cosine", 0.1, 0)),
    ({"lr_scheduler": "linear"}, ("constant", 0, 0)),
    ({"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1.0, "end_factor": 0.1}}, ("linear", 0.1, 0)),
    ({"lr_scheduler": "constant_with_warmup"}, ("constant", 0, 1000)),
    ({"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 50}}, ("constant", 0, 50)),
    ({"lr_scheduler": "step"}, ("cosine", 0, 0))])
def test_schedules(convert_job, train, wanted):
    found, config = convert_job(train=train)
    assert (config.schedule.name, pytest.approx(config.schedule.floor), config.schedule.warmup) == wanted
    plain = train.get("lr_scheduler_params") or train["lr_scheduler"] in ("constant_with_warmup",)
    assert ("train.lr_scheduler" in notes(found)) != bool(plain)


@pytest.mark.parametrize(("train", "name", "lr"), [
    ({"optimizer": "prodigy", "lr": 1e-4}, "prodigy", 1.0), ({"optimizer": "lion", "lr": 2e-5}, "lion", 2e-5),
    ({"optimizer": "automagic", "lr": 1e-6}, "adamw", 1e-6), ({"optimizer": None, "lr": None}, "adamw", 1e-6),
    ({"optimizer": "adafactor", "lr": None, "unet_lr": 5e-5}, "adafactor", 5e-5)])
def test_optimizers(convert_job, train, name, lr):
    found, config = convert_job(train={**train, "optimizer_params": {}})
    assert (config.optimizer.name, config.optimizer.lr) == (name, lr)
    assert ("train.optimizer" in notes(found)) == (train["optimizer"] == "automagic")


def test_masks_and_references(convert_job):
    found, config = convert_job(datasets=[
        {"folder_path": "photos", "mask_path": "masks", "mask_min_value": 0.2, "full_size_control_images": False,
         "control_path_1": "more"}, {"folder_path": "reg", "is_reg": True}], train={"reg_weight": 0.5})
    assert (config.loss.masked, config.loss.unmasked_weight) == (True, 0.2)
    assert found.recipe.reference_fit == "bucket" and [one.weight for one in found.recipe.sources] == [1, 0.5]


def test_what_the_base_predicts(convert_job):
    found, config = convert_job(
        datasets=[{"folder_path": "photos"}, {"folder_path": "reg", "is_reg": True, "prior_reg": True},
                  {"folder_path": "more", "is_reg": True}],
        train={"inverted_mask_prior": True, "inverted_mask_prior_multiplier": 0.25})
    assert config.preserve.prior and config.preserve.unmasked == 0.25
    assert [one.role for one in found.recipe.sources] == ["train", "prior", "prior"]
    assert notes(found)["datasets.prior_reg"].endswith("all is written")
    assert not convert_job(datasets=[{"folder_path": "reg", "is_reg": True}])[1].preserve.prior
    found, config = convert_job(train={"diff_output_preservation": True, "diff_output_preservation_class": "a  person"},
                                sample={"samples": [{"prompt": "a cat"}]})
    assert (config.preserve.prompted, config.preserve.prompts) == (1.0, ("a person",))
    assert [one.text for one in parse_prompts(found.prompts)] == ["a cat", "a person"]
    found, config = convert_job(train={"blank_prompt_preservation": True, "blank_prompt_preservation_multiplier": 2})
    assert (config.preserve.prompted, config.preserve.prompts) == (2.0, ("",))
    assert len(list(parse_prompts(found.prompts))) == 1


def test_a_concept_slider(convert_job):
    """Its process has another type; each prompt gets a row, but those that a picture is drawn of have one."""
    found, config = convert_job(type="concept_slider", sample={"samples": [{"prompt": "an old man"}]}, slider={
        "positive_prompt": "an  old man", "negative_prompt": "a young man", "target_class": "a man",
        "anchor_class": "a woman", "anchor_strength": 0.5, "guidance_strength": 4})
    slider = config.slider
    assert (slider.positive, slider.negative, slider.neutral, slider.strength) == (
        "an old man", "a young man", "a man", 4.0)
    assert (config.preserve.prompted, config.preserve.prompts) == (0.25, ("a woman",))
    assert [one.text for one in parse_prompts(found.prompts)] == ["an old man", "a woman", "a young man", "a man"]
    _, config = convert_job(type="concept_slider", slider={"positive_prompt": "an old man"})
    assert (config.slider.negative, config.slider.neutral, config.slider.strength) == ("", "", 3.0)
    assert not config.preserve.prompted
    assert not convert_job(slider={"positive_prompt": "an old man"})[1].slider.on  # of another process: not read


def test_an_image_slider(convert_job, tmp_path):
    """Its pictures of weight 1 are a source, the others its references. Pictures side by side are not cut apart."""
    for name in ("old", "young"):
        (tmp_path / name).mkdir()
    (tmp_path / "young/0.txt").write_text("a person")
    found, config = convert_job(type="image_reference_slider_trainer", datasets=[], slider={
        "weight_jitter": 0.5, "datasets": [
            {"pos_folder": "old", "neg_folder": "young", "target_class": "a  person", "size": 256, "neg_weight": 2.0,
             "network_weight": 1.0},
            {"pair_folder": "both", "network_weight": 4.0}]})
    (source,) = found.recipe.sources
    assert (source.path, source.references) == (tmp_path / "old", (tmp_path / "young",))
    assert (found.recipe.reference_fit, found.recipe.image.resolution) == ("pair", 256)
    assert (found.recipe.caption.missing, found.recipe.caption.constant) == ("constant", "a person")
    assert not config.slider.on and "slider.weight_jitter" in notes(found)["other settings"]
    said = {one.key: one.said for one in found.notes}
    assert said["slider.datasets[0].neg_weight"].startswith("the pictures are those at weight 1 and -1")
    assert said["slider.datasets[0].neg_folder"].startswith("its captions are not read")
    assert said["slider.datasets[1]"].startswith("skipped: it has no pos_folder")
    assert "slider.datasets[0].network_weight" not in said


def test_prompts(convert_job, tmp_path):
    (tmp_path / "ref.png").write_bytes(b"")
    found, config = convert_job(sample={"seed": -1, "neg": "blurry", "samples": [
        {"prompt": "[name] of [trigger] --w 512 --cfg 2.5 --m 0.8 --seed 7", "ctrl_img_1": "ref.png"},
        {"prompt": "b", "width": 768, "seed": 3, "neg": "", "network_multiplier": "1.0"}, {"prompt": None}]})
    first, second = parse_prompts(found.prompts)
    assert (first.text, first.negative, first.references) == ("mine of ohwx", "blurry", (str(tmp_path / "ref.png"),))
    assert (first.settings.width, first.settings.guidance, first.settings.seed) == (512, 2.5, 7)
    assert (second.settings.width, second.settings.seed, second.negative) == (768, 3, None)
    assert "left out of the prompt" in notes(found)["sample.samples[0].prompt"] and config.sample.seed == 0


def test_sampling_that_is_off(convert_job):
    assert convert_job(train={"disable_sampling": True})[1].sample.every == 0
    assert convert_job(sample=None)[1].sample.every == 0


def test_a_caption_for_pictures_without_one(convert_job, tmp_path):
    (tmp_path / "photos/default.txt").write_text("a dog\nin snow\n")
    found, _ = convert_job()
    assert (found.recipe.caption.missing, found.recipe.caption.constant) == ("constant", "a dog in snow")


def test_nothing_is_lost_in_silence(convert_job):
    found, _ = convert_job(train={"t0_loss_target": True, "ema_config": {"use_ema": True, "use_feedback": True}},
                           network={"full_if_contains": "norm"}, model={"vae_path": "vae", "new_thing": 3},
                           save={"hf_repo_id": "me/it", "push_to_hub": True}, sample={"guidance_rescale": 0.5},
                           adapter={"type": "ip"}, guidance={"scale": 2},
                           logging={"use_wandb": True, "wandb_api_key": "SECRET1", "x": {"hf_token": "SECRET2"}})
    text = found.training.rendered("head")
    for word in ("train.t0_loss_target = True", "ema_config.use_feedback", "network.full_if_contains = 'norm'",
                 "model.vae_path", "model.new_thing = 3", "save.hf_repo_id", "sample.guidance_rescale = 0.5", "adapter",
                 "guidance", "logging.wandb_api_key", "logging.x"):
        assert word in re.sub(r"\n#\s+", " ", text), word
    assert "SECRET" not in text + json.dumps([one.text for one in found.notes]) and 'wandb = "ai-toolkit"' in text
