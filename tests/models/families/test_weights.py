"""Weights of every component of every family: those with scales are read with them, and none is left unread in
silence.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import fp8_weights
import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")

import tiny_pipelines

from prep.errors import ModelError
from prep.models import loading
from prep.models.checkpoints import bounds
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_files
from prep.models.loading import Form, load_diffusers
from prep.models.pipeline import infer_family, weighted_files
from prep.models.text.pipeline import load_encoder
from prep.models.vae import load_vae
from prep.models.weights import read_shapes
from train.models.denoiser import files_of


@pytest.fixture(scope="module", params=tiny_pipelines.FAMILIES)
def model(request, tmp_path_factory) -> Path:
    return tiny_pipelines.save(request.param, tmp_path_factory.mktemp(request.param) / "model")


def components(model: Path) -> list[str]:
    """The components with weights."""
    return sorted(path.parent.name for path in model.glob("*/config.json"))


def load(model: Path, name: str) -> dict[str, torch.Tensor]:
    """The weights of a component, as it is loaded to encode or to train, in float32."""
    family = FAMILIES[infer_family(model)]
    with tiny_pipelines.known_warnings():
        if name == "vae":
            return load_vae(model, torch.float32).state_dict()
        if name in family.trained_with:
            return load_diffusers(*files_of(model, name), "denoiser", Form(dtype=torch.float32)).state_dict()
        return load_encoder(model, family, name, text_files(model), torch.float32).state_dict()


def changed(model: Path, root: Path, name: str) -> Path:
    """A copy of a component, in a model of links to the others."""
    copy = root / f"with-{name}"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / name).unlink()
    shutil.copytree(model / name, copy / name)
    return copy


@pytest.mark.few
def test_weights_are_read_with_the_scales_beside_them(model, tmp_path):
    for name in components(model):
        copy = changed(model, tmp_path, name)
        shapes = read_shapes(weighted_files(model, name).weights)
        meant = {}

        def with_scales(weights, meant=meant):
            found, plain = fp8_weights.scaled(weights)
            meant |= plain
            return {**found, "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}

        fp8_weights.rewrite(copy / name, with_scales)
        assert read_shapes(weighted_files(copy, name).weights) == shapes
        loaded = load(copy, name)
        fp8_weights.rewrite(copy / name, lambda _, meant=meant: meant)
        wanted = load(copy, name)
        assert loaded.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in loaded.items()), name


@pytest.mark.few
def test_a_tensor_that_nothing_reads_is_named(model, tmp_path):
    for name in components(model):
        copy = changed(model, tmp_path, name)
        fp8_weights.rewrite(copy / name, lambda weights: {**weights, "some.odd_scale": torch.ones(1)})
        with pytest.raises(ModelError) as error:
            load(copy, name)
        assert error.value.message == (f"the weights in {copy / name} have tensors that nothing reads: some.odd_scale")


def watch(monkeypatch) -> list[torch.nn.Module]:
    """Every model that is built to see what a config asks for, from now on."""
    built: list[torch.nn.Module] = []
    monkeypatch.setattr(bounds, "_FITTING", set())
    for name in ("build", "of_diffusers"):
        usual = getattr(loading, name)
        monkeypatch.setattr(loading, name, lambda *given, usual=usual: built.append(usual(*given)))
    return built


@pytest.mark.few
def test_what_a_config_asks_for_is_seen_without_memory(model, monkeypatch):
    built = watch(monkeypatch)
    for name in components(model):
        load(model, name)
        assert len(built) == 1 and all(value.is_meta for value in built.pop().parameters()), name


@pytest.mark.slow
@pytest.mark.parametrize("most", [10**6, 10**9])
def test_no_number_of_a_config_makes_a_model_far_larger_than_its_weights(model, tmp_path, monkeypatch, most):
    """Whatever the number is called: the model is refused before it is built, or it is not larger."""
    built = watch(monkeypatch)
    for name in components(model):
        copy = changed(model, tmp_path, name)
        path, refused = copy / name / "config.json", 0
        config = json.loads(path.read_text())
        numbers = [key for key, value in config.items() if type(value) is int and "token_id" not in key]
        for key in numbers:
            path.write_text(json.dumps({**config, key: most}))
            built.clear()
            with suppress(ModelError):
                load(copy, name)
            assert sum(value.numel() for one in built for value in one.parameters()) < 10**7
            refused += not built
        assert refused or not numbers, name  # Qwen3-VL's are in parts of its config
