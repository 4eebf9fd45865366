"""What tensors take in a real training step on the CPU: the steps of `train.memory.step`, with weights and rows."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from allocations import Allocations

from prep.loader import draws
from prep.loader.batches import SLOTS, batches
from prep.loader.rows import Rows
from prep.models.device.counting import Counted
from train.memory.step import ADAPTERS, AVERAGE, GRADIENTS, INPUTS, OPTIMIZER, WEIGHTS, weights_of
from train.optim.singly import at_gradients
from train.state import (
    apply_gradient,
    apply_gradients,
    clip_gradients,
    create_state,
    forward_backward,
    in_backward,
    move_averages,
)

CPU = torch.device("cpu")


def counted(setup):
    """Bytes by part at the peak of the second step; and all of them, as torch's allocator has them."""
    with Allocations() as allocations:
        parts = _counted(setup, allocations)
    return parts, allocations.peak + parts[INPUTS]  # which the loader's thread allocates


def _counted(setup, allocations):
    trainee = create_state(setup, CPU)
    trained = trainee.denoiser.parameters
    most, plan = setup.config.micro_batch, setup.plan
    passes = 2 if draws.accumulates(plan, most) else 1
    requests = iter([draws.trial(setup.index, plan, most)] * 2 * passes)
    with Counted() as mode, batches(Rows(setup.index), requests, masked=setup.masked, pinned=False) as feed:
        mode.add(WEIGHTS, weights_of(trainee.denoiser))
        if setup.config.method == "lora":
            mode.add(ADAPTERS, trainee.denoiser.weights.values())
        if trainee.average is not None:
            mode.add(AVERAGE, trainee.average.values.values())
        for parameter in trained.values():
            parameter.register_post_accumulate_grad_hook(lambda value: mode.add(GRADIENTS, [value.grad]))
        for _ in range(2):
            mode.reset_peak()
            allocations.reset_peak()
            for _ in range(passes):
                batch = next(feed)
                mode.add(INPUTS, _tensors(batch))
                with _updating(trainee, setup.config, mode):
                    forward_backward(trainee, setup.config, batch)
            with mode.making(OPTIMIZER):
                if not in_backward(setup.config):
                    clip_gradients(trainee, setup.config)
                    apply_gradients(trainee, setup, 0)
            move_averages(trainee, setup.config, 0)
        return {**mode.peak, INPUTS: SLOTS * sum(value.nbytes for value in _tensors(batch))}


@contextmanager
def _updating(trainee, config, mode):
    """Within it, a backward pass updates the weights, if the settings say so."""
    def update(name, value):
        with mode.making(OPTIMIZER):
            apply_gradient(trainee, config, 0, name, value)

    if not in_backward(config):
        yield
        return
    with trainee.singly.apart(), at_gradients(trainee.denoiser.parameters, update):
        yield


def _tensors(batch):
    """The tensors of a batch, each once; the loader's thread makes them."""
    masks = [mask for mask in (batch.inpaint_mask_BMhw,) if mask is not None]
    return [batch.latent_BChw, batch.noise_BChw, batch.sizes_B6, batch.timestep_B, batch.weight_B, *batch.text.values(),
            *batch.references, *masks]
