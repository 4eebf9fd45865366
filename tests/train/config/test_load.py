"""Settings: defaults, files, options, and a message for everything that can be wrong."""

from __future__ import annotations

import pytest

from prep.errors import ConfigError
from prep.training.schema import Config, Lora
from train.config.load import as_table, load_config, option, parse


def test_every_setting_has_a_default():
    config = parse({}, "train.toml")
    assert (config.method, config.steps, config.batch_size, config.lora.rank) == ("lora", 2000, 4, 16)
    assert config.loss.unmasked_weight == 0.1


def test_a_file_is_read_and_options_are_above_it(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text('steps = 10\nbatch_size = 8\n[lora]\nrank = 4\ntargets = ["to_q"]\n')
    config = load_config(path, {"lora.rank": 2, "optimizer.lr": 1})
    assert config.lora == Lora(rank=2, alpha=2.0, conv_rank=2, conv_alpha=2.0, targets=("to_q",))
    assert (config.steps, config.batch_size, config.micro_batch) == (10, 8, 8)
    assert config.optimizer.lr == 1.0


@pytest.mark.parametrize(("given", "found"), [
    ({}, (16, 16.0, 16, 16.0)), ({"rank": 4}, (4, 4.0, 4, 4.0)), ({"rank": 4, "alpha": 1.0}, (4, 1.0, 4, 1.0)),
    ({"conv_rank": 2}, (16, 16.0, 2, 2.0)), ({"rank": 4, "alpha": 1.0, "conv_rank": 2}, (4, 1.0, 2, 2.0)),
    ({"rank": 4, "conv_alpha": 3.0}, (4, 4.0, 4, 3.0)),
])
def test_ranks_and_alphas_follow_from_each_other(given, found):
    lora = parse({"lora": given}, "x").lora
    assert (lora.rank, lora.alpha, lora.conv_rank, lora.conv_alpha) == found


def test_an_option_that_counts_the_other_way_replaces_the_file_s(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text("epochs = 3\n")
    assert load_config(path, {"steps": 5}).epochs is None
    assert load_config(path, {"steps": 5}).steps == 5
    assert load_config(path).steps is None


def test_settings_survive_as_a_table():
    config = parse({"epochs": 2, "sample": {"size": [64, 96]}, "lora": {"targets": ["to_q", "to_k"]}}, "x")
    assert parse(as_table(config), "x") == config
    assert parse(as_table(Config(steps=1)), "x") == Config(steps=1)


WRONG = [
    ({"lora": {"rnak": 1}}, "unknown key 'rnak' in [lora] of train.toml; did you mean 'rank'? (known are: alpha, "
                            "conv_alpha, conv_rank, dora, dropout, factor, format, init, kind, layers, rank, rslora, "
                            "targets)"),
    ({"lerning_rate": 1}, "unknown key 'lerning_rate' in train.toml"),
    ({"stesp": 1}, "unknown key 'stesp' in train.toml; did you mean 'steps'?"),
    ({"lora": {"rnak": 1}}, "unknown key 'rnak' in [lora] of train.toml; did you mean 'rank'?"),
    ({"lora": 3}, "[lora] of train.toml is 3, expected a table"),
    ({"method": "lorra"}, "method is 'lorra', expected one of: lora, full; did you mean 'lora'?"),
    ({"steps": 0}, "steps is 0, expected a number from 1 to 1099511627776"),
    ({"steps": 1.5}, "steps is 1.5, expected a whole number"),
    ({"steps": 3, "epochs": 1}, "steps is 3 and epochs is 1, expected one of them"),
    ({"batch_size": 6, "micro_batch": 4}, "batch_size is 6, expected a multiple of micro_batch 4"),
    ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum is 0.9, but 'adamw' has no such setting, expected 0.95"),
    ({"optimizer": {"name": "lion", "eps": 0.1}}, "optimizer.eps is 0.1, but 'lion' has no such setting"),
    ({"optimizer": {"name": "adamw-schedule-free"}, "schedule": {"name": "cosine"}},
     "schedule.name is 'cosine', expected 'constant' for 'adamw-schedule-free', which averages the weights instead"),
    ({"optimizer": {"name": "adamw-schedule-free"}, "ema": {"decay": 0.9}},
     "ema.decay is 0.9, expected 0 for 'adamw-schedule-free', which averages the weights itself"),
    ({"optimizer": {"name": "adamw-schedule-free", "betas": [0.0, 0.9]}},
     "optimizer.betas[0] is 0, expected more for 'adamw-schedule-free'"),
    ({"optimizer": {"name": "prodigy", "betas": [0.0, 0.99]}},
     "optimizer.betas[0] is 0, expected more for 'prodigy'"),
    ({"optimizer": {"name": 3, "lr": 1}}, "optimizer.name is 3, expected "),
    ({"lora": {"layers": [{"rank": 4}]}},
     "lora.layers[0] is {'rank': 4}, expected 'match' and one of: rank, alpha, lr"),
    ({"full": {"train": [""]}}, "full.train[0] is '', expected the end of a layer's name, or re: and an expression"),
    ({"lora": {"layers": [{"match": "to_q"}]}}, "lora.layers[0] is {'match': 'to_q'}, expected 'match' and one of"),
    ({"lora": {"layers": [{"match": "to_q", "rank": 0}]}}, "lora.layers[0].rank is 0, expected "),
    ({"lora": {"layers": [{"match": "to_q", "size": 1}]}}, "unknown key 'size' in lora.layers[0]"),
    ({"lora": {"layers": [{"match": "re:(", "lr": 1}]}},
     "lora.layers[0].match is 're:(', which is no regular expression: "),
    ({"lora": {"targets": ["re:"]}},
     "lora.targets[0] is 're:', expected the end of a layer's name, or re: and an expression"),
    ({"lora": {"layers": [{"match": "to_q", "alpha": 1.0}]}},
     "lora.format is 'auto', expected 'diffusers' where lora.layers gives 'to_q' an alpha of its own: diffusers reads "
     "one alpha from a file with kohya's names"),
    ({"lora": {"layers": [{"match": "to_q", "rank": 2}], "rslora": True, "format": "kohya"}},
     "lora.format is 'kohya', expected 'diffusers' where lora.layers gives 'to_q' an alpha of its own, by "
     "lora.rslora: diffusers reads one alpha from a file with kohya's names"),
    ({"lora": {"layers": [{"match": "to_q", "lr": 1.0}]}, "optimizer": {"name": "prodigy"}},
     "lora.layers has an lr, but 'prodigy' finds one learning rate for all layers"),
    ({"optimizer": {"lr": "fast"}}, "optimizer.lr is 'fast', expected a number"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr is nan, expected a number from 0 to 100"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas has 1 values, expected 2"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas[1] is 1.0, expected a number from 0 to 0.999999"),
    ({"gradient_checkpointing": 1}, 'gradient_checkpointing is 1, expected true, false, "auto" or "offload"'),
    ({"loss": {"masked": 1}}, 'loss.masked is 1, expected true, false or "auto"'),
    ({"loss": {"normalize_area": 1}}, "loss.normalize_area is 1, expected true or false"),
    ({"caption_dropout": 1.1}, "caption_dropout is 1.1, expected a number from 0 to 1"),
    ({"sample": {"size": [100, 64]}}, "sample.size is [100, 64], expected [width, height] in multiples of 8"),
    ({"timesteps": {"low": 0.5, "high": 0.5}},
     "timesteps.low is 0.5 and timesteps.high is 0.5, expected a lower one first"),
    ({"loss": {"min_snr": 5.0, "weighting": "debiased"}},
     "loss.min_snr is 5 and loss.weighting is 'debiased', expected one of them"),
    ({"lora": {"kind": "loha", "dropout": 0.5}},
     "lora.dropout is 0.5, which is not for lora.kind 'loha', expected 0.0"),
    ({"lora": {"kind": "loha", "format": "diffusers"}},
     "lora.format is 'diffusers', which is not for lora.kind 'loha', expected 'auto'"),
    ({"lora": {"kind": "lokr", "rank": 4, "alpha": 2.0, "conv_rank": 2}},
     "lora.conv_alpha is 2, expected 1 for lora.kind 'lokr': alpha / rank is the same in all layers"),
    ({"lora": {"kind": "lokr", "layers": [{"match": "to_q", "alpha": 2.0}]}},
     "lora.layers has an alpha, but with lora.kind 'lokr' alpha / rank is the same in all layers"),
    ({"lora": {"factor": 4}}, "lora.factor is 4, expected 0 for lora.kind 'lora'"),
    ({"lora": {"init": "pissa", "dora": True}}, "lora.init is 'pissa' and lora.dora is on, expected one of them"),
    ({"result": {"title": "two\nlines"}}, "result.title is 'two\\nlines', expected a line of at most 2000 printable "
     "characters"),
    ({"result": {"dtype": "fp16"}}, "result.dtype is 'fp16', expected"),
    ({"lora": {"targets": []}}, "lora.targets is [], expected names of layers like 'to_q', or attention, all-linear"),
    ({"lora": {"targets": "atention"}}, "lora.targets is 'atention', expected one of: attention, all-linear, kohya, "
     "kohya-conv, or a list of layers like ['to_q']; did you mean 'attention'?"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "message"), WRONG, ids=[str(table) for table, _ in WRONG])
def test_a_wrong_setting_is_refused(table, message):
    with pytest.raises(ConfigError) as caught:
        parse(table, "train.toml")
    assert caught.value.message.startswith(message)
    assert caught.value.exit_code == 3
    assert ("--micro-batch 2" if "micro_batch" in table else "train init") in caught.value.hint


def test_alpha_defaults_to_rank():
    assert parse({"lora": {"rank": 4}}, "x").lora.alpha == 4.0
    assert parse({"lora": {"rank": 4, "alpha": 1}}, "x").lora.alpha == 1.0
    assert parse({}, "x").lora.alpha == Lora().rank


def test_masked_is_a_switch_or_auto():
    assert parse({}, "x").loss.masked == "auto"
    for value in (True, False, "auto"):
        assert parse({"loss": {"masked": value}}, "x").loss.masked == value


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*gone.toml: No such file"):
        load_config(tmp_path / "gone.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"bad.toml is not TOML: .*line 1"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "large.toml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match=r"large.toml is larger than 1048576 bytes, expected a file of settings"):
        load_config(tmp_path / "large.toml")
    for text, says in (("[" * 3000 + "]" * 3000, "maximum recursion"), ("9" * 5000, "Exceeds")):
        (tmp_path / "bad.toml").write_text(f"steps = {text}")
        with pytest.raises(ConfigError, match=f"bad.toml is not TOML: {says}"):
            load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize(("text", "message", "hint"), [
    (None, "cannot read {path}: Is a directory", "train init writes a file with every setting; without -c all have "
     "their defaults"),
    ("name = adamw", "{path} is not TOML: ", "a line is like lr = 1e-4 or name = \"adamw\"; train init writes"),
    ("name = 'demo'\n[[source]]\npath = 'photos'", "{path} is a recipe, which prep reads, expected a file of settings",
     "train init writes a file with every setting")])
def test_a_file_of_another_kind_is_told_from_settings(tmp_path, text, message, hint):
    path = tmp_path / "train.toml"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.startswith(message.format(path=path)) and caught.value.hint.startswith(hint)


def test_set_takes_toml_values_and_bare_words():
    assert option("lora.alpha=8") == ("lora.alpha", 8)
    assert option(f"seed={'9' * 5000}") == ("seed", "9" * 5000)
    assert option("loss.masked=true") == ("loss.masked", True)
    assert option("method=full") == ("method", "full")
    assert option("sample.size=[64, 64]") == ("sample.size", [64, 64])
    with pytest.raises(ConfigError, match=r"--set is 'lora.alpha', expected NAME=VALUE"):
        option("lora.alpha")


def test_an_unknown_option_does_not_blame_the_file(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text("[lora]\nrank = 4\n")
    with pytest.raises(ConfigError, match=r"^unknown key 'rnk' in \[lora\] of the options; did you mean 'rank'\?"):
        load_config(path, {"lora.rnk": 3})


def test_a_batch_that_micro_batches_do_not_divide_names_one_that_does(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text("batch_size = 8\nmicro_batch = 8\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {"batch_size": 12})
    assert caught.value.hint == "--micro-batch 4, or another --batch-size"


def test_a_warm_up_in_steps_or_as_a_fraction():
    assert [parse({"schedule": {"warmup": value}}, "").schedule.warmup for value in (0, 7, 0.05)] == [0, 7, 0.05]
    config = parse({"schedule": {"warmup": 0.05}}, "")
    assert parse(as_table(config), "") == config
    for wrong in (1.5, 1.0, -0.1, 0.0, "5%", -1, True):
        with pytest.raises(ConfigError, match=r"schedule\.warmup is .*, expected .*or a fraction of the run below 1"):
            parse({"schedule": {"warmup": wrong}}, "")
