"""What `prep bucket --suggest` names is what `bucketing` and the step plan count, and nothing tried is better."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from walking import item_of

from prep.batching.plan import step_plan
from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.buckets.suggest import BATCHES, MUCH, TOLERANCE, suggest_buckets
from prep.dataset.ingest import KnownItem
from prep.dataset.preview import sizes_of
from prep.recipe.schema import Recipe, Source
from prep.report.terminal.buckets import suggestion_table

SIZES = {(640, 480): 7, (480, 640): 5, (512, 512): 9, (1024, 300): 1, (300, 200): 2, (40, 40): 1}


def counted(sizes):
    return {size: (count, count) for size, count in sizes.items()}


@pytest.mark.parametrize("upscale", ["never", "allow", "reject"])
def test_each_choice_is_what_bucketing_and_the_plan_say(upscale):
    rules = Rules(resolution=512, upscale=upscale)
    named = [(f"{size}", size) for size, count in SIZES.items() for _ in range(count)]
    found = suggest_buckets(counted(SIZES), [rules])
    assert [one.batch_size for one in found[1:]] == list(BATCHES)
    for one in found:
        alone = assign_buckets(named, Rules(resolution=512, upscale=upscale, kind=one.kind, step=one.step,
                                            min_bucket=one.min_bucket))  # fmt: skip
        assert one.crop == pytest.approx(sum(each.crop_loss for each in alone.pictures) / len(alone.pictures))
        assert one.unused == pytest.approx(100 * (len(named) - len(alone.pictures)) / len(named))
        assert one.buckets == len(alone.buckets)
        counts = Counter(each.placement.bucket for each in alone.pictures)
        plan = step_plan(list(counts.values()), seed=0, batch_size=one.batch_size)
        assert one.empty == pytest.approx(100 * (1 - len(alone.pictures) / (sum(plan.batches) * one.batch_size)))


def test_the_largest_batch_that_loses_hardly_more_is_named():
    first, *each = suggest_buckets(counted(SIZES), [Rules(resolution=512)])
    least = min(one.score for one in each if one.batch_size > 1)
    assert first in each and first.score <= least + TOLERANCE
    assert all(one.score > least + TOLERANCE for one in each if one.batch_size > first.batch_size)
    squares = suggest_buckets(counted({(512, 512): 64}), [Rules(resolution=512)])
    assert (squares[0].batch_size, squares[0].score) == (32, 0), "nothing is lost at all"
    assert (squares[0].buckets, squares[0].step, squares[0].min_bucket) == (1, 64, 1)


@pytest.mark.parametrize(("sizes", "batch"), [
    ({(4032, 3024): 17, (3024, 4032): 12}, 2),  # odd numbers of pictures: a slot is empty with any size but 1
    ({(1024, 1024): 15}, 16), ({(1024, 1024): 101}, 2),
    ({(640, 480): 1, (300, 900): 1}, 1),  # in one bucket, they would lose half of themselves
    ({(512, 512): 1}, 1),
])
def test_a_batch_of_one_is_suggested_only_where_others_lose_much(sizes, batch):
    """Its slots are never empty, so it would win nearly always, and say nothing of the buckets."""
    first, one, *others = suggest_buckets(counted(sizes), [Rules(resolution=512)])
    assert (first.batch_size, one.batch_size) == (batch, 1)
    assert one.score < min(other.score for other in others), "the cases say something"
    assert (batch == 1) == (min(other.score for other in others) > one.score + MUCH)
    assert ("larger batches would lose at least " in suggestion_table([first.as_json(), *(
        each.as_json() for each in (one, *others))], 4)) == (batch == 1)


def test_steps_fit_the_latents_and_nothing_comes_of_nothing():
    for step, tried in ((64, {64}), (32, {32, 64}), (16, {16, 32, 64}), (24, {24}), (8, {8, 16, 32, 64})):
        found = {one.step for rules in ([Rules(resolution=512, step=step)],)
                 for one in suggest_buckets(counted(SIZES), rules)}
        assert found <= tried and found
    assert suggest_buckets({}, [Rules(resolution=512)]) == []
    assert suggest_buckets(counted({(7, 7): 3}), [Rules(resolution=512)]) == []


def test_repeats_are_shown_and_validation_is_not():
    def item(source):
        return KnownItem(item=item_of("a", source=source), picture="a" * 64, size=(64, 64), has_alpha=False,
                         captions=(), mask=None)

    sources = (Source(path=Path("p"), repeats=3), Source(path=Path("q"), role="validation"))
    assert sizes_of(Recipe(sources=sources), [item(0), item(1)]) == {(64, 64): (2, 3)}


def test_the_command_names_it(prep, photos):
    options = ("--resolution", 96, "--step", 16, "--suggest")
    document = prep("bucket", photos, *options, "--json").json["suggestions"]
    assert [one["batch_size"] for one in document[1:]] == list(BATCHES)
    best = document[0]
    shown = prep("bucket", photos, *options).out
    assert (f"suggested: --buckets {best['buckets']} --step {best['step']} --min-bucket {best['min_bucket']} "
            f"--batch-size {best['batch_size']}, with a loss of ") in shown.replace("\n", " ")
    for own in (one for one in document[1:] if one["batch_size"] != best["batch_size"]):
        shown = prep("bucket", photos, *options, "--batch-size", own["batch_size"]).out.replace("\n", " ")
        assert (f"with this command's batch size: --buckets {own['buckets']} --step {own['step']} --min-bucket "
                f"{own['min_bucket']} --batch-size {own['batch_size']}, loss {own['score']} %") in shown
    assert "this command's" not in prep("bucket", photos, *options, "--batch-size", best["batch_size"]).out
    assert "suggestions" not in prep("bucket", photos, "--resolution", 96, "--step", 16, "--json").json
    (photos.parent / "tiny").mkdir()
    (photos / "0.png").rename(photos.parent / "tiny" / "0.png")
    nothing = prep("bucket", photos.parent / "tiny", "--resolution", 512, "--upscale", "reject", "--suggest")
    assert "nothing to suggest: no picture fits a bucket" in nothing.out
