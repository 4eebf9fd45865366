"""Exports for ai-toolkit, musubi-tuner and diffusion-pipe, read back by the documented rules of these tools."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest
import yaml
from pictures import draw, draw_mask, saved
from PIL import Image
from small_manifest import write_small

from prep.errors import UsageError
from prep.export import trainers
from prep.export.formats import TRAINERS
from prep.export.layout import lay_out
from prep.export.run import export
from prep.export.sample import Samples
from prep.export.trainers import TrainerPlan
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.recipe.convert.detect import convert

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--quiet")
SETS = """[[source]]
path = 'dogs'
repeats = 3
weight = 0.5
[[source]]
path = 'more'
role = '{}'
"""
READ = {".png", ".jpg", ".jpeg", ".webp"}


@pytest.fixture
def encoded(prep, tmp_path, tiny_model):
    """Encodes two directories, the second with a role; pictures of the first have captions, one a mask."""
    for number, name in enumerate(("a", "sub/a", "b")):
        draw(tmp_path / f"dogs/{name}.png", (96, 96) if number % 2 else (144, 64), seed=number).with_suffix(
            ".txt").write_text(f"dog {number}\n")
    draw_mask(tmp_path / "dogs/a-masklabel.png", (144, 64))
    draw(tmp_path / "more/x.png", (100, 96), seed=9).with_suffix(".txt").write_text("one\ntwo\n")

    def run(role, more=()):
        (tmp_path / "r.toml").write_text(SETS.format(role))
        told = prep("encode", tmp_path / "r.toml", "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                    tmp_path / "m.json", *SMALL, *more)
        assert told.code == 0, told.err
        return tmp_path / "m.json"

    return run


def stems(folder):
    return {path.stem: path for path in folder.iterdir() if path.is_file()} if folder is not None else {}


def by_ai_toolkit(root):
    """Each picture of a directory and those below, with the whole text beside it, masks and controls by its stem."""
    (process,) = yaml.safe_load((root / "config.yaml").read_text())["config"]["process"]
    for entry in process["datasets"]:
        masks = stems(root / entry["mask_path"]) if "mask_path" in entry else {}
        controls = [stems(root / place) for place in entry.get("control_path", [])]
        for path in sorted((root / entry["folder_path"]).rglob("*")):
            if path.suffix in READ:
                text = path.with_suffix(".txt")
                yield (path.relative_to(root).as_posix(), text.read_text() if text.exists() else "",
                       masks.get(path.stem), [found[path.stem] for found in controls if path.stem in found],
                       entry["num_repeats"], entry.get("is_reg", False), entry.get("loss_multiplier", 1.0),
                       entry["resolution"])


def by_musubi(root):
    """The lines of each file, whose paths are from the directory where it runs; caches must differ."""
    document = tomllib.loads((root / "dataset.toml").read_text())
    caches = [entry["cache_directory"] for entry in document["datasets"]]
    assert len(set(caches)) == len(caches) and document["general"]["enable_bucket"]
    for entry in document["datasets"]:
        width, height = entry["resolution"]
        for line in (root / entry["image_jsonl_file"]).read_text().splitlines():
            row = json.loads(line)
            controls = [root / row[key] for key in sorted(row) if key.startswith("control_path")]
            yield row["image_path"], row["caption"], None, controls, entry["num_repeats"], False, 1.0, [
                round((width * height) ** 0.5)]


def by_diffusion_pipe(root, name="dataset.toml"):
    """Each file of a directory but some endings; captions.json replaces .txt; masks and controls by stem."""
    document = tomllib.loads((root / name).read_text())
    for entry in document["directory"]:
        folder = root / entry["path"]
        masks = stems(root / entry["mask_path"]) if "mask_path" in entry else {}
        controls = stems(root / entry["control_path"]) if "control_path" in entry else None
        listed = json.loads((folder / "captions.json").read_text()) if (folder / "captions.json").exists() else None
        for path in sorted(folder.glob("*")):
            if not path.is_file() or path.suffix in (".txt", ".npz", ".json", ".parquet", ".bak", ".db"):
                continue
            text = path.with_suffix(".txt")
            captions = listed[path.name] if listed is not None else [text.read_text().strip()] if text.exists() else []
            assert captions or not entry["skip_empty_caption"]
            yield (path.relative_to(root).as_posix(), "|".join(captions), masks.get(path.stem),
                   [controls[path.stem]] if controls is not None else [], entry["num_repeats"], False, 1.0,
                   entry.get("size_buckets") or entry["resolutions"])


READERS = {"ai-toolkit": by_ai_toolkit, "musubi": by_musubi, "diffusion-pipe": by_diffusion_pipe}


def test_what_the_tools_would_train_on(encoded, tmp_path, prep, monkeypatch):
    path = encoded("train")
    for to in TRAINERS:
        out = tmp_path / to
        told = prep("export", path, "--to", to, "-o", out, "--json")
        assert told.code == 0, told.err
        found = {name: rest for name, *rest in READERS[to](out)}
        several = "one|two" if to == "diffusion-pipe" else "one"
        assert {name: (rest[0], rest[3]) for name, rest in found.items()} == {
            "train/3_dogs/a.png": ("dog 0", 3), "train/3_dogs/b.png": ("dog 2", 3),
            "train/3_dogs/sub_a.png": ("dog 1", 3), "train/1_more/x.png": (several, 1)}
        assert all((out / name).read_bytes() == (tmp_path / source).read_bytes() for name, source in (
            ("train/3_dogs/a.png", "dogs/a.png"), ("train/3_dogs/sub_a.png", "dogs/sub/a.png"),
            ("train/1_more/x.png", "more/x.png")))
        mask = found["train/3_dogs/a.png"][1]
        if to == "musubi":
            assert mask is None and "have masks here" in (out / "dataset.toml").read_text()
        else:
            assert mask == out / "train/masks/3_dogs/a.png" and found["train/3_dogs/b.png"][1] is None
            with Image.open(mask) as opened:
                assert opened.mode == "L" and opened.size == (144, 64) and len(np.unique(np.asarray(opened))) > 1
        assert {rest[5] for rest in found.values()} == ({0.5, 1.0} if to == "ai-toolkit" else {1.0})
        sizes = next(iter(found.values()))[6]
        assert [96, 96, 1] in sizes if to == "diffusion-pipe" else sizes == [96]
        check_converted(to, out, monkeypatch)


def check_converted(to, out, monkeypatch):
    """What the files are converted to is what they were made of."""
    monkeypatch.chdir(out)
    found = convert(out / ("config.yaml" if to == "ai-toolkit" else "dataset.toml")).recipe
    assert [source.repeats for source in found.sources] == [3, 1] and found.image.resolutions == (96,)
    if to != "musubi":
        assert [source.path for source in found.sources] == [out / "train/3_dogs", out / "train/1_more"]
        assert found.mask_of(0) == out / "train/masks/3_dogs"


def test_regularization_and_held_out_pictures(encoded, tmp_path):
    path = encoded("prior")
    export(path, "ai-toolkit", tmp_path / "out")
    found = {name: rest for name, *rest in by_ai_toolkit(tmp_path / "out")}
    assert found["regularization/9_more/x.png"][4] and not found["train/3_dogs/a.png"][4]
    for to, whose in (("musubi", "musubi-tuner"), ("diffusion-pipe", "diffusion-pipe")):
        with pytest.raises(UsageError, match=f"{whose} knows no regularization pictures"):
            export(path, to, tmp_path / to)
    path = encoded("validation", ("--resolution", "64,96"))
    report = export(path, "diffusion-pipe", tmp_path / "held", held_out=True)
    assert (report.samples, report.left_out) == (8, 0)
    assert {(name, tuple(rest[-1])) for name, *rest in by_diffusion_pipe(tmp_path / "held")} == {
        (f"train/3_dogs/{name}.png", (64, 96)) for name in ("a", "b", "sub_a")}
    assert [name for name, *_ in by_diffusion_pipe(tmp_path / "held", "validation.toml")] == ["validation/1_more/x.png"]
    export(path, "ai-toolkit", tmp_path / "sizes")
    assert {tuple(rest[-1]) for rest in by_ai_toolkit(tmp_path / "sizes")} == {(64, 96)}
    export(path, "musubi", tmp_path / "m")
    assert sorted(rest[-1] for name, *rest in by_musubi(tmp_path / "m") if name == "train/3_dogs/b.png") == [[64], [96]]


def referred(tmp_path, *names):
    """A manifest of two pictures, the first of which has references."""
    references = {name: saved(Image.new("RGB", (60, 40), color)) for name, color in zip(names, ("red", "blue"),
                                                                                         strict=False)}
    pictures = {name: saved(Image.new("RGB", (80, 80), "green")) for name in ("a.png", "sub/b.png")}
    return write_small(tmp_path, pictures=pictures, references=references), list(references.values())


@pytest.mark.parametrize("to", ["ai-toolkit", "musubi"])
def test_references(tmp_path, to):
    path, data = referred(tmp_path, "../control/a.jpg", "../c/a.png")
    export(path, to, tmp_path / "out")
    first, second = READERS[to](tmp_path / "out")
    assert [place.read_bytes() for place in first[3]] == data and not second[3]


def test_diffusion_pipe_takes_one_reference_for_each_picture(tmp_path):
    path, _ = referred(tmp_path, "../control/a.jpg")
    with pytest.raises(UsageError, match="have 0 or 1 references, but diffusion-pipe takes one for each"):
        export(path, "diffusion-pipe", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    plan = TrainerPlan("diffusion-pipe", lay_out(Samples(open_manifest(read_manifest(path))), held_out=False)[:1])
    plan.check()
    assert b'control_path = "train/control_1/1_photos"' in plan.lists()["dataset.toml"]()
    assert "train/control_1/1_photos/a.jpg" in plan.files(plan.pictures[0])


def test_formats_that_a_tool_passes_over_are_refused(tmp_path, monkeypatch):
    path, _ = referred(tmp_path)
    monkeypatch.setitem(trainers.READ, "ai-toolkit", (".jpg",))
    with pytest.raises(UsageError, match=r"ai-toolkit skips pictures in formats that it does not read \(2\)"):
        export(path, "ai-toolkit", tmp_path / "out")
