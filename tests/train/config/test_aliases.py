"""Names from other trainers: each is answered with the setting here, or with where it is decided."""

from __future__ import annotations

import pytest

from prep.errors import ConfigError
from prep.training.table import SETTINGS
from train.config import aliases
from train.config.load import load_config, parse


def test_every_answer_names_a_setting_that_exists_and_no_name_of_ours_is_taken():
    assert set(aliases._NAMES) <= set(SETTINGS)
    assert not set(aliases._HERE) & set(SETTINGS) and not set(aliases._ELSEWHERE) & set(SETTINGS)
    assert not set(aliases._HERE) & set(aliases._ELSEWHERE)
    assert len(aliases._HERE) == sum(len(names.split()) for names in aliases._NAMES.values()), "a name twice"


@pytest.mark.parametrize(("table", "said"), [
    ({"learning_rate": 1e-4}, "unknown key 'learning_rate' in train.toml; here it is optimizer.lr"),
    ({"max_train_steps": 10}, "; here it is steps"),
    ({"network_dim": 8}, "; here it is lora.rank"),
    ({"network_alpha": 8}, "; here it is lora.alpha"),
    ({"train_batch_size": 8}, "; here it is batch_size"),
    ({"gradient_accumulation_steps": 2}, "; no counterpart: an optimizer step takes batch_size samples"),
    ({"lr_scheduler": "cosine"}, "; here it is schedule.name"),
    ({"mixed_precision": "bf16"}, "; here it is precision"),
    ({"save_every_n_steps": 100}, "; here it is checkpoint.every"),
    ({"max_train_epochs": 3}, "; here it is epochs"),
    *(({name: 1}, f'; here it is {ours} = "1 epoch", or another number of epochs') for ours, names in (
        ("checkpoint.every", ("save_every_n_epochs", "save_n_epoch_ratio", "checkpoint_every_n_epochs",
                              "checkpoint_epoch_interval")),
        ("sample.every", ("sample_every_n_epochs", "validation_epoch_interval")),
        ("validation.every", ("validate_every_n_epochs", "eval_every_n_epochs", "eval_epoch_interval")),
    ) for name in names),
    ({"resolution": 512}, "; prep encode decides it"),
    ({"optimizer": {"learning-rate": 1}}, "'learning-rate' in [optimizer] of train.toml; here it is optimizer.lr"),
    ({"rank": 8}, "; here it is lora.rank"),
    ({"lora": {"rank": 8, "steps": 10}}, "unknown key 'steps' in [lora] of train.toml; here it is steps, which is in "
     "no [section], but above them"),
    ({"optimizer": {"train_batch_size": 4}}, "; here it is batch_size, which is in no [section], but above them"),
    ({"lora": {"lr": 1}}, "unknown key 'lr' in [lora] of train.toml; here it is optimizer.lr"),
    ({"every": 8}, "; here it is validation.every or sample.every or evaluate.every or checkpoint.every"),
])
def test_names_of_other_trainers(table, said):
    with pytest.raises(ConfigError) as caught:
        parse(table, "train.toml")
    assert said in caught.value.message


def test_also_where_they_are_options():
    with pytest.raises(ConfigError, match=r"unknown key 'learning_rate' in the options; here it is optimizer.lr"):
        load_config(None, {"learning_rate": 1})
