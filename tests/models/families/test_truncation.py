"""What each family's pipeline cuts off a long caption, and what a user is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_cases import CASES, Case, named

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
import torch

from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.fingerprint import text_files
from prep.models.text import truncation
from prep.models.text.pipeline import assemble, load_encoder, tokenizers_of
from prep.models.text.truncation import TruncationFinder

WORDS = "Ein süßer Hund; 日本 🐕‍🦺 sits HERE. " * 120  # longer than any encoder reads


@pytest.fixture(scope="module", ids=named, params=[  # variants of a family have its text, but for a lacking encoder
    pytest.param(case, marks=pytest.mark.slow) if set(case.options) - {"without_t5"} or case.family == "sana" else case
    for case in CASES])
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory) -> Path:
    return tiny_pipelines.save(case.build, tmp_path_factory.mktemp(case.build) / "model", **case.options)


def cuts(model: Path, case: Case, captions: list[str], **options: int):
    family = FAMILIES[case.family]
    chosen = TextOptions(**{"max_length": family.text.max_length, **options})
    return list(TruncationFinder(model, family, chosen).find(captions))


@pytest.mark.few
def test_the_lost_words_are_those_that_change_no_row(case, model):
    """The row of a caption is that of its read part, with any other words in place of the lost ones."""
    family = FAMILIES[case.family]
    options = TextOptions(max_length=family.text.max_length)
    short, found = cuts(model, case, ["a red cat", WORDS])
    assert short is None
    assert found is not None and not found.whole and found.read < found.tokens
    assert WORDS.strip().endswith(found.lost) and len(found.lost) > 20
    kept = WORDS.strip().removesuffix(found.lost)
    found_files = text_files(model)
    encoders = {name: load_encoder(model, family, name, found_files, torch.float32) for name in found_files.encoders}
    pipeline = assemble(model, family, encoders | tokenizers_of(model, family, found_files))
    changed = kept + "other words and signs, long enough to fill the rest " * 40
    whole, other, less = (family.text.encode(pipeline, [text], options, torch.device("cpu"))[0]
                          for text in (WORDS, changed, kept[:-len(kept) // 8]))
    # A cut may fall inside a character, whose first bytes are read and count as lost.
    assert all(torch.equal(whole[name], other[name]) for name in whole) or not found.lost[0].isascii()
    assert not all(one.shape == less[name].shape and torch.equal(one, less[name]) for name, one in whole.items())


@pytest.mark.few
def test_a_caption_that_just_fits_loses_nothing(case, model):
    text = "abcdefgh" * 300
    (found,) = cuts(model, case, [text])
    assert found is not None and text.endswith(found.lost)
    kept = len(text) - len(found.lost)
    fits, one_more = cuts(model, case, [text[:kept], text[:kept + 1]])
    assert fits is None or fits.whole, "an encoder reads all"
    assert one_more is not None and one_more.lost == text[kept] and not one_more.whole


@pytest.mark.few
def test_decoded_words_are_those_that_offsets_give(case, model, monkeypatch):
    """As for tokenizers that say nothing about the places of tokens."""
    text = "plain ascii words, one after the other, " * 60
    family = FAMILIES[case.family]
    options = TextOptions(max_length=family.text.max_length)
    (exact,) = cuts(model, case, [text])
    finder = TruncationFinder(model, family, options)
    check_readings(finder, text, exact)
    for reader in finder._readers:
        monkeypatch.setattr(type(reader.tokenizer), "is_fast", False)
    (decoded,) = finder.find([text])
    check_readings(finder, text, decoded)
    assert exact is not None and decoded is not None
    assert (decoded.tokens, decoded.encoder) == (exact.tokens, exact.encoder)
    assert decoded.read == exact.read
    assert decoded.lost.replace(" ", "").lower() == exact.lost.replace(" ", "").lower()


def check_readings(finder, text, found):
    """Tokens spell the caption, and as many are read as of a truncation; of several encoders one is that."""
    readings = finder.readings(text)
    assert (found.encoder, found.tokens, found.read) in {(one.encoder, len(one.tokens), one.read) for one in readings}
    for one in readings:
        spelled = "".join(word for word, _ in one.tokens if word != "…").replace(" ", "").lower()
        assert spelled == text.replace(" ", "").lower()
        read = [read for _, read in one.tokens]
        assert read in (sorted(read), sorted(read, reverse=True))  # cut off at one end


def test_windows_read_more(case, request):
    if not FAMILIES[case.family].text.windows:
        pytest.skip("a family without windows")
    model = request.getfixturevalue("model")
    read = [cut.read for count in (1, 2, 3) if (cut := cuts(model, case, [WORDS], windows=count)[0]) is not None]
    assert read == [75, 150, 225]


@pytest.mark.few
def test_a_smaller_max_length_reads_less(case, model):
    facts = FAMILIES[case.family].text
    if facts.shortest == facts.longest or case.options.get("without_t5"):
        pytest.skip("one length")
    less, more = (cuts(model, case, [WORDS], max_length=length)[0] for length in (facts.longest // 2, facts.longest))
    assert less is not None and more is not None and less.read < more.read
    assert less.lost.endswith(more.lost)


@pytest.mark.parametrize(("name", "encoder", "tokens", "whole"), [
    ("flux", "CLIP", 100, "T5"), ("flux", "T5", 900, ""), ("sd3", "CLIP", 100, "T5"), ("sdxl", "CLIP", 100, "")])
def test_of_several_encoders_the_one_that_reads_most_counts(name, encoder, tokens, whole, tmp_path):
    model = tiny_pipelines.save(name, tmp_path / "model")
    found = cuts(model, next(case for case in CASES if case.build == name), ["a red cat on a bench " * (tokens // 16)])
    assert found[0] is not None and (found[0].encoder, found[0].whole) == (encoder, whole)


def test_an_unknown_change_of_captions_is_as_none(monkeypatch, tmp_path):
    model = tiny_pipelines.save("pixart_alpha", tmp_path / "model")
    monkeypatch.setattr(truncation, "_CHANGES", ())
    (found,) = cuts(model, next(case for case in CASES if case.build == "pixart_alpha"), [WORDS])
    assert found is not None and WORDS.strip().endswith(found.lost)
