"""`prep.api` on the demo: what the commands do, and the example scripts that use it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from changed_script import changed
from PIL import Image
from safetensors.torch import load_file

from prep import api
from prep.dataset.preview import preview_as_json
from prep.demo import write_demo
from prep.encode.options import EncodeOptions
from prep.errors import CacheError, ConfigError, ManifestError, PathError, UsageError
from prep.manifest.document import read_manifest

EXAMPLES = Path(__file__).parents[2] / "manifests" / "examples"
SCRIPT = Path(__file__).parents[1] / "support" / "diffusers_lora.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The demo, encoded through the library: `dataset.toml`, `m.json`, `cache`."""
    root = tmp_path_factory.mktemp("library")
    write_demo(root / "demo")
    report = api.encode(root / "demo" / "dataset.toml", root / "cache", root / "m.json", device="cpu", jobs=2)
    assert report.samples["train"] == 45 and report.manifest == root / "m.json"
    return root


def test_the_commands_as_functions(place, capsys):
    recipe = str(place / "demo" / "dataset.toml")
    found = api.scan(recipe, jobs=2)
    assert found.count("error") and {one.code for one in found.findings} >= {"empty-file", "truncated"}
    view = preview_as_json(api.preview_buckets(recipe, batch_size=8, jobs=2))
    assert sum(bucket["pictures"] for bucket in view["buckets"]) >= 45
    assert api.verify(place / "m.json", jobs=2)["ok"] is True
    again = api.encode(recipe, place / "cache", place / "again.json", device="cpu", dry_run=True, jobs=2)
    assert not any(again.encoded.values()) and not (place / "again.json").exists()
    assert api.diff(place / "m.json", place / "m.json")["same"] is True
    assert api.gc(place / "cache", [place / "m.json"], older_than=0).as_json()["dry_run"] is True
    assert api.compact(place / "cache", dry_run=True).as_json()["dry_run"] is True
    assert api.export(place / "m.json", "safetensors", place / "rows").samples >= 45
    assert capsys.readouterr() == ("", "")


def test_masks_and_choices(place, tmp_path):
    made = api.make_masks(place / "demo" / "photos", tmp_path / "masks", "color", color="white", jobs=2)
    assert made.as_json()["written"] == len(list((tmp_path / "masks").rglob("*.png"))) > 0
    for given, wanted in ((768, 768), ([320], 320), ([640, 320], (320, 640)), ("320,640", (320, 640))):
        recipe = api.read_recipe(place / "demo" / "dataset.toml", {"image.resolution": given, "mask": tmp_path})
        assert recipe.image.resolution == wanted and recipe.mask == tmp_path
    with pytest.raises(ConfigError):
        api.read_recipe(place / "demo" / "dataset.toml", {"image.step": 7})
    with pytest.raises(UsageError, match=r"'image\.steps' is no setting that overrides a recipe, expected one of: mod"):
        api.read_recipe(place / "demo" / "dataset.toml", {"image.steps": 8})
    assert api.read_recipe(place / "demo" / "dataset.toml", {"prompts": "x.txt"}).prompts == Path("x.txt")
    for wrong, kind in ((api.open_manifest, ManifestError), (api.batches, ManifestError), (api.scan, PathError)):
        with pytest.raises(kind):
            wrong(tmp_path / "none.json")


def test_a_picture_as_the_encoder_saw_it(place):
    dataset = api.open_manifest(place / "m.json")
    for number in range(0, len(dataset), 7):
        if dataset.path(number) is None:
            continue
        placement = dataset.placement(number)
        with Image.open(dataset.path(number)) as opened:
            if opened.mode != "RGB" or opened.getexif().get(274, 1) != 1:
                continue
            left, top = placement.crop
            scaled = opened.resize(placement.scaled, Image.Resampling.LANCZOS)
            wanted = scaled.crop((left, top, left + placement.bucket[0], top + placement.bucket[1]))
        np.testing.assert_array_equal(api.picture(dataset, number), np.asarray(wanted))
        break
    else:
        pytest.fail("the demo has no plain picture")


def test_samples_as_examples(place):
    dataset = api.open_manifest(place / "m.json")
    number = next(number for number in range(len(dataset)) if dataset.mask(number) is not None)
    (example,) = dataset.examples(number)
    assert example["name"] == dataset.name(number) and len(example["id"]) == 64
    assert example["captions"] == dataset.captions(number) and example["caption_weights"] == [1.0]
    assert tuple(example["bucket"]) == dataset.placement(number).bucket and example["flip"] is False
    row = dataset.table.slice(number, 1).to_pylist()[0]
    assert [example[name] for name in ("role", "width", "height", "repeats", "weight")] == [
        row[name] for name in ("role", "width", "height", "repeats", "weight")]
    np.testing.assert_array_equal(example["latent"], dataset.latent(number)["latent"])
    np.testing.assert_array_equal(example["mask"], dataset.mask(number))
    np.testing.assert_array_equal(example["text"][0]["hidden"], dataset.text(number)["hidden"])


def test_without_datasets_there_is_a_way_out(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="hf_dataset needs the package datasets, which is not installed") as error:
        api.hf_dataset(place / "m.json")
    assert error.value.hint == "pip install 'latentry[datasets]'"


def test_samples_as_a_hugging_face_dataset(place):
    """In order; every sample once, whoever reads which groups; and a stopped reader goes on."""
    pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    dataset = api.open_manifest(place / "m.json")
    wanted = [dataset.name(number) for number, role in enumerate(dataset.table["role"].to_pylist()) if role == "train"]
    stream = api.hf_dataset(place / "m.json", groups=8)
    assert [example["name"] for example in stream] == wanted and len(wanted) == 45
    assert len(list(api.hf_dataset(str(place / "m.json"), "validation"))) == 3
    parts = [[example["name"] for example in split_dataset_by_node(stream, rank=rank, world_size=2)] for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(wanted) and all(len(part) > 10 for part in parts)
    first = next(iter(stream.with_format("torch")))
    assert list(first["latent"].shape) == [4, first["bucket"][1] // 8, first["bucket"][0] // 8]
    some = iter(stream)
    before = [next(some)["name"] for _ in range(7)]
    rest = api.hf_dataset(place / "m.json", groups=8)
    rest.load_state_dict(stream.state_dict())
    assert before + [example["name"] for example in rest] == wanted
    with pytest.raises(UsageError, match="role is 'test', expected one of: train, validation, prior"):
        api.hf_dataset(place / "m.json", "test")


def test_a_picture_that_changed_is_not_shown(place, tmp_path):
    dataset = api.open_manifest(place / "m.json")
    number = next(number for number in range(len(dataset)) if dataset.path(number) is not None)
    path = dataset.path(number)
    before = path.read_bytes()
    try:
        path.write_bytes(before + b"\0")
        with pytest.raises(CacheError, match="is not in its source, or another one by now"):
            api.picture(dataset, number)
    finally:
        path.write_bytes(before)


def test_the_blocks_of_the_page_run_as_they_stand(place, monkeypatch, capsys):
    """Beside a `dataset.toml`, as it says; one after another, as a reader would type them."""
    monkeypatch.chdir(place / "demo")
    page = (EXAMPLES.parent / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "library.md", "exec"), {})
    said, drawn = capsys.readouterr()
    assert re.search(r"54/54|55/55", drawn) and "picture" in drawn  # the bar of a scan
    assert "pictures, " in said and "samples in" in said and "dict_keys([" in said


def test_the_notebook_runs_from_its_first_cell_to_its_last(place, monkeypatch, capsys):
    """Beside a manifest; `display` is what a notebook has."""
    notebook = json.loads((EXAMPLES / "explore.ipynb").read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    shown: list[Image.Image] = []
    names = {"display": shown.append}
    monkeypatch.chdir(place)
    monkeypatch.setattr("prep.api.open_manifest", partial(opened_as, api.open_manifest))
    monkeypatch.setattr("prep.api.batches", partial(opened_as, api.batches))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "explore.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert "48 samples in" in said and "heart" in said and said.count("'hidden': (") == 3
    assert shown[0].size == names["dataset"].placement(names["number"]).bucket and len(shown) == 6


def opened_as(function, name, **options):
    assert name == "manifest.json"
    return function("m.json", **options)


def run(script, *args, processes=1):
    several = ("-m", "torch.distributed.run", "--nproc-per-node", processes) if processes > 1 else ()
    done = subprocess.run([sys.executable, *map(str, several), EXAMPLES / script, *map(str, args)], text=True,
                          capture_output=True, check=False, env={**os.environ, "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", done.stdout)]


@pytest.mark.slow
def test_the_example_loop_learns_what_train_run_does_and_continues(place, train, tmp_path):
    """The first loss is that of `train run`, whose adapter is without effect then, too."""
    model = read_manifest(place / "m.json").model
    losses = run("train_lora.py", place / "m.json", model, tmp_path / "lora.safetensors", "--steps", 5)
    assert len(losses) == 5 and len(load_file(tmp_path / "lora.safetensors")) > 8
    assert json.loads((tmp_path / "lora.state.json").read_text())["step"] == 5
    assert train("run", place / "m.json", "-o", tmp_path / "run", "--steps", 1, "--batch-size", 4, "--precision",
                 "fp32", "--no-masked", "--set", "sample.every=0", "--set", "validation.every=0").code == 0
    events = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    (first,) = [event["loss"] for event in events if event["event"] == "step"]
    assert losses[0] == pytest.approx(first, abs=6e-5)
    assert len(run("train_lora.py", place / "m.json", model, tmp_path / "lora.safetensors", "--steps", 7)) == 2


@pytest.mark.slow
def test_the_example_with_accelerate_continues_with_more_processes(place, tmp_path):
    """The losses and weights are those of a run that was never stopped, and of the loop without accelerate."""
    model = read_manifest(place / "m.json").model
    whole = run("train_lora_accelerate.py", place / "m.json", model, tmp_path / "whole", "--steps", 4)
    run("train_lora_accelerate.py", place / "m.json", model, tmp_path / "run", "--steps", 3, "--every", 2)
    (tmp_path / "run" / "unfinished").mkdir()  # as a stop while a checkpoint is written leaves it
    rest = run("train_lora_accelerate.py", place / "m.json", model, tmp_path / "run", "--steps", 4, processes=2)
    assert rest == pytest.approx(whole[2:], abs=2e-4)
    one, other = (load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in ("whole", "run"))
    assert one.keys() == other.keys() and len(one) > 8
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6
    plain = run("train_lora.py", place / "m.json", model, tmp_path / "lora.safetensors", "--steps", 1)
    assert whole[0] == pytest.approx(plain[0], abs=2e-4)


def page_diff():
    page = (EXAMPLES.parent / "library.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return block


def test_the_pages_diff_leaves_no_data_set_vae_or_text_encoder():
    script = SCRIPT.read_text(encoding="utf-8")
    made = changed(script, page_diff())
    assert {"vae", "tokenizer", "text_encoder", "load_dataset"} <= names_in(script)
    assert not names_in(made) & {"vae", "tokenizer", "text_encoder", "load_dataset", "train_transforms", "collate_fn"}
    assert {"unwrap_model", "lr_scheduler", "api"} <= names_in(made)
    with pytest.raises(ValueError, match=r"0 statements begin with 'vae\.to\(', expected one"):
        changed(made, "-    vae.to(…)\n")


def names_in(script):
    """The names that a script uses, imports apart."""
    return {node.id for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Name)}


@pytest.mark.slow
def test_diffusers_script_trains_once_it_is_changed_as_the_page_says(place, tmp_path):
    """Where neither datasets nor torchvision can do anything, and no VAE, tokenizer or text encoder is loaded."""
    (tmp_path / "script.py").write_text(changed(SCRIPT.read_text(encoding="utf-8"), page_diff()))
    (tmp_path / "start.py").write_text(
        "import runpy, sys, types\n"
        "from diffusers import AutoencoderKL\nfrom transformers import CLIPTextModel, CLIPTokenizer\nimport peft\n"
        "for kind in (AutoencoderKL, CLIPTextModel, CLIPTokenizer): kind.from_pretrained = None\n"
        "for name, part in (('datasets', 'load_dataset'), ('torchvision', 'transforms')):\n"
        "    sys.modules[name] = types.SimpleNamespace(**{part: None})\n"
        "del sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    model = read_manifest(place / "m.json").model
    losses = run(tmp_path / "start.py", tmp_path / "script.py", "--pretrained_model_name_or_path", model,
                 "--train_data_dir", place / "m.json", "--output_dir", tmp_path / "lora", "--max_train_steps", 5,
                 "--gradient_accumulation_steps", 2, "--train_batch_size", 2, "--seed", 1)
    assert len(losses) == 5 and all(0 < loss < 10 for loss in losses)
    made = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    assert len(made) > 8 and any(float(weight.abs().max()) > 0 for name, weight in made.items() if "lora_B" in name
                                 or "lora.up" in name)


@pytest.mark.slow
def test_the_example_with_lightning_is_the_same_loop(place, tmp_path):
    """Stopped and continued, its weights are those of the loop with accelerate."""
    pytest.importorskip("lightning")
    model = read_manifest(place / "m.json").model
    run("train_lora_accelerate.py", place / "m.json", model, tmp_path / "other", "--steps", 4)
    run("train_lora_lightning.py", place / "m.json", model, tmp_path / "run", "--steps", 3, "--every", 2)
    assert len(run("train_lora_lightning.py", place / "m.json", model, tmp_path / "run", "--steps", 4)) == 2
    one, other = (load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in ("run", "other"))
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6


def test_the_keywords_of_encode_are_its_options():
    keywords = inspect.signature(api.encode).parameters
    assert {(one.name, one.default, one.type) for one in fields(EncodeOptions)} <= {
        (one.name, one.default, one.annotation) for one in keywords.values()}


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("shard_bytes", 0), ("grace", -1.0), ("jobs", 2.5)])
def test_scripts_get_the_bounds_that_commands_have(place, name, value):
    with pytest.raises(UsageError, match=f"{name} is {value}, expected a (whole )?number(,| from) "):
        api.encode(place / "demo" / "dataset.toml", place / "cache", place / "x.json", **{name: value})
