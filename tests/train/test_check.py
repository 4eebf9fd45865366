"""What is found before anything is loaded: each fault by its message, its hint, and its exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import diffusers
import pytest
import torch
from hub_caches import hub_cache

from prep.errors import ConfigError, ModelError
from prep.models.denoiser.levels import check_levels
from prep.models.denoiser.samplers import DIFFUSION, LIBRARIES, RESCALED
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import digest_file
from prep.training.schema import Lora
from train.check import check, notes
from train.check.requirements import check_device, needs_device
from train.config.load import parse
from train.models.adapters.readers import unread_by_comfyui, unread_by_diffusers
from train.models.denoiser import load_scheduler, noise_schedule, rescaled
from train.models.naming import naming_of
from train.setup import RunRequest


@pytest.fixture
def faults():
    """`faults(made, asked options…, settings)`: what check finds."""

    def go(made, settings=None, **asked):
        return check(RunRequest(manifest=made.path, **asked), parse(settings or {}, "test")).faults

    return go


@pytest.fixture
def other_model(tiny_model, tmp_path):
    """A copy of the model, to be changed."""
    return shutil.copytree(tiny_model, tmp_path / "other")


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_sound_manifest_has_no_fault_and_a_plan(make):
    made = make()
    report = check(RunRequest(manifest=made.path), parse({"batch_size": 2}, "test"))
    assert report.faults == () and report.setup is not None and report.plan.steps_per_epoch == 4
    assert report.setup.prediction == "epsilon" and report.setup.model.others == {}


def test_the_files_of_a_hub_model_are_digested_once(make, tiny_model, tmp_path, monkeypatch):
    """Denoiser, VAE and text encoder: links to blobs in the Hub's cache, whose stamps are those of the blobs."""
    hub_cache(tmp_path / "hub", tiny_model, "someone/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("prep.fs.memo.REST_NS", -(10**18))  # these files are seconds old
    read = []
    monkeypatch.setattr("prep.models.fingerprint.digest_file",
                        lambda path, part, tick: read.append(path.name) or digest_file(path, part))
    asked = RunRequest(manifest=make().path, model="someone/tiny")
    for count in (3, 3):
        report = check(asked, parse({}, "test"))
        assert report.faults == () and len(read) == count, read


def test_masked_loss_without_masks_names_the_field_and_the_command(make, faults, monkeypatch):
    made = make(masks=False)
    monkeypatch.chdir(made.root)
    (fault,) = faults(made, {"loss": {"masked": True}})
    assert fault.message == "manifest has no field 'mask', but the settings ask for masked loss"
    assert fault.hint.startswith("--no-masked, or encode masks: prep encode photos --model ") and fault.exit_code == 7
    assert fault.hint.endswith(" --mask sidecar --cache cache -o m.json")
    assert faults(made) == ()


def test_the_hint_names_the_recipe_where_there_is_one(make, faults, monkeypatch):
    made = make(masks=False, change=lambda document: document.update(recipe="dataset.toml"))
    monkeypatch.chdir(made.root)
    (fault,) = faults(made, {"loss": {"masked": True}})
    assert fault.hint.endswith(": prep encode dataset.toml --model model --mask sidecar --cache cache -o m.json")


def test_a_prediction_that_the_family_does_not_have(make, faults):
    (fault,) = faults(make(), {"prediction": "flow"})
    assert fault.message == "prediction is 'flow', expected epsilon or v_prediction for family 'sd15'"


def test_a_model_of_another_family_is_told(make, faults, monkeypatch, tiny_model):
    monkeypatch.setattr("train.check.rows.infer_family", lambda model, named: "sd99")
    (fault,) = faults(make())
    assert fault.message.endswith("tiny is of family 'sd99', but the manifest is of family 'sd15'")
    assert fault.exit_code == 6 and fault.hint.endswith("it reuses rows that both have in common")


def test_a_pipeline_of_an_unknown_class_is_of_the_family_that_the_recipe_named(make, faults, tiny_model, tmp_path):
    """Which is in the manifest: else `prep encode` would succeed and training refuse for ever."""
    model = tmp_path / "own"
    shutil.copytree(tiny_model, model)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "MyPipeline"}))
    assert check(RunRequest(manifest=make().path, model=str(model)), parse({}, "")).faults == ()
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionXLPipeline"}))
    (fault,) = check(RunRequest(manifest=make().path, model=str(model)), parse({}, "")).faults
    assert fault.message.endswith("own is of family 'sdxl', but the manifest is of family 'sd15'")


def test_a_bucket_larger_than_the_positions_of_the_denoiser_is_refused(make, faults, monkeypatch):
    limited = replace(FAMILIES["sd15"], longest_side=lambda config: 16 * config["in_channels"])  # 64
    monkeypatch.setattr("train.check.rows.FAMILIES", {"sd15": limited})
    (fault,) = faults(make())
    assert fault.message.endswith("tiny takes sides of at most 64 pixels, but the dataset has the bucket 80x48")
    assert fault.exit_code == 6
    assert fault.hint == "set image.longest = 64 in the recipe, and run prep encode again"


def test_a_bucket_of_more_patches_than_the_denoiser_pads_to_is_refused(make, faults, monkeypatch):
    limited = replace(FAMILIES["sd15"], largest_area=lambda config: 800 * config["in_channels"])  # 3200
    monkeypatch.setattr("train.check.rows.FAMILIES", {"sd15": limited})
    (fault,) = faults(make())
    assert fault.message.endswith("tiny takes at most 3200 pixels of a picture that is not square, but the dataset "
                                  "has the bucket 80x48")
    assert fault.exit_code == 6
    assert fault.hint == "set image.resolution = 56 in the recipe, and run prep encode again"


def test_a_missing_manifest_is_the_only_fault(tmp_path):
    report = check(RunRequest(manifest=tmp_path / "gone.json"), parse({}, "test"))
    assert [fault.exit_code for fault in report.faults] == [4] and report.plan is None


def test_a_missing_cache_is_told(make, faults):
    made = make()
    shutil.rmtree(made.root / "cache")
    (fault,) = faults(made)
    assert fault.message == f"the cache of {made.path}, {made.root / 'cache'}, does not exist" and fault.exit_code == 7
    assert fault.hint.startswith("name where it is now with --cache CACHE, or run prep encode again")


def test_a_missing_shard_and_a_short_one_are_told(make, faults):
    made = make()
    shard = sorted((made.root / "cache" / "shards").glob("*/*"))[0]
    data = next(path for path in shard.glob("*/c.*"))
    data.chmod(0o644)
    data.write_bytes(data.read_bytes()[:-1])
    (fault,) = faults(made)
    assert fault.message.startswith(f"shard {shard.name} (") and "bytes, expected" in fault.message
    shutil.rmtree(shard)
    (fault,) = faults(made)
    assert fault.message.endswith("rows) is missing") and fault.hint.startswith("prep encode ")


def test_no_step_is_told_with_names(make, faults):
    (fault,) = faults(make(), {"batch_size": 64, "underfill": "drop"})
    assert fault.exit_code == 8 and "64/0.png" in fault.message and "--underfill partial" in fault.hint


def test_nobody_to_train_on_is_told(make, faults):
    (fault,) = faults(make(counts=(0, 0)))
    assert fault.exit_code == 8 and fault.message == "there is no training sample, expected at least 1"


def test_who_is_left_out_and_who_is_repeated_is_named(make):
    made = make(counts=(4, 3))
    dropping = check(RunRequest(manifest=made.path), parse({"batch_size": 2, "underfill": "drop"}, "test"))
    assert len(dropping.left_out) == 1 and dropping.left_out[0].startswith("80/")
    repeating = check(RunRequest(manifest=made.path), parse({"batch_size": 2, "underfill": "repeat"}, "test"))
    assert repeating.left_out == () and len(repeating.repeated) == 1


def test_a_damaged_shard_index_is_told_before_any_model_is_loaded(make, faults):
    made = make()
    data = sorted((made.root / "cache" / "shards").glob("*/*/mask/c.*"))[0]
    data.chmod(0o644)
    data.write_bytes(data.read_bytes()[:-9] + b"?" + data.read_bytes()[-8:])
    (fault,) = faults(made)
    assert f"shard {data.parent.parent.name}, array 'mask': " in fault.message
    assert "has a damaged shard index" in fault.message and "prep verify" in fault.hint


def test_a_missing_model_is_told(make, faults):
    (fault,) = faults(make(), model="/nowhere/at all")
    assert fault.exit_code == 6 and "/nowhere/at all" in fault.message


def test_another_vae_is_refused_unless_allowed(make, faults, other_model):
    made = make()
    edit(other_model / "vae" / "config.json", scaling_factor=0.5)
    (fault,) = faults(made, model=str(other_model))
    assert fault.message.startswith(f"the VAE of {other_model} did not make this cache: VAE is ")
    assert fault.exit_code == 6 and "--allow-other-encoders" in fault.hint
    report = check(RunRequest(manifest=made.path, model=str(other_model), other_encoders=True), parse({}, "test"))
    assert report.faults == () and set(report.setup.model.others) == {"vae"}


def test_another_text_encoder_and_tokenizer_are_refused(make, faults, other_model):
    edit(other_model / "text_encoder" / "config.json", hidden_act="gelu")
    (fault,) = faults(make(), model=str(other_model))
    assert "the text encoder of " in fault.message


@pytest.mark.parametrize(("name", "value"), [("in_channels", 9), ("cross_attention_dim", 768)])
def test_a_denoiser_of_other_shapes_is_refused(make, faults, other_model, name, value):
    edit(other_model / "unet" / "config.json", **{name: value})
    (fault,) = faults(make(), model=str(other_model))
    assert f"has {name} {value}, but the cache's rows have" in fault.message and fault.exit_code == 6


def test_a_denoiser_without_safetensors_is_refused(make, faults, other_model):
    (other_model / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (fault,) = faults(make(), model=str(other_model))
    assert "has no diffusion_pytorch_model.safetensors" in fault.message


def test_rows_of_another_bucket_s_shape_are_refused(make, faults):
    def swap(document):
        first, second = document["buckets"]
        first["size"], second["size"] = second["size"], first["size"]

    (fault,) = faults(make(change=swap))
    assert fault.exit_code == 7 and "has its latent in shard" in fault.message
    assert "which holds latent latent:[4, 6, 10] latent:bfloat16, expected latent latent:[4, 8, 8] " in fault.message


def test_a_prompt_row_that_is_no_text_row_is_refused(make, faults):
    (fault,) = faults(make(change=lambda document: document["prompts"]["unconditional"].update(row=99)))
    assert "the manifest has a prompt in row 99 of shard number" in fault.message


def test_every_fault_is_told_at_once(make, faults, other_model):
    edit(other_model / "vae" / "config.json", scaling_factor=0.5)
    found = faults(make(masks=False), {"loss": {"masked": True}, "batch_size": 64, "underfill": "drop"},
                   model=str(other_model))
    assert [fault.exit_code for fault in found] == [7, 8, 6]


def test_checking_imports_no_torch(make):
    made = make()
    code = ("import sys; from pathlib import Path; from train.setup import RunRequest; from train.check import check;"
            f"from train.config.load import parse; asked = RunRequest(manifest=Path({str(made.path)!r}));"
            "assert not check(asked, parse({}, 'x')).faults;"
            "assert not {'torch', 'diffusers', 'peft', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_masked_loss_where_no_sample_has_a_mask(make, faults, monkeypatch):
    made = make()
    assert faults(made, {"loss": {"masked": True}}) == ()
    assert faults(made) == ()
    monkeypatch.setattr("prep.loader.index.Index.masked", 0)
    (fault,) = faults(made, {"loss": {"masked": True}})
    assert fault.message == f"the settings ask for masked loss, but none of the {len(made.samples)} samples has a mask"
    assert fault.exit_code == 7 and "--no-masked" in fault.hint


@pytest.mark.parametrize(("masks", "masked", "wanted"), [
    (True, "auto", True), (True, False, False), (True, True, True), (False, "auto", False), (False, False, False)])
def test_masks_are_used_where_there_are_some(make, masks, masked, wanted):
    made = make(masks=masks)
    assert check(RunRequest(manifest=made.path), parse({"loss": {"masked": masked}}, "test")).setup.masked is wanted


def test_masks_that_no_sample_has_are_not_used(make, monkeypatch):
    made = make()
    monkeypatch.setattr("prep.loader.index.Index.masked", 0)
    assert check(RunRequest(manifest=made.path), parse({}, "test")).setup.masked is False


def test_a_warmup_longer_than_the_run_is_refused(make, faults):
    (fault,) = faults(make(), {"steps": 20, "schedule": {"warmup": 21}})
    assert fault.message == ("schedule.warmup is 21, but the run has 20 steps: the learning rate would never reach "
                             "optimizer.lr")
    assert fault.exit_code == 3 and fault.hint == "--set schedule.warmup=2"
    assert faults(make(), {"steps": 20, "schedule": {"warmup": 20}}) == ()


def test_more_restarts_than_steps_are_refused(make, faults):
    asked = {"steps": 20, "schedule": {"name": "cosine-restarts", "warmup": 4, "cycles": 17}}
    (fault,) = faults(make(), asked)
    assert fault.message == "schedule.cycles is 17, but only 16 steps follow the warm-up"
    assert fault.exit_code == 3 and fault.hint == "--set schedule.cycles=4"
    assert faults(make(), {**asked, "schedule": {**asked["schedule"], "cycles": 16}}) == ()
    assert faults(make(), {**asked, "schedule": {**asked["schedule"], "name": "cosine"}}) == (), "it has no cycles"


@pytest.mark.parametrize(("full", "said"), [
    ({"train": ["attn3"]}, "full.train names 'attn3', but no module's name ends in it"),
    ({"freeze": ["re:^attn3"]}, "full.freeze names 're:^attn3', but no module's name matches it"),
    ({"train": ["attn2"], "freeze": ["re:attn"]},
     "full.freeze freezes all that full.train names, so nothing is trained"),
])
def test_weights_to_train_that_are_nowhere(make, faults, full, said):
    (fault,) = faults(make(), {"method": "full", "full": full})
    assert fault.message == said and fault.exit_code == 3


def test_an_optimizer_without_its_library_is_refused(make, faults, monkeypatch):
    monkeypatch.setattr("train.check.requirements.find_spec", lambda name: None)
    (fault,) = faults(make(), {"optimizer": {"name": "prodigy"}})
    assert fault.message == "optimizer.name is 'prodigy', which needs the library prodigyopt"
    assert fault.exit_code == 3 and fault.hint == "pip install 'latentry[optimizers]'"
    assert faults(make(), {"optimizer": {"name": "adafactor"}}) == ()


def test_an_optimizer_of_a_later_torch_is_refused(make, faults, monkeypatch):
    monkeypatch.setattr("train.check.requirements.version", lambda name: "2.8.1+cu126")
    (fault,) = faults(make(), {"optimizer": {"name": "muon"}})
    assert fault.message == "optimizer.name is 'muon', which needs torch 2.9 or later, but 2.8.1+cu126 is installed"
    monkeypatch.setattr("train.check.requirements.version", lambda name: "2.13.0+cpu")
    assert faults(make(), {"optimizer": {"name": "muon"}}) == ()


def test_a_paged_optimizer_needs_cuda():
    config = parse({"optimizer": {"name": "adamw-8bit-paged"}}, "test")
    with pytest.raises(ConfigError) as caught:
        check_device(config, "cpu")
    assert caught.value.message == "optimizer.name is 'adamw-8bit-paged', which needs cuda, but the device is cpu"
    assert caught.value.hint.endswith("or --set optimizer.name=adamw-8bit")
    check_device(config, "cuda")
    check_device(parse({}, "test"), "cpu")


def test_a_kernel_of_attention_needs_cuda_and_a_family_that_lets_it_be_chosen(make, faults):
    (fault,) = faults(make(), {"attention": "flash"})
    assert fault.message == "attention is 'flash', but denoisers of family 'sd15' compute it with PyTorch's own"
    assert fault.hint == "--set attention=native"
    config = parse({"attention": "cudnn"}, "test")
    assert needs_device(config)
    with pytest.raises(ConfigError, match="attention is 'cudnn', which needs cuda, but the device is cpu"):
        check_device(config, "cpu")
    check_device(config, "cuda")


def test_an_unusual_learning_rate_is_a_note(make):
    def notes(**settings):
        return check(RunRequest(manifest=made.path), parse({"optimizer": settings}, "test")).notes

    made = make()
    assert notes(name="prodigy", lr=1e-4) == ("optimizer.lr is 0.0001; 'prodigy' is usually given 1",)
    assert notes(lr=1.0) == ("optimizer.lr is 1; 'adamw' is usually given 0.0001",)
    assert notes(name="prodigy") == notes(lr=1e-2) == notes(lr=1e-6) == ()


HELPS = "what helps is alpha as large as the rank"
MISREAD = "ComfyUI reads no alpha in files with diffusers' names and takes it for the rank, but alpha / rank is "


@pytest.mark.parametrize(("lora", "strengths", "told"), [
    ({}, (0.5,), "0.5: strength 0.5 there draws what was trained; " + HELPS + ", or --set lora.format=kohya"),
    ({}, (1.0, 2.0), "1 to 2 by layer: " + HELPS + ", or --set lora.format=kohya"),
    ({"layers": ({"match": "to_q", "alpha": 2.0},)}, (0.25, 1.0), "0.25 to 1 by layer: " + HELPS),
    ({"rslora": True}, (4.0,), "4, by lora.rslora: strength 4 there draws what was trained; " + HELPS
     + " without lora.rslora, or --set lora.format=kohya"),
    ({}, (1.0,), None), ({"format": "kohya"}, (0.5,), None), ({"dora": True}, (0.5,), None)], ids=str)
def test_an_alpha_that_comfyui_does_not_read_is_a_note(lora, strengths, told):
    """Of a transformer; of a UNet and with DoRA it does not read all anyway, which is another note."""
    model = SimpleNamespace(naming=naming_of(FAMILIES["flux"]), strengths=strengths, fits_kohya="layers" not in lora)
    assert list(notes._misread(Lora(**lora), model)) == ([] if told is None else [MISREAD + told])
    unet = SimpleNamespace(naming=naming_of(FAMILIES["sd15"]), strengths=strengths, fits_kohya=True)
    assert not list(notes._misread(Lora(**lora), unet))


ATTENTION = "ComfyUI does not read attention layers with diffusers' names"
LENGTHS = "ComfyUI does not read attention layers and DoRA's lengths with diffusers' names"
OTHER = ": --set lora.format=kohya writes names that it reads"
DROPPED = ("diffusers reads no DoRA with these names: --set lora.format=diffusers writes names that it reads, and "
           "train merge makes a model that it loads")


@pytest.mark.parametrize(("lora", "told"), [
    ({}, []), ({"format": "kohya"}, []), ({"dora": True}, [DROPPED]), ({"format": "diffusers"}, [ATTENTION + OTHER]),
    ({"format": "diffusers", "dora": True}, [LENGTHS + OTHER]),
    ({"format": "diffusers", "layers": [{"match": "to_q", "alpha": 2}]}, [ATTENTION]),
    ({"kind": "loha"}, ["diffusers reads no LoHa: train merge makes a model that it loads"])], ids=str)
def test_what_a_format_s_readers_do_not_read_is_a_note(make, lora, told):
    report = check(RunRequest(manifest=make().path), parse({"lora": {"rank": 8, **lora}}, "test"))
    assert report.faults == () and [one for one in report.notes if "read" in one] == told
    full = check(RunRequest(manifest=make().path), parse({"lora": {"rank": 8, **lora}, "method": "full"}, "test"))
    assert not [one for one in full.notes if "ComfyUI" in one or "diffusers" in one]


@pytest.mark.parametrize(("family", "lora", "comfyui", "diffusers"), [
    ("sdxl", {"dora": True}, "", "DoRA with these names"), ("flux", {}, "", ""), ("ovis", {}, "", ""),
    ("flux", {"dora": True}, "DoRA's lengths with diffusers' names", ""), ("sana", {}, "", ""),
    ("lumina2", {}, "LoRA of this family with diffusers' names", ""), ("qwenimage", {}, "", ""),
    ("lumina2", {"format": "kohya"}, "", "LoRA of this family with these names")], ids=str)
def test_who_reads_which_file(family, lora, comfyui, diffusers):
    naming = naming_of(FAMILIES[family])
    assert unread_by_comfyui(Lora(**lora), naming) == comfyui
    assert unread_by_diffusers(Lora(**lora), naming) == diffusers


def test_trained_parameters_are_counted_without_loading_them(make, tiny_model):
    from train.models.denoiser import load

    made = make()
    for settings in ({}, {"method": "full"}, {"method": "full", "full": {"freeze": ["down_blocks", "re:bias$"]}},
                     {"lora": {"rank": 3, "targets": "all-linear"}},
                     {"lora": {"rank": 3, "targets": "kohya-conv", "conv_rank": 2,
                               "layers": [{"match": "to_q", "rank": 5}]}},
                     {"lora": {"rank": 3, "targets": "kohya-conv", "dora": True}},
                     {"lora": {"rank": 3, "init": "pissa"}},
                     {"lora": {"rank": 3, "kind": "loha", "targets": "kohya-conv"}},
                     {"lora": {"rank": 1, "kind": "lokr", "targets": "kohya-conv"}}):
        setup = check(RunRequest(manifest=made.path), parse({"precision": "fp32", **settings}, "test")).setup
        denoiser = load(setup.model.path, setup.config, setup.prediction, torch.device("cpu"))
        assert setup.model.numbers == sum(value.numel() for value in denoiser.parameters.values())
        assert setup.model.saved == sum(value.numel() for value in denoiser.weights.values())


@pytest.mark.parametrize("spoil", [lambda data: data[:-4], lambda data: b"", lambda data: b"\xff" * 8 + data[8:]],
                         ids=["cut", "empty", "huge"])
def test_a_damaged_denoiser_is_one_fault(make, faults, other_model, spoil):
    path = other_model / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    (fault,) = faults(make(), model=str(other_model))
    assert fault.message.startswith(f"{path} has ") and fault.exit_code == 6


def test_targets_that_are_nowhere_are_found_before_loading(make, faults):
    (fault,) = faults(make(), {"lora": {"targets": ["to_qq"]}})
    assert fault.message.endswith("but no linear or convolution layer's name ends in it; did you mean 'to_q'?")
    (fault,) = faults(make(), {"lora": {"targets": ["to_q", "nowhere"]}})
    assert "lora.targets names 'nowhere'" in fault.message


def test_more_principal_directions_than_a_layer_has_are_refused(make, faults):
    made, targets = make(), ["re:^mid_block.*attn2.to_k$"]
    (fault,) = faults(made, {"lora": {"init": "pissa", "rank": 17, "targets": targets}})
    assert fault.message == ("lora.init is 'pissa', but 'mid_block.attentions.0.transformer_blocks.0.attn2.to_k' of "
                             "shape [16, 32] has no 17 principal directions")
    assert fault.hint == "a smaller --rank, for this layer alone by lora.layers, or --set lora.init=kaiming"
    assert faults(made, {"lora": {"init": "pissa", "rank": 16, "targets": targets}}) == ()


def test_min_snr_of_a_schedule_that_ends_in_noise_is_refused(make, faults, other_model):
    edit(other_model / "scheduler" / "scheduler_config.json", rescale_betas_zero_snr=True)
    (fault,) = faults(make(), {"loss": {"min_snr": 5.0}}, model=str(other_model))
    assert fault.message == (f"loss.min_snr is 5, but the noise schedule of {other_model} ends in pure noise, from "
                             "which a model that predicts epsilon learns nothing")
    assert fault.exit_code == 3 and fault.hint.startswith("--set loss.min_snr=0, or ")
    assert faults(make(), {"loss": {"min_snr": 5.0}, "prediction": "v_prediction"}, model=str(other_model)) == ()
    (fault,) = faults(make(), {"loss": {"weighting": "debiased"}}, model=str(other_model))
    assert fault.message == (f"loss.weighting is 'debiased', but the noise schedule of {other_model} ends in pure "
                             "noise, where that weight is infinite")
    assert faults(make(), {}, model=str(other_model)) == ()


@pytest.mark.parametrize(("change", "said"), [
    ({"num_train_timesteps": 0}, "num_train_timesteps 0, expected a whole number from 1 to 100000"),
    ({"beta_end": float("nan")}, "beta_end nan, expected a number from 0 to 1"),
    ({"beta_end": 1.5}, "beta_end 1.5, expected a number from 0 to 1"),
    ({"beta_start": "x"}, "beta_start 'x', expected a number from 0 to below 1"),
    ({"beta_start": -0.1}, "beta_start -0.1, expected a number from 0 to below 1")], ids=str)
def test_levels_that_a_run_could_not_use_are_found_before_loading(make, faults, other_model, change, said):
    edit(other_model / "scheduler" / "scheduler_config.json", **change)
    found = faults(make(), model=str(other_model))
    assert [fault.message for fault in found] == [f"the scheduler's config in {other_model / 'scheduler'} has {said}"]
    with pytest.raises(ModelError):
        noise_schedule(other_model, "epsilon")


@pytest.mark.parametrize("name", ["shift", "flow_shift"])
@pytest.mark.parametrize("value", [0.0, -1, "x", float("inf")])
def test_shifts_that_a_run_could_not_use(tmp_path, name, value):
    (tmp_path / "scheduler").mkdir()
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({name: value}))
    with pytest.raises(ModelError) as caught:
        check_levels(json.loads(path.read_text()), tmp_path, flow=True)
    assert caught.value.message == (f"the scheduler's config in {path.parent} has {name} {value!r}, expected a number "
                                    "above 0")
    with pytest.raises(ModelError):
        noise_schedule(tmp_path, "flow")


def test_numbers_that_decide_no_level_are_not_looked_at(tmp_path):
    check_levels({"shift": "x", "use_dynamic_shifting": True}, tmp_path, flow=True)
    for other in ({"trained_betas": [0.1, 0.2]}, {"beta_schedule": "squaredcos_cap_v2"}):
        check_levels({"beta_end": "x", **other}, tmp_path, flow=False)


def test_a_zero_terminal_snr_is_for_predictions_of_v(make, faults):
    (fault,) = faults(make(), {"zero_terminal_snr": True})
    assert fault.message == ("zero_terminal_snr is on, but this model predicts epsilon, which of pure noise tells "
                             "nothing of the picture")
    assert fault.exit_code == 3 and fault.hint == ("--set zero_terminal_snr=false; or --set prediction=v_prediction, "
                                                   "which retrains the model to predict v")
    for prediction in ("v_prediction", "manifest"):
        made = make(prediction="v_prediction")
        assert faults(made, {"zero_terminal_snr": True, "prediction": prediction, "loss": {"min_snr": 5.0}}) == ()


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # of diffusers with NumPy 2
@pytest.mark.parametrize("of_model", [False, True])
def test_pictures_are_made_along_a_schedule_that_ends_in_noise_or_the_sampler_is_refused(
        make, faults, other_model, of_model):
    """For every sampler that is offered, and the usual one."""
    edit(other_model / "scheduler" / "scheduler_config.json", rescale_betas_zero_snr=of_model)
    made, settings = make(prediction="v_prediction"), {"zero_terminal_snr": not of_model}
    levels, followed = noise_schedule(other_model, "v_prediction", zero_terminal_snr=not of_model), set()
    for name in (None, *(name for name in DIFFUSION if find_spec(LIBRARIES.get(name, "torch")))):
        found = faults(made, {**settings, "sample": {} if name is None else {"sampler": name}}, model=str(other_model))
        scheduler = load_scheduler(getattr(diffusers, name or FAMILIES["sd15"].sampling.sampler), other_model,
                                   **rescaled(not of_model))
        alphas = scheduler.alphas_cumprod
        assert (found == ()) == torch.allclose(alphas, levels, rtol=1e-4, atol=1e-6), name
        if found:
            assert found[0].message.startswith(f"sample.sampler is '{name}', which cannot follow a noise schedule that "
                                               "ends in pure noise, expected one of: DDIMScheduler, ")
            assert found[0].hint == "leave sample.sampler out for the usual one"
        else:
            followed.add(name)
    assert followed == {None, *RESCALED}
    assert levels[-1] == 0 and faults(make(), {"sample": {"sampler": "HeunDiscreteScheduler"}}) == ()


def test_a_sampler_that_takes_no_two_steps(make, faults, other_model):
    two = {"sample": {"sampler": "KDPM2AncestralDiscreteScheduler", "steps": 2}}
    assert faults(make(), two, model=str(other_model)) == ()
    edit(other_model / "scheduler" / "scheduler_config.json", beta_schedule="linear", timestep_spacing="linspace")
    (fault,) = faults(make(), two, model=str(other_model))
    assert fault.message == ("KDPM2AncestralDiscreteScheduler cannot make pictures of this model in 2 steps, "
                             "expected 1, or 3 or more")
    assert fault.exit_code == 3 and "leave sample.sampler out" in fault.hint


@pytest.mark.parametrize(("name", "library"), LIBRARIES.items())
def test_a_sampler_whose_library_is_missing_names_it(make, faults, monkeypatch, name, library):
    monkeypatch.setattr("train.check.objective.find_spec", lambda module: None if module == library else module)
    (fault,) = faults(make(), {"sample": {"sampler": name}})
    assert fault.message == f"sample.sampler is '{name}', which needs the library {library}"
    assert fault.exit_code == 3
    assert fault.hint == f"pip install {library}, or leave sample.sampler out for the usual one"
    monkeypatch.setattr("train.check.objective.find_spec", lambda module: module)
    assert faults(make(), {"sample": {"sampler": name}}) == ()


def test_a_guidance_number_that_no_model_takes_is_refused(make, faults, tiny_model):
    (fault,) = faults(make(), {"guidance_embedding": 1.0}, model=str(tiny_model))
    assert fault.message == (f"guidance_embedding is 1, but the denoiser of {tiny_model} takes no such number: its "
                             "config has no guidance_embeds")
    assert fault.exit_code == 3 and fault.hint == "omit guidance_embedding"


@pytest.mark.parametrize("kind", ["area", "schedule"])
def test_a_shift_by_size_is_for_flows(make, faults, kind):
    (fault,) = faults(make(), {"timesteps": {"shift_by_size": kind}})
    assert fault.message == (f"timesteps.shift_by_size is '{kind}', which is for models that predict a flow, but this "
                             "one predicts epsilon")
    assert fault.exit_code == 3 and fault.hint == "--set timesteps.shift_by_size=none"


def test_a_weighting_of_another_prediction_is_refused(make, faults):
    (fault,) = faults(make(), {"loss": {"weighting": "cosmap"}})
    assert fault.message == ("loss.weighting is 'cosmap', which is for models that predict flow, but this one predicts "
                             "epsilon")
    assert fault.exit_code == 3 and fault.hint == "--set loss.weighting=none"
    (fault,) = faults(make(), {"loss": {"weighting": "debiased"}, "prediction": "v_prediction"})
    assert fault.message.endswith("predict epsilon, but this one predicts v_prediction")
    assert faults(make(), {"loss": {"weighting": "debiased"}}) == ()
