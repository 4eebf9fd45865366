"""The largest bucket before the first step: what memory it takes is taken, and gradient checkpointing is found out."""

from __future__ import annotations

import pytest
import torch
from runs import CPU, events, go
from safetensors.torch import load_file

from prep.errors import OutOfMemoryError
from prep.fs.place import Local
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from train import loop, trial
from train.failures import Progress
from train.parallel.ranks import Ranks
from train.runs.directory import read_run
from train.runs.resume import find_start
from train.state import create_state

QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2, "steps": 3}


@pytest.mark.parametrize(("switch", "passes", "more"), [
    (False, 1, "--set gradient_checkpointing=true"), (True, 1, "--precision bf16 (in another RUN)"),
    ("auto", 2, "--precision bf16 (in another RUN)")])
def test_the_largest_bucket_is_tried_before_the_first_step(make, setup_of, tmp_path, monkeypatch, switch, passes, more):
    """With as many samples as a forward pass of training can have, and nothing is written if it does not fit."""
    setup = setup_of(make(counts=(6, 3)), **QUICK, lora={"rank": 2}, gradient_checkpointing=switch)
    tried = []

    def too_large(trainee, setup, batch):
        tried.append(batch.latent_BChw.shape)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trial, "forward_backward", too_large)
    with pytest.raises(OutOfMemoryError) as caught:
        go(setup, tmp_path / "run")
    assert caught.value.message == ("cpu ran out of memory before step 1, trying the largest bucket, with 2 samples of "
                                    "64x64 in a forward pass")
    assert caught.value.hint == f"--micro-batch 1 or {more}"
    assert [tuple(shape) for shape in tried] == [(2, 4, 8, 8)] * passes and not (tmp_path / "run").exists()


def test_a_trial_leaves_no_gradient_and_no_moment(make, setup_of):
    setup = setup_of(make(), **QUICK, lora={"rank": 2})
    trainee = create_state(setup, CPU)
    before = {name: value.detach().clone() for name, value in trainee.denoiser.parameters.items()}
    trial.warm_up_largest_bucket(trainee, setup, Progress(device=CPU))
    for name, value in trainee.denoiser.parameters.items():
        assert torch.equal(value, before[name]) and value.grad is None and not trainee.optimizer.state.get(value)


@pytest.mark.parametrize(("batch", "held"), [(2, False), (4, True)])
def test_the_trial_holds_what_passes_before_it_have_left(make, setup_of, monkeypatch, batch, held):
    """As every pass of a step but its first: 4 bytes for each trained number, and no more when it has ended."""
    setup = setup_of(make(), **{**QUICK, "batch_size": batch}, lora={"rank": 2})
    trainee = create_state(setup, CPU)
    sizes, real = [], trial.forward_backward

    def gradients():
        found = [value.grad for value in trainee.denoiser.parameters.values() if value.grad is not None]
        return sum(grad.numel() * grad.element_size() for grad in found)

    def watched(*args):
        sizes.append(gradients())
        found = real(*args)
        sizes.append(gradients())
        return found

    for module in (loop, trial):
        monkeypatch.setattr(module, "forward_backward", watched)
    trial.warm_up_largest_bucket(trainee, setup, Progress(device=CPU))
    assert sizes == [4 * setup.model.numbers * held, 4 * setup.model.numbers] and gradients() == 0
    sizes.clear()
    with batches(Rows(setup.index), draws.training(setup.index, setup.plan, 0, 1, timesteps=1000),
                 masked=False, pinned=False) as feed:
        loop.accumulate(trainee, setup.config, feed, Progress(device=CPU))
    assert sizes[::2] == [0, 4 * setup.model.numbers][:1 + held]  # what a step's passes begin with


@pytest.fixture
def scarce(monkeypatch):
    """Memory that suffices only for passes that are recomputed; returns for each pass whether it was."""
    found, real = [], trial.forward_backward

    def forward_backward(trainee, *args):
        found.append(trainee.denoiser.model.is_gradient_checkpointing)
        if not found[-1]:
            raise torch.OutOfMemoryError
        return real(trainee, *args)

    for module in (loop, trial):
        monkeypatch.setattr(module, "forward_backward", forward_backward)
    return found


def test_auto_recomputes_if_memory_does_not_suffice_without(make, setup_of, tmp_path, scarce, monkeypatch):
    """The run says so, keeps it, and goes on with it; its steps are those of a run with enough memory."""
    made = make()
    go(setup_of(made, **QUICK, lora={"rank": 2}), tmp_path / "scarce")
    assert scarce == [False] + [True] * (1 + 3 * 2)
    warnings = [event["text"] for event in events(tmp_path / "scarce") if event["event"] == "warning"]
    assert warnings == [trial.ON]
    assert find_start(Local(tmp_path / "scarce")).config.gradient_checkpointing is True
    assert read_run(Local(tmp_path / "scarce")).config.gradient_checkpointing is True
    monkeypatch.undo()
    go(setup_of(made, **QUICK, lora={"rank": 2}), tmp_path / "enough")
    assert not [event for event in events(tmp_path / "enough") if event["event"] == "warning"]
    assert read_run(Local(tmp_path / "enough")).config.gradient_checkpointing == "auto"
    one, other = (load_file(tmp_path / name / "lora.safetensors") for name in ("scarce", "enough"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def test_all_ranks_recompute_if_one_has_to(make, setup_of, monkeypatch):
    setup = setup_of(make(), **QUICK, lora={"rank": 2})
    trainee = create_state(setup, CPU)
    monkeypatch.setattr(Ranks, "any", lambda self, flag: True)  # on another rank, memory did not suffice
    found, said = trial.tried(trainee, setup, Progress(device=CPU))
    assert found.config.gradient_checkpointing is True and said == [trial.ON]
    assert trainee.denoiser.model.is_gradient_checkpointing


def test_an_error_that_is_not_of_memory_ends_the_trial(make, setup_of, monkeypatch):
    setup = setup_of(make(), **QUICK, lora={"rank": 2})
    trainee = create_state(setup, CPU)
    monkeypatch.setattr(trial, "forward_backward", lambda *_: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        trial.tried(trainee, setup, Progress(device=CPU))
