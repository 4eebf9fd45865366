"""Converts diffusion-pipe's main TOML, and the dataset files that it names, to a recipe and a `train.toml`.

A step is an update of the weights, of micro_batch_size_per_gpu × gradient_accumulation_steps samples on one GPU. Names,
defaults and units were compared with diffusion-pipe 8f83dbf (train.py, models/base.py, docs/supported_models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.formatting import join_texts
from prep.parse import Unparsed, expect, list_of
from prep.recipe.convert.diffusionpipe import dataset
from prep.recipe.convert.diffusionpipe.model import family_of, put_method, put_model, put_noise
from prep.recipe.convert.diffusionpipe.optimizer import put_optimizer, put_schedule
from prep.recipe.convert.draft import OFF, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.length import keep_length
from prep.recipe.convert.training import Training, number_of

_STEPS: Mapping[str, int] = {"hunyuan_image": 32}  # multiples of its bucket sides, in pixels
_SECTIONS = ("model", "adapter", "optimizer", "monitoring")
_STORED = ("float32", "float16", "bfloat16")
_SPEED = "affects only speed and memory: nothing to set"
_SCALE = "validation is never shuffled, and drops no samples: nothing to set"
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("partition_method", "partition_split", "caching_batch_size", "map_num_proc", "steps_per_print",
                     "logging_steps", "reentrant_activation_checkpointing", "x_axis_examples", "compile_mode",
                     "disable_block_swap_for_eval"), _SPEED),
    **dict.fromkeys(("eval_micro_batch_size_per_gpu", "image_eval_micro_batch_size_per_gpu",
                     "eval_image_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps"), _SCALE),
    "eval_before_first_step": "validation comes after the steps of validation.every, and at the end",
    "pipeline_stages": "a model is divided among processes by [parallel] shard in train.toml",
    "output_dir": "an option of train run: -o RUN",
    "resume_from_checkpoint": "train run --resume continues a run",
    "video_clip_mode": "videos have no counterpart",
    "pseudo_huber_c": "the nearest is loss.huber, by Huber's loss, which has another scale; not written",
    "checkpoint_every_n_minutes": "counted in minutes; checkpoint.every is counted in steps or epochs",
    "monitoring.wandb_run_name": "a run is named by its directory",
}
_READ = ("dataset", "eval_datasets", *_SECTIONS)


def is_training(document: Any) -> bool:
    """Whether a document is such a main TOML: it names a dataset file, and its model's type."""
    model = document.get("model") if isinstance(document, dict) else None
    return isinstance(model, dict) and "type" in model and isinstance(document.get("dataset"), str)


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> ConvertedRecipe:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads its dataset files.

    Raises `Unparsed`, and what `read` raises.
    """
    draft, training = Draft(tool="diffusion-pipe", base=base, trains=True), Training()
    top = ToolConfig(draft=draft, layers=[Layer(table=document, where="")])
    tables = {name: expect(document.get(name) or {}, dict, name) for name in _SECTIONS}
    part = {name: ToolConfig(draft=draft, layers=[Layer(table=table, where=name)]) for name, table in tables.items()}
    model = part["model"]
    step = _STEPS.get(str(model.any("type")), dataset.STEP)
    _sources(draft, top, read, step)
    family = family_of(model, edits=any(source.references for source in draft.sources))
    put_method(part["adapter"] if tables["adapter"] else None, family, training)
    batch = _batches(top, training)
    put_optimizer(part["optimizer"], model, top, training, batch)
    put_schedule(top, training)
    put_noise(model, family, training)
    _rest(top, part["monitoring"], training, batch)
    options = put_model(model, training, lora=bool(tables["adapter"]))
    training.settle()
    keep_length(draft, training, batch)
    _others(top, part, training)
    converted = dataset.finish(draft)
    return replace(converted, training=training, recipe=replace(converted.recipe, model=options))


def _sources(draft: Draft, top: ToolConfig, read: Callable[[Path], Any], step: int) -> None:
    """Adds the sources of the dataset file, and of those that are held out."""
    dataset.fill(draft, _document(draft, top.get("dataset", str, ""), "dataset", read), step=step)
    for number, entry in enumerate(list_of(top.any("eval_datasets") or [], lambda value, at: expect(value, dict, at),
                                           "eval_datasets")):
        named = expect(entry.get("config"), str, f"eval_datasets[{number}].config")
        dataset.fill(draft, _document(draft, named, f"eval_datasets[{number}].config", read), role="validation",
                     step=step)


def _document(draft: Draft, named: str, key: str, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    document = read(draft.place(named, key))
    if not dataset.is_dataset(document):
        raise Unparsed(f"{key} {named} has no [[directory]] with a path, expected diffusion-pipe's dataset TOML")
    known: Mapping[str, Any] = document
    return known


def _batches(top: ToolConfig, training: Training) -> int:
    """Adds the size of a batch and the length; the samples of a step on one GPU."""
    name = next((name for name in ("image_micro_batch_size_per_gpu", "micro_batch_size_per_gpu") if top.has(name)),
                "micro_batch_size_per_gpu")
    given = top.any(name)
    counts = [number_of(pair[-1]) for pair in given if isinstance(pair, list) and pair] if isinstance(
        given, list) else [number_of(given)]
    count = max(1, int(min((value for value in counts if value), default=1)))
    if len(set(counts)) > 1:
        training.note(name, given, f"one batch size for all resolutions; the smallest, {count}, is written")
    for other in ("image_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"):
        top.any(other)
    more = max(1, int(number_of(top.any("gradient_accumulation_steps")) or 1))
    training.put("batch_size", count * more, name)
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, name)
    training.put("underfill", "drop", name)  # it cuts each bucket to whole batches
    epochs, steps = number_of(top.any("epochs")), number_of(top.any("max_steps"))
    if steps:
        training.put("steps", int(steps), "max_steps")
        if epochs:
            training.note("epochs", epochs, "max_steps is written, which ends the run if it is reached first")
    elif epochs:
        training.put("epochs", int(epochs), "epochs")
    return count * more


def _rest(top: ToolConfig, monitoring: ToolConfig, training: Training, batch: int) -> None:
    """Converts captions that are dropped, masks, memory, intervals and what a run shows."""
    share, masked = number_of(top.any("uncond_fraction")), any(source.mask for source in top.draft.sources)
    if share:
        training.put_nearest("caption_dropout", float(share), "uncond_fraction")
    training.put("loss.masked", masked, "mask_path")
    if masked:
        training.put("loss.unmasked_weight", 0.0, "mask_path")
    recomputed = top.any("activation_checkpointing")
    if recomputed:
        training.put("gradient_checkpointing", "offload" if recomputed == "unsloth" else True,
                     "activation_checkpointing")
    blocks = number_of(top.any("blocks_to_swap"))
    if blocks and recomputed and training.settings.get("method") == "lora":
        training.put("offload", int(blocks), "blocks_to_swap")
    elif blocks:
        training.note("blocks_to_swap", blocks, "offload is for a LoRA with gradient checkpointing; not written")
    if top.any("compile") is True:
        training.put("compile", True, "compile")
    stored = top.any("save_dtype")
    if stored in _STORED:
        training.put("result.dtype", stored, "save_dtype")
    elif stored is not None:
        training.note("save_dtype", stored, "result.dtype is float32, float16 or bfloat16; not written")
    _interval(top, training, "save_every_n", "checkpoint.every", batch)
    _interval(top, training, "eval_every_n", "validation.every", batch)
    training.put("checkpoint.keep", 0, "save_every_n_epochs")
    if monitoring.any("enable_wandb") is True:
        training.put("log.wandb", str(monitoring.any("wandb_tracker_name") or "diffusion-pipe"),
                     "monitoring.wandb_tracker_name")
    else:
        monitoring.any("wandb_tracker_name")


def _interval(top: ToolConfig, training: Training, start: str, setting: str, batch: int) -> None:
    """Adds an interval in samples or steps, or else in epochs; a checkpoint of the state has the weights, too."""
    samples, steps, epochs = (number_of(top.any(f"{start}_{unit}")) for unit in ("examples", "steps", "epochs"))
    state = number_of(top.any("checkpoint_every_n_epochs")) if setting == "checkpoint.every" else None
    if samples or steps:
        count, key = (int(samples) // batch, "examples") if samples else (int(steps or 0), "steps")
        training.put(setting, max(1, count) if count > 0 or samples else count, f"{start}_{key}")
        for unit, value in (("steps", steps if samples else None), ("epochs", epochs)):
            if value:
                training.note(f"{start}_{unit}", value, f"there is one interval; {start}_{key} is written")
    elif epochs or state:
        training.put_epochs(setting, epochs or state or 0, f"{start}_epochs" if epochs else "checkpoint_every_n_epochs")
    else:
        training.put(setting, 0, f"{start}_epochs")
    if state and (samples or steps or epochs):
        training.note("checkpoint_every_n_epochs", state, "a checkpoint is made whenever weights are saved, after "
                      f"{start}_…, which is written")


def _others(top: ToolConfig, part: Mapping[str, ToolConfig], training: Training) -> None:
    """Adds notes on settings that were not read: one for each known setting, and one that names all others."""
    layers = [*top.layers, *(layer for config in part.values() for layer in config.layers)]
    unread = {layer.key(name): value for layer in layers for name, value in layer.table.items()
              if name not in layer.keys_read and value not in OFF and not (layer.where == "" and name in _READ)}
    if unread.get("pipeline_stages") == 1:
        del unread["pipeline_stages"]
    for key in [key for key in unread if key in _LEFT]:
        training.note(key, unread.pop(key), _LEFT[key])
    if stale := [key for key in unread if key.startswith("adapter.alpha")]:
        training.note(join_texts(stale, 1), unread.pop(stale[0]), "diffusion-pipe refuses it: alpha is the rank, which "
                      "is written")
    training.note_others(unread)
