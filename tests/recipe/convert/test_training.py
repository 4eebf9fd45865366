"""Settings of training in other tools' files: what train.toml comes of them, which the trainer must take as it is."""

from __future__ import annotations

import json

import pytest
from pictures import draw

from prep.errors import ConfigError
from prep.models.denoiser.samplers import RESCALED
from prep.models.families.registry import FAMILIES
from prep.recipe.convert.detect import convert
from prep.recipe.convert.training import Training
from prep.recipe.load import load_recipe
from prep.recipe.write import render_recipe
from prep.setting import line_check
from prep.training.schema import Checkpoint
from prep.training.table import SETTINGS
from train.config.load import load_config

KOHYA = {
    "model_arguments": {"pretrained_model_name_or_path": "runwayml/stable-diffusion-v1-5", "v_parameterization": True},
    "dataset_arguments": {"train_data_dir": "img", "reg_data_dir": "reg", "resolution": "768,768",
                          "enable_bucket": True, "shuffle_caption": True, "caption_dropout_rate": 0.05,
                          "prior_loss_weight": 0.5},
    "training": {"max_train_steps": 1000, "train_batch_size": 2, "gradient_accumulation_steps": 4, "seed": 42,
                 "mixed_precision": "bf16", "gradient_checkpointing": True, "max_grad_norm": 0.5, "min_snr_gamma": 5,
                 "save_every_n_steps": 250, "sample_every_n_epochs": 1, "masked_loss": True, "noise_offset": 0.1,
                 "adaptive_noise_scale": 0.02,
                 "xformers": True, "persistent_data_loader_workers": True, "output_name": "ohwx"},
    "optimizer": {"optimizer_type": "AdamW8bit", "optimizer_args": ["weight_decay=0.1", "betas=(0.9, 0.99)", "x=1"],
                  "learning_rate": 1e-4, "unet_lr": "2e-4", "text_encoder_lr": 5e-5, "lr_scheduler": "cosine",
                  "lr_warmup_steps": 0.1},
    "network": {"network_module": "networks.lora", "network_dim": 32, "network_alpha": 16, "network_dropout": 0.1},
}
ONETRAINER = {
    "training_method": "LORA", "base_model_name": "someone/model", "concept_file_name": "concepts.json",
    "concepts": [{"path": "img"}, {"path": "reg", "type": "PRIOR_PREDICTION"}], "resolution": "512,768",
    "aspect_ratio_bucketing": True, "learning_rate": 0.0003, "learning_rate_scheduler": "COSINE",
    "learning_rate_warmup_steps": 100.0, "epochs": 20, "batch_size": 2, "gradient_accumulation_steps": 2, "ema": "GPU",
    "ema_decay": 0.999, "gradient_checkpointing": "ON", "train_dtype": "BFLOAT_16", "masked_training": True,
    "unmasked_weight": 0.2, "normalize_masked_area_loss": True, "masked_prior_preservation_weight": 0.3,
    "loss_weight_fn": "MIN_SNR_GAMMA",
    "loss_weight_strength": 4.0, "lora_rank": 8, "lora_alpha": 4.0, "clip_grad_norm": 0.8, "sample_after": 50,
    "sample_after_unit": "STEP", "backup_after": 30, "backup_after_unit": "MINUTE", "offset_noise_weight": 0.1,
    "noise_x": 0.3,
    "optimizer": {"optimizer": "ADAMW", "beta1": 0.9, "beta2": 0.98, "eps": 1e-7, "weight_decay": 0.02},
    "unet": {"learning_rate": None},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory: a project of kohya's."""
    monkeypatch.chdir(tmp_path)
    for name in ("img/3_ohwx dog", "reg/1_dog"):
        draw(tmp_path / name / "0.png", (300, 300), seed=1)
    return tmp_path


def settings(found, tmp_path):
    (tmp_path / "train.toml").write_text(found.training.rendered("head"))
    return load_config(tmp_path / "train.toml")


def notes(found):
    return {one.key: one.said for one in found.training.notes}


def test_a_configuration_of_kohyas(folder):
    (folder / "config.json").write_text(json.dumps(KOHYA))
    found = convert(folder / "config.json")
    config = settings(found, folder)
    assert (config.method, config.steps, config.batch_size, config.micro_batch, config.seed) == ("lora", 1000, 8, 2, 42)
    assert (config.precision, config.prediction, config.caption_dropout) == ("bf16", "v_prediction", 0.05)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (32, 16, 0.1) and config.gradient_checkpointing
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.betas) == (2e-4, 0.1, (0.9, 0.99))
    assert (config.optimizer.clip, config.loss.min_snr, config.loss.unmasked_weight) == (0.5, 5, 0)
    assert (config.schedule.name, config.schedule.warmup, config.checkpoint.every, config.sample.every) == (
        "cosine", 100, 250, "1 epoch")
    assert config.loss.masked is True
    said = notes(found)
    assert config.optimizer.name == "adamw-8bit" and "optimizer_type" not in said
    assert said["optimizer_args"] == "no counterpart"
    assert "never trained" in said["text_encoder_lr"] and "sample_every_n_epochs" not in said
    assert said["other settings"] == "no counterpart: adaptive_noise_scale" and "train run: -o" in said["output_name"]
    assert settings(found, folder).noise.offset == 0.1
    assert "caption_dropout_rate" not in {one.key for one in found.notes}
    recipe = found.recipe
    assert [(one.path.name, one.role, one.repeats, one.weight) for one in recipe.sources] == [
        ("3_ohwx dog", "train", 3, 1.0), ("1_dog", "prior", 1, 0.5)]
    assert (recipe.image.resolution, recipe.model.path) == (768, "runwayml/stable-diffusion-v1-5")
    assert recipe.caption_of(0).shuffle and recipe.caption_of(0).constant == "ohwx dog"


def test_a_dataset_file_that_is_named(folder):
    (folder / "dataset.toml").write_text(
        "[[datasets]]\nbatch_size = 6\nresolution = 256\n[[datasets.subsets]]\nimage_dir = 'img/3_ohwx dog'\n"
        "caption_dropout_rate = 0.2\n[[datasets.subsets]]\nimage_dir = 'reg/1_dog'\nis_reg = true\n")
    (folder / "config.toml").write_text("dataset_config = 'dataset.toml'\nmax_train_epochs = 3\nkeep_tokens = 2\n")
    found = convert(folder / "config.toml")
    config = settings(found, folder)
    assert (config.epochs, config.steps, config.batch_size, config.caption_dropout) == (3, None, 6, 0.2)
    assert (config.method, config.precision, config.optimizer.lr) == ("full", "fp32", 2e-6), "as sd-scripts has them"
    assert "the largest is written" in notes(found)["caption_dropout_rate"]
    assert found.recipe.caption_of(0).keep_tokens == 2 and found.recipe.image.resolution == 256


def test_a_main_configuration_of_onetrainers(folder):
    for concepts in (True, False):
        document = dict(ONETRAINER)
        if not concepts:  # they are in the file that it names
            (folder / "concepts.json").write_text(json.dumps(document.pop("concepts")))
        (folder / "config.json").write_text(json.dumps(document))
        found = convert(folder / "config.json")
        config = settings(found, folder)
        assert (config.method, config.epochs, config.batch_size, config.micro_batch) == ("lora", 20, 4, 2)
        assert (config.lora.rank, config.lora.alpha, config.optimizer.lr, config.optimizer.clip) == (8, 4, 3e-4, 0.8)
        assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.98), 1e-7)
        assert config.optimizer.weight_decay == 0.02
        assert config.preserve.prior and config.preserve.unmasked == 0.3
        assert (config.loss.masked, config.loss.unmasked_weight, config.loss.normalize_area) == (True, 0.2, True)
        assert (config.loss.min_snr, config.ema.decay, config.precision) == (4, 0.9997999, "bf16")
        assert (config.schedule.name, config.schedule.warmup, config.sample.every) == ("cosine", 50, 25)
        assert config.gradient_checkpointing and config.checkpoint.keep == 0 and config.lora.targets == "kohya-conv"
        assert config.checkpoint.every == 500 and "counted in MINUTE" in notes(found)["backup_after"]
        assert notes(found)["other settings"] == "no counterpart: noise_x" and config.noise.offset == 0.1
        assert found.recipe.image.resolution == (512, 768) and found.recipe.model.path == "someone/model"
        assert [one.role for one in found.recipe.sources] == ["train", "prior"]


def of_kohya(folder, **values):
    """The settings and notes of a configuration with these values."""
    (folder / "config.json").write_text(json.dumps({"train_data_dir": "img", **values}))
    found = convert(folder / "config.json")
    return settings(found, folder), notes(found)


@pytest.mark.parametrize(("given", "name", "value"), [
    ({"network_dim": 8, "network_alpha": 0}, "lora.alpha", 8.0), ({"network_dim": 8}, "lora.alpha", 1.0),
    ({"network_module": "networks.lora"}, "lora.rank", 4),
    ({"network_dim": 8, "network_args": ["conv_dim=4"]}, "lora.conv_rank", 4),
    ({"network_dim": 8, "network_args": ["conv_dim=4"]}, "lora.conv_alpha", 1.0),
    ({"network_dim": 8, "network_args": "conv_dim=4 conv_alpha=2"}, "lora.conv_alpha", 2.0),
    ({"network_dim": 8, "network_args": "conv_dim=4"}, "lora.targets", "kohya-conv"),
    ({"network_dim": 8, "LoRA_type": "Kohya LoCon", "conv_dim": 2, "conv_alpha": 1}, "lora.conv_rank", 2),
    ({"network_dim": 8, "LoRA_type": "Standard", "conv_dim": 2}, "lora.targets", "kohya"),
    ({"network_module": "networks.lora"}, "lora.targets", "kohya"),
    ({"network_module": "networks.lora_flux"}, "lora.targets", "kohya"),
    ({"network_module": "networks.lora_flux", "network_args": ["conv_dim=4"]}, "lora.targets", "kohya"),
    ({"network_module": "networks.lora_qwen_image"}, "lora.targets", "all-linear"),
    ({"save_every_n_steps": 10, "save_last_n_steps": 30}, "checkpoint.keep", 4),
    ({"save_every_n_steps": 10, "save_last_n_steps": 25}, "checkpoint.keep", 3),
    ({"save_every_n_steps": 10}, "checkpoint.keep", 0), ({"network_dim": 4}, "checkpoint.every", 0),
    ({"save_every_n_epochs": 1, "save_every_n_steps": 0}, "checkpoint.every", "1 epoch"),
    ({"save_every_n_epochs": "3"}, "checkpoint.every", "3 epochs"),
    ({"save_n_epoch_ratio": 5}, "checkpoint.every", 500), ({"save_every_n_epochs": 0}, "checkpoint.every", 0),
    ({"save_n_epoch_ratio": 5, "max_train_epochs": 23}, "checkpoint.every", "4 epochs"),
    ({"save_n_epoch_ratio": 5, "max_train_epochs": 3}, "checkpoint.every", "1 epoch"),
    ({"save_n_epoch_ratio": 5, "max_train_epochs": 10, "save_every_n_epochs": 9}, "checkpoint.every", "2 epochs"),
    ({"save_n_epoch_ratio": 0, "max_train_epochs": 10, "save_every_n_epochs": 9}, "checkpoint.every", "9 epochs"),
    ({"save_n_epoch_ratio": 5, "max_train_epochs": 10, "save_last_n_epochs": 2}, "checkpoint.keep", 2),
    ({"save_n_epoch_ratio": 1e-320, "max_train_epochs": 10}, "checkpoint.every", 500),
    ({"validate_every_n_epochs": 2}, "validation.every", "2 epochs"),
    ({"validate_every_n_epochs": 0.3}, "validation.every", 0), ({"network_dim": 4}, "validation.every", 200),
    ({"validate_every_n_epochs": 2, "validate_every_n_steps": 9}, "validation.every", 9),
    ({"save_every_n_epochs": 1, "save_every_n_steps": 10}, "checkpoint.every", 10),
    ({"save_every_n_epochs": 1}, "checkpoint.keep", 0),
    ({"save_every_n_epochs": 2, "save_last_n_epochs": 3}, "checkpoint.keep", 3),
    ({"save_every_n_steps": 10, "save_every_n_epochs": 2, "save_last_n_epochs": 3}, "checkpoint.keep", 0),
    ({"sample_every_n_epochs": 2}, "sample.every", "2 epochs"), ({"sample_every_n_steps": 7}, "sample.every", 7),
    ({"sample_every_n_epochs": 1, "sample_every_n_steps": 7}, "sample.every", "1 epoch"),
    ({"sample_every_n_epochs": 0, "sample_every_n_steps": 7}, "sample.every", 7),
    ({"network_dim": 4}, "sample.every", 0),
    ({"learning_rate": 1e-3, "unet_lr": 0.0}, "optimizer.lr", 1e-3),
    ({"epoch": 10, "max_train_epochs": 0, "max_train_steps": 700}, "steps", 700),
    ({"epoch": 10, "max_train_epochs": 0, "max_train_steps": 0}, "epochs", 10),
    ({"epoch": 10, "max_train_epochs": 3}, "epochs", 3), ({"network_dim": 4}, "steps", 1600),
    ({"lr_scheduler": "cosine", "lr_warmup_steps": "5%"}, "schedule.warmup", 80),
    ({"lr_scheduler": "linear", "lr_scheduler_num_cycles": 3}, "schedule.name", "linear"),
    ({"lr_scheduler": "cosine_with_restarts"}, "schedule.name", "cosine-restarts"),
    ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": "3"}, "schedule.cycles", 3),
    ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": "", "epoch": 4}, "schedule.cycles", 4),
    ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 2, "epoch": 4}, "schedule.cycles", 2),
    ({"lr_scheduler": "polynomial", "lr_scheduler_power": 2}, "schedule.power", 2.0),
    ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.1}, "schedule.floor", 0.1),
    ({"lr_scheduler": "cosine_with_min_lr"}, "schedule.name", "cosine"),
    ({"lr_scheduler": "cosine", "lr_scheduler_min_lr_ratio": 0.1}, "schedule.floor", 0.0),
    ({"timestep_sampling": "flux_shift", "sigmoid_scale": 0.8}, "timesteps.shift_by_size", "schedule"),
    ({"timestep_sampling": "flux_shift", "sigmoid_scale": 0.8}, "timesteps.std", 0.8),
    ({"timestep_sampling": "shift"}, "timesteps.shift", 3.0),
    ({"timestep_sampling": "shift", "discrete_flow_shift": 3.1582}, "timesteps.shift", 3.1582),
    ({"timestep_sampling": "sigmoid"}, "timesteps.distribution", "logit-normal"),
    ({"timestep_sampling": "sigma"}, "timesteps.shift", 3.0), ({"discrete_flow_shift": 2.0}, "timesteps.shift", 2.0),
    ({"timestep_sampling": "shift", "discrete_flow_shift": 3.0, "flux1_checkbox": False}, "timesteps.shift", 1.0),
    ({"timestep_sampling": "uniform", "sigmoid_scale": 0.5}, "timesteps.std", 1.0),
    ({"zero_terminal_snr": True}, "zero_terminal_snr", True), ({"guidance_scale": 1.0}, "guidance_embedding", 1.0),
    ({"guidance_scale": 3.5, "flux1_checkbox": False}, "guidance_embedding", None),
    ({"multires_noise_iterations": 6}, "noise.pyramid", 0.3),
    ({"multires_noise_iterations": 6, "multires_noise_discount": 0.8}, "noise.pyramid", 0.8),
    ({"multires_noise_iterations": 6}, "noise.pyramid_levels", 6),
    ({"multires_noise_discount": 0.8}, "noise.pyramid", 0),
    ({"multires_noise_iterations": 6, "noise_offset_type": "Original"}, "noise.pyramid", 0),
    ({"noise_offset": 0.05, "noise_offset_type": "Original"}, "noise.offset", 0.05),
    ({"noise_offset": 0.05, "noise_offset_type": "Multires"}, "noise.offset", 0.0),
    ({"ip_noise_gamma": 0.1}, "noise.perturbation", 0.1),
    ({"network_dim": 4}, "loss.masked", False), ({"masked_loss": True}, "loss.masked", True),
    ({"min_timestep": 100}, "timesteps.low", 0.1), ({"max_timestep": 900}, "timesteps.high", 0.9),
    ({"min_timestep": 0, "max_timestep": 1000}, "timesteps.high", 1.0),
    ({"min_timestep": 500, "max_timestep": 500}, "timesteps.low", 0.0),
    ({"timestep_sampling": "sigmoid", "min_timestep": 100}, "timesteps.low", 0.0),
    ({"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_std": 0.5}, "timesteps.std", 0.5),
    ({"timestep_sampling": "sigma", "weighting_scheme": "cosmap"}, "loss.weighting", "cosmap"),
    ({"timestep_sampling": "sigma", "weighting_scheme": "cosmap", "model_prediction_type": "raw"}, "loss.weighting",
     "none"), ({"flux1_checkbox": True, "weighting_scheme": "cosmap"}, "loss.weighting", "none"),
    ({"sd3_checkbox": True, "weighting_scheme": "mode"}, "timesteps.mode_scale", 1.29),
    ({"sd3_checkbox": True, "weighting_scheme": "sigma_sqrt"}, "loss.weighting", "inverse-square"),
    ({"network_module": "networks.lora_sd3", "training_shift": 3}, "timesteps.shift", 3.0),
    ({"sd3_checkbox": True, "timestep_sampling": "shift", "min_timestep": 100}, "timesteps.distribution", "uniform"),
    ({"timestep_sampling": "sigmoid", "noise_offset": 0.1}, "noise.offset", 0.0),
    ({"flux1_checkbox": True, "min_snr_gamma": 5}, "loss.min_snr", 0.0), ({"min_snr_gamma": 5}, "loss.min_snr", 5.0),
    ({"sd3_checkbox": True, "v_parameterization": True, "zero_terminal_snr": True}, "prediction", "manifest"),
    ({"lr_scheduler": "cosine", "lr_warmup_steps": 0, "lr_warmup": 10}, "schedule.warmup", 160),
    ({"lr_scheduler": "cosine", "lr_warmup_steps": 7, "lr_warmup": 10}, "schedule.warmup", 7),
    ({"full_bf16": True, "mixed_precision": "bf16"}, "full.dtype", "bfloat16"),
    ({"full_bf16": True, "mixed_precision": "bf16", "optimizer_type": "Prodigy"}, "full.dtype", "float32"),
    ({"full_bf16": True, "mixed_precision": "bf16", "network_dim": 8}, "full.dtype", "float32"),
    ({"fused_backward_pass": True}, "full.fused_backward", True),
    ({"fused_backward_pass": True, "gradient_accumulation_steps": 2}, "full.fused_backward", False),
])
def test_settings_mean_what_they_do_in_sd_scripts(folder, given, name, value):
    config, _ = of_kohya(folder, **given)
    section, _, key = name.rpartition(".")
    assert getattr(getattr(config, section) if section else config, key) == value


@pytest.mark.parametrize(("given", "found"), [
    ({"keep_tokens": "2", "shuffle_caption": "True"}, lambda one: (one.caption_of(0).keep_tokens,
                                                                   one.caption_of(0).shuffle) == (2, True)),
    ({"enable_bucket": "true", "bucket_reso_steps": 32.0, "min_bucket_reso": "128", "max_bucket_reso": 2048.0},
     lambda one: (one.image.step, one.image.shortest, one.image.longest) == (32, 128, 2048)),
    ({"caption_tag_dropout_rate": "0.25", "flip_aug": "False"},
     lambda one: (one.caption_of(0).dropout, one.image.flip) == (0.25, "none")),
    ({"dataset_repeats": "7", "train_data_dir": "img/3_ohwx dog"}, lambda one: one.sources[0].repeats == 7),
])
def test_settings_of_datasets_that_the_gui_writes_as_texts(folder, given, found):
    (folder / "gui.json").write_text(json.dumps({"train_data_dir": "img", "max_train_steps": 10, **given}))
    assert found(convert(folder / "gui.json").recipe)


def test_a_text_that_is_no_number_is_refused(folder):
    (folder / "gui.json").write_text(json.dumps({"train_data_dir": "img", "keep_tokens": "1.5"}))
    with pytest.raises(ConfigError) as error:
        convert(folder / "gui.json")
    assert "keep_tokens is 1.5, expected a whole number" in error.value.message


@pytest.mark.parametrize(("given", "found", "said"), [
    ({"enable_bucket": True, "bucket_no_upscale": True, "bucket_reso_steps": 1}, lambda one: one.image.step == 8,
     "datasets[0].subsets[0]: step = 1: a recipe has numbers from 8 to 1024; 8 is written"),
    ({"caption_tag_dropout_rate": 7}, lambda one: one.caption_of(0).dropout == 1,
     "datasets[0].subsets[0]: dropout = 7.0: a recipe has numbers from 0 to 1; 1 is written"),
    ({"prior_loss_weight": -2, "reg_data_dir": "reg"}, lambda one: one.sources[1].weight == 0,
     "datasets[0].subsets[1]: weight = -2.0: a recipe has numbers from 0 to 1000; 0 is written"),
    ({"resolution": "500,300"}, lambda one: one.image.sizes == ("496x296",),
     "resolution = '500,300': sides are multiples of 8 pixels, up to 32768; 496x296 is written"),
    ({"clip_skip": 100}, lambda one: one.model.clip_skip == 64,
     "clip_skip = 99: a recipe has numbers from 0 to 64; 64 is written"),
])
def test_numbers_that_a_recipe_does_not_take(folder, given, found, said):
    (folder / "gui.json").write_text(json.dumps({"train_data_dir": "img", "max_train_steps": 10, **given}))
    converted = convert(folder / "gui.json")
    assert found(converted.recipe) and said in [one.text for one in converted.notes]
    (folder / "dataset.toml").write_text(render_recipe(converted.recipe, base=folder))
    load_recipe(folder / "dataset.toml", choices={})


def test_the_batch_size_of_the_guis_preparation_is_not_that_of_training(folder):
    config, said = of_kohya(folder, train_batch_size="2", batch_size="8")
    assert config.batch_size == 2 and "only speed" in said["batch_size"]


def test_intervals_in_epochs_need_no_note_unless_something_is_left_out(folder):
    named = ("save_every_n_epochs", "save_every_n_steps", "save_last_n_epochs", "save_last_n_steps",
             "save_n_epoch_ratio", "sample_every_n_epochs", "sample_every_n_steps", "validate_every_n_epochs",
             "validate_every_n_steps", "other settings")

    def said(**values):
        found = of_kohya(folder, **values)[1]
        return {name: found[name] for name in named if name in found}

    assert said(save_every_n_epochs=1, save_last_n_epochs=3, sample_every_n_epochs=2, validate_every_n_epochs=1) == {}
    assert said(save_n_epoch_ratio=4, max_train_epochs=8, save_last_n_epochs=3) == {}
    assert said(save_n_epoch_ratio=4, save_every_n_epochs=2) == {"save_n_epoch_ratio": (
        "a part of the run's epochs, of which the file does not say the number; checkpoint.every keeps its default, "
        f"{Checkpoint().every} steps")}
    both = "here there is one interval, in steps or in epochs; that in steps is written"
    assert said(save_every_n_steps=5, save_every_n_epochs=1, save_last_n_epochs=3, save_n_epoch_ratio=2,
                validate_every_n_steps=5, validate_every_n_epochs=1) == {
        "save_every_n_epochs": both, "save_n_epoch_ratio": both, "validate_every_n_epochs": both,
        "save_last_n_epochs": "counts the checkpoints of save_every_n_epochs, of which none is written"}
    assert said(save_every_n_epochs=1, save_last_n_steps=3, sample_every_n_epochs=2, sample_every_n_steps=4) == {
        "save_last_n_steps": "counts the checkpoints of save_every_n_steps, of which none is written",
        "sample_every_n_steps": "sd-scripts ignores it beside sample_every_n_epochs"}


def test_a_warm_up_that_is_a_fraction_stays_one_where_the_steps_are_not_known(folder):
    config, said = of_kohya(folder, lr_scheduler="cosine", lr_warmup_steps=0.1, max_train_steps=700)
    assert config.schedule.warmup == 70 and "lr_warmup_steps" not in said
    # With both, sd-scripts computes the steps from the epochs.
    config, said = of_kohya(folder, lr_scheduler="cosine", lr_warmup_steps=0.1, max_train_steps=700, max_train_epochs=3)
    assert config.schedule.warmup == 0.1 and "lr_warmup_steps" not in said


@pytest.mark.parametrize(("given", "name"), [
    ("ddim", "DDIMScheduler"), ("pndm", "PNDMScheduler"), ("lms", "LMSDiscreteScheduler"),
    ("euler", "EulerDiscreteScheduler"), ("euler_a", "EulerAncestralDiscreteScheduler"),
    ("heun", "HeunDiscreteScheduler"), ("dpm_2", "KDPM2DiscreteScheduler"),
    ("dpm_2_a", "KDPM2AncestralDiscreteScheduler"), ("dpmsolver", "DPMSolverMultistepScheduler"),
    ("dpmsolver++", "DPMSolverMultistepScheduler"), ("dpmsingle", "DPMSolverSinglestepScheduler"),
    ("k_lms", "LMSDiscreteScheduler"), ("k_euler", "EulerDiscreteScheduler"),
    ("k_euler_a", "EulerAncestralDiscreteScheduler"), ("k_dpm_2", "KDPM2DiscreteScheduler"),
    ("k_dpm_2_a", "KDPM2AncestralDiscreteScheduler"),
])
def test_samplers_of_sd_scripts(folder, given, name):
    config, said = of_kohya(folder, sample_sampler=given, flux1_checkbox=False, t5xxl="t5.safetensors")
    assert config.sample.sampler == name and "other settings" in said
    assert said.get("sample_sampler", "") == (
        "DPMSolverMultistepScheduler is written, which here is dpmsolver++" if given == "dpmsolver" else "")
    config, said = of_kohya(folder, sample_sampler=given, zero_terminal_snr=True)
    assert config.sample.sampler == (name if name in RESCALED else None)
    assert ("ends in pure noise; not written" in said.get("sample_sampler", "")) == (name not in RESCALED)


@pytest.mark.parametrize("more", [
    {"network_module": "networks.lora_flux"}, {"flux1_checkbox": True}, {"sd3_checkbox": True, "flux1_checkbox": False},
    {"t5xxl": "t5.safetensors"}, {"timestep_sampling": "sigmoid"},
])
def test_samplers_of_flows_are_notes(folder, more):
    config, said = of_kohya(folder, sample_sampler="euler_a", **more)
    assert config.sample.sampler is None and said["sample_sampler"] == (
        "sd-scripts ignores it for flows, which it samples with Euler's steps; not written")


def test_a_sampler_that_is_not_known_is_a_note(folder):
    config, said = of_kohya(folder, sample_sampler="restart")
    assert config.sample.sampler is None
    assert said["sample_sampler"] == "no counterpart; the model family's usual one is used"
    config, said = of_kohya(folder, max_train_steps=10)
    assert config.sample.sampler is None and "sample_sampler" not in said


PRODIGY = {"optimizer_type": "Prodigy", "optimizer_args": "decouple=True use_bias_correction=True d_coef=2 "
           "safeguard_warmup=True weight_decay=0.05"}
FREE = {"optimizer_type": "AdamWScheduleFree", "lr_scheduler": "cosine", "lr_warmup_steps": 50,
        "optimizer_args": ["warmup_steps=20", "betas=0.9,0.99"]}


@pytest.mark.parametrize(("given", "name", "value"), [
    ({"optimizer_type": "PagedAdamW8bit"}, "name", "adamw-8bit-paged"), ({"use_8bit_adam": True}, "name", "adamw-8bit"),
    ({"optimizer_type": "AdamW"}, "weight_decay", 0.01), ({"optimizer_type": "Lion"}, "name", "lion"),
    ({"optimizer_type": "Lion"}, "weight_decay", 0.0), ({"optimizer_type": "Lion"}, "betas", (0.9, 0.99)),
    ({"use_lion_optimizer": True}, "name", "lion"), (PRODIGY, "name", "prodigy"), (PRODIGY, "d_coef", 2.0),
    (PRODIGY, "bias_correction", True), (PRODIGY, "safeguard_warmup", True), (PRODIGY, "weight_decay", 0.05),
    ({"optimizer_type": "Prodigy"}, "weight_decay", 0.0), (FREE, "name", "adamw-schedule-free"),
    (FREE, "betas", (0.9, 0.99)), ({"optimizer_type": "AdaFactor"}, "name", "adafactor"),
])
def test_optimizers_of_sd_scripts(folder, given, name, value):
    config, said = of_kohya(folder, **given)
    assert getattr(config.optimizer, name) == value and "optimizer_args" not in said


def test_what_sd_scripts_does_with_optimizers_besides(folder):
    config, _ = of_kohya(folder, **FREE)
    assert (config.schedule.name, config.schedule.warmup) == ("constant", 20), "it ignores its scheduler"
    fixed = {"optimizer_type": "Adafactor", "optimizer_args": "relative_step=False scale_parameter=False "
             "warmup_init=False"}
    assert not {"optimizer_type", "optimizer_args"} & set(of_kohya(folder, **fixed)[1])
    said = of_kohya(folder, optimizer_type="Adafactor", optimizer_args="eps=1e-20 scale_parameter=True")[1]
    assert "finds its own rate" in said["optimizer_type"] and said["optimizer_args"] == "no counterpart"
    assert said["optimizer_args eps"] == "'adafactor' has no such setting"
    for kind, name in (("Prodigy", "prodigy"), ("AdamWScheduleFree", "adamw-schedule-free")):
        config, said = of_kohya(folder, optimizer_type=kind, optimizer_args=["betas=0.0,0.99"])
        assert config.optimizer.name == name and config.optimizer.betas[0] > 0
        assert said["optimizer_args betas"] == f"'{name}' needs a first one above 0; not written"
    config, said = of_kohya(folder, optimizer_type="DAdaptAdam")
    assert config.optimizer.name == "adamw" and "the learning rate may not suit it" in said["optimizer_type"]


@pytest.mark.parametrize(("given", "name", "value"), [
    ({"optimizer": "ADAMW_8BIT", "weight_decay": 0.3}, "weight_decay", 0.3),
    ({"optimizer": "ADAMW_8BIT", "is_paged": True}, "name", "adamw-8bit-paged"),
    ({"optimizer": "ADAFACTOR", "relative_step": False, "scale_parameter": False, "eps": 1e-30}, "name", "adafactor"),
    ({"optimizer": "LION", "beta1": 0.8, "beta2": 0.9}, "betas", (0.8, 0.9)),
    ({"optimizer": "PRODIGY", "d_coef": 0.5, "use_bias_correction": True}, "bias_correction", True),
    ({"optimizer": "SCHEDULE_FREE_ADAMW"}, "weight_decay", 0.01), ({"optimizer": "CAME"}, "name", "adamw"),
])
def test_optimizers_of_onetrainer(folder, given, name, value):
    config, said = of_onetrainer(folder, optimizer=given, learning_rate_scheduler="COSINE", ema="GPU")
    assert getattr(config.optimizer, name) == value
    free = given["optimizer"] == "SCHEDULE_FREE_ADAMW"
    assert (config.schedule.name, bool(config.ema.decay)) == (("constant", False) if free else ("cosine", True))
    assert ("ema" in said) == free and ("optimizer.optimizer" in said) == (given["optimizer"] == "CAME")


def test_onetrainers_adafactor_may_find_its_own_rate(folder):
    said = of_onetrainer(folder, optimizer={"optimizer": "ADAFACTOR", "relative_step": True})[1]
    assert "finds its own rate" in said["optimizer.optimizer"]


def test_schedules_without_a_counterpart_are_notes(folder):
    config, said = of_kohya(folder, lr_scheduler="inverse_sqrt")
    assert config.schedule.name == "cosine" and said["lr_scheduler"] == "no counterpart; cosine is written"
    config, said = of_kohya(folder, lr_scheduler="cosine_with_restarts", lr_scheduler_num_cycles=2.5)
    assert config.schedule.cycles == 1 and "whole number" in said["lr_scheduler_num_cycles"]
    config, said = of_onetrainer(folder, learning_rate_scheduler="REX")
    assert config.schedule.name == "cosine" and said["learning_rate_scheduler"] == "no counterpart; cosine is written"
    said = of_onetrainer(folder, learning_rate_scheduler="COSINE_WITH_HARD_RESTARTS", learning_rate_cycles=1.5)[1]
    assert "whole number" in said["learning_rate_cycles"]


def test_adapters_without_a_counterpart_are_notes(folder):
    said = "no such adapter here; lora is written"
    assert of_kohya(folder, LoRA_type="LyCORIS/iA3")[1]["LoRA_type"] == said
    assert of_kohya(folder, network_module="networks.oft")[1]["network_module"] == said
    lycoris = of_kohya(folder, network_module="lycoris.kohya", network_args=["algo=glora", "preset=attn-mlp"])[1]
    assert lycoris["network_args algo"] == said and lycoris["network_args preset"] == "no counterpart"
    lycoris = of_kohya(folder, network_module="lycoris.kohya", network_args=["algo=loha", "dora_wd=True"])[1]
    assert lycoris["network_args dora_wd"] == "lora.dora is only for lora.kind 'lora', and this is loha"
    lycoris = of_kohya(folder, network_module="lycoris.kohya", network_dim=8, network_dropout=0.1, network_args=[
        "algo=lokr", "conv_dim=4", "conv_alpha=3"])[1]
    assert lycoris["network_dropout"] == "lora.kind 'lokr' has no dropout; not written"
    assert lycoris["network_args conv_alpha"] == ("with lora.kind 'lokr' alpha / rank is the same in all layers, so it "
                                                  "is not written")
    for kind in ("Standard", "LyCORIS/LoHa", "Flux1", "Lumina", "Kohya LoHa"):
        assert "LoRA_type" not in of_kohya(folder, LoRA_type=kind)[1]
    assert of_onetrainer(folder, peft_type="OFT_2")[1]["peft_type"] == said


LYCORIS = {"network_module": "lycoris.kohya", "network_dim": 8, "network_alpha": 4}
LOKR = {**LYCORIS, "network_args": ["algo=lokr", "factor=8", "conv_dim=2", "conv_alpha=1"]}
DORA = {**LYCORIS, "network_args": "algo=locon dora_wd=True"}


@pytest.mark.parametrize(("given", "name", "value"), [
    (LYCORIS, "lora.kind", "lora"), (LYCORIS, "lora.targets", "kohya-conv"), (LYCORIS, "lora.conv_rank", 8),
    (LYCORIS, "lora.conv_alpha", 4.0),
    (LOKR, "lora.kind", "lokr"), (LOKR, "lora.factor", 8), (LOKR, "lora.conv_rank", 2), (LOKR, "lora.conv_alpha", 1.0),
    ({**LYCORIS, "network_args": ["algo=lokr", "factor=-1"]}, "lora.factor", 0),
    ({**LYCORIS, "network_args": ["conv_dim=2"]}, "lora.conv_alpha", 4.0),
    ({**LYCORIS, "network_args": ["conv_alpha=2"]}, "lora.conv_rank", 8),
    ({**LYCORIS, "network_args": ["algo=loha", "conv_dim=4", "conv_alpha=1"]}, "lora.conv_alpha", 2.0),
    ({**LYCORIS, "network_args": ["algo=loha", "conv_dim=4"], "network_dropout": 0.1}, "lora.dropout", 0.0),
    ({"network_module": "networks.loha", "network_dim": 8}, "lora.kind", "loha"),
    ({"network_module": "networks.lokr", "network_dim": 8, "network_args": ["factor=4"]}, "lora.factor", 4),
    ({"LoRA_type": "Kohya LoKr", "network_dim": 8, "factor": 4}, "lora.factor", 4),
    ({"LoRA_type": "Flux1", "network_dim": 8}, "lora.targets", "kohya"),
    ({"LoRA_type": "Flux1", "network_dim": 8, "conv_dim": 4}, "lora.kind", "lora"),
    (DORA, "lora.dora", True), (DORA, "lora.kind", "lora"), (LYCORIS, "lora.dora", False),
    ({"LoRA_type": "LyCORIS/LoHa", "network_dim": 8}, "lora.kind", "loha"),
    ({"LoRA_type": "LyCORIS/LoCon", "network_dim": 8, "dora_wd": True}, "lora.dora", True),
    ({"network_dim": 8, "mixed_precision": "fp16"}, "precision", "fp16"),
    ({"network_dim": 8, "fp8_base": True}, "quantization", "fp8"), ({"fp8_base": True}, "quantization", "none"),
])
def test_adapters_and_precisions_mean_what_they_do_in_sd_scripts_and_lycoris(folder, given, name, value):
    config, _ = of_kohya(folder, **given)
    section, _, key = name.rpartition(".")
    assert getattr(getattr(config, section) if section else config, key) == value


# How a configuration of sd-scripts, or musubi-tuner, says which family it is for.
OF_FAMILIES = {
    "sd15": {"network_module": "networks.lora"}, "sd21": {"network_module": "networks.lora", "v2": True},
    "sdxl": {"network_module": "networks.lora", "sdxl": True},
    "flux": {"network_module": "networks.lora_flux", "ae": "ae.safetensors", "t5xxl": "t5.safetensors"},
    "chroma": {"network_module": "networks.lora_flux", "model_type": "chroma", "ae": "ae.safetensors"},
    "sd3": {"network_module": "networks.lora_sd3", "clip_g": "g.safetensors"},
    "lumina2": {"network_module": "networks.lora_lumina", "gemma2": "gemma.safetensors"},
    "krea2": {"network_module": "networks.lora_krea2", "ae": "ae.safetensors"},
    "anima": {"network_module": "networks.lora_anima", "anima_checkbox": True},
    "zimage": {"network_module": "networks.lora_zimage"}, "flux2": {"network_module": "networks.lora_flux_2"},
}


@pytest.mark.parametrize("of_family", OF_FAMILIES)
@pytest.mark.parametrize("args", [[], ["conv_dim=4", "conv_alpha=2"]])
@pytest.mark.parametrize("module", ["own", "lycoris.kohya"])
def test_every_family_has_the_targets_that_are_written_for_it(folder, of_family, args, module):
    given = OF_FAMILIES[of_family]
    if module == "lycoris.kohya" and len(given) == 1 and of_family != "sd15":
        return  # nothing else says which family it is
    own = given["network_module"] if module == "own" else module
    config, said = of_kohya(folder, network_dim=8, network_args=args, **{**given, "network_module": own})
    unet = of_family in ("sd15", "sd21", "sdxl")
    presets = FAMILIES[of_family].lora.presets
    assert config.lora.targets in presets and (config.lora.targets == "kohya-conv") == (
        unet and (module == "lycoris.kohya" or bool(args)))
    assert (said.get("network_args conv_dim", "").endswith("have no convolutions to adapt; not written")) == (
        bool(args) and not unet)
    assert ("network_module" in said) == (not unet and (module != "own" or of_family in ("zimage", "flux2")))
    if module != "own" and not unet:
        assert said["network_module"] == ("written as lora.targets = \"kohya\", every linear layer of the blocks: "
                                          "kohya-conv is for models with resnets")


@pytest.mark.parametrize(("given", "name", "value"), [
    ({"peft_type": "LOHA"}, "lora.kind", "loha"), ({"lora_decompose": True}, "lora.dora", True),
    ({"lora_decompose": True, "peft_type": "LOHA"}, "lora.dora", False), ({}, "precision", "fp16"),
    ({"model_type": "QWEN", "transformer": {"weight_dtype": "NFLOAT_4"}}, "quantization", "nf4"),
    ({"unet": {"weight_dtype": "FLOAT_8"}}, "quantization", "fp8"),
    ({"unet": {"weight_dtype": "INT_W8A8"}}, "quantization", "int8"),
    ({"unet": {"weight_dtype": "FLOAT_W8A8"}}, "quantization", "fp8-w8a8"),
    ({"unet": {"weight_dtype": "BFLOAT_16"}}, "quantization", "none"),
    ({"unet": {"weight_dtype": "FLOAT_8"}, "training_method": "FINE_TUNE"}, "quantization", "none"),
    ({"unet": {"weight_dtype": "FLOAT_8"}, "lora_decompose": True}, "quantization", "none"),
])
def test_adapters_and_weights_mean_what_they_do_in_onetrainer(folder, given, name, value):
    config, _ = of_onetrainer(folder, **given)
    section, _, key = name.rpartition(".")
    assert getattr(getattr(config, section) if section else config, key) == value


def test_draws_of_timesteps_without_a_counterpart_are_notes(folder):
    assert of_kohya(folder, timestep_sampling="nextdit_shift")[1]["timestep_sampling"] == "no counterpart"
    assert "timestep_sampling" not in of_kohya(folder, timestep_sampling="nextdit_shift", flux1_checkbox=False)[1]
    assert of_kohya(folder, timestep_sampling="shift")[1]["discrete_flow_shift"].startswith(
        "timesteps.shift comes on top of the schedule's own: divide it by 'shift' of the scheduler's config")


def test_a_random_strength_of_noise_is_a_note(folder):
    said = of_kohya(folder, noise_offset=0.1, noise_offset_random_strength=True)[1]
    assert said["noise_offset_random_strength"] == "the strength is the same for every sample: no counterpart"
    said = of_onetrainer(folder, offset_noise_weight=0.1, generalized_offset_noise=True,
                         perturbation_noise_weight=0.2)[1]
    assert said["generalized_offset_noise"] == "the offset is the same at each timestep: no counterpart"
    assert said["perturbation_noise_weight"] == ("no counterpart: noise.perturbation leaves the target as it is, and "
                                                 "OneTrainer adds the noise to it, too")


def test_arguments_of_a_network_without_a_counterpart_are_notes(folder):
    said = of_kohya(folder, network_dim=4, network_args=["conv_dim=4", "loraplus_lr_ratio=16"])[1]
    assert said["network_args loraplus_lr_ratio"] == "no counterpart" and "network_args conv_dim" not in said
    said = of_kohya(folder, network_module="networks.lora_sd3", network_args=["conv_dim=4"])[1]
    assert "network_module" not in said and said["network_args conv_dim"] == (
        "models of networks.lora_sd3 have no convolutions to adapt; not written")


@pytest.mark.parametrize(("other", "wanted"), [
    ({"min_snr_gamma": 5}, ("none", 5.0)), ({"debiased_estimation_loss": True}, ("debiased", 0.0)),
    ({"min_snr_gamma": 5, "network_module": "networks.lora_flux"}, ("cosmap", 0.0)), ({}, ("cosmap", 0.0))])
def test_one_weight_by_noise_level(folder, other, wanted):
    config, said = of_kohya(folder, weighting_scheme="cosmap", **other)
    assert (config.loss.weighting, config.loss.min_snr) == wanted
    assert ("weighting_scheme" in said) == (wanted[0] != "cosmap")


def test_what_sd_scripts_ignores_for_flows_is_a_note(folder):
    given = {"noise_offset": 0.1, "min_snr_gamma": 5, "zero_terminal_snr": True, "multires_noise_iterations": 0}
    said = of_kohya(folder, flux1_checkbox=True, **given)[1]
    assert {name for name, one in said.items() if one == "sd-scripts ignores it for flows; not written"} == {
        "noise_offset", "min_snr_gamma", "zero_terminal_snr"}
    assert not given.keys() & of_kohya(folder, **given)[1].keys()
    said = of_kohya(folder, min_timestep=500, max_timestep=500)[1]
    assert said["min_timestep"] == ("up to max_timestep there is one timestep at most, which has no counterpart; not "
                                    "written")


def test_alpha_masks_need_no_masked_loss_in_sd_scripts(folder):
    (folder / "dataset.toml").write_text("[[datasets]]\nresolution = 256\n[[datasets.subsets]]\n"
                                         "image_dir = 'img/3_ohwx dog'\nalpha_mask = true\n")
    config, _ = of_kohya(folder, dataset_config="dataset.toml")
    assert config.loss.masked is True and config.loss.unmasked_weight == 0


def of_onetrainer(folder, **values):
    """The settings and notes of a configuration with these values, and OneTrainer's defaults."""
    (folder / "config.json").write_text(json.dumps(
        {"training_method": "LORA", "concept_file_name": "", "concepts": [{"path": "img"}], **values}))
    found = convert(folder / "config.json")
    return settings(found, folder), notes(found)


SAVES = {"save_every": 2, "save_every_unit": "EPOCH"}
WHOLE = {"training_method": "FINE_TUNE", "weight_dtype": "BFLOAT_16", "train_dtype": "BFLOAT_16",
         "optimizer": {"optimizer": "ADAFACTOR", "stochastic_rounding": True, "fused_back_pass": True}}


@pytest.mark.parametrize(("given", "name", "value"), [
    ({}, "lora.rank", 16), ({}, "lora.alpha", 1.0), ({"dropout_probability": 0.1}, "lora.dropout", 0.1),
    ({}, "optimizer.clip", 1.0), ({"clip_grad_norm": None}, "optimizer.clip", 0.0),
    ({}, "checkpoint.keep", 0), ({"rolling_backup_count": 5}, "checkpoint.keep", 0),
    ({"rolling_backup": True, "rolling_backup_count": 5}, "checkpoint.keep", 5),
    ({"rolling_backup": True}, "checkpoint.keep", 3), ({}, "gradient_checkpointing", True),
    ({"unet": {"gradient_checkpointing": False}}, "gradient_checkpointing", False),
    ({"gradient_checkpointing": "OFF"}, "gradient_checkpointing", False),
    ({"gradient_checkpointing": "CPU_OFFLOADED"}, "gradient_checkpointing", "offload"),
    ({"force_epsilon_prediction": True}, "prediction", "epsilon"),
    ({"layer_filter": "attn"}, "lora.targets", "attention"),
    ({"layer_filter": "attentions"}, "lora.targets", "kohya"), ({}, "lora.targets", "kohya-conv"),
    ({"layer_filter": "attn,ff.net"}, "lora.targets", "all-linear"),
    ({"layer_filter": "attn", "layer_filter_regex": True}, "lora.targets", "all-linear"),
    ({"model_type": "STABLE_DIFFUSION_XL_10_BASE"}, "lora.targets", "kohya-conv"),
    ({"model_type": "STABLE_DIFFUSION_35"}, "lora.targets", "kohya"),
    ({"model_type": "FLUX_DEV_1"}, "lora.targets", "kohya"), ({"model_type": "QWEN"}, "lora.targets", "all-linear"),
    ({"rescale_noise_scheduler_to_zero_terminal_snr": True}, "zero_terminal_snr", True),
    ({"rescale_noise_scheduler_to_zero_terminal_snr": True}, "prediction", "v_prediction"),
    ({"model_type": "FLUX_DEV_1"}, "guidance_embedding", 1.0),
    ({"model_type": "FLUX_DEV_1", "transformer": {"guidance_scale": 3.5}}, "guidance_embedding", 3.5),
    ({"dynamic_timestep_shifting": True}, "timesteps.shift_by_size", "schedule"),
    ({"text_encoder": {"dropout_probability": 0.2}}, "caption_dropout", 0.2),
    ({"learning_rate_scheduler": "LINEAR", "learning_rate_min_factor": 0.2}, "schedule.floor", 0.2),
    ({"learning_rate_scheduler": "LINEAR"}, "schedule.name", "linear"),
    ({"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": 4.0}, "schedule.cycles", 4),
    ({"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS"}, "schedule.name", "cosine-restarts"),
    ({"learning_rate": 1e-4, "learning_rate_scaler": "BOTH", "batch_size": 2, "gradient_accumulation_steps": 8},
     "optimizer.lr", 4e-4), ({"learning_rate": 1e-4, "learning_rate_scaler": "NONE"}, "optimizer.lr", 1e-4),
    ({"ema": "GPU", "ema_decay": 0.99, "ema_update_step_interval": 1}, "ema.decay", 0.99),
    ({"ema": "CPU"}, "ema.device", "cpu"), ({}, "schedule.warmup", 200),
    *(({name: 3, f"{name}_unit": "EPOCH", "validation": True}, setting, "3 epochs") for name, setting in (
        ("sample_after", "sample.every"), ("backup_after", "checkpoint.every"), ("save_every", "checkpoint.every"),
        ("validate_after", "validation.every"))),
    ({"sample_after": 1.0, "sample_after_unit": "EPOCH"}, "sample.every", "1 epoch"),
    ({"sample_after": 2.7, "sample_after_unit": "EPOCH"}, "sample.every", "2 epochs"),
    ({"sample_after": 0.7, "sample_after_unit": "EPOCH"}, "sample.every", 0),
    ({"sample_after": 0, "sample_after_unit": "EPOCH"}, "sample.every", 0),
    ({"validation": True, "validate_after": 0}, "validation.every", 0),
    ({"sample_after": -1, "sample_after_unit": "EPOCH"}, "sample.every", 200),
    ({"sample_after": 1e300, "sample_after_unit": "EPOCH"}, "sample.every", 200),
    ({"sample_after": 3, "sample_after_unit": "EPOCH", "gradient_accumulation_steps": 4}, "sample.every", "3 epochs"),
    ({"sample_after": 3, "sample_after_unit": "NEVER"}, "sample.every", 0), ({}, "sample.every", 200),
    ({"sample_after": 0.5, "sample_after_unit": "STEP"}, "sample.every", 0),
    ({"model_type": "FLUX_DEV_1", "learning_rate": 1e-3, "unet": {"learning_rate": 1e-5},
      "transformer": {"learning_rate": 1e-4}}, "optimizer.lr", 1e-4),
    ({"model_type": "STABLE_CASCADE_1", "prior": {"learning_rate": 1e-4}}, "optimizer.lr", 1e-4),
    ({"unet": {"learning_rate": 1e-4}, "transformer": {"learning_rate": 1e-5}}, "optimizer.lr", 1e-4),
    ({"unet": {"weight_dtype": "NFLOAT_4"}, "transformer": {"weight_dtype": "FLOAT_32"}}, "quantization", "nf4"),
    ({"model_type": "QWEN", "transformer": {"gradient_checkpointing": False}}, "gradient_checkpointing", False),
    ({"model_type": "QWEN", "unet": {"gradient_checkpointing": False}}, "gradient_checkpointing", True),
    ({}, "loss.masked", False), ({"masked_training": True}, "loss.masked", True),
    ({"optimizer": {"optimizer": "SCHEDULE_FREE_ADAMW"}, "gradient_accumulation_steps": 4}, "schedule.warmup", 200),
    ({"learning_rate_warmup_steps": -3}, "schedule.warmup", 0),
    ({"timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.5}, "timesteps.mean", 0.5),
    ({"timestep_distribution": "LOGIT_NORMAL", "noising_weight": 0.5}, "timesteps.std", 1.5),
    ({"timestep_distribution": "LOGIT_NORMAL"}, "timesteps.distribution", "logit-normal"),
    ({"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.2}, "timesteps.distribution", "mode"),
    ({"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.2}, "timesteps.mode_scale", 1.2),
    ({"timestep_distribution": "SIGMOID"}, "timesteps.distribution", "uniform"),
    ({"timestep_distribution": "UNIFORM", "noising_weight": 1.2}, "timesteps.std", 1.0),
    ({"timestep_shift": 3.0}, "timesteps.shift", 3.0), ({"timestep_shift": None}, "timesteps.shift", 1.0),
    ({"min_noising_strength": 0.1}, "timesteps.low", 0.1), ({"max_noising_strength": 0.9}, "timesteps.high", 0.9),
    ({"min_noising_strength": 0.9, "max_noising_strength": 0.9}, "timesteps.low", 0.0),
    ({"mse_strength": 0, "huber_strength": 1.0, "huber_delta": 0.3}, "loss.huber", 0.3),
    ({"huber_strength": 1.0}, "loss.huber", 0.0), ({"compile": True}, "compile", True),
    ({"peft_type": "LOKR", "lokr_dim": 4, "lora_rank": 8}, "lora.kind", "lokr"),
    ({"peft_type": "LOKR", "lokr_dim": 4, "lora_rank": 8}, "lora.rank", 4), ({"peft_type": "LOKR"}, "lora.rank", 16),
    ({"peft_type": "LOKR", "lokr_dim": 100000}, "lora.rank", 4096), ({"lokr_full_matrix": True}, "lora.rank", 16),
    ({"peft_type": "LOKR", "lokr_full_matrix": True}, "lora.rank", 4096), ({"lora_rank": 9000}, "lora.rank", 4096),
    ({"peft_type": "LOKR", "lokr_decompose_factor": 8}, "lora.factor", 8), ({"peft_type": "LOKR"}, "lora.factor", 0),
    ({"peft_type": "LOHA", "dropout_probability": 0.2}, "lora.dropout", 0.0),
    ({"train_dtype": "TFLOAT_32"}, "precision", "fp32"), ({"train_dtype": "TFLOAT_32"}, "tf32", True),
    ({"clip_grad_norm": "x"}, "optimizer.clip", 1.0), ({"clip_grad_norm": "inf"}, "optimizer.clip", 0.0),
    ({"save_after": 2, "save_after_unit": "EPOCH"}, "checkpoint.every", "2 epochs"),
    ({"lora_layers": "attn"}, "lora.targets", "attention"), ({"min_snr_gamma": 5}, "loss.min_snr", 5.0),
    ({"__version": 10, "min_snr_gamma": 5}, "loss.min_snr", 0.0),
    ({"validation": True}, "validation.every", "1 epoch"), ({}, "validation.every", 0),
    ({"validation": True, "validate_after": 8, "validate_after_unit": "STEP"}, "validation.every", 8),
    ({"save_every": 2, "backup_after": 1, "backup_after_unit": "EPOCH"}, "checkpoint.every", "1 epoch"),
    ({**SAVES, "backup_after": 1, "backup_after_unit": "EPOCH"}, "checkpoint.every", "1 epoch"),
    ({**SAVES, "backup_after": 9, "backup_after_unit": "EPOCH"}, "checkpoint.every", "2 epochs"),
    ({**SAVES, "backup_after": 9, "backup_after_unit": "STEP"}, "checkpoint.every", "2 epochs"),
    ({**SAVES, "backup_after_unit": "NEVER"}, "checkpoint.every", "2 epochs"),
    ({"save_every": 0, "save_every_unit": "EPOCH", "backup_after": 9, "backup_after_unit": "STEP"}, "checkpoint.every",
     9), ({"save_every": 0, "save_every_unit": "EPOCH"}, "checkpoint.every", 500),
    ({"backup_after_unit": "NEVER"}, "checkpoint.every", 0), ({}, "checkpoint.every", 500),
    ({**SAVES, "rolling_backup": True}, "checkpoint.keep", 0), (WHOLE, "full.dtype", "bfloat16"),
    (WHOLE, "full.fused_backward", True), ({**WHOLE, "training_method": "LORA"}, "full.fused_backward", False),
    ({**WHOLE, "weight_dtype": "FLOAT_32"}, "full.dtype", "float32"),
    ({**WHOLE, "train_dtype": "FLOAT_16"}, "full.fused_backward", False),
])
def test_settings_mean_what_they_do_in_onetrainer(folder, given, name, value):
    config, _ = of_onetrainer(folder, **given)
    section, _, key = name.rpartition(".")
    assert getattr(getattr(config, section) if section else config, key) == value


def test_onetrainers_models_and_backups_are_both_checkpoints(folder):
    names = ("save_every", "backup_after", "other settings")

    def said(**values):
        found = of_onetrainer(folder, **values)[1]
        return {name: found[name] for name in names if name in found}

    beside = "a checkpoint is a backup and has the weights; {} is written"
    assert said(**SAVES) == {} == said(backup_after=1, backup_after_unit="EPOCH")
    assert said(**SAVES, backup_after=9, backup_after_unit="STEP") == {"backup_after": beside.format("save_every")}
    assert said(**SAVES, backup_after=1, backup_after_unit="EPOCH") == {"save_every": beside.format("backup_after")}
    minutes = "counted in MINUTE; checkpoint.every is counted in steps or epochs, so it is not written"
    assert said(**SAVES, backup_after=30) == {"backup_after": minutes}
    assert said(save_every=5, save_every_unit="MINUTE", backup_after=9, backup_after_unit="STEP") == {
        "save_every": minutes}


def test_what_onetrainer_trains_and_draws_besides_is_a_note(folder):
    never = "text encoders are never trained: no counterpart"
    assert of_onetrainer(folder)[1]["text_encoder.train"] == never, "as it does unless the file says otherwise"
    off = {"train": False}
    assert not {"text_encoder.train", "text_encoder_2.train"} & of_onetrainer(folder, text_encoder=off)[1].keys()
    said = of_onetrainer(folder, model_type="STABLE_DIFFUSION_XL_10_BASE", text_encoder=off, text_encoder_2={
        "train": True}, unet={"train": False, "model_name": "u.safetensors"})[1]
    assert "text_encoder.train" not in said and said["text_encoder_2.train"] == never
    assert said["unet.train"] == "here the denoiser is always trained"
    assert said["unet.model_name"] == "the whole model is that of [model] path: no counterpart"
    assert "no counterpart; uniform is written" in of_onetrainer(folder, timestep_distribution="COS_MAP")[1][
        "timestep_distribution"]
    said = of_onetrainer(folder, timestep_distribution="UNIFORM", noising_weight=1, timestep_shift=3)[1]
    assert "timestep_distribution" not in said and "other settings" not in said
    assert "the schedule's own" in said["timestep_shift"]
    said = of_onetrainer(folder, huber_strength=0.5, mse_strength=0)[1]
    assert said["huber_strength"].startswith("loss.huber is the squared error up to there, twice OneTrainer's")
    said = of_onetrainer(folder, timestep_shift=3.0, max_noising_strength=0.9)[1]
    assert "here it shifts within the range of timesteps" in said["timestep_shift"]
    said = of_onetrainer(folder, huber_strength=0.5, mae_strength=1)[1]
    assert said["loss"] == ("the sum of losses, mse 1, mae 1, huber 0.5, has no counterpart; the squared error is "
                            "written")


def test_what_onetrainer_counts_otherwise_is_a_note(folder):
    _, said = of_onetrainer(folder, sample_after=10, layer_filter="attentions", text_encoder={
        "dropout_probability": 0.1})
    assert "counted in MINUTE" in said["sample_after"] and "layer_filter" not in said
    assert "OneTrainer uses zeros" in said["text_encoder.dropout_probability"]
    said = of_onetrainer(folder, learning_rate_scaler="BATCH", batch_size=4, loss_scaler="NONE")[1]
    assert "times 2, as OneTrainer" in said["learning_rate_scaler"] and "other settings" not in said
    assert of_onetrainer(folder)[1]["layer_filter"] == (
        "OneTrainer's default adapts every linear and convolution layer: kohya-conv is the nearest preset of "
        "lora.targets, without embeddings and the last layers")
    assert of_onetrainer(folder, layer_filter="ff.net")[1]["layer_filter"] == (
        "lora.targets is a preset or a list of layers: all-linear is written, the linear layers of the transformer "
        "blocks")


@pytest.mark.parametrize("row", SETTINGS.values(), ids=lambda row: row.name)
def test_a_converter_writes_what_the_trainer_takes_and_nothing_else(row):
    bounds, whole = row.spec.bounds, isinstance(row.value, int)
    fine = [row.value] if bounds is None else [kind_of(row, one) for one in bounds]
    beyond = ["no such word", {}] if bounds is None else [
        kind_of(row, bounds[0] - 1), kind_of(row, bounds[1] + 1 if whole else bounds[1] * 1.001)]
    for value in fine:
        training = Training()
        training.put(row.name, value, "x")
        assert training.settings == {row.name: value} and not training.notes
        assert row.spec.check(value, row.name) == value
    for value in beyond if row.spec.check is not line_check else [3, "two\nlines"]:
        training = Training()
        training.put(row.name, value, "x")
        assert not training.settings and [one.key for one in training.notes] == ["x"]
        assert f"{row.name} accepts" in training.notes[0].said


def kind_of(row, number):
    """`number` as the setting has it: a pair, a float, or a whole number."""
    return (number, number) if isinstance(row.value, tuple) else type(row.value)(number)


def test_a_batch_that_is_too_large_takes_the_micro_batch_along(folder):
    (folder / "config.json").write_text(json.dumps(
        {"train_data_dir": "img", "train_batch_size": 1 << 20, "gradient_accumulation_steps": 2}))
    found = convert(folder / "config.json")
    assert settings(found, folder).batch_size == 4 and "not written" in notes(found)["train_batch_size"]


def test_what_is_out_of_bounds_is_a_note():
    training = Training()
    training.put("lora.rank", 5000, "network_dim")
    assert not training.settings
    assert [one.text for one in training.notes] == [
        "network_dim = 5000: lora.rank accepts numbers from 1 to 4096; not written"]


@pytest.mark.parametrize(("document", "says"), [
    ({"network_dim": 4}, "it has no dataset, expected dataset_config or train_data_dir"),
    ({"dataset_config": "other.json"},
     "dataset_config other.json has no [[datasets]], expected sd-scripts' dataset TOML"),
    ({"concept_file_name": "other.json"}, "other.json is not a list, expected OneTrainer's concepts")])
def test_configurations_without_a_dataset(prep, folder, document, says):
    (folder / "other.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(document))
    result = prep("init", "--from", "config.json")
    assert result.code == 3 and says in result.err and not list(folder.glob("*.toml"))


# ---- prep init ----------------------------------------------------------------------------------------------------


def test_init_writes_both(prep, folder):
    (folder / "config.json").write_text(json.dumps(KOHYA))
    result = prep("init", "--from", "config.json", "--json")
    assert result.code == 0 and result.json["train"] == "train.toml", result.err
    assert "note: other settings: no counterpart: adaptive_noise_scale" in result.err
    assert load_config(folder / "train.toml").lora.rank == 32
    text = (folder / "train.toml").read_text()
    assert "# Written by prep init --from config.json (kohya)" in text and "adaptive_noise_scale" in text
    assert len(load_recipe(folder / "dataset.toml", choices={}).sources) == 2
    assert prep("bucket", "dataset.toml").code == 0


def test_settings_of_training_replace_nothing(prep, folder):
    (folder / "config.json").write_text(json.dumps(KOHYA))
    (folder / "train.toml").write_text("steps = 3\n")
    result = prep("init", "--from", "config.json")
    assert result.code == 5 and "training settings train.toml already exist" in result.err
    assert not (folder / "dataset.toml").exists() and (folder / "train.toml").read_text() == "steps = 3\n"
    (folder / "new").mkdir()
    result = prep("init", "--from", "config.json", "-o", "new/train.toml")
    assert result.code == 5 and ("recipe new/train.toml has the name of the training settings, which are written "
                                 "beside it") in result.err
    result = prep("init", "--from", "config.json", "-o", "train.toml", "--force")
    assert result.code == 5 and (folder / "train.toml").read_text() == "steps = 3\n"
    assert prep("init", "--from", "config.json", "--force").code == 0
    assert load_config(folder / "train.toml").steps == 1000
    flat = "".join(f"{name} = {json.dumps(value)}\n" for name, value in KOHYA["network"].items())
    (folder / "train.toml").write_text(f"train_data_dir = 'img'\n{flat}")
    result = prep("init", "--from", "train.toml", "--force")
    assert result.code == 5 and "is the file to convert and is never replaced" in result.err


@pytest.mark.parametrize(("more", "wanted"), [
    ({"clip_skip": 2}, {"clip_skip": 1}), ({"clip_skip": 1}, {}), ({"clip_skip": "2", "sdxl": True}, {}),
    ({"max_token_length": "225"}, {"text_windows": 3}), ({"max_token_length": 150}, {"text_windows": 2}),
    ({"max_token_length": "75"}, {}), ({"t5xxl_max_token_length": 256}, {"max_length": 256}),
])
def test_how_sd_scripts_encodes_captions(folder, more, wanted):
    (folder / "k.json").write_text(json.dumps({"train_data_dir": "img", "max_train_steps": 10, **more}))
    model = convert(folder / "k.json").recipe.model
    usual = {"clip_skip": 0, "text_windows": 1, "max_length": 0}
    assert {name: getattr(model, name) for name in usual} == usual | wanted


@pytest.mark.parametrize(("more", "wanted"), [
    ({"text_encoder_layer_skip": 1}, {"clip_skip": 1}),
    ({"model_type": "STABLE_DIFFUSION_XL_10_BASE", "text_encoder_layer_skip": 1, "text_encoder_2_layer_skip": 2},
     {"clip_skip": 1}),
    ({"model_type": "FLUX_DEV_1", "text_encoder_layer_skip": 1, "text_encoder_2_sequence_length": 256},
     {"max_length": 256}),
    ({"text_encoder_2_sequence_length": 77}, {}),
])
def test_how_onetrainer_encodes_captions(folder, more, wanted):
    (folder / "o.json").write_text(json.dumps({**ONETRAINER, "concepts": [{"path": "img"}], **more}))
    found = convert(folder / "o.json")
    usual = {"clip_skip": 0, "text_windows": 1, "max_length": 0}
    assert {name: getattr(found.recipe.model, name) for name in usual} == usual | wanted
    assert ("both encoders of SDXL skip alike" in str(notes(found))) == ("XL" in more.get("model_type", ""))


@pytest.mark.parametrize(("convert_it", "asked", "predicts_v", "other"), [
    (of_kohya, {"debiased_estimation_loss": True}, {"v_parameterization": True}, {"min_snr_gamma": 5}),
    (of_onetrainer, {"loss_weight_fn": "DEBIASED_ESTIMATION"},
     {"rescale_noise_scheduler_to_zero_terminal_snr": True}, None),
])
def test_debiased_estimation(folder, convert_it, asked, predicts_v, other):
    config, said = convert_it(folder, **asked)
    assert config.loss.weighting == "debiased" and not said.keys() & asked.keys()
    config, said = convert_it(folder, **asked, **predicts_v)
    assert config.loss.weighting == "none" and "1 / (SNR + 1): no counterpart" in said[next(iter(asked))]
    if other is not None:
        config, said = convert_it(folder, **asked, **other)
        assert (config.loss.weighting, config.loss.min_snr) == ("none", 5) and "beside" in said[next(iter(asked))]
