"""The script that makes the shipped model runs, on networks of a few thousand weights for a blink."""

import numpy as np
import pytest
import torch

from prep.demo import pretrain
from prep.demo.optimize import Average, advance, learning_rate, progress
from prep.demo.pretrain_vae import SIZES, draw_batch
from prep.demo.tiny_model import RANDOM, make_parts
from prep.demo.vocabulary import LEFT_OUT, write_tokenizer


def test_the_average_follows_and_is_exchanged():
    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(network.weight)
    average = Average([network], decay=0.5)
    torch.nn.init.ones_(network.weight)
    for _ in range(3):
        average.update()
    average.swap()
    assert network.weight.item() == pytest.approx(1 - 1 / 11 * 2 / 12 * 3 / 13)
    average.swap()
    assert network.weight.item() == 1


def test_the_learning_rate_rises_and_falls():
    assert learning_rate(1.0, 0, 0.0) < learning_rate(1.0, 100, 0.0) < learning_rate(1.0, 200, 0.0) == 1.0
    assert learning_rate(1.0, 500, 1.0) == pytest.approx(0.01)


def test_progress_ends_with_the_time():
    steps = list(progress(0.0005))
    assert [step for step, _ in steps] == list(range(len(steps)))
    assert all(0 <= done < 1 for _, done in steps)


def test_a_step_goes_down_and_is_clipped():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    advance(torch.optim.SGD([weight]), 100 * weight.square().sum(), rate=0.1)
    assert weight.item() == pytest.approx(0.9)


def test_the_left_out_shape_is_never_drawn():
    pictures, labels = draw_batch(300, (16, 16), np.random.default_rng(0))
    assert pictures.shape == (300, 3, 16, 16)
    assert pictures.abs().max() <= 1
    assert LEFT_OUT[1] not in {shape for _, shape, _ in labels}


def test_bucket_sizes_suit_the_unet():
    assert all(side % 16 == 0 for size in SIZES for side in size)


@pytest.fixture
def one_thread():
    """Networks this small wait for their threads: 10 s instead of 1 s on two busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_unet_and_text_encoder_learn(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "_BATCH", 4)
    monkeypatch.setattr(pretrain, "_PER_SIZE", 8)
    parts, rng = make_parts(RANDOM, seed=0), np.random.default_rng(0)
    data = [pretrain.encode_drawn(parts.vae, size, rng) for size in SIZES[1:3]]
    assert [each.latents_BChw.shape for each in data] == [(8, 4, 14, 10), (8, 4, 10, 14)]
    networks = (parts.unet, parts.text)
    before = [next(network.parameters()).clone() for network in networks]
    pretrain.train_unet(parts, data, tokenizer=pretrain.load_tokenizer(tmp_path), minutes=0.005, rng=rng)
    assert not any(torch.equal(old, next(new.parameters())) for old, new in zip(before, networks, strict=True))


def test_captions_are_sometimes_short_or_empty():
    rng = np.random.default_rng(0)
    seen = [pretrain.words_of(("orange", "ring", "shaded"), rng) for _ in range(200)]
    assert set(seen) == {"", "an orange ring", "an orange ring on a shaded ground"}
    assert seen.count("") < 50


def test_the_tokenizer_is_written_before_it_is_loaded(tmp_path):
    write_tokenizer(tmp_path / "again")
    pretrain.load_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer" / "vocab.json").read_text() == (tmp_path / "again" / "vocab.json").read_text()
