"""A run that begins with given weights: of a file, a run, a checkpoint; what does not fit is refused before loading."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from hub_caches import hub_cache
from runs import go
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prep.errors import CacheError, ModelError, PathError
from prep.fs.place import Local
from prep.models.families.registry import FAMILIES
from train.check import check
from train.config.load import parse
from train.models import lora
from train.models.naming import naming_of
from train.runs.initial import find_weights
from train.runs.resume import find_start
from train.setup import RunRequest
from train.state import create_state
from train.state_files import put_weights

CPU = torch.device("cpu")
QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 2, "steps": 2, "precision": "fp32"}


@pytest.fixture
def trained(make, setup_of, tmp_path):
    """What was made, and the run of a LoRA of rank 2."""
    made = make()
    go(setup_of(made, **QUICK, lora={"rank": 2}), tmp_path / "first")
    return made, tmp_path / "first"


def checked(made, path, **settings):
    return check(RunRequest(manifest=made.path, init=path and Local(path)), parse({**QUICK, **settings}, "test"))


def begun(made, path, **settings):
    """The parameters of a new run that begins with the weights at `path`."""
    report = checked(made, path, **settings)
    assert report.faults == (), report.faults
    return create_state(report.setup, CPU)


def same(values, path):
    """Whether parameters are the tensors of kohya's file at `path`."""
    file = load_file(path)
    names = {"lora_A": "lora_down", "lora_B": "lora_up"}
    found = {}
    for name, value in values.items():
        module, end = name.split(".lora_")[0], next(kind for kind in names if kind in name)
        found[f"lora_unet_{module.replace('.', '_')}.{names[end]}.weight"] = value
    wanted = {name: value for name, value in file.items() if not name.endswith(".alpha")}
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_run_a_checkpoint_and_a_file_are_places_of_the_same_weights(trained):
    made, run = trained
    result = run / "lora.safetensors"
    for place in (run, result, run / "checkpoints" / "step-000002"):
        assert same(begun(made, place, lora={"rank": 2}).denoiser.parameters, result)
    assert not same(create_state(checked(made, None, lora={"rank": 2}).setup, CPU).denoiser.parameters, result)


def test_weights_may_be_links_outside_of_runs(trained, tiny_model, tmp_path):
    """Like those in snapshots of the Hub's cache. Those in a run are refused: see test_links."""
    made, run = trained
    (tmp_path / "lora").mkdir()
    shutil.copy(run / "lora.safetensors", tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    folder = hub_cache(tmp_path / "hub", tmp_path / "lora", "someone/lora")
    for place in (folder, folder / "pytorch_lora_weights.safetensors"):
        assert same(begun(made, place, lora={"rank": 2}).denoiser.parameters, run / "lora.safetensors")
    unet = hub_cache(tmp_path / "hub", tiny_model, "someone/tiny") / "unet"
    wanted = load_file(unet / "diffusion_pytorch_model.safetensors")
    for place in (unet.parent, unet / "diffusion_pytorch_model.safetensors"):
        found = begun(made, place, method="full").denoiser.parameters
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_a_finished_run_whose_checkpoints_are_gone_is_its_result(trained, tmp_path):
    _, run = trained
    assert [path.name for path in find_weights(Local(run), FAMILIES["sd15"], "lora")] == ["lora.safetensors"]
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    assert find_weights(Local(run), FAMILIES["sd15"], "lora") == (run / "lora.safetensors",)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_dora_begins_with_the_lengths_of_its_file(make, setup_of, tmp_path, layout):
    made, run = make(), tmp_path / "first"
    settings = {"lora": {"rank": 2, "dora": True, "format": layout}}
    go(setup_of(made, **QUICK, **settings, optimizer={"lr": 0.01}), run)
    state = begun(made, run, **settings)
    given = {name: value.clone() for name, value in state.denoiser.parameters.items()}
    put_weights(state.denoiser.parameters, find_start(Local(run)), "lora.safetensors", FAMILIES["sd15"], state.model)
    assert all(torch.equal(given[name], value) for name, value in state.denoiser.parameters.items())
    fresh = create_state(checked(made, None, **settings).setup, CPU).denoiser.parameters
    assert not any(torch.equal(fresh[name], value) for name, value in given.items() if "magnitude" in name)


def test_only_a_dora_begins_with_a_dora(trained, setup_of, tmp_path):
    made, run = trained
    (fault,) = checked(made, run, lora={"rank": 2, "dora": True}).faults
    path = next(run.glob("checkpoints/*/lora.safetensors"))
    assert fault.message.startswith(f"{path} has no lengths of rows, but lora.dora is on: ")
    assert fault.hint == "--set lora.dora=false"
    go(setup_of(made, **QUICK, lora={"rank": 2, "dora": True, "format": "kohya"}), tmp_path / "dora")
    path = tmp_path / "dora" / "lora.safetensors"
    (fault,) = checked(made, path, lora={"rank": 2}).faults
    assert fault.message.startswith(f"{path} has lengths of rows, but lora.dora is off: ")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("dora_scale"))
    save_file({**tensors, name: tensors[name].T.contiguous()}, path)
    (fault,) = checked(made, path, lora={"rank": 2, "dora": True}).faults
    assert f"{path} has lengths of " in fault.message and "with shape [1, " in fault.message
    assert "wd_on_output" in fault.hint


def test_a_pissa_begins_with_a_pissa_or_is_a_plain_lora_of_twice_the_rank(make, setup_of, tmp_path):
    made, run = make(), tmp_path / "first"
    settings = {"lora": {"rank": 2, "init": "pissa"}}
    go(setup_of(made, **QUICK, **settings, optimizer={"lr": 0.01}), run)
    result = load_file(run / "lora.safetensors")
    for other in (settings, {"lora": {"rank": 4}}):
        state, chosen = begun(made, run, **other), parse(other, "test").lora
        again = lora.pack(state.denoiser.weights, chosen, naming_of(FAMILIES["sd15"]))
        assert again.keys() == result.keys() and all(torch.equal(again[name], result[name]) for name in result)
    path = next(run.glob("checkpoints/*/lora.safetensors"))
    (fault,) = checked(made, run, lora={"rank": 4, "init": "pissa"}).faults
    assert re.fullmatch(rf"{path} has rank 4 in .*, but lora.rank is 4, which lora.init 'pissa' doubles", fault.message)
    assert fault.hint == "--set lora.init=kaiming --rank 4"


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_product_begins_with_its_own_file(make, setup_of, tmp_path, kind):
    made, run, path = make(), tmp_path / "first", tmp_path / "first" / "lora.safetensors"
    settings = {"lora": {"rank": 2, "alpha": 1.0, "kind": kind, "targets": "kohya-conv"}}
    go(setup_of(made, **QUICK, **settings, optimizer={"lr": 0.01}), run)
    state, result = begun(made, run, **settings), load_file(path)
    again = lora.pack(state.denoiser.weights, parse(settings, "test").lora, naming_of(FAMILIES["sd15"]))
    assert again.keys() == result.keys() and all(torch.equal(again[name], result[name]) for name in result)
    (fault,) = checked(made, path, lora={**settings["lora"], "alpha": 2.0}).faults
    assert re.fullmatch(rf"{path} has 'lora_unet_.*alpha' of 1, expected 2 by lora.alpha", fault.message)
    assert fault.hint == "--set lora.alpha=1"
    (fault,) = checked(made, path, lora={**settings["lora"], "kind": "lora"}).faults
    called = {"loha": "LoHa", "lokr": "LoKr"}[kind]
    assert re.fullmatch(rf"{path} has a {called} of .*, but lora.kind is 'lora'", fault.message)
    assert fault.hint == f"--set lora.kind={kind}"
    (fault,) = checked(made, path, lora={**settings["lora"], "targets": "attention"}).faults
    assert "which are not those of lora.targets 'attention'" in fault.message
    assert fault.hint == "--set lora.targets=kohya-conv"
    name = next(name for name in result if name.endswith("_b"))
    save_file({each: value for each, value in result.items() if each != name}, path)
    (fault,) = checked(made, path, **settings).faults
    assert fault.message == f"{path} has no such tensor: '{name}', expected shape {list(result[name].shape)}"
    save_file({**result, name: result[name][:1].contiguous()}, path)
    (fault,) = checked(made, path, **settings).faults
    assert fault.message == (f"{path} has shape {[1, *result[name].shape[1:]]}: '{name}', expected shape "
                             f"{list(result[name].shape)}")


def test_the_moving_average_is_preferred_and_both_start_from_it(make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, **QUICK, lora={"rank": 2}, ema={"decay": 0.9}), tmp_path / "first")
    state = begun(made, tmp_path / "first", lora={"rank": 2}, ema={"decay": 0.9})
    average = tmp_path / "first" / "checkpoints" / "step-000002" / "ema.safetensors"
    assert same(state.denoiser.parameters, average) and same(state.average.values, average)


def test_the_result_names_what_the_run_began_with_also_after_a_resume(trained, tmp_path, setup_of):
    made, run = trained
    setup = checked(made, run / "lora.safetensors", lora={"rank": 2}).setup
    go(setup, tmp_path / "second")
    kept = find_start(Local(tmp_path / "second")).state.init
    assert kept == {"name": "lora.safetensors", "sha256": setup.model.initial.digest}
    with safe_open(tmp_path / "second" / "lora.safetensors", "pt") as file:
        assert json.loads(file.metadata()["latentry.init"]) == kept


def test_every_weight_begins_with_those_of_a_directory_or_a_run(make, setup_of, tmp_path, tiny_model):
    made = make()
    go(setup_of(made, **QUICK, method="full", optimizer={"lr": 0.01}), tmp_path / "first")
    wanted = load_file(tmp_path / "first" / "unet" / "diffusion_pytorch_model.safetensors")
    plain = load_file(tiny_model / "unet" / "diffusion_pytorch_model.safetensors")
    name = "conv_in.weight"
    assert not torch.equal(wanted[name], plain[name])
    for place in (tmp_path / "first", tmp_path / "first" / "unet",
                  tmp_path / "first" / "unet" / "diffusion_pytorch_model.safetensors"):
        assert torch.equal(begun(made, place, method="full").denoiser.parameters[name], wanted[name])
    assert torch.equal(begun(made, tiny_model, method="full").denoiser.parameters[name], plain[name])


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_half_precision_and_either_naming(make, setup_of, tmp_path, layout):
    made = make()
    settings = {"rank": 2, "alpha": 3.0, "format": layout}
    go(setup_of(made, **QUICK, lora=settings), tmp_path / "first")
    with safe_open(tmp_path / "first" / "lora.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "first" / "lora.safetensors")
    halves = {name: value.half() for name, value in tensors.items()}
    save_file(halves, tmp_path / "half.safetensors", metadata=metadata)
    parameters = begun(made, tmp_path / "half.safetensors", lora={**settings, "format": "auto"}).denoiser.parameters
    sums = [sum(float(value.detach().float().abs().sum()) for name, value in some.items() if "alpha" not in name)
            for some in (parameters, halves)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6) and {value.dtype for value in parameters.values()} == {
        torch.float32}
    (fault,) = checked(made, tmp_path / "half.safetensors", lora={"rank": 2}).faults
    assert fault.message.endswith("but lora.alpha is 2") and fault.hint == "--set lora.alpha=3"
    assert "half.safetensors has alpha 3 in " in fault.message


def test_tensors_of_text_encoders_are_left_out_with_a_note(trained, tmp_path):
    made, run = trained
    tensors = load_file(run / "lora.safetensors")
    tensors["lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = torch.zeros(2, 8)
    save_file(tensors, tmp_path / "both.safetensors")
    report = checked(made, tmp_path / "both.safetensors", lora={"rank": 2})
    assert report.faults == ()
    assert report.notes == ("both.safetensors also adapts text encoders; 1 of its tensors are not used",)
    assert same(create_state(report.setup, CPU).denoiser.parameters, run / "lora.safetensors")


def test_other_layers_ranks_and_alphas_are_refused_with_the_setting_that_fits(trained):
    made, run = trained
    (fault,) = checked(made, run, lora={"rank": 4}).faults
    assert fault.message.startswith(f"{run}/checkpoints/step-000002/lora.safetensors has rank 2 in ")
    assert fault.message.endswith("but lora.rank is 4") and fault.hint == "--rank 2" and fault.exit_code == 3
    (fault,) = checked(made, run, lora={"rank": 2, "targets": "all-linear"}).faults
    assert " layers, like " in fault.message and "which are not those of lora.targets 'all-linear'" in fault.message
    assert fault.hint == "--set lora.targets=attention"
    (fault,) = checked(made, run, lora={"rank": 2, "targets": ["to_q"]}).faults
    assert fault.hint == "--set lora.targets=attention"


@pytest.mark.slow
def test_ranks_by_layer_and_convolutions_are_compared(make, setup_of, tmp_path):
    made = make()
    plain = {"rank": 2, "conv_rank": 4, "conv_alpha": 6.0, "targets": "kohya-conv"}
    both = {"kohya": {**plain, "format": "kohya", "layers": [{"match": "to_q", "rank": 3}]},
            "diffusers": {**plain, "format": "diffusers", "layers": [{"match": "to_q", "rank": 3, "alpha": 1.0}],
                          "rslora": True}}
    for layout, settings in both.items():
        go(setup_of(made, **QUICK, lora=settings), tmp_path / layout)
        assert len(begun(made, tmp_path / layout, lora=settings).denoiser.parameters) > 100
        (fault,) = checked(made, tmp_path / layout, lora={**settings, "conv_rank": 5}).faults
        assert re.search(r" has rank 4 in \S+, but lora.conv_rank is 5$", fault.message)
        assert fault.hint == "--set lora.conv_rank=4"
        (fault,) = checked(made, tmp_path / layout, lora={**settings, "conv_alpha": 5.0}).faults
        said = (r" has alpha 12 in \S+, but lora.conv_alpha is 10 there, by lora.rslora$" if "rslora" in settings else
                r" has alpha 6 in \S+, but lora.conv_alpha is 5$")
        assert re.search(said, fault.message) and fault.hint == "--set lora.conv_alpha=6"
        assert checked(made, tmp_path / layout, lora={**settings, "layers": []}).faults


def test_files_of_other_things_are_refused(trained, tmp_path, tiny_model):
    made, run = trained
    lora = {"rank": 2}
    tensors = load_file(run / "lora.safetensors")
    first = next(name for name in tensors if name.endswith("lora_up.weight"))

    def refused(spoiled, kind, said):
        save_file(spoiled, tmp_path / "x.safetensors")
        (fault,) = checked(made, tmp_path / "x.safetensors", lora=lora).faults
        assert isinstance(fault, kind) and re.search(said, fault.message), fault.message

    refused({**tensors, "lokr_w1": torch.zeros(1)}, ModelError,
            "x.safetensors has the tensor 'lokr_w1', expected names of a LoRA of this model, like 'lora_unet_")
    refused({**tensors, first: torch.zeros(3, 2)}, ModelError,
            r"x.safetensors has shape \[3, 2\] 'up' of .*, expected shape \[\d+, 2\]")
    refused({name: value for name, value in tensors.items() if name != first}, ModelError,
            "x.safetensors has no tensor 'up' of ")
    refused({**tensors, first: torch.zeros(32, 2, dtype=torch.int64)}, ModelError,
            f"has '{first}' of dtype I64, expected")
    (fault,) = checked(made, run / "lora.safetensors", method="full").faults
    assert "does not fit the denoiser: '" in fault.message and "is missing, expected shape [" in fault.message
    weights = load_file(tiny_model / "unet" / "diffusion_pytorch_model.safetensors")
    save_file({**weights, "more": torch.zeros(1)}, tmp_path / "x.safetensors")
    (fault,) = checked(made, tmp_path / "x.safetensors", method="full").faults
    assert fault.message.endswith("does not fit the denoiser: the model has no 'more'")


def test_weights_of_another_model_or_prediction_are_noted(trained, make, setup_of, tmp_path):
    made, run = trained
    lora = {"rank": 2}
    assert not [note for note in checked(made, run / "lora.safetensors", lora=lora).notes if "was trained" in note]
    found = checked(made, run / "lora.safetensors", prediction="v_prediction", lora=lora).notes
    assert "lora.safetensors was trained to predict epsilon, and this run trains it to predict v_prediction" in found
    other = tmp_path / "lora.safetensors"
    tensors = load_file(run / "lora.safetensors")
    with safe_open(run / "lora.safetensors", "pt") as file:
        metadata = {**file.metadata(), "latentry.base": "{}"}
    save_file(tensors, other, metadata)
    assert "lora.safetensors was trained on another model than the one that this run trains" in checked(
        made, other, lora=lora).notes
    save_file(tensors, other)  # another program's says nothing of it
    assert not [note for note in checked(made, other, lora=lora).notes if "was trained" in note]


def test_places_without_weights_are_refused(trained, tmp_path, tiny_model):
    made, _ = trained
    (fault,) = checked(made, tmp_path / "gone").faults
    assert isinstance(fault, PathError)
    assert fault.message == (f"--init-from {tmp_path / 'gone'} does not exist, expected a .safetensors file, a run, "
                             "one of its checkpoints, or a diffusers directory")
    (tmp_path / "x.ckpt").write_bytes(b"x")
    (fault,) = checked(made, tmp_path / "x.ckpt").faults
    assert "x.ckpt is not a safetensors file, expected" in fault.message
    (fault,) = checked(made, trained[1], method="full").faults
    assert fault.message.endswith("is a LoRA, but method is 'full'") and "train merge" in fault.hint
    (fault,) = checked(made, tiny_model).faults
    assert "tiny has no lora.safetensors, expected" in fault.message and "--model" in fault.hint
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    (fault,) = checked(made, tmp_path / "torn.safetensors").faults
    assert isinstance(fault, CacheError) and fault.hint == "name an undamaged file of weights"


def test_weights_that_change_after_the_check_are_refused(trained, tmp_path):
    made, run = trained
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((run / "lora.safetensors").read_bytes())
    setup = checked(made, copy, lora={"rank": 2}).setup
    copy.write_bytes(copy.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ModelError, match=r"copy.safetensors cannot be used: its bytes do not match their digest"):
        create_state(setup, CPU)


@pytest.mark.parametrize("place", ["", "checkpoints/{}", "checkpoints/{}/lora.safetensors"])
def test_a_checkpoint_whose_weights_are_not_those_that_were_saved_is_refused(trained, tmp_path, place):
    made, run = trained
    shutil.copytree(run, tmp_path / "run")
    (step,) = (tmp_path / "run/checkpoints").iterdir()
    weights = step / "lora.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    report = checked(made, tmp_path / "run" / place.format(step.name), lora={"rank": 2})
    (fault,) = report.faults
    assert fault.message == f"{weights} is damaged: its bytes do not match the digest in state.json of its checkpoint"
    assert "--resume" not in fault.hint and report.setup is None
    (step / "state.json").unlink()
    assert not checked(made, weights, lora={"rank": 2}).faults, "a file of its own has no digest"


def test_a_resumed_run_has_its_own_weights(train, trained, tmp_path):
    made, run = trained
    result = train("run", made.path, "-o", run, "--resume", "--init-from", run)
    assert result.code == 2
    assert result.err == ("error: --init-from is given with --resume, but a resumed run has its own weights\n"
                          "hint: omit one of them\n")
