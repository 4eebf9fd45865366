"""Options that are numbers say which they take, so that a count below zero is refused before anything is read."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from prep.cli.main import app
from prep.recipe.options import RECIPE_OPTIONS
from prep.recipe.schema import setting_of

# Numbers without a range of their own, and why. The options of a recipe are checked with it, with the message that its
# file gets.
WITHOUT = {
    ("mask", "threshold"): "checked with the other options of masks, in scripts, too",
    ("mask", "smooth"): "as above", ("mask", "expand"): "as above; below zero it shrinks",
    **{("seal", name): "taken from the command of the parts, and not used"
       for name in ("batch_size", "shard_bytes", "encoder_memory", "grace", "max_rejects")},
}
OF_RECIPE = {one.name for one in RECIPE_OPTIONS}


def numbers():
    """Every option of a number: its command, its name, its type and what typer knows of it."""
    for command in app.registered_commands:
        for one in inspect.signature(command.callback, eval_str=True).parameters.values():
            kinds = {int, float} & {one.annotation.__origin__, *get_args(one.annotation.__origin__)}
            if kinds:
                yield command.name or command.callback.__name__, one.name, kinds.pop(), one.annotation.__metadata__[0]


def flag_of(name, given):
    """The first flag of an option; typer keeps it where an option without a default has it."""
    named = given.default if isinstance(given.default, str) else next(iter(given.param_decls or ()), "")
    return named or f"--{name.replace('_', '-')}"


RANGED = [(command, flag_of(name, given), kind, given)
          for command, name, kind, given in numbers() if name not in OF_RECIPE and (command, name) not in WITHOUT]


def test_every_number_has_a_range_or_a_reason():
    assert len(RANGED) > 25
    assert not [(command, flag) for command, flag, _, given in RANGED if given.min is None]
    assert not set(WITHOUT) - {(command, name) for command, name, _, given in numbers() if given.min is None}


def test_seconds_end():
    """No timer takes an infinite time."""
    assert [given.max for _, flag, _, given in RANGED if flag in ("--grace", "--task-seconds")] == [1e6] * 3


@pytest.mark.parametrize(("command", "flag", "least"), [(*one, given.min) for *one, _, given in RANGED])
def test_a_number_below_its_range(command, flag, least, prep):
    result = prep(command, flag, (0 if least is None else least) - 1)
    assert result.code == 2 and flag in result.err and "greater than or equal to" in result.err.replace("\n", " ")


@pytest.mark.parametrize("one", [one for one in RECIPE_OPTIONS if one.kind in (int, float)], ids=lambda one: one.name)
def test_a_number_of_a_recipe_below_zero(one, prep, tmp_path):
    (tmp_path / "photos").mkdir()
    result = prep("encode", tmp_path / "photos", "--cache", tmp_path / "cache", one.flag, -1)
    named = setting_of(one.key).name
    assert result.code == 3 and result.err.startswith(f"error: {one.flag}: {named} is -1"), result.err
    assert ", expected a number from " in result.err
