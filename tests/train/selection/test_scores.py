"""The scores of checkpoints, and the rule that proposes one: from arrays alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.selection.scores import Candidate, Collection, Copy, Likeness, drift, likeness, prompt_fit, propose


def unit(values):
    rows = np.asarray(values, np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)


def exact(rows):
    wide = rows.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


@pytest.mark.parametrize(("training", "held_out"), [(40, 20), (5, 3), (1, 0)])
def test_scores_are_those_of_a_dozen_lines(training, held_out):
    """And a training picture that is drawn again is named as a copy."""
    rng = np.random.default_rng(training)
    rows, drawn, base = (unit(rng.normal(size=(count, 12)) + 1) for count in (training + held_out, 6, 6))
    drawn[4] = rows[training // 2]
    collection = Collection(rows=rows, training=training, names=tuple(f"{number}.png" for number in range(len(rows))))
    train, out, made, first = exact(rows[:training]), exact(rows[training:]), exact(drawn), exact(base)
    among = train @ train.T
    mean = among[~np.eye(training, dtype=bool)].mean() if training > 1 else 0.0
    bar = min(mean + 0.9 * (1 - mean), 0.99)
    assert collection.held_out == held_out and collection.least == pytest.approx(bar, abs=1e-3)
    found = likeness(collection, drawn, collection.least)
    for got, there in ((found.training_P, train), (found.held_out_P, out)):
        want = np.sort(made @ there.T, axis=1)[:, ::-1][:, :8].mean(axis=1) if len(there) else None
        assert (got is None) if want is None else got == pytest.approx(want)
    assert prompt_fit(drawn, base) == pytest.approx((made * first).sum(axis=1).mean())
    cosines = made @ train.T
    assert found.nearest == pytest.approx(cosines.max())
    assert [copy.drawn for copy in found.copies] == np.flatnonzero(cosines.max(axis=1) >= collection.least).tolist()
    (planted,) = (copy for copy in found.copies if copy.drawn == 4)
    assert planted.name == f"{training // 2}.png" and planted.cosine == pytest.approx(1)
    apart = (1 - first @ first.T)[~np.eye(6, dtype=bool)].mean()
    assert drift(base, drawn) == pytest.approx((1 - (first * made).sum(axis=1)).mean() / apart, rel=1e-3)
    assert drift(base, base) == pytest.approx(0)
    assert drift(base[:1], drawn[:1]) is None and drift(base[[0, 0]], drawn[:2]) is None


def candidate(step, scores, *, copies=0, drifted=None, held_out=True):
    values = np.array(scores, float)
    copy = tuple(Copy(drawn=number, name="a.png", cosine=1.0) for number in range(copies))
    return Candidate(name=f"step-{step:06d}", step=step, drift=drifted, validation=None, fit=None, likeness=Likeness(
        training_P=values, held_out_P=values if held_out else None, nearest=1.0, copies=copy))


LOW, HIGH, NOISY = [0.50, 0.52, 0.54, 0.51], [0.60, 0.63, 0.64, 0.62], [0.95, 0.35, 0.64, 0.60]


@pytest.mark.parametrize(("candidates", "proposed", "reason"), [
    ([candidate(1, LOW), candidate(2, HIGH), candidate(3, LOW)], 2, "its pictures resemble the held-out pictures most "
     "(0.6225)"),
    ([candidate(1, LOW), candidate(2, HIGH, copies=1), candidate(3, LOW, drifted=1.2)], 1,
     "it is the only one within bounds"),
    ([candidate(1, LOW, drifted=0.99)], 1, "it is the only one that was kept"),
    ([candidate(1, LOW, drifted=1.0), candidate(2, HIGH, copies=2)], None, "no checkpoint is within bounds: each draws "
     "training pictures again, or is as far from the base model as a drift of 1"),
    ([candidate(1, HIGH), candidate(2, NOISY, held_out=True)], 1, "nothing distinguishes the 2 checkpoints: their "
     "likeness to the held-out pictures differs by no more than 2 standard errors; it is the earliest"),
    ([candidate(1, HIGH, copies=1), candidate(2, HIGH), candidate(3, HIGH)], 2, "nothing distinguishes the 2 "
     "checkpoints within bounds: "),
    ([candidate(1, [0.1]), candidate(2, [0.9])], 1, "nothing distinguishes the 2 checkpoints: "),
    ([candidate(1, LOW), candidate(2, HIGH), candidate(3, NOISY)], 2, "its pictures resemble the held-out pictures "
     "(0.6225) as well as those of step-000003 (0.6350), within 2 standard errors, and it is earlier"),
    ([candidate(1, LOW, held_out=False), candidate(2, HIGH, held_out=False)], 2, "its pictures resemble the training "
     "pictures most (0.6225)"),
])
def test_the_rule(candidates, proposed, reason):
    found = propose(candidates)
    assert found.name == (proposed and f"step-{proposed:06d}") and found.reason.startswith(reason), found


def test_why_a_checkpoint_is_out_of_bounds():
    assert candidate(1, LOW, copies=2, drifted=1.234).excluded == ("2 pictures nearly as in the training set",
                                                                   "drift 1.23")


@given(st.lists(st.tuples(st.lists(st.floats(-1, 1), min_size=3, max_size=3), st.integers(0, 1), st.floats(0, 2)),
                min_size=1, max_size=6))
def test_what_is_proposed_is_within_bounds_and_no_earlier_one_is_as_good(given_ones):
    every = [candidate(step, scores, copies=copies, drifted=drifted)
             for step, (scores, copies, drifted) in enumerate(given_ones)]
    found, within = propose(every), [each for each in every if not each.excluded]
    assert (found.name is None) == (not within)
    if within:
        chosen = next(each for each in within if each.name == found.name)
        best = max(float(each.likeness.decisive_P.mean()) for each in within)
        for each in within[: within.index(chosen)]:
            assert float(each.likeness.decisive_P.mean()) < best
        assert propose(within).name == found.name
