"""Converts training parameters of Civitai (JSON in camelCase) to a recipe and a `train.toml`.

They are those of an engine: ai-toolkit, musubi-tuner, or sd-scripts. So they are spelled as that engine's
configuration, and its converter says what they mean here; `epochs` of ai-toolkit is the number of checkpoints. The
pictures are those beside the file. Names were compared with civitai ebed6616
(server/schema/orchestrator/training.schema.ts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.recipe.convert.aitoolkit import training as aitoolkit
from prep.recipe.convert.draft import OFF, ConvertedRecipe
from prep.recipe.convert.kohya import training as kohya
from prep.recipe.convert.musubi import training as musubi
from prep.recipe.convert.note import ConversionNote
from prep.recipe.convert.training import number_of

_ENGINES = ("kohya", "rapid", "musubi", "ai-toolkit", "flux2-dev")
_NESTED = ("params", "input", "trainingParams")  # where a whole document has them
# ai-toolkit's arch, and the module of sd-scripts or musubi-tuner, by ecosystem.
_ARCHS: Mapping[str, str] = {
    "sd1": "sd1", "sdxl": "sdxl", "sd3": "sd3", "flux1": "flux", "flux2": "flux2", "flux2klein": "flux2_klein_4b",
    "chroma": "chroma", "qwen": "qwen_image", "zimageturbo": "zimage", "zimagebase": "zimage", "krea2": "krea2",
    "ernie": "ernie_image", "anima": "anima"}
_MODULES: Mapping[str, str] = {
    "sd1": "networks.lora", "sdxl": "networks.lora", "sd3": "networks.lora_sd3", "flux1": "networks.lora_flux",
    "flux2": "networks.lora_flux_2", "flux2klein": "networks.lora_flux_2", "chroma": "networks.lora_flux",
    "qwen": "networks.lora_qwen_image", "zimageturbo": "networks.lora_zimage", "zimagebase": "networks.lora_zimage",
    "krea2": "networks.lora_krea2", "anima": "networks.lora_anima"}
# What a parameter is called there, in the order of its names here: the first that is given counts.
_BATCH, _RATE, _SHUFFLE = ("batchSize", "trainBatchSize"), ("lr", "unetLR"), ("shuffleTokens", "shuffleCaption")
_SD_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "train_batch_size": _BATCH, "unet_lr": _RATE, "learning_rate": _RATE, "max_train_epochs": ("epochs",),
    "max_train_steps": ("steps", "targetSteps"), "text_encoder_lr": ("textEncoderLr", "textEncoderLR"),
    "lr_scheduler": ("lrScheduler",), "lr_scheduler_num_cycles": ("lrSchedulerNumCycles",),
    "optimizer_type": ("optimizerType",), "optimizer_args": ("optimizerArgs",), "network_dim": ("networkDim",),
    "network_alpha": ("networkAlpha",), "noise_offset": ("noiseOffset",), "min_snr_gamma": ("minSnrGamma",),
    "flip_aug": ("flipAugmentation",), "shuffle_caption": _SHUFFLE, "keep_tokens": ("keepTokens",),
    "clip_skip": ("clipSkip",), "resolution": ("resolution",), "enable_bucket": ("enableBucket",),
    "num_repeats": ("numRepeats",)}
_IN_DATA = ("resolution", "enable_bucket", "num_repeats", "train_batch_size", "flip_aug", "shuffle_caption",
            "keep_tokens")
_LACKS: Mapping[str, tuple[str, ...]] = {  # what an engine's configuration has no place for
    **dict.fromkeys(("ai-toolkit", "flux2-dev"), ("lr_scheduler_num_cycles", "optimizer_args", "clip_skip")),
    "musubi": ("flip_aug", "shuffle_caption", "keep_tokens")}
_READ = {"engine", "ecosystem", "modelVariant", *(name for names in _SD_SCRIPTS.values() for name in names)}


def is_parameters(document: Any) -> bool:
    """Whether a document has such parameters."""
    params = _parameters(document)
    return params.get("engine") in _ENGINES and ("networkDim" in params or "ecosystem" in params)


def convert(document: Mapping[str, Any], base: Path, read: Callable[[Path], Any]) -> ConvertedRecipe:
    """The recipe and training settings for parameters in the directory `base`. Raises `Unparsed`."""
    params = _parameters(document)
    values = {name: value for name, options in _SD_SCRIPTS.items()
              if (value := next((params[option] for option in options if params.get(option) is not None), None)
                  ) is not None}
    engine, ecosystem = str(params["engine"]), str(params.get("ecosystem") or "").lower()
    if engine in ("ai-toolkit", "flux2-dev"):
        found = aitoolkit.convert(_job(values, _ARCHS.get(ecosystem, ecosystem or "sd1"), base), base)
    elif engine == "musubi":
        data = {"general": {name: values[name] for name in ("resolution", "num_repeats") if name in values},
                "datasets": [{"image_directory": str(base), "enable_bucket": values.get("enable_bucket", True),
                              "batch_size": int(number_of(values.get("train_batch_size")) or 1)}]}
        found = musubi.convert({**{name: value for name, value in values.items() if name not in _IN_DATA},
                                "dataset_config": ".", "network_module": _MODULES.get(ecosystem, ecosystem)}, base,
                               lambda _: data)
    else:
        found = kohya.convert({"enable_bucket": True, **values, "train_data_dir": str(base),
                               "network_module": _MODULES.get(ecosystem, "networks.lora"),
                               "sdxl": ecosystem == "sdxl"}, base, read)
    unused = {name: values[name] for name in _LACKS.get(engine, ()) if name in values}
    return _noted(found, params, unused)


def _parameters(document: Any) -> Mapping[str, Any]:
    """The table of parameters in a document, which may be below others; empty if there is none."""
    table = document if isinstance(document, dict) else {}
    inner = next((table[name] for name in _NESTED if isinstance(table.get(name), dict)), None)
    outer = {name: value for name, value in table.items() if name not in _NESTED}
    return outer if inner is None else {**outer, **inner}


def _job(values: Mapping[str, Any], arch: str, base: Path) -> dict[str, Any]:
    """The parameters as a job of ai-toolkit, whose checkpoints are as many as epochs."""
    steps, saves = number_of(values.get("max_train_steps")), number_of(values.get("max_train_epochs"))
    train = {"steps": steps, "batch_size": values.get("train_batch_size"), "lr": values.get("unet_lr"),
             "optimizer": values.get("optimizer_type"), "lr_scheduler": values.get("lr_scheduler"),
             "noise_offset": values.get("noise_offset"), "min_snr_gamma": values.get("min_snr_gamma"), "dtype": "bf16",
             "noise_scheduler": "flowmatch" if arch not in ("sd1", "sdxl") else "ddpm",
             "text_encoder_lr": values.get("text_encoder_lr")}
    data = {"folder_path": str(base), "resolution": values.get("resolution"), "num_repeats": values.get("num_repeats"),
            "flip_x": values.get("flip_aug"), "shuffle_tokens": values.get("shuffle_caption"),
            "keep_tokens": values.get("keep_tokens"), "buckets": values.get("enable_bucket")}
    every = {"save_every": max(1, round(steps / saves)), "max_step_saves_to_keep": int(saves)
             } if steps and saves and steps > 0 < saves else {}
    network = {"type": "lora", "linear": values.get("network_dim"), "linear_alpha": values.get("network_alpha")}
    process = {"type": "sd_trainer", "network": network, "train": train, "datasets": [data], "save": every,
               "model": {"arch": arch}}
    return {"job": "extension", "config": {"process": [process]}}


def _noted(found: ConvertedRecipe, params: Mapping[str, Any], unused: Mapping[str, Any]) -> ConvertedRecipe:
    """The recipe, as Civitai's, with notes on what no engine's configuration has."""
    place = ConversionNote(key="engine", value=str(params["engine"]), at="source[0]", said="the pictures are those "
                           "beside this file, and the model is not named in it: set [model] path")
    left = {name: value for name, value in params.items() if name not in _READ and value not in OFF}
    if found.training is not None:
        for name, value in unused.items():
            if value not in OFF:
                found.training.note(_SD_SCRIPTS[name][0], value, f"the engine {params['engine']} has no such setting")
        if params.get("trainTextEncoder"):
            found.training.note("trainTextEncoder", left.pop("trainTextEncoder"), "text encoders are never trained: no "
                                "counterpart")
        if start := left.pop("continueFrom", None):
            found.training.note("continueFrom", start, "an option of train run: --init-from FILE")
        found.training.note_others(left)
    return replace(found, tool="civitai", notes=(place, *found.notes))
