"""What a curve of losses by learning rate suggests."""

from __future__ import annotations

from math import inf, log10

import pytest

from train.rates.curve import LEAST, Point, chart, suggest

RATES = [10 ** (-7 + number / 5) for number in range(31)]


def points(changes, rates=RATES):
    return [Point(rate=rate, step=4 * number + 4, loss=1 + change, change=change)
            for number, (rate, change) in enumerate(zip(rates, changes, strict=False))]


@pytest.mark.parametrize("curvature", [1e-1, 1e1, 1e3, 1e5])
def test_of_a_quadratic_the_rate_is_a_fraction_of_the_largest_stable_one(curvature):
    """Gradient descent on h/2 x^2 is stable below 2/h, and fastest at 1/h; a tenth to all of that is suggested."""
    x, found, rates = 1.0, [], [10 ** (-9 + number / 50) / curvature for number in range(600)]
    for number, rate in enumerate(rates):
        x -= rate * curvature * x + 1e-3 * (-1) ** number * rate * curvature
        if number % 10 == 9:
            found.append(Point(rate=rate, step=number + 1, loss=x * x, change=x * x - 1))
        if x * x > 2:
            break
    said = suggest(found)
    assert 0.005 / curvature < said.rate <= 1.0 / curvature < 2 * said.lowest and said.steepest < 2 / curvature


def test_the_smaller_one_of_two_choices_is_suggested_with_its_reason():
    falling = [-0.1 * number for number in range(1, 6)] + [-0.5 - 0.01 * number for number in range(1, 10)]
    early = points([0.0] * 10 + falling + [3])
    said = suggest(early)
    assert said.rate == said.steepest < said.lowest / 10 and said.lowest == pytest.approx(RATES[22])
    assert said.reason == f"the loss fell fastest there; it was lowest at {said.lowest:.1e}"
    late = points([0.0] * 10 + [-0.01, -0.05, -0.2, -0.5, 0.4])
    said = suggest(late)
    assert said.rate == pytest.approx(said.lowest / 10) and said.steepest > said.rate
    assert said.reason == f"a tenth of the rate of the lowest loss, which was at {said.lowest:.1e}"
    still = suggest(points([-0.01 * number for number in range(31)]))
    assert "at the highest rate, where it still fell" in still.reason


@pytest.mark.parametrize("changes", [[], [-0.5], [0.0] * 31, [0.001 * number for number in range(31)],
                                     [-LEAST / 2] * 31])
def test_nothing_is_suggested_of_a_loss_that_did_not_fall(changes):
    said = suggest(points(changes))
    assert (said.rate, said.steepest, said.lowest) == (None, None, None)
    assert said.reason.startswith("the loss fell at no rate: it may already be as low")


def test_a_chart_has_a_mark_for_each_point_and_cuts_off_what_rises_too_far():
    lines = chart(points([0.0, -0.1, -0.2, 0.05, inf], [1e-4, 1e-3, 1e-2, 1e-1, 1.0]))
    assert lines[0] == "  +20.0% |    *" and lines[-3] == "  -20.0% |  *" and lines[-2] == "         +-----"
    assert sum(line.count("*") for line in lines) == 5 and "1e-04" in lines[-1] and lines[-1].endswith("1e+00")
    assert all(len(line) < 60 for line in chart(points([-0.001 * log10(each) for each in RATES])))
