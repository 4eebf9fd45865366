"""Batches that the device's memory does not hold are halved; one item that does not fit is an error with a hint."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from prep.errors import OutOfMemoryError
from prep.models.device.memory import FittingBatches, is_out_of_memory, move

CPU = torch.device("cpu")


class Memory:
    """A model that holds `most` items at a time, and remembers what it was asked for."""

    def __init__(self, most: int, error: BaseException | None = None) -> None:
        self.most, self.error, self.asked = most, error or torch.OutOfMemoryError("CUDA out of memory."), []

    def __call__(self, items):
        self.asked.append(len(items))
        if len(items) > self.most:
            raise self.error
        return [item + 1 for item in items]


def test_a_batch_is_halved_until_it_fits_and_later_ones_are_cut_at_once():
    batches, model = FittingBatches(CPU, "float32"), Memory(2)
    assert batches.run(list(range(8)), model, "a row") == list(range(1, 9))
    assert model.asked == [8, 4, 2, 2, 2, 2] and (batches.refused, batches.size) == (8, 2)
    assert batches.run([5, 6, 7], model, "a row") == [6, 7, 8]
    assert model.asked[6:] == [2, 1]


def test_a_batch_that_fits_is_not_cut():
    batches, model = FittingBatches(CPU, "float32"), Memory(9)
    assert batches.run([1, 2, 3], model, "a row") == [2, 3, 4]
    assert model.asked == [3] and batches.size is None and batches.refused is None
    assert batches.run([], model, "a row") == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("HIP out of memory"), MemoryError(),
                                   RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
                                   RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate "
                                                "memory: you tried to allocate 9 bytes")])
def test_every_allocators_words(error):
    assert is_out_of_memory(error)
    assert FittingBatches(CPU, "float32").run([1, 2], Memory(1, error), "a row") == [2, 3]


@pytest.mark.parametrize(("device", "compute", "hint"), [
    ("cpu", "float32", "--compute bfloat16, a smaller --resolution or a computer with more memory"),
    ("cuda:1", "bfloat16", "a smaller --resolution or --device cpu")])
def test_one_item_that_does_not_fit(device, compute, hint):
    batches = FittingBatches(torch.device(device), compute)
    with pytest.raises(OutOfMemoryError) as caught:
        batches.run([1], Memory(0), "a picture of 64x64 pixels")
    assert caught.value.message == f"{device} has too little memory for a picture of 64x64 pixels"
    assert caught.value.hint == f"{hint}; finished rows are kept" and caught.value.exit_code == 9


def test_other_errors_stay_what_they_are():
    batches, model = FittingBatches(CPU, "float32"), Memory(1, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        batches.run([1, 2], model, "a row")
    assert model.asked == [2]


def test_the_tensors_of_a_batch_that_did_not_fit_are_gone_before_the_next_try():
    """The error's frames hold them; kept, they would take the room of the smaller batch."""
    made, alive = [], []

    def forward(items):
        alive.append([tensor() is not None for tensor in made])
        tensor = torch.zeros(len(items))
        made.append(weakref.ref(tensor))
        if len(items) > 1:
            raise torch.OutOfMemoryError
        return list(tensor)

    gc.disable()
    try:
        FittingBatches(CPU, "float32").run([1, 2, 3, 4], forward, "a row")
    finally:
        gc.enable()
    assert alive[1:3] == [[False], [False, False]]


def test_a_model_that_does_not_fit():
    class Model:
        def to(self, _device):
            raise torch.OutOfMemoryError

    with pytest.raises(OutOfMemoryError, match="cuda has too little memory for the VAE"):
        move(Model(), torch.device("cuda"), "the VAE", "bfloat16")
    assert move(torch.nn.Linear(1, 1), CPU, "the VAE", "float32").in_features == 1
