"""Converts a training configuration of sd-scripts (`--config_file`, or its GUI's JSON) to recipe and `train.toml`.

Its dataset is in the file that `dataset_config` names, or in directories named N_class below `train_data_dir` and
`reg_data_dir`. The dataset file overrides its caption and bucket settings, as in sd-scripts.
Names, defaults and units were compared with sd-scripts v0.10.1 (48d368fa: library/train_util.py, train_network.py,
networks/lora.py) and its GUI, kohya_ss v26.0.0 (45088f04: kohya_gui/lora_gui.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.parse import Unparsed, hub_id
from prep.recipe.convert import kohya
from prep.recipe.convert.draft import OFF, Asked, Converted, Draft, Layer
from prep.recipe.convert.kohya_adapters import is_flow, put_method
from prep.recipe.convert.kohya_noise import put_noise
from prep.recipe.convert.training import Training, number_of
from prep.recipe.layout import REPEATED
from prep.recipe.schema import ModelOptions
from prep.recipe.validate import MOST_LAYERS, MOST_TOKENS

MARKS = ("dataset_config", "train_data_dir", "network_module", "network_dim", "max_train_steps", "max_train_epochs",
         "train_batch_size")  # a file with one of these is such a configuration
_STEPS, _RATE = 1600, 2e-6  # the defaults of sd-scripts
_NUMBERS: Mapping[str, tuple[str, type]] = {
    "max_grad_norm": ("optimizer.clip", float), "seed": ("seed", int),
    "network_dropout": ("lora.dropout", float),
}
_OF_SCHEDULES = ("lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_min_lr_ratio")
_CYCLES = ("lr_scheduler_num_cycles", "schedule.cycles", int)
# Each schedule's name here, and its own settings. cosine_with_min_lr counts cycles differently, and has one by default.
_SCHEDULES: Mapping[str, tuple[Any, ...]] = {
    "constant": ("constant",), "constant_with_warmup": ("constant",), "linear": ("linear",), "cosine": ("cosine",),
    "cosine_with_restarts": ("cosine-restarts", _CYCLES),
    "polynomial": ("polynomial", ("lr_scheduler_power", "schedule.power", float)),
    "cosine_with_min_lr": ("cosine", ("lr_scheduler_min_lr_ratio", "schedule.floor", float)),
}
_OPTIMIZERS: Mapping[str, str] = {
    "adamw": "adamw", "adamw8bit": "adamw-8bit", "pagedadamw8bit": "adamw-8bit-paged", "adafactor": "adafactor",
    "lion": "lion", "prodigy": "prodigy", "adamwschedulefree": "adamw-schedule-free",
}
_SWITCHES: Mapping[str, str] = {"use_bias_correction": "bias_correction", "safeguard_warmup": "safeguard_warmup"}
_ALWAYS = {("decouple", "True"), ("scale_parameter", "False"), ("warmup_init", "False")}  # as it is here
# Other names of settings: of the GUI, and of sd-scripts' command line for what its dataset file calls num_repeats.
_GUI: Mapping[str, str] = {"optimizer": "optimizer_type", "max_resolution": "resolution",
                           "dataset_repeats": "num_repeats"}
# Settings that are also in a dataset file, which has them as numbers and switches; many files of the GUI, as texts.
_WHOLE = ("keep_tokens", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "num_repeats")
_FRACTIONS = ("caption_dropout_rate", "caption_tag_dropout_rate", "validation_split")
_SWITCHED = ("shuffle_caption", "enable_bucket", "bucket_no_upscale", "flip_aug", "random_crop", "color_aug",
             "alpha_mask", "enable_wildcard")
_SPEED = "affects only speed and memory: nothing to set"
_STEPS_TOO = "here there is one interval, in steps or in epochs; that in steps is written"
_TEXT = "text encoders are never trained: no counterpart"
_RUN = "an option of train run: -o RUN"
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "vae_batch_size",
                     "cache_text_encoder_outputs_to_disk", "xformers", "sdpa", "mem_eff_attn", "lowram", "highvram",
                     "persistent_data_loader_workers", "max_data_loader_n_workers", "no_half_vae",
                     "batch_size"), _SPEED),
    **dict.fromkeys(("save_every_n_epochs", "save_n_epoch_ratio", "validate_every_n_epochs"), _STEPS_TOO),
    "save_last_n_epochs": "counts the checkpoints of save_every_n_epochs, of which none is written",
    "save_last_n_steps": "counts the checkpoints of save_every_n_steps, of which none is written",
    "sample_every_n_steps": "sd-scripts ignores it beside sample_every_n_epochs",
    **dict.fromkeys(("text_encoder_lr", "train_text_encoder", "network_train_text_encoder_only"), _TEXT),
    **dict.fromkeys(("output_dir", "output_name", "logging_dir"), _RUN),
    "network_weights": "an option of train run: --init-from FILE",
    **dict.fromkeys(("full_bf16", "full_fp16"), "weights are kept in float32: no counterpart"),
    "save_model_as": "safetensors is the only format",
}
_WINDOWS: Mapping[float, int] = {150: 2, 225: 3}  # of 75 tokens each
# Its samplers, some of them with k_ before the name, and diffusers' schedulers that they are.
_SAMPLERS: Mapping[str, str] = {
    "ddim": "DDIMScheduler", "ddpm": "DDPMScheduler", "pndm": "PNDMScheduler", "lms": "LMSDiscreteScheduler",
    "euler": "EulerDiscreteScheduler", "euler_a": "EulerAncestralDiscreteScheduler", "heun": "HeunDiscreteScheduler",
    "dpm_2": "KDPM2DiscreteScheduler", "dpm_2_a": "KDPM2AncestralDiscreteScheduler",
    **dict.fromkeys(("dpmsolver", "dpmsolver++"), "DPMSolverMultistepScheduler"),
    "dpmsingle": "DPMSolverSinglestepScheduler",
}
# Of these, the trainer takes no others for a noise schedule that ends in pure noise.
_RESCALED = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
             "DPMSolverMultistepScheduler")
_QUIET = {"network_train_unet_only", "save_state", "network_module", "sdxl", "v2", "save_precision"}


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a TOML or JSON document is such a configuration."""
    return any(name in _flat(document) for name in MARKS)


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> Converted:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads other files.

    Raises `Unparsed`, and what `read` raises.
    """
    table = {_GUI.get(name, name): value for name, value in _flat(document).items() if value != ""}
    layer = Layer(table=table, where="")
    draft = Draft(tool="kohya", base=base, trains=True)
    asked = Asked(draft=draft, layers=[layer])
    args = {name: _plain(name, value) for name, value in table.items() if name != "batch_size"}
    kohya.fill(draft, _dataset(asked, read), Layer(table=args, where="", asked=layer.asked))
    layer.asked.discard("batch_size")  # asked of a dataset file; here it is of the GUI's preparation of latents
    training = Training()
    _batches(asked, training)
    _optimizer(asked, training)
    _schedule(asked, training)
    put_method(asked, training)
    put_noise(asked, training)
    _rest(asked, training)
    training.settle()
    weight = number_of(asked.any("prior_loss_weight"))
    if weight is not None:
        draft.sources = [replace(one, weight=weight) if one.role == "prior" else one for one in draft.sources]
    model = replace(_model(asked, training), **_text(asked, training))
    prompts = _prompts(asked, training)
    _others(layer, training)
    found = draft.finish()
    return replace(found, training=training, recipe=replace(found.recipe, model=model, prompts=prompts))


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without their sections, which sd-scripts ignores."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _plain(name: str, value: Any) -> Any:
    """The value of a setting of datasets, with numbers and switches that are texts as such; others as they are."""
    if name in _SWITCHED and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    if name not in (*_WHOLE, *_FRACTIONS) or (number := number_of(value)) is None:
        return value
    return int(number) if name in _WHOLE and number == int(number) else number


def _dataset(asked: Asked, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    """The dataset file that the configuration names, or a document built from its directories."""
    draft, named = asked.draft, asked.any("dataset_config")
    if isinstance(named, str) and named:
        document = read(draft.place(named, "dataset_config"))
        if not isinstance(document, dict) or not isinstance(document.get("datasets"), list):
            raise Unparsed(f"dataset_config {named} has no [[datasets]], expected sd-scripts' dataset TOML")
        return document
    subsets: list[dict[str, Any]] = []
    for key, is_reg in (("train_data_dir", False), ("reg_data_dir", True)):
        place = asked.any(key)
        if isinstance(place, str) and place:
            subsets += _subsets(draft.place(place, key), is_reg, asked.any("in_json"))
    if not subsets:
        raise Unparsed("it has no dataset, expected dataset_config or train_data_dir")
    return {"datasets": [{"subsets": subsets}]}


def _subsets(root: Path, is_reg: bool, table: Any) -> list[dict[str, Any]]:
    """Subsets for directories named N_class, as sd-scripts reads them; if there are none, the directory itself."""
    shared = {"is_reg": is_reg} if is_reg else {"metadata_file": table} if isinstance(table, str) and table else {}
    inner = sorted(one for one in root.iterdir() if one.is_dir()) if root.is_dir() else []
    found = [(one, match) for one in inner if (match := REPEATED.fullmatch(one.name))]
    if not found or "metadata_file" in shared:
        return [{"image_dir": str(root), **shared}]
    return [{"image_dir": str(one), "num_repeats": int(match[1]), "class_tokens": match[2], **shared}
            for one, match in found]


def _batches(asked: Asked, training: Training) -> None:
    draft = asked.draft
    count = draft.batches[0] if draft.batches else int(number_of(asked.any("train_batch_size")) or 1)
    if len(set(draft.batches)) > 1:
        training.note("datasets.batch_size", draft.batches, f"one batch size for all samples; {count} is written")
    more = int(number_of(asked.any("gradient_accumulation_steps")) or 1)
    training.put("batch_size", count * more, "train_batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "train_batch_size")
    epochs, steps = number_of(asked.any("max_train_epochs")), number_of(asked.any("max_train_steps"))
    of_gui = number_of(asked.any("epoch"))  # sd-scripts has no such setting: its GUI computes the steps from it
    if epochs:
        training.put("epochs", int(epochs), "max_train_epochs")
    elif of_gui and not steps:
        training.put("epochs", int(of_gui), "epoch")
    else:
        training.put("steps", int(steps or _STEPS), "max_train_steps")
    rates = [one for one in draft.dropouts if one]
    if rates:
        training.put("caption_dropout", max(rates), "caption_dropout_rate")
        if len(set(draft.dropouts)) > 1:
            training.note("caption_dropout_rate", None, "one rate for all samples; the largest is written")


def _optimizer(asked: Asked, training: Training) -> None:
    rates = [one for one in (number_of(asked.any(name)) for name in ("unet_lr", "learning_rate")) if one is not None]
    training.put("optimizer.lr", next(filter(None, rates), rates[0] if rates else _RATE), "learning_rate")
    kind = str(asked.any("optimizer_type") or "AdamW").lower()
    if asked.any("use_8bit_adam") or asked.any("use_lion_optimizer"):
        kind = "adamw8bit" if asked.any("use_8bit_adam") else "lion"
    name = _OPTIMIZERS.get(kind, "adamw")
    if kind not in _OPTIMIZERS:
        training.note("optimizer_type", kind, "no counterpart; adamw is written, and the learning rate may not suit it")
    words = asked.any("optimizer_args")
    given: dict[str, tuple[Any, str]] = {}
    for word in words if isinstance(words, list) else str(words or "").split():
        _argument(str(word), given, training)
    free = given.pop("relative_step", None) is not None
    if name == "adafactor" and not free:
        training.note("optimizer_type", kind, "sd-scripts' Adafactor finds its own rate unless relative_step is False; "
                      "here optimizer.lr counts")
    warmup = given.pop("warmup_steps", None)
    training.put_optimizer(name, given)
    if warmup is not None:
        training.put("schedule.warmup", int(warmup[0]), warmup[1])


def _argument(word: str, given: dict[str, tuple[Any, str]], training: Training) -> None:
    """Converts one of optimizer_args: `weight_decay=0.1`, `betas=0.9,0.99`, `use_bias_correction=True`."""
    name, _, text = word.partition("=")
    key, text = f"optimizer_args {name}", re.sub(r"[()\[\]\s]", "", text)
    numbers = [one for one in map(number_of, text.split(",")) if one is not None]
    if name == "betas" and len(numbers) == 2:
        given["betas"] = numbers, key
    elif name in ("weight_decay", "eps", "d_coef", "warmup_steps") and len(numbers) == 1:
        given[name] = numbers[0], key
    elif name in _SWITCHES and text in ("True", "False"):
        given[_SWITCHES[name]] = text == "True", key
    elif name == "relative_step" and text == "False":
        given["relative_step"] = False, key
    elif (name, text) not in _ALWAYS:
        training.note("optimizer_args", word, "no counterpart")


def _schedule(asked: Asked, training: Training) -> None:
    kind = str(asked.any("lr_scheduler") or "constant").lower()
    warmup = _warmup(asked)
    if training.settings.get("optimizer.name") == "adamw-schedule-free":  # sd-scripts ignores both
        training.put("schedule.name", "constant", "lr_scheduler")
        return
    name, *own = _SCHEDULES.get(kind, ("cosine",))
    training.put("schedule.name", name, "lr_scheduler")
    if kind not in _SCHEDULES:
        training.note("lr_scheduler", kind, f"no counterpart; {name} is written")
    there = {key: number_of(asked.any(key)) for key in _OF_SCHEDULES}
    if there["lr_scheduler_num_cycles"] is None:  # the GUI then has one for each of its epochs
        there["lr_scheduler_num_cycles"] = number_of(asked.any("epoch"))
    for key, setting, number in own:
        value = there[key]
        if value is not None and value == number(value):
            training.put(setting, number(value), key)
        elif value is not None:
            training.note(key, value, f"{setting} is a whole number; not written")
    total = training.settings.get("steps")
    if kind == "constant" and warmup:
        training.note("lr_warmup_steps", warmup, "sd-scripts' constant schedule has no warm-up; not written")
    elif not 0 < warmup < 1:
        training.put("schedule.warmup", round(warmup), "lr_warmup_steps")
    elif total is None:
        training.note("lr_warmup_steps", warmup, "a fraction of the run; schedule.warmup is in steps")
    else:
        training.put("schedule.warmup", round(warmup * total), "lr_warmup_steps")


def _warmup(asked: Asked) -> float:
    """The warm-up in steps, or below 1 as a fraction of the run; the GUI also has one in percent, which yields."""
    steps, percent = asked.any("lr_warmup_steps"), number_of(asked.any("lr_warmup")) or 0
    if isinstance(steps, str) and steps.strip().endswith("%"):
        return (number_of(steps.strip()[:-1]) or 0) / 100
    return number_of(steps) or percent / 100


def _rest(asked: Asked, training: Training) -> None:
    for name, (setting, kind) in _NUMBERS.items():
        value = number_of(asked.any(name))
        if value is not None:
            training.put(setting, kind(value), name)
    _intervals(asked, training)
    precision = str(asked.any("mixed_precision") or "no").lower()
    known = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    training.put("precision", known.get(precision, "auto"), "mixed_precision")
    if precision not in known:
        training.note("mixed_precision", precision, "no counterpart; auto uses bf16 if the device supports it")
    if asked.any("gradient_checkpointing"):
        training.put("gradient_checkpointing", True, "gradient_checkpointing")
    if asked.any("fp8_base") and training.settings.get("method") == "lora":
        training.put("quantization", "fp8", "fp8_base")
    alpha = any(one.mask == "alpha" for one in asked.draft.sources)  # sd-scripts then needs no masked_loss
    if asked.any("masked_loss") or asked.any("alpha_mask") or alpha:
        training.put("loss.masked", True, "masked_loss")
        training.put("loss.unmasked_weight", 0.0, "masked_loss")
    else:
        training.put("loss.masked", False, "masked_loss")  # although there may be masks


def _intervals(asked: Asked, training: Training) -> None:
    """Converts when checkpoints, sample pictures and validations are made. The number of epochs is always whole."""
    _checkpoints(asked, training)
    epochs = number_of(asked.any("sample_every_n_epochs"))
    if epochs:
        training.put_epochs("sample.every", epochs, "sample_every_n_epochs")
    else:
        training.put("sample.every", int(number_of(asked.any("sample_every_n_steps")) or 0), "sample_every_n_steps")
    if steps := number_of(asked.any("validate_every_n_steps")):
        training.put("validation.every", int(steps), "validate_every_n_steps")
    elif epochs := number_of(asked.any("validate_every_n_epochs")):
        training.put_epochs("validation.every", epochs, "validate_every_n_epochs")
    _sampler(asked, training)


def _checkpoints(asked: Asked, training: Training) -> None:
    """Converts when checkpoints are saved, and how many are kept: all (0) unless the file says.

    save_last_n_steps are those of the newest checkpoints, and save_last_n_epochs a number of checkpoints.
    """
    training.put("checkpoint.keep", 0, "save_last_n_steps")
    if steps := number_of(asked.any("save_every_n_steps")):
        training.put("checkpoint.every", int(steps), "save_every_n_steps")
        if (last := number_of(asked.any("save_last_n_steps"))) and steps >= 1:
            training.put("checkpoint.keep", int(last) // int(steps) + 1, "save_last_n_steps")
        return
    epochs, ratio = (number_of(asked.any(name)) or 0 for name in ("save_every_n_epochs", "save_n_epoch_ratio"))
    total = training.settings.get("epochs")
    if ratio > 0 and total is None:
        training.note("save_n_epoch_ratio", ratio, "a part of the run's epochs, of which the file does not say the "
                      "number; checkpoint.every keeps its default, 500 steps")
        return
    if ratio > 0 and total is not None:
        epochs = max(1, total // ratio)
    training.put_epochs("checkpoint.every", epochs, "save_n_epoch_ratio" if ratio > 0 else "save_every_n_epochs")
    count = number_of(asked.any("save_last_n_epochs")) if epochs else None
    if count and count >= 1:
        training.put("checkpoint.keep", int(count), "save_last_n_epochs")


def _sampler(asked: Asked, training: Training) -> None:
    """Converts the sampler of pictures, which sd-scripts has for models that predict epsilon or v."""
    given = asked.any("sample_sampler")
    if not given:
        return
    name = _SAMPLERS.get(str(given).lower().removeprefix("k_"))
    if is_flow(asked):
        training.note("sample_sampler", given, "sd-scripts ignores it for flows, which it samples with Euler's steps; "
                      "not written")
    elif name is None:
        training.note("sample_sampler", given, "no counterpart; the model family's usual one is used")
    elif asked.any("zero_terminal_snr") and name not in _RESCALED:
        training.note("sample_sampler", given, f"{name} cannot follow a noise schedule that ends in pure noise; "
                      "not written")
    else:
        training.put("sample.sampler", name, "sample_sampler")
        if given == "dpmsolver":
            training.note("sample_sampler", given, f"{name} is written, which here is dpmsolver++")


def _model(asked: Asked, training: Training) -> ModelOptions:
    named = asked.any("pretrained_model_name_or_path")
    if not isinstance(named, str) or not named:
        return ModelOptions()
    local = [one for one in (asked.draft.base / named, Path(named)) if one.is_dir()]
    if local:
        return ModelOptions(path=str(local[0].absolute()))
    try:
        return ModelOptions(path=hub_id(named, "model"))
    except Unparsed:
        training.note("pretrained_model_name_or_path", named, "[model] path is a diffusers pipeline directory or a Hub "
                      "id; convert a single-file checkpoint with diffusers first")
        return ModelOptions()


def _text(asked: Asked, training: Training) -> dict[str, Any]:
    """How captions are encoded. sd-scripts counts CLIP's layers from 1, and skips none for SDXL."""
    found: dict[str, Any] = {}
    skip, tokens = number_of(asked.any("clip_skip")), number_of(asked.any("max_token_length"))
    if skip is not None and skip > 1:
        if asked.any("sdxl"):
            training.note("clip_skip", int(skip), "sd-scripts ignores it for SDXL, and so it is not written")
        else:
            found["clip_skip"] = asked.draft.within("clip_skip", int(skip) - 1, (0, MOST_LAYERS), "model")
            training.note("clip_skip", int(skip), f"written as [model] clip_skip = {found['clip_skip']}: layers are "
                          "counted from 0; sd-scripts ignores it for SDXL, so remove it there")
    if windows := _WINDOWS.get(tokens or 0):
        found["text_windows"] = windows
        training.note("max_token_length", tokens, "written as [model] text_windows; each window keeps its start "
                      "and end token, which sd-scripts drops inside")
    t5 = number_of(asked.any("t5xxl_max_token_length"))
    if t5 is not None and t5 >= 1:
        found["max_length"] = asked.draft.within("t5xxl_max_token_length", int(t5), (0, MOST_TOKENS), "model")
    return found


def _prompts(asked: Asked, training: Training) -> Path | None:
    named = asked.any("sample_prompts")
    if not isinstance(named, str) or not named:
        return None
    path = asked.draft.place(named, "sample_prompts")
    if path.suffix == ".txt" and path.is_file():
        return path
    training.note("sample_prompts", named, "[prompts] file is a text file with one prompt per line")
    return None


def _others(layer: Layer, training: Training) -> None:
    """Adds notes on settings that were not read: one for each known setting, and one that names all others."""
    left = [name for name, value in layer.table.items() if name not in layer.asked | _QUIET and value not in OFF]
    for name in left:
        if name in _WORDS:
            training.note(name, layer.table[name], _WORDS[name])
    if others := sorted(name for name in left if name not in _WORDS):
        training.note("other settings", None, f"no counterpart: {', '.join(others)}")
