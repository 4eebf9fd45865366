"""Qwen-Image-Edit: text rows are what the pipeline makes of words and pictures, with the positions of pictures."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as theirs
from model_files import change_json
from tiny_pipelines.tokenizers import qwen2_vl_processor, qwen25_vl

from prep.errors import ModelError
from prep.models.families.qwenimage_edit import DROPPED, FAMILY, PICTURE, SEEN_SIDE, SIDE, TEMPLATE, see
from prep.models.family import ATTENTION_MASK, TextOptions
from prep.models.fingerprint import text_files, text_fingerprint
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.models.text.pipeline import tokenizers_of
from prep.models.text.places import positions_by_place
from prep.models.text.vision import SeeingProcessor

OPTIONS = TextOptions(max_length=1024)
SIZES = [(96, 64), (40, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_pipelines.save("qwenimage_edit", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pipeline(model):
    return tiny_pipelines.load(model)


@pytest.fixture(scope="module")
def encoder(model):
    return TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")


def pictures():
    stream = np.random.default_rng(3)
    return [Image.fromarray(stream.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in SIZES]


def as_seen(picture):
    """As the pipeline scales a picture for its text encoder."""
    return picture.resize(see(picture.size).bucket, Image.Resampling.LANCZOS)


def test_constants_are_the_pipeline_s(pipeline):
    assert (pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx) == (TEMPLATE, DROPPED)
    assert (SIDE**2, SEEN_SIDE**2) == (theirs.VAE_IMAGE_SIZE, theirs.CONDITION_IMAGE_SIZE)
    assert f'"{PICTURE}"' in inspect.getsource(type(pipeline)._get_qwen_prompt_embeds)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_processor_is_that_of_transformers(count):
    tokenizer = qwen25_vl()
    usual = qwen2_vl_processor(tokenizer)
    given = [as_seen(picture) for picture in pictures()[:count]]
    texts = ["".join(map(PICTURE.format, range(1, count + 1))) + "red", "a longer text"][:1 if count else 2]
    wanted = usual(text=texts, images=given or None, padding=True, return_tensors="pt")
    made = SeeingProcessor(tokenizer, usual.image_processor)(
        text=texts, images=[np.asarray(each) for each in given] or None, padding=True, return_tensors="pt")
    counting = SeeingProcessor(tokenizer, usual.image_processor)
    counting.looks = False
    counted = counting(text=texts, images=[np.asarray(each) for each in given] or None)
    assert torch.equal(counted["input_ids"], wanted["input_ids"])
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in made)


@pytest.mark.parametrize("words", ["make it red", None], ids=["caption", "no prompt"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_row_is_the_pipeline_s(pipeline, encoder, model, words, count):
    shown = [as_seen(picture) for picture in pictures()[:count]]
    row = encoder.encode_seen(words, [np.asarray(each) for each in shown])
    with torch.no_grad():
        flat = pipeline.encode_prompt(words or " ", image=shown, device="cpu")[0][0]
        with positions_by_place(pipeline):
            wanted = pipeline.encode_prompt(words or " ", image=shown, device="cpu")[0][0]
    assert np.array_equal(row["hidden"], wanted.numpy()) and row[ATTENTION_MASK].all()
    assert not np.allclose(row["hidden"], flat.numpy(), atol=1e-4), "positions of pictures make no difference"
    counter = LengthCounter(model, FAMILY, OPTIONS)
    tokens = counter.seen(words, [each.size for each in shown])
    assert tokens % 16 == 0 and tokens - 16 < len(wanted) <= tokens
    padded = encoder.encode_seen(words, [np.asarray(each) for each in shown], tokens)
    assert np.array_equal(padded["hidden"][:len(wanted)], row["hidden"]) and padded[ATTENTION_MASK].sum() == len(wanted)


def test_order_and_pixels_of_pictures_decide_a_row(encoder):
    first, second = (np.asarray(as_seen(picture)) for picture in pictures())
    rows = [encoder.encode_seen("red", shown)["hidden"] for shown in (
        [first, second], [second, first], [first], [255 - first])]
    for number, row in enumerate(rows):
        for other in rows[:number]:
            assert row.shape != other.shape or not np.allclose(row, other, atol=1e-5)


def test_a_place_in_a_caption_is_no_picture(encoder):
    picture = np.asarray(as_seen(pictures()[0]))
    rows = [encoder.encode_seen(words, [picture])["hidden"] for words in ("red", "re<|image_pad|>d")]
    assert np.array_equal(*rows)


def test_tokens_of_pictures_take_no_room_from_words(model):
    """A caption is cut after as many tokens, whatever is seen beside it."""
    short = TextEncoder(model, FAMILY, TextOptions(max_length=400), device="cpu", compute="float32", dtype="float32")
    shown = [np.asarray(as_seen(picture)) for picture in pictures()]
    (alone,) = short.encode(["a" * 900])
    assert len(alone["hidden"]) == 400
    labels = sum(len(text) for text in ("Picture 1: ", "Picture 2: ")) + 4
    places = [len(short.encode_seen("a" * 900, shown[:count])["hidden"]) for count in (1, 2)]
    assert places[0] > 400 + 13 and places[1] > places[0] + 13 and labels < places[1] - 400 < 100


def test_the_processor_s_files_are_in_the_fingerprint(model, tmp_path):
    import shutil

    before = text_fingerprint(model)
    for name, change in (("preprocessor_config.json", {"image_mean": [0.1, 0.2, 0.3]}),
                         ("tokenizer_config.json", {"model_max_length": 77})):
        copy = shutil.copytree(model, tmp_path / name)
        assert text_fingerprint(copy) == before
        change_json(copy / "processor" / name, **change)
        assert text_fingerprint(copy) != before


@pytest.mark.parametrize(("change", "why"), [
    ({"patch_size": 1}, "makes 1048576 parts of a picture"), ({"patch_size": 0}, "cannot prepare a picture"),
    ({"size": {"shortest_edge": 1 << 40, "longest_edge": 1 << 41}}, "parts of a picture"),
    (None, "has no preprocessor_config.json")], ids=["small parts", "no parts", "large pictures", "no file"])
def test_a_bad_processor_is_one_clear_error(model, tmp_path, change, why):
    import shutil

    copy = shutil.copytree(model, tmp_path / "model")
    path = copy / "processor" / "preprocessor_config.json"
    if change is None:
        path.unlink()
    else:
        change_json(path, **({"size": {"shortest_edge": 1 << 20, "longest_edge": 1 << 21}} | change))
    with pytest.raises(ModelError, match=why):
        tokenizers_of(copy, FAMILY, text_files(copy))
