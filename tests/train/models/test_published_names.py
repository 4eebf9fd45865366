"""kohya's names of transformers that only sd-scripts, musubi-tuner and ComfyUI read.

These name a layer after the weights that its authors published. So a LoRA file is added to weights of that layout, by
the rule of those programs: `lora_unet_` and the name of the weight, with underscores for dots. diffusers' own converter
of whole checkpoints then makes the model that has to draw what the adapter draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers.loaders import single_file_utils
from original_layout import ANIMA, AURAFLOW, KREA2, LUMINA2, QWENIMAGE21, SD3, published

from prep.errors import ConfigError
from prep.models.families.registry import FAMILIES
from prep.training.schema import Lora
from train.models import lora
from train.models.naming import naming_of


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    converter: str
    lines: str = ""  # from published names to diffusers'
    options: dict = field(default_factory=dict)  # of the tiny pipeline
    times: int = 1  # how many times as wide as the tiny pipeline's the published attention is, if that matters

    def __str__(self):
        return "-".join([self.family, *self.options])


CASES = (
    Case(family="sd3", converter="convert_sd3_transformer_checkpoint_to_diffusers", lines=SD3),
    Case(family="sd3", converter="convert_sd3_transformer_checkpoint_to_diffusers", lines=SD3,
         options={"qk_norm": "rms_norm"}),  # 3.5 large
    Case(family="sd3", converter="convert_sd3_transformer_checkpoint_to_diffusers", lines=SD3,
         options={"qk_norm": "rms_norm", "dual": (0,)}),  # 3.5 medium
    Case(family="lumina2", converter="convert_lumina2_to_diffusers", lines=LUMINA2, times=64),
    Case(family="auraflow", converter="convert_auraflow_transformer_checkpoint_to_diffusers", lines=AURAFLOW),
    Case(family="krea2", converter="convert_krea2_transformer_checkpoint_to_diffusers", lines=KREA2),
    Case(family="hidream", converter="convert_hidream_transformer_to_diffusers"),
    Case(family="ernie", converter="convert_ernie_image_transformer_checkpoint_to_diffusers"),
    Case(family="anima", converter="convert_cosmos_transformer_checkpoint_to_diffusers", lines=ANIMA),
    Case(family="qwenimage21", converter="convert_qwen_image21_transformer_checkpoint_to_diffusers", lines=QWENIMAGE21),
)


def converted(weights, case):
    """What diffusers makes of published weights. Where it knows their rows at the published width only, a tiny model's
    are repeated as often as that needs, and one of each is taken."""
    given = {name: value.repeat_interleave(case.times, 0) if "attention.qkv" in name else value
             for name, value in weights.items()}
    found = getattr(single_file_utils, case.converter)(given)
    return {name: value[:: case.times] if "attn.to_" in name and ".to_out." not in name else value
            for name, value in found.items()}


def adapted(model, family, settings):
    found = lora.attach(model, settings, 0, FAMILIES[family].lora.presets)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.1, generator=drawn)
    return found


def with_file(weights, tensors):
    """Published weights and what the file adds: each of its layers has to be exactly one of them."""
    weights, used = dict(weights), set()
    for name in [name for name in tensors if name.endswith(".lora_down.weight")]:
        layer = name.removesuffix(".lora_down.weight")
        (key,) = [key for key in weights if key.endswith(".weight")
                  and "lora_unet_" + key.removesuffix(".weight").replace(".", "_") == layer]
        down, up, alpha = (tensors[layer + end] for end in (".lora_down.weight", ".lora_up.weight", ".alpha"))
        added = up.flatten(1) @ down.flatten(1) * (alpha / len(down))
        weights[key] = weights[key] + added.reshape(weights[key].shape)
        used |= {layer + end for end in (".lora_down.weight", ".lora_up.weight", ".alpha")}
    assert used == set(tensors)
    return weights


def replace_weights(model, weights):
    """Gives a model with adapters, which add nothing from now on, other weights below them."""
    left = dict(weights)
    for name, value in model.state_dict().items():
        if name.endswith(".lora_B.default.weight"):
            value.zero_()
        elif ".lora_A." not in name:
            other = left.pop(name.replace(".base_layer.", "."))
            value.copy_(other.reshape(value.shape))
    assert not left


@pytest.mark.few("sd3]", "auraflow")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_on_published_weights_draws_what_the_adapter_draws(case, tmp_path):
    """Of every linear layer and convolution of the model."""
    pipeline = tiny_pipelines.build(case.family, **case.options)
    plain = tiny_pipelines.draw(pipeline)
    base = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    settings = Lora(rank=2, alpha=1.0, conv_rank=3, conv_alpha=2.0, targets=("re:.",), format="kohya")
    parameters = adapted(pipeline.transformer, case.family, settings)
    wanted = tiny_pipelines.draw(pipeline)
    save_file(lora.pack(parameters, settings, naming_of(FAMILIES[case.family])), tmp_path / "lora.safetensors")
    changed = converted(with_file(published(base, case.lines), load_file(tmp_path / "lora.safetensors")), case)
    layers = {name.removesuffix(".lora_A.default.weight") for name in parameters if ".lora_A." in name}
    assert changed.keys() == base.keys()
    for name, value in base.items():
        layer = name.removesuffix(".weight")
        if layer in layers and layer != name:
            down, up = (parameters[f"{layer}.lora_{side}.default.weight"].detach() for side in "AB")
            scale = 2 / 3 if prod(down.shape[2:]) > 1 else 1 / 2
            value = value + scale * (up.flatten(1) @ down.flatten(1)).reshape(value.shape)
        assert torch.allclose(changed[name].reshape(value.shape), value, atol=1e-6), name
    replace_weights(pipeline.transformer, changed)
    change = np.abs(plain - wanted).max()
    assert change > 1e-3 and np.abs(tiny_pipelines.draw(pipeline) - wanted).max() < 0.01 * change


BLOCKS = {"sd3": ("joint_blocks.",), "lumina2": ("layers.", "noise_refiner.", "context_refiner.", "final_layer."),
          "krea2": ("",), "anima": ("blocks.",)}


@pytest.mark.parametrize("case", [case for case in CASES if case.family in BLOCKS], ids=str)
def test_kohya_s_preset_adapts_what_its_trainers_adapt(case):
    """Every linear layer in sd-scripts' SingleDiTBlock; JointTransformerBlock and FinalLayer; musubi-tuner's model; of
    Anima's Block, without what sd-scripts excludes unless it is told otherwise."""
    model = tiny_pipelines.build(case.family, **case.options).transformer
    linear = {name for name, value in published(dict(model.state_dict()), case.lines).items()
              if name.endswith(".weight") and value.ndim == 2 and name.startswith(BLOCKS[case.family])
              and "adaln_modulation_" not in name}
    settings = Lora(rank=1, targets="kohya", format="kohya")
    tensors = lora.pack(adapted(model, case.family, settings), settings, naming_of(FAMILIES[case.family]))
    assert {name.partition(".")[0] for name in tensors} == {
        "lora_unet_" + name.removesuffix(".weight").replace(".", "_") for name in linear}


@pytest.mark.few("sd3]", "auraflow")
@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items()
                                    if one.lora.kohya and not one.lora.kohya.imported])
def test_diffusers_does_not_read_these_names(family, tmp_path):
    """Of Qwen-Image-2.1 it reads some, and warns of the others: half of a LoRA."""
    pipeline = tiny_pipelines.build(family)
    plain, settings = tiny_pipelines.draw(pipeline), Lora(rank=1, targets="all-linear", format="kohya")
    parameters = adapted(tiny_pipelines.build(family).transformer, family, settings)
    save_file(lora.pack(parameters, settings, naming_of(FAMILIES[family])), tmp_path / "lora.safetensors")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    except (ValueError, KeyError):
        return
    unread = [each for each in warned if "gate.up" in str(each.message)]
    assert unread if family == "qwenimage21" else np.array_equal(tiny_pipelines.draw(pipeline), plain)


def test_rows_of_other_proportions_are_refused():
    naming, layers = naming_of(FAMILIES["lumina2"]), [f"layers.0.attn.to_{letter}" for letter in "qkv"]
    published, other = ({layer: (rows, 48) for layer, rows in zip(layers, sizes, strict=True)}
                        for sizes in ((72, 24, 24), (48, 24, 24)))
    naming.require_shapes(Lora(format="kohya"), published)
    naming.require_shapes(Lora(), other)
    with pytest.raises(ConfigError) as error:
        naming.require_shapes(Lora(format="kohya"), other)
    assert error.value.message == ("lora.format is 'kohya', whose names have one for 'layers.0.attn.to_q' and "
                                   "'layers.0.attn.to_k', but their rows are not in the proportion of the published "
                                   "models'")
    assert error.value.hint == "--set lora.format=diffusers"


def test_products_of_exchanged_halves_are_refused():
    naming, layer = naming_of(FAMILIES["sd3"]), "transformer_blocks.1.norm1_context.linear"
    naming.require_shapes(Lora(kind="loha"), {layer: (192, 32)})  # six, in all blocks but the last
    with pytest.raises(ConfigError) as error:
        naming.require_shapes(Lora(kind="loha"), {layer: (64, 32)})
    assert error.value.message == (f"lora.kind is 'loha', but in kohya's names '{layer}' has the halves of its rows "
                                   "exchanged")
    assert error.value.hint == "list other layers in lora.targets, or --set lora.kind=lora"
