"""What every command says of a single-file checkpoint, which is what most people have: the same, with a way out."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
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
    "train replay": ("run", "--step", "1"), "train evaluate": ("run",),
}


def test_the_commands_are_all_that_take_a_model():
    import typer

    from prep.cli.main import app
    from train.cli.main import app as train_app

    found = {f"{name} {command.name}" for name, one in (("prep", app), ("train", train_app))
             for command in typer.main.get_command(one).commands.values()
             if any("--model" in parameter.opts for parameter in command.params)}
    assert found == {*COMMANDS, "prep caption", "prep embed"}  # those two are no models that make pictures


@pytest.fixture
def there(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    (tmp_path / "models").mkdir()
    for name in ("models/x.safetensors", "y.safetensors", "z.ckpt", "z.gguf", "odd-name"):
        (tmp_path / name).write_bytes(b"weights")


@pytest.fixture
def files(there, tiny_model, tmp_path):
    """Single files that no command takes: each with what is said of it, and the beginning of the hint."""
    given = {name: torch.zeros(4, 4) for name in ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight",
                                                  "model.diffusion_model.single_blocks.0.linear1.weight",
                                                  "model.diffusion_model.vector_in.in_layer.weight")}
    save_file(given, "flux.safetensors")
    save_file({name.replace("model.", "double."): value for name, value in given.items()}, "odd.safetensors")
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(2)}, "lora.safetensors")
    save_file({"first_stage_model.encoder.conv_in.weight": torch.zeros(2)}, "vae.safetensors")
    save_file({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 8, 3, 3)}, "edit.safetensors")
    save_file({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3),
               "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(2, 1024)},
              "sd2.safetensors")
    cut = write_original(tiny_model, tmp_path / "cut.safetensors")
    cut.write_bytes(cut.read_bytes()[:-5])
    whole = write_original(tiny_model, tmp_path / "whole.safetensors")
    save_file({**load_file(whole), "odd.weight": torch.zeros(2)}, "surplus.safetensors")
    save_file({name: value for name, value in load_file(whole).items() if not name.startswith("first_stage")},
              "part.safetensors")
    configs = "name where its configs and tokenizers are, after an @: "
    return {
        "models/x.safetensors": ("has no safetensors header; it is damaged or has another format", "download the"),
        "odd-name": ("has no safetensors header; it is damaged or has another format", "download the"),
        "models/none.safetensors": ("does not exist", "name a diffusers directory, a single file, or a Hub id"),
        "z.ckpt": ("is a pickle, which can run code when it is loaded: only safetensors and GGUF ", "look for NAME"),
        "z.gguf": ("has no GGUF header; it is damaged or has another format", "download the model again"),
        "z.ckpt@owner/name": ("is a pickle, which can run code when it is loaded", "look for NAME.safetensors"),
        "flux.safetensors": ("is of family 'flux', whose configs are not in this package",
                             configs),
        f"flux.safetensors@{tiny_model}": (f"is of family 'flux', but {tiny_model} is of family 'sd15'", configs),
        "odd.safetensors": ("has tensors of no family that is known by its names", configs),
        "lora.safetensors": ("is a LoRA, expected a model", "name the model that it was trained on"),
        "vae.safetensors": ("has a VAE and no denoiser, expected a model", "tensors of a denoiser are named"),
        "edit.safetensors": ("is a UNet that takes 8 channels, expected 4, or 9 to inpaint",
                             "name the model that makes pictures"),
        "sd2.safetensors": ("of which some models predict noise and some v, and the file does not say which",
                            "add @sd21-base if it predicts noise"),
        "cut.safetensors": ("bytes, expected", "download the model again"),
        "surplus.safetensors": ("has tensors of no family that is known by its names", configs),
        f"surplus.safetensors@{tiny_model}": ("has tensors that nothing reads: odd.weight", configs),
    }


def test_every_command_says_the_same_of_a_single_file(files, make, prep, train):
    make()
    assert train("run", "m.json", "-o", "run", "--steps", 1, "--rank", 1, "--device", "cpu", "--set",
                 "sample.every=0", "--set", "validation.every=0").code == 0
    for command, rest in COMMANDS.items():
        program, _, name = command.partition(" ")
        if name == "mask":
            result = prep(name, *rest, "--model", "flux.safetensors")
            assert result.code == 6 and ("error: model flux.safetensors is a single file, expected a directory with "
                                         "config.json and weights\nhint: name its directory, or a Hub id") in result.err
            continue
        for file, (said, hint) in files.items():
            result = {"prep": prep, "train": train}[program](name, *rest, "--model", file)
            assert result.code == 6, (command, file, result)
            assert said in result.err and file.partition("@")[0] in result.err, (command, file, result.err)
            assert f"hint: {hint}" in result.err, (command, file, result.err)
            if hint.endswith("@: "):
                assert (f"{file.partition('@')[0]}@DIR (DIR: a diffusers directory or Hub id of the same architecture, "
                        "which also has the parts that the file lacks)") in result.err, (command, file, result.err)


def test_a_part_that_is_in_neither_is_named(files, prep, tiny_model, tmp_path):
    bare = shutil.copytree(tiny_model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    result = prep("encode", "photos", *NEW, "--model", f"part.safetensors@{bare}")
    assert result.code == 6 and f"part.safetensors has no vae, and neither has {bare / 'vae'}\n" in result.err
    assert "hint: name where its configs and tokenizers are, after an @: part.safetensors@DIR" in result.err
    assert prep("encode", "photos", *NEW, "--model", f"part.safetensors@{tiny_model}", "--resolution", 64).code == 0


def test_a_recipe_with_a_single_file(files, prep, tiny_model, tmp_path):
    """Its configs are found beside the recipe, too; init writes both relative to it."""
    shutil.copytree(tiny_model, tmp_path / "models" / "configs")
    (tmp_path / "d.toml").write_text('[[source]]\npath = "photos"\n[model]\n'
                                     'path = "whole.safetensors@models/configs"\n[image]\nresolution = 64\n')
    from contextlib import chdir

    with chdir(tmp_path / "models"):
        result = prep("encode", "../d.toml", *NEW, "--dry-run")
        assert result.code == 0, result.err
    result = prep("init", "photos", "-o", "e.toml", "--model", f"whole.safetensors@{tmp_path / 'models' / 'configs'}")
    assert result.code == 0 and 'path = "whole.safetensors@models/configs"' in (tmp_path / "e.toml").read_text()
    assert prep("scan", "d.toml", "--model", "whole.safetensors@models/configs").code == 1, "of the pictures"


@pytest.mark.parametrize(("file", "here"), [("models/x.safetensors", True), ("C:/sd/v1-5.ckpt", False),
                                            ("y.safetensors", True), ("z.ckpt", False), ("no.safetensors", False)])
def test_imports_take_single_files_that_are_here(there, prep, tmp_path, file, here):
    (tmp_path / "kohya.json").write_text(json.dumps({
        "pretrained_model_name_or_path": file, "train_data_dir": "photos", "max_train_steps": 9}))
    (tmp_path / "onetrainer.json").write_text(json.dumps({
        "training_method": "LORA", "resolution": "512", "base_model_name": file,
        "concepts": [{"path": "photos", "image": {}, "text": {}}]}))
    for source in ("kohya.json", "onetrainer.json"):
        result = prep("init", "--from", source, "-o", f"{source}.toml", "--force")
        assert result.code == 0, result.err
        said = " ".join((result.out + result.err + (tmp_path / f"{source}.toml").read_text()).replace("#", " ").split())
        assert ("a single file: set [model] path to a .safetensors file that is here" in said) != here
        assert (f'path = "{file}"' in said) == here


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
    assert result.code == 6 and "error: model none.safetensors does not exist\nhint: name a diffusers" in result.err
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
    assert [[each for each in patterns if each.endswith(".safetensors")] for patterns in asked] == [
        [], ["vae/*.safetensors", "text_encoder*/*.safetensors"]]


# ---- directories that are no pipelines of pictures from text ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["QwenImageEditPipeline", "QwenImageEditInpaintPipeline",
                                  "FluxControlPipeline",
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
