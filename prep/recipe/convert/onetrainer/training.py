"""Converts OneTrainer's main configuration (JSON) and its concepts to a recipe and a `train.toml`.

A setting that the file lacks has OneTrainer's default. Its steps are batches; ours are optimizer steps, of
gradient_accumulation_steps batches each. Names, defaults and units were compared with OneTrainer's master branch of
2026-08-19 (23df3832: modules/util/config/TrainConfig.py, util/create.py, module/EMAModule.py, trainer/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.errors import PathError
from prep.parse import Unparsed, brief
from prep.recipe.convert.draft import OFF, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.length import keep_length
from prep.recipe.convert.onetrainer import concepts
from prep.recipe.convert.onetrainer.adapters import put_method
from prep.recipe.convert.onetrainer.family import bucket_step, denoiser_of, family_of, model_type, part_of
from prep.recipe.convert.onetrainer.noise import put_draws, put_errors, put_loss
from prep.recipe.convert.onetrainer.optimizer import (
    batch_of,
    put_batches,
    put_full,
    put_optimizer,
    put_schedule,
)
from prep.recipe.convert.onetrainer.times import put_times
from prep.recipe.convert.prompts import Sampled, prompt_text
from prep.recipe.convert.text import fit_text
from prep.recipe.convert.training import Training, model_of, number_of
from prep.recipe.schema import ImageOptions, ModelOptions

# Older names of settings, and the last version of the configuration that has them.
_RENAMED: Mapping[str, tuple[str, int]] = {
    "save_after": ("save_every", 5), "save_after_unit": ("save_every_unit", 5), "lora_layers": ("layer_filter", 7),
    "lora_layer_preset": ("layer_filter_preset", 7), "lora_layers_regex": ("layer_filter_regex", 7)}
# How many text encoders a model has, by the start of model_type; others have one.
_ENCODERS: Mapping[str, int] = {"STABLE_DIFFUSION_XL": 2, "STABLE_DIFFUSION_3": 3, "FLUX_DEV": 2, "FLUX_FILL": 2,
                                "HUNYUAN": 2, "HI_DREAM": 4}
_LENGTHS: Mapping[str, str] = {"flux": "text_encoder_2_sequence_length", "flux_fill": "text_encoder_2_sequence_length",
                               "flux2": "text_encoder_sequence_length"}
_FLUX_TOKENS = 77  # OneTrainer's default for T5
_SAMPLED: Mapping[str, str] = {"width": "width", "height": "height", "steps": "diffusion_steps",
                               "guidance": "cfg_scale"}
_SILENT = {"__version", "concept_file_name", "concepts", "model_type", "base_model_name", "optimizer", "unet",
           "concept_stats", "optimizer_defaults", "secrets", "prior", "transformer",  # of them it uses the model's one
           *(f"text_encoder_{number}" for number in (2, 3, 4))}


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> ConvertedRecipe:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads the concepts' file.

    Raises `Unparsed`, and what `read` raises.
    """
    draft = Draft(tool="onetrainer", base=base, trains=True)
    table = _current(document)
    layer = Layer(table=table, where="")
    config = ToolConfig(draft=draft, layers=[layer])
    concepts.fill(draft, _concepts(config, read), _image(config))
    training = Training()
    put_method(config, training)
    if training.settings["method"] == "lora" and any(source.role == "prior" for source in draft.sources):
        training.put("preserve.prior", True, "concepts.type")
    put_batches(config, training)
    put_optimizer(config, training)
    put_full(config, training)
    put_schedule(config, training)
    put_loss(config, training)
    put_errors(config, training)
    put_draws(config, training)
    _parts(config, training)
    put_times(config, training)
    training.settle()
    keep_length(draft, training, batch_of(config))
    model = replace(_model(config, training), **_text(config, training))
    prompts = _prompts(config, read)
    known = layer.keys_read | _SILENT
    training.note_others({name: value for name, value in table.items()
                          if name not in known and value not in (*OFF, "NONE")})
    converted = draft.finish()
    return replace(converted, training=training, recipe=replace(converted.recipe, model=model), prompts=prompts)


def _current(document: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the names of OneTrainer's newest version, as it reads older ones itself."""
    declared, table = document.get("__version"), dict(document)
    version = declared if type(declared) is int else 0
    for name, (new, last) in _RENAMED.items():
        if name in table and new not in table and version <= last:
            table[new] = table.pop(name)
    if version <= 2 and "loss_weight_fn" not in table and number_of(table.get("min_snr_gamma")):
        table |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": table.pop("min_snr_gamma")}
    if type(declared) is int and version <= 3:  # it had one distribution besides the uniform one
        table["timestep_distribution"] = "SIGMOID" if number_of(table.get("noising_weight")) else "UNIFORM"
    if "prior" in table and version <= 8 and ("transformer" not in table or type(declared) is int):
        table["transformer"] = table["prior"]
    return table


def _parts(config: ToolConfig, training: Training) -> None:
    """Notes on parts of the model that OneTrainer trains, or reads from elsewhere, and converts caption dropout."""
    name = denoiser_of(config)
    if part_of(config, name).get("train") is False:
        training.note(f"{name}.train", False, "here the denoiser is always trained")
    if own := part_of(config, name).get("model_name"):
        training.note(f"{name}.model_name", own, "the whole model is that of [model] path: no counterpart")
    count = next((number for start, number in _ENCODERS.items() if model_type(config).startswith(start)), 1)
    names = ["text_encoder", *(f"text_encoder_{number}" for number in range(2, count + 1))]
    for name in names:
        if part_of(config, name).get("train", True) not in (False, None):
            training.note(f"{name}.train", None, "text encoders are never trained: no counterpart")
    rates = [number_of(part_of(config, name).get("dropout_probability")) or 0.0 for name in names]
    if not any(rates):
        return
    key = f"{names[rates.index(max(rates))]}.dropout_probability"
    training.put_nearest("caption_dropout", max(rates), key)
    training.note(key, max(rates), "a dropped caption becomes the unconditional row; OneTrainer uses zeros")
    if len(set(rates)) > 1:
        training.note("dropout_probability", rates, "one rate for all text encoders; the largest is written")


def _concepts(config: ToolConfig, read: Callable[[Path], Any]) -> list[Any]:
    """The concepts in the configuration, or those in the file that it names."""
    inside, named = config.any("concepts"), config.any("concept_file_name")
    if isinstance(inside, list) and inside:
        return inside
    why = f"it is OneTrainer's main configuration, expected the concepts that it names, {brief(named)}"
    if not isinstance(named, str) or not named:
        raise Unparsed(why)
    try:
        listed = read(config.draft.place(named, "concept_file_name"))
    except PathError:
        raise Unparsed(why) from None
    if not isinstance(listed, list):
        raise Unparsed(f"{named} is not a list, expected OneTrainer's concepts")
    return listed


def _image(config: ToolConfig) -> ImageOptions:
    plain = ImageOptions(buckets="ratio" if config.any("aspect_ratio_bucketing") in (None, True) else "single",
                         step=bucket_step(config), upscale="allow")
    named = config.any("resolution")
    return plain if named is None else concepts.with_resolution(config, "resolution", str(named), plain)


def _model(config: ToolConfig, training: Training) -> ModelOptions:
    named = config.any("base_model_name")
    if not isinstance(named, str) or not named:
        return ModelOptions()
    return model_of(named, "base_model_name", training, Path())


def _text(config: ToolConfig, training: Training) -> dict[str, Any]:
    """Converts the encoding of captions: OneTrainer counts skipped layers as we do, but for each encoder apart.

    (OneTrainer: modules/model/StableDiffusionModel.py and StableDiffusionXLModel.py encode_text, FluxModel.py)
    """
    family, options = family_of(config), dict[str, tuple[int, str]]()
    first, second = (int(number_of(config.any(name)) or 0) for name in ("text_encoder_layer_skip",
                                                                         "text_encoder_2_layer_skip"))
    name = _LENGTHS.get(family)
    tokens = number_of(config.any(name)) if name is not None else None
    if family in ("flux", "flux_fill") and name not in config.layers[0].table:
        tokens = _FLUX_TOKENS
    if name is not None and tokens:
        options["max_length"] = int(tokens), name
    if (first or second) and family:
        options["clip_skip"] = first, "text_encoder_layer_skip"
    if family in ("sdxl", "sdxl_inpaint") and first != second:
        training.note("text_encoder_2_layer_skip", second, f"both encoders of SDXL skip alike; [model] clip_skip = "
                      f"{first} is written")
    return fit_text(family, options, config.draft, training)


def _prompts(config: ToolConfig, read: Callable[[Path], Any]) -> str:
    """The text of a file with the prompts of its samples, which are in the configuration or in a file that it names."""
    listed, named = config.any("samples"), config.any("sample_definition_file_name")
    if not isinstance(listed, list) and isinstance(named, str) and named:
        path = config.draft.existing(named)
        if path is None:
            config.draft.note("sample_definition_file_name", named, "this path does not exist", "")
        listed = read(path) if path is not None and path.is_file() else None
    tables = [table for table in listed if isinstance(table, dict)] if isinstance(listed, list) else []
    return prompt_text(
        Sampled(prompt=str(table.get("prompt") or ""), negative=str(table.get("negative_prompt") or ""),
                seed=None if table.get("random_seed") is True else number_of(table.get("seed")),
                **dict[str, Any]({ours: number_of(table.get(theirs)) for ours, theirs in _SAMPLED.items()}))
        for table in tables if table.get("enabled") is not False)
