"""Names of settings in other trainers, and what they are called here.

The names were looked up in kohya's sd-scripts (v0.10.1), OneTrainer (23df3832), SimpleTuner (bc8e6ab7), the example
scripts of diffusers (58eb52c0), diffusion-pipe (8f83dbf) and ai-toolkit (27a03a91).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Setting here → its names in other trainers.
_NAMES: Mapping[str, str] = {
    "method": "training_method model_type",
    "steps": "max_train_steps max_steps num_steps",
    "epochs": "max_train_epochs num_train_epochs num_epochs",
    "batch_size": "train_batch_size global_batch_size",
    "micro_batch": "micro_batch_size micro_batch_size_per_gpu",
    "precision": "mixed_precision train_dtype weight_dtype bf16 dtype",
    "prediction": "v_parameterization prediction_type",
    "caption_dropout": "caption_dropout_rate caption_dropout_probability proportion_empty_prompts",
    "zero_terminal_snr": "rescale_noise_scheduler_to_zero_terminal_snr rescale_betas_zero_snr",
    "guidance_embedding": "flux_guidance_value flux_guidance_embedding",
    "gradient_checkpointing": "activation_checkpointing cpu_offload_checkpointing",
    "base.adapter": "assistant_lora_path assistant_lora training_adapter",
    "base.adapter_scale": "assistant_lora_strength",
    "offload": "blocks_to_swap block_swap layer_offload_fraction group_offload musubi_blocks_to_swap",
    "quantization": "fp8_base base_model_precision quantize qtype fp8 nf4 int8 w8a8",
    "lora.rank": "network_dim lora_rank network_rank dim",
    "lora.alpha": "network_alpha lora_alpha",
    "lora.conv_rank": "conv_dim conv_lora_dim linear_conv_rank",
    "lora.rslora": "use_rslora rank_stabilized",
    "lora.kind": "algo peft_type lora_algo lycoris_algo",
    "lora.factor": "lokr_factor decompose_factor",
    "lora.init": "init_lora_weights lora_init",
    "lora.dora": "use_dora lora_decompose dora_wd",
    "lora.dropout": "network_dropout lora_dropout",
    "lora.targets": "target_modules layer_filter flux_lora_target",
    "lora.format": "save_model_as output_model_format lora_format",
    "full.dtype": "full_bf16 stochastic_rounding",
    "full.fused_backward": "fused_backward_pass fused_back_pass",
    "optimizer.name": "optimizer_type",
    "optimizer.lr": "learning_rate unet_lr unet_learning_rate",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.weight_decay": "adam_weight_decay",
    "optimizer.bias_correction": "use_bias_correction",
    "optimizer.clip": "max_grad_norm clip_grad_norm gradient_clipping",
    "schedule.name": "lr_scheduler learning_rate_scheduler scheduler",
    "schedule.warmup": "lr_warmup_steps warmup_steps learning_rate_warmup_steps",
    "schedule.floor": "lr_scheduler_min_lr_ratio learning_rate_min_factor min_lr_rate",
    "schedule.cycles": "lr_scheduler_num_cycles learning_rate_cycles lr_num_cycles",
    "schedule.power": "lr_scheduler_power lr_power",
    "loss.masked": "masked_loss masked_training",
    "loss.normalize_area": "normalize_masked_area_loss",
    "loss.min_snr": "min_snr_gamma snr_gamma loss_weight_strength",
    "loss.huber": "huber_c huber_delta huber_strength",
    "timesteps.distribution": "timestep_sampling timestep_distribution timestep_sample_method",
    "timesteps.mean": "logit_mean",
    "timesteps.std": "logit_std",
    "timesteps.shift": "discrete_flow_shift timestep_shift",
    "noise.offset": "noise_offset offset_noise offset_noise_weight",
    "noise.pyramid": "multires_noise_discount",
    "noise.pyramid_levels": "multires_noise_iterations",
    "noise.perturbation": "ip_noise_gamma input_perturbation",
    "timesteps.shift_by_size": "dynamic_timestep_shifting flow_schedule_auto_shift flux_shift",
    "ema.decay": "ema_decay use_ema",
    "validation.every": "validate_every_n_steps validate_after eval_every_n_steps eval_steps_interval",
    "sample.every": "sample_every_n_steps sample_every sample_after validation_steps validation_step_interval",
    "sample.sampler": "sample_sampler noise_scheduler validation_noise_scheduler sampler",
    "sample.steps": "sample_steps validation_num_inference_steps num_inference_steps diffusion_steps",
    "sample.guidance": "cfg_scale validation_guidance",
    "sample.seed": "validation_seed",
    "sample.size": "validation_resolution",
    "checkpoint.every": "save_every_n_steps save_every checkpointing_steps checkpoint_step_interval backup_after",
    "result.dtype": "save_precision output_dtype",
    "result.title": "metadata_title modelspec_title",
    "result.author": "metadata_author",
    "result.description": "metadata_description",
    "result.license": "metadata_license",
    "result.trigger": "metadata_trigger_phrase trigger_word",
    "checkpoint.keep": "checkpoints_total_limit rolling_backup_count max_step_saves_to_keep",
}

_OF_PREP = "prep encode decides it, by the recipe or an option"
_OF_EPOCHS = "= \"1 epoch\", or another number of epochs"

# Names without a counterpart among the settings → what to use instead.
_ELSEWHERE: Mapping[str, str] = {
    "guidance_scale": "here it is sample.guidance for pictures, and guidance_embedding for the number that FLUX takes "
                      "in training",
    "gradient_accumulation_steps": "no counterpart: an optimizer step takes batch_size samples, micro_batch of them a "
                                   "forward pass",
    **dict.fromkeys(("save_every_n_epochs", "save_n_epoch_ratio", "checkpoint_every_n_epochs",
                     "checkpoint_epoch_interval"), f"here it is checkpoint.every {_OF_EPOCHS}"),
    **dict.fromkeys(("sample_every_n_epochs", "validation_epoch_interval"), f"here it is sample.every {_OF_EPOCHS}"),
    **dict.fromkeys(("validate_every_n_epochs", "eval_every_n_epochs", "eval_epoch_interval"),
                    f"here it is validation.every {_OF_EPOCHS}"),
    "save_last_n_steps": "checkpoint.keep is the number of checkpoints, not of steps",
    "save_last_n_epochs": "checkpoint.keep is the number of checkpoints; checkpoint.every is the time between them",
    "sample_prompts": "prep prompts FILE --manifest MANIFEST encodes prompts, and the manifest names the file",
    "validation_prompt": "prep prompts FILE --manifest MANIFEST encodes prompts, and the manifest names the file",
    "output": "it is an option: train run -o RUN",
    "output_dir": "it is an option: train run -o RUN",
    "output_name": "it is an option: train run -o RUN",
    "output_model_destination": "it is an option: train run -o RUN",
    "workspace_dir": "it is an option: train run -o RUN",
    "pretrained_model_name_or_path": "it is an option: train run --model MODEL; the default is the manifest's",
    "base_model_name": "it is an option: train run --model MODEL; the default is the manifest's",
    "model": "it is an option: train run --model MODEL; the default is the manifest's",
    "resume": "it is an option: train run --resume",
    "resume_from_checkpoint": "it is an option: train run --resume --from step-N",
    "device": "it is an option: train run --device",
    "save_state": "no counterpart: every checkpoint holds the whole state",
    "network_module": "method = \"lora\" trains adapters, and lora.kind says which: lora, loha or lokr",
    "network_args": "lora.targets says which layers get an adapter",
    "text_encoder_lr": "no counterpart: text encoders are never trained",
    "train_text_encoder": "no counterpart: text encoders are never trained",
    "network_train_unet_only": "no counterpart: text encoders are never trained",
    "xformers": "no counterpart: PyTorch's own attention is used",
    "sdpa": "no counterpart: PyTorch's own attention is used",
    "perturbation_noise_weight": "no counterpart: noise.perturbation leaves the target as it is, and OneTrainer's "
                                 "does not",
    "adaptive_noise_scale": "no counterpart: noise.offset is the same for every sample",
    "cache_latents": "no counterpart: latents always come from the cache",
    "cache_latents_to_disk": "no counterpart: latents always come from the cache",
    **dict.fromkeys(("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps",
                     "bucket_no_upscale", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens", "clip_skip",
                     "max_token_length", "caption_extension", "train_data_dir", "reg_data_dir", "dataset_config",
                     "instance_data_dir", "data_backend_config", "aspect_ratio_bucketing", "concepts"), _OF_PREP),
}

_HERE = {name: setting for setting, names in _NAMES.items() for name in names.split()}


def advice(word: str, settings: Iterable[str], *, inside: bool = False) -> str:
    """What to write instead of the unknown key `word`, as the end of a message; empty if it is unknown everywhere.

    `inside`: whether it is in a section.
    """
    if names := meant(word, settings):
        return f"; here it is {' or '.join(_placed(name) if inside else name for name in names)}"
    explanation = _ELSEWHERE.get(_plain(word))
    return f"; {explanation}" if explanation else ""


def _placed(name: str) -> str:
    return name if "." in name else f"{name}, which is in no [section], but above them"


def meant(word: str, settings: Iterable[str]) -> list[str]:
    """The settings whose name in another trainer, or without its section, is `word`: `rank` is lora.rank."""
    name = _plain(word)
    if name in _HERE:
        return [_HERE[name]]
    if name in _ELSEWHERE:
        return []
    known = [setting for setting in settings if setting.rpartition(".")[2] == name]
    return [name] if name in known else known


def _plain(word: str) -> str:
    """`word` without its section, in the spelling of our settings."""
    return re.split(r"[./:\s]", word.strip())[-1].lower().replace("-", "_")
