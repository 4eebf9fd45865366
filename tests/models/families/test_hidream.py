"""HiDream's text rows: three encoders' tokens, of Llama only the layers that the transformer looks up.

How HiDream's transformer and pipeline are called, whatever the picture's size.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_files import change_json

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.encode.resolve import _more_text
from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families.hidream import FAMILY, SAMPLING, largest_area, predict
from prep.models.family import Conditions, TextOptions
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


def answer(transformer, cells):
    generator = torch.Generator().manual_seed(0)
    text = {"t5": torch.randn(2, 8, 32, generator=generator), "llama": torch.randn(2, 2, 8, 32, generator=generator),
            "pooled": torch.randn(2, 64, generator=generator)}
    noised = torch.randn(2, 16, *cells, generator=generator)
    with torch.no_grad():
        return predict(transformer, noised, torch.tensor([0.5, 0.2]),
                                Conditions(text=text, sizes_B6=torch.zeros(2, 6)))


@pytest.mark.parametrize("cells", [(4, 4), (2, 6), (6, 4)])
def test_training_predicts_what_sampling_does(cells):
    """In training the transformer returns patches, and lets gradients through its experts."""
    transformer = tiny_pipelines.build("hidream", whole=False).transformer
    usual = answer(transformer.eval(), cells)
    assert usual.shape == (2, 16, *cells)
    assert torch.allclose(answer(transformer.train(), cells), usual, atol=1e-5)


def test_the_pipeline_keeps_every_size():
    """As `__call__` computes it: the asked sides times the root of the ratio of areas, rounded down to 16."""
    for width in range(16, 2049, 16):
        for height in range(16, 2049, 272):
            pipeline = SimpleNamespace(default_sample_size=128)
            SAMPLING.prepare(pipeline, SimpleNamespace(size=(width, height)))
            scale = ((pipeline.default_sample_size * 8) ** 2 / (width * height)) ** 0.5
            assert (int(width * scale // 16 * 16), int(height * scale // 16 * 16)) == (width, height)


@pytest.mark.parametrize(("config", "most"), [({}, 1024 * 1024), ({"max_resolution": [16, 32]}, 128 * 256),
                                              ({"max_resolution": None}, None), ({"max_resolution": [16]}, None),
                                              ({"max_resolution": ["a", 1]}, None)])
def test_the_largest_area_is_that_of_the_patches_it_pads_to(config, most):
    assert largest_area(config) == most


def test_a_picture_beyond_it_is_one_that_the_transformer_cannot_take():
    transformer = tiny_pipelines.build("hidream").transformer  # 16 x 16 cells
    assert answer(transformer, (8, 32)).shape == (2, 16, 8, 32)
    with pytest.raises(RuntimeError):
        answer(transformer, (10, 32))
    assert answer(transformer, (20, 20)).shape == (2, 16, 20, 20)
