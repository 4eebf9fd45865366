"""ERNIE-Image's text rows: the tokens of a caption, and no others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.ernie import FAMILY
from prep.models.family import TextOptions
from prep.models.latents import latent_facts

CPU = torch.device("cpu")


def rows(captions, most=2048):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(tiny_pipelines.build("ernie"), captions,
                                                            TextOptions(max_length=most), CPU)]


def test_a_row_has_the_caption_s_tokens():
    assert [len(row) for row in rows(["a cat", "a", ""])] == [5, 1, 1]


def test_a_cut_row_is_that_of_a_cut_caption():
    (row,), (whole,) = rows(["a long caption"], most=6), rows(["a long"])
    assert torch.allclose(row, whole, atol=1e-6)


def test_the_epsilon_is_the_pipeline_s_not_the_config_s(tmp_path: Path):
    """In diffusers 0.42 it is a number in the code; the config still has another."""
    model = tiny_pipelines.save("ernie", tmp_path / "model")
    vae = tiny_pipelines.build("ernie").vae
    assert vae.config.batch_norm_eps == 1e-4
    found = torch.tensor([float(value) for value in latent_facts(model, FAMILY)["std"]], dtype=torch.float64)
    wanted = [math.sqrt(value + 1e-5) for value in vae.bn.running_var.tolist()]  # torch.sqrt may round otherwise
    assert found.tolist() == wanted


def test_the_width_is_the_language_model_s(tmp_path: Path):
    found = FAMILY.text.shapes(Configs(tiny_pipelines.save("ernie", tmp_path / "model")), TextOptions(max_length=9))
    assert found == {"hidden": (9, 32)}
