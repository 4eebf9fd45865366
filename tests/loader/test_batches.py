"""Batches: the right rows in the right places, buffers reused, faults of the thread told in the loop."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from prep.batching.plan import step_plan
from prep.batching.rng import philox
from prep.errors import CacheError
from prep.keys import unconditional_key
from prep.loader import batches as data
from prep.loader.batches import Slot, batches
from prep.loader.draws import NO_TEXT, Dropout, training
from prep.loader.index import open_index
from prep.loader.rows import Rows

CONTEXT = {"meaning": 1, "text": "tiny", "max_length": 8, "layout": "full"}


@pytest.fixture
def feed(make):
    """`feed(steps, masked=…)`: what was made, and a context of its batches."""

    def go(steps=6, *, masked=True, dropout=0.0, micro_batch=2, **differs):
        made = make(**differs)
        index = open_index(made.manifest)
        plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=micro_batch)
        requests = training(index, plan, 0, steps, dropout=Dropout(caption=dropout), timesteps=1000)
        return made, batches(Rows(index), requests, masked=masked, pinned=False)

    return go


def sample_of(made, shot):
    return made.samples[shot.sample]


def test_rows_arrive_bit_by_bit(feed):
    made, opened = feed()
    with opened as some:
        for batch in some:
            for number, shot in enumerate(batch.draws):
                sample = sample_of(made, shot)
                assert np.array_equal(batch.latent_BChw[number].float().numpy(), made.latents[sample.views[0].latent])
                assert np.array_equal(batch.text["hidden"][number].float().numpy(), made.texts[sample.texts[0].key])
                mask = sample.views[0].mask
                wanted = made.masks[mask] if mask else np.full_like(batch.mask_B1hw[number].numpy(), 255)
                assert np.array_equal(batch.mask_B1hw[number].numpy(), wanted)


def test_noise_is_the_key_s_and_normal(feed):
    _, opened = feed()
    with opened as some:
        batch = next(some)
        again = philox(batch.draws[0].noise).standard_normal(batch.noise_BChw.shape[1:], dtype=np.float32)
        assert np.array_equal(batch.noise_BChw[0].numpy(), again)
        assert batch.timestep_B.tolist() == [shot.timestep for shot in batch.draws]


def test_dropped_captions_read_the_unconditional_row(feed):
    made, opened = feed(dropout=1.0)
    with opened as some:
        batch = next(some)
        assert {shot.text for shot in batch.draws} == {NO_TEXT}
        for row in batch.text["hidden"].float().numpy():
            assert np.array_equal(row, made.texts[unconditional_key(CONTEXT)])


def test_masks_are_not_read_unless_asked_for(feed):
    _, opened = feed(masked=False)
    with opened as some:
        assert next(some).mask_B1hw is None


def test_every_batch_has_one_shape_and_buffers_come_round(feed):
    _, opened = feed(steps=30)
    seen = set()
    with opened as some:
        for batch in some:
            assert batch.latent_BChw.shape[1:] in ((4, 8, 8), (4, 6, 10))
            assert batch.latent_BChw.dtype == torch.bfloat16
            seen.add(id(batch.slot))
    assert len(seen) <= data.MOST_SLOTS


@pytest.mark.parametrize("spared", [0, 1, 2])
def test_a_batch_stays_whole_while_it_is_in_use(feed, spared):
    """However often the loop spares the GIL, only the buffers of the batch before are filled meanwhile."""
    _, opened = feed(steps=20)
    with opened as some:
        for batch in some:
            before = [each.clone() for each in (batch.latent_BChw, batch.noise_BChw, batch.timestep_B)]
            for _ in range(spared):
                batch.spare_gil()
            time.sleep(0.005)
            after = (batch.latent_BChw, batch.noise_BChw, batch.timestep_B)
            assert all(torch.equal(*both) for both in zip(before, after, strict=True))


@pytest.fixture
def made(monkeypatch):
    """How many batches the thread has made, when it has made at least `count` and waits."""
    made, plain = [], data.read
    monkeypatch.setattr(data, "read", lambda *given, **named: made.append(given) or plain(*given, **named))

    def wait_for(count):
        due = time.monotonic() + 30
        while len(made) < count and time.monotonic() < due:
            time.sleep(0.001)
        time.sleep(0.02)
        return len(made)

    return wait_for


def test_buffers_are_given_back_when_the_loop_spares_the_gil(feed, made, monkeypatch):
    monkeypatch.setattr(data, "SMALL_RING", 0)
    _, opened = feed(steps=20)
    with opened as some:
        next(some)
        assert made(data.SLOTS) == data.SLOTS
        second = next(some)
        assert made(0) == data.SLOTS, "filled while the next forward pass needs the GIL"
        second.spare_gil()
        assert made(data.SLOTS + 1) == data.SLOTS + 1


def test_of_small_batches_several_are_made_at_a_time(feed, made):
    """Half of the buffers are ready then; without a loop that spares the GIL, too."""
    _, opened = feed(steps=60)
    together = data.MOST_SLOTS // 2 - 1
    with opened as some:
        next(some)
        assert made(data.MOST_SLOTS) == data.MOST_SLOTS
        for _ in range(together - 1):
            next(some).spare_gil()
        assert made(0) == data.MOST_SLOTS
        next(some).spare_gil()
        assert made(data.MOST_SLOTS + together) == data.MOST_SLOTS + together
        for _ in range(together):
            next(some)
        assert made(0) == data.MOST_SLOTS + together
        next(some)
        assert made(data.MOST_SLOTS + 2 * together) == data.MOST_SLOTS + 2 * together


def test_a_loop_that_is_faster_than_the_thread_waits_for_no_other_batch(feed, monkeypatch):
    """It has nothing left that it could use meanwhile."""
    slow, plain = threading.Event(), data.read

    def read(*given, **named):
        assert slow.wait(30)
        return plain(*given, **named)

    monkeypatch.setattr(data, "read", read)
    _, opened = feed(steps=40)
    with opened as some:
        threading.Timer(0.01, slow.set).start()
        assert sum(1 for _ in some) == 80  # two micro-batches a step


@pytest.mark.parametrize("taken", [2, 6])
def test_buffers_are_freed_at_the_end_without_the_collector(feed, taken):
    """Each validation has a ring of its own."""
    _, opened = feed(steps=20)
    gc.collect()
    gc.disable()
    try:
        slots = []
        with opened as some:
            for _ in range(taken):
                batch = next(some)
                slots.append(weakref.ref(batch.slot))
                batch.spare_gil()
        del opened, some, batch
        assert [slot() for slot in slots] == [None] * taken
    finally:
        gc.enable()


def test_leaving_early_ends_the_thread(feed):
    _, opened = feed(steps=10000)
    with opened as some:
        next(some)
    assert not any(thread.name == "batches" for thread in threading.enumerate())


def test_a_damaged_row_is_told_with_shard_row_and_samples(feed):
    made, opened = feed(steps=20)
    for path in (made.root / "cache" / "shards").glob("*/*/latent/c.*"):
        path.chmod(0o644)
        path.write_bytes(b"\0" * 64 + path.read_bytes()[64:])
    with pytest.raises(CacheError, match=r"array 'latent', row 0.*checksum.*\(needed for '\d+/\d.png'") as caught, \
            opened as some:
        for _ in some:
            pass
    assert f"prep verify {made.path}" in caught.value.hint.replace(os.path.relpath(made.path), str(made.path))
    assert "encode again only what is damaged: prep encode " in caught.value.hint and "--cache " in caught.value.hint


def test_a_fault_that_passes_names_all_samples_of_its_batch(feed, monkeypatch):
    """The disk fails once, so that nothing says which of them it was."""
    _, opened = feed(steps=20, micro_batch=2)
    failed = []

    def failing(rows, *given, **named):
        if not failed:
            failed.append(True)
            raise CacheError("shard ab, array 'latent', row 0: cannot be read: [Errno 5] Input/output error")
        return plain(rows, *given, **named)

    plain = Rows.fill
    monkeypatch.setattr(Rows, "fill", failing)
    both = r"Input/output error \(needed for '\d+/\d.png', '\d+/\d.png'\)"
    with pytest.raises(CacheError, match=both), opened as some:
        for _ in some:
            pass


def test_rows_of_another_shape_are_refused(make):
    rows = Rows(open_index(make().manifest))
    latent = next(shard for shard in rows.index.shards if shard.field == "latent")
    with pytest.raises(CacheError, match=r"array 'latent' has rows \[4, \d+, \d+\] bfloat16, expected latent rows "
                                         r"\[4, 5, 5\] bfloat16"):
        rows.fill(torch.empty(1, 4, 5, 5, dtype=torch.bfloat16), "latent", "latent", [rows.index.ref(
            rows.index.shards.index(latent), 0)])


def test_a_buffer_grows_and_is_kept():
    slot = Slot(False)
    small = slot.take("x", (2, 3), torch.float32)
    large = slot.take("x", (4, 3), torch.float32)
    assert small.shape == (2, 3) and large.shape == (4, 3)
    assert slot.take("x", (1, 3), torch.bfloat16).untyped_storage().data_ptr() == large.untyped_storage().data_ptr()


def test_the_targets_of_a_buffer_are_those_of_the_tensor_last_taken():
    """A buffer of many shapes, as captions have them: also when it grows, or has had too many."""
    slot = Slot(False)
    for turn in range(3):
        for count in (*range(1, 2 * data.MOST_SHAPES), 5):
            tensor = slot.take("x", (count, 3), torch.float32)
            targets = slot.targets("x")
            assert len(targets.rows) == count
            targets.rows[-1][:] = np.full(3, turn + count, np.float32).tobytes()
            assert tensor[-1].tolist() == [turn + count] * 3
    assert len(slot._views["x"]) <= data.MOST_SHAPES


def test_a_batch_moves_as_a_whole(feed):
    _, opened = feed()
    with opened as some:
        moved = next(some).to(torch.device("meta"))
    tensors = (moved.latent_BChw, moved.mask_B1hw, moved.text["hidden"], moved.sizes_B6, moved.noise_BChw,
               moved.timestep_B, moved.weight_B)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_only_the_samples_whose_rows_are_damaged_are_named(feed):
    made, opened = feed(steps=20, micro_batch=4)
    damaged = sorted((made.root / "cache" / "shards").glob("*/*/latent/c.*"))[0]
    damaged.chmod(0o644)
    damaged.write_bytes(b"\0" * 64 + damaged.read_bytes()[64:])
    with pytest.raises(CacheError) as caught, opened as some:
        for _ in some:
            pass
    assert len(re.findall(r"'\d+/\d\.png'", caught.value.message)) == 1, caught.value.message


def test_a_shard_that_went_missing_is_told_with_the_samples_that_need_it(feed):
    made, opened = feed(steps=20)
    for path in (made.root / "cache" / "shards").glob("*/*/latent/c.*"):
        path.unlink()
    with pytest.raises(CacheError, match=r"\(needed for '\d+/\d\.png'"), opened as some:
        for _ in some:
            pass


def test_noise_is_the_same_whoever_draws_it(feed, monkeypatch):
    """Each shot's noise comes from its own key: one thread or several make the same batch."""
    drawn = []
    for threads, worth in ((1, 1 << 40), (3, 0)):
        monkeypatch.setattr(data, "DRAWERS", threads)
        monkeypatch.setattr(data, "WORTH_THREADS", worth)
        _, opened = feed(micro_batch=4)
        with opened as some:
            drawn.append([batch.noise_BChw.clone() for batch in some])
    assert len(drawn[0]) == len(drawn[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_a_tensor_is_split_once_for_as_long_as_it_is_the_same():
    slot = Slot(False)
    slot.take("x", (2, 3), torch.float32)
    first = slot.targets("x")
    slot.take("x", (2, 3), torch.float32)
    assert slot.targets("x") is first
    larger = slot.take("x", (4, 3), torch.bfloat16)
    assert (len(slot.targets("x").rows), slot.targets("x").row_bytes) == (4, 6)
    slot.targets("x").rows[3][:] = bytes(6)
    assert not larger[3].any()


def test_masks_that_are_missing_between_others_stay_255(make):
    rows = Rows(open_index(make().manifest))
    views = rows.index.samples.views
    at = [int(place) for place in np.flatnonzero(views["mask_shard"] >= 0)]
    shard = int(views["mask_shard"][at[0]])
    found = [rows.index.ref(shard, int(views["mask_row"][place])) for place in at
             if int(views["mask_shard"][place]) == shard][:2]
    spec, _ = rows.reader.array_info(found[0].shard, "mask")
    out = torch.full((4, *spec.shape), 255, dtype=torch.uint8)
    rows.fill(out, "mask", "mask", [None, found[1], None, found[0]])
    one = torch.empty((1, *spec.shape), dtype=torch.uint8)
    for place, ref in ((1, found[1]), (3, found[0])):
        rows.fill(one, "mask", "mask", [ref])
        assert torch.equal(out[place], one[0])
    assert bool((out[[0, 2]] == 255).all())
