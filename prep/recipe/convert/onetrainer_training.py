"""Converts OneTrainer's main configuration (JSON) and its concepts to a recipe and a `train.toml`.

(OneTrainer: modules/util/config/TrainConfig.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.errors import PathError
from prep.parse import Unparsed, brief, hub_id
from prep.recipe.convert import onetrainer
from prep.recipe.convert.draft import OFF, Asked, Converted, Draft, Layer
from prep.recipe.convert.training import Training, number_of
from prep.recipe.schema import ImageOptions, ModelOptions

_METHODS: Mapping[str, str] = {"LORA": "lora", "FINE_TUNE": "full"}
_DTYPES: Mapping[str, str] = {"BFLOAT_16": "bf16", "FLOAT_32": "fp32"}
_NUMBERS: Mapping[str, tuple[str, type]] = {
    "clip_grad_norm": ("optimizer.clip", float), "lora_rank": ("lora.rank", int), "lora_alpha": ("lora.alpha", float),
    "rolling_backup_count": ("checkpoint.keep", int), "seed": ("seed", int),
}
_OPTIMIZER: Mapping[str, str] = {"weight_decay": "optimizer.weight_decay", "eps": "optimizer.eps"}
_EVERY: Mapping[str, str] = {"sample_after": "sample.every", "backup_after": "checkpoint.every",
                             "validate_after": "validation.every"}
_SILENT = {"__version", "concept_file_name", "concepts", "model_type", "base_model_name", "optimizer", "unet",
           "concept_stats", "optimizer_defaults", "secrets"}


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> Converted:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads the concepts' file.

    Raises `Unparsed`, and what `read` raises.
    """
    draft = Draft(tool="onetrainer", base=base, trains=True)
    layer = Layer(table=document, where="")
    asked = Asked(draft=draft, layers=[layer])
    onetrainer.fill(draft, _concepts(asked, read), _image(asked))
    training = Training()
    _method(asked, training)
    _batches(asked, training)
    _optimizer(asked, training)
    _schedule(asked, training)
    _loss(asked, training)
    _times(asked, training)
    model = _model(asked, training)
    left = sorted(name for name, value in document.items() if name not in layer.asked | _SILENT and value not in OFF)
    if left:
        training.note("other settings", None, f"no counterpart: {', '.join(left)}")
    found = draft.finish()
    return replace(found, training=training, recipe=replace(found.recipe, model=model))


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
    if kind not in (None, "LORA"):
        training.note("peft_type", kind, "LoRA is the only adapter")
    for name, (setting, number) in _NUMBERS.items():
        value = number_of(asked.any(name))
        if value is not None and (method == "LORA" or not setting.startswith("lora")):
            training.put(setting, number(value), name)
    dtype = str(asked.any("train_dtype") or "FLOAT_16")
    training.put("precision", _DTYPES.get(dtype, "auto"), "train_dtype")
    if dtype not in _DTYPES:
        training.note("train_dtype", dtype, "no counterpart; auto uses bf16 if the device supports it")
    checkpointing = asked.any("gradient_checkpointing")
    training.put("gradient_checkpointing", checkpointing not in (None, False, "OFF"), "gradient_checkpointing")
    if asked.any("force_v_prediction"):
        training.put("prediction", "v_prediction", "force_v_prediction")


def _batches(asked: Asked, training: Training) -> None:
    count = int(number_of(asked.any("batch_size")) or 1)
    more = int(number_of(asked.any("gradient_accumulation_steps")) or 1)
    training.put("batch_size", count * more, "batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "batch_size")
    training.put("epochs", int(number_of(asked.any("epochs")) or 100), "epochs")


def _optimizer(asked: Asked, training: Training) -> None:
    own = asked.any("optimizer")
    table = own if isinstance(own, dict) else {"optimizer": own or "ADAMW"}
    unet = asked.any("unet")
    rate = number_of(unet.get("learning_rate")) if isinstance(unet, dict) else None
    rate = number_of(asked.any("learning_rate")) if rate is None else rate
    training.put("optimizer.lr", 3e-6 if rate is None else rate, "learning_rate")
    kind = str(table.get("optimizer") or "ADAMW")
    if kind != "ADAMW":
        training.note("optimizer.optimizer", kind, "AdamW with 32-bit states is the only optimizer"
                      + ("" if "ADAMW" in kind else "; its learning rate may not suit"))
        return
    for name, setting in _OPTIMIZER.items():
        if (value := number_of(table.get(name))) is not None:
            training.put(setting, value, f"optimizer.{name}")
    betas = [number_of(table.get(name)) for name in ("beta1", "beta2")]
    if None not in betas:
        training.put("optimizer.betas", betas, "optimizer.beta1")


def _schedule(asked: Asked, training: Training) -> None:
    kind = str(asked.any("learning_rate_scheduler") or "CONSTANT")
    training.put("schedule.name", "constant" if kind == "CONSTANT" else "cosine", "learning_rate_scheduler")
    if kind not in ("CONSTANT", "COSINE"):
        training.note("learning_rate_scheduler", kind, "the schedules are constant and cosine; cosine is written")
    warmup = number_of(asked.any("learning_rate_warmup_steps"))
    warmup = 200 if warmup is None else warmup
    if 0 < warmup <= 1:
        training.note("learning_rate_warmup_steps", warmup, "a fraction of the run; schedule.warmup is in steps")
    elif warmup:
        training.put("schedule.warmup", round(warmup), "learning_rate_warmup_steps")


def _loss(asked: Asked, training: Training) -> None:
    if asked.any("masked_training"):
        training.put("loss.masked", True, "masked_training")
        weight = number_of(asked.any("unmasked_weight"))
        training.put("loss.unmasked_weight", 0.1 if weight is None else weight, "unmasked_weight")
        training.put("loss.normalize_area", bool(asked.any("normalize_masked_area_loss")), "normalize_masked_area_loss")
    else:
        for name in ("unmasked_weight", "normalize_masked_area_loss", "unmasked_probability"):
            asked.any(name)
    kind, strength = str(asked.any("loss_weight_fn") or "CONSTANT"), number_of(asked.any("loss_weight_strength"))
    if kind == "MIN_SNR_GAMMA":
        training.put("loss.min_snr", 5.0 if strength is None else strength, "loss_weight_strength")
    elif kind != "CONSTANT":
        training.note("loss_weight_fn", kind, "Min-SNR is the only timestep weighting; none is written")
    decay = number_of(asked.any("ema_decay"))
    asked.any("ema_update_step_interval")
    if str(asked.any("ema") or "OFF") != "OFF":
        training.put("ema.decay", 0.999 if decay is None else decay, "ema_decay")


def _times(asked: Asked, training: Training) -> None:
    """Converts the intervals of sampling, checkpoints and validation: in steps, or never."""
    for name, setting in _EVERY.items():
        value, unit = number_of(asked.any(name)), str(asked.any(f"{name}_unit") or "")
        if unit == "NEVER" or (name == "validate_after" and not asked.any("validation")):
            training.put(setting, 0, name)
        elif value is not None and unit == "STEP":
            training.put(setting, int(value), name)
        elif value is not None:
            training.note(name, value, f"counted in {unit or 'epochs'}; {setting} is counted in steps and keeps "
                          "its default")


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
