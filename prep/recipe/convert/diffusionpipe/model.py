"""Converts which model diffusion-pipe trains, its adapter, and the noise with which it trains.

A flow draws t without its schedule's own shift: `shift` is all of it, `flux_shift` that by the picture's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.layers import BLOCKS, blocks_of
from prep.recipe.convert.training import Training, model_of, number_of
from prep.recipe.schema import ModelOptions

# By `type`, with the name of the family that takes references, if there is one; others are no family here.
_FAMILIES: Mapping[str, tuple[str, str]] = {
    "sdxl": ("sdxl", ""), "flux": ("flux", "flux_kontext"), "chroma": ("chroma", ""), "lumina_2": ("lumina2", ""),
    "hidream": ("hidream", ""), "sd3": ("sd3", ""), "qwen_image": ("qwenimage", "qwenimage_edit"),
    "auraflow": ("auraflow", ""), "z_image": ("zimage", ""), "flux2": ("flux2", ""), "anima": ("anima", ""),
    "krea2": ("krea2", ""), "ernie_image": ("ernie", ""),
}
_DYNAMIC = ("flux", "flux_kontext", "chroma", "qwenimage", "qwenimage_edit", "flux2", "krea2")  # shifted by size here
_GUIDED = ("flux", "flux_kontext", "flux2")  # whose denoisers take guidance as a number
# The linear layers of SDXL's blocks; Z-Image's, with its refiners.
_LAYERS: Mapping[str, list[str]] = {
    "sdxl": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "time_emb_proj"],
    "zimage": [r"re:^(?:layers|noise_refiner|context_refiner)\."]}
_KINDS: Mapping[str, str] = {"lora": "lora", "lokr": "lokr"}
_PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PARTS = ("a file of one part: [model] path is a diffusers directory, or FILE@DIR of a denoiser; prep convert makes a "
          "directory of files")
_FILES = ("transformer_path", "vae_path", "llm_path", "clip_path", "t5_path", "text_encoder_path", "byt5_path",
          "llama3_path", "ckpt_path", "single_file_path", "diffusion_model", "vae", "text_encoders", "unet_path")
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(_FILES, _PARTS),
    "merge_adapters": "merge LoRAs into the model before: train merge",
    "bypass_guidance_embedding": "guidance is given as a number: guidance_embedding",
    "cache_text_embeddings": "captions are encoded once, by prep encode: nothing to set",
    **dict.fromkeys(("text_encoder_1_lr", "text_encoder_2_lr", "llm_adapter_lr"), "text encoders are never trained: no "
                    "counterpart"),
    **dict.fromkeys(("llama3_4bit", "text_encoder_nf4"), "text encoders are loaded by prep encode alone: [model] "
                    "text_quantization"),
    "max_llama3_sequence_length": "the model family's number of tokens, or [model] max_length",
}


def family_of(model: ToolConfig, *, edits: bool) -> str:
    """Our name of the model's family; "" if it is none of ours. `edits`: whether pictures have references."""
    plain, editing = _FAMILIES.get(str(model.any("type")), ("", ""))
    return editing or plain if edits else plain


def put_method(adapter: ToolConfig | None, family: str, training: Training) -> None:
    """Converts an adapter's kind, rank and layers, or all weights without one; alpha is the rank."""
    training.put("method", "full" if adapter is None else "lora", "adapter")
    if adapter is None:
        return
    named = str(adapter.any("type") or "lora")
    if named not in _KINDS:
        training.note("adapter.type", named, "no such adapter here; lora is written")
    kind = _KINDS.get(named, "lora")
    if kind != "lora":
        training.put("lora.kind", kind, "adapter.type")
    rank = number_of(adapter.any("rank"))
    training.put_rank("lora.rank", 16 if rank is None else int(rank), "adapter.rank", kind)
    training.put("lora.alpha", float(training.settings.get("lora.rank", 16)), "adapter.rank")
    if dropout := number_of(adapter.any("dropout")):
        training.put_nearest("lora.dropout", float(dropout), "adapter.dropout")
    factor = number_of(adapter.any("decompose_factor"))
    if kind == "lokr" and factor and factor > 0:
        training.put_nearest("lora.factor", int(factor), "adapter.decompose_factor")
    adapter.any("dtype")  # trained weights are float32 here
    if start := adapter.any("init_from_existing"):
        training.note("adapter.init_from_existing", start, "an option of train run: --init-from FILE")
    if fused := adapter.any("fuse_adapters"):
        training.note("adapter.fuse_adapters", fused, "merge LoRAs into the model before: train merge")
    targets: str | list[str] = _LAYERS.get(family) or blocks_of(family)
    if targets == "all-linear" or family not in (*BLOCKS, *_LAYERS):
        training.note("adapter", None, f"diffusion-pipe adapts every linear layer of the blocks: {targets} is the "
                      "nearest preset of lora.targets")
    training.put("lora.targets", targets, "adapter")


def put_noise(model: ToolConfig, family: str, training: Training) -> None:
    """Converts the draws of timesteps, and what only SDXL has."""
    if family == "sdxl":
        _of_diffusion(model, training)
        return
    method, key = str(model.any("timestep_sample_method") or "logit_normal"), "model.timestep_sample_method"
    training.put("timesteps.distribution", "logit-normal" if method == "logit_normal" else "uniform", key)
    if method not in ("logit_normal", "uniform"):
        training.note(key, method, "no counterpart; uniform is written")
    scale, shift = number_of(model.any("sigmoid_scale")), number_of(model.any("shift"))
    if scale not in (None, 1) and method == "logit_normal":
        training.put_nearest("timesteps.std", float(scale), "model.sigmoid_scale")
    by_size = [name for name in ("flux_shift", "lumina_shift") if model.any(name) is True]
    if shift:
        training.put_nearest("timesteps.shift", float(shift), "model.shift")
    elif by_size and family in _DYNAMIC:
        training.put("timesteps.shift_by_size", "schedule", f"model.{by_size[0]}")
    elif by_size:
        training.note(f"model.{by_size[0]}", True, "shifts by the picture's size, as FLUX.1's schedule does; this "
                      'model\'s schedule does not: the nearest is timesteps.shift_by_size = "area"')
    if family not in _DYNAMIC:
        training.note("model.shift" if shift else key, shift or method, "diffusion-pipe leaves out the schedule's own "
                      "shift: where its config has a shift other than 1, and no use_dynamic_shifting, divide "
                      "timesteps.shift by that")
    low, high = (number_of(model.any(name)) for name in ("min_t", "max_t"))
    training.put_range(low or 0.0, 1.0 if high is None else high, ("model.min_t", "model.max_t"))
    guidance = number_of(model.any("guidance"))
    if family in _GUIDED:
        training.put_nearest("guidance_embedding", 1.0 if guidance is None else float(guidance), "model.guidance")


def _of_diffusion(model: ToolConfig, training: Training) -> None:
    gamma, predicts_v = number_of(model.any("min_snr_gamma")), model.any("v_pred") is True
    if gamma:
        training.put_nearest("loss.min_snr", float(gamma), "model.min_snr_gamma")
    if predicts_v:
        training.put("prediction", "v_prediction", "model.v_pred")
    if model.any("debiased_estimation_loss"):
        training.put_debiased("model.debiased_estimation_loss", True, predicts_v=predicts_v,
                              beside="min_snr_gamma" if gamma else "")
    training.note("model.type", "sdxl", "diffusion-pipe trains SDXL's text encoders, too; here they are never trained")


def put_model(model: ToolConfig, training: Training, *, lora: bool) -> ModelOptions:
    """The model: a diffusers directory, or SDXL's single file; precision and quantization. Raises `Unparsed`."""
    kind = str(model.any("type"))
    if kind not in _FAMILIES:
        training.note("model.type", kind, "no such family of models here: prep models has them")
    dtype = str(model.any("dtype") or "bfloat16")
    training.put("precision", _PRECISIONS.get(dtype, "auto"), "model.dtype")
    if dtype not in _PRECISIONS:
        training.note("model.dtype", dtype, "no counterpart; auto uses bf16 if the device supports it")
    for name in ("transformer_dtype", "diffusion_model_dtype"):
        _weights(name, model.any(name), lora, training)
    for name, said in _LEFT.items():
        if value := model.any(name):
            training.note(f"model.{name}", value, said)
    key = next((name for name in ("diffusers_path", "checkpoint_path") if model.has(name)), "")
    named: Any = model.get(key, str, "") if key else ""
    return model_of(named, f"model.{key}", training, model.draft.base) if named else ModelOptions()


def _weights(name: str, dtype: Any, lora: bool, training: Training) -> None:
    """Converts the dtype of the denoiser's weights: 8 or 4 bits of a LoRA's base."""
    kinds = {"float8": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "nf4": "nf4"}
    if dtype in kinds and lora and "lora.kind" not in training.settings:
        training.put("quantization", kinds[dtype], f"model.{name}")
        if dtype == "float8_e5m2":
            training.note(f"model.{name}", dtype, "fp8 is written, of e4m3 with a scale for each row")
    elif dtype not in (None, *_PRECISIONS) or (dtype in kinds and not lora):
        training.note(f"model.{name}", dtype, "only the base of a plain LoRA can be quantized; not written")
    elif dtype is not None:
        training.note(f"model.{name}", dtype, "the frozen weights of a LoRA have the dtype of the precision")
