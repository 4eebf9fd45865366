"""Layers whose whole name is the end of others': only those that the settings name get an adapter, here and in files.

FLUX.1, Chroma and Ovis-Image have a last layer `proj_out` beside `single_transformer_blocks.N.proj_out`. PEFT matches a
list of names by their ends, and the ranks of layers, too.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import save_file

from prep.models.families.flux import PRESETS
from prep.models.families.registry import FAMILIES
from train.config.load import parse
from train.models import lora
from train.models.naming import naming_of
from train.models.targets import is_ambiguous, trained_shapes

NAMING = naming_of(FAMILIES["flux"])
LAST = "re:^proj_out$"


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipelines.build("flux")


@pytest.fixture
def transformer(pipeline):
    kind = type(pipeline.transformer)
    return kind.from_config(pipeline.transformer.config)


def shapes_of(transformer):
    return {name: tuple(value.shape) for name, value in transformer.state_dict().items()}


@pytest.mark.parametrize("more", [{}, {"dora": True}, {"init": "pissa"}, {"kind": "loha"}, {"kind": "lokr"}], ids=str)
def test_a_last_layer_alone_is_adapted_alone(transformer, more):
    shapes = shapes_of(transformer)
    config = parse({"lora": {"rank": 2, "targets": [LAST], **more}}, "")
    torch.nn.init.normal_(transformer.proj_out.weight)  # zeros have no direction
    found = lora.attach(transformer, config.lora, seed=0, presets=PRESETS)
    assert found and all(name.startswith("proj_out.") for name in found)
    assert sorted(tuple(value.shape) for value in found.values()) == sorted(trained_shapes(shapes, config, PRESETS))


@pytest.mark.parametrize(("more", "target"), [
    ({"targets": [LAST]}, "proj_out"),
    ({"targets": [LAST, "norm_out.linear"]}, "norm_out\\.linear|proj_out"),
    ({"targets": [LAST, "to_q"], "layers": [{"match": LAST, "rank": 5, "alpha": 9.0}]}, None),
    ({"targets": ["proj_out", "to_q"], "layers": [{"match": LAST, "rank": 5, "alpha": 9.0}]}, None)], ids=str)
def test_readers_of_a_file_adapt_the_same_layers(pipeline, transformer, tmp_path, more, target):
    settings = parse({"lora": {"rank": 2, "alpha": 3.0, "format": "diffusers", **more}}, "").lora
    anchored = is_ambiguous(shapes_of(transformer), settings, PRESETS)
    found = lora.attach(transformer, settings, seed=0, presets=PRESETS)
    described = lora.describe(found, settings, NAMING, anchored=anchored)
    table = {name.removeprefix("transformer."): value for name, value in
             json.loads(described["lora_adapter_metadata"]).items()}
    assert anchored == (settings.targets[0] == LAST) == isinstance(table["target_modules"], str)
    assert target is None or table["target_modules"] == target
    tensors = lora.pack(found, settings, NAMING)

    again = type(transformer).from_config(transformer.config)
    inject_adapter_in_model(LoraConfig(**table), again)  # by the names alone
    wanted = {name.removeprefix("transformer."): value.shape for name, value in tensors.items()}
    assert {name: value.shape for name, value in get_peft_model_state_dict(again).items()} == wanted

    save_file(tensors, tmp_path / "lora.safetensors", metadata=described)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of other layers than the tensors'
        pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    try:
        for name, module in pipeline.transformer.named_modules():
            if hasattr(module, "lora_A"):
                assert module.scaling["default_0"] == (9 / 5 if name == "proj_out" and "layers" in more else 3 / 2)
    finally:
        pipeline.unload_lora_weights()
    for layer in {name.partition(".lora_")[0] for name in wanted}:
        special = layer == "proj_out" and "layers" in more
        assert NAMING.alpha_of(described, layer, 0) == (9 if special else 3)


def test_what_metadata_say_of_other_layers_stays():
    parameters = {f"{name}.lora_{side}.default.weight": torch.zeros(2, 2)
                  for name in ("a.to_q", "b.to_q", "c.to_k") for side in "AB"}
    settings = parse({"lora": {"rank": 2, "layers": [{"match": "to_k", "rank": 4}]}}, "").lora
    table = json.loads(lora.describe(parameters, settings, NAMING)["lora_adapter_metadata"])
    assert table["transformer.target_modules"] == ["a.to_q", "b.to_q", "c.to_k"]
    assert table["transformer.rank_pattern"] == {"c.to_k": 4}
