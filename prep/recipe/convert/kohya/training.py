"""Converts a training configuration of sd-scripts (`--config_file`, or its GUI's JSON) to recipe and `train.toml`.

Its dataset is in the file that `dataset_config` names, or in directories named N_class below `train_data_dir` and
`reg_data_dir`. The dataset file overrides its caption and bucket settings, as in sd-scripts.
Names, defaults and units were compared with sd-scripts v0.10.1 (48d368fa: library/train_util.py, train_network.py,
networks/lora.py) and its GUI, kohya_ss v26.0.0 (45088f04: kohya_gui/lora_gui.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.parse import Unparsed
from prep.recipe.convert.draft import OFF, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.kohya import dataset
from prep.recipe.convert.kohya.adapters import put_method
from prep.recipe.convert.kohya.family import DEFAULTS, PREFIXES, is_gui
from prep.recipe.convert.kohya.noise import put_noise
from prep.recipe.convert.kohya.optimizer import put_optimizer, put_schedule
from prep.recipe.convert.kohya.text import prompts_for, text_of
from prep.recipe.convert.kohya.times import put_times
from prep.recipe.convert.training import Training, model_of, number_of
from prep.recipe.layout import REPEATED
from prep.recipe.schema import ModelOptions

MARKS = ("dataset_config", "train_data_dir", "network_module", "network_dim", "max_train_steps", "max_train_epochs",
         "train_batch_size")  # a file with one of these is such a configuration
_STEPS = 1600  # the default of sd-scripts
_NUMBERS: Mapping[str, tuple[str, type]] = {
    "max_grad_norm": ("optimizer.clip", float), "seed": ("seed", int),
    "network_dropout": ("lora.dropout", float),
}
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
WORDS: Mapping[str, str] = {
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
    "full_fp16": "trained weights are never float16: no counterpart",
    "save_model_as": "safetensors is the only format",
}
_QUIET = {"network_train_unet_only", "save_state", "network_module", "sdxl", "v2", "save_precision",
          *PREFIXES, "flux1_checkbox", "sd3_checkbox"}


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a TOML or JSON document is such a configuration."""
    return any(name in flat_of(document) for name in MARKS)


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> ConvertedRecipe:
    """The recipe and training settings for a configuration in the directory `base`; `read` reads other files.

    Raises `Unparsed`, and what `read` raises.
    """
    table = _sd_scripts(flat_of(document))
    layer = Layer(table=table, where="")
    draft = Draft(tool="kohya", base=base, trains=True)
    config = ToolConfig(draft=draft, layers=[layer])
    args = {name: _plain(name, value) for name, value in table.items() if name != "batch_size"}
    dataset.fill(draft, _dataset(config, read), Layer(table=args, where="", keys_read=layer.keys_read))
    layer.keys_read.discard("batch_size")  # read for a dataset file; here it is of the GUI's preparation of latents
    training = Training()
    put_batches(config, training)
    put_optimizer(config, training)
    put_schedule(config, training)
    put_method(config, training)
    put_noise(config, training)
    _rest(config, training)
    training.settle()
    weight = number_of(config.any("prior_loss_weight"))
    if weight is not None:
        draft.sources = [replace(source, weight=weight) if source.role == "prior" else source
                         for source in draft.sources]
    model = replace(_model(config, training), **text_of(config, training))
    prompts, text = prompts_for(config, training, read)
    put_others(layer, training, WORDS, _QUIET)
    converted = draft.finish()
    recipe = replace(converted.recipe, model=model, prompts=prompts)
    return replace(converted, training=training, recipe=recipe, prompts=text)


def flat_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without their sections, which sd-scripts ignores."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _sd_scripts(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under sd-scripts' names. The GUI has some of them once for each of several families."""
    table = {_GUI.get(name, name): value for name, value in flat.items() if value != ""}
    for box, prefix in PREFIXES.items():
        own = {name.removeprefix(prefix): table.pop(name) for name in list(table)
               if name.startswith(prefix) and name != box}
        if table.get(box) is True:
            table |= own
    bucketed = is_gui(table) and table.get("enable_bucket") in (None, True)
    return {**(DEFAULTS if bucketed else {}), **{name: value for name, value in table.items() if value is not None}}


def _plain(name: str, value: Any) -> Any:
    """The value of a setting of datasets, with numbers and switches that are texts as such; others as they are."""
    if name in _SWITCHED and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    if name not in (*_WHOLE, *_FRACTIONS) or (number := number_of(value)) is None:
        return value
    return int(number) if name in _WHOLE and number == int(number) else number


def _dataset(config: ToolConfig, read: Callable[[Path], Any]) -> Mapping[str, Any]:
    """The dataset file that the configuration names, or a document built from its directories."""
    draft, named = config.draft, config.any("dataset_config")
    if isinstance(named, str) and named:
        return dataset_document(draft, named, read, "sd-scripts'")
    subsets: list[dict[str, Any]] = []
    for key, is_reg in (("train_data_dir", False), ("reg_data_dir", True)):
        place = config.any(key)
        if isinstance(place, str) and place:
            subsets += _subsets(draft.place(place, key), is_reg, config.any("in_json"))
    if not subsets:
        raise Unparsed("it has no dataset, expected dataset_config or train_data_dir")
    return {"datasets": [{"subsets": subsets}]}


def dataset_document(draft: Draft, named: str, read: Callable[[Path], Any], whose: str) -> Mapping[str, Any]:
    """The dataset file that is `named`, `whose` it is. Raises `Unparsed`, and what `read` raises."""
    document = read(draft.place(named, "dataset_config"))
    if not isinstance(document, dict) or not isinstance(document.get("datasets"), list):
        raise Unparsed(f"dataset_config {named} has no [[datasets]], expected {whose} dataset TOML")
    return document


def _subsets(root: Path, is_reg: bool, table: Any) -> list[dict[str, Any]]:
    """Subsets for directories named N_class, as sd-scripts reads them; if there are none, the directory itself."""
    shared = {"is_reg": is_reg} if is_reg else {"metadata_file": table} if isinstance(table, str) and table else {}
    inner = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    numbered = [(folder, match) for folder in inner if (match := REPEATED.fullmatch(folder.name))]
    if not numbered or "metadata_file" in shared:
        return [{"image_dir": str(root), **shared}]
    return [{"image_dir": str(folder), "num_repeats": int(match[1]), "class_tokens": match[2], **shared}
            for folder, match in numbered]


def put_batches(config: ToolConfig, training: Training) -> None:
    """Converts the size of a batch, the length of the run, and the rate of captions that are dropped."""
    draft = config.draft
    count = draft.batches[0] if draft.batches else int(number_of(config.any("train_batch_size")) or 1)
    if len(set(draft.batches)) > 1:
        training.note("datasets.batch_size", draft.batches, f"one batch size for all samples; {count} is written")
    more = int(number_of(config.any("gradient_accumulation_steps")) or 1)
    training.put("batch_size", count * more, "train_batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "train_batch_size")
    epochs, steps = number_of(config.any("max_train_epochs")), number_of(config.any("max_train_steps"))
    of_gui = number_of(config.any("epoch"))  # sd-scripts has no such setting: its GUI computes the steps from it
    if epochs:
        training.put("epochs", int(epochs), "max_train_epochs")
    elif of_gui and not steps:
        training.put("epochs", int(of_gui), "epoch")
    else:
        training.put("steps", int(steps or _STEPS), "max_train_steps")
    rates = [rate for rate in draft.dropouts if rate]
    if rates:
        training.put_nearest("caption_dropout", max(rates), "caption_dropout_rate")
        if len(set(draft.dropouts)) > 1:
            training.note("caption_dropout_rate", None, "one rate for all samples; the largest is written")


def _rest(config: ToolConfig, training: Training) -> None:
    for name, (setting, kind) in _NUMBERS.items():
        value = number_of(config.any(name))
        if value is not None:
            (training.put if name == "seed" else training.put_nearest)(setting, kind(value), name)
    put_times(config, training)
    precision = str(config.any("mixed_precision") or "no").lower()
    known = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    training.put("precision", known.get(precision, "auto"), "mixed_precision")
    if precision not in known:
        training.note("mixed_precision", precision, "no counterpart; auto uses bf16 if the device supports it")
    if config.any("gradient_checkpointing"):
        away = config.any("cpu_offload_checkpointing") is True
        training.put("gradient_checkpointing", "offload" if away else True, "gradient_checkpointing")
    if config.any("fp8_base") and training.settings.get("method") == "lora":
        training.put("quantization", "fp8", "fp8_base")
    training.put_full(half="full_bf16" if config.any("full_bf16") else "",
                      fused="fused_backward_pass" if config.any("fused_backward_pass") else "")
    alpha = any(source.mask == "alpha" for source in config.draft.sources)  # sd-scripts then needs no masked_loss
    if config.any("masked_loss") or config.any("alpha_mask") or alpha:
        training.put("loss.masked", True, "masked_loss")
        training.put("loss.unmasked_weight", 0.0, "masked_loss")
    else:
        training.put("loss.masked", False, "masked_loss")  # although there may be masks


def _model(config: ToolConfig, training: Training) -> ModelOptions:
    named = config.any("pretrained_model_name_or_path")
    if not isinstance(named, str) or not named:
        return ModelOptions()
    return model_of(named, "pretrained_model_name_or_path", training, config.draft.base)


def put_others(layer: Layer, training: Training, words: Mapping[str, str], quiet: Iterable[str]) -> None:
    """Adds notes on settings that were not read: those of `words`, none for `quiet`, and one that names all others."""
    passed = layer.keys_read.union(quiet)
    unread = [name for name, value in layer.table.items() if name not in passed and value not in OFF]
    for name in unread:
        if name in words:
            training.note(name, layer.table[name], words[name])
    training.note_others({name: layer.table[name] for name in unread if name not in words})
