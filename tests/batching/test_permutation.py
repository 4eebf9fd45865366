"""Keyed draws: permutations that look like chance, keys that never alias, a choice of validation that stays."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from math import factorial, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.batching.permutation import permute, permute_each
from prep.batching.rng import draw_key, philox, plan_key
from prep.batching.split import MEANING, choose_validation
from prep.digest import digest_json
from prep.errors import ConfigError

DIGESTS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(200)]


@given(st.integers(1, 3000), st.binary(min_size=1, max_size=40))
def test_a_permutation_reaches_everything_once(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 2**62), st.integers(0, 2**62), st.binary(min_size=1, max_size=8))
def test_one_index_of_a_huge_permutation(size, index, key):
    found = permute(index % size, size, key)
    assert found.shape == ()
    assert 0 <= int(found) < size
    assert int(permute(np.array([[index % size]]), size, key)[0, 0]) == int(found)


def test_golden_permutations():
    # The order of every training run hangs on these: a change needs a new draw.MEANING.
    assert permute(np.arange(10), 10, plan_key("golden", 0, 0)).tolist() == [1, 4, 2, 7, 5, 9, 0, 3, 6, 8]
    few = permute(np.arange(4), 10**9, plan_key("golden", 0, 0, 1))
    assert few.tolist() == [646718822, 36133696, 289687980, 753550517]


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.integers(0, 99), st.integers(0, 300))
def test_many_permutations_at_once_are_each_by_itself(sizes, seed, count):
    rng = np.random.default_rng(seed)
    keys = [plan_key("each", seed, place) for place in range(len(sizes))]
    which = rng.integers(0, len(sizes), count)
    indices = rng.integers(0, np.array(sizes)[which])
    found = permute_each(indices, which, sizes, keys)
    for place, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        assert found[which == place].tolist() == permute(indices[which == place], size, key).tolist()


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3)), 4])
def test_all_orders_come_equally_often(size):
    tries = 800
    found = Counter(tuple(permute(np.arange(size), size, plan_key("chi", seed, 0))) for seed in range(tries))
    orders = factorial(size)
    wanted = tries / orders
    chi = sum((found[order] - wanted) ** 2 / wanted for order in found) + (orders - len(found)) * wanted
    assert (chi - (orders - 1)) / sqrt(2 * (orders - 1)) < 4


def test_every_index_lands_everywhere_equally_often():
    size, tries = 50, 1000
    landed = np.zeros((size, size))
    for seed in range(tries):
        landed[np.arange(size), permute(np.arange(size), size, plan_key("chi", seed, 1))] += 1
    chi = ((landed - tries / size) ** 2 / (tries / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) / sqrt(2 * freedom) < 4


def test_neighbours_do_not_stay_neighbours():
    size = 5000
    steps = np.diff(permute(np.arange(size), size, b"neighbours"))
    assert (np.abs(steps) == 1).sum() < 20


def test_an_index_outside_is_our_mistake():
    with pytest.raises(AssertionError, match="an index is not below 5"):
        permute(5, 5, b"")


def test_no_indices():
    assert permute(np.arange(0), 0, b"").tolist() == []


def test_draw_keys_differ_in_every_part():
    parts = [(0, 0, b"a", 0, "noise"), (1, 0, b"a", 0, "noise"), (0, 1, b"a", 0, "noise"), (0, 0, b"b", 0, "noise"),
             (0, 0, b"a", 1, "noise"), (0, 0, b"a", 0, "timestep")]
    assert len({draw_key(*part) for part in parts}) == len(parts)


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.binary(max_size=40), st.integers(0, 2**40), st.text())
def test_a_draw_key_is_the_digest_of_a_document(seed, epoch, sample, occurrence, purpose):
    document = {"kind": "draw", "meaning": MEANING, "seed": seed, "epoch": epoch, "sample": sample.hex(),
                "occurrence": occurrence, "purpose": purpose}
    first, second = draw_key(seed, epoch, sample, occurrence, purpose)
    assert first.to_bytes(8, "little") + second.to_bytes(8, "little") == bytes.fromhex(digest_json(document))[:16]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_philox_is_numpys_of_this_key_and_counter(first, second, stream):
    theirs = np.random.Philox(key=np.array([first, second], np.uint64), counter=stream << 192)
    ours = philox((first, second), stream)
    assert ours.standard_normal(5).tolist() == np.random.Generator(theirs).standard_normal(5).tolist()


def test_golden_draw():
    assert draw_key(0, 0, bytes(32), 0, "noise") == (3883984010952074960, 11307484227800721071)
    wanted = np.random.Philox(key=1 + (2 << 64)).random_raw(2).tolist()
    assert philox((1, 2)).bit_generator.random_raw(2).tolist() == wanted


@pytest.mark.parametrize("fraction", [0.05, "0.05", Fraction(1, 20)])
def test_a_fraction_is_what_is_written(fraction):
    assert choose_validation(DIGESTS, fraction) == choose_validation(DIGESTS, 0.05)


def test_validation_grows_with_the_fraction_and_knows_no_neighbours():
    small, large = (choose_validation(DIGESTS, part)[0] for part in (0.1, 0.3))
    assert small < large
    assert 40 < len(large) < 80
    assert choose_validation(DIGESTS[:50], 0.3)[0] == large & set(DIGESTS[:50])
    assert choose_validation(DIGESTS, 0.3, salt="other")[0] != large


@pytest.mark.parametrize("salt", ["latentry", 'a "word" in Größe'])
def test_a_pictures_place_is_the_digest_of_canonical_json(salt):
    place = {one: int(digest_json({"kind": "validation", "meaning": 1, "salt": salt, "picture": one}), 16)
             for one in DIGESTS}
    wanted = {one for one in DIGESTS if Fraction(place[one], 2**256) < Fraction(3, 10)}
    assert choose_validation(DIGESTS, "0.3", salt)[0] == wanted
    assert choose_validation(DIGESTS, "1e-9", salt)[0] == {min(DIGESTS, key=lambda one: place[one])}


def test_at_least_one_is_chosen_and_said():
    chosen, notice = choose_validation(DIGESTS[:5] * 2, "0.0001")
    assert len(chosen) == 1
    assert notice == "validation.fraction 0.0001 of 5 pictures chose none, so one was taken"
    assert choose_validation(DIGESTS[4::-1], "0.0001")[0] == chosen


def test_none_is_chosen_where_none_is_asked_or_only_one_is_there():
    assert choose_validation(DIGESTS, 0) == (frozenset(), None)
    assert choose_validation(DIGESTS[:1] * 3, "0.0001") == (frozenset(), None)


@pytest.mark.parametrize("fraction", [1, -0.1, "a", "1/0", float("nan")])
def test_a_bad_fraction(fraction):
    with pytest.raises(ConfigError) as caught:
        choose_validation(DIGESTS, fraction)
    assert caught.value.message == (
        f"validation.fraction is {fraction}, expected a number from 0 up to, but not including, 1"
    )
