"""What every command says of a single-file checkpoint, which is what most people have: the same, with a way out."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from model_files import change_json
from original_checkpoints import write_original
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from prep.models.hub import locate

NEW = ("--cache", "cache", "-o", "new.json")
# Every command with a --model, and what it needs besides.
COMMANDS = {
    "prep encode": ("photos", *NEW), "prep init": ("photos", "-o", "new.toml"), "prep scan": ("photos",),
    "prep import": ("photos", "--from", "kohya-npz", *NEW), "prep seal": ("photos", *NEW),
    "prep prompts": ("prompts.txt", "--manifest", "m.json"),
    "prep inspect": ("m.json", "--html", "page.html", "--decode", "1"), "prep view": ("m.json",),
    "prep mask": ("photos", "--with", "clipseg", "--prompt", "cat", "-o", "masks"),
    "train check": ("m.json",), "train run": ("m.json", "-o", "other"),
    "train sample": ("run", "-o", "new.png"), "train merge": ("run", "-o", "merged"),
    "train replay": ("run", "--step", "1"),
}


def test_the_commands_are_all_that_take_a_model():
    import typer

    from prep.cli.main import app
    from train.cli.main import app as train_app

    found = {f"{name} {command.name}" for name, one in (("prep", app), ("train", train_app))
             for command in typer.main.get_command(one).commands.values()
             if any("--model" in parameter.opts for parameter in command.params)}
    assert found == set(COMMANDS)


@pytest.fixture
def there(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    (tmp_path / "models").mkdir()
    for name in ("models/x.safetensors", "y.safetensors", "z.ckpt", "odd-name"):
        (tmp_path / name).write_bytes(b"weights")


def test_every_command_says_the_same_of_a_single_file(there, make, prep, train):
    make()
    assert train("run", "m.json", "-o", "run", "--steps", 1, "--rank", 1, "--device", "cpu", "--set",
                 "sample.every=0", "--set", "validation.every=0").code == 0
    for command, rest in COMMANDS.items():
        program, _, name = command.partition(" ")
        for file, gone in (("models/x.safetensors", ""), ("y.safetensors", ""), ("./y.safetensors", ""),
                           ("models/none.safetensors", "there is no such file; "), ("z.ckpt", ""), ("odd-name", ""),
                           ("owner/none.gguf", "there is no such file; ")):
            result = {"prep": prep, "train": train}[program](name, *rest, "--model", file)
            assert result.code == 6, (command, file, result)
            alone = name == "mask"
            expected = "a directory with config.json and weights" if alone else "a diffusers directory"
            assert f"error: model {file} is a single file, expected {expected}\n" in result.err, (command, file)
            hint = re.search("hint: (.*)", result.err)[1]
            assert hint.startswith(gone)
            hint = hint.removeprefix(gone)
            if alone:
                assert hint == "name its directory, or a Hub id like owner/name"
            elif file.endswith(".safetensors"):
                assert hint == (f"convert it first: prep convert {file} --config DIR -o OUT (DIR: a diffusers "
                                "directory or Hub id of the same architecture)")
            else:
                assert hint.startswith("only safetensors are read, since other files can run code or are quantized: ")


def test_a_recipe_with_a_single_file(there, prep, tmp_path):
    (tmp_path / "d.toml").write_text('[[source]]\npath = "photos"\n[model]\npath = "y.safetensors"\n')
    result = prep("encode", "d.toml", *NEW)
    assert result.code == 6 and "model y.safetensors is a single file, expected a diffusers directory" in result.err


@pytest.mark.parametrize("file", ["models/x.safetensors", "C:/sd/v1-5.ckpt", "y.safetensors"])
def test_imports_name_the_command_that_converts(there, prep, tmp_path, file):
    (tmp_path / "kohya.json").write_text(json.dumps({
        "pretrained_model_name_or_path": file, "train_data_dir": "photos", "max_train_steps": 9}))
    (tmp_path / "onetrainer.json").write_text(json.dumps({
        "training_method": "LORA", "resolution": "512", "base_model_name": file,
        "concepts": [{"path": "photos", "image": {}, "text": {}}]}))
    for source in ("kohya.json", "onetrainer.json"):
        result = prep("init", "--from", source, "-o", f"{source}.toml", "--force")
        assert result.code == 0, result.err
        said = " ".join((result.out + result.err + (tmp_path / f"{source}.toml").read_text()).replace("#", " ").split())
        assert f"prep convert {file} --config DIR -o OUT" in said
        assert f'path = "{file}"' not in said


def test_commands_without_a_download_do_not_offer_one(there, make, prep, tmp_path, monkeypatch):
    make()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for command in ("scan", "view"):
        result = prep(command, *COMMANDS[f"prep {command}"], "--model", "owner/name")
        assert result.code == 6 and "hint: name a directory; this command downloads nothing" in result.err
    result = prep("encode", *COMMANDS["prep encode"], "--model", "owner/name")
    assert "hint: name a directory, or add --download to download it from the Hub" in result.err


def test_convert_takes_its_configs_from_a_hub_id(there, prep, tiny_model, tmp_path, monkeypatch):
    from hub_caches import hub_cache

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "unet.safetensors"
    shutil.copy(tiny_model / "unet" / "diffusion_pytorch_model.safetensors", file)
    result = prep("convert", file, "--config", "someone/tiny", "-o", "out")
    assert result.code == 6 and "add --download to download it from the Hub" in result.err
    hub_cache(tmp_path / "hub", tiny_model, "someone/tiny")
    result = prep("convert", file, "--config", "someone/tiny", "-o", "out")
    assert result.code == 0 and result.out == "wrote out\n", result.err
    result = prep("convert", "none.safetensors", "--config", tiny_model, "-o", "out-2")
    assert result.code == 6 and "error: none.safetensors does not exist\nhint: name the file to convert" in result.err
    result = prep("convert", file, "--config", file, "-o", "out-2")
    assert result.code == 6 and "is a single file, expected a diffusers directory" in result.err


def test_of_a_whole_file_only_configs_are_downloaded(there, prep, tiny_model, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, **options):
        asked.append(options["allow_patterns"])
        return str(tiny_model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: [])
    write_original(tiny_model, tmp_path / "whole.safetensors")
    save_file({name: value for name, value in load_file("whole.safetensors").items() if "diffusion_model" in name},
              "unet.safetensors")
    for file in ("whole", "unet"):
        result = prep("convert", f"{file}.safetensors", "--config", "someone/tiny", "--download", "-o", f"of-{file}")
        assert result.code == 0, result.err
    assert ["*/*.safetensors" in patterns for patterns in asked] == [False, True]


# ---- directories that are no pipelines of pictures from text ---------------------------------------------------------


def test_a_modular_repository_says_what_it_is(tiny_model, prep, photos, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "model_index.json").rename(model / "modular_model_index.json")
    result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json")
    assert result.code == 6 and (f"model {model} is a modular pipeline (modular_model_index.json), which is not "
                                 "supported") in result.err
    assert "hint: name a repository or directory of the model with model_index.json" in result.err


@pytest.mark.parametrize("kind", ["QwenImageEditPipeline", "QwenImageEditPlusPipeline", "FluxKontextPipeline",
                                  "FluxFillPipeline", "StableDiffusionXLInpaintPipeline", "FluxControlPipeline",
                                  "StableDiffusionInstructPix2PixPipeline", "StableDiffusionXLImg2ImgPipeline"])
def test_a_pipeline_that_edits_says_what_it_is(tiny_model, prep, photos, tmp_path, kind):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change_json(model / "model_index.json", _class_name=kind)
    (tmp_path / "d.toml").write_text('[[source]]\npath = "photos"\n[model]\npath = "model"\n'
                                     'family = "sd15"\n')
    for source, rest in ((photos, ("--model", model)), (tmp_path / "d.toml", ())):
        result = prep("encode", source, *rest, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json")
        assert result.code == 6, result
        assert f"is a '{kind}', which makes pictures from other pictures: such models are not supported" in result.err
        assert "set family" not in result.err


def test_a_url_is_no_single_file():
    with pytest.raises(ModelError, match="is neither a directory nor a Hub id"):
        locate("https://example.org/x.safetensors")
