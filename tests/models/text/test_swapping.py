"""One text encoder in memory at a time: the rows of a pipeline that has all of them, and each loaded once."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from torch import nn

from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.text import encoder as encoding
from prep.models.text import swapping
from prep.models.text.encoder import TextEncoder
from prep.models.text.swapping import Encoders

CAPTIONS = [f"a photo of {number} red dogs, " * (number % 4 + 1) for number in range(12)]
BATCHES = [CAPTIONS[start:start + 3] for start in range(0, 12, 3)]
SEVERAL = {"sdxl": 2, "flux": 2, "sd3": 3}


@pytest.fixture(scope="module", params=[  # SD 3 has the encoders of both others
    "sdxl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd3", "flux"))])
def model(request, tmp_path_factory):
    """A family with several text encoders, and a model of it."""
    path = tmp_path_factory.mktemp(request.param) / "model"
    tiny_pipelines.save(request.param, path)
    return request.param, path


@pytest.fixture
def loads(monkeypatch):
    """The names of encoders, as they are loaded; whenever one is, no other is in memory."""
    load, names, alive = encoding.load_encoder, [], []

    def watched(model, family, name, files, dtype, quantization):
        assert not [one for one in alive if one() is not None], f"{names[-1]} is in memory while {name} is loaded"
        found = load(model, family, name, files, dtype, quantization)
        alive.append(weakref.ref(found))
        names.append(name)
        return found

    monkeypatch.setattr(encoding, "load_encoder", watched)
    return names


def batched(batches):
    return [(batch, False) for batch in batches]


def encoder_of(model, *, first=(), compute="float32", **options):
    family, path = model
    facts = FAMILIES[family].text
    return TextEncoder(path, FAMILIES[family], TextOptions(max_length=min(facts.max_length, 77), **options),
                       device="cpu", compute=compute, dtype="float32", first=batched(first))


def by_pipeline(model):
    """The rows of `encode_prompt` with all encoders loaded, and that of no prompt."""
    family, path = model
    with tiny_pipelines.known_warnings():
        pipe = tiny_pipelines.load(path)
    facts, options = FAMILIES[family].text, TextOptions(max_length=min(FAMILIES[family].text.max_length, 77))
    with torch.no_grad():
        rows = [row for batch in BATCHES for row in facts.encode(pipe, batch, options, torch.device("cpu"))]
        return rows, facts.unconditional(pipe, options, torch.device("cpu"))


def same(rows, wanted, *, rtol=0.0):
    assert len(rows) == len(wanted)
    for row, one in zip(rows, wanted, strict=True):
        assert row.keys() == one.keys()
        for name in row:
            np.testing.assert_allclose(row[name], one[name].float().numpy(), rtol=rtol, atol=rtol)


def test_rows_are_the_pipelines_and_each_encoder_is_loaded_once(model, loads):
    encoder = encoder_of(model, first=BATCHES)
    rows = [row for batch in BATCHES for row in encoder.encode(batch)]
    negative = encoder.unconditional()
    assert len(loads) == len(set(loads)) == SEVERAL[model[0]]
    wanted, wanted_negative = by_pipeline(model)
    same([*rows, negative], [*wanted, wanted_negative])


@pytest.mark.slow
def test_without_preparation_rows_are_the_same(model, loads):
    encoder = encoder_of(model)
    same([row for batch in BATCHES for row in encoder.encode(batch)], by_pipeline(model)[0])
    assert len(loads) > SEVERAL[model[0]]


@pytest.mark.slow
def test_what_does_not_fit_is_prepared_later(model, loads, monkeypatch):
    """Each block loads every encoder once more."""
    monkeypatch.setattr(swapping, "KEPT_BYTES", 1)
    encoder, rows = encoder_of(model, first=BATCHES), []
    for number, batch in enumerate(BATCHES):
        encoder.prepare(batched(BATCHES[number:]))
        rows += encoder.encode(batch)
    same(rows, by_pipeline(model)[0])
    assert len(loads) <= SEVERAL[model[0]] * (len(BATCHES) + 1)
    kept = encoder._encoders._kept
    assert len(kept) <= 4 * SEVERAL[model[0]], "only those of the last block"


def test_a_prepared_batch_is_not_prepared_again(model, loads):
    encoder = encoder_of(model, first=BATCHES)
    for number in range(len(BATCHES)):
        encoder.prepare(batched(BATCHES[number:]))
    encoder.prepare([])
    assert len(loads) == SEVERAL[model[0]]
    encoder.prepare(batched([["another"]]))
    assert len(loads) > SEVERAL[model[0]]


@pytest.mark.slow
def test_halved_batches_take_what_was_kept_for_whole_ones(model, loads):
    encoder = encoder_of(model, first=BATCHES)
    encoder.batches.size = 2
    same([row for batch in BATCHES for row in encoder.encode(batch)], by_pipeline(model)[0], rtol=1e-5)
    assert len(loads) == SEVERAL[model[0]]
    encoder.prepare(batched([["a new batch", "of four captions", "in halves", "is prepared"]]))
    before = len(loads)
    encoder.encode(["a new batch", "of four captions", "in halves", "is prepared"])
    assert len(loads) == before + 1, "the last encoder alone"


@pytest.mark.slow
def test_layers_and_windows_of_clip(tmp_path, loads):
    tiny_pipelines.save("sdxl", tmp_path / "model")
    model, found = ("sdxl", tmp_path / "model"), []
    for first in (BATCHES, ()):
        encoder = encoder_of(model, first=first, clip_skip=1, windows=2)
        found.append([row for batch in BATCHES for row in encoder.encode(batch)])
        assert len(loads) == 2 or not first
        del encoder
        gc.collect()
    for one, other in zip(*found, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_computed_in_float32_by_all_encoders(model, loads, monkeypatch):
    encoder = encoder_of(model, compute="bfloat16", first=BATCHES)
    usual, call, seen = encoder._encoders.dtype, encoder._call, []

    def spoiled(captions, *, negative, tokens=None):
        seen.append(encoder._encoders.dtype)
        rows = call(captions, negative=negative, tokens=tokens)
        broken = seen[-1] == torch.bfloat16
        return [{name: each * float("nan") for name, each in row.items()} for row in rows] if broken else rows

    monkeypatch.setattr(encoder, "_call", spoiled)
    row = encoder.encode(CAPTIONS[:1])[0]
    assert {torch.bfloat16, torch.float32} == set(seen) and encoder._encoders.dtype == usual
    wanted = encoder_of(model).encode(CAPTIONS[:1])[0]
    for name in row:
        np.testing.assert_allclose(row[name], wanted[name], atol=0.2)  # weights were rounded to bfloat16
        assert np.isfinite(row[name]).all()


@pytest.mark.slow
def test_an_error_leaves_nothing_behind(model):
    encoder = encoder_of(model)

    def work():
        encoder._call(["a dog"], negative=False)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        encoder._encoders.run(work)
    same(encoder.encode(CAPTIONS[:1]), by_pipeline(model)[0][:1], rtol=1e-5)


class Output:
    def __init__(self, ids, layers=3):
        self.last_hidden_state = ids[..., None] * torch.ones(2)
        self.hidden_states = tuple(self.last_hidden_state * layer for layer in range(layers))


class Fake(nn.Module):
    def forward(self, ids, **_):
        return Output(ids)


def test_hidden_states_are_read_by_number_slice_and_in_turn():
    encoders = Encoders(["one", "two"], lambda name: Fake(), {"one": 1, "two": 2}, torch.float32, torch.device("cpu"))
    ids = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def work():
        first = encoders.parts["one"](ids)
        read = [first.hidden_states[2], *first.hidden_states[1:], *first.hidden_states, first.last_hidden_state]
        return read, encoders.parts["two"](ids).hidden_states[0]

    assert encoders.prepare([work, work], least=1) == 2
    read, last = encoders.run(work)
    plain = Output(ids)
    wanted = [plain.hidden_states[2], *plain.hidden_states[1:], *plain.hidden_states, plain.last_hidden_state]
    assert all(torch.equal(one, other) for one, other in zip(read, wanted, strict=True)) and not last.any()
    gc.collect()
    kept = next(iter(encoders._kept.values()))[0]
    assert kept.bytes == sum(tensor.nbytes for tensor in wanted)
    with pytest.raises(AssertionError, match="attentions of an encoder's output was not read when it was computed"):
        assert encoders.parts["one"](ids).attentions
