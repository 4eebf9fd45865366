"""LongCat-Image-Edit: rows begin with the picture, at half the VAE's size, and positions of latents at their end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from family_cases import longcat_edit_mended
from model_files import change_json

from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.models.denoiser import packing
from prep.models.families.longcat_image import LENGTH
from prep.models.families.longcat_image_edit import FAMILY, PICTURE, PREFIX, append
from prep.models.family import ATTENTION_MASK, TextOptions
from prep.models.fingerprint import text_fingerprint
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.models.text.places import PLACE
from prep.models.text.truncation import TruncationFinder

OPTIONS = TextOptions(max_length=LENGTH)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Whose processor makes several tokens of a picture."""
    model = tiny_pipelines.save("longcat_image_edit", tmp_path_factory.mktemp("model"))
    change_json(model / "text_processor" / "preprocessor_config.json",
                size={"shortest_edge": 56**2, "longest_edge": 512**2})
    return model


@pytest.fixture(scope="module")
def pipeline(model):
    """As the authors' code runs: with the positions of pictures."""
    pipeline = tiny_pipelines.load(model)
    pipeline.text_processor.image_processor.size = {"shortest_edge": 56**2, "longest_edge": 512**2}
    longcat_edit_mended(pipeline)
    return pipeline


@pytest.fixture(scope="module")
def encoder(model):
    return TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")


def picture(size: tuple[int, int] = (176, 112)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (*size[::-1], 3), np.uint8))


def row_of(pipeline, words: str, shown: Image.Image) -> torch.Tensor:
    """The pipeline's row of words with a picture of the VAE's size."""
    with torch.no_grad():
        half = pipeline.image_processor.resize(shown, shown.height // 2, shown.width // 2)
        return pipeline.encode_prompt([words], half)[0][0]


def test_constants_are_the_pipeline_s(pipeline):
    assert pipeline.prompt_template_encode_prefix == PREFIX + PICTURE
    assert pipeline.tokenizer_max_length == LENGTH


@pytest.mark.parametrize("words", ["turn the 'A' into “B”", None, f"a{PLACE} cat"], ids=["caption", "none", "place"])
def test_a_row_is_the_pipeline_s(pipeline, encoder, model, words):
    shown = picture()
    row = encoder.encode_seen(words, [np.asarray(shown)])
    wanted = row_of(pipeline, (words or "").replace(PLACE, ""), shown)
    assert np.allclose(row["hidden"], wanted.numpy(), atol=1e-6) and row[ATTENTION_MASK].all()
    tokens = LengthCounter(model, FAMILY, OPTIONS).seen(words, [shown.size])
    assert len(wanted) == LENGTH + 2 + 6 and tokens == 528  # of 88 x 56 pixels, 28 x 28 each; a multiple of 16
    assert not np.allclose(encoder.encode_seen(words, [255 - np.asarray(shown)])["hidden"], row["hidden"], atol=1e-4)


def test_positions_of_pictures_make_a_difference(pipeline, model):
    """transformers 5 is not told them by the pipeline itself."""
    plain = tiny_pipelines.load(model)
    plain.text_processor.image_processor.size = pipeline.text_processor.image_processor.size
    assert not torch.allclose(row_of(plain, "a cat", picture()), row_of(pipeline, "a cat", picture()), atol=1e-4)


def test_a_caption_that_is_too_long_is_cut_where_the_pipeline_fails(pipeline, encoder, model):
    """It means to warn of what it cuts, as LongCat-Image's does."""
    caption = "make it 'red' " * 50
    with pytest.raises(TypeError, match="has no len"):
        row_of(pipeline, caption, picture())
    (found,) = TruncationFinder(model, FAMILY, OPTIONS).find([caption])
    assert found is not None and found.read == LENGTH
    cut, kept = (encoder.encode_seen(words, [np.asarray(picture())])["hidden"] for words in (
        caption, caption[:LENGTH]))
    assert np.array_equal(cut, kept) and np.allclose(kept, row_of(pipeline, caption[:LENGTH], picture()), atol=1e-6)


def test_the_files_of_the_processor_are_in_the_fingerprint(model, tmp_path):
    import shutil

    copy = shutil.copytree(model, tmp_path / "model")
    assert text_fingerprint(copy) == text_fingerprint(model)
    change_json(copy / "text_processor" / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    assert text_fingerprint(copy) != text_fingerprint(model)


def test_positions_of_references_are_the_pipeline_s(pipeline):
    """Of a picture of the size of the noise: the pipeline knows no other."""
    latent, shown = torch.randn(1, 16, 6, 8), torch.randn(1, 16, 6, 8)
    _, image, noise_ids, image_ids = pipeline.prepare_latents(
        shown, 1, 16, 48, 64, torch.float32, 600, torch.device("cpu"), None, latent)
    given = append({"hidden_states": packing.pack(latent), "img_ids": noise_ids,
                    "encoder_hidden_states": torch.zeros(1, 600, 32)}, [shown])
    assert torch.equal(given["hidden_states"][:, -12:], image) and image_ids[-1].tolist() == [2, 602, 603]
    assert torch.equal(given["img_ids"], torch.cat([noise_ids, image_ids.float()]))


RECIPE = """[model]
path = "model"
dtype = "float32"
compute = "float32"
[image]
resolution = 64
step = 32
[references]
resolution = 64
missing = "none"
[[source]]
path = "photos"
references = ["before"]
"""


@pytest.mark.slow
def test_pictures_with_references_are_encoded_and_trained(pipeline, model, prep, train, tmp_path):
    """Of two sizes, and one picture without a reference."""
    (tmp_path / "model").symlink_to(model)
    for number, size in enumerate(((96, 64), (64, 64), None)):
        draw(tmp_path / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text(f"'{number}'")
        if size is not None:
            draw(tmp_path / "before" / f"{number}.png", size, seed=10 + number)
    (tmp_path / "prompts.txt").write_text("a 'dog' --ref before/0.png\na cat\n")
    (tmp_path / "d.toml").write_text(RECIPE)
    made = prep("encode", tmp_path / "d.toml", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--prompts",
                tmp_path / "prompts.txt", "--device", "cpu", "--json")
    assert not made.code and json.loads(made.out)["encoded"] == {"latent": 5, "mask": 0, "text": 8}, made.err
    index = open_index(read_manifest(tmp_path / "m.json"))
    for sample in range(3):
        number = index.samples.name(sample)[0]
        first = int(index.samples.text_offsets[sample])
        row = Rows(index).text([index.ref(*(int(index.samples.texts[name][first]) for name in ("shard", "row")))])
        length = int(row[ATTENTION_MASK].sum())
        if number == "2":
            assert length == LENGTH
            continue
        with Image.open(tmp_path / "before" / f"{number}.png") as opened:
            shown = opened.convert("RGB").resize({"0": (80, 64), "1": (64, 64)}[number], Image.Resampling.LANCZOS)
        wanted = row_of(pipeline, f"'{number}'", shown)
        assert length == len(wanted) and torch.allclose(row["hidden"][0, :length], wanted, atol=1e-5), number
    assert not prep("verify", tmp_path / "m.json").code
    result = train("run", tmp_path / "m.json", "-o", tmp_path / "run", "--steps", 2, "--rank", 2, "--device", "cpu",
                   "--set", 'precision="fp32"', "--set", "batch_size=3", "--set", "sample.every=2", "--set",
                   "sample.steps=2")
    assert not result.code, result.err
    with Image.open(tmp_path / "run" / "samples" / "step-000002.png") as made:
        assert made.width > 64, "beside its reference"
