"""Batches for other people's loops: what training streams, for any number of ranks, continued from a saved state."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from prep.errors import CacheError, ConfigError, EmptyPlanError, UsageError
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.loader.stream import BatchStream, StreamSettings


def stream(made, *, steps=6, rank=None, world=None, **settings):
    return BatchStream(open_index(made.manifest), StreamSettings(**{"batch_size": 4, "micro_batch": 2, **settings}),
                       steps=steps, rank=rank, world=world)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name])
        elif isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def test_a_batch_has_the_values_of_its_samples(make):
    made = make(texts=2, views=2)
    by_name = {sample.name: sample for sample in made.samples}
    shown = 0
    for batch in stream(made, masked=True, seed=3):
        for number, name in enumerate(batch["names"]):
            shown += 1
            sample = by_name[name]
            latents = [(torch.from_numpy(made.latents[view.latent]) - 0.125) * 0.5 for view in sample.views]
            found = [view for view, latent in zip(sample.views, latents, strict=True)
                     if torch.equal(latent, batch["latents"][number])]
            assert len(found) == 1
            mask = batch["masks"][number]
            wanted = torch.ones_like(mask) if found[0].mask is None else (
                torch.from_numpy(made.masks[found[0].mask]).float() / 255)
            assert torch.equal(mask, wanted)
            texts = [torch.from_numpy(made.texts[text.key]) for text in sample.texts]
            assert any(torch.equal(text, batch["text"]["hidden"][number].float()) for text in texts)
            assert batch["sizes"][number].tolist()[4:] == [sample.bucket[1], sample.bucket[0]]
        assert batch["latents"].dtype == torch.float32 and batch["text"]["hidden"].dtype == torch.bfloat16
        assert batch["noise"].shape == batch["latents"].shape and batch["weights"].tolist() == [1.0] * len(
            batch["names"])
        assert ((batch["timesteps"] >= 0) & (batch["timesteps"] < 1000)).all()
    assert shown == 6 // 2 * 7 and "masks" not in next(iter(stream(made)))  # 2 steps an epoch of 7 samples


def test_it_streams_what_train_run_does(make):
    made = make()
    index, ours = open_index(made.manifest), stream(made, seed=5, caption_dropout=0.5)
    requests = draws.training(index, ours.plan, 0, 6, dropout=draws.Dropout(caption=0.5), timesteps=1000, most=2)
    with batches(Rows(index), requests, masked=False, pinned=False) as feed:
        found = 0
        for batch, other in zip(ours, feed, strict=True):
            assert torch.equal(batch["noise"], other.noise_BChw)
            assert torch.equal(batch["timesteps"], other.timestep_B)
            assert torch.equal(batch["text"]["hidden"], other.text["hidden"])
            found += 1
    assert found > 6


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_divide_the_steps_of_one_process(make, world):
    """All make equally many batches; those that only keep a rank busy weigh nothing."""
    made, micro = make(counts=(5, 3)), {"batch_size": 6, "micro_batch": 3, "underfill": "partial"}
    whole = list(stream(made, **micro))
    parts = [list(stream(made, rank=rank, world=world, **micro)) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1
    for step in range(6):
        wanted = sorted((name, time) for batch in whole if batch["step"] == step
                        for name, time in zip(batch["names"], batch["timesteps"].tolist(), strict=True))
        found = sorted((name, time) for part in parts for batch in part if batch["step"] == step
                       for name, time, weight in zip(batch["names"], batch["timesteps"].tolist(),
                                                     batch["weights"].tolist(), strict=True) if weight)
        assert found == wanted
        for part in parts:
            assert [batch["last"] for batch in part if batch["step"] == step][-1]
            assert sum(batch["last"] for batch in part if batch["step"] == step) == 1


@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_saved_state_continues_with_the_step_that_is_not_complete(make, at):
    made = make(texts=2)
    whole, first = list(stream(made, seed=1)), stream(made, seed=1)
    seen = list(islice(iter(first), at))
    state = json.loads(json.dumps(first.state_dict()))
    again = stream(made, seed=1)
    again.load_state_dict(state)
    rest = list(again)
    done = sum(batch["step"] < state["step"] for batch in whole)
    assert at - 2 < done <= at and (done == at) == seen[-1]["last"]
    for one, other in zip(rest, whole[done:], strict=True):
        same(one, other)


def test_other_settings_or_data_do_not_continue(make, tmp_path, tiny_model):
    made = make()
    state = stream(made).state_dict()
    with pytest.raises(ConfigError) as caught:
        stream(made, seed=9).load_state_dict(state)
    assert caught.value.message == "seed is 9, but the saved state is of a stream with 0"
    with pytest.raises(CacheError, match="the saved state is of other samples or rows than the manifest has now"):
        stream(make(repeats=2)).load_state_dict(state)
    with pytest.raises(ConfigError, match="that is not the state of a BatchStream"):
        stream(made).load_state_dict({"step": 3})


def test_it_goes_through_a_data_loader_without_workers(make):
    made = make()
    plain, loaded = list(stream(made)), list(DataLoader(stream(made), batch_size=None))
    for one, other in zip(plain, loaded, strict=True):
        same(one, other)
    worker = DataLoader(stream(made), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="a BatchStream is read in a worker process"):
        next(iter(worker))


def test_bad_settings(make):
    made = make(masks=False)
    for settings, said in [({"rank": 2, "world": 2}, "rank is 2, expected 0 to 1"),
                           ({"caption_dropout": 1.5}, "caption_dropout is 1.5, expected 0 to 1"),
                           ({"micro_batch": 3}, "batch_size is 4, expected a multiple")]:
        with pytest.raises(ConfigError, match=said):
            stream(made, **settings)
    with pytest.raises(CacheError, match="masks are asked for, but the manifest has none"):
        stream(made, masked=True)
    with pytest.raises(EmptyPlanError):
        stream(make(counts=(1, 1)), underfill="drop")


def test_without_a_number_of_steps_it_does_not_end(make):
    made = make()
    found = [batch["step"] for batch in islice(iter(stream(made, steps=None)), 200)]
    assert found[-1] > 60
