"""CogView4's text rows: padded on the left to a multiple of 16 tokens, whatever is encoded beside them.

CogView4's transformer is told what its pipeline tells it: times before the shift, sizes, texts without padding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.cogview4 import FAMILY, shift_of, unshifted
from prep.models.family import Conditions, TextOptions
from prep.models.text.lengths import LengthCounter
from train.config.load import parse
from train.models.denoiser import Denoiser, load, predict

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=1024)
START = 2  # tokens that start every text
CAPTIONS = ["a cat", "two dogs on a long green bench", "a word, " * 200]


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("cogview4")


def rows(pipeline, captions, options=OPTIONS):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, options, CPU)]


def test_a_row_is_the_pipeline_s_for_that_caption_alone(pipeline):
    for caption, row in zip(CAPTIONS, rows(pipeline, CAPTIONS), strict=True):
        alone, _ = tiny_pipelines.encode_prompts(pipeline, [caption], max_sequence_length=1024)
        assert torch.equal(row, alone[0])
        assert len(row) == min(-(-(START + len(caption)) // 16) * 16, 1024)
    together, _ = tiny_pipelines.encode_prompts(pipeline, CAPTIONS[:2])
    assert together.shape[1] == 32 > len(rows(pipeline, CAPTIONS[:1])[0]) == 16, "the pipeline pads to the longest"


def test_padding_is_part_of_the_row(pipeline):
    row = rows(pipeline, ["a cat"])[0]
    assert row[:16 - START - len("a cat")].any(dim=1).all()


@pytest.mark.parametrize(("most", "tokens"), [(96, 96), (100, 112)])
def test_captions_are_cut_off_before_they_are_padded(pipeline, tmp_path: Path, most, tokens):
    model, options = tiny_pipelines.save("cogview4", tmp_path / "model"), TextOptions(max_length=most)
    assert dict(FAMILY.text.shapes(Configs(model), options)) == {"hidden": (tokens, 32)}
    assert rows(pipeline, [CAPTIONS[2]], options)[0].shape == (tokens, 32)
    counter = LengthCounter(model, FAMILY, options)
    assert counter.groups(CAPTIONS) == [16, 32, tokens] and counter.unconditional() == 16


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("cogview4", tmp_path_factory.mktemp("cogview4") / "model")


def watch(transformer: Any) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    return seen


OTHERS = [{}, {"base_shift": 0.7, "max_shift": 1.0, "base_image_seq_len": 64}, {"time_shift_type": "exponential"},
          {"use_dynamic_shifting": False, "shift": 3.0}]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
@pytest.mark.parametrize(("width", "height"), [(64, 64), (128, 64), (512, 512)])
def test_the_time_of_each_step_is_the_pipeline_s(width, height, changes):
    pipeline = tiny_pipelines.build("cogview4")
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **changes)
    seen = watch(pipeline.transformer)
    with torch.no_grad(), tiny_pipelines.known_warnings():
        pipeline("a cat", width=width, height=height, num_inference_steps=4, guidance_scale=1.0, output_type="latent")
    sigmas = pipeline.scheduler.sigmas[:-1]
    told = torch.cat([kwargs["timestep"] for kwargs in seen])
    assert told.tolist() == [1000.0, 667.0, 334.0, 1.0] and not torch.allclose(sigmas * 1000, told, rtol=0.01)
    patches, schedule = width // 16 * (height // 16), dict(pipeline.scheduler.config)
    assert torch.allclose(1000 * unshifted(sigmas, shift_of(patches, schedule)), told, rtol=1e-5)
    assert changes or shift_of(patches, {}) == shift_of(patches, schedule)


def test_the_scheduler_s_config_counts_in_training(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "scheduler" / "scheduler_config.json").read_text())
    (other / "scheduler" / "scheduler_config.json").write_text(json.dumps({**config, "base_shift": 2.0}))
    told = []
    for folder in (model, other):
        denoiser = load(folder, parse({"precision": "fp32"}, ""), "flow", CPU, adapt=False)
        seen = watch(denoiser.model)
        with torch.no_grad():
            stepped(denoiser, given(SIZES, [16, 16, 16]))
        told.append(seen[0]["timestep"])
    wanted = [1000 * unshifted(denoiser.levels[torch.tensor([100, 500, 900])], base + 0.75 * (24 / 256) ** 0.5)
              for base in (0.25, 2.0)]
    assert torch.allclose(told[0], wanted[0]) and torch.allclose(told[1], wanted[1])


def given(sizes: list[list[float]], lengths: list[int], filler: float = 0.0) -> Conditions:
    hidden = torch.randn(len(lengths), 32, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(32)[None] < torch.tensor(lengths)[:, None]
    return Conditions(text={"hidden": torch.where(mask[..., None], hidden, torch.tensor(filler)),
                            "attention_mask": mask.byte()}, sizes_B6=torch.tensor(sizes))


SIZES = [[100.0, 200.0, 3.0, 4.0, 64.0, 96.0], [300.0, 400.0, 5.0, 6.0, 64.0, 96.0],
         [500.0, 600.0, 7.0, 8.0, 64.0, 96.0]]


def stepped(denoiser: Denoiser, conditions: Conditions) -> torch.Tensor:
    noised = torch.randn(3, 16, 8, 12, generator=torch.Generator().manual_seed(1))
    return predict(denoiser, noised, torch.tensor([100, 500, 900]), conditions)


@pytest.fixture
def denoiser(model) -> Denoiser:
    return load(model, parse({"precision": "fp32"}, ""), "flow", CPU, adapt=False)


def test_texts_of_each_length_have_a_call_of_their_own_with_their_sizes(denoiser):
    seen = watch(denoiser.model)
    with torch.no_grad():
        usual = stepped(denoiser, given(SIZES, [16, 32, 16]))
    assert [kwargs["encoder_hidden_states"].shape for kwargs in seen] == [(2, 16, 32), (1, 32, 32)]
    assert [kwargs["original_size"].tolist() for kwargs in seen] == [[[100, 200], [500, 600]], [[300, 400]]]
    assert [kwargs["crop_coords"].tolist() for kwargs in seen] == [[[3, 4], [7, 8]], [[5, 6]]]
    assert all(kwargs["target_size"].unique(dim=0).tolist() == [[64, 96]] for kwargs in seen)
    assert all(kwargs["original_size"].dtype is torch.float32 for kwargs in seen)
    with torch.no_grad():
        assert torch.equal(usual, stepped(denoiser, given(SIZES, [16, 32, 16], filler=5.0))), "padding is cut off"
        other = stepped(denoiser, given([SIZES[1], SIZES[1], SIZES[1]], [16, 32, 16]))
    assert [torch.allclose(one, two, atol=1e-4) for one, two in zip(usual, other, strict=True)] == [False, True, False]
