"""`train check --find-lr` suggests a rate by real steps, leaves nothing behind, and says the same again."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

from jsonschema import Draft202012Validator

from prep.digest import digest_bytes
from prep.progress import silent
from train.cli.find_lr import document, lines_of
from train.failures import Progress
from train.rates import find
from train.rates.find import find_rate

QUICK = ("--device", "cpu", "--precision", "fp32", "--batch-size", 4)
CPU = torch.device("cpu")
SCHEMA = Path(__file__).parents[3] / "manifests" / "schemas" / "check.schema.json"


def tree(root):
    return {path.relative_to(root): digest_bytes(path.read_bytes()) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def short(monkeypatch):
    """Fewer steps, over the same rates, and fewer draws."""
    for name, value in {"STEPS": 24, "PICTURES": 4, "TIMESTEPS": 2}.items():
        monkeypatch.setattr(find, name, value)


def found_by(setup, tick=lambda count: None):
    return find_rate(setup, Progress(device=CPU), silent, tick)


def test_it_says_the_same_twice_and_changes_no_file(make, setup_of, train, monkeypatch, tmp_path, short):
    made, where = make(), tmp_path / "here"
    where.mkdir()
    (made.manifest.cache / "lock").touch()  # as every cache has it
    monkeypatch.chdir(where)
    before = tree(tmp_path)
    once = train("check", made.path, "--find-lr", "--json", *QUICK, "--rank", 4).json
    again = found_by(setup_of(made, lora={"rank": 4}, batch_size=4, ema={"decay": 0.9}, schedule={"warmup": 9}))
    assert once["find_lr"] == document(again) and tree(tmp_path) == before and not list(where.iterdir())
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(once)
    assert [point.step for point in again.points] == [4, 8, 12, 16, 20, 24] and again.diverged is None
    assert abs(again.points[0].change) < 1e-3, "of a rate that does nothing, nothing is noise of draws"
    assert min(point.change for point in again.points) < -0.01
    assert 1e-6 < again.suggestion.rate <= again.suggestion.lowest
    lines = list(lines_of(again))
    assert lines[0] == "change of the loss by learning rate:" and lines[-1] == (
        f"suggested: --lr {again.suggestion.rate:.1e} ({again.suggestion.reason})")


@pytest.mark.slow
def test_of_all_weights_as_well(make, setup_of, short):
    """Also if they are updated in the backward pass."""
    made = make()
    settings = {"method": "full", "full": {"fused_backward": True}, "batch_size": 4}
    once, again, other = (found_by(setup_of(made, **settings, seed=seed)) for seed in (0, 0, 1))
    assert once == again != other and once.suggestion.rate is not None


@pytest.mark.slow
def test_what_it_suggests_trains_better_than_much_less_and_than_what_diverges(make, setup_of, short):
    """By the same loss over the same pictures, after as many steps at one rate."""
    setup = setup_of(make(), lora={"rank": 4}, batch_size=4, validation={"every": 0}, sample={"every": 0})
    found = found_by(setup)

    def after(rate):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(find, "rate_of", lambda config, step: rate * 1.0001**step)
            return found_by(setup).points[-1].change

    rate = found.suggestion.rate
    good, less = after(rate), after(rate / 100)
    assert good < -0.01 and good < 5 * less, (rate, good, less)


def test_steps_that_diverge_end_it_at_once(make, setup_of, monkeypatch, short):
    """By a loss that doubled, or a number that is none: what is shown is what was before."""
    setup = setup_of(make(), method="full", batch_size=4)
    for span in (1e7, 1e38):
        monkeypatch.setattr(find, "SPAN", span)
        done = []
        found = found_by(setup, done.append)
        assert found.diverged is not None and found.steps <= len(done) <= 24
        assert all(abs(point.change) < float("inf") for point in found.points)
        assert found.diverged >= max(point.rate for point in found.points)


def test_layers_with_rates_of_their_own_keep_their_proportion(make, setup_of, monkeypatch, short):
    setup, seen = setup_of(make(), lora={"rank": 4, "layers": [{"match": "to_q", "lr": 3e-4}]}, batch_size=4,
                           optimizer={"lr": 1e-4}), []
    real = find.make_step

    def watched(trainee, *args):
        real(trainee, *args)
        seen.append({group["lr"] for group in trainee.optimizer.param_groups})

    monkeypatch.setattr(find, "make_step", watched)
    found_by(setup)
    assert len(seen) == 24 and all(max(rates) == pytest.approx(3 * min(rates)) for rates in seen)
    lowest = [min(rates) for rates in seen]
    assert (lowest[0], lowest[-1]) == (pytest.approx(1e-7), pytest.approx(0.1))
    ratios = [later / earlier for earlier, later in pairwise(lowest)]
    assert max(ratios) == pytest.approx(min(ratios)), "they rise exponentially"


def test_ctrl_c_leaves_nothing(make, setup_of, train, monkeypatch, tmp_path, short):
    made = make()
    (made.manifest.cache / "lock").touch()
    setup, before, threads = setup_of(made, lora={"rank": 2}), tree(tmp_path), threading.active_count()

    def interrupt(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found_by(setup, interrupt)
    assert tree(tmp_path) == before and threading.active_count() <= threads
    monkeypatch.setattr(find, "make_step", lambda *args: interrupt(1))
    result = train("check", made.path, "--find-lr", *QUICK)
    assert (result.code, result.out) == (130, "") and result.err.rstrip().endswith(
        "interrupted; nothing was written. Run the same command again to start over"), result.err
    assert tree(tmp_path) == before


def test_what_has_no_rate_to_find_is_refused(make, train):
    made = make()
    for words, message in [
        (("--set", "optimizer.name=prodigy"), "name is 'prodigy', which finds its learning rate itself, so --find-lr"),
        (("--set", "optimizer.name=adamw-schedule-free"), "', whose average would be one over all rates that "),
        (("--world-size", 2), "--find-lr is given with --world-size, but it tests the first steps of one process"),
        (("--resume", "-o", "run"), "--find-lr is given with --resume, but it tests")]:
        result = train("check", made.path, "--find-lr", *words)
        assert result.code and message in result.err, result.err
    result = train("check", made.path, "--find-lr", "--batch-size", 64, "--underfill", "drop", "--json")
    assert result.code == 8 and not result.json["ok"] and "find_lr" not in json.dumps(result.json), "after faults"
