"""Sample pictures of a run that another model draws, which is in memory only for them."""

from __future__ import annotations

import gc
import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from runs import events, go
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prep.fs.place import Local
from prep.loader.rows import Rows
from train import evaluate, sample
from train.models import denoiser
from train.runs.directory import read_run
from train.sample import SampleRequest, show
from train.sampling.prompts import cached
from train.sampling.sampler import decoded, pictures
from train.show_step import replay
from train.state import create_state

CPU = torch.device("cpu")
SETTINGS = {"steps": 2, "batch_size": 2, "lora": {"rank": 2}, "optimizer": {"lr": 0.05}, "validation": {"every": 0},
            "log": {"plot": False}, "sample": {"every": 1, "steps": 1, "size": [32, 32]}}


def changed(model, path, factor=0.5):
    """A copy of the model with other weights in its denoiser, and another noise schedule."""
    other = shutil.copytree(model, path)
    weights = other / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: value * factor for name, value in load_file(weights).items()}, weights)
    schedule = other / "scheduler" / "scheduler_config.json"
    schedule.write_text(json.dumps({**json.loads(schedule.read_text()), "beta_end": 0.03}))
    return other


@pytest.fixture
def other(tiny_model, tmp_path):
    return changed(tiny_model, tmp_path / "turbo")


def by(model, **more):
    """The settings of a run whose pictures this model draws."""
    return {**SETTINGS, **more, "sample": {**SETTINGS["sample"], "model": str(model)}}


def grid(run, step):
    return np.asarray(Image.open(run / "samples" / f"step-{step:06d}.png"))


def steps_of(run):
    """The step, loss and norm of the gradient of each step in the log."""
    return [(event["step"], event["loss"], event["grad_norm"]) for event in events(run) if event["event"] == "step"]


def warnings_of(run):
    return [event["text"] for event in events(run) if event["event"] == "warning"]


@pytest.mark.few("decay")
@pytest.mark.parametrize("more", [{}, {"ema": {"decay": 0.5}}, {"quantization": "fp8"}], ids=str)
def test_pictures_are_those_of_train_sample_with_that_model(make, setup_of, other, tmp_path, more):
    """Of a checkpoint, to the last bit; and without --model the run's own setting counts, also before training."""
    go(setup_of(make(), **by(other, **more)), tmp_path / "run")
    asked = {"run": Local(tmp_path / "run"), "which": ("before", "after")}
    named = show(SampleRequest(**asked, model=str(other)), CPU, tmp_path / "named.png")
    own = show(SampleRequest(**asked), CPU, tmp_path / "own.png")
    assert len(named.warnings) == 2 and own.warnings == ()  # a model that was typed is another than the run's
    assert all(np.array_equal(*pair) for pair in zip(named.pictures, own.pictures, strict=True))
    show(SampleRequest(run=Local(tmp_path / "run"), which=("after",)), CPU, tmp_path / "after.png")
    assert np.array_equal(grid(tmp_path / "run", 2), np.asarray(Image.open(tmp_path / "after.png")))


@pytest.mark.few("dropout")
@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2, "dropout": 0.3}, "noise": {"offset": 0.1}}], ids=str)
def test_the_steps_and_the_result_are_those_of_a_run_without(make, setup_of, other, tmp_path, more):
    made = make()
    for name, settings in (("plain", {**SETTINGS, **more}), ("drawn", by(other, **more))):
        go(setup_of(made, **settings), tmp_path / name)
    plain, drawn = tmp_path / "plain", tmp_path / "drawn"
    assert steps_of(plain) == steps_of(drawn) != [] and warnings_of(drawn) == []
    results = [load_file(run / "lora.safetensors") for run in (plain, drawn)]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert not any(np.array_equal(grid(plain, step), grid(drawn, step)) for step in (0, 1, 2))


def test_a_file_that_goes_away_is_a_warning(make, setup_of, other, tmp_path):
    """The run goes on, and draws again when it is back."""
    weights, kept = other / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "kept.safetensors"

    def watch(event):
        if event["event"] == "step":
            weights.rename(kept) if event["step"] == 1 else kept.rename(weights)

    go(setup_of(make(), **by(other)), tmp_path / "run", watch=watch)
    (said,) = warnings_of(tmp_path / "run")
    assert said.startswith("no sample pictures: ") and "turbo" in said
    assert sorted(path.name for path in (tmp_path / "run" / "samples").iterdir()) == [
        "step-000000.png", "step-000002.png"]
    assert (tmp_path / "run" / "lora.safetensors").is_file()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_let_go_when_pictures_are_made_or_fail(make, setup_of, other, tmp_path, monkeypatch, fails):
    loaded = []

    def watched(*args, **named):
        found = denoiser.load(*args, **named)
        loaded.append(weakref.ref(found.model))
        return found

    def broken(*args, **named):
        raise RuntimeError("no picture")

    def gone(event):
        if event["event"] == "step":
            assert [one() for one in loaded] == [None] * event["step"]

    monkeypatch.setattr(evaluate, "load", watched)
    if fails:
        monkeypatch.setattr(evaluate, "pictures", broken)
    before = gc.get_threshold()
    gc.set_threshold(0)  # by chance, the collector would find it
    try:
        go(setup_of(make(), **by(other)), tmp_path / "run", watch=gone)
    finally:
        gc.set_threshold(*before)
    assert len(loaded) == 3 and [one() for one in loaded] == [None] * 3
    assert warnings_of(tmp_path / "run") == ["no sample pictures: RuntimeError: no picture"] * (3 if fails else 0)


def test_no_denoiser_is_left_when_the_grid_of_a_command_is_decoded(make, setup_of, tmp_path, monkeypatch):
    loaded, calls = [], []

    def watched(*args, **named):
        found = denoiser.load(*args, **named)
        loaded.append(weakref.ref(found.model))
        return found

    def lone(latents, *args):
        gc.collect()
        calls.append(len(latents))
        assert loaded and [one() for one in loaded] == [None] * len(loaded)
        return decoded(latents, *args)

    monkeypatch.setattr(sample, "load", watched)
    monkeypatch.setattr(sample, "decoded", lone)
    made = make()
    for method in ("lora", "full"):
        folder = tmp_path / method
        go(setup_of(made, **SETTINGS, method=method), folder)
        show(SampleRequest(run=Local(folder), which=("before", "after")), CPU, tmp_path / f"{method}.png")
    assert calls == [4, 4]


def test_blocks_in_host_memory_change_no_bit(make, setup_of, other):
    """Whatever the trained model's are, and without what only a pass back needs."""
    setup = setup_of(make(), **by(other, gradient_checkpointing=True))
    drawn = []
    for offload in (0, 2):
        trainee = create_state(setup, CPU, offload=offload)
        with evaluate._drawing(trainee, setup) as denoiser:
            drawn.append(evaluate._pictures(trainee, Rows(setup.index), setup, denoiser, cached(setup.index)))
    assert all(np.array_equal(*pair) for pair in zip(*drawn, strict=True))


def test_a_rank_without_a_prompt_loads_nothing(make, setup_of, other, monkeypatch):
    setup = setup_of(make(), **by(other))
    trainee = create_state(setup, CPU)
    monkeypatch.setattr(evaluate, "load", None)
    with evaluate._drawing(trainee, setup, wanted=False) as denoiser:
        assert evaluate._pictures(trainee, Rows(setup.index), setup, denoiser, ()) == []


def test_neither_vae_nor_text_encoder_of_it_is_needed(make, setup_of, other, tmp_path):
    """The VAE is the one that made the cache."""
    setup = setup_of(make(), **by(other))
    bare = setup.model.drawing
    wanted = pictures(denoiser.load(bare, setup.config, setup.prediction, CPU, adapt=False), Rows(setup.index), bare,
                      cached(setup.index), setup.config.sample)
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.rmtree(other / part)
    go(setup_of(make(), **by(other, steps=1)), tmp_path / "run")
    assert warnings_of(tmp_path / "run") == []
    drawn = show(SampleRequest(run=Local(tmp_path / "run"), which=("before",)), CPU, tmp_path / "grid.png")
    assert all(np.array_equal(*pair) for pair in zip(drawn.pictures, wanted, strict=True))


def test_a_resumed_run_may_have_another_or_none(make, setup_of, other, tiny_model, tmp_path):
    made, third = make(), changed(tiny_model, tmp_path / "third", 0.25)
    go(setup_of(made, **SETTINGS), tmp_path / "plain")
    for step, model in ((2, other), (3, third), (4, "")):
        go(setup_of(made, **by(model, steps=step)), tmp_path / "run", resume=step > 2)
        assert read_run(Local(tmp_path / "run")).config.sample.model == str(model)
    assert warnings_of(tmp_path / "run") == []
    go(setup_of(made, **{**SETTINGS, "steps": 4}), tmp_path / "plain", resume=True)
    assert np.array_equal(grid(tmp_path / "run", 4), grid(tmp_path / "plain", 4))


def test_files_of_the_run_name_it_without_its_path(make, setup_of, other, tmp_path):
    """And a replay of steps needs none."""
    setup = setup_of(make(), **by(other))
    go(setup, tmp_path / "run")
    with safe_open(tmp_path / "run" / "lora.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["latentry.config"])["sample"]["model"] == "turbo"
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'sample.model = "turbo"' in card and str(tmp_path) not in "".join((card, *metadata.values()))
    shutil.rmtree(other)
    assert len(replay(Local(tmp_path / "run"), 1).samples) == 2
