"""Converts ai-toolkit's configuration (YAML or JSON) to a recipe and a `train.toml`.

The settings are those of the first process that trains, in its sections; one that the file lacks has ai-toolkit's
default. Names, defaults and units were compared with ai-toolkit 27a03a91
(toolkit/config_modules.py, jobs/process/BaseSDTrainProcess.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.geometry import PAIR
from prep.parse import expect
from prep.recipe.convert.aitoolkit import dataset
from prep.recipe.convert.aitoolkit.model import put_model, steps_there
from prep.recipe.convert.aitoolkit.network import put_method
from prep.recipe.convert.aitoolkit.noise import put_noise
from prep.recipe.convert.aitoolkit.optimizer import put_optimizer, put_schedule
from prep.recipe.convert.aitoolkit.samples import prompts_of, put_sampling
from prep.recipe.convert.draft import OFF, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.prompts import Sampled, prompt_text
from prep.recipe.convert.training import Training, number_of
from prep.recipe.prompts import parse_prompts

SLIDER, PAIRS = "concept_slider", "image_reference_slider_trainer"
TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer", SLIDER, PAIRS)  # types of processes that train on pictures
_SECTIONS = ("network", "train", "model", "sample", "save", "logging", "slider")
_READ = ("type", "datasets", "trigger_word", "training_seed", "name", *_SECTIONS)
_RUN = "an option of train run: -o RUN"
_SPEED = "affects only speed and memory: nothing to set"
_DTYPES: Mapping[str, str] = {**dict.fromkeys(("bf16", "bfloat16"), "bf16"),
                              **dict.fromkeys(("fp16", "float16"), "fp16"),
                              **dict.fromkeys(("fp32", "float32", "float"), "fp32")}
_STORED: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_EVERY, _KEEP = 1000, 5  # steps between checkpoints, and how many stay
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("device", "performance_log_every", "sqlite_db_path", "train.xformers", "train.sdp",
                     "train.attention_backend", "train.cache_text_embeddings", "train.unload_text_encoder",
                     "logging.log_every", "logging.use_ui_logger", "logging.verbose", "sample.format"), _SPEED),
    "training_folder": _RUN, "log_dir": _RUN, "train.start_step": "train run --resume continues a run",
    "network.pretrained_lora_path": "an option of train run: --init-from FILE",
    "train.train_text_encoder": "text encoders are never trained: no counterpart",
    "train.text_encoder_lr": "text encoders are never trained: no counterpart",
    "train.skip_first_sample": "pictures are drawn after the steps of sample.every, never before the first",
    "train.force_first_sample": "pictures are drawn after the steps of sample.every, never before the first",
    "train.prompt_dropout_prob": "the nearest is caption_dropout",
    "train.bypass_guidance_embedding": "guidance is given as a number: guidance_embedding",
    "save.push_to_hub": "upload the result with train push",
    "save.hf_repo_id": "upload the result with train push",
    "sample.sample_start_step": "pictures are drawn from the first interval on",
    "sample.sampler": "the model family's usual sampler draws; sample.sampler names another",
    "adapter": "only adapters of weights are trained: no counterpart",
    "embedding": "words are not trained: no counterpart",
}
_IDLE: Mapping[str, str] = {  # settings that do nothing unless another one is on
    "train.diff_output_preservation_multiplier": "diff_output_preservation",
    "train.diff_output_preservation_class": "diff_output_preservation",
    "train.blank_prompt_preservation_multiplier": "blank_prompt_preservation",
    "train.inverted_mask_prior_multiplier": "inverted_mask_prior",
    "train.differential_guidance_scale": "do_differential_guidance", "train.guidance_loss_target": "do_guidance_loss",
    "train.paramiter_swapping_factor": "do_paramiter_swapping",
}
# Values that change nothing.
_USUAL: Mapping[str, Any] = {
    "train.train_unet": True, "train.switch_boundary_every": 1, "train.noise_multiplier": 1,
    "train.reg_weight": 1, "train.loss_target": "noise", "train.num_train_timesteps": 1000,
    "sample.network_multiplier": 1, "sample.num_frames": 1, "sample.fps": None, "sample.sampler": "flowmatch",
    "save.save_format": "safetensors", "network.split_multistage_loras": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The sections of a configuration, by name; one that it lacks is empty."""

    sections: Mapping[str, ToolConfig]
    whole: ToolConfig  # the process

    def __getitem__(self, name: str) -> ToolConfig:
        return self.sections[name]


def processes_of(document: Any) -> list[dict[str, Any]]:
    """The processes of a configuration that train; none if it is not ai-toolkit's."""
    config = document.get("config") if isinstance(document, dict) and "job" in document else None
    listed = config.get("process") if isinstance(config, dict) else None
    return [entry for entry in listed if isinstance(entry, dict) and entry.get("type") in TRAINERS
            ] if isinstance(listed, list) else []


def convert(document: Mapping[str, Any], base: Path) -> ConvertedRecipe:
    """The recipe and training settings for a configuration in the directory `base`. Raises `Unparsed`."""
    draft, training = Draft(tool="ai-toolkit", base=base, trains=True), Training()
    name = document["config"].get("name")
    process, *more = (_named(entry, name) for entry in processes_of(document))
    if more:
        draft.note("config.process", None, f"the first of {len(more) + 1} processes that train is converted", "")
    job = _job(process, draft)
    trigger = job.whole.get("trigger_word", str, "")
    tables = job.whole.get("datasets", list, [])
    floors = dataset.fill(draft, tables, trigger)
    if process.get("type") == PAIRS:
        dataset.fill_pairs(draft, job["slider"].get("datasets", list, []))
    dataset.put_masks(draft, floors, training)
    train, model = job["train"], job["model"]
    network = job["network"] if isinstance(process.get("network"), dict) else None
    put_method(network, model, training)
    _preserve(train, tables, training)
    if process.get("type") == SLIDER:
        _slide(job["slider"], training)
    divide = steps_there(train, training)
    put_optimizer(train, training)
    put_schedule(train, training)
    put_noise(train, model, training)
    _rest(job, training, divide)
    put_sampling(job["sample"], train, training, divide)
    options = put_model(model, training, lora=network is not None)
    if isinstance(name, str) and name:
        training.put("result.title", name, "config.name")
    training.settle()
    prompts = prompts_of(job["sample"], trigger, training)
    prompts += "".join(prompt_text([Sampled(prompt=text)]) for text in _rows_needed(training, prompts))
    _others(job, training)
    fit = PAIR if process.get("type") == PAIRS else dataset.reference_fit(draft, tables)
    converted = draft.finish()
    return replace(converted, training=training, prompts=prompts, recipe=replace(
        converted.recipe, model=options, reference_fit=fit))


def _preserve(train: ToolConfig, tables: list[Any], training: Training) -> None:
    """Converts what is compared with the base model: cells that masks hide, and pictures of regularization."""
    multiplier = number_of(train.any("inverted_mask_prior_multiplier"))
    if train.any("inverted_mask_prior") is True:
        training.put_nearest("preserve.unmasked", 0.5 if multiplier is None else multiplier,
                             "train.inverted_mask_prior")
    for name, key in (("blank_prompt_preservation", ""), ("diff_output_preservation", "_class")):
        weight, other = number_of(train.any(f"{name}_multiplier")), train.any(f"{name}{key}") if key else ""
        if train.any(name) is True and isinstance(other, str):
            training.put_nearest("preserve.prompted", 1.0 if weight is None else weight, f"train.{name}")
            training.put("preserve.prompts", [" ".join(other.split())], f"train.{name}{key}")
            if other.strip():
                training.note(f"train.{name}{key}", other, "is preserved as a prompt, and not in the words of each "
                              "caption; it is the last line of the prompt file, which gives it its row")
    compared = [table.get("prior_reg") is True for table in tables if table.get("is_reg") or table.get("prior_reg")]
    if any(compared):
        training.put("preserve.prior", True, "datasets.prior_reg")
    if len(set(compared)) > 1:
        training.note("datasets.prior_reg", None, 'for all datasets of role "prior" or for none; all is written')


def _slide(slider: ToolConfig, training: Training) -> None:
    """Converts the prompts of a concept slider, and the class that it leaves as it is."""
    for name, other, usual in (("positive", "positive_prompt", ""), ("negative", "negative_prompt", ""),
                               ("neutral", "target_class", ""), ("strength", "guidance_strength", 3.0)):
        value = slider.any(other)
        value = number_of(value) if name == "strength" else " ".join(value.split()) if isinstance(value, str) else None
        training.put(f"slider.{name}", usual if value is None else value, f"slider.{other}")
    anchor, weight = slider.any("anchor_class"), number_of(slider.any("anchor_strength"))
    if isinstance(anchor, str):  # of the loss, its terms are a third and those of the prompts two thirds
        training.put_nearest("preserve.prompted", (1.0 if weight is None else weight) / 2, "slider.anchor_strength")
        training.put("preserve.prompts", [" ".join(anchor.split())], "slider.anchor_class")


def _rows_needed(training: Training, prompts: str) -> list[str]:
    """The prompts that are preserved, or that make a slider, and that the file of prompts lacks: each needs a row."""
    there = {prompt.text for prompt in parse_prompts(prompts)}
    texts = [*training.settings.get("preserve.prompts", ()),
             *(training.settings.get(f"slider.{name}", "") for name in ("positive", "negative", "neutral"))]
    return [text for text in dict.fromkeys(texts) if text and text not in there]


def _named(value: Any, name: Any) -> Any:
    """A value of the file in which `[name]` is the name of the job, as ai-toolkit reads it."""
    if isinstance(value, str):
        return value.replace("[name]", name) if isinstance(name, str) else value
    if isinstance(value, list):
        return [_named(entry, name) for entry in value]
    return {key: _named(entry, name) for key, entry in value.items()} if isinstance(value, dict) else value


def _job(process: Mapping[str, Any], draft: Draft) -> Job:
    tables = {name: expect(process.get(name) or {}, dict, name) for name in _SECTIONS}
    return Job(whole=ToolConfig(draft=draft, layers=[Layer(table=process, where="")]),
               sections={name: ToolConfig(draft=draft, layers=[Layer(table=table, where=name)])
                         for name, table in tables.items()})


def _rest(job: Job, training: Training, divide: int) -> None:
    """Converts precision, captions that are dropped, masks, moving average and checkpoints."""
    train, draft = job["train"], job.whole.draft
    named = str(train.any("dtype") or "fp32").lower()
    training.put("precision", _DTYPES.get(named, "auto"), "train.dtype")
    if named not in _DTYPES:
        training.note("train.dtype", named, "no counterpart; auto uses bf16 if the device supports it")
    training.put("gradient_checkpointing", train.any("gradient_checkpointing") is not False,
                 "train.gradient_checkpointing")
    if any(draft.dropouts):
        training.put_nearest("caption_dropout", max(draft.dropouts), "datasets.caption_dropout_rate")
        if len(set(draft.dropouts)) > 1:
            training.note("datasets.caption_dropout_rate", None, "one rate for all samples; the largest is written")
    if (seed := number_of(job.whole.any("training_seed"))) is not None:
        training.put("seed", int(seed), "training_seed")
    if weight := number_of(train.any("reg_weight")):
        draft.sources = [replace(source, weight=source.weight * weight) if source.role == "prior" else source
                         for source in draft.sources]
    _average(train.any("ema_config"), training)
    every, keep = (number_of(job["save"].any(name)) for name in ("save_every", "max_step_saves_to_keep"))
    steps = _EVERY if every is None else int(every)
    training.put("checkpoint.every", max(1, steps // divide) if steps > 0 else steps, "save.save_every")
    training.put("checkpoint.keep", _KEEP if keep is None else int(keep), "save.max_step_saves_to_keep")
    stored = str(job["save"].any("dtype") or "float16").lower()
    training.put("result.dtype", _STORED.get(_DTYPES.get(stored, ""), "auto"), "save.dtype")
    if job["logging"].any("use_wandb") is True:
        training.put("log.wandb", str(job["logging"].any("project_name") or "ai-toolkit"), "logging.project_name")


def _average(table: Any, training: Training) -> None:
    if not isinstance(table, dict) or table.get("use_ema") is not True:
        return
    decay = number_of(table.get("ema_decay"))
    training.put_nearest("ema.decay", 0.999 if decay is None else float(decay), "train.ema_config.ema_decay")
    for name, usual in (("use_feedback", False), ("param_multiplier", 1)):
        if table.get(name, usual) != usual:
            training.note(f"train.ema_config.{name}", table[name], "no counterpart")


def _others(job: Job, training: Training) -> None:
    """Adds notes on settings that were not read: one for each known setting, and one that names all others."""
    layers = [layer for config in job.sections.values() for layer in config.layers]
    unread = {layer.key(name): value for layer in layers for name, value in layer.table.items()
              if name not in layer.keys_read}
    unread |= {name: value for name, value in job.whole.layers[0].table.items() if name not in _READ}
    unread = {key: value for key, value in unread.items() if value not in OFF and _USUAL.get(key, OFF) != value
              and (key not in _IDLE or job["train"].any(_IDLE[key]) is True)}
    for key in [key for key in unread if key in _LEFT]:
        training.note(key, unread.pop(key), _LEFT[key])
    training.note_others(unread)
