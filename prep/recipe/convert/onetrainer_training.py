"""Converts OneTrainer's main configuration (JSON) and its concepts to a recipe and a `train.toml`.

A setting that the file lacks has OneTrainer's default. Its steps are batches; ours are optimizer steps, of
gradient_accumulation_steps batches each. Names, defaults and units were compared with OneTrainer's master branch of
2026-08-19 (23df3832: modules/util/config/TrainConfig.py, util/create.py, module/EMAModule.py, trainer/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

from prep.errors import PathError
from prep.parse import Unparsed, brief, hub_id
from prep.recipe.convert import onetrainer
from prep.recipe.convert.draft import OFF, Asked, Converted, Draft, Layer
from prep.recipe.convert.training import Training, number_of
from prep.recipe.schema import ImageOptions, ModelOptions
from prep.recipe.validate import MOST_LAYERS, MOST_TOKENS

_METHODS: Mapping[str, str] = {"LORA": "lora", "FINE_TUNE": "full"}
_DTYPES: Mapping[str, str] = {"BFLOAT_16": "bf16", "FLOAT_16": "fp16", "FLOAT_32": "fp32",
                              "TFLOAT_32": "fp32"}
_PEFT: Mapping[str, str] = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr"}
_QUANTIZED: Mapping[str, str] = {"NFLOAT_4": "nf4", "FLOAT_8": "fp8"}
_LORA: Mapping[str, tuple[str, type, float]] = {  # with OneTrainer's defaults
    "lora_rank": ("lora.rank", int, 16), "lora_alpha": ("lora.alpha", float, 1.0),
    "dropout_probability": ("lora.dropout", float, 0.0),
}
# What its presets write: attn-only, and of a UNet attn-mlp, which has the layers around the blocks, as kohya has.
_FILTERS: Mapping[str, str] = {"attn": "attention", "attentions": "kohya"}
# By the start of model_type, the preset nearest to OneTrainer's default, every linear and convolution layer; of other
# models that is all-linear, although it leaves out more. None has the embeddings and the last layers.
_WHOLE: Mapping[str, str] = {"STABLE_DIFFUSION_3": "kohya", "STABLE_DIFFUSION": "kohya-conv", "FLUX_DEV": "kohya",
                             "FLUX_FILL_DEV": "kohya", "CHROMA": "kohya"}
_OPTIMIZERS: Mapping[str, str] = {
    "ADAMW": "adamw", "ADAMW_8BIT": "adamw-8bit", "ADAFACTOR": "adafactor", "LION": "lion", "PRODIGY": "prodigy",
    "SCHEDULE_FREE_ADAMW": "adamw-schedule-free",
}
_OF_OPTIMIZER: Mapping[str, str] = {"weight_decay": "weight_decay", "eps": "eps", "d_coef": "d_coef",
                                    "use_bias_correction": "bias_correction", "safeguard_warmup": "safeguard_warmup"}
_SWITCHES = ("bias_correction", "safeguard_warmup")
_SCHEDULES: Mapping[str, str] = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine",
                                 "COSINE_WITH_HARD_RESTARTS": "cosine-restarts"}
_EVERY: Mapping[str, tuple[float | None, str]] = {  # OneTrainer's defaults; those in minutes have no counterpart
    "sample_after": (None, "MINUTE"), "backup_after": (None, "MINUTE"), "save_every": (None, "NEVER"),
    "validate_after": (1, "EPOCH"),
}
_COUNTED = ("STEP", "EPOCH")
# Older names of settings, and the last version of the configuration that has them.
_RENAMED: Mapping[str, tuple[str, int]] = {
    "save_after": ("save_every", 5), "save_after_unit": ("save_every_unit", 5), "lora_layers": ("layer_filter", 7),
    "lora_layer_preset": ("layer_filter_preset", 7), "lora_layers_regex": ("layer_filter_regex", 7)}
# How many text encoders a model has, by the start of model_type; others have one.
_ENCODERS: Mapping[str, int] = {"STABLE_DIFFUSION_XL": 2, "STABLE_DIFFUSION_3": 3, "FLUX_DEV": 2, "FLUX_FILL": 2,
                                "HUNYUAN": 2, "HI_DREAM": 4}
_DISTRIBUTIONS: Mapping[str, str] = {"UNIFORM": "uniform", "LOGIT_NORMAL": "logit-normal", "HEAVY_TAIL": "mode"}
_LOSSES: Mapping[str, float] = {"mse": 1.0, "mae": 0.0, "log_cosh": 0.0, "huber": 0.0}  # OneTrainer's defaults
_SILENT = {"__version", "concept_file_name", "concepts", "model_type", "base_model_name", "optimizer", "unet",
           "concept_stats", "optimizer_defaults", "secrets", "prior", "transformer",  # of them it uses the model's one
           *(f"text_encoder_{number}" for number in (2, 3, 4))}


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> Converted:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads the concepts' file.

    Raises `Unparsed`, and what `read` raises.
    """
    draft = Draft(tool="onetrainer", base=base, trains=True)
    table = _current(document)
    layer = Layer(table=table, where="")
    asked = Asked(draft=draft, layers=[layer])
    onetrainer.fill(draft, _concepts(asked, read), _image(asked))
    training = Training()
    _method(asked, training)
    _batches(asked, training)
    _optimizer(asked, training)
    _schedule(asked, training)
    _loss(asked, training)
    _errors(asked, training)
    _draws(asked, training)
    _parts(asked, training)
    _times(asked, training)
    training.settle()
    model = replace(_model(asked, training), **_text(asked, training))
    known = layer.asked | _SILENT
    left = sorted(name for name, value in table.items() if name not in known and value not in (*OFF, "NONE"))
    if left:
        training.note("other settings", None, f"no counterpart: {', '.join(left)}")
    found = draft.finish()
    return replace(found, training=training, recipe=replace(found.recipe, model=model))


def _current(document: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the names of OneTrainer's newest version, as it reads older ones itself."""
    given, table = document.get("__version"), dict(document)
    version = given if type(given) is int else 0
    for name, (new, last) in _RENAMED.items():
        if name in table and new not in table and version <= last:
            table[new] = table.pop(name)
    if version <= 2 and "loss_weight_fn" not in table and number_of(table.get("min_snr_gamma")):
        table |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": table.pop("min_snr_gamma")}
    if type(given) is int and version <= 3:  # it had one distribution besides the uniform one
        table["timestep_distribution"] = "SIGMOID" if number_of(table.get("noising_weight")) else "UNIFORM"
    if "prior" in table and version <= 8 and ("transformer" not in table or type(given) is int):
        table["transformer"] = table["prior"]
    return table


def _kind(asked: Asked) -> str:
    return str(asked.any("model_type") or "STABLE_DIFFUSION_15")


def _denoiser(asked: Asked) -> str:
    """The part of the model that is trained, of which the others' settings have no effect."""
    kind = _kind(asked)
    if kind.startswith(("WUERSTCHEN", "STABLE_CASCADE")):
        return "prior"
    has_unet = kind.startswith("STABLE_DIFFUSION") and not kind.startswith("STABLE_DIFFUSION_3")
    return "unet" if has_unet else "transformer"


def _parts(asked: Asked, training: Training) -> None:
    """Notes on parts of the model that OneTrainer trains, or reads from elsewhere, and converts caption dropout."""
    name = _denoiser(asked)
    if _part(asked, name).get("train") is False:
        training.note(f"{name}.train", False, "here the denoiser is always trained")
    if own := _part(asked, name).get("model_name"):
        training.note(f"{name}.model_name", own, "the whole model is that of [model] path: no counterpart")
    count = next((number for start, number in _ENCODERS.items() if _kind(asked).startswith(start)), 1)
    names = ["text_encoder", *(f"text_encoder_{number}" for number in range(2, count + 1))]
    for name in names:
        if _part(asked, name).get("train", True) not in (False, None):
            training.note(f"{name}.train", None, "text encoders are never trained: no counterpart")
    rates = [number_of(_part(asked, name).get("dropout_probability")) or 0.0 for name in names]
    if not any(rates):
        return
    key = f"{names[rates.index(max(rates))]}.dropout_probability"
    training.put("caption_dropout", max(rates), key)
    training.note(key, max(rates), "a dropped caption becomes the unconditional row; OneTrainer uses zeros")
    if len(set(rates)) > 1:
        training.note("dropout_probability", rates, "one rate for all text encoders; the largest is written")


def _concepts(asked: Asked, read: Callable[[Path], Any]) -> list[Any]:
    """The concepts in the configuration, or those in the file that it names."""
    inside, named = asked.any("concepts"), asked.any("concept_file_name")
    if isinstance(inside, list) and inside:
        return inside
    why = f"it is OneTrainer's main configuration, expected the concepts that it names, {brief(named)}"
    if not isinstance(named, str) or not named:
        raise Unparsed(why)
    try:
        found = read(asked.draft.place(named, "concept_file_name"))
    except PathError:
        raise Unparsed(why) from None
    if not isinstance(found, list):
        raise Unparsed(f"{named} is not a list, expected OneTrainer's concepts")
    return found


def _image(asked: Asked) -> ImageOptions:
    plain = ImageOptions(buckets="ratio" if asked.any("aspect_ratio_bucketing") in (None, True) else "single",
                         upscale="allow")
    named = asked.any("resolution")
    return plain if named is None else onetrainer.with_resolution(asked, "resolution", str(named), plain)


def _method(asked: Asked, training: Training) -> None:
    method = str(asked.any("training_method") or "FINE_TUNE")
    training.put("method", _METHODS.get(method, "lora"), "training_method")
    if method not in _METHODS:
        training.note("training_method", method, "the methods are LoRA and full fine-tuning; lora is written")
    kind = asked.any("peft_type")
    if kind not in (None, *_PEFT):
        training.note("peft_type", kind, "no such adapter here; lora is written")
    wanted = method not in _METHODS or method == "LORA"
    _lora(asked, training, wanted=wanted)
    product, decomposed = _PEFT.get(str(kind), "lora"), asked.any("lora_decompose") is True
    if wanted and product != "lora":
        training.put("lora.kind", product, "peft_type")
    elif wanted and decomposed:
        training.put("lora.dora", True, "lora_decompose")
    weights = str(_part(asked, _denoiser(asked)).get("weight_dtype") or "")
    weights = str(asked.any("weight_dtype")) if weights == "NONE" else weights  # of all parts, in older files
    if wanted and product == "lora" and not decomposed and weights in _QUANTIZED:
        training.put("quantization", _QUANTIZED[weights], "weight_dtype")
    dtype = str(asked.any("train_dtype") or "FLOAT_16")
    if dtype == "TFLOAT_32":
        training.put("tf32", True, "train_dtype")
    training.put("precision", _DTYPES.get(dtype, "auto"), "train_dtype")
    if dtype not in _DTYPES:
        training.note("train_dtype", dtype, "no counterpart; auto uses bf16 if the device supports it")
    checkpointing = asked.any("gradient_checkpointing")  # of older files; since version 11 each model part has its own
    if not asked.has("gradient_checkpointing"):
        checkpointing = _part(asked, _denoiser(asked)).get("gradient_checkpointing", True)
    training.put("gradient_checkpointing", checkpointing not in (False, "OFF"), "gradient_checkpointing")
    if asked.any("compile") is True:
        training.put("compile", True, "compile")
    for kind in ("v", "epsilon"):
        if asked.any(f"force_{kind}_prediction"):
            training.put("prediction", {"v": "v_prediction"}.get(kind, kind), f"force_{kind}_prediction")


def _lora(asked: Asked, training: Training, *, wanted: bool) -> None:
    product = asked.any("peft_type") == "LOKR"  # whose rank has another name
    ranks = {name: number_of(asked.any(name)) for name in ("lora_rank", "lokr_dim")}
    factor = number_of(asked.any("lokr_decompose_factor"))
    if wanted and product and factor and factor > 0:
        training.put("lora.factor", int(factor), "lokr_decompose_factor")
    for name, (setting, number, usual) in _LORA.items():
        value = ranks["lokr_dim"] if product and name == "lora_rank" else number_of(asked.any(name))
        if wanted:
            training.put(setting, number(usual if value is None else value), name)
    layers, by_pattern = str(asked.any("layer_filter") or ""), asked.any("layer_filter_regex")
    asked.any("layer_filter_preset")  # what the GUI filled layer_filter with
    if not wanted:
        return
    known = layers in _FILTERS and not by_pattern
    targets = _FILTERS[layers] if known else "all-linear" if layers else _whole(asked)
    training.put("lora.targets", targets, "layer_filter")
    if layers and not known:
        training.note("layer_filter", layers, "lora.targets is a preset or a list of layers: all-linear is written, "
                      "the linear layers of the transformer blocks")
    elif not layers:
        training.note("layer_filter", None, "OneTrainer's default adapts every linear and convolution layer: "
                      f"{targets} is the nearest preset of lora.targets, without embeddings and the last layers")


def _whole(asked: Asked) -> str:
    """The preset for every layer of a model."""
    kind = _kind(asked)
    return next((preset for start, preset in _WHOLE.items() if kind.startswith(start)), "all-linear")


def _part(asked: Asked, name: str) -> Mapping[str, Any]:
    """The settings of one part of the model; empty if there are none."""
    found = asked.any(name)
    return found if isinstance(found, dict) else {}


def _batches(asked: Asked, training: Training) -> None:
    count = int(number_of(asked.any("batch_size")) or 1)
    more = int(number_of(asked.any("gradient_accumulation_steps")) or 1)
    training.put("batch_size", count * more, "batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "batch_size")
    training.put("epochs", int(number_of(asked.any("epochs")) or 100), "epochs")


def _in_steps(asked: Asked, value: float) -> int:
    """`value` batches as optimizer steps; at least 1, unless there are none. OneTrainer drops parts of a batch."""
    value = int(value)
    return max(1, round(value / max(1, int(number_of(asked.any("gradient_accumulation_steps")) or 1)))) if value else 0


def _optimizer(asked: Asked, training: Training) -> None:
    own = asked.any("optimizer")
    table = own if isinstance(own, dict) else {"optimizer": own or "ADAMW"}
    rate = number_of(_part(asked, _denoiser(asked)).get("learning_rate"))
    rate = number_of(asked.any("learning_rate")) if rate is None else rate
    training.put("optimizer.lr", (3e-6 if rate is None else rate) * _scale(asked, training), "learning_rate")
    clip = number_of(asked.any("clip_grad_norm"))
    table_of = asked.layers[0].table  # null, or infinity, which it writes as a text: no clipping
    off = "clip_grad_norm" in table_of and table_of["clip_grad_norm"] in (None, "inf")
    training.put("optimizer.clip", 0.0 if off else 1.0 if clip is None else clip, "clip_grad_norm")
    kind = str(table.get("optimizer") or "ADAMW")
    if kind not in _OPTIMIZERS:
        training.note("optimizer.optimizer", kind, "no counterpart; adamw is written, and the learning rate may not "
                      "suit it")
        training.put("optimizer.name", "adamw", "optimizer.optimizer")
        return
    given: dict[str, tuple[Any, str]] = {}
    for name, setting in _OF_OPTIMIZER.items():
        value = table.get(name)
        if isinstance(value, bool) if setting in _SWITCHES else number_of(value) is not None:
            given[setting] = value if setting in _SWITCHES else number_of(value), f"optimizer.{name}"
    betas = [number_of(table.get(name)) for name in ("beta1", "beta2")]
    if None not in betas:
        given["betas"] = betas, "optimizer.beta1"
    paged = "-paged" if kind == "ADAMW_8BIT" and table.get("is_paged") is True else ""
    if kind == "ADAFACTOR":
        given = {name: value for name, value in given.items() if name == "weight_decay"}
    if kind == "ADAFACTOR" and (table.get("relative_step") is not False or table.get("scale_parameter") is not False):
        training.note("optimizer.optimizer", kind, "OneTrainer's Adafactor finds its own rate unless relative_step and "
                      "scale_parameter are false; here optimizer.lr counts")
    training.put_optimizer(_OPTIMIZERS[kind] + paged, given)
    if kind == "SCHEDULE_FREE_ADAMW" and "weight_decay" not in given:
        training.put("optimizer.weight_decay", 0.01, "optimizer.weight_decay")  # OneTrainer's own default


def _scale(asked: Asked, training: Training) -> float:
    """The factor of the learning rate: the square root of a batch's samples, of the batches in a step, or of both."""
    kind = str(asked.any("learning_rate_scaler") or "NONE")
    counts = [number_of(asked.any(name)) or 1 for name in ("batch_size", "gradient_accumulation_steps")]
    scales = {"BATCH": counts[:1], "GRADIENT_ACCUMULATION": counts[1:], "BOTH": counts}
    factor = sqrt(max(1, prod(scales.get(kind.removeprefix("GLOBAL_"), []))))
    if factor != 1:
        training.note("learning_rate_scaler", kind, f"the learning rate is written times {factor:.4g}, as OneTrainer "
                      "scales it for one device")
    return factor


def _schedule(asked: Asked, training: Training) -> None:
    kind = str(asked.any("learning_rate_scheduler") or "CONSTANT")
    if training.settings.get("optimizer.name") == "adamw-schedule-free":
        kind = "CONSTANT"  # as in OneTrainer
    training.put("schedule.name", _SCHEDULES.get(kind, "cosine"), "learning_rate_scheduler")
    if kind not in _SCHEDULES:
        training.note("learning_rate_scheduler", kind, "no counterpart; cosine is written")
    floor, cycles = (number_of(asked.any(f"learning_rate_{name}")) for name in ("min_factor", "cycles"))
    if floor:
        training.put("schedule.floor", floor, "learning_rate_min_factor")
    if kind == "COSINE_WITH_HARD_RESTARTS" and cycles is not None and cycles == int(cycles):
        training.put("schedule.cycles", int(cycles), "learning_rate_cycles")
    elif kind == "COSINE_WITH_HARD_RESTARTS" and cycles is not None:
        training.note("learning_rate_cycles", cycles, "schedule.cycles is a whole number; not written")
    warmup = number_of(asked.any("learning_rate_warmup_steps"))
    warmup = 200 if warmup is None else warmup
    if 0 < warmup <= 1:
        training.note("learning_rate_warmup_steps", warmup, "a fraction of the run; schedule.warmup is in steps")
    elif warmup > 0 and training.settings.get("optimizer.name") == "adamw-schedule-free":
        training.put("schedule.warmup", int(warmup), "learning_rate_warmup_steps")  # which counts its own steps
    elif warmup > 0:
        training.put("schedule.warmup", _in_steps(asked, warmup), "learning_rate_warmup_steps")


def _loss(asked: Asked, training: Training) -> None:
    if asked.any("masked_training"):
        training.put("loss.masked", True, "masked_training")
        weight = number_of(asked.any("unmasked_weight"))
        training.put("loss.unmasked_weight", 0.1 if weight is None else weight, "unmasked_weight")
        training.put("loss.normalize_area", bool(asked.any("normalize_masked_area_loss")), "normalize_masked_area_loss")
    else:
        training.put("loss.masked", False, "masked_training")  # although there may be masks
        for name in ("unmasked_weight", "normalize_masked_area_loss", "unmasked_probability"):
            asked.any(name)
    kind, strength = str(asked.any("loss_weight_fn") or "CONSTANT"), number_of(asked.any("loss_weight_strength"))
    if kind == "MIN_SNR_GAMMA":
        training.put("loss.min_snr", 5.0 if strength is None else strength, "loss_weight_strength")
    elif kind == "DEBIASED_ESTIMATION":
        training.put_debiased("loss_weight_fn", kind, predicts_v=bool(
            asked.any("rescale_noise_scheduler_to_zero_terminal_snr")))
    elif kind != "CONSTANT":
        training.note("loss_weight_fn", kind, "only Min-SNR and debiased estimation are converted")
    if asked.any("rescale_noise_scheduler_to_zero_terminal_snr"):  # which OneTrainer trains to predict v
        training.put("zero_terminal_snr", True, "rescale_noise_scheduler_to_zero_terminal_snr")
        training.put("prediction", "v_prediction", "rescale_noise_scheduler_to_zero_terminal_snr")
    if str(asked.any("model_type")) == "FLUX_DEV_1":
        guidance = number_of(_part(asked, "transformer").get("guidance_scale"))
        training.put("guidance_embedding", 1.0 if guidance is None else guidance, "transformer.guidance_scale")
    if offset := number_of(asked.any("offset_noise_weight")):
        training.put("noise.offset", offset, "offset_noise_weight")
        if asked.any("generalized_offset_noise"):
            training.note("generalized_offset_noise", True, "the offset is the same at each timestep: no counterpart")
    if extra := number_of(asked.any("perturbation_noise_weight")):
        training.note("perturbation_noise_weight", extra, "no counterpart: noise.perturbation leaves the target as it "
                      "is, and OneTrainer adds the noise to it, too")
    _ema(asked, training)


def _errors(asked: Asked, training: Training) -> None:
    """Converts the error of a prediction: squared, Huber's, or a sum that has no counterpart."""
    strengths = {name: usual if (found := number_of(asked.any(f"{name}_strength"))) is None else found
                 for name, usual in _LOSSES.items()}
    delta = number_of(asked.any("huber_delta"))
    used = {name: strength for name, strength in strengths.items() if strength}
    if list(used) == ["huber"]:
        training.put("loss.huber", 1.0 if delta is None else delta, "huber_delta")
        training.note("huber_strength", used["huber"], "loss.huber is the squared error up to there, twice "
                      "OneTrainer's Huber loss of strength 1: an optimizer that does not scale gradients takes larger "
                      "steps")
    elif used != {"mse": 1}:
        told = ", ".join(f"{name} {strength:g}" for name, strength in used.items()) or "none"
        training.note("loss", None, f"the sum of losses, {told}, has no counterpart; the squared error is written")


def _draws(asked: Asked, training: Training) -> None:
    """Converts how timesteps are drawn (modules/modelSetup/mixin/ModelSetupNoiseMixin.py)."""
    kind, weight, bias, shift, low, high = (asked.any(name) for name in (
        "timestep_distribution", "noising_weight", "noising_bias", "timestep_shift", "min_noising_strength",
        "max_noising_strength"))
    scale, mean, shift, low, high = (usual if (found := number_of(value)) is None else found for value, usual in (
        (weight, 0.0), (bias, 0.0), (shift, 1.0), (low, 0.0), (high, 1.0)))
    name = _DISTRIBUTIONS.get(str(kind or "UNIFORM"), "")
    if not name:
        training.note("timestep_distribution", kind, "no counterpart; uniform is written")
    training.put("timesteps.distribution", name or "uniform", "timestep_distribution")
    if name == "logit-normal":
        training.put("timesteps.mean", mean, "noising_bias")
        training.put("timesteps.std", scale + 1, "noising_weight")
    elif name == "mode":
        training.put("timesteps.mode_scale", scale, "noising_weight")
    if asked.any("dynamic_timestep_shifting"):
        training.put("timesteps.shift_by_size", "schedule", "dynamic_timestep_shifting")
    elif shift != 1:
        training.put("timesteps.shift", shift, "timestep_shift")
        training.note("timestep_shift", shift, "timesteps.shift comes on top of the schedule's own: divide it by "
                      "'shift' of the scheduler's config, unless that has use_dynamic_shifting")
    if shift != 1 and (low, high) != (0, 1):
        training.note("timestep_shift", shift, "here it shifts within the range of timesteps, in OneTrainer what was "
                      "drawn from the range")
    training.put_range(low, high, ("min_noising_strength", "max_noising_strength"))


def _ema(asked: Asked, training: Training) -> None:
    decay, every = number_of(asked.any("ema_decay")), number_of(asked.any("ema_update_step_interval"))
    if str(asked.any("ema") or "OFF") == "OFF":
        return
    if training.settings.get("optimizer.name") == "adamw-schedule-free":
        training.note("ema", asked.any("ema"), "'adamw-schedule-free' averages the weights itself; not written")
    else:
        decay, every = 0.999 if decay is None else decay, 5 if every is None else every
        spread = decay ** (1 / every) if 0 < decay < 1 and every > 1 else decay  # over the steps between two updates
        training.put("ema.decay", round(spread, 7), "ema_decay")
        if asked.any("ema") == "CPU":
            training.put("ema.device", "cpu", "ema")


def _times(asked: Asked, training: Training) -> None:
    """Converts the intervals of sampling, checkpoints and validation: in steps or epochs, or never."""
    _put_every(asked, training, "sample_after", "sample.every")
    if asked.any("validation"):
        _put_every(asked, training, "validate_after", "validation.every")
    else:
        _every(asked, "validate_after")
        training.put("validation.every", 0, "validate_after")
    _checkpoints(asked, training)


def _checkpoints(asked: Asked, training: Training) -> None:
    """Converts the interval of models or else that of backups, since a checkpoint is both, and how many are kept. Of
    two in the same unit the shorter is written."""
    found = {name: _every(asked, name) for name in ("save_every", "backup_after")}
    counted = {name: value for name, (value, unit) in found.items() if unit in _COUNTED and value and value >= 1}
    alike = found["save_every"][1] == found["backup_after"][1]
    written = min(counted, key=lambda name: counted[name] if alike else 0, default="backup_after")
    _put_every(asked, training, written, "checkpoint.every")
    for name, (value, unit) in found.items():
        if name in counted and name != written:
            training.note(name, value, f"a checkpoint is a backup and has the weights; {written} is written")
        elif unit not in (*_COUNTED, "NEVER"):
            _put_every(asked, training, name, "checkpoint.every")
    kept = number_of(asked.any("rolling_backup_count"))
    rolling = asked.any("rolling_backup") and "save_every" not in counted  # only backups are removed
    training.put("checkpoint.keep", 0 if not rolling else 3 if kept is None else int(kept), "rolling_backup_count")


def _every(asked: Asked, name: str) -> tuple[float | None, str]:
    """An interval and its unit."""
    value, unit = _EVERY[name]
    given = asked.any(name)
    return value if given is None else number_of(given), str(asked.any(f"{name}_unit") or unit)


def _put_every(asked: Asked, training: Training, name: str, setting: str) -> None:
    """Adds an interval, or a note on one in minutes."""
    value, unit = _every(asked, name)
    if unit == "NEVER":
        training.put(setting, 0, name)
    elif value is not None and unit == "STEP":
        training.put(setting, _in_steps(asked, value), name)
    elif value is not None and unit == "EPOCH":
        training.put_epochs(setting, value, name)
    elif value is not None:
        training.note(name, value, f"counted in {unit}; {setting} is counted in steps or epochs, so it is not written")


def _model(asked: Asked, training: Training) -> ModelOptions:
    named = asked.any("base_model_name")
    if not isinstance(named, str) or not named:
        return ModelOptions()
    if Path(named).is_dir():
        return ModelOptions(path=str(Path(named).absolute()))
    try:
        return ModelOptions(path=hub_id(named, "model"))
    except Unparsed:
        training.note("base_model_name", named, "[model] path is a diffusers pipeline directory or a Hub id")
        return ModelOptions()


def _text(asked: Asked, training: Training) -> dict[str, Any]:
    """How captions are encoded: OneTrainer counts skipped layers as we do, but for each encoder apart.

    (OneTrainer: modules/model/StableDiffusionModel.py and StableDiffusionXLModel.py encode_text, FluxModel.py)
    """
    kind = _kind(asked)
    first, second = (int(number_of(asked.any(name)) or 0) for name in ("text_encoder_layer_skip",
                                                                        "text_encoder_2_layer_skip"))
    tokens = number_of(asked.any("text_encoder_2_sequence_length"))
    if kind.startswith("FLUX") and "FLUX_2" not in kind and tokens:
        return {"max_length": asked.draft.within("text_encoder_2_sequence_length", int(tokens), (0, MOST_TOKENS),
                                                 "model")}
    if not kind.startswith("STABLE_DIFFUSION") or not (first or second):
        return {}
    if "XL" in kind and first != second:
        training.note("text_encoder_2_layer_skip", second, f"both encoders of SDXL skip alike; [model] clip_skip = "
                      f"{first} is written")
    return {"clip_skip": asked.draft.within("text_encoder_layer_skip", first, (0, MOST_LAYERS), "model")}
