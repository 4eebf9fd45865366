"""Each line of the tables of manifests/migration.md is converted as the page says."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from prep.recipe.convert.aitoolkit import training as aitoolkit
from prep.recipe.convert.diffusionpipe import training as diffusion_pipe
from prep.recipe.convert.kohya import training as kohya_training
from prep.recipe.convert.musubi import training as musubi_tuner
from prep.recipe.convert.onetrainer import training as onetrainer_training

MUSUBI = ("resolution", "enable_bucket", "bucket_no_upscale", "batch_size")  # settings of a dataset
PIPE = ("resolutions", "enable_ar_bucket", "ar_buckets", "size_buckets", "caption_prefix", "cache_shuffle_num",
        "skip_empty_caption")
PAGE = Path(__file__).parents[2] / "manifests" / "migration.md"
ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (recipe|train\.toml) \|$", re.MULTILINE)
SECTIONS = {title: ROW.findall(text) for title, _, text in
            (part.partition("\n") for part in PAGE.read_text(encoding="utf-8").split("\n## "))}


def converted(title: str, line: str, folder: Path):
    (folder / "set").mkdir()
    if title == "sd-scripts":
        # Settings of a network need one; as in sd-scripts, its rank decides nothing else.
        document = {"train_data_dir": str(folder / "set"), "network_module": "networks.lora", **tomllib.loads(line)}
        return kohya_training.convert(document, folder, lambda path: {})
    if title in ("musubi-tuner", "diffusion-pipe"):
        own = tomllib.loads(re.sub(r", (?=[\w.]+ = )", "\n", line))
    if title == "diffusion-pipe":
        data = {"resolutions": [512], "directory": [{"path": str(folder / "set")}],
                **{name: own.pop(name) for name in PIPE if name in own}}
        parts = {name: {**usual, **own.pop(name, {})} for name, usual in (
            ("model", {"type": "flux"}), ("adapter", {"rank": 8}), ("optimizer", {"type": "adamw"}))}
        return diffusion_pipe.convert({"dataset": "data.toml", **own, **parts}, folder, lambda path: data)
    if title == "musubi-tuner":
        general = {name: own.pop(name) for name in (*MUSUBI,) if name in own}
        data = {"general": {"enable_bucket": True, **general}, "datasets": [{"image_directory": str(folder / "set")}]}
        document = {"dataset_config": "data.toml", "dit": "a.safetensors", "network_module": "networks.lora_zimage",
                    **own}
        return musubi_tuner.convert(document, folder, lambda path: data)
    if title == "ai-toolkit":
        process = {"type": "sd_trainer", "network": {}, **yaml.safe_load(f"{{{line}}}")}
        process["datasets"] = [{"folder_path": str(folder / "set"), **own} for own in process.get("datasets", [{}])]
        return aitoolkit.convert({"job": "extension", "config": {"process": [process]}}, folder)
    own = json.loads(f"{{{line}}}")
    document = {"training_method": "LORA", "concepts": [{"name": "a", "path": str(folder / "set"), "enabled": True}],
                **own}
    return onetrainer_training.convert(document, folder, lambda path: [])


def test_the_tables_are_found():
    assert len(SECTIONS["sd-scripts"]) > 30 and len(SECTIONS["OneTrainer"]) >= 20 and len(
        SECTIONS["ai-toolkit"]) > 30 and len(SECTIONS["musubi-tuner"]) > 15
    assert len(SECTIONS["diffusion-pipe"]) > 30


@pytest.mark.parametrize(("title", "line", "wanted", "file"), [
    (title, *row) for title, rows in SECTIONS.items() for row in rows])
def test_a_line_is_converted(title, line, wanted, file, tmp_path):
    result = converted(title, line, tmp_path)
    name, _, value = wanted.partition(" = ")
    if file == "train.toml":
        settings = result.training.settings
    else:
        settings = {f"{section}.{key}": value for section in ("model", "image", "caption")
                    for key, value in asdict(getattr(result.recipe, section)).items()}
    found = settings[name]
    assert (list(found) if isinstance(found, tuple) else found) == tomllib.loads(f"value = {value}")["value"]
