"""diffusion-pipe's TOMLs: what dataset.toml and train.toml come of them, against another reading of their meaning."""

from __future__ import annotations

import math

import pytest
from pictures import draw
from told import said

from prep.buckets.sizes import Rules, buckets_of
from prep.captions.options import CaptionOptions
from prep.errors import ConfigError, PathError
from prep.recipe.load import load_recipe
from prep.recipe.write import render_recipe
from train.config.load import load_config

DATA = """resolutions = [512]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 7
caption_prefix = "photo of "
frame_buckets = [1]
shuffle_metadata = true

[[directory]]
path = "photos"
mask_path = "masks"
control_path = "more"
num_repeats = 2

[[directory]]
path = "reg"
cache_shuffle_num = 10
skip_empty_caption = false
default_mask_file = "mask.png"
strange = 3
"""
MAIN = """output_dir = "out"
dataset = "data.toml"
epochs = 10
micro_batch_size_per_gpu = 2
gradient_accumulation_steps = 4
gradient_clipping = 0.5
warmup_steps = 100
lr_scheduler = "cosine"
save_every_n_epochs = 2
eval_every_n_steps = 50
checkpoint_every_n_minutes = 120
activation_checkpointing = true
blocks_to_swap = 8
save_dtype = "bfloat16"
pipeline_stages = 1
uncond_fraction = 0.1
[model]
type = "flux"
diffusers_path = "owner/name"
dtype = "bfloat16"
transformer_dtype = "float8"
flux_shift = true
sigmoid_scale = 1.3
[adapter]
type = "lora"
rank = 32
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
lr = 1e-4
betas = [0.9, 0.99]
weight_decay = 0.02
eps = 1e-8
[monitoring]
enable_wandb = true
wandb_api_key = "SECRET"
wandb_tracker_name = "mine"
"""


@pytest.fixture
def convert_main(convert_text, tmp_path):
    """`convert_main(text, data)`: what a main TOML and its dataset TOML come to, and the checked train.toml."""
    def go(text: str, data: str = DATA):
        (tmp_path / "data.toml").write_text(data)
        found = convert_text(text)
        (tmp_path / "train.toml").write_text(found.training.rendered("head"))
        return found, load_config(tmp_path / "train.toml")

    return go


def notes(found):
    return {one.key: one.said for one in found.training.notes}


def theirs(side, low, high, count, multiple=16):
    """The final sizes of ratios evenly spaced in log, at the area of a square, rounded to the model's multiple."""
    sizes = set()
    for number in range(count):
        ratio = math.exp(math.log(low) + (math.log(high) - math.log(low)) * number / max(1, count - 1))
        width = math.sqrt(side * side * ratio)
        sizes.add(tuple(round(edge / multiple) * multiple for edge in (width, side * side / width)))
    return sizes


def sizes_of(found, tmp_path):
    """The buckets of the recipe, as it is read back from its file."""
    (tmp_path / "dataset.toml").write_text(render_recipe(found.recipe, base=tmp_path))
    image = load_recipe(tmp_path / "dataset.toml", choices={}).image
    sizes = tuple(tuple(map(int, size.split("x"))) for size in image.sizes)
    return set(buckets_of(Rules(resolution=image.resolutions[0], kind=image.buckets, step=image.step, sizes=sizes)))


def test_a_whole_dataset(convert_text, tmp_path):
    found = convert_text(DATA)
    assert found.tool == "diffusion-pipe" and found.recipe.reference_fit == "bucket"
    first, second = found.recipe.sources
    assert (first.path, first.repeats, first.references, first.exclude) == (
        tmp_path / "photos", 2, (tmp_path / "more",), ("*/*",))
    assert (found.recipe.mask_of(0), found.recipe.mask_of(1)) == (tmp_path / "masks", "auto")
    assert found.recipe.caption_of(0) == CaptionOptions(missing="reject", lines="join", keep_separator="",
                                                        prefix="photo of ")
    assert found.recipe.caption_of(1) == CaptionOptions(missing="empty", lines="join", keep_separator="", shuffle=True,
                                                        prefix="photo of ", variants=10)
    assert found.recipe.image.resolution == 512 and sizes_of(found, tmp_path) == theirs(512, 0.5, 2.0, 7)
    assert set(said(found)) == {"shuffle_metadata", "directory[1].default_mask_file", "directory[1].strange"}
    assert second.repeats == 1


def one(lines, head="resolutions = [512]"):
    return f'{head}\n[[directory]]\npath = "photos"\n{lines}\n'


@pytest.mark.parametrize(("text", "kind", "resolution"), [
    (one(""), "single", 512), (one("", "resolutions = [512, 1010]"), "single", (512, 1008)),
    (one("", "resolutions = [[1280, 720]]"), "single", 960),
    (one("ar_buckets = [1.0, 1.5]\nenable_ar_bucket = true"), "list", 512),
    (one("enable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2\nnum_ar_buckets = 3", "resolutions = [512, 768]"), "ratio",
     (512, 768)),
    (one("size_buckets = [[640, 480, 1], [512, 512, 1]]"), "list", 554)])
def test_sizes(convert_text, text, kind, resolution):
    image = convert_text(text).recipe.image
    assert (image.buckets, image.resolution, image.step, image.upscale) == (kind, resolution, 16, "allow")


def test_listed_ratios_and_sizes(convert_text, tmp_path):
    found = convert_text(one("enable_ar_bucket = true\nar_buckets = [[448, 576], [512, 512]]"))
    assert sizes_of(found, tmp_path) == {(448, 576), (512, 512)}
    found = convert_text(one("size_buckets = [[640, 480, 1], [520, 512, 33]]"))
    assert sizes_of(found, tmp_path) == {(640, 480), (512, 512)}
    assert "videos have no counterpart" in said(found)["directory[0].size_buckets"]


def test_fractional_repeats_keep_the_shares(convert_main, tmp_path):
    for name, count in (("photos", 4), ("reg", 6)):
        for number in range(count):
            draw(tmp_path / name / f"{number}.png", (64, 64), seed=number)
    data = ('resolutions = [256, 512]\n[[directory]]\npath = "photos"\nnum_repeats = 0.5\n'
            '[[directory]]\npath = "reg"\nnum_repeats = 1.5\n')
    found, config = convert_main(MAIN, data)
    # An epoch there has int(4 × 0.5) + int(6 × 1.5) = 11 pictures at two sizes; here 4 × 1 + 6 × 3 = 22.
    assert [source.repeats for source in found.recipe.sources] == [1, 3]
    assert (config.epochs, config.checkpoint.every) == (5, "1 epoch")


def test_captions_in_json_and_tars(convert_text, tmp_path):
    (tmp_path / "photos/captions.json").write_text('{"a.png": ["one", "two"]}')
    (tmp_path / "photos/metadata.jsonl").write_text("")
    (tmp_path / "photos/a.tar").write_bytes(b"")
    found = convert_text(one("num_repeats = 3"))
    assert [(source.path, source.table, source.repeats, source.exclude) for source in found.recipe.sources] == [
        (tmp_path / "photos", tmp_path / "photos/captions.json", 3, ("*/*",)), (tmp_path / "photos/a.tar", None, 3, ())]
    assert "whose captions are read here" in said(found)["directory[0].path"]


def test_a_whole_training(convert_main):
    found, config = convert_main(MAIN)
    assert (config.method, config.epochs, config.batch_size, config.micro_batch) == ("lora", 10, 8, 2)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 32, "kohya")  # alpha is the rank
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("adamw", 1e-4, (0.9, 0.99))
    assert (config.optimizer.weight_decay, config.optimizer.eps, config.optimizer.clip) == (0.02, 1e-8, 0.5)
    assert (config.schedule.name, config.schedule.warmup, config.schedule.floor) == ("cosine", 100, 0.01)
    assert (config.precision, config.quantization, config.offload) == ("bf16", "fp8", 8)
    assert (config.timesteps.distribution, config.timesteps.std, config.timesteps.shift_by_size) == (
        "logit-normal", 1.3, "schedule")
    assert (config.checkpoint.every, config.checkpoint.keep, config.validation.every) == ("2 epochs", 0, 50)
    assert (config.loss.masked, config.loss.unmasked_weight, config.caption_dropout) == (True, 0, 0.1)
    assert (config.underfill, config.guidance_embedding, config.log.wandb) == ("drop", 1, "mine")
    assert found.recipe.model.path == "owner/name" and "SECRET" not in found.training.rendered("")
    assert set(notes(found)) == {"output_dir", "checkpoint_every_n_minutes", "other settings"}  # the key itself


def head(model, adapter='[adapter]\ntype = "lora"\nrank = 8\n', optimizer='type = "adamw"\nlr = 1e-5\n', top=""):
    first = f'dataset = "data.toml"\nepochs = 3\n{top}\n[model]\ndtype = "bfloat16"\n{model}\n'
    return f"{first}{adapter}[optimizer]\n{optimizer}"


@pytest.mark.parametrize(("model", "shift", "distribution", "said"), [
    ('type = "qwen_image"', 1, "logit-normal", set()), ('type = "flux"\nshift = 3', 3, "logit-normal", set()),
    ('type = "z_image"\nshift = 3', 3, "logit-normal", {"model.shift"}),
    ('type = "sd3"\ntimestep_sample_method = "uniform"', 1, "uniform", {"model.timestep_sample_method"}),
    ('type = "lumina_2"\nlumina_shift = true', 1, "logit-normal", {"model.lumina_shift",
                                                                   "model.timestep_sample_method"}),
    ('type = "wan"\nckpt_path = "x"\nmin_t = 0.5', 1, "logit-normal",
     {"adapter", "model.type", "model.ckpt_path", "model.timestep_sample_method"})])
def test_noise(convert_main, model, shift, distribution, said):
    found, config = convert_main(head(model))
    assert (config.timesteps.shift, config.timesteps.distribution) == (shift, distribution)
    assert set(notes(found)) == said and config.timesteps.low == (0.5 if "min_t" in model else 0)


def test_sdxl(convert_main, tmp_path):
    (tmp_path / "sdxl.safetensors").write_bytes(b"")
    found, config = convert_main(head('type = "sdxl"\ncheckpoint_path = "sdxl.safetensors"\nv_pred = true\n'
                                      "min_snr_gamma = 5\nunet_lr = 4e-5\ntext_encoder_1_lr = 2e-5"))
    assert found.recipe.model.path == str(tmp_path / "sdxl.safetensors")
    assert (config.prediction, config.loss.min_snr, config.optimizer.lr) == ("v_prediction", 5, 4e-5)
    assert "time_emb_proj" in config.lora.targets and set(notes(found)) == {"model.type", "model.text_encoder_1_lr"}


@pytest.mark.parametrize(("adapter", "kind", "rank", "said"), [
    ('[adapter]\ntype = "lokr"\nrank = 1e6\ndecompose_factor = 4\n', "lokr", 4096, {"adapter.rank"}),
    ('[adapter]\ntype = "lora"\nrank = 8\nalpha = 4\n', "lora", 8, {"adapter.alpha"}),
    ('[adapter]\ntype = "lora"\nrank = 8\ninit_from_existing = "x"\nexclude_modules = "y"\n', "lora", 8,
     {"adapter.init_from_existing", "other settings"})])
def test_adapters(convert_main, adapter, kind, rank, said):
    found, config = convert_main(head('type = "flux"', adapter))
    assert (config.lora.kind, config.lora.rank, config.lora.alpha) == (kind, rank, rank)
    assert set(notes(found)) == said


def test_no_adapter_is_a_full_fine_tune(convert_main):
    found, config = convert_main(head('type = "flux"\ntransformer_dtype = "float8"', "", 'type = "adamw8bitkahan"\n'
                                      "lr = 5e-6\ngradient_release = true\nstabilize = false\n"))
    assert (config.method, config.full.fused_backward, config.optimizer.name) == ("full", True, "adamw-8bit")
    assert config.quantization == "none" and set(notes(found)) == {"model.transformer_dtype"}


@pytest.mark.parametrize(("optimizer", "name", "betas", "said"), [
    ('type = "Prodigy"\nlr = 1', "prodigy", (0.9, 0.999), set()),
    ('type = "automagic"\nlr = 1e-6\nmin_lr = 1e-7', "adamw", (0.9, 0.999), {"optimizer.type", "optimizer.min_lr"}),
    ('type = "adamw_optimi"\nlr = 1e-5\nbetas = [0.9, 0.95]\nbeta2_half_life = 100', "adamw", (0.9, 0.5**0.01), set())])
def test_optimizers(convert_main, optimizer, name, betas, said):
    found, config = convert_main(head('type = "flux"', optimizer=optimizer))
    assert config.optimizer.name == name and config.optimizer.betas == pytest.approx(betas)
    assert set(notes(found)) == said


@pytest.mark.parametrize(("top", "every", "said"), [
    ("save_every_n_steps = 100", 100, set()), ("save_every_n_examples = 1000", 500, set()), ("", 0, set()),
    ("checkpoint_every_n_epochs = 1", "1 epoch", set()),
    ("save_every_n_steps = 7\nsave_every_n_epochs = 1", 7, {"save_every_n_epochs"}),
    ("max_steps = 40", 0, {"epochs"}), ("force_constant_lr = 1e-3\nlr_scheduler = 'linear'", 0, {"lr_scheduler"}),
    ("pseudo_huber_c = 0.5\ncompile = true", 0, {"pseudo_huber_c"})])
def test_lengths_and_intervals(convert_main, top, every, said):
    found, config = convert_main(head('type = "flux"', top=f"micro_batch_size_per_gpu = [[512, 2], [1024, 3]]\n{top}"))
    assert config.checkpoint.every == every and config.batch_size == 2
    assert set(notes(found)) == {"micro_batch_size_per_gpu", *said}


def test_held_out_data(convert_main, tmp_path):
    (tmp_path / "eval.toml").write_text('resolutions = [256]\n[[directory]]\npath = "reg"\n')
    found, _ = convert_main(head('type = "flux"', top='eval_datasets = [{name = "x", config = "eval.toml"}]'),
                            'resolutions = [512]\n[[directory]]\npath = "photos"\n')
    assert [(source.path.name, source.role) for source in found.recipe.sources] == [
        ("photos", "train"), ("reg", "validation")]
    assert "make another recipe" in said(found)["directory[0]: resolution"]


@pytest.mark.parametrize(("main", "data", "says"), [
    (MAIN, "resolutions = [512]\n", "expected diffusion-pipe's dataset TOML"),
    (MAIN, one("", ""), "has no resolutions"), (MAIN, one("enable_ar_bucket = true"), "which are not all there"),
    (MAIN, one("resolutions = [0]"), "expected sides of at least 1 pixel"),
    (MAIN, one("enable_ar_bucket = true\nmin_ar = 2\nmax_ar = 1\nnum_ar_buckets = 3"), "expected 0 < min_ar <= max_ar"),
    (MAIN, one("size_buckets = [[1]]"), r"expected \[width, height, frames\]"),
    (MAIN, one("enable_ar_bucket = true\nar_buckets = [0]"),
     r"ar_buckets has 0, expected ratios of width to height, or \[width, height\]"),
    (MAIN, one("num_repeats = 0"), "an epoch has none of its pictures"),
    (MAIN.replace("data.toml", "nowhere.toml"), "", "cannot read")])
def test_files_that_are_refused(convert_main, main, data, says):
    with pytest.raises((ConfigError, PathError), match=says):
        convert_main(main, data)
