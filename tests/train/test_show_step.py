"""`train replay`: what is shown of a step is what was trained on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from real_manifest import build
from runs import events, go

from prep.errors import CacheError, UsageError
from prep.fs.place import Local
from prep.loader.draws import NO_TEXT
from prep.manifest.document import write_manifest
from train import loop
from train.check import check
from train.setup import RunRequest
from train.show_step import replay

SETTINGS = {"steps": 5, "batch_size": 4, "micro_batch": 2, "validation": {"every": 0}, "sample": {"every": 0},
            "lora": {"rank": 2}, "caption_dropout": 0.4, "timesteps": {"distribution": "logit-normal", "shift": 2.0}}


@pytest.fixture
def watched(monkeypatch):
    """The micro-batches that a run trains on, by step, with their losses."""
    drawn, gather = [], loop.accumulate

    def watch(*args):
        found = gather(*args)
        drawn.append([(number, shot, float(loss)) for number, ((shots, _), each) in enumerate(
            zip(found.parts, found.each, strict=True)) for shot, loss in zip(shots, each, strict=True)])
        return found

    monkeypatch.setattr(loop, "accumulate", watch)
    return drawn


def test_every_step_is_what_was_trained_on(make, setup_of, tmp_path, watched):
    made = make(texts=3, views=2, repeats=2)
    setup = setup_of(made, **SETTINGS)
    go(setup, tmp_path / "run")
    dropped = 0
    for step, shots in enumerate(watched, 1):
        found = replay(Local(tmp_path / "run"), step)
        assert len(found.samples) == len(shots) and found.epoch == (step - 1) // setup.plan.steps_per_epoch
        for shown, (number, shot, loss) in zip(found.samples, shots, strict=True):
            sample = made.samples[shot.sample]
            view = sample.views[shot.view - int(setup.index.samples.view_offsets[shot.sample])]
            text = shot.text - int(setup.index.samples.text_offsets[shot.sample])
            assert (shown.name, shown.forward, shown.timestep) == (sample.name, number, shot.timestep)
            assert shown.placement == view.placement
            assert shown.caption == (None if shot.text == NO_TEXT else sample.texts[text].caption)
            assert shown.loss == pytest.approx(loss, rel=1e-6) and shown.weight == shot.weight
            dropped += shown.caption is None
    assert dropped > 2


def test_the_losses_of_a_step_are_those_of_its_log(make, setup_of, tmp_path):
    go(setup_of(make(), **SETTINGS), tmp_path / "run")
    for event in events(tmp_path / "run"):
        if event["event"] == "step":
            losses = [shown.loss for shown in replay(Local(tmp_path / "run"), event["step"]).samples]
            assert sum(losses) / len(losses) == pytest.approx(event["loss"], rel=1e-5)


def test_a_step_after_a_smaller_micro_batch_is_the_planned_one(make, setup_of, tmp_path, watched):
    made = make(counts=(6, 5))
    go(setup_of(made, **{**SETTINGS, "steps": 2, "micro_batch": 4}), tmp_path / "run")
    setup = setup_of(made, **{**SETTINGS, "steps": 4, "micro_batch": 1})
    planned = check(RunRequest(manifest=made.path), setup.config, planned=4).setup
    go(replace(setup, plan=planned.plan), tmp_path / "run", resume=True)
    for step, shots in enumerate(watched, 1):
        found = replay(Local(tmp_path / "run"), step)
        assert [shown.timestep for shown in found.samples] == [shot.timestep for _, shot, _ in shots]
    assert [shown.forward for shown in found.samples] == list(range(len(found.samples)))


def test_a_step_that_is_none_is_refused(make, setup_of, tmp_path):
    go(setup_of(make(), **SETTINGS), tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        replay(Local(tmp_path / "run"), 6)
    assert caught.value.message == f"--step is 6, but {tmp_path / 'run'} has steps 1 to 5"


def test_other_data_are_noticed_and_unrecorded_steps_have_no_loss(make, setup_of, tmp_path):
    go(setup_of(make(), **SETTINGS), tmp_path / "run")
    (tmp_path / "run" / "losses.bin").unlink()
    assert {shown.loss for shown in replay(Local(tmp_path / "run"), 1).samples} == {None}
    go(setup_of(make(), **{**SETTINGS, "seed": 1}), tmp_path / "other")
    (tmp_path / "other" / "losses.bin").rename(tmp_path / "run" / "losses.bin")
    with pytest.raises(CacheError) as caught:
        replay(Local(tmp_path / "run"), 1)
    assert caught.value.message == (f"step 1 of {tmp_path / 'run'} was trained on other samples or timesteps than its "
                                    "data and settings give now")
    assert caught.value.exit_code == 7 and "--manifest" in caught.value.hint


def test_a_step_before_an_accepted_change_has_a_warning(train, make, setup_of, tmp_path):
    """The captions of such a step cannot be told: only samples and timesteps are recorded."""
    made = make()
    go(setup_of(made, **{**SETTINGS, "steps": 2}), tmp_path / "run")
    change = {"step": 2, "changes": ["caption_dropout is 1.0, was 0.4"]}
    setup = replace(setup_of(made, **{**SETTINGS, "steps": 4, "caption_dropout": 1.0}), adopted=(change,))
    go(setup, tmp_path / "run", resume=True, adopt=True)
    (warning,) = replay(Local(tmp_path / "run"), 2).warnings
    assert warning == ("step 2 was trained before --adopt accepted, after step 2: caption_dropout is 1.0, was 0.4; "
                       "what is shown here has this change")
    assert replay(Local(tmp_path / "run"), 3).warnings == ()
    done = train("replay", tmp_path / "run", "--step", 1)
    assert done.code == 0 and "warning: step 1 was trained before --adopt accepted" in done.err


def refused(run, step, manifest=None):
    with pytest.raises(CacheError) as caught:
        replay(Local(run), step, manifest)
    begin = f"step {step} of {run} was trained on other samples or timesteps than its data and settings give now"
    assert caught.value.message.startswith(begin)
    return caught.value.message.removeprefix(begin), caught.value.hint


def test_settings_that_were_accepted_since_are_named(make, setup_of, tmp_path):
    made, run = make(), tmp_path / "run"
    go(setup_of(made, **{**SETTINGS, "steps": 2}), run)
    go(setup_of(made, **{**SETTINGS, "steps": 4, "seed": 1}), run, resume=True, adopt=True)
    assert refused(run, 1) == (
        "; after step 2, --adopt accepted: seed is 1, was 0",
        "steps that were trained with other settings cannot be replayed; those after step 2 can")
    assert replay(Local(run), 3).warnings == ()


def test_data_that_were_accepted_since_are_named_and_the_earlier_ones_taken(
        make, setup_of, tmp_path, tmp_path_factory, tiny_model):
    made, run = make(), tmp_path / "run"
    other = build(tmp_path_factory.mktemp("other"), tiny_model, counts=(1, 2))
    go(setup_of(made, **{**SETTINGS, "steps": 2}), run)
    before = [replay(Local(run), step).samples for step in (1, 2)]
    go(setup_of(other, **{**SETTINGS, "steps": 4}), run, resume=True, adopt=True)
    told, hint = refused(run, 1)
    assert told == "; after step 2, --adopt accepted: 4 samples removed; 2 samples changed"
    assert hint == "name the manifest that it was trained with: --manifest"
    for step in (1, 2):
        found = replay(Local(run), step, made.path)
        assert found.samples == before[step - 1]
        assert found.warnings == (f"the data of {made.path} are not those of the run's last start: captions and crops "
                                  "may be others than were trained",)
    told, hint = refused(run, 3, made.path)
    assert told == f"; the data of {made.path} are not those of the run's last start"
    assert hint == "name the manifest that it was trained with: --manifest"


def test_a_manifest_that_was_written_anew_is_named(make, setup_of, tmp_path):
    """Also if samples and timesteps are the same: their captions may not be."""
    made, run = make(), tmp_path / "run"
    go(setup_of(made, **SETTINGS), run)
    document = json.loads(json.dumps(dict(made.manifest.document)))
    document["latents"]["scaling_factor"] = "0.25"
    write_manifest(made.path, document)
    assert replay(Local(run), 1).warnings == ()  # by the run's own copy of what it was trained on
    (warning,) = replay(Local(run), 1, made.path).warnings
    made.path.unlink()
    assert replay(Local(run), 1).warnings == ()
    assert warning == (f"the data of {made.path} are not those of the run's last start: captions and "
                       "crops may be others than were trained")


def test_the_command_prints_a_sample_in_three_lines(train, make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, **SETTINGS), tmp_path / "run")
    done = train("replay", tmp_path / "run", "--step", 2)
    head, name, details, caption, *_ = done.out.splitlines()
    assert head == "step 2, in epoch 0" and name in {sample.name for sample in made.samples}
    assert details.startswith("  forward pass 1, bucket ") and ", timestep " in details and ", loss " in details
    assert caption.startswith(("  caption: ", "  without its caption"))
    assert train("replay", tmp_path / "run", "--step", 9).code == 2
