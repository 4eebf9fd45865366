"""What cannot be a training adapter is refused before anything is loaded, by what is wrong with it."""

from __future__ import annotations

import pytest
import torch
from beside import training_adapter
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from train.check import check
from train.check.adapter import training_adapter as checked
from train.config.load import load_config, parse
from train.setup import RunRequest

SETTINGS = {"precision": "fp32", "batch_size": 2, "steps": 2, "lora": {"rank": 2}}
MERGE = "add it to the model with train merge, and train that one with --model"


@pytest.fixture
def file_of(make, setup_of, tmp_path):
    """`file_of(**lora)`: what was made, and a LoRA file of these settings."""
    made = make()
    return lambda **lora: (made, training_adapter(setup_of(made, **SETTINGS | {"lora": {"rank": 2, **lora}}),
                                                  tmp_path / "beside.safetensors"))


def report(made, path, **settings):
    return check(RunRequest(manifest=made.path), parse({**SETTINGS, "base": {"adapter": str(path)}, **settings}, ""))


@pytest.mark.parametrize("lora", [{"kind": "loha"}, {"kind": "lokr"}, {"dora": True}], ids=str)
def test_only_a_plain_lora_can_be_one(file_of, lora):
    made, path = file_of(**lora)
    (fault,) = report(made, path).faults
    assert fault.message.startswith(f"{path} has '") and fault.hint == MERGE
    assert fault.message.endswith(
        "', but a training adapter is a plain LoRA: it has down, up and alpha of each layer")


@pytest.mark.parametrize("change", [
    lambda tensors: {name: value.new_ones(3, 5) if name.endswith("down.weight") else value
                     for name, value in tensors.items()},
    lambda tensors: {name: value for name, value in tensors.items() if not name.endswith("up.weight")},
    lambda tensors: {**tensors, "lora_unet_nowhere.lora_down.weight": torch.ones(2, 2)},
    lambda tensors: {**tensors, "strange": torch.ones(2)},
    lambda tensors: {name: value * float("nan") for name, value in tensors.items()}])
def test_every_tensor_has_to_fit(file_of, change):
    made, path = file_of()
    save_file(change(load_file(path)), path)
    (fault,) = report(made, path).faults
    assert fault.message.startswith(f"{path} ") and fault.exit_code == 6


def test_layers_that_convolve_each_channel_by_itself_have_none(setup_of, make, tmp_path):
    """As those of SANA's feed-forward blocks."""
    path = tmp_path / "beside.safetensors"
    save_file({"unet.conv_depth.lora_A.weight": torch.ones(2, 1, 3, 3),
               "unet.conv_depth.lora_B.weight": torch.ones(8, 2, 1, 1)}, path)
    config = parse({**SETTINGS, "base": {"adapter": str(path)}}, "")
    with pytest.raises(ModelError, match="adapts 'conv_depth', which convolves each channel by itself: nothing can be "
                       "added beside it") as raised:
        checked(config, {"conv_depth": (8, 1, 3, 3)}, setup_of(make(), **SETTINGS).model.naming, lambda path: "")
    assert raised.value.hint == MERGE


def test_a_file_that_is_not_there_or_is_no_lora(file_of, tmp_path):
    made, path = file_of()
    (fault,) = report(made, tmp_path / "none.safetensors").faults
    assert fault.message == (f"base.adapter is {tmp_path / 'none.safetensors'}, which does not exist, expected the "
                             "LoRA file of a training adapter")
    assert fault.hint == "--set base.adapter=FILE names it where it is; hf download gets a published one"
    (fault,) = report(made, tmp_path).faults
    assert "which is not a .safetensors file" in fault.message
    (tmp_path / "beside.safetensors").write_bytes(b"\x01" * 40)
    (fault,) = report(made, path).faults
    assert fault.hint == "name an undamaged LoRA file with base.adapter"


def test_full_fine_tuning_has_none(file_of):
    made, path = file_of()
    (fault,) = report(made, path, method="full").faults
    assert fault.message == "base.adapter is set, which is for the frozen base of a LoRA, but method is 'full'"
    assert fault.hint == "--method lora; or add it to the model with train merge, and train that one"


def test_tensors_of_text_encoders_are_told(file_of):
    made, path = file_of()
    save_file({**load_file(path), "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(2, 2)},
              path)
    found = report(made, path)
    assert not found.faults
    assert "beside.safetensors also adapts text encoders; 1 of its tensors are not used" in found.notes


def test_check_says_what_is_trained_beside_it(file_of, train):
    made, path = file_of()
    result = train("check", made.path, "--set", f"base.adapter={path}", "--set", "base.adapter_scale=0.5")
    assert result.code == 0, result.err
    assert f"beside the training adapter {path} on " in result.out + result.err
    assert " layers, with a strength of 0.5: neither in sample pictures nor in the result" in result.out + result.err


def test_its_path_begins_at_the_file_that_names_it(tmp_path, monkeypatch):
    """One that is typed begins here, and a run keeps where it is."""
    (tmp_path / "settings").mkdir()
    file = tmp_path / "settings" / "train.toml"
    file.write_text('[base]\nadapter = "beside.safetensors"\n')
    assert load_config(file).base.adapter == str(tmp_path / "settings" / "beside.safetensors")
    monkeypatch.chdir(tmp_path)
    assert load_config(file, {"base.adapter": "other.safetensors"}).base.adapter == str(tmp_path / "other.safetensors")
    assert load_config(file, {"base.adapter": ""}).base.adapter == load_config(None).base.adapter == ""
