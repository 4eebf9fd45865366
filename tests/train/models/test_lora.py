"""Adapters: which layers, which names in the file, and that diffusers pipelines answer like the trained model."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import save_file

from prep.errors import ConfigError
from train.config.schema import Lora
from train.models import lora
from train.models.denoiser import quiet
from train.models.families.sd15 import PRESETS
from train.models.naming import UNET, Naming
from train.models.targets import targeted

NAMING = Naming(component="unet", kohya=UNET)


@pytest.fixture
def unet(tiny_model):
    return UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)


def trained(unet, settings):
    """An attached adapter that changes the answer."""
    found = lora.attach(unet, settings, seed=0, presets=PRESETS)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(len(value)))
    return found


def test_kohya_names_where_no_program_reads_them():
    naming = Naming(component="transformer", kohya=None)
    assert naming.format_of(Lora()) == "diffusers" and NAMING.format_of(Lora()) == "kohya"
    with pytest.raises(ConfigError) as error:
        naming.format_of(Lora(format="kohya"))
    assert error.value.message == ("lora.format is 'kohya', but no program reads kohya's names for this family of "
                                   "models")
    assert error.value.hint == "--set lora.format=diffusers"


def ask(unet):
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8, generator=drawn), torch.tensor([10, 700]),
                    torch.randn(2, 8, 32, generator=drawn)).sample


@pytest.mark.parametrize("targets", ["attention", "all-linear", "kohya", ("to_q", "proj_in")], ids=str)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_pipeline_answers_like_the_trained_model(unet, tiny_model, tmp_path, layout, targets):
    """alpha is not rank here, so a reader that ignores it would answer otherwise."""
    settings = Lora(rank=4, alpha=7.0, targets=targets, format=layout)
    before = ask(unet)
    found = trained(unet, settings)
    wanted = ask(unet)
    save_file(lora.pack(found, settings, NAMING), tmp_path / "lora.safetensors",
              metadata=lora.describe(found, settings, NAMING))
    quiet()
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, low_cpu_mem_usage=False, safety_checker=None)
    pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    assert torch.allclose(ask(pipeline.unet), wanted, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-2)


def test_kohya_names_rank_and_alpha_are_in_the_file(unet, tmp_path):
    settings = Lora(rank=4, alpha=2.0)
    found = trained(unet, settings)
    save_file(lora.pack(found, settings, NAMING), tmp_path / "x.safetensors",
              metadata=lora.describe(found, settings, NAMING))
    module = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_out_0"
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_tensor(f"{module}.alpha").item() == 2.0
        assert file.get_tensor(f"{module}.lora_down.weight").shape[0] == 4
        assert file.get_tensor(f"{module}.lora_up.weight").shape[1] == 4
        assert file.metadata()["ss_network_dim"] == "4" and file.metadata()["ss_network_alpha"] == "2.0"
        assert {name.partition(".")[2] for name in file.keys()} == {  # noqa: SIM118  # safe_open is no mapping
            "alpha", "lora_down.weight", "lora_up.weight"}


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_file_gives_back_the_bits(unet, layout):
    settings = Lora(rank=2, format=layout)
    found = trained(unet, settings)
    again = lora.unpack(lora.pack(found, settings, NAMING), found, NAMING)
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(unet):
    before = ask(unet)
    found = lora.attach(unet, Lora(rank=4), seed=0, presets=PRESETS)
    assert torch.equal(ask(unet), before)
    assert {name for name, value in unet.named_parameters() if value.requires_grad} == set(found)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert all(".attn" in name for name in found)


def test_the_seed_decides_the_first_weights(tiny_model):
    def first(seed):
        unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
        return torch.cat([value.flatten() for value in lora.attach(unet, Lora(rank=2), seed, presets=PRESETS).values()])

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


def test_targets_that_are_nowhere_are_said(unet):
    with pytest.raises(ConfigError) as caught:
        lora.attach(unet, Lora(targets=("to_qq",)), seed=0, presets=PRESETS)
    assert caught.value.message == ("lora.targets names 'to_qq', but no linear or convolution layer's name ends in "
                                    "it; did you mean 'to_q'?")
    assert "to_k" in caught.value.hint


def test_first_weights_are_float32_also_beside_a_base_of_half_precision(tiny_model):
    """Drawn in float32 from the seed, not rounded to bfloat16 on the way."""
    def first(dtype):
        unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False).to(dtype)
        return lora.attach(unet, Lora(rank=2), seed=0, presets=PRESETS)

    whole, half = first(torch.float32), first(torch.bfloat16)
    assert all(torch.equal(value, half[name]) for name, value in whole.items())
    down = next(value for name, value in half.items() if "lora_A" in name)
    assert down.dtype == torch.float32 and not torch.equal(down, down.bfloat16().float())
    assert float(down.detach().abs().max()) <= down.shape[1] ** -0.5  # He's bound with the slope sqrt(5)


def test_kohya_s_preset_adapts_what_sd_scripts_adapts(unet):
    """Its `LoRANetwork`: every linear layer and 1x1 convolution inside the UNet's Transformer2DModel."""
    attached = lora.attach(unet, Lora(rank=2, targets="kohya"), seed=0, presets=PRESETS)
    found = {name.split(".lora_")[0] for name in attached}
    inside = {f"{outer}.{name}".replace(".base_layer", "") for outer, block in unet.named_modules()
              if type(block).__name__ == "Transformer2DModel" for name, module in block.named_modules()
              if type(module).__name__ in ("Linear", "Conv2d") and "lora_" not in name}
    assert found == inside and any(name.endswith("proj_in") for name in found)


def test_a_preset_that_the_family_lacks():
    with pytest.raises(ConfigError) as error:
        targeted(["blocks.0.to_q"], Lora(targets="kohya"), {"attention": ("to_q",)})
    assert error.value.message == "lora.targets is 'kohya', expected attention for this family of models"
    assert "lora.targets=[" in error.value.hint


def test_a_preset_that_matches_nothing():
    with pytest.raises(ConfigError) as error:
        targeted(["blocks.0.conv"], Lora(targets="attention"), {"attention": ("to_q",)})
    assert error.value.message == "lora.targets is 'attention', but no layer of the model matches: to_q"
