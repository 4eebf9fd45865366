"""Training adapters of random values, and steps compared with those of a textbook."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from train.models import lora
from train.state import create_state


def scattered(parameters, seed):
    """Gives parameters random values."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in parameters.values():
            value.normal_(std=0.3, generator=stream)


def training_adapter(setup, path, seed=1):
    """Writes a file like the result of this run; its path as text."""
    found, chosen, naming = create_state(setup, torch.device("cpu")).denoiser, setup.config.lora, setup.model.naming
    scattered(found.parameters, seed)
    save_file(lora.pack(found.weights, chosen, naming), path, metadata=lora.describe(found.weights, chosen, naming))
    return str(path)


def require_textbook(each, parameters, total, losses, gradients):
    """A micro-batch of half a step has the losses `each` of a textbook, and the gradients that these have in its
    `parameters`."""
    assert torch.allclose(losses, each, atol=1e-5)
    assert float(total) == pytest.approx(0.5 * float(each.detach().sum()))
    (0.5 * each.sum() / 2).backward()
    for name, value in parameters.items():
        assert torch.allclose(gradients[name], value.grad, rtol=1e-3, atol=1e-6), name
