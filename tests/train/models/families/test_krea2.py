"""Krea 2's transformer: positions, layers that get adapters, and weights that stay in float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import Krea2Pipeline

from prep.training.schema import Lora
from train.config.load import parse
from train.models.denoiser import load, predict
from train.models.families import krea2
from train.models.family import Conditions
from train.models.targets import targeted

CPU = torch.device("cpu")


def test_positions_are_the_pipeline_s():
    wanted = Krea2Pipeline.prepare_position_ids(7, 3, 4, CPU)
    assert torch.equal(krea2.positions(torch.zeros(2, 16, 6, 8), 7), wanted)


def given(*lengths: int) -> Conditions:
    mask = (torch.arange(16)[None] < torch.tensor(lengths)[:, None]).to(torch.uint8)
    layers = torch.randn(len(lengths), 16, 3, 32, generator=torch.Generator().manual_seed(0)) * mask[..., None, None]
    return Conditions(text={"layers": layers, "attention_mask": mask}, sizes_B6=torch.zeros(len(lengths), 6))


def test_norms_stay_in_float32_when_the_rest_is_bfloat16(tmp_path):
    """As diffusers loads them: a norm multiplies by 1 + weight, which bfloat16 rounds to steps of 1/128."""
    model = tiny_pipelines.save("krea2", tmp_path / "model")
    exact, rounded = (load(model, parse({"precision": precision}, ""), "flow", CPU, adapt=False)
                      for precision in ("fp32", "bf16"))
    dtypes = {name: value.dtype for name, value in rounded.model.named_parameters()}
    norms = {name for name in dtypes if {"norm", "norm1", "norm2", "norm_q", "norm_k"} & set(name.split("."))}
    assert {dtypes[name] for name in norms} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - norms} == {torch.bfloat16}
    weights = exact.model.state_dict()
    assert all(torch.equal(rounded.model.get_parameter(name), weights[name]) for name in norms)
    noised = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, other = (predict(denoiser, noised, torch.tensor([300, 700]), given(9, 14))
                      for denoiser in (exact, rounded))
    assert torch.allclose(one, other.float(), atol=0.05) and not torch.equal(one, other.float())


@pytest.mark.parametrize(("targets", "left"), [("attention", {"to_gate", "gate", "up", "down", "projector"}),
                                               ("all-linear", {"projector"})])
def test_presets_name_every_layer_of_the_blocks(targets, left):
    transformer = tiny_pipelines.build("krea2").transformer
    layers = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = {name for name in layers if name.startswith(("transformer_blocks.", "text_fusion."))}
    chosen = set(targeted(layers, Lora(targets=targets), krea2.PRESETS))
    assert chosen <= inside and {name.rpartition(".")[2] for name in inside - chosen} == left
