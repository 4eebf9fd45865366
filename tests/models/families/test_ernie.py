"""ERNIE-Image's text rows: the tokens of a caption, and no others.

ERNIE-Image's transformer: patches, lengths, and layers that get adapters.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import ErnieImagePipeline

from prep.models.configs import Configs
from prep.models.families import ernie, flux2
from prep.models.families.ernie import FAMILY
from prep.models.family import Conditions, TextOptions
from prep.models.latents import latent_facts
from prep.training.schema import Lora
from train.models.targets import targeted

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


def test_cells_are_the_pipeline_s():
    patches = torch.randn(2, 128, 3, 4)
    found = ernie.cells(patches)
    assert torch.equal(found, ErnieImagePipeline._unpatchify_latents(patches))
    assert torch.equal(flux2.patches(found), patches)


def test_a_batch_is_cut_to_its_longest_text_and_has_lengths():
    transformer = tiny_pipelines.build("ernie").transformer
    seen = []
    transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    mask = torch.tensor([[1] * 3 + [0] * 13, [1] * 7 + [0] * 9], dtype=torch.uint8)
    text = {"hidden": torch.randn(2, 16, 32) * mask[..., None], "attention_mask": mask}
    with torch.no_grad():
        answer = ernie.predict(transformer, torch.randn(2, 32, 4, 6), torch.tensor([0.25, 1.0]),
                               Conditions(text=text, sizes_B6=torch.zeros(2, 6)))
    assert answer.shape == (2, 32, 4, 6)
    assert seen[0]["text_bth"].shape == (2, 7, 32) and seen[0]["text_lens"].tolist() == [3, 7]
    assert seen[0]["text_lens"].dtype == torch.int64 and seen[0]["timestep"].tolist() == [250.0, 1000.0]


@pytest.mark.parametrize(("targets", "left"), [("attention", {"gate_proj", "up_proj", "linear_fc2"}),
                                               ("all-linear", set())])
def test_presets_name_every_layer_of_the_blocks(targets, left):
    transformer = tiny_pipelines.build("ernie").transformer
    layers = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = {name for name in layers if name.startswith("layers.")}
    chosen = set(targeted(layers, Lora(targets=targets), ernie.PRESETS))
    assert chosen <= inside and {name.rpartition(".")[2] for name in inside - chosen} == left
