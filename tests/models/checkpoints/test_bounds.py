"""A config that asks for far more than its weights have is refused before memory is allocated for it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from model_files import change_json
from torch import nn

from prep.errors import ModelError
from prep.models.checkpoints.bounds import TABLES, TooMuch, limited
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_files
from prep.models.loading import Form, load_diffusers
from prep.models.text.pipeline import load_encoder
from prep.models.vae import load_vae
from train.models.denoiser import source_of


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize(("part", "changes"), [
    ("vae", {"latent_channels": 10**7}), ("vae", {"layers_per_block": 10**6}), ("vae", {"norm_num_groups": 1,
                                                                                       "block_out_channels": [10**6]}),
    ("unet", {"cross_attention_dim": 10**7}), ("unet", {"layers_per_block": 10**6}),
    ("text_encoder", {"num_hidden_layers": 10**6}), ("text_encoder", {"max_position_embeddings": 10**7}),
    ("text_encoder", {"intermediate_size": 2**25})])
def test_a_model_far_larger_than_its_weights_is_refused(model, part, changes):
    """Whatever the number is called: what counts are the parameters and modules that it leads to."""
    change_json(model / part / "config.json", **changes)
    family = FAMILIES["sd15"]
    with pytest.raises(ModelError) as error:
        if part == "vae":
            load_vae(model, torch.float32)
        elif part == "unet":
            load_diffusers(*source_of(model, family), "denoiser", Form(dtype=torch.float32))
        else:
            load_encoder(model, family, part, text_files(model), torch.float32)
    assert error.value.message.startswith(
        f"{model / part / 'config.json'} describes a model far larger than its weights, which have ")
    assert error.value.message.endswith(" tensors")
    assert error.value.hint == "config.json and weights are from different models; download both again"


def test_tables_without_weights_are_bounded_too():
    with limited({}), torch.device("meta"):
        torch.arange(TABLES)
        with pytest.raises(TooMuch):
            torch.ones(TABLES, 2)
        with pytest.raises(TooMuch):  # which would have data
            torch.empty(1 << 40, device="cpu")


def test_buffers_count_as_weights_do():
    with limited({}), torch.device("meta"), pytest.raises(TooMuch):
        nn.BatchNorm2d(10**7, affine=False)


def test_only_what_this_thread_builds_counts():
    """Another one may load a model of its own meanwhile; and the hooks are gone afterwards."""
    built: list[nn.Module] = []

    def build() -> None:
        built.append(nn.Sequential(*(nn.ReLU() for _ in range(2_000))))

    with limited({}):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        assert built
        with pytest.raises(TooMuch):
            build()
    build()
    assert len(built) == 2
