"""The tiny pipelines, shipped and random, load as any Stable Diffusion 1.5 directory does."""

from itertools import product

import pytest
import torch
import transformers
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from PIL import ImageEnhance
from safetensors import safe_open
from torch.nn.functional import normalize
from transformers import AutoTokenizer, CLIPTextModel

from prep.demo.drawing import draw_picture
from prep.demo.shipped import SHIPPED, VISION, write_model
from prep.demo.tiny_model import build_random, load_parts, write_pipeline
from prep.demo.vocabulary import COLORS, GROUNDS, MAX_TOKENS, SHAPES, caption, vocabulary


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    out = tmp_path_factory.mktemp("random")
    build_random(out)
    return out


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    root = tmp_path_factory.mktemp("shipped")
    write_model(root)
    return root / "model"


@pytest.mark.parametrize("which", ["random", "shipped"])
def test_the_pipeline_loads_and_draws_at_any_bucket(which, request):
    pipeline = StableDiffusionPipeline.from_pretrained(request.getfixturevalue(which), low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.text_encoder.dtype == pipeline.unet.dtype == pipeline.vae.dtype == torch.float32
    picture = pipeline("a red heart", width=64, height=112, num_inference_steps=2).images[0]
    assert picture.size == (64, 112)


def test_the_same_seed_makes_the_same_files(random, tmp_path):
    build_random(tmp_path / "same")
    build_random(tmp_path / "other", seed=1)
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "same" / weights).read_bytes() == (random / weights).read_bytes()
    assert (tmp_path / "other" / weights).read_bytes() != (random / weights).read_bytes()


def test_a_pipeline_written_again_is_the_same_and_names_no_directory(random, tmp_path):
    write_pipeline(tmp_path, load_parts(random), dtype=torch.float32)
    for path in (path for path in random.rglob("*") if path.is_file()):
        assert (tmp_path / path.relative_to(random)).read_bytes() == path.read_bytes()


def test_building_leaves_the_random_state_alone(tmp_path):
    before = torch.random.get_rng_state()
    build_random(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("text", ["Ünïcode 図 and 🖼", "a, (weird) <prompt>:1.2"])
def test_any_text_tokenizes(random, text):
    tokenizer = AutoTokenizer.from_pretrained(random / "tokenizer")
    assert len(tokenizer) == len(vocabulary())
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True).replace(" ", "") == (
        text.lower().replace(" ", "")
    )


def test_words_of_captions_are_one_token_each(random):
    tokenizer = AutoTokenizer.from_pretrained(random / "tokenizer")
    words = caption("orange", "heart", "striped")
    assert tokenizer.tokenize(words) == [f"{word}</w>" for word in words.split()]
    assert len(tokenizer("", padding="max_length").input_ids) == MAX_TOKENS


def test_the_shipped_weights_are_small_and_in_half_precision(shipped):
    files = list(shipped.rglob("*.safetensors"))
    assert len(files) == 3
    files.append(VISION / "model.safetensors")
    assert sum(path.stat().st_size for path in files) <= 2_500_000
    for path in files:
        with safe_open(path, "pt") as weights:
            assert all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118


def test_the_shipped_files_name_no_machine(shipped):
    for path in shipped.rglob("*.json"):
        assert "_name_or_path" not in path.read_text()


def test_the_shipped_vae_knows_its_latents_scale(shipped):
    vae = AutoencoderKL.from_pretrained(shipped / "vae", low_cpu_mem_usage=False)
    assert vae.config.scaling_factor != 0.18215
    assert 2 ** (len(vae.config.block_out_channels) - 1) == 8


def test_the_shipped_networks_fit_together(shipped):
    text = CLIPTextModel.from_pretrained(shipped / "text_encoder")
    unet = UNet2DConditionModel.from_pretrained(shipped / "unet", low_cpu_mem_usage=False)
    assert unet.config.cross_attention_dim == text.config.hidden_size
    assert SHIPPED.name == "model"


def test_the_shipped_vision_model_knows_what_the_demo_draws():
    """Of pictures that it never saw, nearly each finds its caption among all others; and itself, made brighter."""
    model = transformers.CLIPModel.from_pretrained(VISION, dtype=torch.float32)
    processor = transformers.CLIPImageProcessor.from_pretrained(VISION)
    tokenizer = AutoTokenizer.from_pretrained(VISION)
    shown = [(color, shape, ground) for color, shape, ground in product(COLORS, SHAPES, GROUNDS)][::3]
    pictures = [draw_picture(shape=shape, color=color, ground=ground, size=(112, 96), seed=number)[0]
                for number, (color, shape, ground) in enumerate(shown)]
    brighter = [ImageEnhance.Brightness(picture).enhance(1.05) for picture in pictures]
    with torch.inference_mode():
        seen, again = (normalize(model.get_image_features(
            **processor(images=each, return_tensors="pt")).pooler_output, dim=1) for each in (pictures, brighter))
        read = normalize(model.get_text_features(**tokenizer(
            [caption(*each) for each in shown], padding=True, return_tensors="pt")).pooler_output, dim=1)
    own = torch.arange(len(shown))
    assert ((seen @ read.T).argmax(1) == own).float().mean() > 0.85
    assert ((seen @ again.T).argmax(1) == own).float().mean() > 0.98
