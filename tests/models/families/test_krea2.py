"""Krea 2's text rows: selected layers of each token, without the padding inside of the template.

Krea 2's transformer: positions, layers that get adapters, and weights that stay in float32.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import Krea2Pipeline

from prep.encode.resolve import _more_text
from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families import krea2
from prep.models.families.krea2 import FAMILY, LAYERS, PREFIX, SELECTED, SUFFIX, SUFFIX_TOKENS
from prep.models.families.qwenimage import DROPPED
from prep.models.family import Conditions, TextOptions
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.training.schema import Lora
from train.config.load import parse
from train.models.denoiser import load, predict
from train.models.targets import targeted

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("krea2", tmp_path_factory.mktemp("krea2") / "model")


def selecting(model: Path, root: Path, layers: object) -> Path:
    """The model, with such a list of layers in its index."""
    root.mkdir()
    for path in model.iterdir():
        if path.name != "model_index.json":
            (root / path.name).symlink_to(path)
    index = json.loads((model / "model_index.json").read_text())
    (root / "model_index.json").write_text(json.dumps({**index, SELECTED: layers}))
    return root


def rows(model: Path, captions: list[str]) -> list[torch.Tensor]:
    encoder = TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")
    return [torch.from_numpy(row["layers"]) for row in encoder.encode(captions)]


def test_constants_are_the_pipeline_s():
    pipeline = tiny_pipelines.build("krea2")
    assert (pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix) == (PREFIX, SUFFIX)
    assert pipeline.prompt_template_encode_start_idx == DROPPED
    assert pipeline.prompt_template_encode_num_suffix_tokens == SUFFIX_TOKENS
    assert type(pipeline)(**dict.fromkeys(pipeline.components)).text_encoder_select_layers == LAYERS
    defaults = {name: one.default for name, one in inspect.signature(pipeline.__call__).parameters.items()}
    assert defaults["max_sequence_length"] == FAMILY.text.max_length


def test_layers_are_those_of_the_index(model, tmp_path):
    usual, other = rows(model, ["a cat"])[0], rows(selecting(model, tmp_path / "model", [6, 1]), ["a cat"])[0]
    assert usual.shape[1:] == (3, 32) and other.shape == (len(usual), 2, 32)
    assert torch.equal(other[:, 0], usual[:, 2])
    assert FAMILY.text.shapes(Configs(tmp_path / "model"), OPTIONS) == {"layers": (512, 2, 32)}


def test_layers_are_in_the_keys(model, tmp_path):
    found = [_more_text(path, FAMILY, OPTIONS)["pipeline"][SELECTED] for path in (
        model, selecting(model, tmp_path / "one", [6, 1]), selecting(model, tmp_path / "none", None))]
    assert found == ["2,4,6", "6,1", "default"]


@pytest.mark.parametrize("layers", [[], "2,4", [2, -1], [True], [1.0], [129], [1] * 129])
def test_layers_that_no_model_has(model, tmp_path, layers):
    found = Configs(selecting(model, tmp_path / "model", layers))
    with pytest.raises(ModelError) as error:
        FAMILY.text.shapes(found, OPTIONS)
    assert f"has {SELECTED} " in error.value.message
    assert error.value.message.endswith(", expected a list of 1 to 128 numbers from 0 to 128")


def test_a_layer_beyond_the_last_is_told(model, tmp_path):
    with pytest.raises(ModelError, match="cannot encode a caption: tuple index out of range"):
        rows(selecting(model, tmp_path / "model", [7]), ["a cat"])


def test_rows_are_whole_and_have_no_padding(model):
    """The prefix has more tokens here than those cut off, as the tokenizer has a token per byte."""
    tokenizer = tiny_pipelines.build("krea2").tokenizer
    short, long = rows(model, ["a cat", "a word and another " * 100])
    assert len(short) == len(tokenizer(PREFIX + "a cat" + SUFFIX)["input_ids"]) - DROPPED
    assert len(long) == 512
    assert LengthCounter(model, FAMILY, OPTIONS).groups(["a cat"]) == [-(-len(short) // 16) * 16]


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
