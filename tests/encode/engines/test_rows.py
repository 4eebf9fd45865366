"""Batches of latents, begun one ahead as on a GPU: the same rows in the same order, and the device never waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prep.cache.records import Reject
from prep.encode.engines.rows import picture_rows
from prep.models import vae
from prep.models.vae import VaeEncoder

BAD = Reject(key="bad", code="not-an-image", detail="is none")


def pictures(count):
    rng = np.random.default_rng(0)
    return [(str(number), rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for number in range(count)]


def encoder_of(model, ahead):
    made = VaeEncoder(model, device="cpu", compute="float32", dtype="float32")
    assert made.ahead == 0, "a CPU would only hold more in memory"
    made.ahead = ahead
    return made


def rows(encoder, given, size=2):
    return [(key, row if isinstance(row, Reject) else row["latent"].tobytes())
            for key, row in picture_rows(iter(given), encoder, size)]


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_rows_are_the_same_with_batches_begun_ahead(tiny_model, ahead):
    given = [*pictures(5), ("bad", BAD), ("worse", BAD), *((f"more {key}", image) for key, image in pictures(2))]
    found = rows(encoder_of(tiny_model, ahead), given)
    assert found == rows(encoder_of(tiny_model, 0), given)
    assert [key for key, _ in found] == [key for key, _ in given]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_is_waited_for_once_later_ones_are_begun(tiny_model, monkeypatch, ahead):
    """Arrivals are awaited in order, each once, and after the batches ahead have been given to the device."""
    encoder, log, count = encoder_of(tiny_model, ahead), [], iter(range(99))
    forward = encoder._forward

    def watched(pixels, dtype):
        log.append("begin")
        return forward(pixels, dtype)

    def arrival(device):
        number = next(count)
        return lambda: log.append(number)

    monkeypatch.setattr(encoder, "_forward", watched)
    monkeypatch.setattr(vae, "arrival", arrival)
    rows(encoder, pictures(6))
    assert log == (["begin", 0, "begin", 1, "begin", 2] if ahead == 0 else ["begin", "begin", 0, "begin", 1, 2])


def test_a_row_that_arrives_broken_is_made_again_while_the_next_batch_is_begun(tiny_model, monkeypatch):
    encoder = encoder_of(tiny_model, 1)
    wanted = rows(encoder, pictures(4))
    posterior, calls = vae.posterior, []

    def broken(model, image):
        calls.append(image)
        found = posterior(model, image)
        return found._replace(mean_BChw=found.mean_BChw * float("nan")) if len(calls) == 1 else found

    monkeypatch.setattr(vae, "posterior", broken)
    found = rows(encoder, pictures(4))
    assert [len(image) for image in calls] == [2, 2, 1, 1], "the second batch was begun before the first one's rows"
    for (key, row), (same, one) in zip(found, wanted, strict=True):
        assert key == same
        np.testing.assert_allclose(np.frombuffer(row, np.float32), np.frombuffer(one, np.float32), atol=1e-4)


def test_pixels_reach_the_vae_with_channels_last(tiny_model, monkeypatch):
    """Convolutions compute so then; weights of that order change no bit of the rows."""
    encoder, seen = encoder_of(tiny_model, 0), []
    encoder._vae.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    before = rows(encoder, pictures(2))
    encoder._vae.to(memory_format=torch.channels_last)
    assert rows(encoder, pictures(2)) == before
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in seen) and len(seen) == 2
