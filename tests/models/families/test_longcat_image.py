"""LongCat-Image's text rows: quoted text is tokenized by character, and padding is between caption and template.

Its transformer is given numbered text tokens, and the positions of pictures count on from them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

from prep.models.configs import Configs
from prep.models.families.longcat_image import (
    APOSTROPHE,
    FAMILY,
    LENGTH,
    PREFIX,
    SUFFIX,
    pieces,
    positions,
    predict,
    tokens,
)
from prep.models.family import Conditions, TextOptions
from prep.models.text.truncation import TruncationFinder

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=LENGTH)
CAPTIONS = ("a red cat", "a sign 'no cats' \u201c\u732b\u2019s\u201d", "", "at \"5 o'clock\"", "\u2018\u732b\u2019")


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("longcat_image")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("longcat_image", tmp_path_factory.mktemp("longcat_image") / "model")


def rows(pipeline, captions):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, OPTIONS, CPU)]


def theirs(caption: str) -> list[str]:
    """What the pipeline gives its tokenizer."""
    return [each for part, quoted in split_quotation(caption) for each in (part if quoted else [part])]


# ---- the parts of a caption ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caption", "parts"), [
    ("", []), ("a cat", ["a cat"]), ("say 'hi' now", ["say ", "'", "h", "i", "'", " now"]),
    ('"ab"', ['"', "a", "b", '"']), ("\u201c\u4f60\u597d\u201d\u3002", ["\u201c", "\u4f60", "\u597d", "\u201d",
                                                                       "\u3002"]),
    ("\u2018a\u2019\u2018b\u2019", ["\u2018", "a", "\u2019", "\u2018", "b", "\u2019"]),
    ("the cat's 'box'", ["the cat's ", "'", "b", "o", "x", "'"]), ("cats' and dogs", ["cats' and dogs"]),
    ("\u300c\u4f60\u597d\u300d", ["\u300c\u4f60\u597d\u300d"]), ("a '\n' b", ["a ", "'", "\n", "'", " b"]),
    ("don't, it's, don't", ["don't, it's, don't"])])  # of which the pipeline makes one word
def test_parts(caption, parts):
    assert list(pieces(caption)) == parts


@given(st.text(alphabet="ab \n'\"\u2018\u2019\u201c\u201d\u00e9\u732b", max_size=24))
def test_parts_are_the_pipeline_s(caption):
    assert "".join(pieces(caption)) == caption
    if len({match[0] for match in APOSTROPHE.finditer(caption)}) <= 1:
        assert list(pieces(caption)) == theirs(caption)


def test_the_pipeline_confuses_two_words_with_apostrophes():
    """If it no longer does, its parts are those of rows."""
    assert theirs("don't it's")[0] in ("don't don'tdon't", "it'sit's it's")


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_the_constants_in_the_keys_are_the_pipeline_s(pipeline):
    assert (pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix) == (PREFIX, SUFFIX)
    assert pipeline.tokenizer_max_length == LENGTH == FAMILY.text.shortest == FAMILY.text.longest


def test_rows_are_the_pipeline_s_alone_and_side_by_side(pipeline):
    together = rows(pipeline, CAPTIONS)
    for number, caption in enumerate(CAPTIONS):
        (wanted,), ids = tiny_pipelines.encode_prompts(pipeline, [caption])
        assert wanted.shape == (LENGTH, 32) and ids.shape == (LENGTH, 3)
        assert torch.equal(rows(pipeline, [caption])[0], wanted)
        assert torch.allclose(together[number], wanted, atol=1e-6)
    assert not any(torch.allclose(together[0], other, atol=1e-4) for other in together[1:])


def test_quotation_marks_decide_rows_where_a_token_has_several_characters():
    pipeline = tiny_pipelines.build("longcat_image")
    pipeline.tokenizer.add_tokens(["cat"])
    pipeline.text_encoder.resize_token_embeddings(len(pipeline.tokenizer))
    for caption, count in (("cat", 1), ("'cat'", 5), ("\u201ccat\u201d", 9), ("<cat>", 3)):
        assert len(tokens(pipeline.tokenizer, caption)) == count  # of a byte each, but for the new one
        assert torch.equal(rows(pipeline, [caption])[0], tiny_pipelines.encode_prompts(pipeline, [caption])[0][0])


def test_shapes_are_those_of_rows(model):
    assert dict(FAMILY.text.shapes(Configs(model), OPTIONS)) == {"hidden": (LENGTH, 32)}


def test_the_row_without_a_prompt_is_the_encoding_of_nothing(pipeline):
    with torch.no_grad():
        row = FAMILY.text.unconditional(pipeline, OPTIONS, CPU)["hidden"]
    assert torch.equal(row, rows(pipeline, [""])[0])


# ---- captions that are too long --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caption", "read"), [
    ("a" * 600, LENGTH), ("'" + "b" * 600 + "'", LENGTH), ("x" * 510 + "'cd'", LENGTH),
    ("\u732b" * 171, LENGTH), ("don't " * 60 + "it's " * 60 + "end", LENGTH), ("a" * 512, None), ("", None)])
def test_what_is_lost_of_long_captions(pipeline, model, caption, read):
    """The words that the pipeline does not read."""
    (found,) = TruncationFinder(model, FAMILY, OPTIONS).find([caption])
    if read is None:
        assert found is None
        return
    assert found is not None and (found.read, found.encoder) == (read, "Qwen2_5_VL")
    assert found.tokens == len(caption.encode()) and caption.endswith(found.lost)
    whole, kept = rows(pipeline, [caption, caption.encode()[:read].decode(errors="ignore")])
    ends = len(caption[:-len(found.lost)].encode())
    assert ends <= read < ends + 4 and torch.allclose(whole[:ends], kept[:ends], atol=1e-6)


def test_a_long_caption_s_row_is_the_pipeline_s(pipeline, caplog):
    caption = "a sign 'no cats' " * 40
    with caplog.at_level(logging.CRITICAL):  # it warns
        (wanted,), _ = tiny_pipelines.encode_prompts(pipeline, [caption])
    assert torch.equal(rows(pipeline, [caption])[0], wanted)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def test_positions_of_pictures_count_on_from_the_text(pipeline):
    latent = torch.randn(1, 16, 6, 8)
    _, wanted = pipeline.prepare_latents(1, 16, 48, 64, torch.float32, CPU, None, latent)
    assert torch.equal(positions(latent.bfloat16(), LENGTH), wanted) and wanted[-1].tolist() == [1, 514, 515]


def test_the_transformer_takes_no_guidance_number(pipeline):
    text, noised, found = torch.randn(1, LENGTH, 32), torch.randn(1, 16, 8, 8), []
    for hidden in (text, text.flip(1)):
        with torch.no_grad():
            found.append(predict(pipeline.transformer, noised, torch.tensor([0.5]),
                                 Conditions(text={"hidden": hidden}, sizes_B6=torch.zeros(1, 6))))
    assert found[0].shape == (1, 16, 8, 8) and not torch.allclose(found[0], found[1], atol=1e-4), "order of tokens"
    assert not FAMILY.takes_guidance
