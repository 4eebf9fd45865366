"""LoRA files as the programs in use write them: of each family and spelling, what is added to the weights is what a
computation without `train` adds to the weights that the authors published."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from original_checkpoints import unet_name
from original_layout import (
    ANIMA,
    AURAFLOW,
    CHROMA,
    FLUX,
    FLUX2,
    FLUX3,
    KREA2,
    LUMINA2,
    QWENIMAGE21,
    SD3,
    ZIMAGE,
    published,
)

from prep.models.families.registry import FAMILIES
from train.merging.additions import changed, read_lora
from train.merging.resize import ResizeRequest, resize
from train.models.naming import naming_of

LINES = {"sd3": SD3, "flux": FLUX, "chroma": CHROMA, "flux2": FLUX2, "flux2_klein": FLUX2, "flux3": FLUX3,
         "zimage": ZIMAGE, "lumina2": LUMINA2, "auraflow": AURAFLOW, "krea2": KREA2, "qwenimage": "",
         "hidream": "", "ernie": "", "anima": ANIMA, "qwenimage21": QWENIMAGE21}
UNETS = ("sd15", "sd21", "sdxl")
AB, DOWN_UP = (".lora_A.weight", ".lora_B.weight", ""), (".lora_down.weight", ".lora_up.weight", ".alpha")


def underscored(layer):
    return layer.replace(".", "_")


def by_processor(layer):
    """As diffusers of 2023 named attention layers."""
    return layer.replace(".to_", ".processor.to_").removesuffix(".0") if ".to_" in layer else layer


# Spellings of a layer and the ends of down, up and alpha: those that name diffusers' layers, and those that name the
# authors'.
OURS = {
    "diffusers": ("{component}.{}", str, AB), "PEFT": ("base_model.model.{}", str, AB), "bare": ("{}", str, AB),
    "PEFT in memory": ("{}", str, (".lora_A.default.weight", ".lora_B.default.weight", "")),
    "diffusion-pipe": ("diffusion_model.{}", str, AB), "Mochi": ("{}", str, (".lora_A", ".lora_B", "")),
    "diffusers 0.20": ("{component}.{}", str, (".lora.down.weight", ".lora.up.weight", "")),
    "diffusers 0.17": ("{component}.{}", by_processor, ("_lora.down.weight", "_lora.up.weight", "")),
    "OneTrainer": ("lora_transformer_{}", underscored, DOWN_UP), "SimpleTuner": ("lycoris_{}", underscored, DOWN_UP),
    "split": ("lora_unet_{}", underscored, DOWN_UP), "no prefix": ("{}", underscored, DOWN_UP),
}
THEIRS = {
    "kohya": ("lora_unet_{}", underscored, DOWN_UP), "ai-toolkit": ("diffusion_model.{}", str, AB),
    "bare": ("{}", str, DOWN_UP), "OMI": ("transformer.{}", str, DOWN_UP),
    "PEFT": ("base_model.model.diffusion_model.{}", str, AB), "checkpoint": ("model.diffusion_model.{}", str, DOWN_UP),
}


@cache
def model_of(family):
    """The weights of the tiny denoiser's layers, and its config."""
    model = getattr(tiny_pipelines.build(family), FAMILIES[family].denoiser)
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)}
    weights = {name: value.clone() for name, value in model.state_dict().items()
               if name.removesuffix(".weight") in layers and name.endswith(".weight")}
    return weights, model.config


def as_published(family, weights):
    if family in UNETS:
        config = model_of(family)[1]
        return {unet_name(name, config.layers_per_block, len(config.block_out_channels), config): value
                for name, value in weights.items()}
    return published(weights, LINES[family])


def row_numbers(weights):
    """Each weight's rows as two numbers: those of the weight and of the row."""
    return {name: torch.stack([torch.full((len(value),), number), torch.arange(len(value))], 1)
            for number, (name, value) in enumerate(weights.items())}


def added_to(weights, there, rows):
    """What is added to the published weights `there`, as additions to `weights`; `rows`: what row each of theirs is."""
    names = list(weights)
    found = {name: torch.zeros_like(value) for name, value in weights.items()}
    for name, value in there.items():
        for (number, row), line in zip(rows[name].tolist(), value, strict=True):
            found[names[number]][row] = line.reshape(weights[names[number]].shape[1:])
    return found


def drawn_lora(value, rank, drawn):
    """down, up and what they add."""
    down = torch.randn(rank, *value.shape[1:], generator=drawn)
    up = torch.randn(len(value), rank, *(1 for _ in value.shape[2:]), generator=drawn)
    return down, up, (up.flatten(1) @ down.flatten(1)).reshape(value.shape)


def merged(path, tensors, family, metadata=None):
    """The change of each weight that reading the file gives."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)
    weights, _ = model_of(family)
    layers = {name.removesuffix(".weight"): tuple(value.shape) for name, value in weights.items()}
    added = read_lora(path, layers, naming_of(FAMILIES[family], layers)).added
    return {name: changed(value, added[layer], 1.0) - value if (layer := name.removesuffix(".weight")) in added else
            torch.zeros_like(value) for name, value in weights.items()}


def check(path, family, spelling, targets, rows):
    """A file in one spelling, of rank 4, and alpha 2 where there is a tensor for it."""
    form, spell, ends = spelling
    weights, tensors, there = model_of(family)[0], {}, {}
    drawn = torch.Generator().manual_seed(0)
    for name, value in targets.items():
        layer = name.removesuffix(".weight")
        stem = form.replace("{component}", FAMILIES[family].denoiser).format(spell(layer))
        down, up, there[name] = drawn_lora(value, 4, drawn)
        tensors[stem + ends[0]], tensors[stem + ends[1]] = down, up
        if ends[2]:
            tensors[stem + ends[2]] = torch.tensor(2)  # an int64, as some write it
            there[name] = there[name] / 2
    wanted, found = added_to(weights, there, rows), merged(path, tensors, family)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-4), name


@pytest.mark.few("sdxl", "zimage")
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_diffusers_layers(family, tmp_path):
    weights, _ = model_of(family)
    for name, spelling in OURS.items():
        check(tmp_path / f"{name}.safetensors", family, spelling, weights, row_numbers(weights))


@pytest.mark.parametrize("family", (*LINES, *UNETS))
def test_names_of_the_authors_layers(family, tmp_path):
    weights, _ = model_of(family)
    rows = as_published(family, row_numbers(weights))
    for name, spelling in THEIRS.items():
        check(tmp_path / f"{name}.safetensors", family, spelling, as_published(family, weights), rows)


@pytest.mark.few("zimage")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resized_file_has_its_spelling_and_adds_the_same(family, tmp_path):
    """At its own rank; at a lower one each of the file's layers adds the largest part of that."""
    weights = dict([*model_of(family)[0].items()][::3])
    for name, (form, spell, ends) in OURS.items():
        drawn, tensors, wanted = torch.Generator().manual_seed(0), {}, {}
        for number, (weight, value) in enumerate(weights.items()):
            stem = form.replace("{component}", FAMILIES[family].denoiser).format(spell(weight.removesuffix(".weight")))
            rank = 2 + number % 3
            tensors[stem + ends[0]], tensors[stem + ends[1]], wanted[weight] = drawn_lora(value, rank, drawn)
            if ends[2]:
                tensors[stem + ends[2]] = torch.tensor(2.0 * rank)
                wanted[weight] = 2 * wanted[weight]
        lower = {weight: torch.linalg.svd(value.flatten(1), full_matrices=False) for weight, value in wanted.items()}
        lower = {weight: (left[:, :1] * values[:1] @ right[:1]).reshape(wanted[weight].shape)
                 for weight, (left, values, right) in lower.items()}
        path, resized = tmp_path / f"{name}.safetensors", tmp_path / f"{name}-resized.safetensors"
        merged(path, tensors, family)
        for rank, expected in ((4, wanted), (1, lower)):
            resize(ResizeRequest(lora=path, output=resized, rank=rank, force=True))
            found = load_file(resized)
            with safe_open(resized, "pt") as file:
                changes = merged(resized, found, family, file.metadata())
            assert found.keys() == tensors.keys()
            for weight, value in expected.items():
                assert torch.allclose(changes[weight], value, atol=1e-3), (name, weight)


@pytest.mark.parametrize("family", (*LINES, *UNETS))
def test_products_and_lengths_of_the_authors_layers(family, tmp_path):
    """LoHa, LoKr of either form, and DoRA by rows and by columns, also of fused layers."""
    weights, _ = model_of(family)
    theirs, rows = as_published(family, weights), as_published(family, row_numbers(weights))
    drawn, tensors, sums = torch.Generator().manual_seed(0), {}, {}
    for number, (name, value) in enumerate(theirs.items()):
        stem, flat = f"lora_unet_{underscored(name.removesuffix('.weight'))}", value.flatten(1)
        whole, columns = len(flat), flat.shape[1]

        def draw(*shape):
            return torch.randn(shape, generator=drawn)

        if number % 4 == 0:
            parts = {"hada_w1_a": draw(whole, 2), "hada_w1_b": draw(2, columns), "hada_w2_a": draw(whole, 2),
                     "hada_w2_b": draw(2, columns), "alpha": torch.tensor(1.0)}
            add = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"]) / 2
        elif number % 4 == 1 and whole % 2 == 0 == value.shape[1] % 2:
            parts = {"lokr_w1": draw(2, 2), "lokr_w2": draw(whole // 2, columns // 2), "alpha": torch.tensor(9e9)}
            add = torch.kron(parts["lokr_w1"], parts["lokr_w2"])
        elif number % 4 == 2 and whole % 2 == 0 == value.shape[1] % 2:
            parts = {"lokr_w1": draw(2, 2), "lokr_w2_a": draw(whole // 2, 3), "lokr_w2_b": draw(3, columns // 2),
                     "alpha": torch.tensor(6.0)}
            add = 2 * torch.kron(parts["lokr_w1"], parts["lokr_w2_a"] @ parts["lokr_w2_b"])
        else:
            down, up, add = drawn_lora(value, 2, drawn)
            parts = {"lora_down.weight": down, "lora_up.weight": up}
            added = flat + add.flatten(1)
            parts["dora_scale"] = draw(whole).abs().reshape(whole, *(1 for _ in value.shape[1:]))
            add = parts["dora_scale"].reshape(-1, 1) * added / added.norm(dim=1, keepdim=True) - flat
        tensors |= {f"{stem}.{end}": part for end, part in parts.items()}
        sums[name] = add.reshape(value.shape)
    wanted, found = added_to(weights, sums, rows), merged(tmp_path / "x.safetensors", tensors, family)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-3), name


def tucker(core, rows, columns):
    """The sum over both ranks of outer products, for each pixel."""
    found = torch.zeros(rows.shape[1], columns.shape[1], *core.shape[2:])
    for one in range(core.shape[0]):
        for other in range(core.shape[1]):
            outer = rows[one][:, None] * columns[other][None]
            found += outer.reshape(*outer.shape, *(1 for _ in core.shape[2:])) * core[one, other]
    return found


def check_authors_layers(family, tmp_path, parts_of):
    """Merges a file with a part for each layer under its author's name. `parts_of(number, value, draw)`: the tensors of
    a layer in the file, and what they add to its weight."""
    weights, _ = model_of(family)
    theirs, rows = as_published(family, weights), as_published(family, row_numbers(weights))
    drawn, tensors, sums = torch.Generator().manual_seed(0), {}, {}
    for number, (name, value) in enumerate(theirs.items()):
        stem = f"lora_unet_{underscored(name.removesuffix('.weight'))}"
        parts, add = parts_of(number, value, lambda *shape: torch.randn(shape, generator=drawn))
        tensors |= {f"{stem}.{end}": part for end, part in parts.items()}
        sums[name] = add.reshape(value.shape)
    wanted, found = added_to(weights, sums, rows), merged(tmp_path / "x.safetensors", tensors, family)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-3), name


@pytest.mark.parametrize("family", ("sdxl", "flux"))
def test_tucker_s_decomposition_and_whole_differences_of_the_authors_layers(family, tmp_path):
    """As LyCORIS writes them with use_tucker and as its algorithm full; a difference has no alpha."""
    def parts_of(number, value, draw):
        (whole, across, *sides), ones = value.shape, tuple(1 for _ in value.shape[2:])
        if number % 4 == 0:
            parts = {"lora_down.weight": draw(3, across, *ones), "lora_up.weight": draw(whole, 3, *ones),
                     "lora_mid.weight": draw(3, 3, *sides), "alpha": torch.tensor(1.5)}
            return parts, tucker(parts["lora_mid.weight"], parts["lora_up.weight"].flatten(1).T,
                                 parts["lora_down.weight"].flatten(1)) / 2
        if number % 4 == 1:
            parts = {f"hada_w{one}_{end}": draw(2, whole if end == "a" else across) for one in "12" for end in "ab"}
            parts |= {"hada_t1": draw(2, 2, *sides), "hada_t2": draw(2, 2, *sides), "alpha": torch.tensor(1.0)}
            one, other = (tucker(parts[f"hada_t{n}"], parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"]) for n in "12")
            return parts, one * other / 2
        if number % 4 == 2 and whole % 2 == 0 == across % 2:
            parts = {"lokr_w1": draw(2, 2), "lokr_w2_a": draw(3, whole // 2), "lokr_w2_b": draw(3, across // 2),
                     "lokr_t2": draw(3, 3, *sides), "alpha": torch.tensor(6.0)}
            large = tucker(parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
            return parts, 2 * torch.kron(parts["lokr_w1"].reshape(2, 2, *ones), large)
        parts = {"diff": draw(*value.shape)}
        return parts, parts["diff"]

    check_authors_layers(family, tmp_path, parts_of)


@pytest.mark.parametrize("family", ("sd15", "sdxl", "flux"))
def test_glora_and_ia3_of_the_authors_layers(family, tmp_path):
    """As LyCORIS writes them: factors are what is added to 1, of outputs or of inputs, and have no alpha."""
    def parts_of(number, value, draw):
        (whole, across, *sides), ones = value.shape, tuple(1 for _ in value.shape[2:])
        if number % 3 == 0:
            parts = {"a1.weight": draw(across, 3, *ones), "a2.weight": draw(3, across, *ones), "alpha": torch.tensor(6),
                     "b1.weight": draw(whole, 3, *ones), "b2.weight": draw(3, across, *sides)}
            mixed = parts["a1.weight"].flatten(1) @ parts["a2.weight"].flatten(1)
            add = 2 * (value.movedim(1, -1) @ mixed).movedim(-1, 1)
            return parts, add + 2 * (parts["b1.weight"].flatten(1) @ parts["b2.weight"].flatten(1)).reshape(value.shape)
        if number % 3 == 1:
            parts = {"weight": draw(1, whole, *ones) if sides else draw(whole), "on_input": torch.tensor(0)}
            return parts, value * parts["weight"].reshape(-1, 1, *ones)
        parts = {"weight": draw(1, across, *ones) if sides else draw(across), "on_input": torch.tensor(1.0)}
        return parts, value * parts["weight"].reshape(1, -1, *ones)

    check_authors_layers(family, tmp_path, parts_of)


def test_lengths_of_columns(tmp_path):
    """As OneTrainer writes DoRA: a length for each input channel of the sum."""
    weights, _ = model_of("sd15")
    tensors, wanted, drawn = {}, {}, torch.Generator().manual_seed(0)
    for name, value in weights.items():
        stem = f"lora_unet_{underscored(name.removesuffix('.weight'))}"
        down, up, add = drawn_lora(value, 2, drawn)
        across = (value + add).transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *(1 for _ in value.shape[2:]))
        lengths = torch.rand(across.shape, generator=drawn)
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.dora_scale": lengths}
        wanted[name] = (value + add) * lengths / across - value
    found = merged(tmp_path / "x.safetensors", tensors, "sd15")
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in wanted.items() if len(value) > 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16,
                                   torch.float64], ids=str)
def test_factors_of_any_float(dtype, tmp_path):
    weights, _ = model_of("sdxl")
    tensors, wanted, drawn = {}, {}, torch.Generator().manual_seed(0)
    for name, value in weights.items():
        stem = f"unet.{name.removesuffix('.weight')}"
        down, up, _ = drawn_lora(value, 2, drawn)
        tensors |= {f"{stem}.lora_A.weight": down.to(dtype), f"{stem}.lora_B.weight": up.to(dtype),
                    f"{stem}.alpha": torch.tensor([0.5]).to(dtype)}
        wanted[name] = 0.25 * (up.to(dtype).float().flatten(1) @ down.to(dtype).float().flatten(1)).reshape(value.shape)
    found = merged(tmp_path / "x.safetensors", tensors, "sdxl")
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in wanted.items())


PATTERNS = {"to_k": 32, "transformer_blocks.1.attn.to_q": 3, r"transformer_blocks\.0\.attn\.(to_v|to_q)": 5,
            ".*add_q_proj": 6, "ff.net.2": 7.5}


@pytest.mark.parametrize("by_root", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["metadata", "adapter_config.json"])
def test_peft_s_settings_scale_as_peft_does(by_root, beside, tmp_path):
    """By PEFT itself, which is given the same settings and values."""
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    settings = {"r": 4, "lora_alpha": 8, "use_rslora": by_root, "alpha_pattern": PATTERNS, "rank_pattern": {"to_v": 2},
                "target_modules": ["to_q", "to_k", "to_v", "add_q_proj", "ff.net.2"]}
    model = tiny_pipelines.build("sd3").transformer
    inject_adapter_in_model(LoraConfig(**settings), model)
    drawn, tensors = torch.Generator().manual_seed(0), {}
    for name, value in model.named_parameters():
        if ".lora_" in name:
            tensors[name.replace(".default.", ".")] = torch.randn(value.shape, generator=drawn)
    set_peft_model_state_dict(model, tensors)
    wanted = {name: module.get_delta_weight("default") for name, module in model.named_modules()
              if hasattr(module, "get_delta_weight")}
    path, prefix = tmp_path / "adapter_model.safetensors", "base_model.model." if beside else "transformer."
    if beside:
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    table = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": one for key, one in settings.items()})}
    found = merged(path, {prefix + name: value for name, value in tensors.items()}, "sd3", None if beside else table)
    assert len(wanted) > 8
    for name, value in found.items():
        assert torch.allclose(value, wanted.get(name.removesuffix(".weight"), torch.zeros_like(value)), atol=1e-4), name
