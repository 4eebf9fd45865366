"""Suggests what to write instead of an unknown recipe key: training settings, and other tools' names for our keys.

The names were looked up in sd-scripts v0.10.1 (library/config_util.py) and SimpleTuner (bc8e6ab7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from prep.parse import BRIEF, Unparsed, known_keys
from prep.recipe.schema import SETTINGS as RECIPE
from prep.training import table as training

NEAR = 0.85  # of difflib's ratio, from which on a key is rather a slip: size for sizes

# Other tools' names for training settings.
_OTHERS: Mapping[str, str] = {
    "caption_dropout_rate": "caption_dropout", "train_batch_size": "batch_size", "max_train_steps": "steps",
    "max_train_epochs": "epochs", "mixed_precision": "precision", "learning_rate": "optimizer.lr",
    "network_dim": "lora.rank", "network_alpha": "lora.alpha", "masked_loss": "loss.masked",
    "masked_training": "loss.masked", "min_snr_gamma": "loss.min_snr",
}

# Other tools' names for recipe keys.
_RECIPE: Mapping[str, str] = {
    "image_dir": "[[source]] path", "instance_data_dir": "[[source]] path", "num_repeats": "[[source]] repeats",
    "is_reg": '[[source]] role = "prior"', "metadata_file": "[[source]] table", "class_tokens": "[caption] constant",
    "caption_prefix": "[caption] prefix", "caption_suffix": "[caption] suffix",
    "caption_separator": "[caption] separator", "shuffle_caption": "[caption] shuffle",
    "keep_tokens_separator": "[caption] keep_separator", "secondary_separator": "[caption] together",
    "enable_wildcard": "[caption] wildcards", "caption_tag_dropout_rate": "[caption] dropout",
    "flip_aug": '[image] flip = "both"', "random_crop": '[image] crop = "random"',
    "max_token_length": "[model] text_windows: 150 is 2, 225 is 3", "t5xxl_max_token_length": "[model] max_length",
    "alpha_mask": '[mask] from = "alpha"', "conditioning_data_dir": "[mask] from, or [[source]] references",
    **dict.fromkeys(("control_path", "control_directory"), "[[source]] references"),
    "bucket_reso_steps": "[image] step", "min_bucket_reso": "[image] shortest",
    "max_bucket_reso": "[image] longest", "bucket_no_upscale": '[image] upscale = "never"',
    "enable_bucket": "[image] buckets", "validation_split": "[validation] fraction",
    "datasets": "[[source]]; prep init --from converts the file", "general": "[image] and [caption]; prep init --from "
    "converts the file",
}


@cache
def training_places() -> Mapping[str, str]:
    """The places in train.toml of keys that people write into a recipe: settings, tables, other tools' names for them.

    A setting in a table goes by its last name, unless another one, or one of a recipe, is called so or nearly so.
    """
    ours = {part for name in RECIPE for part in name.split(".")}
    last = Counter(name.rpartition(".")[2] for name in training.SETTINGS)
    places = {}
    for name in training.SETTINGS:
        table, _, key = name.rpartition(".")
        if key not in ours and not (table and (last[key] > 1 or get_close_matches(key, ours, 1, NEAR))):
            places[key] = _spelled(name)
    tables = {table: f"[{table}]" for table in training.SECTIONS if table not in ours}
    return places | tables | {key: _spelled(name) for key, name in _OTHERS.items()}


def _spelled(name: str) -> str:
    """A training setting as it stands in train.toml."""
    table, _, key = training.SETTINGS[name].name.rpartition(".")
    return f"[{table}] {key}" if table else key


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises `Unparsed` for the first unknown key of `table`; the message says where the key belongs, if known."""
    for key in table:
        if key in known:
            continue
        if key in (places := training_places()):
            raise Unparsed(f"unknown key '{key}' in {where}; it is a training setting: in train.toml it is "
                           f"{places[key]}")
        if key in _RECIPE:
            raise Unparsed(f"unknown key '{key[:BRIEF]}' in {where}; here it is {_RECIPE[key]}")
    known_keys(table, known, where)
