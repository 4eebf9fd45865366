"""Going on with a run: what decides the steps is compared, not the bytes of the manifest."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from runs import go
from safetensors.torch import load_file

from prep.errors import CacheError
from prep.fs.place import Local
from prep.manifest.document import write_manifest
from prep.runs.documents import with_checksum
from train.check import check
from train.runs import checkpoint_files as files
from train.runs.directory import claim_run
from train.runs.resume import compare, find_start
from train.state_files import state_of


@pytest.fixture
def begun(make, setup_of, tmp_path):
    """What was made, its setup, and `again(**settings)`: a checkpoint at step 4, compared with other settings."""
    made = make()
    setup = setup_of(made, steps=8)
    claim_run(Local(tmp_path / "run"), setup)
    files.save(tmp_path / "run", state_of(setup, 4), [], keep=0)

    def again(adopt=False, setup=None, **settings):
        return compare(find_start(Local(tmp_path / "run")), setup or setup_of(made, steps=8, **settings), adopt=adopt)

    return made, setup, again


def test_nothing_changed(begun):
    _, _, again = begun
    found = again()
    assert (found.faults, found.notes, found.adopted) == ((), (), ())


@pytest.mark.parametrize("what", ["prompts", "findings", "options"])
def test_a_manifest_that_differs_where_no_step_looks_is_the_same_data(begun, setup_of, what):
    """An edited prompt file, a table of findings, other options: other bytes, the same steps."""
    made, _, again = begun
    document = json.loads(json.dumps(made.manifest.document))
    if what == "prompts":
        document["prompts"]["samples"] = document["prompts"]["samples"][:1]
    elif what == "findings":
        document["rejected"] = 1
    else:
        document["options"] = []
    changed = write_manifest(made.path, document)
    assert changed.digest != made.manifest.digest
    found = again(setup=setup_of(replace(made, manifest=changed), steps=8))
    assert (found.faults, found.notes) == ((), ())


def test_other_data_are_refused_in_numbers_and_adopted_on_request(begun, setup_of, tmp_path_factory, tiny_model):
    from real_manifest import build

    _, _, again = begun
    other = build(tmp_path_factory.mktemp("other"), tiny_model, counts=(4, 2))
    (fault,) = again(setup=setup_of(other, steps=8)).faults
    assert fault.message.startswith("the data differ from those that step-000004 was trained on: ")
    assert fault.message.endswith("1 sample removed")
    assert fault.exit_code == 7 and "--adopt" in fault.hint
    found = again(setup=setup_of(other, steps=8), adopt=True)
    assert found.faults == () and found.adopted[0].endswith("1 sample removed")


def test_without_the_record_of_samples_their_numbers_are_told(begun, setup_of, tmp_path, tmp_path_factory, tiny_model):
    from real_manifest import build

    _, _, again = begun
    (tmp_path / "run" / "samples.bin").write_bytes(b"damaged")
    other = build(tmp_path_factory.mktemp("other"), tiny_model, counts=(4, 2))
    (fault,) = again(setup=setup_of(other, steps=8)).faults
    assert fault.message.endswith("trained on: 8 samples instead of 9 (it cannot be told which ones, since "
                                  "samples.bin, the run's list of them, is missing or damaged)")


def test_masks_switched_on_are_other_data(begun, setup_of):
    _, _, again = begun
    (fault,) = again(loss={"masked": False}).faults
    assert fault.message.endswith("was trained on: use of masks: off, was on; 6 samples changed")


def test_another_base_is_refused(begun):
    _, setup, again = begun
    other = replace(setup, model=replace(setup.model, base={**setup.model.base, "denoiser": "f" * 64}))
    (fault,) = again(setup=other).faults
    assert "the denoiser of " in fault.message and "differs from that of step-000004: it is ffffffffffff, " \
        "expected " in fault.message and fault.exit_code == 6
    found = again(setup=other, adopt=True)
    assert found.faults == () and found.adopted[0].startswith("denoiser ffffffffffff, was ")


def test_settings_that_decide_weights_may_not_change_unless_adopted(begun):
    _, _, again = begun
    (fault,) = again(caption_dropout=0.5).faults
    assert fault.message == "caption_dropout is 0.5, but the checkpoint was trained with 0.0"
    assert fault.exit_code == 3 and fault.hint.endswith("add --adopt to accept the change and continue")
    assert again(caption_dropout=0.5, adopt=True).adopted == ("caption_dropout is 0.5, was 0.0",)


@pytest.mark.parametrize(("settings", "note"), [
    ({"loss": {"huber": 0.1}}, "loss.huber puts the losses of training and validation on another scale: those after "
     "step 4 do not compare with those before"),
    ({"loss": {"min_snr": 5.0}}, "loss.min_snr puts the losses of training on another scale: those after step 4 do not "
     "compare with those before"),
    ({"loss": {"weighting": "debiased", "normalize_area": True, "huber": 0.1}}, "loss.normalize_area, loss.huber and "
     "loss.weighting put the losses of training and validation on another scale: those after step 4 do not compare "
     "with those before"),
    ({"loss": {"masked": False}}, "use of masks puts the losses of training and validation on another scale: those "
     "after step 4 do not compare with those before"),
    ({"prediction": "epsilon"}, None), ({"caption_dropout": 0.5}, None)])
def test_an_adopted_loss_is_on_another_scale(begun, settings, note):
    _, _, again = begun
    found = again(adopt=True, **settings)
    assert found.faults == () and found.notes == (() if note is None else (note,))
    assert again(**settings).notes == ()


def test_settings_that_decide_shapes_are_never_adopted(begun):
    _, _, again = begun
    for adopt in (False, True):
        (fault,) = again(lora={"rank": 4, "alpha": 16}, adopt=adopt).faults
        assert fault.message == ("lora.rank is 4, but the checkpoint was trained with 16; lora.conv_rank is 4, but the "
                                 "checkpoint was trained with 16")
        assert fault.hint == ("resume with the run's settings (omit --rank, or else -c or --set), or choose another "
                              "RUN with -o")


@pytest.mark.parametrize(("settings", "omit"), [
    ({"seed": 4}, "--seed, or else -c or --set"), ({"batch_size": 8}, "--batch-size, or else -c or --set"),
    ({"precision": "bf16"}, "--precision, or else -c or --set"), ({"caption_dropout": 0.5}, "-c and --set")])
def test_the_option_to_omit_is_named(begun, settings, omit):
    _, _, again = begun
    found = [fault.hint for fault in again(**settings).faults]
    assert f"resume with the run's settings (omit {omit}), or add --adopt to accept the change and continue" in found


def test_a_setting_that_was_not_set_is_told_in_words(begun):
    _, _, again = begun
    assert again(sample={"sampler": "DDIMScheduler"}).notes == ("sample.sampler is 'DDIMScheduler', was not set",)


Q, K = {"match": "to_q"}, {"match": "to_k"}
LAYERS = [{**Q, "lr": 0.01}, {**K, "rank": 4, "lr": 0.02}, {"match": "to_v", "rank": 4}]  # of a run with rank 2


@pytest.fixture
def of_layers(make, setup_of, tmp_path):
    """`again(layers)`: a checkpoint with `LAYERS` at step 4, compared with other rules; `start(...)` says with which
    optimizer it was made."""
    made = make()

    def settings(layers, name):
        return {"steps": 8, "optimizer": {"name": name}, "lora": {"rank": 2, "format": "diffusers", "layers": layers}}

    def start(name="adamw"):
        setup = setup_of(made, **settings(LAYERS, name))
        claim_run(Local(tmp_path / "run"), setup)
        files.save(tmp_path / "run", state_of(setup, 4), [], keep=0)
        return lambda layers, adopt=False: compare(
            find_start(Local(tmp_path / "run")), setup_of(made, **settings(layers, name)), adopt=adopt)

    return start


@pytest.mark.parametrize("layers", [
    [{**Q, "lr": 0.001}, *LAYERS[1:]], [{**Q, "lr": 0.02}, *LAYERS[1:]], LAYERS[1:], LAYERS[::-1],
    [*LAYERS, {"match": "to_out.0", "lr": 0.1}]], ids=["other", "shared", "removed", "order", "added"])
def test_the_learning_rates_of_layers_may_change(of_layers, layers):
    found = of_layers()(layers)
    assert found.faults == found.adopted == () and found.notes == (f"lora.layers is {layers}, was {LAYERS}",)


@pytest.mark.parametrize("layers", [
    [{**Q, "rank": 3, "lr": 0.01}, *LAYERS[1:]], [*LAYERS[:2]], [LAYERS[0], {**K, "lr": 0.02}, *LAYERS[1:]],
    [{"match": "re:to_", "lr": 0.01}, *LAYERS]], ids=["other", "removed", "covered", "covered by one for all"])
def test_layers_of_another_rank_are_another_run(of_layers, layers):
    again = of_layers()
    for adopt in (False, True):
        (fault,) = again(layers, adopt).faults
        assert fault.message == f"lora.layers is {layers}, but the checkpoint was trained with {LAYERS}"
        assert fault.hint == "resume with the run's settings (omit -c and --set), or choose another RUN with -o"


def test_layers_of_another_alpha_are_adopted_on_request(of_layers):
    again, layers = of_layers(), [{**Q, "alpha": 1.0, "lr": 0.01}, *LAYERS[1:]]
    (fault,) = again(layers).faults
    assert fault.message == f"lora.layers is {layers}, but the checkpoint was trained with {LAYERS}"
    assert fault.hint.endswith("add --adopt to accept the change and continue")
    found = again(layers, adopt=True)
    assert found.faults == () and found.adopted == (f"lora.layers is {layers}, was {LAYERS}",)
    assert again([{**Q, "alpha": 2.0, "lr": 0.01}, *LAYERS[1:]]).faults == (), "alpha as it was"


def test_an_optimizer_that_sums_over_layers_of_a_rate_keeps_them_together(of_layers):
    """Schedule-free: numbers of the group weigh each step's weights, and two groups have no common ones."""
    again = of_layers("adamw-schedule-free")
    other = [{**Q, "lr": 0.02}, {**K, "rank": 4, "lr": 0.01}, LAYERS[2]]
    assert again(other).faults == () and again(other).notes == (f"lora.layers is {other}, was {LAYERS}",)
    for layers in ([{**Q, "lr": 0.02}, *LAYERS[1:]], [*LAYERS, {"match": "to_out.0", "lr": 0.1}], LAYERS[1:]):
        for adopt in (False, True):
            (fault,) = again(layers, adopt).faults
            assert fault.message == (f"lora.layers is {layers}, was {LAYERS}: other layers share a learning rate than "
                                     "in the checkpoint, but 'adamw-schedule-free' keeps sums over the steps for those "
                                     "that share one")
            assert fault.exit_code == 3 and fault.hint == (
                "rates may change, but layers with the same rate need the same one, and others another; or choose "
                "another RUN with -o")


def test_settings_that_may_change_are_noted(begun):
    _, _, again = begun
    found = again(sample={"every": 7}, checkpoint={"keep": 1}, optimizer={"lr": 0.5})
    assert found.faults == () and "optimizer.lr is 0.5, was 0.0001" in found.notes and len(found.notes) == 3


def test_a_smaller_micro_batch_cuts_forward_passes_and_no_steps(begun, setup_of):
    _, setup, again = begun
    found = again(setup=replace(setup, config=replace(setup.config, micro_batch=2)))
    assert found.notes == ("micro_batch is 2, was 4; the steps keep their planned micro-batch of 4",)
    found = again(setup=replace(setup, plan=replace(setup.plan, micro_batch=2),
                                config=replace(setup.config, micro_batch=1)))
    assert found.notes[0].startswith("micro_batch is 1, was 4; the steps keep their planned micro-batch of 2")


def test_a_cosine_schedule_is_stretched_and_says_so(make, setup_of, tmp_path):
    made = make()
    cosine = {"schedule": {"name": "cosine"}}
    setup = setup_of(made, steps=8, **cosine)
    claim_run(Local(tmp_path / "run"), setup)
    files.save(tmp_path / "run", state_of(setup, 4), [], keep=0)
    found = compare(find_start(Local(tmp_path / "run")), setup_of(made, steps=16, **cosine), adopt=False)
    assert found.notes == ("steps is 16, was 8; the cosine schedule is stretched from step 4 on",)


def test_settings_of_a_start_without_a_checkpoint_are_taken_back_and_it_says_so(make, setup_of, tmp_path):
    """The run was resumed with a smaller rate, and killed before it saved anything."""
    made = make()
    setup, slower = setup_of(made, steps=8), setup_of(made, steps=8, optimizer={"lr": 1e-6})
    claim_run(Local(tmp_path / "run"), setup)
    files.save(tmp_path / "run", state_of(setup, 4), [], keep=0)
    assert compare(find_start(Local(tmp_path / "run")), setup, adopt=False).notes == ()
    claim_run(Local(tmp_path / "run"), slower, step=4)
    assert compare(find_start(Local(tmp_path / "run")), setup, adopt=False).notes == (
        "optimizer.lr is 0.0001, as in step-000004; the run was last started with 1e-06, which takes an option again",)
    assert compare(find_start(Local(tmp_path / "run")), slower, adopt=False).notes == (
        "optimizer.lr is 1e-06, was 0.0001",)


def test_a_run_of_an_earlier_version_lacks_settings_and_nothing_is_said_of_it(make, setup_of, tmp_path):
    setup = setup_of(make(), steps=8)
    claim_run(Local(tmp_path / "run"), setup)
    files.save(tmp_path / "run", state_of(setup, 4), [], keep=0)
    for path in (tmp_path / "run" / "run.json", tmp_path / "run" / "checkpoints" / "step-000004" / "state.json"):
        document = json.loads(path.read_text())
        for name in ("offload", "attention"):
            del document["config"][name]
        del document["self"]
        path.write_bytes(with_checksum(document))
    assert compare(find_start(Local(tmp_path / "run")), setup, adopt=False).notes == ()


def test_a_run_that_is_further_than_the_settings_end(begun, setup_of, tmp_path):
    made, _, again = begun
    (fault,) = again(setup=setup_of(made, steps=3)).faults
    assert fault.message == f"{tmp_path / 'run'} is already at step 4, but the settings end at step 3"
    assert fault.hint == "--steps 4 or more, or another RUN with -o"


def test_settings_in_a_checkpoint_that_are_none_of_ours(begun, tmp_path):
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "state.json"
    body = json.loads(path.read_text())
    body.pop("self")
    path.write_bytes(with_checksum({**body, "config": {"lora": {"rank": 1 << 60}}}))
    with pytest.raises(CacheError, match=r"state.json: lora.rank is \d+, expected 1 to 4096|expected a ") as caught:
        find_start(Local(tmp_path / "run"))
    assert caught.value.hint.startswith("another version of this program may have written it; ")


def test_a_checkpoint_of_version_1_goes_on_with_its_manifest_alone(begun, setup_of, tmp_path, monkeypatch):
    """It has the digest of the manifest and no other identity."""
    monkeypatch.setattr("train.runs.resume.MEANING", 1)
    made, _, again = begun
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "state.json"
    body = json.loads(path.read_text())
    body["config"]["loss"]["masked"] = True
    path.write_text(json.dumps({"format": "latentry/checkpoint", "version": 1,
                                **{name: body[name] for name in ("step", "manifest", "config")}}))
    found = again()
    assert found.faults == ()
    assert found.notes == ("step-000004 is of version 1, which has no digests: damage in it cannot be detected",)
    (fault,) = again(loss={"masked": False}).faults
    assert fault.message.endswith("was trained on: use of masks: off")
    changed = write_manifest(made.path, {**made.manifest.document, "rejected": 1})
    (fault,) = again(setup=setup_of(replace(made, manifest=changed), steps=8)).faults
    assert f"was trained on: manifest {changed.digest[:12]}, was {made.manifest.digest[:12]}" in fault.message


def test_a_checkpoint_with_another_meaning_of_the_loss_is_refused_unless_adopted(begun, tmp_path):
    """Earlier versions divided by the cells of a step, so the steps to come would not be those of the run."""
    _, _, again = begun
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "state.json"
    body = json.loads(path.read_text())
    body = {name: body[name] for name in body if name not in ("self", "init", "meaning")}
    path.write_bytes(with_checksum({**body, "version": 2}))
    (fault,) = again().faults
    assert fault.message == ("step-000004 was trained by an earlier version, in another way. Now the loss of a "
                             "step is the sum of its samples' means, divided by batch_size; was: the loss of a step is "
                             "the mean over its cells")
    assert fault.exit_code == 3
    assert fault.hint == "resume with that version, or add --adopt to accept the change and continue"
    found = again(adopt=True)
    assert found.faults == () and found.adopted[0].startswith("the loss of a step is the sum of its samples' means")


def test_the_hint_for_changed_data_resumes_with_the_manifest_as_it_was(begun, setup_of):
    """After `prep encode` has written another manifest over the one that the run began with."""
    made, setup, again = begun
    document = json.loads(json.dumps(made.manifest.document))
    empty = document["prompts"]["unconditional"]
    document["prompts"]["unconditional"] = {**empty, "row": int(not empty["row"])}
    (fault,) = again(setup=setup_of(replace(made, manifest=write_manifest(made.path, document)), steps=8)).faults
    copying = re.search("as it was: (cp .*[.]json), and name that in place of this one", fault.hint)
    subprocess.run(shlex.split(copying[1]), check=True)
    before = made.path.with_name(f"{made.path.stem}-run.json")
    report = check(replace(setup.request, manifest=before), setup.config)
    assert again(setup=report.setup).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "mark"), [({"rank": 2, "dora": True}, "unet."), ({"rank": 2}, "lora_unet_")])
def test_a_run_that_an_earlier_version_began_keeps_its_names(make, setup_of, tmp_path, settings, mark):
    """DoRA of a UNet had diffusers' names then. Another lora.format changes them; the weights are the same."""
    made, quick = make(), {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 2, "precision": "fp32",
                           "optimizer": {"lr": 0.01}}

    def setup(steps, **more):
        return setup_of(made, **quick, steps=steps, lora={**settings, **more})

    def earlier(steps):
        found = setup(steps)
        return replace(found, model=replace(found.model, naming=found.model.naming.earlier_format()))

    go(earlier(2), tmp_path / "whole")
    go(earlier(1), tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    go(setup(2), tmp_path / "run", resume=True)
    wanted, found = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "run"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(name.startswith(mark) for name in found)
    go(setup(2, format="kohya"), tmp_path / "other", resume=True)
    assert all(name.startswith("lora_unet_") for name in load_file(tmp_path / "other" / "lora.safetensors"))
