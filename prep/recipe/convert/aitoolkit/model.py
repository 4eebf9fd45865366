"""Converts which model ai-toolkit trains, and how it holds it in memory."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.aitoolkit.family import FLAGS, arch_of, family_of
from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.training import Training, model_of, number_of
from prep.recipe.schema import ModelOptions

# The types of its quantized weights; the part after | is an adapter that makes up for the loss.
_QUANTIZED: Mapping[str, str] = {
    **dict.fromkeys(("qfloat8", "float8", "qfloat8_e4m3fn"), "fp8"), **dict.fromkeys(("qint8", "int8"), "int8"),
    **dict.fromkeys(("qint4", "uint4", "int4"), "nf4")}
_LEFT: Mapping[str, str] = {
    "low_vram": "prep encode and train run load one part at a time: nothing to set",
    "quantize_te": "text encoders are loaded by prep encode alone: [model] text_quantization",
    "qtype_te": "text encoders are loaded by prep encode alone: [model] text_quantization",
    "text_encoder_bits": "text encoders are loaded by prep encode alone: [model] text_quantization",
    "layer_offloading": 'in train.toml: offload = "auto"; not written',
    **dict.fromkeys(("layer_offloading_transformer_percent", "layer_offloading_text_encoder_percent"),
                    "train.toml has a number of blocks: offload"),
    **dict.fromkeys(("vae_path", "unet_path", "te_name_or_path", "extras_name_or_path", "model_paths",
                     "refiner_name_or_path"), "the whole model is that of [model] path; prep convert makes a directory "
                    "of parts"),
    "inference_lora_path": "in train.toml, [sample] model is another model that draws the pictures",
    "lora_path": "merge it into the model before: train merge",
    "accuracy_recovery_adapter": "no counterpart",
    "attn_masking": "the model's pipeline decides",
    "split_model_over_gpus": "in train.toml, [parallel] shard divides the model among processes",
}
_QUIET = ("dtype", "vae_dtype", "te_dtype", "use_text_encoder_1", "use_text_encoder_2", "compile_mode",
          "compile_fullgraph", "compile_dynamic", "block_compile", "cache_size_limit")


def put_model(model: ToolConfig, training: Training, *, lora: bool) -> ModelOptions:
    """The model, with what train.toml says of it."""
    if family_of(model) == "":
        training.note("model.arch", arch_of(model), "no such family of models here: prep models has them")
    for name in ("arch", *FLAGS):
        model.any(name)
    _adapter(model, training)
    if model.any("quantize") is True:
        _quantized(model, training, lora=lora)
    else:
        model.any("qtype")
    if model.any("compile") is True or model.any("block_compile") is True:
        training.put("compile", True, "model.compile")
    named = model.get("name_or_path", str, "")
    for name in (*_QUIET, *(("qtype_te",) if model.any("quantize_te") is not True else ())):
        model.any(name)
    for name, said in _LEFT.items():
        if (value := model.any(name)) and not (name == "extras_name_or_path" and value == named):
            training.note(f"model.{name}", value, said)
    return model_of(named, "model.name_or_path", training, model.draft.base) if named else ModelOptions()


def _quantized(model: ToolConfig, training: Training, *, lora: bool) -> None:
    named, _, adapter = str(model.any("qtype") or "qfloat8").partition("|")
    kind = _QUANTIZED.get(named)
    if kind is None:
        training.note("model.qtype", named, "no counterpart; fp8 is written")
    if adapter:
        training.note("model.qtype", adapter, "an adapter that makes up for the quantization: no counterpart")
    plain = training.settings.get("lora.kind", "lora") == "lora" and not training.settings.get("lora.dora")
    if lora and plain:
        training.put("quantization", kind or "fp8", "model.qtype")
    else:
        training.note("model.quantize", True, "only the base of a plain LoRA can be quantized; not written")


def _adapter(model: ToolConfig, training: Training) -> None:
    """Converts the adapter beside which a distilled model is trained, if its file is here."""
    named = model.any("assistant_lora_path")
    path = model.draft.existing(str(named)) if named else None
    if path is not None and path.is_file():
        training.put("base.adapter", str(path.absolute()), "model.assistant_lora_path")
    elif named:
        training.note("model.assistant_lora_path", named, "belongs to training: in train.toml, it is base.adapter, the "
                      "path of a file that is here")


def steps_there(train: ToolConfig, training: Training) -> int:
    """Adds batch and length; the steps that ai-toolkit counts in one update of the weights.

    With `gradient_accumulation` a step is an update, with the older `gradient_accumulation_steps` a batch.
    """
    size, updates, batches = (number_of(train.any(name)) for name in (
        "batch_size", "gradient_accumulation", "gradient_accumulation_steps"))
    count, divide = max(1, int(size or 1)), max(1, int(batches or 1))
    more = max(1, int(updates or 1)) * divide
    if batches is not None and batches < 0:
        training.note("train.gradient_accumulation_steps", batches, "an update for each epoch: no counterpart")
    training.put("batch_size", count * more, "train.batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "train.batch_size")
    steps = number_of(train.any("steps"))
    total = 1000 if steps is None else int(steps)
    training.put("steps", max(1, total // divide) if total > 0 else total, "train.steps")
    if divide > 1:
        training.note("train.gradient_accumulation_steps", divide, "ai-toolkit then counts batches as steps: all steps "
                      f"are written divided by {divide}")
    return divide
