"""LoHa and LoKr: what they add is their published formula, and the check knows their shapes without loading them."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from adapted import ask, change, trained
from diffusers import UNet2DConditionModel
from peft.tuners.lokr.layer import factorization

from prep.errors import ConfigError
from prep.models.families.registry import FAMILIES
from prep.models.families.sd15 import PRESETS
from prep.models.lora.kohya import UNET
from prep.training.schema import Lora
from train.models import lora
from train.models.naming import Naming, naming_of
from train.models.products import factors, product_shapes
from train.models.targets import adapter_of

NAMING = Naming(component="unet", kohya=UNET)
CASES = [Lora(kind="loha", rank=3, alpha=1.5, conv_rank=2, conv_alpha=1.0, targets="kohya-conv"),
         Lora(kind="lokr", rank=1, alpha=0.5, conv_rank=1, conv_alpha=0.5, targets="kohya-conv"),
         Lora(kind="lokr", rank=2, alpha=0.5, conv_rank=40, conv_alpha=10.0, factor=4, targets="kohya-conv",
              layers=({"match": "to_q", "rank": 1},))]


@pytest.fixture
def unet(tiny_model):
    return UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)


def added(kind, weight, parts):
    """Hyeon-Woo et al. 2022, proposition 1; Yeh et al. 2024, section 3.3. A file's alpha counts with a product A B."""
    parts = {end: value.double() for end, value in parts.items()}
    if kind == "loha":
        whole = torch.einsum("or,ri,os,si->oi", *(parts[f"hada_w{n}_{side}"] for n in "12" for side in "ab"))
        whole = parts["alpha"] / len(parts["hada_w1_b"]) * whole
    elif "lokr_w2" in parts:
        whole = torch.kron(parts["lokr_w1"], parts["lokr_w2"].flatten(1))
    else:
        scale = parts["alpha"] / len(parts["lokr_w2_b"])
        whole = scale * torch.kron(parts["lokr_w1"], parts["lokr_w2_a"] @ parts["lokr_w2_b"])
    return weight + whole.float().reshape(weight.shape)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_file_is_the_formula_applied_to_the_base(unet, tiny_model, settings):
    found = trained(unet, settings)
    wanted, tensors = ask(unet), lora.pack(found, settings, NAMING)
    again = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    before = ask(again)
    used = change(again, tensors, partial(added, settings.kind))
    assert used == set(tensors)
    assert torch.allclose(ask(again), wanted, atol=1e-4) and not torch.allclose(before, wanted, atol=1e-2)
    told = lora.describe(found, settings, NAMING)
    assert told["ss_network_module"] == "lycoris.kohya"
    assert json.loads(told["ss_network_args"])["algo"] == settings.kind


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_new_adapter_adds_nothing_and_the_seed_decides_it(tiny_model, settings):
    found = []
    for seed in (0, 0, 1):
        unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
        before = ask(unet)
        found.append(lora.attach(unet, settings, seed, presets=PRESETS))
        assert torch.equal(ask(unet), before)
    first, same, other = found
    assert all(torch.equal(first[name], value) for name, value in same.items())
    assert {value.dtype for value in first.values()} == {torch.float32}
    assert any(not torch.equal(first[name], value) for name, value in other.items())


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_shapes_are_known_and_a_file_gives_back_the_bits(unet, settings):
    weights = {name: tuple(module.weight.shape) for name, module in unet.named_modules() if hasattr(module, "weight")}
    found = trained(unet, settings)
    for name in {name.rpartition(".")[0].rpartition(".")[0] for name in found}:
        rank = adapter_of(settings, name, weights[name][2:]).rank
        assert product_shapes(weights[name], rank, settings) == {
            key.split(".")[-2]: tuple(value.shape) for key, value in found.items() if key.startswith(f"{name}.")}
    again = lora.unpack(lora.pack(found, settings, NAMING), found, NAMING)
    assert again.keys() == found.keys() and all(torch.equal(again[name], value) for name, value in found.items())


def test_factors_are_those_of_peft():
    for number in (*range(1, 200), 320, 640, 1280, 3072, 10240):
        for first in (0, 1, 3, 4, 8, 16):
            assert factors(number, first) == factorization(number, first or -1), (number, first)


def test_what_no_program_reads_is_refused():
    with pytest.raises(ConfigError) as error:
        Naming(component="transformer", kohya=None).require(Lora(kind="loha"), ["x"])
    assert error.value.message == "lora.kind is 'loha', but its names are not known for this family of models"
    with pytest.raises(ConfigError) as error:
        naming_of(FAMILIES["flux"]).require(Lora(kind="lokr"), ["transformer_blocks.0.attn.to_q"])
    assert error.value.message == (
        "lora.kind is 'lokr', but in kohya's names 'transformer_blocks.0.attn.to_q' is a part of the layer "
        "'lora_unet_double_blocks_0_img_attn_qkv', which has to be adapted as a whole")
    naming_of(FAMILIES["flux"]).require(Lora(kind="lokr"), ["transformer_blocks.0.ff.net.2"])
    naming_of(FAMILIES["qwenimage"]).require(Lora(kind="lokr"), ["transformer_blocks.0.attn.to_q"])
    assert FAMILIES["qwenimage"].lora.presets
