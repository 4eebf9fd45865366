"""Lengths of trimmed rows, counted without reading a text encoder, are those of the encoded rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_cases import CASES, Case, named

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.families.registry import FAMILIES
from prep.models.family import ATTENTION_MASK, GROUP, TextOptions
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter

TRIMMED = [case for case in CASES if FAMILIES[case.family].text.layout == "trimmed"]
LONG = ("sana", "krea2", "cogview4", "ernie")
CAPTIONS = ["a", "", "a red cat on a bench", "two dogs, " * 9, "a word and another " * 100, "3 à 4 m"]


@pytest.fixture(scope="module", ids=named, params=[  # variants of a family have its text
    pytest.param(case, marks=pytest.mark.slow) if case.options or case.build in LONG else case for case in TRIMMED])
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory) -> Path:
    return tiny_pipelines.save(case.build, tmp_path_factory.mktemp(case.build) / "model", **case.options)


def options_of(case: Case) -> TextOptions:
    return TextOptions(max_length=FAMILIES[case.family].text.max_length)


@pytest.fixture(scope="module")
def encoder(case, model) -> TextEncoder:
    return TextEncoder(model, FAMILIES[case.family], options_of(case), device="cpu", compute="float32",
                       dtype="float32")


@pytest.mark.few("zimage", "sana")
def test_counted_lengths_are_those_of_the_rows(case, model, encoder, monkeypatch):
    family, options = FAMILIES[case.family], options_of(case)
    rows = encoder.encode(CAPTIONS)
    alone = [len(row[ATTENTION_MASK]) for row in (*rows, encoder.unconditional()) if row is not None]
    assert len(alone) == len(CAPTIONS) + 1 and (len(set(alone)) > 2 or family.text.shortest == family.text.longest)
    assert max(alone) <= family.text.longest
    negative = [len(row[ATTENTION_MASK]) for row in encoder.encode(CAPTIONS, negative=True) if row is not None]
    monkeypatch.delattr("prep.models.text.pipeline.load_transformers")  # no weights are read
    counter = LengthCounter(model, family, options)
    groups = [*counter.groups(CAPTIONS), counter.unconditional()]
    assert groups == [-(-length // GROUP) * GROUP for length in alone]
    assert counter.groups(CAPTIONS, negative=True) == [-(-length // GROUP) * GROUP for length in negative]


@pytest.mark.few("zimage", "sana")
def test_no_more_padding_is_encoded_than_the_group_has(case, encoder):
    """Where the padding is masked, the text encoder reads as many tokens as the group has, and the row is the same."""
    family, options = FAMILIES[case.family], options_of(case)
    seen: list[int] = []
    (part,) = [part for name, part in encoder._pipeline.components.items() if name.startswith("text_encoder")]
    hook = part.register_forward_pre_hook(
        lambda module, args, given: seen.append((args[0] if args else given["input_ids"]).shape[1]), with_kwargs=True)
    try:
        for caption in CAPTIONS:
            whole, length = encoder.encode([caption])[0], seen.pop()
            tokens = -(-len(whole[ATTENTION_MASK]) // GROUP) * GROUP
            (short,) = encoder.encode([caption], tokens)
            left_out = max(0, options.max_length - tokens) if family.text.padding_masked else 0
            assert seen.pop() == length - left_out
            for name, array in whole.items():  # not to the last bit: matrices of other sizes are added in another order
                row = short[name][:len(array)] if "token" in family.text.arrays.get(name, ("token",)) else short[name]
                assert row == pytest.approx(array, abs=1e-5)
    finally:
        hook.remove()


@pytest.mark.few("zimage", "sana")
def test_a_row_is_the_same_in_any_group_and_beside_any_caption(case, encoder):
    family = FAMILIES[case.family]
    for caption, row in zip(CAPTIONS, encoder.encode(CAPTIONS), strict=True):
        longest = -(-len(row[ATTENTION_MASK]) // GROUP) * GROUP
        (alone,) = encoder.encode([caption], longest)
        length = len(row[ATTENTION_MASK])
        assert alone[ATTENTION_MASK].tolist() == [1] * length + [0] * (longest - length)
        for name, dims in family.text.arrays.items():
            if dims[0] == "token":
                assert not alone[name][length:].any()
            assert alone[name][:len(row[name])] == pytest.approx(row[name], abs=1e-5)
