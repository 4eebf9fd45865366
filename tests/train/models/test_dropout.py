"""Which models draw random numbers when they train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.models.denoiser import load
from train.models.dropout import has_dropout


class Function(nn.Module):
    """Drops by a function, as some of diffusers' attention does."""

    def __init__(self, dropout_p):
        super().__init__()
        self.dropout_p = dropout_p


@pytest.mark.parametrize(("model", "wanted"), [
    (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False), (nn.Sequential(nn.Sequential(nn.Dropout(0.1))), True),
    (nn.AlphaDropout(0.1), True), (Function(0.0), False), (nn.Sequential(Function(0.2)), True), (Function(None), False),
])
def test_what_drops_is_seen(model, wanted):
    assert has_dropout(model) == wanted


@pytest.mark.parametrize(("lora", "dropout"), [
    ({}, 0.0), ({}, 0.1), ({"dora": True}, 0.0), ({"dora": True}, 0.1), ({"kind": "loha"}, 0.0),
    ({"kind": "lokr"}, 0.0),
])
def test_adapters_drop_if_the_settings_say_so(make, setup_of, lora, dropout):
    setup = setup_of(make(), precision="fp32", lora={"rank": 2, "dropout": dropout, **lora})
    denoiser = load(setup.model.path, setup.config, setup.prediction, torch.device("cpu"))
    assert has_dropout(denoiser.model) == bool(dropout)
