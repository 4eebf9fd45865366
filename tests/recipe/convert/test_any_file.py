"""Whatever other tools' files hold, the recipe and the settings that come of them are accepted as they are."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pictures import draw

from prep.errors import ConfigError, PathError
from prep.recipe.convert.detect import convert
from prep.recipe.load import load_recipe
from prep.recipe.prompts import prompts_of
from prep.recipe.write import render_recipe
from train.config.load import parse

NUMBERS = (0, 1, -1, 0.0, 0.1, 0.5, 1.0, 1.5, -0.3, 2, 3, 5, 7, 64, 77, 225, 1600, 1e-320, 1e6, 1e18, 10**30, 1e300,
           float("inf"), float("-inf"), "0", "1", "1e-4", "5%", "0.0", "-1", "abc", "", "inf", "nan", None, True, False)
SWITCH = (True, False, None, 0, 1, "True", "false", "", "ON", "OFF")
# Settings, with values that the tool writes beside numbers; the other half of a key's values is in NUMBERS or SWITCH.
KOHYA = {
    **dict.fromkeys(("max_train_steps", "max_train_epochs", "epoch", "train_batch_size", "gradient_accumulation_steps",
                     "learning_rate", "unet_lr", "text_encoder_lr", "max_grad_norm", "min_snr_gamma", "noise_offset",
                     "multires_noise_iterations", "multires_noise_discount", "ip_noise_gamma", "network_dim",
                     "network_alpha", "network_dropout", "conv_dim", "conv_alpha", "factor", "lr_warmup",
                     "lr_warmup_steps", "lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_min_lr_ratio",
                     "save_every_n_steps", "save_every_n_epochs", "save_last_n_epochs", "save_last_n_steps",
                     "save_n_epoch_ratio", "sample_every_n_steps", "sample_every_n_epochs", "validate_every_n_steps",
                     "validate_every_n_epochs", "seed", "guidance_scale", "discrete_flow_shift", "sigmoid_scale",
                     "clip_skip", "max_token_length", "t5xxl_max_token_length", "prior_loss_weight", "min_timestep",
                     "max_timestep", "logit_mean", "logit_std", "mode_scale", "training_shift"), NUMBERS),
    **dict.fromkeys(("keep_tokens", "caption_dropout_rate", "caption_tag_dropout_rate", "min_bucket_reso",
                     "max_bucket_reso", "bucket_reso_steps", "dataset_repeats", "validation_split", "batch_size"),
                    (0, 1, 2, 64, 0.1, 1.0, 64.0, 10**6, -1, "0", "64", "0.5", "", None)),
    **dict.fromkeys(("gradient_checkpointing", "v_parameterization", "zero_terminal_snr", "debiased_estimation_loss",
                     "masked_loss", "fp8_base", "sdxl", "v2", "flux1_checkbox", "sd3_checkbox", "use_8bit_adam",
                     "use_lion_optimizer", "dora_wd", "noise_offset_random_strength", "torch_compile",
                     "network_train_text_encoder_only", "lumina_checkbox", "anima_checkbox",
                     "hunyuan_image_checkbox"), SWITCH),
    **dict.fromkeys(("lumina_discrete_flow_shift", "lumina_sigmoid_scale", "anima_discrete_flow_shift",
                     "gemma2_max_token_length", "lumina_gemma2_max_token_length"), NUMBERS),
    "model_type": ("flux", "chroma"), "token_string": ("", "ohwx"), "lr_scheduler_args": ("", "T_max=3", None, ["x"]),
    **dict.fromkeys(("shuffle_caption", "enable_bucket", "bucket_no_upscale", "flip_aug", "random_crop", "alpha_mask",
                     "enable_wildcard", "color_aug"), (True, False, None, "True", "false", "")),
    "resolution": (512, 768, "512", "512,768", "1024, 1024", [512, 768], "500,300", [7, 9], 1, 10**7, "0", None),
    "max_resolution": ("512,512", "1024,1024", ""),
    "optimizer": ("AdamW", "AdamW8bit", "Lion", "Prodigy", "Adafactor", "AdamWScheduleFree", "DAdaptAdam", "CAME"),
    "optimizer_args": ("", "weight_decay=0.1", ["betas=0.9,0.99", "eps=1e-8"], "betas=0,2", ["d_coef=0", "d_coef=2"],
                       "warmup_steps=1.5 weight_decay=-1", "=", ["betas"], [3, None], "relative_step=False",
                       "use_bias_correction=True safeguard_warmup=True d_coef=0.5"),
    "lr_scheduler": ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
                     "cosine_with_min_lr", "adafactor", "rex"),
    "network_module": ("networks.lora", "networks.lora_flux", "networks.lora_sd3", "lycoris.kohya", "networks.oft",
                       "networks.loha", "networks.lokr", "networks.lora_anima"),
    "LoRA_type": ("Standard", "Kohya LoCon", "Flux1", "Lumina", "LyCORIS/LoHa", "LyCORIS/LoKr", "LyCORIS/LoCon",
                  "LyCORIS/iA3", "Kohya LoHa", "Kohya LoKr", "LoRA-FA"),
    "network_args": ("", "conv_dim=4 conv_alpha=1", ["algo=loha", "conv_dim=2"], ["algo=lokr", "factor=8"],
                     "algo=lokr conv_alpha=3 factor=-1", ["algo=locon", "dora_wd=True", "dora_wd=False"],
                     "conv_dim=1e9", "conv_dim=x", ["algo="], "factor=1e300 algo=lokr"),
    "noise_offset_type": ("Original", "Multires"), "mixed_precision": ("no", "bf16", "fp16", "fp8"),
    "timestep_sampling": ("sigma", "uniform", "sigmoid", "shift", "flux_shift", "nextdit_shift"),
    "weighting_scheme": ("uniform", "none", "logit_normal", "mode", "cosmap", "sigma_sqrt"),
    "sample_sampler": ("ddim", "euler_a", "k_dpm_2", "dpmsolver", "restart", ""),
    "sample_prompts": ("prompts.txt", "", "a dog --w 512 --d -1 --s 1e9", "--l .\n# no\n --w", "\ud800 --n --x\0"),
    "t5xxl": ("t5.safetensors", ""), "ae": ("ae.sft", ""),
    "caption_extension": (".txt", ".caption", "txt", ""), "pretrained_model_name_or_path": ("a/b", "m.safetensors", ""),
    "train_data_dir": ("img", "img/3_dog"), "reg_data_dir": ("reg", "", None), "dataset_config": (None, "data.toml"),
}
PART = [{}, None, {"learning_rate": 1e-4, "train": True, "weight_dtype": "NFLOAT_4", "gradient_checkpointing": False},
        {"learning_rate": None, "weight_dtype": "FLOAT_8", "dropout_probability": 0.1, "guidance_scale": 3.5},
        {"train": False, "weight_dtype": "FLOAT_32", "dropout_probability": 7, "guidance_scale": 1e9}]
UNITS = ("STEP", "EPOCH", "NEVER", "ALWAYS", "MINUTE", None)
ONETRAINER = {
    **dict.fromkeys(("learning_rate", "learning_rate_warmup_steps", "learning_rate_cycles", "learning_rate_min_factor",
                     "epochs", "batch_size", "gradient_accumulation_steps", "ema_decay", "ema_update_step_interval",
                     "lora_rank", "lora_alpha", "dropout_probability", "clip_grad_norm", "sample_after", "save_every",
                     "backup_after", "validate_after", "save_after", "rolling_backup_count", "loss_weight_strength",
                     "offset_noise_weight", "perturbation_noise_weight", "noising_weight", "noising_bias",
                     "timestep_shift", "min_noising_strength", "max_noising_strength", "mse_strength", "mae_strength",
                     "huber_strength", "huber_delta", "unmasked_weight", "text_encoder_layer_skip",
                     "text_encoder_2_layer_skip", "text_encoder_2_sequence_length", "text_encoder_sequence_length",
                     "lokr_dim",
                     "lokr_decompose_factor", "min_snr_gamma", "__version"), NUMBERS),
    **dict.fromkeys(("sample_after_unit", "save_every_unit", "backup_after_unit", "validate_after_unit"), UNITS),
    **dict.fromkeys(("aspect_ratio_bucketing", "masked_training", "normalize_masked_area_loss", "validation",
                     "rolling_backup", "lora_decompose", "force_v_prediction", "force_epsilon_prediction", "compile",
                     "rescale_noise_scheduler_to_zero_terminal_snr", "dynamic_timestep_shifting",
                     "generalized_offset_noise", "gradient_checkpointing", "layer_filter_regex",
                     "lokr_weight_decompose"), SWITCH),
    **dict.fromkeys(("unet", "transformer", "prior", "text_encoder", "text_encoder_2"), PART),
    "training_method": ("LORA", "FINE_TUNE", "EMBEDDING"), "peft_type": ("LORA", "LOHA", "LOKR", "OFT_2"),
    "model_type": ("STABLE_DIFFUSION_15", "STABLE_DIFFUSION_XL_10_BASE", "STABLE_DIFFUSION_35", "FLUX_DEV_1", "QWEN",
                   "STABLE_CASCADE_1", "Z_IMAGE", None),
    "learning_rate_scheduler": ("CONSTANT", "LINEAR", "COSINE", "COSINE_WITH_HARD_RESTARTS", "REX", "CUSTOM"),
    "learning_rate_scaler": ("NONE", "BATCH", "BOTH", "GLOBAL_BOTH"), "ema": ("OFF", "GPU", "CPU"),
    "loss_weight_fn": ("CONSTANT", "MIN_SNR_GAMMA", "DEBIASED_ESTIMATION", "P2", "SIGMA"),
    "timestep_distribution": ("UNIFORM", "LOGIT_NORMAL", "HEAVY_TAIL", "COS_MAP", "SIGMOID", "BETA"),
    "train_dtype": ("BFLOAT_16", "FLOAT_16", "FLOAT_32", "TFLOAT_32", "NONE"),
    "layer_filter": ("", "attn", "attentions", "ff.net"), "base_model_name": ("a/b", "x.safetensors", ""),
    "resolution": ("512", "512,768", "1024x512", "0x0", "999999x7", 768, "0", "9" * 30, "1,1", "", None),
    "samples": (None, [], [3, {}], [{"prompt": "a --x\n#b", "width": 1e18, "height": -5, "seed": 1e300,
                                    "cfg_scale": 1e-9, "diffusion_steps": "7"}]),
    "sample_definition_file_name": ("", "nowhere.json", "img", None),
    "optimizer": ({"optimizer": "ADAMW", "beta1": 2, "beta2": 0.9, "eps": 0}, {"optimizer": "LION", "beta1": None},
                  {"optimizer": "ADAFACTOR", "eps": 1e-30, "weight_decay": 5}, {"optimizer": "CAME"}, {}, None,
                  {"optimizer": "SCHEDULE_FREE_ADAMW", "beta1": 0, "beta2": 0.9}, {"optimizer": "MUON"}, "LION",
                  {"optimizer": "PRODIGY", "d_coef": 0, "use_bias_correction": True, "safeguard_warmup": None}),
}
CONCEPT = {
    **dict.fromkeys(("repeats", "balancing", "loss_weight"), (0, 1, 1.0, 0.5, 2.5, 1e9, -1, 1e308, float("inf"), None)),
    **dict.fromkeys(("image_variations", "text_variations", "seed"), (0, 1, 2, 5, 100, 10**7, -1, None)),
    **dict.fromkeys(("include_subdirectories", "validation_concept"), (True, False, None)),
    "type": ("STANDARD", "VALIDATION", "PRIOR_PREDICTION"), "balancing_strategy": ("REPEATS", "SAMPLES"),
}
IMAGE = {**dict.fromkeys(("enable_crop_jitter", "enable_random_flip", "enable_fixed_flip",
                          "enable_resolution_override"), (True, False, None)),
         "resolution_override": ("512", "256, 512", "", "1024x768", "0", None)}
TEXT = {**dict.fromkeys(("enable_tag_shuffling", "tag_dropout_enable", "caps_randomize_enable"), (True, False, None)),
        "tag_dropout_mode": ("FULL", "RANDOM", "RANDOM WEIGHTED"), "tag_delimiter": (",", "", ". ", None),
        "tag_dropout_probability": (0, 0.3, 1, 7, -2, float("inf"), None), "keep_tags_count": (0, 1, -3, 10**9, None),
        "prompt_source": ("sample", "filename", "concept"), "prompt_path": ("prompts.txt",)}
BACKEND = {
    "repeats": (0, 1, 5, 10**9, -1, None), "resolution": (512, 1024, 1.0, 0.5, 1e-9, 2, 300000, 1048575.5, 0, None),
    "resolution_type": ("pixel", "area", "pixel_area", None), "crop": (True, False, None),
    "crop_aspect": ("square", "preserve", "closest", "random"), "crop_style": ("center", "random", "face", None),
    "crop_aspect_buckets": ([], [1.0, 0.5], [64, 1 / 64], [2], None), "minimum_image_size": (0, 512, 10**9, -5, 0.25),
    "max_upscale_threshold": (0.0, 0.2, 1e9, -1, None), "caption_strategy": ("textfile", "filename", "instanceprompt"),
    "instance_prompt": ("a dog", "", None), "caption_shuffle": (
        {}, {"enable": True}, {"enable": True, "count": -4, "position_start": -1}, None,
        {"enable": True, "count": 10**6, "split_on": "period", "position_start": 10**9}),
    **dict.fromkeys(("is_regularisation_data", "only_instance_prompt", "prepend_instance_prompt", "disabled"),
                    (True, False, None)), "dataset_type": ("image", "eval"),
}
SUBSET = {"num_repeats": (0, 1, 10**9), "keep_tokens": (0, 5, -1), "caption_dropout_rate": (0, 0.1, 3.0, -1.0),
          "caption_tag_dropout_rate": (0.5, 9), "is_reg": (True, False), "alpha_mask": (True, False),
          "class_tokens": ("dog", ""), "random_crop": (True,), "flip_aug": (True, False), "caption_separator": (";",)}
DATASET = {"resolution": (512, [512, 500], 10**6, 1), "enable_bucket": (True, False), "bucket_no_upscale": (True,),
           "bucket_reso_steps": (1, 8, 64, 5000), "min_bucket_reso": (0, 256, -8), "max_bucket_reso": (1024, 10**6),
           "batch_size": (1, 4, 10**9, -2), "validation_split": (0.1, 2.0), **SUBSET}
TOOLKIT = {
    "network": {**dict.fromkeys(("linear", "rank", "linear_alpha", "alpha", "conv", "conv_alpha", "dropout",
                                 "lokr_factor"), NUMBERS),
                "type": ("lora", "locon", "lokr", "dora", "lorm"), "lokr_full_rank": SWITCH, "transformer_only": SWITCH,
                "network_kwargs": ({}, None, {"only_if_contains": ["to_q", "a(b"]}, {"ignore_if_contains": "norm"}, 3)},
    "train": {**dict.fromkeys(("steps", "batch_size", "gradient_accumulation", "gradient_accumulation_steps", "lr",
                               "unet_lr", "max_grad_norm", "min_snr_gamma", "noise_offset", "min_denoising_steps",
                               "max_denoising_steps", "cfg_scale", "reg_weight"), NUMBERS),
              "noise_scheduler": ("ddpm", "flowmatch", "lcm"), "disable_sampling": SWITCH,
              "timestep_type": ("sigmoid", "linear", "shift", "weighted", "next_sample"),
              "content_or_style": ("balanced", "style", 3), "loss_type": ("mse", "mae"), "dtype": ("bf16", "x", None),
              "optimizer": ("adamw", "adamw8bit", "Prodigy", "lion", "automagic", "prodigy8bit"),
              "optimizer_params": ({}, {"weight_decay": 0.1, "betas": [0, 2]}, {"eps": "1e-8", "d_coef": 0}, None, 5),
              "lr_scheduler": ("constant", "cosine", "linear", "step", "constant_with_warmup"),
              "lr_scheduler_params": ({}, {"eta_min": 1e9}, {"num_warmup_steps": -1}, [],
                                      {"start_factor": 1, "end_factor": 0.5}),
              "ema_config": (None, {"use_ema": True, "ema_decay": 7}, {"use_ema": True})},
    "model": {"arch": ("flux", "qwen_image", "sdxl", "sd1", "krea2", "wan22_5b", None, "zimage:turbo"),
              "quantize": SWITCH,
              "qtype": ("qfloat8", "uint4", "int8", "uint3|a/b", ""), "name_or_path": ("a/b", "x.safetensors", "")},
    "sample": {**dict.fromkeys(("sample_every", "width", "height", "seed", "guidance_scale", "sample_steps"), NUMBERS),
               "walk_seed": SWITCH, "neg": (False, "bad", "", None),
               "prompts": ([], ["a --w 7 --cfg x", "--l .", "#\n"], [None, 3]),
               "samples": ([], [{"prompt": "a", "seed": 1e300, "width": -1}, {}], None)},
    "save": {**dict.fromkeys(("save_every", "max_step_saves_to_keep"), NUMBERS), "dtype": ("bf16", "float16", "fp8")},
}
TOOLKIT_DATA = {**dict.fromkeys(("num_repeats", "keep_tokens"), (0, 1, 5, 10**9, -1, None)),
                **dict.fromkeys(("loss_multiplier", "caption_dropout_rate", "token_dropout_rate", "mask_min_value"),
                                (0, 0.1, "5e-2", 3, -1.0, None, float("inf"))),
                **dict.fromkeys(("is_reg", "shuffle_tokens", "flip_x", "random_crop", "buckets", "alpha_mask"),
                                (True, False, None)),
                "resolution": (512, [512, 1024], [256], 10**7, 1, None), "caption_ext": ("txt", ".caption", "md")}
PIPE = {
    "": {**dict.fromkeys(("epochs", "max_steps", "gradient_accumulation_steps", "gradient_clipping", "warmup_steps",
                          "save_every_n_epochs", "save_every_n_steps", "save_every_n_examples", "eval_every_n_steps",
                          "eval_every_n_epochs", "checkpoint_every_n_epochs", "blocks_to_swap", "force_constant_lr",
                          "uncond_fraction"), NUMBERS),
         "micro_batch_size_per_gpu": (1, 4, [[512, 4], [1024, 1]], [], [[]], 0, None, 10**30),
         "activation_checkpointing": (True, "unsloth", False), "compile": SWITCH, "save_dtype": ("bfloat16", "x"),
         "lr_scheduler": ("constant", "linear", "cosine", "rex")},
    "model": {**dict.fromkeys(("sigmoid_scale", "shift", "min_t", "max_t", "guidance", "min_snr_gamma", "unet_lr"),
                              NUMBERS),
              **dict.fromkeys(("flux_shift", "lumina_shift", "v_pred", "debiased_estimation_loss"), SWITCH),
              "type": ("flux", "sdxl", "qwen_image", "wan", "z_image", "krea2"), "dtype": ("bfloat16", "float8", None),
              "timestep_sample_method": ("logit_normal", "uniform", "x"), "transformer_dtype": ("float8", "nf4", None),
              "diffusers_path": ("a/b", "", "x.safetensors")},
    "adapter": {**dict.fromkeys(("rank", "alpha", "dropout", "decompose_factor"), NUMBERS),
                "type": ("lora", "lokr", "x")},
    "optimizer": {**dict.fromkeys(("lr", "weight_decay", "eps", "beta2_half_life", "d_coef"), NUMBERS),
                  "type": ("adamw_optimi", "AdamW8bitKahan", "Prodigy", "automagic", "ScheduleFreeAdamW"),
                  "betas": ([0.9, 0.99], [0, 2], [1], None), "gradient_release": SWITCH},
}
PIPE_DATA = {
    "resolutions": ([512], [512, 768], [[512, 768]], [0], [], [1e300], 5, [10**9]),
    **dict.fromkeys(("min_ar", "max_ar", "num_ar_buckets"), (0.5, 1, 2, 3.0, 0, -1, 10**9, None)),
    "enable_ar_bucket": (True, False), "ar_buckets": ([1.0, 1.5], [[512, 256]], [0], None, []),
    "size_buckets": ([[512, 512, 1]], [[640, 480, 33], [7, 9, 1]], [], None), "frame_buckets": ([1], [1, 33]),
    "num_repeats": (1, 2, 0.5, 1.5, 1e-9, 1e9, 0, -1, None), "caption_prefix": ("", "a "), "shuffle_tags": (True, None),
    "cache_shuffle_num": (0, 3, 10**6, None), "cache_shuffle_delimiter": (", ", ";", "", " "),
    "skip_empty_caption": (True, False), "mask_path": ("img", "nowhere"), "control_path": ("img", "nowhere"),
}
VALUE = st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False),
                  st.text(max_size=6), st.lists(st.floats(allow_nan=False), max_size=3))


def some(draw_one, values):
    """A table with some of the keys, whose values are mostly those of the tool, and at most one is anything."""
    table = draw_one(st.fixed_dictionaries({}, optional={name: st.sampled_from(values[name]) for name in values}))
    if table and draw_one(st.integers(0, 3)) == 0:
        table[draw_one(st.sampled_from(sorted(table)))] = draw_one(VALUE)
    return table


@st.composite
def kohyas(draw_one):
    return {"train_data_dir": "img", "max_grad_norm": 1, **some(draw_one, KOHYA), "network_dim": 4}


@st.composite
def datasets(draw_one):
    return {"general": some(draw_one, DATASET), "datasets": [
        {**some(draw_one, DATASET), "subsets": [{"image_dir": place, **some(draw_one, SUBSET)}
                                                for place in ("img/3_dog", "reg/1_dog")]}]}


@st.composite
def concepts(draw_one):
    return [{"path": place, **some(draw_one, CONCEPT), "image": some(draw_one, IMAGE), "text": some(draw_one, TEXT)}
            for place in ("img/3_dog", "reg/1_dog")]


@st.composite
def onetrainers(draw_one):
    listed = draw_one(concepts()) if draw_one(st.booleans()) else [{"path": "img"}]
    return {**some(draw_one, ONETRAINER), "concept_file_name": "c.json", "concepts": listed}


@st.composite
def simpletuners(draw_one):
    return [{"id": place, "instance_data_dir": place, **some(draw_one, BACKEND)}
            for place in ("img/3_dog", "reg/1_dog")]


@st.composite
def jobs(draw_one):
    process = {name: some(draw_one, values) for name, values in TOOLKIT.items()}
    listed = [{"folder_path": place, **some(draw_one, TOOLKIT_DATA)} for place in ("img/3_dog", "reg/1_dog")]
    return {"job": "extension", "config": {"name": draw_one(st.sampled_from(("a", "", 3, None))), "process": [
        {"type": "sd_trainer", "datasets": listed, **process}]}}


@st.composite
def pipes(draw_one):
    own = [some(draw_one, PIPE_DATA) if draw_one(st.booleans()) else {} for _ in range(3)]
    data = {"resolutions": [512], **own[0], "directory": [{"path": "img/3_dog", **own[1]},
                                                          {"path": "reg/1_dog", **own[2]}]}
    main = {name: some(draw_one, PIPE[name]) for name in ("model", "adapter", "optimizer")}
    return {**some(draw_one, PIPE[""]), **main, "model": {"type": "sd3", **main["model"]}, "dataset": "pipe.json",
            "data": data}


@st.composite
def civitais(draw_one):
    own = {**dict.fromkeys(("steps", "epochs", "batchSize", "numRepeats", "lr", "unetLR", "textEncoderLr", "networkDim",
                            "networkAlpha", "noiseOffset", "minSnrGamma", "keepTokens", "clipSkip", "resolution",
                            "lrSchedulerNumCycles"), NUMBERS),
           **dict.fromkeys(("flipAugmentation", "shuffleTokens", "enableBucket", "trainTextEncoder"), SWITCH),
           "lrScheduler": ("constant", "cosine_with_restarts", "step"), "continueFrom": ("x", None),
           "optimizerType": ("AdamW8Bit", "Prodigy", "Automagic"), "ecosystem": ("sd1", "sdxl", "flux1", "qwen", "wan")}
    return {"params": {**some(draw_one, own), "ecosystem": draw_one(st.sampled_from(own["ecosystem"])),
                       "engine": draw_one(st.sampled_from(("kohya", "musubi", "ai-toolkit", "rapid")))}}


@st.composite
def musubis(draw_one):
    own = {"network_module": ("networks.lora_zimage", "networks.lora_wan", "networks.lokr", "networks.lora_flux_2"),
           "network_args": ("", ["factor=8"], ["factor=1e300", "x"], "exclude_patterns=['a']"),
           "timestep_sampling": ("sigma", "uniform", "sigmoid", "shift", "logsnr", "qwen_shift", "qinglong_qwen"),
           "blocks_to_swap": NUMBERS, "gradient_checkpointing_cpu_offload": SWITCH, "metadata_title": ("a", "a\nb", 3),
           "log_with": ("wandb", "all", None)}
    return {**some(draw_one, {**{name: values for name, values in KOHYA.items() if name != "train_data_dir"}, **own}),
            "dit": "a", "dataset_config": "musubi.toml"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    place = tmp_path_factory.mktemp("any")
    for name in ("img/3_dog", "reg/1_dog"):
        draw(place / name / "0.png", (64, 64), seed=0)
    (place / "prompts.txt").write_text("a dog\na {cat}\n")
    (place / "data.toml").write_text("[[datasets]]\nresolution = 256\n[[datasets.subsets]]\nimage_dir = 'img'\n")
    (place / "musubi.toml").write_text("[[datasets]]\nimage_directory = 'img'\n")
    return place


def accepted(place, document):
    """Converts a document and loads what comes of it, unless the converter refuses the document."""
    text = json.dumps(document).replace("Infinity", "1e999")  # which JSON has, as a number too large for any program
    (place / "any.json").write_text(text)
    try:
        found = convert(place / "any.json")
    except (ConfigError, PathError) as error:
        event(f"refused: {str(error).partition(': ')[2][:30]}")
        return
    event("converted")
    (place / "dataset.toml").write_text(render_recipe(found.recipe, base=place, remarks=found.remarks))
    load_recipe(place / "dataset.toml", choices={})
    assert not prompts_of(found.prompts.encode(), place / "prompts.txt", "x")[1]
    if found.training is not None:
        parse(tomllib.loads(found.training.rendered("x")), "train.toml")


@given(document=kohyas())
def test_a_configuration_of_sd_scripts(project, document):
    accepted(project, document)


@given(document=datasets())
def test_a_dataset_file_of_sd_scripts(project, document):
    accepted(project, document)


@given(document=onetrainers())
def test_a_configuration_of_onetrainer(project, document):
    accepted(project, document)


@given(document=concepts())
def test_concepts_of_onetrainer(project, document):
    accepted(project, document)


@given(document=simpletuners())
def test_backends_of_simpletuner(project, document):
    accepted(project, document)


@given(document=jobs())
def test_a_job_of_ai_toolkit(project, document):
    accepted(project, document)


@given(document=musubis())
def test_a_configuration_of_musubi_tuner(project, document):
    accepted(project, document)


@given(document=pipes())
def test_a_configuration_of_diffusion_pipe(project, document):
    data = document.pop("data")
    (project / "pipe.json").write_text(json.dumps(data).replace("Infinity", "1e999"))
    accepted(project, document)
    accepted(project, {"resolutions": [512], **data})


@given(document=civitais())
def test_parameters_of_civitai(project, document):
    accepted(project, document)
