"""Stochastic rounding to bfloat16: exact in the mean, by keyed bits, and never to what is no number."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.optim.rounding import LARGEST, Rounding, rounded

CPU = torch.device("cpu")
MANY = 20_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def neighbours(number):
    """The numbers of bfloat16 that a float32 lies between, by its bits: itself twice, if it is one of them."""
    bits, = struct.unpack("<I", struct.pack("<f", number))
    low = bits & 0xFFFF0000
    high = low + 0x10000 if bits != low else low
    return tuple(struct.unpack("<f", struct.pack("<I", each))[0] for each in (low, high))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 1000))
def test_each_number_becomes_one_of_its_neighbours_as_often_as_it_is_near(number, seed):
    """Whole range, also subnormal: the mean of many is the number, up to five deviations of chance."""
    near, far = neighbours(number)
    found = rounded(torch.full((MANY,), number), generator(seed)).double()
    if abs(number) >= LARGEST:
        assert set(found.tolist()) == {float(torch.tensor(LARGEST).double()) * (1 if number > 0 else -1)}
        return
    assert set(found.tolist()) <= {near, far}
    upward = 0.0 if near == far else (number - near) / (far - near)
    chance = (upward * (1 - upward) / MANY) ** 0.5
    assert abs(float((found == far).double().mean() if near != far else 0.0) - upward) <= 5 * chance + 1e-12


def test_what_is_no_number_stays_so():
    """Infinite and NaN, of any bits; and zeros keep their sign."""
    odd = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    for seed in range(20):
        found = rounded(odd, generator(seed))
        assert torch.equal(found.view(torch.int16), odd.bfloat16().view(torch.int16))
        nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
        assert nan.isnan().all() and rounded(nan, generator(seed)).isnan().all()


def test_what_bfloat16_holds_stays_as_it_is():
    """Every number of bfloat16."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found, numbers = rounded(every.float(), generator()), ~every.isnan()
    assert torch.equal(found[numbers].view(torch.int16), every[numbers].view(torch.int16))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5, 7)])
def test_shapes_stay(shape):
    assert rounded(torch.rand(shape), generator()).shape == shape


def test_the_bits_depend_on_seed_step_and_name_alone():
    """Not on what was rounded before, nor on the order in memory."""
    values = torch.randn(4, 6, 5, 5, generator=generator())

    def put(rounding, name="a", step=3, given=values):
        target = torch.empty_like(given, dtype=torch.bfloat16)
        rounding.put(target, given, name, step)
        return target

    first, used = Rounding(7, CPU), Rounding(7, CPU)
    wanted = put(first)
    others = [put(used, "b"), put(used, step=4), put(Rounding(8, CPU))]
    assert torch.equal(put(used), wanted) and not any(torch.equal(each, wanted) for each in others)
    assert torch.equal(put(used, given=values.to(memory_format=torch.channels_last)), wanted)
