"""`prep models` lists every family, from the records that encode and train use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prep.errors import ConfigError
from prep.models.families.registry import FAMILIES
from prep.report.terminal.models import describe, models_table
from prep.training.schema import Lora
from train.models.naming import naming_of

ROOT = Path(__file__).parents[2]


def test_all_families_a_line_each(prep):
    result = prep("models")
    assert result.code == 0
    rows = [line.split("\t") for line in result.out.splitlines()]
    assert [row[0] for row in rows] == list(FAMILIES)
    assert rows[0] == ["sd15", "4x8", "64", "epsilon, v_prediction", "hidden", "77", "kohya, diffusers",
                       "StableDiffusionPipeline", "Stable Diffusion 1.x"]
    assert ["zimage", "16x8", "64", "flow", "hidden", "1-512", "diffusers, kohya", "ZImagePipeline",
            "Z-Image, Z-Image-Turbo"] in rows


def test_a_terminal_of_80_columns_shows_a_family_in_few_words():
    text = models_table([describe(family) for family in FAMILIES.values()], width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].split()[:2] == ["family", "latent"]
    assert [line.split()[0] for line in lines if line[:1].strip()][1:-2] == list(FAMILIES)
    assert lines[-2].startswith("latent: channels x pixels per cell; tokens: of a text row")
    assert "Stable Diffusion XL" in text and "epsilon, v " in text


def test_one_family_in_detail(prep):
    told = dict(line.split("  ", 1) for line in prep("models", "sdxl").out.splitlines())
    told = {label: value.strip() for label, value in told.items()}
    assert told == {
        "models": "Stable Diffusion XL", "pipeline": "StableDiffusionXLPipeline", "trained part": "unet",
        "latent": "4 channels, 8 x 8 pixels per cell", "step": "64 pixels; --step takes any multiple of 8",
        "resolution": "1024 pixels", "predicts": "epsilon, v_prediction",
        "text": "hidden [token, channel], pooled [channel]; rows are full", "tokens": "77; --max-length takes 77",
        "--clip-skip": "yes", "--text-windows": "yes", "--text-quantization": "no",
        "LoRA files": "kohya, diffusers",
        "recipe": "manifests/recipes/sdxl.toml", "training": "manifests/recipes/sdxl.train.toml"}
    told = prep("models", "pixart_alpha").out
    assert "--max-length takes 1 to 120" in told and "--step takes any multiple of 16" in told
    told = " ".join(told.split())
    assert "rows are trimmed" in told and "--clip-skip no" in told and "--text-quantization yes" in told
    told = [" ".join(line.split()) for line in prep("models", "anima").out.splitlines()]
    assert told[2:4] == ["trained part transformer", "frozen part text_conditioner, makes its text of rows"]


@pytest.mark.parametrize(("name", "wanted"), [
    ("flux2", "up to 6 pictures beside a caption, of about 1024² pixels"),
    ("qwenimage_edit", "up to 3 pictures beside a caption, of about 1024² pixels"),
    ("qwenimage21", "up to 10 pictures beside a caption, of about 1024² pixels"),
    ("flux3", "up to 10 pictures beside a caption, of about 1024² pixels"),
    ("longcat_image_edit", "1 picture beside a caption, of about 1024² pixels"),
    ("flux_kontext", "1 picture beside a caption, of about 1024² pixels")])
def test_pictures_that_are_conditions(prep, name, wanted):
    told = [" ".join(line.split()) for line in prep("models", name).out.splitlines()]
    assert f"references {wanted}" in told


def test_an_unknown_family_is_corrected(prep):
    result = prep("models", "sdlx")
    assert result.code == 2 and "did you mean 'sdxl'?" in result.err
    assert "hint: prep models describes them" in result.err


@pytest.mark.parametrize("name", FAMILIES)
def test_json(prep, name):
    (one,) = prep("models", name, "--json").json["families"]
    assert one == describe(FAMILIES[name])
    assert [(ROOT / one[kind]).is_file() for kind in ("recipe", "train")] == [True, True]


def test_what_is_told_of_lora_files_is_what_train_writes():
    for name, family in FAMILIES.items():
        naming, told = naming_of(family), describe(family)["lora_formats"]
        assert naming.format_of(Lora()) == told[0], name
        if "kohya" in told:
            assert {naming.format_of(Lora(format=one)) for one in ("kohya", "diffusers")} == set(told), name
        else:
            with pytest.raises(ConfigError, match="names are not known for this family"):
                naming.format_of(Lora(format="kohya"))


def test_every_family_has_its_own_names():
    names = [model for family in FAMILIES.values() for model in family.models]
    assert len(set(names)) == len(names)


def test_it_is_quick():
    script = ("from prep.cli.main import app\ntry: app(['models'])\nexcept SystemExit: pass\n"
              "import sys; print([name for name in ('torch', 'diffusers', 'transformers', 'numpy') if name in "
              "sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
