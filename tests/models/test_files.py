"""Configs of a model are regular files of a sane size and depth, and lead to nothing that no fingerprint covers."""

from __future__ import annotations

import json
import os

import pytest
from model_files import change_json, write_model

from prep.errors import ModelError
from prep.models.files import CONFIG_BYTES, DEPTH, read_config, read_small
from prep.models.pipeline import tokenizer_files, weighted_files


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError) as error:
        read_config(tmp_path / "config.json")
    assert error.value.message == f"{tmp_path / 'config.json'} is a pipe or a device, expected a regular file"


def test_weights_that_are_a_pipe_are_not_waited_for(tmp_path):
    model = write_model(tmp_path)
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is a pipe or a device"):
        weighted_files(model, "vae")


def test_a_config_that_is_a_directory(tmp_path):
    with pytest.raises(ModelError, match=f"^cannot read {tmp_path}: Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(("text", "message"), [
    ("{", r"is not JSON: "), ("[1]", "holds list, expected an object"), ('{"a": 1' + "0" * 5000 + "}", "is not JSON: "),
    ("[" * 200_000, f"is nested too deeply, expected at most {DEPTH} levels"),
    ('{"a":' * 100 + "1" + "}" * 100, f"is nested too deeply, expected at most {DEPTH} levels"),
])
def test_a_config_that_is_no_object(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message) as error:
        read_config(path)
    assert error.value.hint.startswith("download the model again")


def test_a_config_as_deep_as_allowed(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * DEPTH + "1" + "}" * DEPTH)
    assert read_config(tmp_path / "config.json")


def test_a_config_that_is_not_utf_8(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="is not JSON"):
        read_config(tmp_path / "config.json")


def test_a_config_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelError, match=f"has {1 << 40} bytes, expected at most {CONFIG_BYTES}"):
        read_config(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_config_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
    path = tmp_path / "config.json"
    path.write_text("{}")
    stat = os.stat_result((*path.stat()[:6], 2 + change, *path.stat()[7:]))
    monkeypatch.setattr("prep.models.files.os.fstat", lambda _: stat)
    with pytest.raises(ModelError, match="changed while it was read") as error:
        read_small(path, CONFIG_BYTES)
    assert error.value.hint.startswith("wait until no program writes to the model")


@pytest.mark.parametrize(("part", "changes", "message"), [
    ("text_encoder/config.json", {"auto_map": {"AutoModel": "mod.Evil"}}, "asks for custom code"),
    ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mod.Evil", None]}}, "asks for custom code"),
    ("text_encoder/config.json", {"transformers_weights": "other.safetensors"}, "names weights that"),
    ("tokenizer/tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "names tokenizers that"),
    ("text_encoder/config.json", {"attn_implementation": "someone/kernel"}, "an attention kernel from the Hub"),
    ("text_encoder/config.json", {"_attn_implementation": {"": "someone/kernel"}}, "asks for an attention kernel"),
])
def test_a_config_that_leads_elsewhere(tmp_path, part, changes, message):
    model = write_model(tmp_path)
    change_json(model / part, **changes)
    name = part.partition("/")[0]
    with pytest.raises(ModelError) as error:
        tokenizer_files(model, name) if name == "tokenizer" else weighted_files(model, name)
    assert message in error.value.message and next(iter(changes)) in error.value.message
    assert f"remove {next(iter(changes))}" in error.value.hint


@pytest.mark.parametrize("changes", [{"auto_map": None}, {"fast_tokenizer_files": []}, {"attn_implementation": "sdpa"}])
def test_keys_that_lead_nowhere_are_fine(tmp_path, changes):
    model = write_model(tmp_path)
    for part in ("text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        change_json(model / part, **changes)
    assert weighted_files(model, "text_encoder").config["hidden_size"] == 6
    assert json.loads(tokenizer_files(model, "tokenizer").small["vocab.json"]) == {"a": 0, "b": 1}


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_a_text_encoder(tmp_path, name):
    """transformers would load it, and with it whatever model it names as its base."""
    model = write_model(tmp_path)
    (model / "text_encoder" / name).write_text("{}")
    with pytest.raises(ModelError) as error:
        weighted_files(model, "text_encoder")
    assert error.value.message == (f"{model / 'text_encoder'} has {name}: an adapter beside the weights is not in the "
                                   "fingerprint")
    assert "merge_and_unload" in error.value.hint
