"""Libraries see the files of the fingerprint, and nothing that lies beside them."""

from __future__ import annotations

import json

import pytest
from model_files import change_json, write_model

from prep.models.checkpoints.staging import staged
from prep.models.pipeline import tokenizer_files, weighted_files


def no_links(*_: object) -> None:
    raise OSError(1314, "A required privilege is not held by the client")  # what Windows says


@pytest.mark.parametrize("links", [True, False])
def test_only_what_the_fingerprint_covers_is_there(tmp_path, monkeypatch, links):
    model = write_model(tmp_path / "model", parts=True)
    for name in ("mod.py", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors", "x.json"):
        (model / "vae" / name).write_text("{}")
    if not links:
        monkeypatch.setattr("prep.models.checkpoints.staging.os.symlink", no_links)
    files = weighted_files(model, "vae")
    with staged(files) as folder:
        assert {path.name for path in folder.iterdir()} == {path.name for path in files.weights} | {
            "config.json", "diffusion_pytorch_model.safetensors.index.json"}
        assert all((folder / path.name).read_bytes() == path.read_bytes() for path in files.weights)
        assert all((folder / path.name).is_symlink() is links for path in files.weights)
    assert not folder.exists() and all(path.is_file() for path in files.weights)


def test_configs_are_those_that_were_read(tmp_path):
    model = write_model(tmp_path / "model")
    files = weighted_files(model, "vae")
    (model / "vae" / "config.json").write_text("{}")
    with staged(files) as folder:
        assert json.loads((folder / "config.json").read_bytes()) == files.config != {}


def test_paths_of_files_in_a_tokenizers_config_are_dropped(tmp_path):
    model = write_model(tmp_path / "model")
    change_json(model / "tokenizer" / "tokenizer_config.json", vocab_file="/elsewhere/vocab.json", tokenizer_file=None,
                merges_file="../merges.txt", init_inputs=["/elsewhere/vocab.json"], errors="replace")
    files = tokenizer_files(model, "tokenizer")
    with staged(files) as folder:
        assert json.loads((folder / "tokenizer_config.json").read_bytes()) == {
            "model_max_length": 77, "name_or_path": "openai/clip", "tokenizer_file": None, "errors": "replace"}
        assert {path.name for path in folder.iterdir()} == set(files.small)


def test_of_the_map_of_special_tokens_only_tokens_are_taken(tmp_path):
    """transformers takes any argument of a tokenizer from that file, also the path of another vocabulary."""
    model = write_model(tmp_path / "model")
    change_json(model / "tokenizer" / "special_tokens_map.json", tokenizer_file="/elsewhere/tokenizer.json", vocab={},
                gguf_file="x.gguf", chat_template="{{ 1 }}", eos_token="</s>", additional_special_tokens=["<a>"])
    with staged(tokenizer_files(model, "tokenizer")) as folder:
        found = json.loads((folder / "special_tokens_map.json").read_bytes())
    assert found["eos_token"] == "</s>" and found["additional_special_tokens"] == ["<a>"]
    assert {name.rpartition("_")[2] for name in found} == {"token", "tokens"}
