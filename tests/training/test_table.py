"""The table of settings: train.toml, the reference page and the checks come from it; each bound is tested."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from prep.errors import ConfigError
from prep.setting import line_check
from prep.training import table
from prep.training.schema import Config
from train.config.load import as_table, load_config, parse

ROOT = Path(__file__).parents[2]


def test_the_file_holds_every_setting_with_its_default(tmp_path):
    (tmp_path / "train.toml").write_text(table.as_toml())
    assert load_config(tmp_path / "train.toml") == load_config(None) == Config(steps=2000)
    bare = re.sub(r"^# (?=[a-z_.0-9]+ = )", "", table.as_toml(), flags=re.MULTILINE)
    assert _names(tomllib.loads(bare)) == set(table.SETTINGS) == _names(asdict(Config()))


def _names(nested, prefix=""):
    found = set()
    for name, value in nested.items():
        found |= _names(value, f"{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def test_the_example_in_manifests_is_the_file_of_train_init():
    assert (ROOT / "manifests" / "train.toml").read_text() == table.as_toml()


def test_comments_begin_in_one_column_or_a_space_after_a_long_value():
    lines = [line for line in table.as_toml().splitlines() if re.match(r"(# )?[a-z_.0-9]+ = ", line)]
    assert len(lines) == len(table.SETTINGS)
    rows = [*map(table.SETTINGS.__getitem__, table.FIRST),
            *(row for row in table.rows() if row.name not in table.FIRST)]
    for line, row in zip(lines, rows, strict=True):
        value, _, told = line.partition(f"# {row.meaning}")
        assert told in ("", " (r)") and value.endswith(" "), line
        assert len(value) == 40 or (len(value) > 40 and not value.endswith("  ")), line


def test_values_in_words_are_the_bounds():
    assert table.SETTINGS["lora.rank"].spec.values == "1 to 4096"
    assert table.SETTINGS["optimizer.betas"].spec.values == "two numbers, 0 to 0.999999"
    assert table.SETTINGS["steps"].spec.values == "1 or more"
    assert table.SETTINGS["seed"].spec.values == "0 to 2^63 - 1"
    assert table.SETTINGS["loss.masked"].spec.values == "auto, true, false"


@pytest.mark.parametrize("row", list(table.rows()), ids=lambda row: row.name)
def test_each_setting_has_help_and_accepts_its_default_only_in_bounds(row):
    assert row.spec.help and not row.spec.help.endswith(".") and row.spec.values
    given = row.value if not isinstance(row.value, tuple) else list(row.value)
    assert row.spec.check(given, row.name) == row.value
    section, _, key = row.name.rpartition(".")
    of_a_line = row.spec.check is line_check
    for wrong in ({}, -(10**9), "two\nlines" if of_a_line else "no such word"):
        with pytest.raises(ConfigError, match=re.escape(f"{row.name} ")):
            parse({section: {key: wrong}} if section else {key: wrong}, "x")


def test_a_default_that_follows_another_is_in_the_file_as_a_comment():
    text = table.as_toml()
    assert "\n# lora.alpha = 16.0" in text and "(default: rank)" in text
    assert "\n# optimizer.lr = 0.0001" in text and "\n# micro_batch = 4" in text
    assert "\n# sample.size = [512, 512]" in text


def test_the_file_begins_with_what_people_change_and_takes_each_as_it_is(tmp_path):
    first = table.as_toml().partition("# ----")[0]
    assert [line.removeprefix("# ").partition(" = ")[0] for line in first.splitlines() if " = " in line] == [
        *table.FIRST]
    path = tmp_path / "train.toml"
    path.write_text(table.as_toml().replace("lora.rank = 16 ", "lora.rank = 8 "))
    assert load_config(path).lora.rank == 8
    path.write_text(table.as_toml() + "[lora]\nalpha = 8\n")
    with pytest.raises(ConfigError, match="Cannot declare") as error:
        load_config(path)
    assert "write lora.alpha = 8, and no section" in error.value.hint


def test_what_a_resumed_run_may_change():
    free = {row.name for row in table.rows() if row.spec.resume}
    assert free == {"steps", "epochs", "micro_batch", "gradient_checkpointing", "offload", "optimizer.lr",
                    "lora.format", "validation.every", "validation.most", "log.plot", "log.tensorboard", "log.wandb",
                    "parallel.shard", "sample.every", "sample.steps", "sample.guidance", "sample.seed",
                    "sample.sampler", "sample.wait", "sample.encode", "sample.size", "checkpoint.every",
                    "checkpoint.keep", "result.dtype", "result.title", "checkpoint.copy_gib", "tf32",
                    "channels_last", "compile", "result.author", "result.description", "result.license",
                    "result.trigger", "result.tags", "ema.device", "attention", "base.adapter", "sample.model",
                        "evaluate.every", "evaluate.seeds", "evaluate.neutral", "evaluate.embed"}
    assert as_table(Config(steps=3))["steps"] == 3
