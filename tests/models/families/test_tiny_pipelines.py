"""The tiny pipelines that tests of model families use: complete, decided by a seed, and saved like published ones."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prep.models.components import class_of, known_classes, numbered
from prep.models.configs import pipeline_index
from prep.models.pipeline import tokenizer_files, weighted_files

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import torch
from tiny_pipelines import FAMILIES, SECONDARY, build, draw, encode_prompts, load, networks, save, text_only

CAPTIONS = ["A red cat, drawn", "two dogs sit on a long green bench: 3 à 4 m"]  # of two lengths, not all ASCII
DRAWN = [pytest.param(family, marks=pytest.mark.slow) if family in SECONDARY else family for family in FAMILIES]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("sd21", {"prediction": "epsilon"}), ("sdxl", {"second_width": 48}),
    ("sd3", {"qk_norm": "rms_norm"}), ("sd3", {"qk_norm": "rms_norm", "dual": (0,)}), ("sd3", {"without_t5": True}),
    ("flux", {"guidance": False}), ("pixart_alpha", {"sample_size": 64}), ("flux2_klein", {"distilled": True}),
    ("flux3", {"flow_map": True}),
    ("sana", {"solver": True, "timestep_scale": 0.5}), ("hidream", {"layers": (2, 0), "whole": False}),
    ("qwenimage_edit", {"zero_cond_t": True}),
]


@cache
def built(family: str) -> Any:
    """The family's pipeline with seed 0, for tests that only look."""
    return build(family)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """The directory of the family's pipeline with seed 0, for tests that only look."""
    root = tmp_path_factory.mktemp("saved")
    return cache(lambda family: save(family, root / family))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a pipeline returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def weights(pipeline: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the pipeline's networks, by part and name."""
    return {f"{type(network).__name__} {number} {name}": tensor for number, network in enumerate(networks(pipeline))
            for name, tensor in network.state_dict().items()}


def assert_close(one: Any, other: Any) -> None:
    """Both hold the same tensors, at least one, up to rounding.

    Weights that were read from a file are aligned in memory as in the file; matrix products may differ in the last bit.
    """
    mine, theirs = list(tensors(one)), list(tensors(other))
    assert mine
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def assert_same_weights(one: Any, other: Any) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def assert_saved_as_built(pipeline: Any, folder: Path) -> None:
    """What diffusers loads from `folder` is the pipeline: its class, settings, weights and text rows."""
    loaded = load(folder)
    assert type(loaded) is type(pipeline)
    assert {name for name, part in loaded.components.items() if part is None} == {
        name for name, part in pipeline.components.items() if part is None}
    assert_same_weights(pipeline, loaded)
    assert_close(encode_prompts(pipeline, CAPTIONS), encode_prompts(loaded, CAPTIONS))


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_pipeline_loads_as_it_was_built(family, saved):
    assert_saved_as_built(built(family), saved(family))


@pytest.mark.parametrize(("family", "options"), [  # the others are used by slow tests alone
    one if "without_t5" in one[1] else pytest.param(*one, marks=pytest.mark.slow) for one in VARIANTS], ids=str)
def test_variants_are_saved_too(family, options, tmp_path):
    assert_saved_as_built(build(family, **options), save(family, tmp_path / "model", **options))


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_alone_decides_the_weights(family):
    before = torch.random.get_rng_state()
    other = weights(build(family, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert_same_weights(built(family), build(family))
    assert any(not torch.equal(tensor, other[name]) for name, tensor in weights(built(family)).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_are_for_inference_and_nothing_in_them_is_zero(family):
    for network in networks(built(family)):
        assert not network.training
        for name, parameter in network.named_parameters():
            rows = parameter.reshape(len(parameter), -1) if parameter.dim() > 1 else parameter.reshape(1, -1)
            assert parameter.dtype == torch.float32 and parameter.device.type == "cpu", name
            assert not parameter.requires_grad and rows.any(dim=1).all(), name


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
def test_text_needs_neither_denoiser_nor_vae_and_each_caption_has_rows_of_its_own(family):
    pipeline = built(family)
    alone = text_only(pipeline)
    assert not {"unet", "transformer", "vae"} & {name for name, part in alone.components.items() if part is not None}
    rows = encode_prompts(pipeline, CAPTIONS)
    assert_close(rows, encode_prompts(alone, CAPTIONS))
    other = encode_prompts(pipeline, [CAPTIONS[1], CAPTIONS[0]])
    assert any(not torch.equal(mine, theirs) for mine, theirs in zip(tensors(rows), tensors(other), strict=True))


@pytest.mark.few
@pytest.mark.parametrize("family", DRAWN)
def test_pictures_are_finite_and_follow_the_prompt(family):
    pipeline = build(family)
    picture, other = draw(pipeline), draw(pipeline, "a dog on a bench")
    assert picture.shape == (64, 64, 3) and np.isfinite(picture).all()
    assert np.ptp(picture) > 0 and not np.array_equal(picture, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_checks_of_model_directories_accept_what_is_saved(family, saved):
    """Of classes that are not loaded yet, only that they are named; no file has a path of this machine."""
    folder = saved(family)
    index = pipeline_index(folder)
    for stem in ("text_encoder", "tokenizer", "vae"):
        for name in numbered(index, stem):
            if tuple(index.get(name, ())) in known_classes(name):  # or a processor has the tokenizer
                assert class_of(index, name, folder) == tuple(index[name])
                (tokenizer_files if stem == "tokenizer" else weighted_files)(folder, name)
    for path in folder.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(folder.parent) not in text and "_name_or_path" not in json.loads(text), path


def test_every_option_of_a_family_has_a_variant():
    taken = {(family, name) for family, make in FAMILIES.items() for name in inspect.signature(make).parameters}
    assert taken == {(family, name) for family, options in VARIANTS for name in options}
