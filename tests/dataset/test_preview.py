"""The outlook of `prep bucket`: its counts are the step plan's, its names those that `train` will leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
from walking import item_of

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.ingest import KnownItem
from prep.dataset.preview import TrainSample, flag_extremes, preview_as_json, preview_epoch, train_samples
from prep.recipe.schema import Recipe, Source

RULES = Rules(resolution=512)


def surveyed(name, size=(512, 512), *, source=0, picture=None):
    return KnownItem(item=item_of(name, name=name, source=source, label=f"source[{source}]/{name}"), size=size,
                     picture=picture or name.encode().hex().ljust(64, "0"), has_alpha=False,
                     captions=(("x", 1.0),), mask=None)


def placed(items):
    return assign_buckets(((item.item.name, item.size) for item in items), RULES)


def shown(result, repeats=1):
    return [TrainSample(id=str(one.index).zfill(4), name=one.name, bucket=one.placement.bucket, repeats=repeats)
            for one in result.pictures]


def pictures(square, wide):
    return [surveyed(f"s{number}.png") for number in range(square)] + [
        surveyed(f"w{number}.png", (640, 384)) for number in range(wide)]


def test_json_has_the_promised_shape():
    result = placed(pictures(5, 3))
    document = preview_as_json(preview_epoch(result, shown(result), batch_size=4, micro_batch=2))
    assert [(one["size"], one["samples"], one["batches"]) for one in document["buckets"]] == [
        ([512, 512], 5, 3), ([640, 384], 3, 2)]
    assert document["steps_per_epoch"] == 3
    assert (document["left_out"], document["repeated"]) == ([], [])
    assert document["buckets"][0]["crop_loss"] == {"mean": 0.0, "worst": 0.0}
    assert document["buckets"][0]["scale"] == [1.0, 1.0]
    assert document["pictures"][0] == {
        "name": "s0.png", "size": [512, 512], "resolution": 512, "bucket": [512, 512], "scaled": [512, 512],
        "crop": [0, 0],
        "views": [{"crop": [0, 0], "flip": False}], "scale": 1.0, "crop_loss": 0.0, "upscaled": False}


def test_drop_names_everybody_it_leaves_out():
    result = placed(pictures(5, 3))
    document = preview_as_json(preview_epoch(result, shown(result), batch_size=4, underfill="drop"))
    assert document["steps_per_epoch"] == 1
    assert len(document["left_out"]) == 4
    assert {"w0.png", "w1.png", "w2.png"} < set(document["left_out"])


def test_repeat_names_everybody_it_shows_again():
    result = placed(pictures(0, 1))
    document = preview_as_json(preview_epoch(result, shown(result), batch_size=4, underfill="repeat"))
    assert document["repeated"] == ["w0.png"] * 3


def test_repeats_count():
    result = placed(pictures(2, 0))
    document = preview_as_json(preview_epoch(result, shown(result, repeats=3), batch_size=4, underfill="drop"))
    assert document["buckets"][0]["showings"] == 6
    assert len(document["left_out"]) == 2


@pytest.mark.parametrize(("world", "idle"), [(1, 0), (2, 0), (4, 2)])
def test_ranks_with_nothing_to_do(world, idle):
    result = placed(pictures(5, 3))
    outlook = preview_epoch(result, shown(result), batch_size=4, micro_batch=2, world=world)
    assert preview_as_json(outlook)["idle_ranks"] == idle


def test_showings_have_the_ids_that_encode_gives():
    items = [surveyed("b.png", picture="aa"), surveyed("a.png", picture="aa"), surveyed("c.png", source=1),
             surveyed("tiny.png", (9, 9))]
    recipe = Recipe(sources=(Source(path=Path("p"), repeats=2), Source(path=Path("q"), role="validation")))
    found = train_samples(recipe, items, placed(items))
    assert [(one.name, one.repeats) for one in found] == [("source[0]/a.png", 2), ("source[0]/b.png", 2)]
    assert len({one.id for one in found}) == 2


def test_limits_make_findings():
    rules = Rules(resolution=512, kind="single", upscale="allow")
    found = assign_buckets([("square", (512, 512)), ("wide", (1024, 512)), ("tiny", (128, 100))], rules)
    assert flag_extremes(found, crop=None, upscale=None) == found
    assert flag_extremes(found, crop=50, upscale=5.2).findings == ()
    said = flag_extremes(found, crop=20, upscale=1.5).findings
    assert [(one.path, one.code, one.severity) for one in said] == [
        ("wide", "heavy-crop", "warning"), ("tiny", "heavy-crop", "warning"), ("tiny", "heavy-upscale", "warning")]
    assert said[0].detail == "50.0 % of it is cropped for bucket 512x512, expected at most 20 %"
    assert said[2].detail == "it is enlarged 5.12 times for bucket 512x512, expected at most 1.5 times"


def test_a_merge_says_what_it_cuts():
    rules = Rules(resolution=512, min_bucket=2)
    found = assign_buckets([*((f"s{number}", (512, 512)) for number in range(3)), ("w", (640, 512))], rules)
    (merge,) = found.merges
    assert (merge.bucket, merge.into, merge.pictures) == ((576, 448), (512, 512), 1)
    whole, kept = 576 * 461, 576 * 448
    assert merge.before == pytest.approx(100 * (whole - kept) / whole)
    assert merge.after == pytest.approx(100 * (640 - 512) / 640)
    document = preview_as_json(preview_epoch(found, shown(found), batch_size=4))
    assert document["merges"][0]["crop_loss"] == {"before": round(merge.before, 2), "after": 20.0}


def test_merges_in_a_chain_are_priced_with_all_that_they_move():
    sizes = [(512, 512)] * 9 + [(1280, 800)] * 2 + [(1600, 800)]
    found = assign_buckets([(str(number), size) for number, size in enumerate(sizes)],
                           Rules(resolution=512, min_bucket=4))
    assert [merge.pictures for merge in found.merges] == [1, 3]
    last = [one.crop_loss for one in found.pictures[9:]]
    assert found.merges[-1].after == pytest.approx(sum(last) / 3)


def test_the_command_tells_of_limits(prep, photos):
    options = ("--resolution", 96, "--step", 16, "--buckets", "single", "--upscale", "allow")
    document = prep("bucket", photos, *options, "--max-crop", 20, "--max-upscale", 1.45, "--json").json
    codes = [(one["path"], one["code"]) for one in document["findings"]]
    assert codes == [("2.png", "heavy-crop"), ("2.png", "heavy-upscale"), ("3.png", "heavy-crop"),
                     ("3.png", "heavy-upscale"), ("4.png", "heavy-crop"), ("4.png", "heavy-upscale"),
                     ("7.png", "heavy-crop"), ("7.png", "heavy-upscale")]
    shown = prep("bucket", photos, *options, "--max-crop", 20)
    assert "cropped by more than --max-crop (4): 2.png, 3.png, 4.png, 7.png" in shown.out and shown.code == 0
