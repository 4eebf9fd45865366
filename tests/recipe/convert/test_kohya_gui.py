"""Files of kohya's GUI, which saves what its fields hold and makes sd-scripts' configuration of it at the start."""

from __future__ import annotations

import json

import pytest
from pictures import draw

from prep.dataset.texts import text_options_of
from prep.models.families.registry import FAMILIES
from prep.recipe.convert.detect import convert
from prep.recipe.load import load_recipe
from prep.recipe.prompts import prompts_of, read_prompts
from train.config.load import load_config

GUI = {"LoRA_type": "Standard", "train_data_dir": "img", "max_resolution": "96,96", "epoch": 1, "network_dim": 8}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "img" / "2_a dog" / "0.png", (96, 96), seed=1)
    return tmp_path


def converted(folder, **values):
    (folder / "gui.json").write_text(json.dumps({**GUI, **values}))
    return convert(folder / "gui.json")


def settings(found, folder):
    (folder / "train.toml").write_text(found.training.rendered("x"))
    return load_config(folder / "train.toml")


ARGS = '"weight_decay=0.4" "betas=0.9,0.99" "d_coef=2" "use_bias_correction=True"'


@pytest.mark.parametrize("args", [ARGS, ARGS.replace('"', ""), ARGS.replace('"', "").split()])
def test_arguments_of_the_optimizer_in_quotes(folder, args):
    optimizer = settings(converted(folder, optimizer="Prodigy", optimizer_args=args), folder).optimizer
    assert (optimizer.weight_decay, optimizer.betas, optimizer.d_coef, optimizer.bias_correction) == (
        0.4, (0.9, 0.99), 2.0, True)


@pytest.mark.parametrize(("name", "words"), [
    ("optimizer_args", ("d0=1e-5", "growth_rate=1.02", "beta3=0.98")),
    ("lr_scheduler_args", ("T_max=100", "eta_min=1")),
    ("network_args", ("rank_dropout=0.1", "loraplus_lr_ratio=4"))])
def test_each_lost_argument_is_named_with_its_value(prep, folder, name, words):
    quoted = " ".join(f'"{word}"' for word in words)
    (folder / "gui.json").write_text(json.dumps({**GUI, "optimizer": "Prodigy", name: quoted}))
    result = prep("init", "--from", "gui.json")
    assert result.code == 0, result.err
    for word in words:
        key, _, value = word.partition("=")
        for text in (result.err, (folder / "train.toml").read_text()):
            assert any(key in line and value in line and "no counterpart" in line for line in text.splitlines())


def test_prompts_are_text(prep, folder):
    lines = "a red heart --w 100 --h 96 --s 4 --g 9\n\n# not this\na star --d 1 --n dull, dark --ss euler_a --l 0.5"
    (folder / "gui.json").write_text(json.dumps({**GUI, "sample_prompts": lines}))
    result = prep("init", "--from", "gui.json", "--json")
    assert result.code == 0 and result.json["prompts"] == "prompts.txt", result.err
    assert load_recipe(folder / "dataset.toml", choices={}).prompts == folder / "prompts.txt"
    first, second = read_prompts(folder / "prompts.txt", "x")[1]
    assert (first.text, first.settings.width, first.settings.height, first.settings.steps) == ("a red heart", 96, 96, 4)
    assert first.settings.guidance is None, "of FLUX alone"
    assert (second.text, second.negative, second.settings.seed, second.settings.guidance) == (
        "a star", "dull, dark", 1, 1.0)
    assert "sample_prompts = '--ss euler_a': no counterpart; left out of the prompt" in result.err
    assert "does not exist" not in result.err


def test_prompts_of_others_are_not_replaced(prep, folder):
    (folder / "gui.json").write_text(json.dumps({**GUI, "sample_prompts": "a star"}))
    (folder / "prompts.txt").write_text("mine\n")
    result = prep("init", "--from", "gui.json")
    assert result.code == 5
    assert "prompt file prompts.txt already exists, and the file to convert has other prompts\n" in result.err
    assert not (folder / "dataset.toml").exists() and (folder / "prompts.txt").read_text() == "mine\n"
    assert prep("init", "--from", "gui.json", "--force").code == 0
    assert (folder / "prompts.txt").read_text() == "a star\n"


def test_a_file_of_prompts_is_named(folder):
    (folder / "mine.txt").write_text("a star\n")
    for document in ({**GUI, "sample_prompts": "mine.txt"}, {"train_data_dir": "img", "sample_prompts": "mine.txt"}):
        (folder / "k.json").write_text(json.dumps(document))
        found = convert(folder / "k.json")
        assert found.recipe.prompts == folder / "mine.txt" and not found.prompts
    (folder / "k.json").write_text(json.dumps({"train_data_dir": "img", "sample_prompts": "a star.txt"}))
    assert not convert(folder / "k.json").prompts, "sd-scripts itself has a path"


@pytest.mark.parametrize("prompt", [
    "--w 5", "a --w 5000000 --h 3", "a --d 99999999999999999999 --s 0", "#a", "\ud800 b", "a --l .", "a --l 1.2.3",
    "a  --x y --W 64", "a --n", "x --n --w 64", "a\\--b --l 1e9"])
def test_whatever_is_in_a_prompt_reads_back(folder, prompt):
    text = converted(folder, sample_prompts=prompt + "\n" + prompt).prompts
    assert not prompts_of(text.encode(), folder / "p.txt", "x")[1]


def test_guidance_of_flux_is_another_option(folder):
    given = {"flux1_checkbox": True, "LoRA_type": "Flux1", "sample_prompts": "a --l 4 --g 2.5"}
    assert converted(folder, **given).prompts == "a --l 2.5\n"


# How a configuration says which family it is for.
FAMILIES_SAID = {
    "sd15": {"sdxl": False}, "sd21": {"v2": True}, "sdxl": {"sdxl": True},
    "flux": {"flux1_checkbox": True, "LoRA_type": "Flux1"}, "sd3": {"sd3_checkbox": True},
    "chroma": {"flux1_checkbox": True, "LoRA_type": "Flux1", "model_type": "chroma"},
    "lumina2": {"lumina_checkbox": True, "LoRA_type": "Lumina", "flux1_checkbox": False},
}


@pytest.mark.parametrize("name", FAMILIES_SAID)
def test_a_family_gets_no_setting_of_captions_that_encode_refuses(folder, name):
    given = {"max_token_length": 225, "clip_skip": 2, "t5xxl_max_token_length": 4096, "gemma2_max_token_length": 300}
    of_lumina = {f"lumina_{key}": value for key, value in given.items()}
    found = converted(folder, **given, **FAMILIES_SAID[name], **of_lumina)
    model, family = found.recipe.model, FAMILIES[name]
    text_options_of(family, model, lambda part: {})
    assert (model.clip_skip > 0) == (name in ("sd15", "sd21"))
    assert (model.text_windows > 1) == (name in ("sd15", "sd21", "sdxl"))
    assert (model.max_length > 0) == (name in ("flux", "chroma", "lumina2"))
    said = {one.key for one in (*found.notes, *found.training.notes)}
    assert {"clip_skip", "max_token_length"} <= said


def test_settings_of_lumina_have_names_of_their_own(folder):
    given = {"lumina_checkbox": True, "flux1_checkbox": False, "LoRA_type": "Lumina", "timestep_sampling": "sigmoid",
             "discrete_flow_shift": 1.0, "lumina_timestep_sampling": "shift", "lumina_discrete_flow_shift": 6.0,
             "lumina_sigmoid_scale": 0.5, "anima_discrete_flow_shift": 2.0}
    draws = settings(converted(folder, **given), folder).timesteps
    assert (draws.distribution, draws.shift, draws.std) == ("logit-normal", 6.0, 0.5)


@pytest.mark.parametrize(("given", "name", "value"), [
    ({"LoRA_type": "LyCORIS/LoKr", "network_dim": 100000, "conv_dim": 100000, "network_alpha": 1, "conv_alpha": 1},
     "lora.rank", 4096),
    ({"LoRA_type": "LyCORIS/LoKr", "network_dim": 8, "conv_dim": 100000}, "lora.conv_rank", 4096),
    ({"LoRA_type": "Kohya LoKr", "network_dim": 100000}, "lora.rank", 4096), ({"network_dim": 5000}, "lora.rank", 4096),
    ({"network_dropout": 1.0}, "lora.dropout", 0.99), ({"multires_noise_iterations": 64}, "noise.pyramid_levels", 32),
    ({"min_snr_gamma": 1e9}, "loss.min_snr", 1e6), ({"network_alpha": 1e9}, "lora.alpha", 1e6),
    ({"min_snr_gamma": -1}, "loss.min_snr", 0.0)])
def test_the_nearest_value_has_the_meaning(folder, given, name, value):
    found = converted(folder, **given)
    section, _, key = name.partition(".")
    assert getattr(getattr(settings(found, folder), section), key) == value
    assert any("is written" in one.said or "not written" in one.said for one in found.training.notes)
    if "LoRA_type" in given:
        assert "asks for whole LoKr matrices" in str(found.training.notes)


@pytest.mark.parametrize(("given", "wanted"), [
    ({}, ("step", 256, 2048)), ({"max_bucket_reso": 1536}, ("step", 256, 1536)),
    ({"enable_bucket": False}, ("single", 0, 0)),
    ({"enable_bucket": None, "max_bucket_reso": None}, ("step", 256, 2048)),
])
def test_fields_that_a_file_lacks_keep_the_guis_defaults(folder, given, wanted):
    image = converted(folder, **given).recipe.image
    assert (image.buckets, image.shortest, image.longest) == wanted
    (folder / "k.json").write_text(json.dumps({"train_data_dir": "img", "enable_bucket": True}))
    assert convert(folder / "k.json").recipe.image.longest == 1024, "sd-scripts' own default"


def test_a_textual_inversion_is_no_full_fine_tuning(folder):
    (folder / "k.json").write_text(json.dumps({"train_data_dir": "img", "epoch": 1, "token_string": "ohwx",
                                               "num_vectors_per_token": 4}))
    found = convert(folder / "k.json")
    assert found.training.settings["method"] == "lora"
    assert {one.key: one.said for one in found.training.notes}["token_string"] == (
        "no textual inversion here, which trains a word's embedding; lora is written")


def test_buckets_without_enlarging_are_of_each_pictures_shape_there(folder):
    (note,) = (one for one in converted(folder, bucket_no_upscale=True).notes if one.key == "bucket_no_upscale")
    assert "of its own shape" in note.said


TABLES = ('[prompt]\nwidth = 96\nsample_steps = 4\n[[prompt.subset]]\nprompt = "a star"\nscale = 7\n'
          '[[prompt.subset]]\nprompt = "a moon"\nnegative_prompt = "dull"\nwidth = 64\nseed = 3\n')


def test_prompts_in_tables(folder):
    (folder / "p.toml").write_text(TABLES)
    (folder / "p.json").write_text(json.dumps([{"prompt": "a star", "width": 96, "sample_steps": 4, "scale": 7},
                                               "a moon --n dull --w 64 --s 4 --d 3"]))
    for name in ("p.toml", "p.json"):
        (folder / "k.json").write_text(json.dumps({"train_data_dir": "img", "sample_prompts": name}))
        assert convert(folder / "k.json").prompts == "a star --w 96 --s 4 --l 7\na moon --n dull --w 64 --s 4 --d 3\n"


def test_lines_that_encode_refuses_are_told(folder):
    (folder / "p.txt").write_text("a star\na moon --ss euler_a\n")
    found = converted(folder, sample_prompts="p.txt")
    assert found.recipe.prompts == folder / "p.txt"
    (note,) = (one for one in found.training.notes if one.key == "sample_prompts")
    assert "prep encode refuses a line, so change it" in note.said and "line 2: unknown option '--ss'" in note.said


def test_whole_matrices_by_lycoris_own_switch(folder):
    given = {"train_data_dir": "img", "network_module": "lycoris.kohya", "network_dim": 8}
    for args, wanted in ((["algo=lokr", "full_matrix=True", "conv_dim=4"], (4096, 4096)), (["algo=lokr"], (8, 16)),
                         (["algo=loha", "full_matrix=True"], (8, 16))):
        (folder / "k.json").write_text(json.dumps({**given, "network_args": args}))
        found = convert(folder / "k.json")
        ranks = found.training.settings["lora.rank"], found.training.settings.get("lora.conv_rank", 16)
        assert ranks == wanted and ("full_matrix" in str(found.training.notes)) == ("full_matrix=True" in args)


def test_settings_without_a_counterpart_are_told_with_their_values(prep, folder):
    more = {"loss_type": "huber", "huber_c": 0.1, "wandb_api_key": "not this", "huggingface_token": "nor this"}
    (folder / "gui.json").write_text(json.dumps({**GUI, **more}))
    result = prep("init", "--from", "gui.json")
    lost = "huber_c = 0.1, huggingface_token, loss_type = 'huber', wandb_api_key"
    assert f"note: other settings: no counterpart: {lost}" in result.err
    comments = "".join(line.strip("# ") + " " for line in (folder / "train.toml").read_text().splitlines())
    assert lost in " ".join(comments.split()) and "this" not in comments.replace("This", "")
