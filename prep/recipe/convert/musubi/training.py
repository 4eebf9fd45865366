"""Converts training settings of musubi-tuner (`--config_file`) to recipe and `train.toml`.

They have the names of sd-scripts' and mostly its meaning; what is trained, on which layers, and how timesteps are drawn
is its own. The model's parts are single files. Names, defaults and units were compared with musubi-tuner 30c658c
(training/parser_common.py, training/trainer_base.py, networks/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.parse import Unparsed
from prep.recipe.convert.draft import ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.kohya.optimizer import arguments, put_optimizer, put_schedule
from prep.recipe.convert.kohya.text import prompts_for
from prep.recipe.convert.kohya.times import put_times
from prep.recipe.convert.kohya.training import WORDS, dataset_document, flat_of, put_batches, put_others
from prep.recipe.convert.musubi import dataset
from prep.recipe.convert.training import Training, number_of

_NETWORKS = "networks.lora_"
# The layers that its modules for families here adapt: of blocks, without modulation; for Krea 2 every one.
_LAYERS: Mapping[str, str | list[str]] = {
    **dict.fromkeys(("qwen_image", "flux", "flux_2"), "all-linear"), "krea2": "kohya",
    "zimage": [r"re:^layers\.\d+\.(attention|feed_forward)\."],
}
_PRODUCTS: Mapping[str, str] = {"networks.loha": "loha", "networks.lokr": "lokr"}
_OWN = tuple(f"{_NETWORKS}{name}" for name in ("qwen_image", "zimage", "flux_2", "wan", "hv_1_5", "framepack",
                                               "kandinsky", "hidream_o1", "ideogram4"))  # which sd-scripts has not
_GUIDED = ("flux", "flux_2")  # which it gives a guidance of 1 in training
_RANK, _ALPHA = 4, 1.0  # its defaults
# Timesteps drawn as a logit-normal number, and shifted by the picture's size as its family's schedule does.
_BY_SIZE = ("flux_shift", "flux2_shift", "qwen_shift", "krea2_shift")
_SCHEMES: Mapping[str, str] = {"logit_normal": "logit-normal", "mode": "mode"}
_WEIGHTS: Mapping[str, str] = {"cosmap": "cosmap", "sigma_sqrt": "inverse-square"}
_SPEED = "affects only speed and memory: nothing to set"
_PARTS = "a single file: [model] path is a diffusers directory, which prep convert makes of files, or FILE@DIR"
_WORDS: Mapping[str, str] = {
    **{name: said for name, said in WORDS.items() if name != "batch_size"},
    **dict.fromkeys(("dit", "vae", "text_encoder", "text_encoder1", "text_encoder2"), _PARTS),
    **dict.fromkeys(("flash_attn", "sage_attn", "flash3", "split_attn", "vae_dtype", "dit_dtype", "vae_tiling",
                     "vae_chunk_size", "fp8_vl", "fp8_t5", "fp8_text_encoder", "fp8_llm", "img_in_txt_in_offloading",
                     "use_pinned_memory_for_block_swap", "block_swap_h2d_only", "block_swap_ring_size",
                     "disable_numpy_memmap", "compile_backend", "compile_mode", "compile_dynamic", "compile_fullgraph",
                     "compile_cache_size_limit", "dynamo_backend", "cuda_cudnn_benchmark"), _SPEED),
    "fp8_scaled": 'quantization = "fp8" has a scale for each row: nothing more to set',
    "turbo_dit": "in train.toml, [sample] model is another model that draws the pictures",
    "sample_at_first": "pictures are drawn after the steps of sample.every, never before the first",
    "resume": "train run --resume continues a run",
    **dict.fromkeys(("huggingface_repo_id", "huggingface_repo_type", "async_upload"), "upload the result with "
                    "train push"),
}
_QUIET = ("network_module", "save_state", "save_precision", "flow_shift", "guidance_scale")
_METADATA: Mapping[str, str] = {"metadata_title": "result.title", "metadata_author": "result.author",
                                "metadata_description": "result.description", "metadata_license": "result.license"}


def is_training(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> bool:
    """Whether a document in the directory `base` that may be sd-scripts' is musubi-tuner's: it names a `dit`, a network
    of its own, or a dataset file of its. Raises what `read` raises."""
    flat = flat_of(document)
    if "train_data_dir" in flat:
        return False
    named = flat.get("dataset_config")
    path = Draft(tool="musubi-tuner", base=base).existing(named) if isinstance(named, str) and named else None
    return "dit" in flat or flat.get("network_module") in _OWN or (
        path is not None and path.is_file() and dataset.is_dataset(read(path)))


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> ConvertedRecipe:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads other files.

    Raises `Unparsed`, and what `read` raises.
    """
    layer = Layer(table={name: value for name, value in flat_of(document).items() if value is not None}, where="")
    draft, training = Draft(tool="musubi-tuner", base=base, trains=True), Training()
    config = ToolConfig(draft=draft, layers=[layer])
    named = config.get("dataset_config", str, "")
    if not named:
        raise Unparsed("it has no dataset_config, expected the path of a dataset TOML")
    references = dataset.fill(draft, dataset_document(draft, named, read, "musubi-tuner's"))
    put_batches(config, training)
    put_optimizer(config, training)
    put_schedule(config, training)
    _method(config, training)
    _timesteps(config, training)
    _rest(config, training)
    training.settle()
    prompts, text = prompts_for(config, training, read)
    put_others(layer, training, _WORDS, _QUIET)
    converted = draft.finish()
    return replace(converted, training=training, prompts=text,
                   recipe=replace(converted.recipe, prompts=prompts, **references))


def _arch(config: ToolConfig) -> str:
    """The word in the name of its network module; that of one for all families is another."""
    return str(config.any("network_module") or "").removeprefix(_NETWORKS)


def _method(config: ToolConfig, training: Training) -> None:
    """Converts an adapter's kind, rank, alpha and layers, or all weights without one."""
    module, arch = config.any("network_module"), _arch(config)
    training.put("method", "full" if module is None else "lora", "network_module")
    if module is None:
        return
    kind = _PRODUCTS.get(str(module), "lora")
    if kind != "lora":
        training.put("lora.kind", kind, "network_module")
    elif arch not in _LAYERS:
        training.note("network_module", module, "no such family of models here: prep models has them; lora is written")
    rank, alpha = number_of(config.any("network_dim")), number_of(config.any("network_alpha"))
    training.put_rank("lora.rank", int(rank or _RANK), "network_dim", kind)
    training.put_nearest("lora.alpha", float(_ALPHA if alpha is None else alpha or rank or _RANK), "network_alpha")
    if dropout := number_of(config.any("network_dropout")):
        training.put_nearest("lora.dropout", dropout, "network_dropout")
    training.put("lora.targets", _LAYERS.get(arch, "all-linear"), "network_module")
    for word in arguments(config, "network_args"):
        _argument(word, kind, training)


def _argument(word: str, kind: str, training: Training) -> None:
    """Converts one of network_args, NAME=VALUE."""
    name, _, value = word.partition("=")
    factor = number_of(value)
    if (kind, name) == ("lokr", "factor") and factor and factor > 0:
        training.put_nearest("lora.factor", int(factor), "network_args factor")
    elif name in ("exclude_patterns", "include_patterns"):
        training.note(f"network_args {name}", value, "expressions of musubi-tuner's names of layers: choose them by "
                      "diffusers' in lora.targets")
    elif name == "conv_dim":
        training.note("network_args conv_dim", value, "flows have no convolutions to adapt; not written")
    else:
        training.note(f"network_args {name}", value, "no counterpart")


def _timesteps(config: ToolConfig, training: Training) -> None:
    """Converts the draws of timesteps, which leave out the schedule's own shift, and the weight of the loss."""
    kind, scheme = str(config.any("timestep_sampling") or "sigma"), str(config.any("weighting_scheme") or "none")
    shift, low, high = (number_of(config.any(name)) for name in ("discrete_flow_shift", "min_timestep",
                                                                  "max_timestep"))
    ends = (low or 0) / 1000, (1000 if high is None else high) / 1000
    if scheme in _WEIGHTS:
        training.put("loss.weighting", _WEIGHTS[scheme], "weighting_scheme")
    _distribution(config, kind, scheme, training)
    if kind in _BY_SIZE:
        training.put("timesteps.shift_by_size", "schedule", "timestep_sampling")
    elif kind in ("shift", "sigma") and shift not in (None, 1):
        training.put_nearest("timesteps.shift", shift, "discrete_flow_shift")
        training.note("discrete_flow_shift", shift, "timesteps.shift comes on top of the schedule's own: divide it by "
                      "'shift' of the scheduler's config, unless that has use_dynamic_shifting")
    if kind == "sigma":  # whose places are counted from the most noise
        ends = 1 - ends[1], 1 - ends[0]
    training.put_range(round(ends[0], 6), round(ends[1], 6), ("min_timestep", "max_timestep"))
    if _arch(config) in _GUIDED:
        training.put("guidance_embedding", 1.0, "network_module")


def _distribution(config: ToolConfig, kind: str, scheme: str, training: Training) -> None:
    """Converts the distribution of t, before its shift. "sigma", the default, takes places in a list of levels that
    begins with the most noise, so that a mean changes its sign; "logsnr" is sigmoid(-(mean + std z) / 2)."""
    mean, spread, mode, scale = (number_of(config.any(name)) for name in ("logit_mean", "logit_std", "mode_scale",
                                                                           "sigmoid_scale"))
    named, key = "logit-normal", "timestep_sampling"
    if kind == "sigma":
        named, key = _SCHEMES.get(scheme, "uniform"), "weighting_scheme"
    elif kind not in ("sigmoid", "shift", "logsnr", *_BY_SIZE):
        named = "uniform"
        if kind != "uniform":
            training.note("timestep_sampling", kind, "no counterpart; uniform is written")
    training.put("timesteps.distribution", named, key)
    if named == "mode":
        training.put_nearest("timesteps.mode_scale", 1.29 if mode is None else mode, "mode_scale")
    elif named == "logit-normal" and kind in ("sigma", "logsnr"):
        half = 2 if kind == "logsnr" else 1
        training.put_nearest("timesteps.mean", -mean / half if mean else 0.0, "logit_mean")
        training.put_nearest("timesteps.std", (1.0 if spread is None else spread) / half, "logit_std")
    elif named == "logit-normal" and scale not in (None, 1):
        training.put_nearest("timesteps.std", scale, "sigmoid_scale")


def _rest(config: ToolConfig, training: Training) -> None:
    """Converts precision, memory, seeds, checkpoints, samples and metadata."""
    for name, setting, kind in (("max_grad_norm", "optimizer.clip", float), ("seed", "seed", int)):
        if (value := number_of(config.any(name))) is not None:
            training.put(setting, kind(value), name)
    put_times(config, training)
    precision = str(config.any("mixed_precision") or "no").lower()
    training.put("precision", {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(precision, "auto"), "mixed_precision")
    _memory(config, training)
    training.put("loss.masked", False, "dataset_config")  # it knows no masks, although there may be some
    for name, setting in _METADATA.items():
        if isinstance(text := config.any(name), str):
            training.put(setting, text, name)
    if config.any("log_with") in ("wandb", "all"):
        training.put("log.wandb", str(config.any("log_tracker_name") or "network_train"), "log_tracker_name")
    if config.any("log_with") in ("tensorboard", "all"):
        training.put("log.tensorboard", True, "log_with")


def _memory(config: ToolConfig, training: Training) -> None:
    away = config.any("gradient_checkpointing_cpu_offload") is True
    if config.any("gradient_checkpointing"):
        training.put("gradient_checkpointing", "offload" if away else True, "gradient_checkpointing")
    lora = training.settings.get("method") == "lora"
    if config.any("fp8_base") and lora and "lora.kind" not in training.settings:
        training.put("quantization", "fp8", "fp8_base")
    count = number_of(config.any("blocks_to_swap"))
    if count and lora and training.settings.get("gradient_checkpointing"):
        training.put("offload", int(count), "blocks_to_swap")
    elif count:
        training.note("blocks_to_swap", count, "offload is for a LoRA with gradient_checkpointing; not written")
    training.put_full(half="full_bf16" if config.any("full_bf16") else "",
                      fused="fused_backward_pass" if config.any("fused_backward_pass") else "")
    for name, setting in (("compile", "compile"), ("cuda_allow_tf32", "tf32")):
        if config.any(name) is True:
            training.put(setting, True, name)
