"""`prep embed`: rows as the library makes them, for pictures before they are encoded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vision_models import KINDS, library_rows

from prep.cache.store import open_cache
from prep.dataset.facts import open_facts
from prep.embedding.rows import embeddings_in
from prep.embedding.survey import open_vision, survey
from prep.recipe.load import load_recipe


def rows_in(cache: Path, source: Path, model: Path, **choices):
    """The names, rows and mask of a source's pictures, as a cache has them."""
    recipe, facts = load_recipe(source, choices=choices), open_facts()
    found = survey(recipe, open_vision(str(model), facts), facts, jobs=1)
    return [picture.name for picture in found.pictures], *embeddings_in(open_cache(cache, create=False), found), found


def cropped(path: Path, placement) -> np.ndarray:
    """A picture at its placement over white, by Pillow alone."""
    picture = Image.open(path)
    if picture.mode == "RGBA":
        below = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(below, picture)
    (left, top), (width, height) = placement.crop, placement.bucket
    scaled = picture.convert("RGB").resize(placement.scaled, Image.Resampling.LANCZOS)
    return np.asarray(scaled.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_library(prep, photos, vision, tmp_path, kind):
    cache = tmp_path / "cache"
    made = prep("embed", photos, "--model", vision[kind], "--cache", cache, "--resolution", 64, "--step", 8, "--json")
    assert made.code == 0, made.err
    assert (made.json["made"], made.json["reused"], made.json["pictures"]) == (8, 0, 8)
    names, rows, there, found = rows_in(cache, photos, vision[kind], **{"image.resolution": 64, "image.step": 8})
    assert there.all() and rows.dtype == np.float16 and names == sorted(names)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float32), axis=1), 1, atol=2e-3)
    placed = {target.key: target.placement for target in found.targets.embeddings.values()}
    wanted = library_rows(vision[kind], [cropped(photos / picture.name, placed[picture.key])
                                         for picture in found.pictures])
    np.testing.assert_allclose(rows.astype(np.float32), wanted, atol=2e-3)
    assert (np.abs(wanted[1:] - wanted[:-1]).max(axis=1) > 0.015).all()  # pictures differ


SIZED = ("--resolution", 64, "--step", 8)


def embed(prep, source, model, cache, *more):
    done = prep("embed", source, "--model", model, "--cache", cache, *SIZED, *more, "--json")
    assert done.code in (0, 1), done.err
    return done


def test_keys_change_with_crop_model_and_picture_alone(prep, photos, vision, tmp_path):
    """What is made once is found again, whatever else differs."""
    cache, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(vision["siglip"], model)
    dry = embed(prep, photos, model, cache, "--dry-run").json
    assert (dry["made"], dry["dry_run"], cache.exists()) == (8, True, False)
    assert embed(prep, photos, model, cache).json["made"] == 8
    assert "made 0 embeddings (0 bytes), reused 8, of 8 pictures" in prep(
        "embed", photos, "--model", model, "--cache", cache, *SIZED).out

    def missing(*more, source=photos) -> int:
        return embed(prep, source, model, cache, "--dry-run", *more).json["made"]

    recipe = tmp_path / "dataset.toml"
    recipe.write_text('[embed]\nmodel = "model"\n[[source]]\npath = "photos"\nrepeats = 3\nweight = 0.5\n'
                      "[source.caption]\nvariants = 1\n")
    assert prep("embed", recipe, *SIZED, "--dry-run", "--json").json["made"] == 0
    assert missing("--flip", "both") == missing("--mask", "none") == missing("--alpha", "white") == 0
    assert missing("--alpha", "black") == 1  # one picture is transparent
    assert missing("--resolution", 48) == 8
    assert missing("--crop", "random") > 0
    moved = shutil.copytree(photos, tmp_path / "moved")
    (moved / "0.png").rename(moved / "z.png")
    assert missing(source=moved) == 0
    Image.new("RGB", (96, 96), "red").save(moved / "1.png")
    assert missing(source=moved) == 1
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": "elsewhere"}))
    assert missing() == 0
    for file, name, value in (("preprocessor_config.json", "resample", 3), ("config.json", "initializer_factor", 2.0)):
        before = (model / file).read_text()
        (model / file).write_text(json.dumps(json.loads(before) | {name: value}))
        assert missing() == 8
        (model / file).write_text(before)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert missing() == 8


def test_batches_and_neighbours_change_no_row(prep, photos, vision, tmp_path, monkeypatch):
    """In batches of one, beside other pictures and where memory holds few at a time, rows are the same but for the last
    bit of half precision."""
    from prep.encode.engines import local
    from prep.models.device import memory
    from prep.models.vision import encoder

    usual = embedded(prep, photos, vision, tmp_path / "usual")
    monkeypatch.setattr(local, "EMBED_BATCH", 1)
    alone = embedded(prep, photos, vision, tmp_path / "alone")
    monkeypatch.undo()
    forward, seen = encoder.VisionEncoder._forward, []

    def tight(self, pixels):
        seen.append(len(pixels))
        if len(pixels) > 3:
            raise MemoryError
        return forward(self, pixels)

    monkeypatch.setattr(encoder.VisionEncoder, "_forward", tight)
    monkeypatch.setattr(memory, "free_memory", lambda _: None)
    halved = embedded(prep, photos, vision, tmp_path / "halved")
    assert seen[1:] == [8, 4, 2, 2, 2, 2]
    for other in (alone, halved):
        np.testing.assert_allclose(usual, other, atol=1e-3)


def embedded(prep, photos, vision, cache):
    assert embed(prep, photos, vision["dinov2"], cache).json["made"] == 8
    return rows_in(cache, photos, vision["dinov2"], **{"image.resolution": 64, "image.step": 8})[1].astype(np.float32)


def test_an_interrupted_run_is_continued(prep, photos, vision, tmp_path, monkeypatch):
    """Its tasks, of three rows here, are kept; the rows are those of a run at one go."""
    from prep.encode import plan
    from prep.encode.engines import local

    whole = embedded(prep, photos, vision, tmp_path / "whole")
    monkeypatch.setattr(plan, "TASK_ROWS", 3)
    rows, given = local.picture_rows, []

    def interrupted(pixels, *rest):
        given.append(0)
        if len(given) == 3:
            raise KeyboardInterrupt
        return rows(pixels, *rest)

    monkeypatch.setattr(local, "picture_rows", interrupted)
    cache = tmp_path / "cache"
    assert prep("embed", photos, "--model", vision["dinov2"], "--cache", cache, *SIZED, "--quiet").code == 130
    monkeypatch.setattr(local, "picture_rows", rows)
    again = embed(prep, photos, vision["dinov2"], cache).json
    assert (again["made"], again["reused"]) == (2, 6) or (again["made"] + again["reused"] == 8 and again["reused"] >= 3)
    after = rows_in(cache, photos, vision["dinov2"], **{"image.resolution": 64, "image.step": 8})[1]
    np.testing.assert_allclose(whole, after.astype(np.float32), atol=1e-3)
    assert not list((cache / "plans").glob("*"))


def test_a_damaged_picture_is_a_finding(prep, photos, vision, tmp_path):
    """The others are embedded, and it has no row; with --strict that is an error."""
    Image.new("RGB", (96, 96), "red").save(photos / "8.jpg")
    data = (photos / "8.jpg").read_bytes()
    (photos / "8.jpg").write_bytes(data[:-60] + b"\0" * 40)
    (photos / "8.txt").write_text("damaged")
    cache = tmp_path / "cache"
    done = embed(prep, photos, vision["clip"], cache, "--strict")
    assert (done.code, done.json["made"], done.json["pictures"]) == (1, 8, 9)
    assert [finding["path"] for finding in done.json["rejected"]] == ["8.jpg"]
    again = embed(prep, photos, vision["clip"], cache)
    assert (again.code, again.json["made"], again.json["reused"]) == (0, 0, 8)
    assert [finding["path"] for finding in again.json["rejected"]] == ["8.jpg"]
    _, rows, there, found = rows_in(cache, photos, vision["clip"], **{"image.resolution": 64, "image.step": 8})
    assert [picture.name for picture, has in zip(found.pictures, there, strict=True) if not has] == ["8.jpg"]
    assert not rows[~there].any()


def test_what_is_no_vision_model_is_refused(prep, photos, vision, tiny_model, tmp_path):
    def refused(model, *words, code=6):
        done = prep("embed", photos, "--cache", tmp_path / "cache", *SIZED, *(("--model", model) if model else ()))
        assert done.code == code and all(word in done.err for word in words), done.err
        assert not (tmp_path / "cache").exists()

    def changed(name, **values):
        folder = shutil.copytree(vision["dinov2"], tmp_path / name, dirs_exist_ok=True)
        for file, table in values.items():
            path = folder / f"{file}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | table))
        return folder

    refused(None, "no vision model is named, so nothing makes embeddings", "add --model MODEL, or set model in [embed]")
    refused(tmp_path / "nowhere", "is neither a directory nor a Hub id")
    refused("owner/name", "is neither a directory nor in the local Hub cache", "add --download")
    refused(tiny_model, "has no config.json")
    refused(changed("bert", config={"model_type": "bert"}),
            "has type 'bert', expected one that embeds pictures: dinov2", "for example facebook/dinov2-base")
    blind = changed("blind")
    (blind / "preprocessor_config.json").unlink()
    refused(blind, "has no preprocessor_config.json, which says how the model sees a picture",
            "download the model again, with all of its files")
    pickled = changed("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(pickled, "safetensors")
    refused(changed("other", config={"model_type": "clip"}), "tensors called visual_projection.weight, expected one, "
            "which says how many numbers an embedding has")
    for number, (table, words) in enumerate((
            ({"do_center_crop": False}, "pictures keep their size or shape, expected all to become one size"),
            ({"crop_size": 48}, "crop_size is [48, 48], expected no more than size"),
            ({"do_normalize": False}, "do_normalize is false, expected pictures to be normalized"),
            ({"image_mean": [0.5]},
             "image_mean and image_std have 1 and 3 numbers, expected 3, of red, green and blue"),
            ({"size": "large"}, "size is 'large', expected"), ({"image_std": [0.5, 0.5, 0]}, "image_std"))):
        refused(changed(f"odd{number}", preprocessor_config=table), words, "name another model")
    deep = prep("embed", photos, "--model", changed("deep", config={"num_hidden_layers": 3}), "--cache",
                tmp_path / "deep-cache")  # which shows when it is loaded
    assert deep.code == 6 and "lack encoder.layer.2" in deep.err
    shutil.copytree(vision["clip"], tmp_path / "sized")
    sized = tmp_path / "sized" / "preprocessor_config.json"
    sized.write_text(json.dumps(json.loads(sized.read_text()) | {"crop_size": 24}))
    done = prep("embed", photos, "--model", tmp_path / "sized", "--cache", tmp_path / "sized-cache")
    assert done.code == 6 and "cannot embed a picture: Input image size (24*24) doesn't match model" in done.err
    empty = tmp_path / "empty"
    empty.mkdir()
    done = prep("embed", empty, "--model", vision["clip"], "--cache", tmp_path / "cache")
    assert done.code and "no pictures to embed in" in done.err
