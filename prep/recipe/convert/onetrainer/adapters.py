"""Converts what OneTrainer trains, and in which precision: adapters or all weights."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.onetrainer.family import denoiser_of, model_type, part_of
from prep.recipe.convert.training import WHOLE, Training, number_of

_METHODS: Mapping[str, str] = {"LORA": "lora", "FINE_TUNE": "full"}
_DTYPES: Mapping[str, str] = {"BFLOAT_16": "bf16", "FLOAT_16": "fp16", "FLOAT_32": "fp32",
                              "TFLOAT_32": "fp32"}
_PEFT: Mapping[str, str] = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr"}
_QUANTIZED: Mapping[str, str] = {"NFLOAT_4": "nf4", "FLOAT_8": "fp8", "FLOAT_W8A8": "fp8-w8a8",
                                 "INT_8": "int8", "INT_W8A8": "int8"}
_RANK = 16  # OneTrainer's default, as those of the others
_LORA: Mapping[str, tuple[str, float]] = {"lora_alpha": ("lora.alpha", 1.0),
                                          "dropout_probability": ("lora.dropout", 0.0)}
# What its presets write: attn-only, and of a UNet attn-mlp, which has the layers around the blocks, as kohya has.
_FILTERS: Mapping[str, str] = {"attn": "attention", "attentions": "kohya"}
# By the start of model_type, the preset nearest to OneTrainer's default, every linear and convolution layer; of other
# models that is all-linear, although it leaves out more. None has the embeddings and the last layers.
_WHOLE: Mapping[str, str] = {"STABLE_DIFFUSION_3": "kohya", "STABLE_DIFFUSION": "kohya-conv", "FLUX_DEV": "kohya",
                             "FLUX_FILL_DEV": "kohya", "CHROMA": "kohya"}


def put_method(config: ToolConfig, training: Training) -> None:
    """Converts the method, an adapter's kind and the dtypes."""
    method = str(config.any("training_method") or "FINE_TUNE")
    training.put("method", _METHODS.get(method, "lora"), "training_method")
    if method not in _METHODS:
        training.note("training_method", method, "the methods are LoRA and full fine-tuning; lora is written")
    kind = config.any("peft_type")
    if kind not in (None, *_PEFT):
        training.note("peft_type", kind, "no such adapter here; lora is written")
    is_lora = method not in _METHODS or method == "LORA"
    _lora(config, training, is_lora=is_lora)
    product, decomposed = _PEFT.get(str(kind), "lora"), config.any("lora_decompose") is True
    if is_lora and product != "lora":
        training.put("lora.kind", product, "peft_type")
    elif is_lora and decomposed:
        training.put("lora.dora", True, "lora_decompose")
    weights = str(part_of(config, denoiser_of(config)).get("weight_dtype") or "")
    weights = str(config.any("weight_dtype")) if weights == "NONE" else weights  # of all parts, in older files
    if is_lora and product == "lora" and not decomposed and weights in _QUANTIZED:
        training.put("quantization", _QUANTIZED[weights], "weight_dtype")
    dtype = str(config.any("train_dtype") or "FLOAT_16")
    if dtype == "TFLOAT_32":
        training.put("tf32", True, "train_dtype")
    training.put("precision", _DTYPES.get(dtype, "auto"), "train_dtype")
    if dtype not in _DTYPES:
        training.note("train_dtype", dtype, "no counterpart; auto uses bf16 if the device supports it")
    checkpointing = config.any("gradient_checkpointing")  # of older files; since version 11 each model part has its own
    if not config.has("gradient_checkpointing"):
        checkpointing = part_of(config, denoiser_of(config)).get("gradient_checkpointing", True)
    training.put("gradient_checkpointing",
                 "offload" if checkpointing == "CPU_OFFLOADED" else checkpointing not in (False, "OFF"),
                 "gradient_checkpointing")
    if config.any("compile") is True:
        training.put("compile", True, "compile")
    for kind in ("v", "epsilon"):
        if config.any(f"force_{kind}_prediction"):
            training.put("prediction", {"v": "v_prediction"}.get(kind, kind), f"force_{kind}_prediction")


def _lora(config: ToolConfig, training: Training, *, is_lora: bool) -> None:
    product = config.any("peft_type") == "LOKR"  # whose rank has another name
    ranks = {name: number_of(config.any(name)) for name in ("lora_rank", "lokr_dim")}
    factor = number_of(config.any("lokr_decompose_factor"))
    if is_lora and product and factor and factor > 0:
        training.put_nearest("lora.factor", int(factor), "lokr_decompose_factor")
    whole = product and config.any("lokr_full_matrix") is True
    rank = WHOLE if whole else ranks["lokr_dim" if product else "lora_rank"]
    if is_lora:
        key = "lokr_dim" if product else "lora_rank"
        training.put_rank("lora.rank", int(_RANK if rank is None else rank), key, "lokr" if product else "lora")
    if is_lora and whole:
        training.note("lokr_full_matrix", True, f"written as a rank of {WHOLE}")
    for name, (setting, usual) in _LORA.items():
        value = number_of(config.any(name))
        if is_lora:
            training.put_nearest(setting, usual if value is None else value, name)
    layers, by_pattern = str(config.any("layer_filter") or ""), config.any("layer_filter_regex")
    config.any("layer_filter_preset")  # what the GUI filled layer_filter with
    if not is_lora:
        return
    known = layers in _FILTERS and not by_pattern
    targets = _FILTERS[layers] if known else "all-linear" if layers else _whole(config)
    training.put("lora.targets", targets, "layer_filter")
    if layers and not known:
        training.note("layer_filter", layers, "lora.targets is a preset or a list of layers: all-linear is written, "
                      "the linear layers of the transformer blocks")
    elif not layers:
        training.note("layer_filter", None, "OneTrainer's default adapts every linear and convolution layer: "
                      f"{targets} is the nearest preset of lora.targets, without embeddings and the last layers")


def _whole(config: ToolConfig) -> str:
    """The preset for every layer of a model."""
    kind = model_type(config)
    return next((preset for start, preset in _WHOLE.items() if kind.startswith(start)), "all-linear")
