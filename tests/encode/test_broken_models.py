"""A model directory that is not as it should be ends `prep encode` with exit 6, before it writes a row."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from model_files import change_json

VAE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def refused(prep, photos, tiny_model, tmp_path):
    """`refused(change)`: the message for a copy of the tiny model that `change` has broken."""

    def call(change) -> str:
        model = shutil.copytree(tiny_model, tmp_path / "model")
        change(model)
        result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      "--resolution", 96, "--step", 16, "--device", "cpu")
        assert result.code == 6 and not (tmp_path / "m.json").exists(), result.err
        assert not list(tmp_path.glob("cache/shards/*/*/latent"))
        return result.err

    return call


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["model_index.json", "vae/config.json", "scheduler/scheduler_config.json",
                                  "text_encoder/model.safetensors", "tokenizer/vocab.json"])
def test_pipes(refused, name):
    assert f"{name} is a pipe or a device, expected a regular file" in refused(lambda model: pipe(model / name))


@pytest.mark.parametrize("name", ["model_index.json", "vae/config.json", "tokenizer/tokenizer_config.json"])
def test_many_brackets(refused, name):
    assert "is nested too deeply" in refused(lambda model: (model / name).write_text("[" * 200_000))


@pytest.mark.parametrize("placed", [[1, 2], {"a": ["x"]}, {"a": 5, "b": "x"}])
def test_indexes_of_weights(refused, placed):
    def change(model: Path) -> None:
        (model / "vae" / VAE).unlink()
        (model / "vae" / f"{VAE}.index.json").write_text("{}")
        change_json(model / "vae" / f"{VAE}.index.json", weight_map=placed)

    assert f"{VAE}.index.json " in refused(change)


def test_weights_that_are_cut_off(refused):
    message = refused(lambda model: os.truncate(model / "vae" / VAE, 100_000))
    assert f"{VAE} has 100000 bytes, expected " in message and "hint: download the model again" in message


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("vae/config.json", {"scaling_factor": float("nan")}, "has scaling_factor nan, expected a number from 0.0001"),
    ("vae/config.json", {"scaling_factor": 10**400}, "has scaling_factor 1000"),
    ("vae/config.json", {"scaling_factor": -1}, "has scaling_factor -1, expected"),
    ("vae/config.json", {"shift_factor": "x"}, "has shift_factor 'x', expected"),
    ("vae/config.json", {"latent_channels": 16}, "latents of the VAE in {}/vae have 16 channels, expected 4"),
    ("vae/config.json", {"block_out_channels": [8, 16]}, "of the VAE in {}/vae have 2 pixels a side, expected 8"),
    ("vae/config.json", {"block_out_channels": 5}, "latents of the VAE in {}/vae have 0 pixels a side, expected 8"),
    ("vae/config.json", {"norm_num_groups": -1}, "cannot encode a picture: "),
    ("text_encoder/config.json", {"hidden_size": True}, "has hidden_size True, expected a whole number"),
    ("text_encoder/config.json", {"hidden_act": ["a"]}, "cannot load the text encoder in "),
    ("text_encoder/config.json", {"num_attention_heads": 10**9}, "more than its weights have numbers"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": [1]}, "cannot load the tokenizer in "),
    ("tokenizer/tokenizer_config.json", {"model_max_length": 0}, "model_max_length is 0"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": 10**30}, " tokens, its text encoder only 77"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": 50},
     "makes 'hidden' of shape (50, 32) (token, channel), expected (77, 32)"),
    ("scheduler/scheduler_config.json", {"prediction_type": ["x"]}, "predicts ['x'], expected epsilon or v_prediction"),
])
def test_values_of_configs(refused, tmp_path, name, changes, message):
    assert message.format(tmp_path / "model") in refused(lambda model: change_json(model / name, **changes))


def test_the_message_about_a_text_row_of_another_shape(refused):
    said = refused(lambda model: change_json(model / "tokenizer" / "tokenizer_config.json", model_max_length=50))
    assert re.search(r"the text encoder of .*model makes 'hidden' of shape \(50, 32\) \(token, channel\), expected",
                     said)


def test_tokenizers_that_fail_on_every_caption(refused, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such token")

    monkeypatch.setattr("prep.models.text.lengths.ZeroEncoder.forward", fail)
    assert "model cannot count the tokens of a caption: no such token" in refused(lambda model: None)


def test_an_encoder_that_fails_on_every_caption(refused, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr("prep.models.text.encoder.TextEncoder._negative", fail)
    assert "text_encoder cannot encode a caption: no kernel for this" in refused(lambda model: None)
