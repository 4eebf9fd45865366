"""What one types wrong after --set, and what the error tells to type instead."""

from __future__ import annotations

import pytest

from prep.errors import ConfigError
from train.cli.options import read_settings

WRONG = [
    ("lora.rank=abc", "lora.rank is 'abc', expected a whole number from 1 to 4096", "--set lora.rank=16"),
    ("lora.rank=4.0", "lora.rank is 4.0, expected a whole number from 1 to 4096", "--set lora.rank=4"),
    ("steps=1e4", "steps is 10000.0, expected a whole number, 1 or more", "--set steps=10000"),
    ("sample.every=-1", "sample.every is -1, expected a number from 0 to 1099511627776", "--set sample.every=200"),
    ("optimizer.lr=.001", "optimizer.lr is '.001', expected a number from 0 to 100", "--set optimizer.lr=0.001"),
    ("optimizer.lr=0,001", "optimizer.lr is '0,001', expected a number from 0 to 100", "--set optimizer.lr=0.001"),
    ("sample.every=1,000", "sample.every is '1,000', expected a whole number of steps, 0 or more, or epochs like "
     "'1 epoch' or '0.5 epochs'", "--set sample.every=1000"),
    ("sample.every=500.0", "sample.every is 500.0, expected a whole number of steps", "--set sample.every=500"),
    ("checkpoint.every=epoch", "checkpoint.every is 'epoch', expected a whole number of steps, 0 or more, or epochs "
     "like '1 epoch' or '0.5 epochs'", "--set 'checkpoint.every=1 epoch'"),
    ("checkpoint.every=every 2", "checkpoint.every is 'every 2', expected", "--set 'checkpoint.every=1 epoch'"),
    ("checkpoint.every=every 2 Epochs", "expected a whole number of steps", "--set 'checkpoint.every=2 epochs'"),
    ("validation.every=.5 epochs", "validation.every is '.5 epochs', ", "--set 'validation.every=0.5 epochs'"),
    ("validation.every=0.5", "validation.every is 0.5, expected", "--set 'validation.every=0.5 epochs'"),
    ("validation.every=true", "validation.every is True, expected", "--set validation.every=200"),
    ("save_every_n_epochs=2", "unknown key 'save_every_n_epochs' in the options; here it is checkpoint.every = \"1 "
     "epoch\", or another number of epochs", "train init"),
    ("optimizer.lr=nan", "optimizer.lr is nan, expected a number from 0 to 100", "--set optimizer.lr=0.0001"),
    ("optimizer.name=adam", "did you mean 'adamw'?", "--set optimizer.name=adamw"),
    ("optimizer.name=AdamW8bit", "did you mean 'adamw-8bit'?", "--set optimizer.name=adamw-8bit"),
    ("prediction=v", "did you mean 'v_prediction'?", "--set prediction=v_prediction"),
    ("tf32=True", "tf32 is 'True', expected true or false", "--set tf32=true"),
    ("tf32=off", "tf32 is 'off', expected true or false", "--set tf32=false"),
    ("loss.masked=yes", "loss.masked is 'yes', expected true, false or \"auto\"", "--set loss.masked=true"),
    ("sample.size=512", "sample.size is 512, expected a list of two numbers, [width, height] in multiples of 8",
     "--set 'sample.size=[512, 512]'"),
    ("sample.size=512x768", "sample.size is '512x768', expected a list of two numbers",
     "--set 'sample.size=[512, 768]'"),
    ("optimizer.betas=0.9,0.99", "optimizer.betas is '0.9,0.99', expected a list of two numbers, 0 to 0.999999",
     "--set 'optimizer.betas=[0.9, 0.99]'"),
    ("lora.targets=to_q", "lora.targets is 'to_q', expected one of: attention, all-linear, kohya, kohya-conv, or a "
     "list of layers like ['to_q']", "--set 'lora.targets=[\"to_q\"]'"),
    ("lora.targets=all_linear", "did you mean 'all-linear'?", "--set lora.targets=all-linear"),
    ("lora.rnak=4", "unknown key 'rnak' in [lora] of the options; did you mean 'rank'? (known are: ",
     "--set lora.rank=4"),
    ("rank=4", "unknown key 'rank' in the options; here it is lora.rank", "--set lora.rank=4"),
    ("network_dim=4", "unknown key 'network_dim' in the options; here it is lora.rank", "--set lora.rank=4"),
    ("lora/rank=4", "unknown key 'lora/rank' in the options; here it is lora.rank", "--set lora.rank=4"),
    ("LORA.RANK=4", "unknown key 'LORA' in the options; did you mean 'lora'?", "--set lora.rank=4"),
    ("samples.every=5", "unknown key 'samples' in the options; did you mean 'sample'?", "--set sample.every=5"),
    ("optimizer=lion", "optimizer is 'lion', but it is a section, expected one of its settings: optimizer.name, "
     "optimizer.lr, ", "--set optimizer.name=lion"),
    ("lora=8", "lora is 8, but it is a section, expected one of its settings: lora.kind, ", "--set lora.kind=lora"),
    ("every=5", "here it is validation.every or sample.every or evaluate.every or checkpoint.every", "train init"),
    ("guidance_scale=4", "here it is sample.guidance for pictures", "train init"),
    ("lora", "--set is 'lora', expected NAME=VALUE", "--set lora.kind=lora"),
    ("lora.rank:4", "--set is 'lora.rank:4', expected NAME=VALUE", "--set lora.rank=16"),
    ("=4", "--set is '=4', expected NAME=VALUE", "--set lora.rank=8"),
]


@pytest.mark.parametrize(("text", "message", "instead"), WRONG, ids=[text for text, _, _ in WRONG])
def test_what_to_type_instead(text, message, instead):
    with pytest.raises(ConfigError) as caught:
        read_settings(None, [text], {})
    assert message in caught.value.message and caught.value.exit_code == 3
    assert caught.value.hint.removeprefix("for example: ").partition("; ")[0].startswith(instead)
    if instead.startswith("--set "):  # what it tells to type is taken
        read_settings(None, [instead.removeprefix("--set ").strip("'")], {})


def test_a_value_in_a_file_is_mended_in_the_file(tmp_path):
    (tmp_path / "train.toml").write_text("[sample]\nsize = 512\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path / "train.toml", ["lora.rank=4"], {})
    assert caught.value.hint == ("for example: size = [512, 512] in [sample]; train init writes a file with every "
                                 "setting")


@pytest.mark.parametrize("text", ["123", "true", "2024-01-01", "a = b", "plain"])
def test_a_text_may_look_like_something_else(text):
    assert read_settings(None, [f"result.title={text}", "result.author=\"an author\""], {}).result.title == text


def test_only_one_value_is_read():
    with pytest.raises(ConfigError, match=r"seed is .1.nsteps = 5., expected a whole number from 0 to"):
        read_settings(None, ["seed=1\nsteps = 5"], {})
