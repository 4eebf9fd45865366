"""Civitai's training parameters: each engine's rules hold, and none is lost in silence."""

from __future__ import annotations

import pytest

from train.config.load import load_config

PARAMS = {"engine": "ai-toolkit", "ecosystem": "flux1", "modelVariant": "dev", "steps": 2000, "epochs": 5,
          "batchSize": 2, "numRepeats": 3, "resolution": 768, "lr": 2e-4, "lrScheduler": "cosine",
          "optimizerType": "adamw8bit", "networkDim": 16, "networkAlpha": 8, "flipAugmentation": True,
          "shuffleTokens": True, "keepTokens": 1, "sampleCfgScale": 4, "continueFrom": "urn:air:x"}


@pytest.fixture
def convert_parameters(convert_json, tmp_path):
    def go(**params):
        found = convert_json({"params": {**PARAMS, **params}})
        (tmp_path / "train.toml").write_text(found.training.rendered("head"))
        return found, load_config(tmp_path / "train.toml")

    return go


def test_ai_toolkit(convert_parameters, tmp_path):
    found, config = convert_parameters()
    (source,) = found.recipe.sources
    assert found.tool == "civitai" and (source.path, source.repeats) == (tmp_path, 3)
    assert (found.recipe.image.resolution, found.recipe.image.flip) == (768, "both")
    assert (found.recipe.caption.shuffle, found.recipe.caption.keep_tokens) == (True, 1)
    assert (config.steps, config.batch_size, config.lora.rank, config.lora.alpha) == (2000, 2, 16, 16)
    assert (config.checkpoint.every, config.checkpoint.keep) == (400, 5)  # as many checkpoints as epochs
    assert (config.optimizer.name, config.optimizer.lr, config.schedule.name) == ("adamw-8bit", 2e-4, "cosine")
    assert {one.key for one in found.training.notes} == {"network.linear_alpha", "continueFrom", "other settings"}
    assert "sampleCfgScale = 4" in found.training.rendered("") and found.notes[0].key == "engine"


def test_sd_scripts(convert_parameters):
    found, config = convert_parameters(engine="kohya", ecosystem="sdxl", unetLR=5e-4, lr=None, clipSkip=2,
                                       textEncoderLR=5e-5, optimizerArgs="weight_decay=0.1", steps=None, minSnrGamma=5)
    assert (config.epochs, config.batch_size, config.optimizer.lr) == (5, 2, 5e-4)  # real epochs
    assert (config.lora.alpha, config.optimizer.weight_decay, config.loss.min_snr) == (8, 0.1, 5)
    assert found.recipe.sources[0].repeats == 3 and found.recipe.image.buckets == "step"
    assert {"text_encoder_lr", "clip_skip"} <= {one.key for one in found.training.notes}


def test_musubi_tuner(convert_parameters, tmp_path):
    found, config = convert_parameters(engine="musubi", ecosystem="qwen")
    assert (config.lora.targets, config.lora.alpha, config.epochs) == ("all-linear", 8, 5)
    assert (found.recipe.sources[0].path, found.recipe.image.resolution) == (tmp_path, 768)
    assert {"flipAugmentation", "shuffleTokens", "keepTokens"} <= {one.key for one in found.training.notes}
