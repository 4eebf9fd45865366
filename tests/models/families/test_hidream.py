"""HiDream's text rows: three encoders' tokens, of Llama only the layers that the transformer looks up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from model_files import change_json

from prep.encode.resolve import _more_text
from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families.hidream import FAMILY
from prep.models.family import TextOptions
from prep.models.text.encoder import TextEncoder

OPTIONS = TextOptions(max_length=128)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_pipelines.save("hidream", tmp_path / "model", layers=(2, 0))


@pytest.mark.slow
def test_rows_have_each_listed_layer_once(model):
    shapes = {"t5": (128, 32), "llama": (2, 128, 32), "pooled": (64,)}
    assert dict(FAMILY.text.shapes(Configs(model), OPTIONS)) == shapes
    encoder = TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")
    assert dict(encoder.shapes) == shapes
    (row,) = encoder.encode(["a cat"])
    t5, _, llama, _, pooled, _ = tiny_pipelines.encode_prompts(tiny_pipelines.load(model), ["a cat"])
    assert len(llama) == 3 and torch.allclose(torch.from_numpy(row["llama"]), llama[[0, 2], 0], atol=1e-6)
    assert torch.allclose(torch.from_numpy(row["t5"]), t5[0], atol=1e-6)
    assert torch.allclose(torch.from_numpy(row["pooled"]), pooled[0], atol=1e-6)


def test_the_layers_are_in_the_keys(model):
    path = model / "transformer" / "config.json"
    told = []
    for layers in ([2, 0], [0, 2, 2, 0], [0, 1]):
        change_json(path, llama_layers=layers)
        told.append(_more_text(model, FAMILY, OPTIONS)["denoiser"])
    assert told == [{"llama_layers": "0,2"}, {"llama_layers": "0,2"}, {"llama_layers": "0,1"}]


@pytest.mark.parametrize("listed", [None, [], [3], [-1, 0], ["x"], [None], "0,1", {"0": 1}, [0] * 129])
def test_layers_that_are_none(model, listed):
    path = model / "transformer" / "config.json"
    change_json(path, llama_layers=listed)
    with pytest.raises(ModelError) as error:
        FAMILY.text.shapes(Configs(model), OPTIONS)
    assert error.value.message.startswith(f"{path} has llama_layers ")
    assert error.value.message.endswith(", expected layers from 0 to 2")


def test_a_directory_without_llama_as_published(model):
    change_json(model / "model_index.json", text_encoder_4=[None, None], tokenizer_4=[None, None])
    with pytest.raises(ModelError) as error:
        FAMILY.text.shapes(Configs(model), OPTIONS)
    assert error.value.message == f"{model} has no text_encoder_4, which HiDream is published without"
    assert error.value.hint == ("load the pipeline with text_encoder_4 and tokenizer_4 of Llama 3.1 8B Instruct, and "
                                "save it: pipeline.save_pretrained(DIR)")
