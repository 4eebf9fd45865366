"""Qwen-Image-2.1: text rows are what the pipeline makes of words and pictures, without the pictures themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import inspect
import shutil

import tiny_pipelines
from model_files import change_json

from prep.errors import ModelError
from prep.models.families.qwenimage21 import BETWEEN, END, FAMILY, PICTURE, SIDE, START
from prep.models.family import ATTENTION_MASK, PICTURES, TextOptions
from prep.models.fingerprint import text_fingerprint
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.models.vae import VaeDecoder, decode, posterior

OPTIONS = TextOptions(max_length=1024)
SIZES = [(96, 64), (32, 64), (64, 64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_pipelines.save("qwenimage21", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pipeline(model):
    return tiny_pipelines.load(model)


@pytest.fixture(scope="module")
def encoder(model):
    return TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")


def pictures():
    stream = np.random.default_rng(3)
    return [stream.integers(0, 256, (*size[::-1], 3), np.uint8) for size in SIZES]


def test_constants_are_the_pipeline_s(pipeline):
    assert pipeline.prompt_template_t2i == START + "{}" + END
    assert pipeline.prompt_template_ti2i == START + PICTURE.format(1) + "{}" + END
    source = inspect.getsource(type(pipeline)._get_qwen_prompt_embeds)
    assert f'f"{BETWEEN}{PICTURE.format("{i}")}"' in source
    assert inspect.signature(pipeline.__call__).parameters["output_resolution"].default == SIDE


@pytest.mark.parametrize("words", ["make it red", None], ids=["caption", "no prompt"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_is_the_pipeline_s_but_for_the_pictures(pipeline, encoder, model, words, count):
    """Which the transformer replaces; the row says where."""
    shown = pictures()[:count]
    row = encoder.encode_seen(words, shown)
    with torch.no_grad():
        wanted, _, places = pipeline.encode_prompt(words or " ", image=list(map(Image.fromarray, shown)), device="cpu")
    kept = ~places[0]
    assert np.array_equal(row["hidden"], wanted[0][kept].numpy()) and row[ATTENTION_MASK].all()
    runs = [number for number in range(1, len(kept)) if kept[number] and not kept[number - 1]]
    assert len(runs) == count and int(places.sum()) == sum(width * height for width, height in SIZES[:count]) // 32**2
    behind = [int(kept[:number].sum()) for number in runs]
    assert np.flatnonzero(row[PICTURES]).tolist() == behind
    tokens = LengthCounter(model, FAMILY, OPTIONS).seen(words, SIZES[:count])
    assert tokens % 16 == 0 and tokens - 16 < len(row["hidden"]) <= tokens


def test_captions_are_the_pipeline_s_in_a_batch_too(pipeline, encoder):
    captions = ["red", "a much longer caption", ""]
    rows = encoder.encode(captions)
    for caption, row in zip(captions, rows, strict=True):
        with torch.no_grad():
            wanted, _, places = pipeline.encode_prompt(caption, device="cpu")
        assert np.allclose(row["hidden"], wanted[0].numpy(), atol=1e-5), caption
        assert not row[PICTURES].any() and not places.any()
    assert np.allclose(rows[2]["hidden"], encoder.unconditional()["hidden"], atol=1e-5)


def test_order_and_pixels_of_pictures_decide_a_row(encoder):
    first, _, second = pictures()
    rows = [encoder.encode_seen("red", shown)["hidden"] for shown in (
        [first, second], [second, first], [first], [255 - first])]
    for number, row in enumerate(rows):
        for other in rows[:number]:
            assert row.shape != other.shape or not np.allclose(row, other, atol=1e-5)


@pytest.mark.parametrize("words", ["re<|image_pad|>d", "re<|image_<|image_pad|>pad|>d"])
def test_a_place_in_a_caption_is_no_picture(encoder, words):
    for encode in (lambda text: encoder.encode([text])[0], lambda text: encoder.encode_seen(text, pictures()[:1])):
        row, usual = encode(words), encode("red")
        assert np.array_equal(row["hidden"], usual["hidden"]) and np.array_equal(row[PICTURES], usual[PICTURES])


def test_tokens_of_pictures_take_no_room_from_words(model):
    """A caption is cut after as many tokens, whatever is seen beside it."""
    short = TextEncoder(model, FAMILY, TextOptions(max_length=400), device="cpu", compute="float32", dtype="float32")
    (alone,) = short.encode(["a" * 900])
    assert len(alone["hidden"]) == 400
    for count in (1, 3):
        labels = BETWEEN.join(PICTURE.format(number) for number in range(1, count + 1))
        beside = len(labels.replace("<|image_pad|>", "")) - count * (len("<|vision_start|><|vision_end|>") - 2)
        assert len(short.encode_seen("a" * 900, pictures()[:count])["hidden"]) == 400 + beside


def test_a_processor_that_makes_other_tokens_is_one_clear_error(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    change_json(copy / "processor" / "preprocessor_config.json", merge_size=1)
    encoder = TextEncoder(copy, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")
    with pytest.raises(ModelError, match="makes 24 tokens of pictures that take 24 of the transformer, expected 6"):
        LengthCounter(copy, FAMILY, OPTIONS).seen("red", SIZES[:1])
    assert encoder.encode(["red"])[0] is not None


def test_the_processor_s_files_are_in_the_fingerprint(model, tmp_path):
    before = text_fingerprint(model)
    for name, change in (("preprocessor_config.json", {"image_mean": [0.1, 0.2, 0.3]}),
                         ("tokenizer_config.json", {"model_max_length": 77})):
        copy = shutil.copytree(model, tmp_path / name)
        assert text_fingerprint(copy) == before
        change_json(copy / "processor" / name, **change)
        assert text_fingerprint(copy) != before


@torch.no_grad()
def test_pictures_are_opaque_and_shown_over_white(pipeline, model):
    """The VAE has a channel for opacity, which pictures may lack."""
    image = torch.rand(1, 3, 32, 32) * 2 - 1
    opaque = torch.cat([image, torch.ones(1, 1, 32, 32)], 1)[:, :, None]
    latent = posterior(pipeline.vae, image).mean_BChw
    assert torch.equal(latent, pipeline.vae.encode(opaque).latent_dist.mean[:, :, 0])
    made = pipeline.vae.decode(latent[:, :, None]).sample[0, :, 0].numpy()
    color, opacity = made[:3] / 2 + 0.5, made[3:] / 2 + 0.5
    assert np.array_equal(decode(pipeline.vae, latent)[0].numpy(), made)
    shown = VaeDecoder(model, device="cpu").decode(latent[0].numpy()).transpose(2, 0, 1) / 255
    assert np.allclose(shown, opacity * color + (1 - opacity), atol=0.5 / 255 + 1e-6) and shown.shape == (3, 32, 32)
    assert 0.01 < opacity.mean() < 0.99
