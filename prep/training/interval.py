"""How often a run validates, samples and saves: every so many steps, or epochs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Any

from prep.formatting import counted
from prep.parse import Unparsed, brief, within
from prep.setting import LARGEST

INTERVALS = ("validation.every", "sample.every", "checkpoint.every")  # the settings
VALUES = 'steps, 0 or more, or epochs: "1 epoch", "0.5 epochs"'
_TEXT = re.compile(r"([0-9]{1,13}(?:\.[0-9]{1,12})?) ?(epoch|step)s?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What recurs in a run."""

    steps: Fraction  # from one time to the next; 0: never

    def count(self, step: int) -> int:
        """How many intervals are complete after `step` steps."""
        return step * self.steps.denominator // self.steps.numerator if self.steps else 0

    def is_due(self, step: int) -> bool:
        """Whether `step` is the first one after which k intervals are complete, for k = 1, 2, …: ceil(k * steps).

        Counted from the run's beginning, in whole numbers, so that parts of a step neither add up nor get lost.
        """
        return step > 0 and self.count(step) > self.count(step - 1)

    @property
    def text(self) -> str:
        """The steps in words: 4 steps, or 4 or 5 steps if the interval ends inside of a step."""
        low, high = floor(self.steps), ceil(self.steps)
        return counted(low, "step") if low == high else f"{low} or {counted(high, 'step')}"


@lru_cache(maxsize=16)  # asked for in every step
def interval_of(every: int | str, steps_per_epoch: int) -> Interval:
    """The interval that a setting means which passed `interval_check`."""
    if isinstance(every, int):
        return Interval(steps=Fraction(every))
    return Interval(steps=Fraction(every.split()[0]) * steps_per_epoch)


def interval_check(value: Any, where: str) -> int | str:
    """Checks an interval: a number of steps, or epochs as a text, of which equal ones are spelled alike: 1 epoch."""
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    number = Decimal(match[1]) if match else Decimal(0)
    if match and match[2] == "epoch" and number:
        return f"{number.normalize():f} epoch{'' if number == 1 else 's'}"
    steps = int(number) if match and match[2] == "step" and number == int(number) else value
    if type(steps) is not int:
        raise Unparsed(f"{where} is {brief(value)}, expected a whole number of steps, 0 or more, or epochs like "
                       "'1 epoch' or '0.5 epochs'")
    within(steps, 0, LARGEST, where)
    return steps
