"""Which device, and when a copy to it has arrived. CUDA is played: what is asked of it is what counts."""

from __future__ import annotations

import pytest
import torch

from prep.loader import device


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs; the list is what was done to them."""
    done = []

    class Event:
        def record(self, stream=None):
            done.append(("record", stream))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: done.append(("set", str(one))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda one=None: f"stream of {one}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return done


def test_copies_are_waited_for_on_the_gpu_they_go_to(two_gpus):
    """An event on another GPU's stream is done at once, and the buffer would be filled under the copy."""
    assert device.record_copies(torch.device("cuda:1")) is not None
    assert two_gpus == [("record", "stream of cuda:1")]
    assert device.record_copies(torch.device("cpu")) is None


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_taken_where_the_gpu_has_it_itself(monkeypatch, native):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    chosen = device.compute_dtype("auto", torch.device("cuda"))
    assert chosen == (torch.bfloat16 if native else torch.float32)
    assert device.compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert device.compute_dtype("bf16", torch.device("cpu")) == torch.bfloat16


def test_seeds_as_torch_does(monkeypatch):
    torch.manual_seed((1 << 63) + 5)
    wanted = torch.rand(3)
    device.seed((1 << 63) + 5, torch.device("cpu"))
    assert torch.equal(torch.rand(3), wanted)
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device.seed(7, torch.device("cuda", 0))
    device.seed(9, torch.device("cuda"))
    assert [one.initial_seed() for one in generators] == [7, 9]
