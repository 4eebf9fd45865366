"""kohya's names of transformers: a pipeline that loads them draws the picture that diffusers' own names give."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from original_checkpoints import unet_name

from prep.errors import ConfigError
from prep.models.families.registry import FAMILIES
from prep.models.lora.kohya import UNET, Kohya, LayerSlice, fused, renamed
from prep.training.schema import Lora
from train.models import lora
from train.models.naming import Naming, naming_of

WITH_NAMES = ("flux", "chroma", "flux2", "flux2_klein", "qwenimage", "zimage")
# Which diffusers does not read: by other tests.
OTHERS = ("sd3", "lumina2", "auraflow", "krea2", "hidream", "ernie", "anima", "qwenimage21")
# diffusers' loader knows the rows of these blocks' fused layer at the published width only.
FIXED = {"flux": "single_transformer_blocks.0.attn", "chroma": "single_transformer_blocks.0.attn"}


def adapted(family, settings):
    """The parameters of an adapter with random values."""
    pipeline = tiny_pipelines.build(family)
    found = lora.attach(pipeline.transformer, settings, 0, FAMILIES[family].lora.presets)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.3, generator=drawn)
    return {name: value.data for name, value in found.items()
            if family not in FIXED or not name.startswith("single_") or ".proj_out." in name}


def picture(family, path=None):
    pipeline = tiny_pipelines.build(family)
    if path is not None:
        pipeline.load_lora_weights(path.parent, weight_name=path.name)
    with tiny_pipelines.known_warnings(), torch.no_grad():
        return tiny_pipelines.draw(pipeline)


def saved(parameters, settings, naming, path):
    save_file(lora.pack(parameters, settings, naming), path,
              metadata=lora.describe(parameters, settings, naming))
    return path


def presets(families, *others):
    """Family and preset; FLUX.1's `all-linear` has the layer after the blocks, too, which the loader does not read."""
    return [(name, targets) for name in families
            for targets in ("attention", "kohya" if "kohya" in FAMILIES[name].lora.presets else "all-linear", *others)]


@pytest.mark.few("flux-", "zimage")
@pytest.mark.parametrize(("family", "targets"), presets(WITH_NAMES), ids=str)
def test_both_names_give_the_same_picture(family, targets, tmp_path):
    naming = naming_of(FAMILIES[family])
    usual, other = (Lora(rank=2, alpha=1.0, targets=targets, format=layout) for layout in ("diffusers", "kohya"))
    parameters = adapted(family, usual)
    wanted = picture(family, saved(parameters, usual, naming, tmp_path / "usual.safetensors"))
    path = saved(parameters, other, naming, tmp_path / "kohya.safetensors")
    change = np.abs(picture(family) - wanted).max()
    assert change > 1e-3 and np.abs(picture(family, path) - wanted).max() < 0.01 * change


@pytest.mark.parametrize(("family", "targets"), presets((*WITH_NAMES, *OTHERS), ("to_k",)), ids=str)
def test_a_file_gives_back_the_bits(family, targets):
    settings = Lora(rank=2, alpha=1.0, targets=targets, format="kohya")
    parameters = adapted(family, settings)
    tensors = lora.pack(parameters, settings, naming_of(FAMILIES[family]))
    again = lora.unpack(tensors, parameters, naming_of(FAMILIES[family]))
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[name], value) for name, value in parameters.items())
    downs = [name for name in tensors if name.endswith(".lora_down.weight")]
    assert len(downs) == len(tensors) // 3
    for name in downs:  # alpha is explicit, and its share of the rank is that of every layer
        assert float(tensors[name.replace("lora_down.weight", "alpha")]) / len(tensors[name]) == 0.5


@pytest.mark.parametrize("ends", [("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                                  ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.to_v",), ("proj_mlp",)], ids=str)
def test_a_single_block_of_flux_at_its_width(ends):
    """The only rows that diffusers' converter takes; columns are its own, and may be few."""
    rows = {"proj_mlp": 12288}
    settings, drawn = Lora(rank=4, alpha=2.0, format="kohya"), torch.Generator().manual_seed(0)
    parameters = {}
    for end in ends:
        name = f"single_transformer_blocks.0.{end}"
        parameters[f"{name}.lora_A.default.weight"] = torch.randn(4, 5, generator=drawn)
        parameters[f"{name}.lora_B.default.weight"] = torch.randn(rows.get(end, 3072), 4, generator=drawn)
    tensors = lora.pack(parameters, settings, naming_of(FAMILIES["flux"]))
    assert {name.partition(".")[0] for name in tensors} == {"lora_unet_single_blocks_0_linear1"}
    found = _convert_kohya_flux_lora_to_diffusers(dict(tensors))
    for end in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"):
        name = f"single_transformer_blocks.0.{end}"
        added = (found[f"transformer.{name}.lora_B.weight"] @ found[f"transformer.{name}.lora_A.weight"])
        wanted = torch.zeros_like(added) if end not in ends else (
            0.5 * parameters[f"{name}.lora_B.default.weight"] @ parameters[f"{name}.lora_A.default.weight"])
        assert torch.allclose(added, wanted, atol=1e-5)


def test_layers_that_share_a_down_matrix_are_read():
    """As sd-scripts trains them: one adapter on the fused layer."""
    naming = naming_of(FAMILIES["flux"])
    parameters = {f"transformer_blocks.1.attn.{layer}.lora_{side}.default.weight": torch.zeros(shape)
                  for layer in ("to_q", "to_k", "to_v") for side, shape in (("A", (2, 5)), ("B", (6, 2)))}
    name = "lora_unet_double_blocks_1_img_attn_qkv"
    tensors = {f"{name}.lora_down.weight": torch.randn(2, 5), f"{name}.lora_up.weight": torch.randn(18, 2)}
    found = lora.unpack(tensors, parameters, naming)
    for number, layer in enumerate(("to_q", "to_k", "to_v")):
        key = f"transformer_blocks.1.attn.{layer}.lora_"
        assert torch.equal(found[f"{key}A.default.weight"], tensors[f"{name}.lora_down.weight"])
        rows = slice(6 * number, 6 * number + 6)
        assert torch.equal(found[f"{key}B.default.weight"], tensors[f"{name}.lora_up.weight"][rows])


def test_dora_on_fused_layers():
    """The lengths of the rows follow each other; of layers that are one in the file, all have them or none."""
    naming, drawn = naming_of(FAMILIES["flux"]), torch.Generator().manual_seed(0)
    settings, parameters = Lora(rank=2, alpha=1.0, format="kohya", dora=True), {}
    for layer in ("to_q", "to_k", "to_v"):
        for side, shape in (("lora_A", (2, 5)), ("lora_B", (6, 2)), ("lora_magnitude_vector", (6,))):
            parameters[f"transformer_blocks.1.attn.{layer}.{side}.default.weight"] = torch.randn(shape, generator=drawn)
    tensors = lora.pack(parameters, settings, naming)
    lengths = tensors["lora_unet_double_blocks_1_img_attn_qkv.dora_scale"]
    assert lengths.shape == (18, 1) and len(tensors) == 4
    again = lora.unpack(tensors, parameters, naming)
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[name], value) for name, value in parameters.items())
    layers = ["single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_k"]
    with pytest.raises(ConfigError) as error:
        naming.require(settings, layers)
    assert error.value.message == ("lora.dora is on and lora.format is 'kohya', whose names have one for "
                                   f"'{layers[0]}' and layers without an adapter")
    naming.require(Lora(rank=2, format="kohya"), layers)
    naming.require(Lora(rank=2, dora=True), layers)
    assert NAMED.format_of(Lora(dora=True)) == NAMED.format_of(Lora()) == "kohya"
    assert NAMED.earlier_format().format_of(Lora(dora=True)) == "diffusers"


NAMED = Naming(component="unet", kohya=UNET)


def test_layers_with_one_name_have_one_rank():
    naming, layers = naming_of(FAMILIES["flux"]), [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k")]
    settings = {"rank": 4, "layers": ({"match": "to_k", "rank": 2},)}
    with pytest.raises(ConfigError) as error:
        naming.require(Lora(format="kohya", **settings), layers)
    assert error.value.message == ("lora.format is 'kohya', whose names have one for 'transformer_blocks.0.attn.to_q' "
                                   "and 'transformer_blocks.0.attn.to_k', but lora.layers gives them other ranks")
    assert error.value.hint == "--set lora.format=diffusers"
    naming.require(Lora(format="diffusers", **settings), layers)
    naming.require(Lora(format="kohya", rank=4, layers=({"match": "re:to_[qk]$", "rank": 2},)), layers)


def test_a_layer_without_a_name():
    naming = naming_of(FAMILIES["flux"])
    naming.require(Lora(format="kohya"), ["transformer_blocks.0.attn.to_q"])
    naming.require(Lora(), ["x_embedder"])  # auto: diffusers' names
    with pytest.raises(ConfigError):
        lora.pack({"x_embedder.lora_A.default.weight": torch.zeros(2, 3)}, Lora(format="kohya"), naming)
    with pytest.raises(ConfigError) as error:
        naming.require(Lora(format="kohya"), ["transformer_blocks.0.attn.to_q", "x_embedder"])
    assert error.value.message == "lora.format is 'kohya', but kohya's names have none for the layer 'x_embedder'"
    assert error.value.hint == "--set lora.format=diffusers"


def test_rows_of_fused_layers_follow_each_other():
    naming = Naming(component="transformer", kohya=Kohya(rules=(
        *fused(r"blocks\.(\d+)", "a b c", "b_{}_abc", (1, 1, 4)), *renamed(r"blocks\.(\d+)", "d=b_{}_e"))))
    fields = {"name": "lora_unet_b_3_abc", "of": 6}
    assert [naming.slice_of(f"blocks.3.{end}", "kohya") for end in "abcd"] == [
        LayerSlice(**fields, first=0, count=1), LayerSlice(**fields, first=1, count=1),
        LayerSlice(**fields, first=2, count=4),
        LayerSlice(name="lora_unet_b_3_e")]
    assert naming.slice_of("other.a", "kohya") is None
    assert naming.slice_of("x.y", "diffusers") == LayerSlice(name="transformer.x.y")


PUBLISHED = {"block_out_channels": (16, 16, 16), "layers_per_block": 2,
             "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
             "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}


@pytest.mark.slow
@pytest.mark.parametrize("structure", [{}, PUBLISHED], ids=["small", "published"])
def test_sdxl_is_named_as_in_its_authors_unet_and_that_of_sd_scripts(structure, tmp_path):
    """Every layer of it, by the code that writes checkpoints as they were published; diffusers finds each one."""
    pipeline = tiny_pipelines.build("sdxl")
    if structure:
        config = {**pipeline.unet.config, **structure, "attention_head_dim": (2, 2, 4), "only_cross_attention": False,
                  "transformer_layers_per_block": (1, 2, 3)}
        pipeline.unet = UNet2DConditionModel.from_config({**config, "num_attention_heads": None})
    unet, settings = pipeline.unet, Lora(rank=2, conv_rank=2, alpha=1.0, conv_alpha=1.0, targets=("re:.",))
    layers = [name for name, one in unet.named_modules() if isinstance(one, torch.nn.Linear | torch.nn.Conv2d)]
    naming = naming_of(FAMILIES["sdxl"], layers)
    found = lora.attach(unet, settings, 0, FAMILIES["sdxl"].lora.presets)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.1, generator=drawn)
    tensors = lora.pack(found, settings, naming)
    count, levels = unet.config.layers_per_block, len(unet.config.block_out_channels)
    names = {unet_name(f"{layer}.weight", count, levels, unet.config).removesuffix(".weight") for layer in layers}
    assert {name.partition(".")[0] for name in tensors} == {f"lora_unet_{name.replace('.', '_')}" for name in names}
    assert "lora_unet_input_blocks_0_0.alpha" in tensors
    assert ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.lora_down.weight" in tensors) == bool(structure)
    again = lora.unpack(tensors, found, naming)
    assert again.keys() == found.keys() and all(torch.equal(again[name], value) for name, value in found.items())
    pipeline.unet = UNet2DConditionModel.from_config(unet.config)
    save_file(tensors, tmp_path / "x.safetensors")
    pipeline.load_lora_weights(tmp_path, weight_name="x.safetensors")
    loaded = {name.replace("default_0", "default"): value for name, value in pipeline.unet.named_parameters()
              if ".lora_" in name}
    assert loaded.keys() == found.keys() and all(torch.equal(loaded[name], value) for name, value in found.items())


def test_files_that_earlier_versions_wrote_keep_their_names():
    """SDXL under diffusers' names of its layers, DoRA of a UNet in diffusers' format."""
    layers = ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"]
    parameters = {f"{layers[0]}.lora_{side}.default.weight": torch.ones(2, 2) for side in "AB"}
    naming = naming_of(FAMILIES["sdxl"], [*layers, "down_blocks.0.resnets.1.conv1"])
    now, earlier = (lora.pack(parameters, Lora(rank=2), one) for one in (naming, naming.earlier_format()))
    assert {name.partition(".")[0] for name in now} == {
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"}
    assert {name.partition(".")[0] for name in earlier} == {
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"}
    assert naming.as_written(now, Lora()) == naming and naming.as_written(earlier, Lora()) == naming.earlier_format()
    for tensors in (now, earlier):
        assert lora.unpack(tensors, parameters, naming).keys() == parameters.keys()
    dora = Lora(rank=2, dora=True)
    assert naming.as_written([f"unet.{layers[0]}.lora_A.weight"], dora).format_of(dora) == "diffusers"
    assert naming.as_written(now, dora).format_of(dora) == "kohya"
    explicit = Lora(rank=2, dora=True, format="diffusers")
    assert naming.as_written([f"unet.{layers[0]}.lora_A.weight"], explicit) == naming


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.lora.kohya])
def test_a_file_with_diffusers_names_keeps_them_whatever_auto_means_now(name):
    naming, settings = naming_of(FAMILIES[name]), Lora(rank=2)
    written = naming.as_written([f"{naming.component}.a.lora_A.weight"], settings)
    expected = "kohya" if naming.in_comfyui and naming.format_of(settings) == "kohya" else "diffusers"
    assert written.format_of(settings) == expected
    assert written.format_of(Lora(rank=2, format="kohya")) == "kohya"


def test_what_metadata_say_of_the_names():
    settings = Lora(rank=2, format="kohya")
    layer = "transformer_blocks.0.attn.to_q"
    parameters = {f"{layer}.lora_{side}.default.weight": torch.zeros(2, 2) for side in "AB"}
    told = lora.describe(parameters, settings, naming_of(FAMILIES["flux"]))
    assert told["ss_network_module"] == "networks.lora_flux" and "lora_adapter_metadata" not in told
    told = json.loads(lora.describe(parameters, Lora(rank=2), naming_of(FAMILIES["flux"]))["lora_adapter_metadata"])
    assert told["transformer.r"] == 2 and told["transformer.target_modules"] == [layer]
