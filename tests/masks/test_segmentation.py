"""Maps from segmentation models, against the same models called by hand through the library; rembg by a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import segmenters
from pictures import draw
from PIL import Image

from prep.errors import ModelError, UsageError

PICTURES = [np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            for seed, size in enumerate([(40, 50, 3), (70, 30, 3), (40, 50, 3)])]


@pytest.fixture(scope="session")
def clipseg_model(tmp_path_factory):
    return segmenters.build_clipseg(tmp_path_factory.mktemp("models") / "clipseg")


@pytest.fixture(scope="session")
def segformer(tmp_path_factory):
    return segmenters.build_segformer(tmp_path_factory.mktemp("models") / "segformer")


@pytest.fixture(scope="session")
def mask2former(tmp_path_factory):
    """Made without the check for SciPy, which only its loss uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.models.mask2former.modeling_mask2former.requires_backends", lambda *_: None)
        return segmenters.build_mask2former(tmp_path_factory.mktemp("models") / "mask2former")


@pytest.fixture(scope="session")
def detr(tmp_path_factory):
    return segmenters.build_detr(tmp_path_factory.mktemp("models") / "detr")


def maps_of(segmenter, pictures=PICTURES):
    return segmenter.maps([segmenter.prepare(picture) for picture in pictures])


def near(gray, sure):
    """Equal, but for a rounding: pictures go through the model one by one in the referee."""
    return gray.shape == sure.shape and np.abs(gray.astype(float) - 255 * sure).max() <= 0.5 + 1e-2


def test_clipseg_is_what_the_library_says(clipseg_model):
    import torch
    from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

    from prep.masks.segmentation import clipseg

    model = CLIPSegForImageSegmentation.from_pretrained(clipseg_model).eval()
    processor = CLIPSegProcessor.from_pretrained(clipseg_model)
    found = maps_of(clipseg(clipseg_model, prompts=["a cat", "dogs"], device="cpu"))
    for gray, picture in zip(found, PICTURES, strict=True):
        sure = []
        for prompt in ("a cat", "dogs"):
            with torch.inference_mode():
                logits = model(**processor(text=[prompt], images=[picture], return_tensors="pt")).logits
            sure.append(logits.reshape(32, 32).sigmoid().numpy())
        assert near(gray, np.maximum(*sure)) and not near(gray, sure[0]) and not near(gray, sure[1])
        assert gray.max() > 200 > 60 > gray.min()


def test_classes_of_pixels_are_added_up(segformer):
    import torch
    from transformers import AutoImageProcessor, SegformerForSemanticSegmentation

    from prep.masks.segmentation import segment

    model = SegformerForSemanticSegmentation.from_pretrained(segformer).eval()
    processor = AutoImageProcessor.from_pretrained(segformer)
    found = maps_of(segment(segformer, labels=["dog", "Person"], device="cpu"))
    alone = maps_of(segment(segformer, labels=["person, individual"], device="cpu"))
    for gray, person, picture in zip(found, alone, PICTURES, strict=True):
        with torch.inference_mode():
            output = model(**processor(images=picture, return_tensors="pt"))
        classes = output.logits[0].softmax(0).numpy()
        assert near(gray, classes[1] + classes[2]) and near(person, classes[1])
        (argmax,) = processor.post_process_semantic_segmentation(output)
        assert (argmax.numpy()[person > 128] == 1).all()


def test_the_surest_query_counts(mask2former, monkeypatch):
    import torch
    from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

    from prep.masks.segmentation import segment

    monkeypatch.setattr("transformers.models.mask2former.modeling_mask2former.requires_backends", lambda *_: None)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(mask2former).eval()
    processor = AutoImageProcessor.from_pretrained(mask2former)
    found = maps_of(segment(mask2former, labels=["dog", "wall"], device="cpu"))
    for gray, picture in zip(found, PICTURES, strict=True):
        with torch.inference_mode():
            output = model(**processor(images=picture, return_tensors="pt"))
        classes, masks = output.class_queries_logits[0].softmax(-1), output.masks_queries_logits[0].sigmoid()
        assert classes.shape == (4, 4)  # three labels, and none
        each = [(classes[query, 0] + classes[query, 2]).item() * masks[query].numpy() for query in range(4)]
        assert near(gray, np.max(each, axis=0))


@pytest.mark.parametrize("padded", [False, True])
def test_what_fills_a_picture_up_is_no_part_of_its_map(detr, tmp_path, padded):
    import torch
    from transformers import AutoImageProcessor, DetrForSegmentation

    from prep.masks.segmentation import segment

    folder = shutil.copytree(detr, tmp_path / "detr")
    if padded:
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pad_size": {"height": 160, "width": 160}}))
    model = DetrForSegmentation.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    found = maps_of(segment(folder, labels=["dog"], device="cpu"))
    for gray, picture in zip(found, PICTURES, strict=True):
        inputs = processor(images=picture, return_tensors="pt")
        assert inputs["pixel_values"].shape[2:] == (160, 160) or not padded
        with torch.inference_mode():
            output = model(**inputs)
        sure = (output.logits[0].softmax(-1)[:, 2, None, None] * output.pred_masks[0].sigmoid()).amax(0)
        if padded:
            inside = inputs["pixel_mask"][0].bool()
            whole = torch.nn.functional.interpolate(sure[None, None], (160, 160), mode="bilinear")[0, 0]
            sure = whole[inside].reshape(int(inside[:, 0].sum()), int(inside[0].sum()))
        assert near(gray, sure.numpy())


def test_pictures_are_scaled_and_not_cut(segformer, tmp_path):
    from prep.masks.segmentation import segment

    folder = shutil.copytree(segformer, tmp_path / "model")
    kind = {"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 64}, "do_center_crop": True,
            "crop_size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, "image_processor_type": "CLIPImageProcessor"}))
    prepared = segment(folder, labels=["dog"], device="cpu").prepare(np.zeros((40, 80, 3), np.uint8))
    assert prepared.pixels_3HW.shape == (3, 64, 128)


def test_labels_that_a_model_has_not(segformer):
    from prep.masks.segmentation import segment

    with pytest.raises(UsageError, match="label 'dgo' is not among this model's 3; did you mean 'dog'") as caught:
        segment(segformer, labels=["dgo"], device="cpu")
    assert caught.value.hint == "the model has: wall, person, dog"


def test_models_of_another_kind(clipseg_model, segformer, tiny_model):
    from prep.masks.segmentation import clipseg, segment

    with pytest.raises(ModelError, match=r"the model in .*segformer has type segformer, expected clipseg"):
        clipseg(segformer, prompts=["a"], device="cpu")
    with pytest.raises(UsageError, match="label 'dog' is not among"):
        segment(clipseg_model, labels=["dog"], device="cpu")
    with pytest.raises(ModelError, match="has type clipseg, expected a semantic segmentation model or one of: maskf"):
        segment(clipseg_model, labels=["LABEL_0"], device="cpu")
    with pytest.raises(ModelError, match=r"tiny has no config\.json$"):
        segment(tiny_model, labels=["dog"], device="cpu")


def test_models_that_do_not_load(segformer, mask2former, tmp_path, monkeypatch):
    from prep.masks.segmentation import segment

    folder = shutil.copytree(segformer, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(ModelError, match=r"cannot load the segmentation model in .*model: "):
        segment(folder, labels=["dog"], device="cpu")
    weights.rename(folder / "pytorch_model.bin")  # which would be unpickled
    with pytest.raises(ModelError, match=r"model has no model\.safetensors$"):
        segment(folder, labels=["dog"], device="cpu")

    def missing(*_):
        raise ImportError("\nMask2FormerLoss requires the scipy library\n")

    monkeypatch.setattr("transformers.models.mask2former.modeling_mask2former.requires_backends", missing)
    with pytest.raises(ModelError, match="needs a package that is not installed: Mask2FormerLoss requires") as caught:
        segment(mask2former, labels=["dog"], device="cpu")
    assert caught.value.hint == "install that package; pip install 'latentry[masks]' installs SciPy"


@pytest.mark.parametrize(("name", "text", "message"), [
    ("adapter_config.json", '{"base_model_name_or_path": "/elsewhere"}', "an adapter beside the weights"),
    ("preprocessor_config.json", "[" * 100_000, "is nested too deeply"),
    ("config.json", None, "is a pipe or a device, expected a regular file"),
])
def test_models_that_lead_elsewhere_or_never_end(segformer, tmp_path, name, text, message):
    """transformers would load an adapter, and the model that it names, in place of this one."""
    from prep.masks.segmentation import segment

    folder = shutil.copytree(segformer, tmp_path / "model")
    if text is None:
        (folder / name).unlink()
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        segment(folder, labels=["dog"], device="cpu")


def test_code_of_a_model_is_never_run(segformer, tmp_path):
    from prep.masks.segmentation import segment

    folder = shutil.copytree(segformer, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    (folder / "config.json").write_text(json.dumps({
        **config, "model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(ModelError, match=r"cannot load the config of .*model: "):
        segment(folder, labels=["dog"], device="cpu")
    assert not (tmp_path / "ran").exists()


def test_prompts_longer_than_the_model_reads(clipseg_model):
    from prep.masks.segmentation import clipseg

    with pytest.raises(UsageError, match="prompt 'aaaaaaaaaaaaaaaaaaaa' has 22 tokens, expected at most 16"):
        clipseg(clipseg_model, prompts=["a" * 20], device="cpu")


# rembg.

@pytest.fixture
def rembg(monkeypatch, tmp_path):
    """A stand-in for the package, whose foreground is what is red, and a directory of its models."""
    def remove(picture, *, session, only_mask):
        assert only_mask and session == "session of u2net"
        return picture[..., 0]

    def new_session(name):
        if name != "u2net":
            raise ValueError(f"No session class found for model '{name}'")
        return f"session of {name}"

    monkeypatch.setitem(sys.modules, "rembg", SimpleNamespace(remove=remove, new_session=new_session))
    monkeypatch.setenv("U2NET_HOME", str(tmp_path / "models"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_rembg(prep, photos, rembg, tmp_path):
    (rembg / "u2net.onnx").touch()
    result = prep("mask", photos, "--with", "rembg", "-o", tmp_path / "out", "--mask", "none", "--json")
    assert result.code == 0 and result.json["written"] == 8
    with Image.open(photos / "3.png") as picture, Image.open(tmp_path / "out" / "3-masklabel.png") as mask:
        assert (np.asarray(mask) == np.asarray(picture)[..., 0]).all()
    prep("mask", photos, "--with", "rembg", "-o", tmp_path / "cut", "--mask", "none", "--threshold", 0.5)
    with Image.open(photos / "3.png") as picture, Image.open(tmp_path / "cut" / "3-masklabel.png") as mask:
        assert (np.asarray(mask) == np.where(np.asarray(picture)[..., 0] >= 128, 255, 0)).all()


def test_rembg_downloads_nothing_unasked(prep, photos, rembg, tmp_path):
    call = ("mask", photos, "--with", "rembg", "-o", tmp_path / "out", "--quiet")
    result = prep(*call)
    assert (result.code, result.err) == (6, f"error: rembg model 'u2net' is not in {rembg}\n"
                                            "hint: add --download to let rembg download it\n")
    assert prep(*call, "--download").code == 0
    result = prep(*call, "--model", "u3net", "--download", "--force")
    assert (result.code, result.err) == (6, "error: rembg cannot load 'u3net': No session class found for model 'u3net'"
                                            "\n")
    result = prep(*call, "--model", "../u2net", "--force")
    assert (result.code, result.err) == (6, "error: model '../u2net' is not a rembg model name, expected one like "
                                            "u2net\n")


def test_a_model_that_is_missing_is_said_before_the_package_is_imported(prep, photos, tmp_path, monkeypatch):
    (tmp_path / "packages" / "rembg").mkdir(parents=True)
    (tmp_path / "packages" / "rembg" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("U2NET_HOME", str(tmp_path))
    result = prep("mask", photos, "--with", "rembg", "-o", tmp_path / "out", "--quiet")
    assert result.code == 6 and f"error: rembg model 'u2net' is not in {tmp_path}\n" in result.err


def test_rembg_models_of_several_masks(prep, photos, rembg, tmp_path, monkeypatch):
    (rembg / "u2net.onnx").touch()
    monkeypatch.setattr(sys.modules["rembg"], "remove", lambda picture, **_: np.zeros((288, 96), np.uint8))
    result = prep("mask", photos, "--with", "rembg", "-o", tmp_path / "out", "--mask", "none", "--quiet")
    assert result.code == 6
    assert "error: rembg model 'u2net' gives an array of [288, 96], expected one mask of [96, 96]\n" in result.err


@pytest.mark.parametrize("ending", [None, SystemExit(1)])
def test_without_rembg(prep, tmp_path, monkeypatch, ending):
    """The package ends the process where it finds no onnxruntime."""
    if ending is None:
        monkeypatch.setitem(sys.modules, "rembg", None)
    else:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "rembg.py").write_text("raise SystemExit(1)")
        monkeypatch.syspath_prepend(tmp_path / "path")
    draw(tmp_path / "in" / "a.png", (32, 32), seed=1)
    monkeypatch.setenv("U2NET_HOME", str(tmp_path))
    (tmp_path / "u2net.onnx").touch()
    result = prep("mask", tmp_path / "in", "--with", "rembg", "-o", tmp_path / "out", "--quiet")
    assert result.code == 2
    assert result.err == ("error: --with rembg needs the package rembg with onnxruntime, which is not installed\n"
                          "hint: pip install 'latentry[rembg]'\n")
