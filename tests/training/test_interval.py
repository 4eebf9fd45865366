"""Intervals in steps and epochs: which texts are taken, and the steps that they mean."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prep.errors import ConfigError
from prep.training.interval import INTERVALS, Interval, interval_of
from prep.training.table import SETTINGS
from train.config.load import as_table, load_config, parse

LENGTHS = st.fractions(min_value=Fraction(1), max_value=40, max_denominator=50)


@pytest.mark.parametrize(("given", "taken", "steps"), [
    (500, 500, 500), (0, 0, 0), ("500 steps", 500, 500), ("1 step", 1, 1), ("0 steps", 0, 0), ("1 epoch", "1 epoch", 7),
    ("1 epochs", "1 epoch", 7), ("2 epochs", "2 epochs", 14), ("2 epoch", "2 epochs", 14),
    ("10epochs", "10 epochs", 70), ("1.0 epoch", "1 epoch", 7), ("0.50 epochs", "0.5 epochs", Fraction(7, 2)),
    ("0.1 epochs", "0.1 epochs", Fraction(7, 10)),
    ("9999999999999.999999999999 epochs", "9999999999999.999999999999 epochs", Fraction("69999999999999.999999999993")),
])
@pytest.mark.parametrize("name", INTERVALS)
def test_steps_and_epochs(tmp_path, name, given, taken, steps):
    section, _, key = name.partition(".")
    config = parse({section: {key: given}}, "x")
    found = getattr(getattr(config, section), key)
    assert found == taken and type(found) is type(taken) and interval_of(found, 7).steps == steps
    assert parse(as_table(config), "x") == config and as_table(config)[section][key] == taken
    (tmp_path / "train.toml").write_text(f"[{section}]\n{key} = {given!r}\n")
    assert load_config(tmp_path / "train.toml") == config


@pytest.mark.parametrize("given", [
    "epoch", "every 2", "2", "", "-1 epoch", "0 epochs", "0.0 epochs", ".5 epochs", "1e3 epochs", "nan epochs",
    "inf epochs", "1 Epoch", "1 epoch ", " 1 epoch", "1 epoch\n", "1.5 steps", "1  epoch", "\uff11 epoch",
    "10 minutes", 0.5, 2.0, float("nan"), True, ["1 epoch"], f"{10**13} epochs"])
def test_other_values_are_refused_with_what_is_taken(given):
    with pytest.raises(ConfigError) as caught:
        parse({"checkpoint": {"every": given}}, "x")
    assert caught.value.message == (f"checkpoint.every is {given!r}, expected a whole number of steps, 0 or more, or "
                                    "epochs like '1 epoch' or '0.5 epochs'")
    shown = caught.value.hint.removeprefix("for example: every = ").partition(" in [checkpoint]; train init")[0]
    assert SETTINGS["checkpoint.every"].spec.check(int(shown) if shown.isdigit() else shown.strip('"'), "x")


@pytest.mark.parametrize("given", [-1, (1 << 40) + 1, f"{(1 << 40) + 1} steps"])
def test_too_few_and_too_many_steps(given):
    with pytest.raises(ConfigError) as caught:
        parse({"sample": {"every": given}}, "x")
    number = given if isinstance(given, int) else given.removesuffix(" steps")
    assert caught.value.message == f"sample.every is {number}, expected a number from 0 to 1099511627776"


@given(LENGTHS, st.integers(1, 400))
@example(Fraction(1), 5)
@example(Fraction(63, 10), 63)
def test_due_is_the_first_step_after_which_each_interval_is_complete(length, last):
    interval = Interval(steps=length)
    due = [ceil(number * length) for number in range(1, int(last / length) + 2)]
    assert len(set(due)) == len(due)
    assert [step for step in range(last + 1) if interval.is_due(step)] == [step for step in due if step <= last]
    assert interval.count(last) == sum(step <= last for step in due)
    gaps = {after - before for before, after in zip([0, *due], due, strict=False)}
    assert interval.text.endswith("1 step" if length == 1 else " steps")
    assert gaps <= {int(word) for word in interval.text.replace("steps", "step").removesuffix(" step").split(" or ")}


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 500))
def test_whole_epochs_are_due_at_their_ends_and_steps_at_their_multiples(steps_per_epoch, count, step):
    epochs = interval_of(f"{count} epochs", steps_per_epoch)
    assert epochs == interval_of(count * steps_per_epoch, 1)
    assert epochs.is_due(step) == (step % (count * steps_per_epoch) == 0)


def test_never_is_never_due():
    never = interval_of(0, 7)
    assert not any(map(never.is_due, range(20))) and never.count(19) == 0
