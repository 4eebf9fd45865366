"""The recipes in manifests/recipes: every family of models has one, with training settings, and they work."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from family_cases import CASES
from pictures import draw, draw_mask

from prep.dataset.bucketing import rules_of
from prep.models.families.registry import FAMILIES
from prep.parse import hub_id
from prep.recipe.load import load_recipe
from train.config.load import load_config

FOLDER = Path(__file__).parents[2] / "manifests" / "recipes"
WIDTH = 120


def test_every_family_has_a_recipe_and_training_settings():
    wanted = {f"{name}{end}" for name in FAMILIES for end in (".toml", ".train.toml")}
    assert {path.name for path in FOLDER.iterdir()} == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_is_of_its_family(family):
    recipe = load_recipe(FOLDER / f"{family}.toml", choices={})
    assert recipe.model.family == family
    hub_id(recipe.model.path, "model.path")
    assert [source.path for source in recipe.sources] == [FOLDER / "photos"]
    for rules in rules_of(recipe):
        assert rules.step % FAMILIES[family].factor == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_training_settings_are_of_their_family(family):
    config = load_config(FOLDER / f"{family}.train.toml")
    assert config.lora.targets in FAMILIES[family].lora.presets
    flow = FAMILIES[family].predictions == ("flow",)
    assert not (flow and config.loss.min_snr), "a flow has no such weighting"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_starts_with_its_command_and_is_no_longer_than_it_must(path):
    lines = path.read_text().splitlines()
    stem = path.name.split(".")[0]
    command = f"`train run {stem}.json -c {path.name}`" if path.name.endswith(".train.toml") else (
        f"`prep encode {path.name} --cache cache -o {stem}.json`")
    assert lines[0].startswith("# ") and lines[0].endswith(command)
    assert len(lines) <= 40 and all(len(line) <= WIDTH for line in lines)
    assert tomllib.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_trains_the_tiny_model_of_its_family(prep, train, tmp_path, monkeypatch, family):
    """Only the sizes differ from the files: those of a model of 1024 pixels take minutes."""
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    case = next(case for case in CASES if case.family == family)
    tiny_pipelines.save(case.build, tmp_path / "model", **case.options)
    for number in range(6):
        draw(tmp_path / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text("a cat")
        if FAMILIES[family].inpainting is not None:
            draw_mask(tmp_path / "photos" / f"{number}-masklabel.png", (64, 64))
    for end in (".toml", ".train.toml"):
        shutil.copy(FOLDER / f"{family}{end}", tmp_path)
    monkeypatch.chdir(tmp_path)
    small = ("--resolution", 64, "--step", 64 if FAMILIES[family].factor > 8 else 32, "--buckets", "step")
    with tiny_pipelines.known_warnings():
        done = prep("encode", f"{family}.toml", "--cache", "cache", "-o", f"{family}.json", "--model", "model",
                    "--device", "cpu", *small)
        assert done.code == 0, done.err
        done = train("run", f"{family}.json", "-c", f"{family}.train.toml", "--steps", 2, "--set", "schedule.warmup=0",
                     "--set", "sample.steps=2", "--device", "cpu", "--json")
    assert done.code == 0, done.err
