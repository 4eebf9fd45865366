"""What part of a run validates and draws, estimated before it and counted in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runs import go

from prep.training.schema import Evaluating, Validation
from train import state, validate
from train.check.shares import notes_on_shares, shares_of
from train.objectives import forward, slider

PLAIN = {"batch_size": 4, "micro_batch": 2, "lora": {"rank": 2}, "sample": {"every": 0}}


@pytest.mark.parametrize(("settings", "references"), [
    ({}, ()), ({}, ((48, 64), (32, 32))), ({"gradient_checkpointing": True}, ()),
    ({"validation": {"every": 2, "most": 1}}, ())], ids=str)
def test_validation_takes_the_passes_that_it_is_said_to(make, setup_of, tmp_path, monkeypatch, settings, references):
    """Pixels of all passes, over whole epochs."""
    setup = setup_of(make(references=references), **{
        **PLAIN, "epochs": 3, "validation": {"every": 2, "timesteps": 3}, **settings})
    passed = {state: 0, validate: 0}
    for module in passed:
        def counted(denoiser, batch, *rest, plain=module.forward, module=module, **named):
            passed[module] += sum(each[:, 0].numel() for each in (batch.latent_BChw, *batch.references))
            return plain(denoiser, batch, *rest, **named)

        monkeypatch.setattr(module, "forward", counted)
    monkeypatch.setattr("train.trial.warm_up_largest_bucket", lambda *_: None)
    found = shares_of(setup)
    go(setup, tmp_path / "run")
    assert found.validation / found.training == pytest.approx(
        passed[validate] / passed[state] / (4 if "gradient_checkpointing" in settings else 3))
    assert found.sampling == 0 and found.training + found.validation == pytest.approx(1)


def test_pictures_count_their_steps_and_guidance(make, setup_of):
    made, plain = make(), {**PLAIN, "steps": 100, "validation": {"every": 0}}

    def ratio(**sample):
        found = shares_of(setup_of(made, **{**plain, "sample": {"every": 10, "size": [64, 64], **sample}}))
        assert (found.samplings, found.validation) == (0 if sample.get("every") == 0 else 11, 0)
        return found.sampling / found.training

    once = ratio(steps=5, guidance=1.0)
    assert ratio(steps=10, guidance=1.0) == pytest.approx(2 * once) == ratio(steps=5, guidance=7.5)
    assert ratio(steps=5, guidance=1.0, size=[128, 64]) == pytest.approx(2 * once)
    assert ratio(every=0) == 0


def test_pictures_count_the_references_of_their_prompts(make, setup_of):
    """Of two prompts, one at 64x64 gets two references of its size: three times the pixels, four passes together."""
    setup = setup_of(make(), **{**PLAIN, "steps": 100, "sample": {"every": 10, "size": [64, 64]}})
    plain = shares_of(setup)
    setup.manifest.document["prompts"]["samples"][0]["references"] = [{"bucket": [64, 64]}, {"bucket": [32, 128]}]
    found = shares_of(setup)
    assert found.sampling / found.training == pytest.approx(2 * plain.sampling / plain.training)


def test_a_run_that_mostly_validates_is_said(make, setup_of):
    made = make()
    long = {**PLAIN, "steps": 50, "validation": {"every": 1, "timesteps": 100}}
    (note,) = notes_on_shares(setup_of(made, **long))
    assert note.startswith("validation takes about ") and "a longer interval (validation.every) takes less" in note
    (note,) = notes_on_shares(setup_of(made, **{**long, "validation": {"every": 0}, "sample": {"every": 2}}))
    assert note.startswith("sample pictures take about ")
    assert notes_on_shares(setup_of(made, **{**long, "validation": {"every": 25, "timesteps": 1}})) == []
    assert notes_on_shares(setup_of(made, **{**long, "steps": 2, "validation": {"every": 200}})) == [], "just ends"


def test_evaluated_checkpoints_count_as_many_pictures_as_they_have_seeds(make, setup_of):
    """One more at the end, unless that is a checkpoint to evaluate in any case."""
    setup = setup_of(make(), **{**PLAIN, "steps": 50, "validation": {"every": 0}, "checkpoint": {"every": 5},
                                "sample": {"every": 0, "size": [64, 64]}})
    assert (shares_of(setup).evaluated, shares_of(setup).evaluations, notes_on_shares(setup)) == (0, 0, [])
    for every, times in ((1, 10), (2, 5), (3, 4), (4, 3), (11, 1)):
        asked = replace(setup, config=replace(setup.config, evaluate=Evaluating(every=every, seeds=3)))
        found = shares_of(asked)
        assert times == found.evaluations == sum(asked.evaluates(step) for step in range(1, 51)), every
        assert found.evaluated == 3 * found.pictures and "evaluation of checkpoints " in found.line
        half = shares_of(replace(asked, config=replace(asked.config, evaluate=Evaluating(every=every, seeds=6))))
        assert half.evaluation / half.training == pytest.approx(2 * found.evaluation / found.training)
        most, kept = notes_on_shares(asked) if times > 1 else ("evaluating checkpoints takes about ", f"{times} ")
        assert most.startswith("evaluating checkpoints takes about ") and kept.startswith(f"{times} ")
        everything = replace(asked.config, checkpoint=replace(asked.config.checkpoint, keep=0))
        assert [most] == notes_on_shares(replace(asked, config=everything)) or times == 1


def test_few_samples_are_validated_unless_all_are_asked_for():
    assert Validation().most == 64


@pytest.mark.parametrize("settings", [
    {"slider": {"positive": "a red circle"}}, {"preserve": {"prior": True, "unmasked": 0.5, "prompted": 0.5}},
    {"slider": {"positive": "a red circle"}, "preserve": {"prompted": 0.5}, "gradient_checkpointing": True}], ids=str)
def test_what_the_base_predicts_beside_counts(make, setup_of, tmp_path, monkeypatch, settings):
    """Each prediction of a step and of a validation: three times where a backward pass follows, four if recomputed."""
    setup = setup_of(make(), **{**PLAIN, "epochs": 1, "validation": {"every": 100, "timesteps": 3}, **settings})
    cost, passed = 4 if "gradient_checkpointing" in settings else 3, {True: 0, False: 0}
    for module in (forward, slider):
        def counted(denoiser, noised_BChw, *rest, plain=module.predict, **named):
            backward = torch.is_grad_enabled()
            passed[denoiser.model.training] += noised_BChw[:, 0].numel() * (cost if backward else 1)
            return plain(denoiser, noised_BChw, *rest, **named)

        monkeypatch.setattr(module, "predict", counted)
    monkeypatch.setattr("train.trial.warm_up_largest_bucket", lambda *_: None)
    found = shares_of(setup)
    go(setup, tmp_path / "run")
    assert found.validation / found.training == pytest.approx(passed[False] / passed[True])
