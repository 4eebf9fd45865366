"""The step plan: every occurrence once an epoch, what the policy does is listed, any step can be asked for first."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_plans import micro_batches

from prep.batching.parts import Division
from prep.batching.plan import require_steps, step_plan
from prep.errors import ConfigError, EmptyPlanError
from prep.loader.draws import RankShare

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)
BATCHES = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3), (16, 4), (8, 1)])
POLICY = st.sampled_from(["drop", "partial", "repeat"])
SHUFFLE = st.sampled_from(["global", "partitioned"])


def plan_of(counts, **overrides):
    """A plan for `counts`, but for `overrides`."""
    return step_plan(counts, **{"seed": 0, "batch_size": 4, "micro_batch": 2, **overrides})


def shown(plan, epoch):
    """Counter of (bucket, occurrence), fillers apart."""
    return Counter((batch.bucket, int(one)) for batch in micro_batches(plan, epoch)
                   for one in batch.occurrences[~batch.repeated])


def listed(by_bucket):
    """Counter of (bucket, occurrence) of what `left_out` and `repeated` return."""
    return Counter((bucket, int(one)) for bucket, found in by_bucket.items() for one in found)


@given(COUNTS, BATCHES, POLICY, SHUFFLE, st.integers(0, 3))
def test_every_occurrence_once_an_epoch_or_listed_as_left_out(counts, batches, policy, shuffle, epoch):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill=policy, shuffle=shuffle)
    everything = Counter((bucket, one) for bucket, count in enumerate(counts) for one in range(count))
    assert shown(plan, epoch) + listed(plan.left_out(epoch)) == everything
    assert policy == "drop" or not plan.left_out(epoch)


@given(COUNTS, BATCHES, POLICY, SHUFFLE, st.integers(0, 3))
def test_repeated_lists_every_filler(counts, batches, policy, shuffle, epoch):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill=policy, shuffle=shuffle)
    fillers = Counter((batch.bucket, int(one)) for batch in micro_batches(plan, epoch)
                      for one in batch.occurrences[batch.repeated])
    assert listed(plan.repeated(epoch)) == fillers
    assert policy == "repeat" or not fillers


@given(COUNTS, BATCHES, POLICY, SHUFFLE, st.integers(0, 3))
def test_sizes_are_those_of_the_steps(counts, batches, policy, shuffle, epoch):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill=policy, shuffle=shuffle)
    assert plan.sizes(epoch).tolist() == [sum(len(part.occurrences) for part in plan.step(epoch, number))
                                          for number in range(plan.steps_per_epoch)]


@given(COUNTS, st.sampled_from([(1, 1), (4, 2), (8192, 4096)]), POLICY, SHUFFLE, st.integers(0, 200))
def test_a_step_of_training_is_that_of_its_epoch(counts, batches, policy, shuffle, step):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill=policy, shuffle=shuffle)
    for one in range(step, step + 3) if plan.steps_per_epoch else ():
        wanted = plan.step(*divmod(one, plan.steps_per_epoch))
        assert [(part.bucket, part.occurrences.tolist(), part.turns.tolist()) for part in plan.at(one)] == \
            [(part.bucket, part.occurrences.tolist(), part.turns.tolist()) for part in wanted]


@given(COUNTS, BATCHES, POLICY)
def test_sizes_of_steps_and_micro_batches(counts, batches, policy):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill=policy)
    steps = [plan.step(0, number) for number in range(plan.steps_per_epoch)]
    short = Counter(batch.bucket for step in steps for batch in step if len(batch.occurrences) < batches[1])
    if policy == "partial":
        assert all(number == 1 for number in short.values())
        assert all(len(step) == plan.per_step for step in steps[:-1])
    else:
        assert all(sum(len(batch.occurrences) for batch in step) == batches[0] for step in steps)
    if policy == "drop":
        assert plan.steps_per_epoch == sum(count // batches[1] for count in counts) // plan.per_step
    else:
        assert bool(steps) == any(counts)


@given(COUNTS, BATCHES, SHUFFLE)
def test_fillers_never_share_a_turn(counts, batches, shuffle):
    plan = plan_of(counts, batch_size=batches[0], micro_batch=batches[1], underfill="repeat", shuffle=shuffle)
    seen = [(batch.bucket, int(one), int(turn)) for batch in micro_batches(plan, 0)
            for one, turn in zip(batch.occurrences, batch.turns, strict=True)]
    assert len(seen) == len(set(seen))


@given(COUNTS, BATCHES, POLICY, SHUFFLE, st.integers(0, 50))
def test_any_step_can_be_asked_for_first(counts, batches, policy, shuffle, step):
    made = {"batch_size": batches[0], "micro_batch": batches[1], "underfill": policy, "shuffle": shuffle}
    straight, resumed = plan_of(counts, **made), plan_of(counts, **made)
    if not straight.steps_per_epoch:
        return
    epoch, number = divmod(step, straight.steps_per_epoch)
    stream = [batch for each in range(number + 1) for batch in straight.step(epoch, each)]
    for old, new in zip(stream[-len(resumed.at(step)):], resumed.at(step), strict=True):
        assert old.bucket == new.bucket
        assert old.occurrences.tolist() == new.occurrences.tolist()
        assert old.turns.tolist() == new.turns.tolist()


def test_micro_batches_of_several_buckets_share_a_step():
    plan = plan_of([2, 2, 2, 2], batch_size=8)
    (step,) = [plan.step(0, number) for number in range(plan.steps_per_epoch)]
    assert sorted(batch.bucket for batch in step) == [0, 1, 2, 3]


def test_epochs_and_seeds_differ_and_do_not_alias():
    def order(seed, epoch):
        plan = plan_of([50, 30], seed=seed)
        return [(batch.bucket, batch.occurrences.tolist()) for batch in micro_batches(plan, epoch)]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(-1, 0)]
    assert all(one != other for number, one in enumerate(orders) for other in orders[:number])
    assert order(3, 5) == order(3, 5)


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
def test_what_is_dropped_changes_with_the_epoch(shuffle):
    plan = plan_of([9], batch_size=8, micro_batch=8, underfill="drop", shuffle=shuffle)
    assert {int(plan.left_out(epoch)[0][0]) for epoch in range(90)} == set(range(9))


@pytest.mark.parametrize(("count", "micro"), [(45, 8), (17, 8), (63, 16), (5, 8), (3, 8), (1, 4)])
def test_parts_leave_out_and_repeat_all_samples_equally_often(count, micro):
    rest, again = Counter(), Counter()
    for start in range(count):  # all that there are
        division = Division(count=count, micro_batch=micro, start=start, fill=start)
        rest.update(division.rest().tolist())
        slots = division.slots(division.size, fill=True)
        again.update(slots.known[slots.turns > 0].tolist())
    assert [rest[one] for one in range(count)] == [count % micro] * count
    assert [again[one] for one in range(count)] == [-count % micro] * count
    plan = plan_of([count], batch_size=micro, micro_batch=micro, shuffle="partitioned")
    drawn = [plan._division(epoch, 0) for epoch in range(60)]
    assert len({one.start for one in drawn}) >= min(count, 5) <= len({one.fill for one in drawn}) + 1


@pytest.mark.slow
@given(st.integers(1, 400), st.sampled_from([4, 8, 16]), st.sampled_from([1, 2, 3, 4]), POLICY)
def test_with_parts_a_rank_reads_the_same_samples_in_every_epoch(count, micro, world, policy):
    plan = plan_of([count], batch_size=2 * micro, micro_batch=micro, underfill=policy, shuffle="partitioned")
    per_part = count / micro
    batches = [batch for epoch in range(4) for batch in micro_batches(plan, epoch)]
    for rank in range(world):
        share, read = RankShare(rank=rank, world=world), set()
        for batch in batches:
            mine = share.of(0, batch, plan)
            assert len(mine) <= -(-micro // world)
            read.update(batch.occurrences[mine.start:mine.stop].tolist())
        low, high = (per_part * (micro * one // world) for one in (rank, rank + 1))
        strangers = {one for one in read if not low - 2 <= one < high + 2}
        assert len(strangers) <= (8 if policy == "repeat" else 0)  # what fills a micro-batch: two in an epoch


@pytest.mark.slow
def test_parts_are_permuted_by_themselves_and_anew_for_each_epoch():
    plan = plan_of([64], batch_size=8, micro_batch=8, shuffle="partitioned")
    epochs = [[part.occurrences.tolist() for part in micro_batches(plan, epoch)] for epoch in range(150)]
    orders = [list(zip(*epoch, strict=True)) for epoch in epochs[:30]]
    assert all(sorted(order[place]) == list(range(8 * place, 8 * place + 8)) for order in orders for place in range(8))
    assert len({order[place] for order in orders for place in range(8)}) == 240
    beside = Counter((part[0], part[1]) for epoch in epochs for part in epoch)
    assert len(beside) == 64 and max(beside.values()) < 40  # any two samples of two parts meet, 19 times on average


@pytest.mark.parametrize(("overrides", "message", "hint"), [
    ({"batch_size": 0}, "batch_size is 0, expected at least 1", ""),
    ({"micro_batch": 0}, "micro_batch is 0, expected at least 1", ""),
    ({"batch_size": 6, "micro_batch": 4}, "batch_size is 6, expected a multiple of micro_batch, 4", "batch_size = 8"),
    ({"batch_size": 2, "micro_batch": 4}, "batch_size is 2, expected a multiple of micro_batch, 4", "batch_size = 4"),
    ({"underfill": "pad"}, "underfill is 'pad', expected one of: drop, partial, repeat", ""),
    ({"shuffle": "local"}, "shuffle is 'local', expected one of: global, partitioned", ""),
])
def test_bad_settings(overrides, message, hint):
    with pytest.raises(ConfigError) as caught:
        plan_of([4], **overrides)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_micro_batch_is_the_batch_size_unless_given():
    assert step_plan([4], seed=0, batch_size=4).micro_batch == 4


def test_an_empty_plan_says_why_and_who():
    plan = plan_of([5, 0, 3], batch_size=16, micro_batch=16, underfill="drop")
    names = [f"{number}.png" for number in range(12)]
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(plan, [((512, 512), ()), ((64, 64), ()), ((576, 448), ((64, 64), (32, 32)))], names)
    assert caught.value.exit_code == 8
    assert caught.value.message == (
        "underfill 'drop' drops all 8 samples (0.png, 1.png, 2.png, 3.png, 4.png, 5.png, 6.png, 7.png, 8.png, "
        "9.png and 2 more), expected at least one step of batch_size 16 in micro-batches of 16; samples by bucket: "
        "512x512: 5, 576x448+64x64+32x32: 3"
    )
    assert caught.value.hint == "--underfill partial, or a smaller --batch-size or --micro-batch"
    require_steps(plan_of([5], batch_size=16, micro_batch=16), [((512, 512), ())])


def test_no_sample_at_all():
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(plan_of([0]), [(512, 512)])
    assert caught.value.message == "there is no training sample, expected at least 1"
    assert caught.value.hint == "see why with: prep scan SOURCE, or lower validation.fraction"


def test_a_step_of_a_million_samples_costs_no_epoch():
    plan = step_plan([10**12, 7], seed=0, batch_size=4)
    (batch,) = plan.at(10**11)
    assert len(batch.occurrences) == 4


# --- an independent reference: plain integers, one index at a time ---


def slow_key(what, seed, epoch, *where):
    text = json.dumps({"kind": "plan", "meaning": 1, "what": what, "seed": seed, "epoch": epoch, "where": where},
                      sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def slow_mix(mixed):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    return mixed ^ (mixed >> 31)


def slow_permute(index, size, key, part=None):
    half = 3
    while 4**half < size:
        half += 1
    words = hashlib.sha256(key + b"\0").digest() + hashlib.sha256(key + b"\1").digest()
    words = [int.from_bytes(words[8 * number:8 * number + 8], "little") for number in range(8)]
    if part is not None:
        words = [slow_mix((word + (part + 1) * 0x9E3779B97F4A7C15) % 2**64) for word in words]
    while True:
        high, low = divmod(index, 2**half)
        for word in words:
            high, low = low, high ^ slow_mix(low ^ word) % 2**half
        index = high * 2**half + low
        if index < size:
            return index


def slow_order(count, micro, seed, epoch, bucket, shuffle):
    """The order of a bucket, and its last micro-batch where it must be full."""
    words = slow_key("bucket", seed, epoch, bucket)
    if shuffle == "global":
        order = [slow_permute(place, count, words) for place in range(count)]
        return order, (order[len(order) // micro * micro:] + order * micro)[:micro]
    starts = [int.from_bytes(slow_key(name, seed, epoch, bucket)[:8], "little") % max(count, 1)
              for name in ("rest", "fill")]
    size, left = divmod(count, micro)
    rest, again = ([floor(Fraction(number * count + start, some)) for number in range(some)]
                   for some, start in zip((left, micro - left), starts, strict=True))
    others = [one for one in range(count) if one not in rest]
    parts = [[others[part * size + slow_permute(row, size, words, part)] for row in range(size)]
             for part in range(micro)]
    order = [part[row] for row in range(size) for part in parts] + rest
    of = {}  # part: which of the rest
    for number, one in enumerate(rest):
        natural = next((part for part in range(micro) if size and one < max(parts[part])), micro)
        of[min(natural, micro - left + number) if size else floor(Fraction(number * micro, left))] = one
    return order, [of[part] if part in of else again.pop(0) for part in range(micro)]


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
@pytest.mark.parametrize("underfill", ["drop", "partial", "repeat"])
def test_steps_agree_with_a_slow_reference(underfill, shuffle):
    counts, micro, steps, seed, epoch = [7, 0, 12, 1], 3, 2, 11, 4
    plan = plan_of(counts, seed=seed, batch_size=6, micro_batch=micro, underfill=underfill, shuffle=shuffle)
    table = []
    for bucket, count in enumerate(counts):
        order, full = slow_order(count, micro, seed, epoch, bucket, shuffle)
        chunks = [order[start:start + micro] for start in range(0, count, micro)]
        if underfill == "drop":
            chunks = [chunk for chunk in chunks if len(chunk) == micro]
        if underfill == "repeat" and count % micro:
            chunks[-1] = full
        table += [(bucket, chunk) for chunk in chunks]
    stream = [table[slow_permute(place, len(table), slow_key("steps", seed, epoch))] for place in range(len(table))]
    if underfill == "drop":
        stream = stream[:len(stream) // steps * steps]
    if underfill == "repeat":
        stream += stream[:-len(stream) % steps]
    assert [(batch.bucket, batch.occurrences.tolist()) for batch in micro_batches(plan, epoch)] == stream
    assert plan.steps_per_epoch == -(-len(stream) // steps)
