"""Options that set the same thing in several commands, or beside a file, take the same values everywhere."""

from __future__ import annotations

from math import ceil

import pytest
from typer.main import get_command

from prep.cli import main as of_prep
from prep.encode.options import EncodeOptions
from prep.recipe.options import RECIPE_OPTIONS, SOURCES
from prep.recipe.schema import setting_of
from prep.setting import LARGEST, MOST, rows_of
from prep.training.table import SETTINGS
from train.cli import main as of_train
from train.cli.options import FLAGS

RECIPE = {one.flag: setting_of(one.key) for one in RECIPE_OPTIONS if one.key != SOURCES}
ENCODE = {row.spec.flag: row for row in rows_of(EncodeOptions)}
TRAIN = {flag.partition("/")[0]: SETTINGS[name] for name, flag in FLAGS.items()}
SAMPLE = {f"--{name}": SETTINGS[f"sample.{name}"] for name in ("steps", "guidance", "seed")}
STEPS = {flag: TRAIN[flag] for flag in ("--batch-size", "--micro-batch", "--seed", "--underfill")}
SET_BY = {  # command → what its options set
    **{("prep", name): RECIPE for name in ("scan", "view")},
    **{("prep", name): RECIPE | ENCODE for name in ("embed", "encode", "seal", "import")},
    ("prep", "bucket"): RECIPE | STEPS, ("train", "run"): TRAIN, ("train", "check"): TRAIN, ("train", "sample"): SAMPLE,
}
# Options that do not limit their values: they are checked when they are used, with the message that a file gets.
LATER = {name: TRAIN.keys() if program == "train" and name != "sample" else RECIPE.keys() if program == "prep" else ()
         for program, name in SET_BY}
UNUSED = {("seal", flag) for flag in ENCODE.keys() - {"--jobs", "--rehash", "--download"}}


def shared():
    for program, app in (("prep", of_prep.app), ("train", of_train.app)):
        for name, command in get_command(app).commands.items():
            for option in command.params:
                row = SET_BY.get((program, name), {}).get(option.opts[0])
                if row is not None:
                    yield name, option, row


SHARED = list(shared())


def test_many_options_are_shared():
    assert len(SHARED) > 100 and {name for name, _, _ in SHARED} == {name for _, name in SET_BY}


@pytest.mark.parametrize(("command", "option", "row"), SHARED, ids=[f"{name}{one.opts[0]}" for name, one, _ in SHARED])
def test_an_option_takes_what_its_setting_takes(command, option, row):
    spec = row.spec
    if spec.choices and not option.is_flag:
        words = (*spec.choices, spec.other) if spec.other else spec.choices
        assert option.metavar in (f"[{'|'.join(words)}]", "[auto|cpu|cuda|mps|cuda:N]", None)
    elif spec.bounds is not None and (command, option.opts[0]) not in UNUSED and option.opts[0] not in LATER[command]:
        low, high = (None if bound in (LARGEST, MOST) else bound / spec.unit if spec.unit else bound
                     for bound in spec.bounds)
        assert option.max == high
        assert option.min == (low if low is None or spec.unit != int(spec.unit) else ceil(low))
    elif option.opts[0] in LATER[command]:
        assert option.min is None, "else its message is another than that of the file"
