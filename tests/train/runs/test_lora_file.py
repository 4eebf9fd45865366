"""LoRA files that are damaged, hostile, or of kinds that are not read are said to be that, before anything is computed.
"""

from __future__ import annotations

import json
import resource

import pytest
import torch
from safetensors.torch import save_file

from prep.errors import ConfigError, ModelError, Problem
from prep.models.families.registry import FAMILIES
from prep.models.families.sd15 import PRESETS
from prep.training.schema import Lora
from train.merging.additions import read_lora
from train.models.adapters.covering import targets_of
from train.models.adapters.stored import table_of
from train.models.naming import naming_of
from train.runs.lora_file import open_lora
from train.runs.lora_fits import check_lora

BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
LAYERS = {f"{BLOCK}.{name}": (32, 32) for name in ("attn1.to_q", "attn1.to_k", "attn2.to_q", "attn2.to_k")}
LAYERS |= {f"{BLOCK.replace('1', '0', 1)}.{name}": (32, 32) for name in ("attn1.to_q", "attn1.to_k")}
LAYERS |= {"conv_in": (32, 4, 3, 3), f"{BLOCK}.attn1.to_out.0": (32, 32)}
NAMING = naming_of(FAMILIES["sd15"], LAYERS)
STEM = f"lora_unet_{BLOCK.replace('.', '_')}_attn1_to_q"


def pair(stem=STEM, rank=2, rows=32, columns=32):
    return {f"{stem}.lora_down.weight": torch.ones(rank, columns), f"{stem}.lora_up.weight": torch.ones(rows, rank)}


def refused(path, tensors, metadata=None, config=None):
    """The error that both readers give, of `train merge` and of `--init-from`."""
    save_file(tensors, path, metadata)
    if config is not None:
        path.with_name("adapter_config.json").write_text(json.dumps(config))
    errors = []
    for read in (lambda: read_lora(path, LAYERS, NAMING), lambda: begin(path)):
        with pytest.raises(Problem) as caught:
            read()
        errors.append(caught.value)
    assert errors[0].exit_code == 6 and str(path) in errors[0].message and errors[0].hint
    return errors[0].message.removeprefix(f"{path} "), errors[1].message.removeprefix(f"{path} ")


def begin(path, **settings):
    file = open_lora(path, LAYERS, NAMING, "")
    lora = Lora(**{"rank": 2, "alpha": 2.0, "conv_rank": 2, "conv_alpha": 2.0, "targets": (f"{BLOCK}.attn1.to_q",),
                   **settings})
    check_lora(file, lora, LAYERS, PRESETS, NAMING)
    return file


@pytest.mark.parametrize(("spoil", "said"), [
    ({f"{STEM}.lora_down.weight": torch.full((2, 32), torch.nan)}, "NaN or infinity in "),
    ({f"{STEM}.lora_down.weight": torch.full((2, 32), torch.inf).half()}, "NaN or infinity in "),
    ({f"{STEM}.lora_up.weight": torch.full((32, 2), torch.nan).bfloat16()}, "NaN or infinity in "),
    ({f"{STEM}.lora_up.weight": torch.full((32, 2), torch.nan).to(torch.float8_e4m3fn)}, "NaN or infinity in "),
    ({f"{STEM}.lora_up.weight": torch.full((32, 2), torch.inf).to(torch.float8_e5m2)}, "NaN or infinity in "),
    ({f"{STEM}.alpha": torch.tensor(torch.nan)}, "NaN or infinity in "),
    ({f"{STEM}.alpha": torch.tensor([1.0, 2.0])}, "with shape [2], expected one number"),
    ({f"{STEM}.alpha": torch.zeros(0)}, "with shape [0], expected one number"),
    ({f"{STEM}.lora_down.weight": torch.zeros(0, 32), f"{STEM}.lora_up.weight": torch.zeros(32, 0)},
     "with shape [0, 32], expected a rank of 1 or more"),
    ({f"{STEM}.lora_down.weight": torch.tensor(1.0)}, "with shape [], expected a rank of 1 or more"),
    ({f"{STEM}.lora_up.weight": torch.tensor(1.0)}, "shape []"),
    ({f"{STEM}.lora_down.weight": torch.ones(2, 32, dtype=torch.int64)},
     "of dtype I64, expected one of the dtypes F64, F32, F16, BF16, F8_E5M2, F8_E4M3"),
    ({f"{STEM}.lora_down.weight": torch.ones(2, 32, dtype=torch.bool)}, "of dtype BOOL, expected one of the dtypes "),
    ({f"{STEM}.alpha": torch.tensor(True)}, f"has '{STEM}.alpha' of dtype BOOL, expected one of the dtypes F64, F32"),
], ids=str)
def test_values_and_shapes_that_no_adapter_has(spoil, said, tmp_path):
    for message in refused(tmp_path / "x.safetensors", {**pair(), **spoil}):
        assert said in message and "learning rate" not in message


@pytest.mark.parametrize(("ends", "said"), [
    ({"oft_blocks": (2, 2, 2)}, "names of OFT, BOFT or VeRA, not read"),
    ({"set_weight": (32, 32)}, "names of whole weights, not read"),
    ({"ia3_l": (32, 1)}, "names of PEFT's IA3, not read"),
    ({"bm.weight": (2, 2)}, "names of another form of GLoRA, not read"),
    ({"lora_B.bias": (32,)}, "names of LoRA with biases, not read"),
    ({"something": (1,)}, "expected names of a LoRA of this model, like 'lora_unet_"),
], ids=str)
def test_what_is_not_read_is_named(ends, said, tmp_path):
    tensors = {**pair(), **{f"{STEM}.{end}": torch.ones(shape) for end, shape in ends.items()}}
    for message in refused(tmp_path / "x.safetensors", tensors):
        assert message.startswith(f"has the tensor '{STEM}."[:60]) and said in message


@pytest.mark.parametrize("ends", [{"lora_mid.weight": (2, 2)}, {"diff_b": (32,)}, {"lora_mid.weight": (2, 2, 1, 1)}],
                         ids=str)
def test_what_is_merged_but_not_trained(ends, tmp_path):
    path, name = tmp_path / "x.safetensors", f"{STEM}.{next(iter(ends))}"
    save_file({**pair(), **{f"{STEM}.{end}": torch.ones(shape) for end, shape in ends.items()}}, path)
    assert read_lora(path, LAYERS, NAMING).added
    with pytest.raises(ModelError, match="which no run trains") as caught:
        begin(path)
    assert caught.value.message == f"{path} has '{name}', which no run trains"
    assert caught.value.hint == "add the file to its model with train merge, and train that one"
    save_file({f"{BLOCK}.norm1.w_norm": torch.ones(32)}, path)
    with pytest.raises(ModelError, match="names of trained norms"):
        begin(path)


@pytest.mark.parametrize(("flag", "count", "wanted"), [(0, 4, 32), (1, 32, 4)])
def test_factors_of_the_other_axis_are_refused(flag, count, wanted, tmp_path):
    tensors = {"conv_in.weight": torch.ones(1, count, 1, 1), "conv_in.on_input": torch.tensor(flag)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=f"x.safetensors has {count} factors of IA3 for an axis of {wanted}$"):
        read_lora(tmp_path / "x.safetensors", LAYERS, NAMING)


def test_a_layer_of_another_model_is_told_as_that(tmp_path):
    message, _ = refused(tmp_path / "x.safetensors", pair("lora_unet_double_blocks_0_img_attn_qkv"))
    assert "but the denoiser of this model has no layer of that name: its layers are like " in message
    message, _ = refused(tmp_path / "x.safetensors", {**pair(), **pair(f"unet.{BLOCK}.attn1.to_q")})
    assert "and" in message and "which are the same" in message
    path = tmp_path / "y.safetensors"
    fused = pair("lora_unet_double_blocks_0_img_attn_qkv", rows=96)
    save_file({**fused, **pair("transformer_blocks.0.attn.to_k")}, path)
    layers = {f"transformer_blocks.0.attn.to_{letter}": (32, 32) for letter in "qkv"}
    with pytest.raises(ModelError, match=r"adapts 'transformer_blocks.0.attn.to_k' twice, as 'double_blocks_0_img_att"):
        read_lora(path, layers, naming_of(FAMILIES["flux"], layers))


@pytest.mark.parametrize("parts", [
    {"lokr_w1": (35_000, 1), "lokr_w2": (1, 35_000)}, {"lokr_w1": (35_000, 1), "lokr_w2_a": (1, 1), "lokr_w2_b":
                                                       (1, 35_000)},
    {"hada_w1_a": (35_000, 1), "hada_w1_b": (1, 35_000), "hada_w2_a": (2, 1), "hada_w2_b": (1, 2)},
    {"hada_w1_a": (32, 0), "hada_w1_b": (0, 32), "hada_w2_a": (32, 0), "hada_w2_b": (0, 32)},
    {"lokr_w1": (), "lokr_w2": ()}, {"lokr_w1": (1, 1), "lokr_w2_a": (32, 0), "lokr_w2_b": (0, 32)},
    {"lokr_w1": (1, 1)}, {"hada_w1_a": (32, 1)}], ids=str)
def test_products_are_compared_before_they_are_made(parts, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = {f"{STEM}.{kind}": torch.ones(shape) for kind, shape in parts.items()}
    message, _ = refused(tmp_path / "x.safetensors", tensors)
    assert "that do not make a weight of shape [32, 32]" in message or "expected a rank of 1 or more" in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_products_of_other_tensors_than_the_settings_give(tmp_path):
    whole = {f"{STEM}.lokr_w1": torch.ones(4, 4), f"{STEM}.lokr_w2": torch.ones(8, 8)}
    path = tmp_path / "x.safetensors"
    save_file(whole, path)
    begin(path, kind="lokr", rank=8, factor=4)
    parts = {f"{STEM}.lokr_w2_a": torch.ones(8, 1), f"{STEM}.lokr_w2_b": torch.ones(1, 8)}
    save_file({f"{STEM}.lokr_w1": whole[f"{STEM}.lokr_w1"], **parts}, path)
    with pytest.raises(ModelError) as caught:
        begin(path, kind="lokr", rank=8, factor=4)
    name = f"{STEM}.lokr_w2_a"[:80]
    assert str(caught.value) == f"{path} has the tensor '{name}', which a LoKr with these settings does not have"


@pytest.mark.parametrize("first", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"])
def test_adapters_that_took_a_part_of_the_base_away(first, tmp_path):
    tensors = {f"base_model.model.{BLOCK}.attn1.to_q.lora_{side}.weight": torch.ones(shape)
               for side, shape in (("A", (2, 32)), ("B", (32, 2)))}
    settings = {"r": 2, "lora_alpha": 2, "init_lora_weights": first}
    for message in refused(tmp_path / "adapter_model.safetensors", tensors, config=settings):
        assert f"init_lora_weights is '{first}'" in message and "path_initial_model_for_weight_conversion" in message
    table = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in settings.items()})}
    assert "init_lora_weights" in refused(tmp_path / "x.safetensors", tensors, table)[0]


def test_an_alpha_that_is_nowhere_is_a_note(tmp_path):
    tensors = {f"base_model.model.{BLOCK}.attn1.to_q.lora_{side}.weight": torch.ones(shape)
               for side, shape in (("A", (2, 32)), ("B", (32, 2)))}
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path)
    told = "x has PEFT's names, but no adapter_config.json beside it: its alpha is taken for its rank"
    assert read_lora(path, LAYERS, NAMING).file.notes("x") == (told,)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    assert begin(path).notes("x") == ()


@pytest.mark.parametrize("pattern", ["(a+)+$", "((x|x)|x)*", ".*" * 9 + "q", "(a|a)" * 40, "(", "[" * 2000, "a" * 10**6,
                                     "(?=x)"], ids=lambda value: value[:20])
def test_patterns_of_strangers_are_bounded(pattern, tmp_path):
    table = json.dumps({"unet.r": 2, "unet.alpha_pattern": {pattern + "(": 3}})
    message, _ = refused(tmp_path / "x.safetensors", pair(), {"lora_adapter_metadata": table})
    assert "its alpha_pattern has " in message or "alpha_pattern" in message


@pytest.mark.parametrize(("table", "said"), [
    ("[" * 10**5, "its lora_adapter_metadata is not JSON: "),
    ('"text"', "its lora_adapter_metadata is 'text', expected a table"),
    ("[]", "its lora_adapter_metadata is [], expected a table"),
    ('{"unet.lora_alpha": "8"}', "its lora_alpha is '8', expected a number"),
    ('{"unet.lora_alpha": NaN}', "its lora_alpha is nan, expected a number"),
    ('{"unet.peft_type": "LOHA", "unet.alpha": [8]}', "its alpha is [8], expected a number"),
    ('{"unet.alpha_pattern": [1]}', "its alpha_pattern is [1], expected a table"),
    ('{"unet.alpha_pattern": {"to_q": "x"}}', "its alpha_pattern of 'to_q' is 'x', expected a number"),
    (json.dumps({"unet.alpha_pattern": {f".*to_{letter}": 1 for letter in "abcdefghijk"}}),
     "its alpha_pattern has 11 expressions, expected at most 10"),
    ('{"unet.lora_alpha": ' + "9" * 4000 + "}", "its lora_a"),  # a number, or more digits than Python reads
], ids=lambda value: value[:30])
def test_settings_that_are_none(table, said, tmp_path):
    message, _ = refused(tmp_path / "x.safetensors", pair(), {"lora_adapter_metadata": table})
    assert said in message


def test_an_alpha_of_zero_adds_nothing_and_begins_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({**pair(), f"{STEM}.alpha": torch.tensor(0.0)}, path)
    assert read_lora(path, LAYERS, NAMING).added[f"{BLOCK}.attn1.to_q"].scale == 0
    with pytest.raises(ModelError, match=r"has alpha 0 in .*, which no setting gives"):
        begin(path)


def test_text_encoders_are_left_out_by_both(tmp_path):
    path = tmp_path / "x.safetensors"
    others = {f"{prefix}layers_0.lora_down.weight": torch.full((2, 2), torch.nan) for prefix in (
        "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "text_encoder.", "text_encoder_2.", "text_encoders.t5xxl.",
        "lycoris_te1_", "bundle_emb.")}
    save_file({**pair(), **others}, path)
    for file in (read_lora(path, LAYERS, NAMING).file, begin(path)):
        assert set(file.contents.text) == others.keys() and len(file.contents.adapters) == 1
        assert file.notes("x") == ("x also adapts text encoders; 9 of its tensors are not used",)
    save_file(others, path)
    with pytest.raises(ModelError, match="adapts text encoders only"):
        read_lora(path, LAYERS, NAMING)


@pytest.mark.parametrize(("adapted", "targets"), [
    ([name for name in LAYERS if "attn" in name], "attention"),
    ([name for name in LAYERS if name.endswith("attn1.to_q")], ("attn1.to_q",)),
    ([name for name in LAYERS if name.startswith(BLOCK)], (f"{BLOCK.split('.')[0]}.1.*",)),
    ([name for name in LAYERS if name.endswith(("to_q", "to_out.0"))], ("to_q", "0")),
    (["conv_in", f"{BLOCK}.attn2.to_k"], None)], ids=str)
def test_the_shortest_targets_that_fit_are_printed(adapted, targets, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({f"unet.{name}.lora_{side}.weight": torch.ones(shape) for name in adapted for side, shape in (
        ("A", (2, *LAYERS[name][1:])), ("B", (LAYERS[name][0], 2, *(1 for _ in LAYERS[name][2:]))))}, path)
    found = targets_of(adapted, LAYERS, PRESETS)
    assert targets is None or found == targets
    begin(path, targets=found)
    with pytest.raises(ConfigError) as caught:
        begin(path, targets=("attn2.to_q",))
    spelled = found if isinstance(found, str) else json.dumps(found)
    assert caught.value.hint in (f"--set lora.targets={spelled}", f"--set 'lora.targets={spelled}'")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_means_two_things(family):
    """A layer's name in diffusers is no other layer's in the authors' code."""
    layers = [f"{block}.{number}.{name}" for block in ("transformer_blocks", "single_transformer_blocks", "layers",
                                                      "joint_transformer_blocks", "noise_refiner")
              for number in (0, 1) for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "attention.to_q",
                                               "attention.to_k", "attention.to_v")]
    table = table_of([*layers, "x_embedder", "proj_out", "norm_out.linear", "context_embedder"],
                     naming_of(FAMILIES[family], layers))
    for parts in table.values():
        assert len(parts) == 1 or len({place.first for place, _ in parts}) == len(parts) <= parts[0][0].of
