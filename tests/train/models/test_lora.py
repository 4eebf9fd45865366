"""Adapters: which layers, which names in the file, and that diffusers pipelines answer like the trained model."""

from __future__ import annotations

import re

import pytest
import torch
from adapted import ask, change, trained
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import save_file

from prep.errors import ConfigError
from prep.models.families.sd15 import PRESETS
from prep.models.lora.kohya import UNET
from prep.training.schema import Lora
from train.models import lora
from train.models.denoiser import quiet
from train.models.naming import Naming
from train.models.targets import adapter_of, targeted

NAMING = Naming(component="unet", kohya=UNET)


@pytest.fixture
def unet(tiny_model):
    return UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)


def test_a_family_without_kohya_s_names():
    naming = Naming(component="transformer", kohya=None)
    assert naming.format_of(Lora()) == "diffusers" and NAMING.format_of(Lora()) == "kohya"
    with pytest.raises(ConfigError) as error:
        naming.format_of(Lora(format="kohya"))
    assert error.value.message == "lora.format is 'kohya', but kohya's names are not known for this family of models"
    assert error.value.hint == "--set lora.format=diffusers"


RULES = ({"match": "re:attn2\\.", "rank": 2},
         {"match": "to_k", "alpha": 1.5}, {"match": "conv2", "rank": 5, "alpha": 2.0})


@pytest.mark.few("conv_alpha", "all-linear")
@pytest.mark.parametrize("more", [
    {"targets": "attention"}, {"targets": "all-linear"}, {"targets": "kohya"}, {"targets": ("to_q", "proj_in")},
    {"targets": "kohya-conv", "conv_rank": 3, "conv_alpha": 5.0}, {"targets": "attention", "rslora": True},
    {"targets": "kohya-conv", "layers": RULES, "rslora": True}, {"targets": "kohya-conv", "layers": RULES[:1]},
    {"targets": "attention", "dora": True}, {"targets": "kohya-conv", "conv_rank": 3, "dora": True},
    {"targets": "kohya-conv", "conv_rank": 3, "conv_alpha": 5.0, "init": "pissa"},
], ids=str)
@pytest.mark.parametrize("layout", ["kohya", pytest.param("diffusers", marks=pytest.mark.slow)])
def test_a_pipeline_answers_like_the_trained_model(unet, tiny_model, tmp_path, layout, more):
    """alpha is not rank here, so a reader that ignores it would answer otherwise."""
    if layout == "kohya" and (more.get("layers") == RULES or more.get("dora")):
        return  # such settings are refused; diffusers drops .dora_scale
    settings = Lora(rank=4, alpha=7.0, format=layout, **more)
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


def test_dora_in_kohya_s_names_is_its_formula(unet, tiny_model):
    """Liu et al. 2024, equation 5: the rows of W + BA, with the lengths in the file. Applied to the base's weights."""
    settings = Lora(rank=4, alpha=7.0, targets="kohya-conv", conv_rank=3, conv_alpha=2.0, dora=True, format="kohya")
    found = trained(unet, settings)
    wanted, tensors = ask(unet), lora.pack(found, settings, NAMING)
    again = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False)
    before = ask(again)

    def formula(weight, parts):
        down, up, alpha, lengths = (parts[end] for end in ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale"))
        changed = weight + (alpha / len(down) * up.flatten(1) @ down.flatten(1)).view_as(weight)
        assert lengths.shape == (len(changed), *[1] * (changed.ndim - 1))
        return lengths * changed / changed.flatten(1).norm(dim=1).view_as(lengths)

    used = change(again, tensors, formula)
    assert used == set(tensors) and any(tensors[name].ndim == 4 for name in used)
    assert torch.allclose(ask(again), wanted, atol=1e-4) and not torch.allclose(before, wanted, atol=1e-2)
    told = lora.describe(found, settings, NAMING)
    assert told["ss_network_module"] == "lycoris.kohya" and '"dora_wd": "True"' in told["ss_network_args"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_begins_with_the_lengths_of_the_base(tiny_model, dtype):
    unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet", low_cpu_mem_usage=False).to(dtype)
    base = {name: value.clone() for name, value in unet.state_dict().items()}
    found = lora.attach(unet, Lora(rank=2, targets="kohya-conv", dora=True), seed=0, presets=PRESETS)
    lengths = {name: value for name, value in found.items() if "magnitude" in name}
    assert len(lengths) * 3 == len(found) and {value.dtype for value in found.values()} == {torch.float32}
    for name, value in lengths.items():
        rows = base[name.split(".lora_")[0] + ".weight"].float().flatten(1).norm(dim=1)
        assert torch.allclose(value.flatten(), rows, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    assert [lora.decays(name) for name in found] == ["magnitude" not in name for name in found]


def test_dora_without_a_direction_is_refused(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight.data[1] = 0
    with pytest.raises(ConfigError) as caught:
        lora.attach(unet, Lora(rank=2, dora=True), seed=0, presets=PRESETS)
    assert caught.value.message == ("lora.dora is on, but 'mid_block.attentions.0.transformer_blocks.0.attn1.to_q' has "
                                    "rows of zeros, which have no direction")


@pytest.mark.parametrize("more", [{}, {"dora": True}, {"init": "pissa"}], ids=str)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_file_gives_back_the_bits(unet, layout, more):
    settings = Lora(rank=2, conv_rank=3, format=layout, targets="kohya-conv", **more)
    found = trained(unet, settings)
    again = lora.unpack(lora.pack(found, settings, NAMING), found, NAMING)
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_pissa_trains_the_principal_part_beside_the_rest(unet):
    """Meng et al. 2024, equations 2 to 4: a layer answers (W - the part) x + scale B A x, with A and B trained."""
    settings = Lora(rank=3, alpha=6.0, targets=("to_k", "conv1"), conv_rank=2, conv_alpha=1.0, dropout=0.5,
                    init="pissa")
    weights = {name: value.clone() for name, value in unet.state_dict().items()}
    found = lora.attach(unet, settings, seed=0, presets=PRESETS)
    kept = {name: value for name, value in unet.named_parameters() if lora.is_stored(name)}
    assert len(kept) == 2 * len(found) and not any(value.requires_grad for name, value in kept.items()
                                                   if name not in found)
    downs = [name for name in found if "lora_A" in name]
    assert {found[name].ndim for name in downs} == {2, 4}
    for name in downs:
        layer = name.removesuffix(".lora_A.default.weight")
        module, weight = unet.get_submodule(layer), weights[f"{layer}.weight"]
        rank, scale = (3, 2.0) if weight.ndim == 2 else (2, 0.5)
        left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        part = (left[:, :rank] * values[:rank]) @ right[:rank]
        down, up = found[name].flatten(1), found[f"{layer}.lora_B.default.weight"].flatten(1)
        assert torch.allclose(scale * up @ down, part, atol=1e-3), layer
        with torch.no_grad():
            for value in (found[name], found[f"{layer}.lora_B.default.weight"]):
                value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
        asked = torch.randn(2, *weight.shape[1:], generator=torch.Generator().manual_seed(2))
        whole = (weight.flatten(1) - part + scale * up @ down).reshape(weight.shape)
        bias = 0 if module.base_layer.bias is None else module.base_layer.bias[:, None, None]
        wanted = asked @ whole.T if weight.ndim == 2 else torch.conv2d(asked, whole, padding=1) + bias
        assert torch.allclose(module.eval()(asked), wanted, atol=1e-3)
        module.train()(asked).sum().backward()
        kept_first = (module.lora_A["first"].weight, module.lora_B["first"].weight)
        assert found[name].grad is not None and all(value.grad is None for value in kept_first)


def test_pissa_needs_as_many_directions(unet):
    with pytest.raises(ConfigError) as caught:
        lora.attach(unet, Lora(rank=17, targets=("to_q",), init="pissa"), seed=0, presets=PRESETS)
    assert re.fullmatch(r"lora.init is 'pissa', but '.*to_q' of shape \[16, 16\] has no 17 principal directions",
                        caught.value.message)


@pytest.mark.parametrize("more", [{}, {"dora": True}, {"init": "pissa"}], ids=str)
def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(unet, more):
    before = ask(unet)
    found = lora.attach(unet, Lora(rank=4, **more), seed=0, presets=PRESETS)
    assert torch.allclose(ask(unet), before, atol=1e-5) if more.get("init") else torch.equal(ask(unet), before)
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


def inside(unet, *kinds):
    """Names of linear and convolution layers inside modules of these classes."""
    return {f"{outer}.{name}".replace(".base_layer", "") for outer, block in unet.named_modules()
            if type(block).__name__ in kinds for name, module in block.named_modules()
            if type(module).__name__ in ("Linear", "Conv2d") and "lora_" not in name}


def test_the_preset_with_convolutions_adapts_what_sd_scripts_does_with_conv_dim(unet):
    """Its UNET_TARGET_REPLACE_MODULE_CONV2D_3X3: conv_dim is the rank of kernels that are larger than 1x1."""
    attached = lora.attach(unet, Lora(rank=2, conv_rank=3, targets="kohya-conv"), seed=0, presets=PRESETS)
    found = {name.split(".lora_")[0] for name in attached}
    wanted = inside(unet, "Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")
    assert found == wanted and {"time_emb_proj", "conv_shortcut"} <= {name.rpartition(".")[2] for name in found}
    ranks = {(value.shape[2:], value.shape[0]) for name, value in attached.items() if "lora_A" in name}
    assert ranks == {((), 2), ((1, 1), 2), ((3, 3), 3)}


def test_each_rule_counts_for_the_layers_that_it_matches_first():
    given = Lora(rank=4, alpha=8.0, conv_rank=2, conv_alpha=1.0, layers=(
        {"match": "re:^up", "lr": 1e-5}, {"match": "to_q", "rank": 16}, {"match": "conv1", "alpha": 3.0}))
    found = {name: adapter_of(given, name, sides) for name, sides in (
        ("up.to_q", ()), ("down.to_q", ()), ("down.to_k", ()), ("down.conv1", (3, 3)), ("down.proj_in", (1, 1)))}
    assert {name: (each.rank, each.alpha, each.lr) for name, each in found.items()} == {
        "up.to_q": (4, 8, 1e-5), "down.to_q": (16, 8, None), "down.to_k": (4, 8, None), "down.conv1": (2, 3, None),
        "down.proj_in": (4, 8, None)}
    assert adapter_of(Lora(rank=9, alpha=2.0, rslora=True), "x", ()).alpha == 6, "2 / sqrt(9) is 6 / 9"


def test_targets_by_regular_expression(unet):
    found = lora.attach(unet, Lora(rank=2, targets=("re:^down_blocks\\.1\\..*attn2\\.to_[kv]$",)), seed=0,
                        presets=PRESETS)
    names = {name.split(".lora_")[0] for name in found}
    assert names and all(name.startswith("down_blocks.1.") and name.endswith(("attn2.to_k", "attn2.to_v"))
                         for name in names)


@pytest.mark.parametrize(("settings", "said"), [
    ({"targets": ("re:^nowhere",)},
     "lora.targets names 're:^nowhere', but no linear or convolution layer's name matches it"),
    ({"layers": ({"match": "ff.net.2", "rank": 2},)},
     "lora.layers names 'ff.net.2', but no layer with an adapter has a name that ends in it"),
    ({"layers": ({"match": "re:^nowhere", "rank": 2},)},
     "lora.layers names 're:^nowhere', but no layer with an adapter has a name that matches it"),
])
def test_patterns_that_match_nothing_are_said(unet, settings, said):
    with pytest.raises(ConfigError) as caught:
        lora.attach(unet, Lora(**settings), seed=0, presets=PRESETS)
    assert caught.value.message == said and "layers" in caught.value.hint


def test_a_preset_that_the_family_lacks():
    with pytest.raises(ConfigError) as error:
        targeted(["blocks.0.to_q"], Lora(targets="kohya"), {"attention": ("to_q",)})
    assert error.value.message == "lora.targets is 'kohya', expected attention for this family of models"
    assert "lora.targets=[" in error.value.hint


def test_a_preset_that_matches_nothing():
    with pytest.raises(ConfigError) as error:
        targeted(["blocks.0.conv"], Lora(targets="attention"), {"attention": ("to_q",)})
    assert error.value.message == "lora.targets is 'attention', but no layer of the model matches: to_q"
