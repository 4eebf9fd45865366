"""`prep export`: each format read back, by the program it is for or by that program's documented rules."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pictures import saved
from PIL import Image
from safetensors.torch import load_file
from sd_scripts import read_config
from small_manifest import write_small

from prep.errors import CacheError, PathError, UsageError
from prep.export import kohya, run
from prep.export.run import MARKER, export
from prep.export.sample import Samples, safe_path
from prep.fs import atomic
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--quiet")
SIZES = ((64, 64), (48, 32))  # of references
SCHEMA = Path(__file__).parents[2] / "manifests" / "schemas" / "export.schema.json"


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def decoded(tar: Path) -> list[dict[str, Any]]:
    """The samples of a tar, as `webdataset.WebDataset(…).decode()` has them; that leaves the file open."""
    with tar.open("rb") as stream:
        parts = webdataset.tariterators.tar_file_expander([{"url": str(tar), "stream": stream}])
        return list(map(webdataset.autodecode.Decoder([]), webdataset.tariterators.group_by_keys(parts)))


def wanted_rows(made, sample):
    """What was written of a sample, by the names of exports."""
    found = {}
    for number, view in enumerate(sample.views):
        found[f"view{number}.latent"] = made.latents[view.latent]
        if view.mask is not None:
            found[f"view{number}.mask"] = made.masks[view.mask]
        found |= {f"view{number}.ref{place}.latent": made.latents[one.latent]
                  for place, one in enumerate(view.references)}
    return found | {f"text{number}.hidden": made.texts[text.key] for number, text in enumerate(sample.texts)}


@pytest.mark.parametrize("references", [(), SIZES], ids=["alone", "with references"])
def test_safetensors_have_each_row_in_its_dtype(make, tmp_path, references):
    made = make(texts=2, views=2, references=references)
    report = export(made.path, "safetensors", tmp_path / "out")
    assert report.samples == report.files == report.written == len(made.samples)
    for sample in made.samples:
        path = tmp_path / "out" / f"{sample.name.rpartition('.')[0]}.safetensors"
        rows, wanted = load_file(path), wanted_rows(made, sample)
        assert rows.keys() == wanted.keys() and rows["view0.latent"].dtype == torch.bfloat16
        for name, row in rows.items():
            np.testing.assert_array_equal(row.float().numpy(), wanted[name].astype(np.float32))
        with safetensors.safe_open(path, "pt") as opened:
            facts = json.loads(opened.metadata()["latentry"])
        assert facts["name"] == sample.name and facts["captions"] == [text.caption for text in sample.texts]
        assert [one["name"] for one in facts["views"][1].get("references", ())] == [
            one.name for one in sample.views[1].references]
        assert facts["latents"] == made.manifest.document["latents"] and facts["manifest"] == made.manifest.digest


@pytest.mark.parametrize("references", [(), SIZES], ids=["alone", "with references"])
def test_tars_are_read_by_webdataset(make, tmp_path, references):
    made = make(texts=2, views=2, references=references)
    report = export(made.path, "webdataset", tmp_path / "out", tar_bytes=40_000)
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert 1 < len(tars) == report.files < len(made.samples)
    read = [one for tar in tars for one in decoded(tar)]
    assert [one["__key__"] for one in read] == [f"{number:09d}" for number in range(len(made.samples))]
    for one, sample in zip(read, made.samples, strict=True):
        assert one["txt"] == sample.texts[0].caption and one["json"]["name"] == sample.name
        arrays = {name.removesuffix(".npy"): one[name] for name in one if name.endswith(".npy")}
        for name, wanted in wanted_rows(made, sample).items():
            assert arrays[name].dtype == (np.uint8 if name.endswith("mask") else np.float32)
            np.testing.assert_array_equal(arrays[name], wanted)
        for view, place in ((view, place) for view in range(2) for place in range(len(references))):
            if not sample.views[view].references:  # all samples have the same members
                assert arrays[f"view{view}.ref{place}.latent"].shape == arrays[f"view{view}.latent"].shape
                assert not arrays[f"view{view}.ref{place}.latent"].any()
    again = export(made.path, "webdataset", tmp_path / "again", tar_bytes=40_000)
    assert again.bytes == report.bytes and files_of(tmp_path / "again") == files_of(tmp_path / "out")


@pytest.fixture
def encoded(prep, photos, tiny_model, tmp_path):
    """A manifest of real pictures: masks for some, and each also mirrored."""
    (photos / "5.png").unlink()  # transparent
    told = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                "--mask", "sidecar", "--flip", "both", *SMALL)
    assert told.code == 0, told.err
    return tmp_path / "m.json"


def test_kohya_caches_are_as_its_rules_say(prep, encoded, photos, tmp_path):
    told = prep("export", encoded, "--to", "kohya", "-o", tmp_path / "out", "--json")
    assert told.code == 0, told.err
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(told.json)
    samples = list(Samples(open_manifest(read_manifest(encoded))))
    assert (told.json["samples"], told.json["left_out"], len(samples)) == (7, 0, 7)
    out = tmp_path / "out" / "train" / "1_photos"
    for sample in samples:
        stem, (width, height) = sample.name.removesuffix(".png"), sample.size
        assert (out / sample.name).read_bytes() == (photos / sample.name).read_bytes()
        assert (out / f"{stem}.txt").read_text() == f"{sample.captions[0]}\n"
        with np.load(out / f"{stem}_{width:04d}x{height:04d}_sd.npz", allow_pickle=False) as arrays:
            masked = stem in ("0", "2")
            assert set(arrays) == {"latents", "latents_flipped", "original_size", "crop_ltrb",
                                   *(["alpha_mask"] if masked else [])}
            assert arrays["latents"].dtype == np.float32
            assert arrays["latents"].shape == (4, sample.bucket[1] // 8, sample.bucket[0] // 8)
            assert arrays["original_size"].tolist() == [width, height]
            placement = sample.placement(sample.views[0])
            left, top, right, _ = arrays["crop_ltrb"].tolist()
            assert (left, top) == placement.crop
            # Of the mirrored picture, sd-scripts takes the target's width less `right` as the left.
            assert left + (sample.bucket[0] - right) == placement.scaled[0] - sample.bucket[0]
            plain, mirrored = (sample.latent(view)["latent"].values() for view in sample.views)
            np.testing.assert_array_equal(arrays["latents"], plain)
            np.testing.assert_array_equal(arrays["latents_flipped"], mirrored)
            if masked:
                cells = sample.mask(sample.views[0]).values()[0]
                assert arrays["alpha_mask"].shape == (sample.bucket[1], sample.bucket[0])
                np.testing.assert_array_equal(arrays["alpha_mask"][3::8, 5::8], (cells / 255).astype(np.float32))
                assert 0 <= arrays["alpha_mask"].min() < arrays["alpha_mask"].max() <= 1


def test_pictures_that_sd_scripts_does_not_read_are_refused():
    pictures = [SimpleNamespace(first=SimpleNamespace(name=name), samples=(), suffix=Path(name).suffix)
                for name in ("a.png", "b.tif", "sub/c.gif")]
    with pytest.raises(UsageError) as caught:
        kohya.check(pictures, "sd15")
    assert caught.value.message == (
        "sd-scripts skips pictures in formats that it does not read (2): b.tif, sub/c.gif")
    assert caught.value.hint == "convert them to PNG, and encode again; --to folder takes any"


def test_a_picture_at_two_sizes_is_one_file_where_names_say_the_size(prep, photos, tiny_model, tmp_path, monkeypatch):
    for name in ("3", "4", "5", "6", "7"):
        (photos / f"{name}.png").unlink()
    assert prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                "--resolution", "64,96", "--step", 16, "--device", "cpu", "--quiet").code == 0
    with pytest.raises(UsageError, match=r"'0\.png' was encoded at 2 sizes, but a cache of 'sd' has one"):
        export(tmp_path / "m.json", "kohya", tmp_path / "no")
    monkeypatch.setitem(kohya.ARCHITECTURES, "sd15", "flux")
    export(tmp_path / "m.json", "kohya", tmp_path / "out")
    facts = read_manifest(tmp_path / "m.json").document["latents"]
    shift, scale = float(facts["shift_factor"]), float(facts["scaling_factor"])
    for sample in Samples(open_manifest(read_manifest(tmp_path / "m.json"))):
        (file,) = (tmp_path / "out" / "train" / "1_photos").glob(f"{Path(sample.name).stem}_*_flux.npz")
        with np.load(file) as arrays:  # as flux_models.AutoEncoder encodes
            wanted = scale * (sample.latent(sample.views[0])["latent"].values() - shift)
            height, width = wanted.shape[1:]
            np.testing.assert_allclose(arrays[f"latents_{height}x{width}"], wanted, rtol=1e-5, atol=1e-6)
    with zipfile.ZipFile(tmp_path / "out" / "train" / "1_photos" / "0_0096x0096_flux.npz") as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {f"{name}_{side}x{side}.npy" for side in (8, 12)
                                           for name in ("latents", "original_size", "crop_ltrb", "alpha_mask")}
    assert len(list((tmp_path / "out").rglob("*.npz"))) == 3
    small, large = read_config(tmp_path / "out" / "dataset.toml")
    assert (small["resolution"], large["resolution"]) == (64, 96) and small["shown"] == large["shown"]
    report = export(tmp_path / "m.json", "folder", tmp_path / "folder")
    lines = [json.loads(line) for line in (tmp_path / "folder" / "train" / "metadata.jsonl").read_text().splitlines()]
    assert report.samples == 6 and [line["file_name"] for line in lines] == [f"1_photos/{one}.png" for one in range(3)]
    assert lines[0]["buckets"] == [[64, 64], [96, 96]] and lines[1]["text"] == "picture number 1"


def test_a_folder_has_pictures_captions_and_metadata(encoded, photos, tmp_path):
    report = export(encoded, "folder", tmp_path / "out")
    found = files_of(tmp_path / "out")
    assert report.files == len(found) - 1 == 17  # the mark of an export is none of its files
    assert {name: data for name, data in found.items() if name.endswith(".png") and "mask" not in name} == {
        f"train/1_photos/{path.name}": path.read_bytes() for path in photos.glob("?.png")}
    lines = [json.loads(line) for line in found["train/metadata.jsonl"].splitlines()]
    assert {line["file_name"]: line["text"] for line in lines} == {
        f"1_photos/{path.name}": path.with_suffix(".txt").read_text() for path in photos.glob("?.png")}
    assert {line["mask_file_name"] for line in lines} == {
        None, "1_photos/0-masklabel.png", "1_photos/2-masklabel.png"}
    assert all(line["captions"] == [line["text"]] and line["role"] == "train" for line in lines)


@pytest.mark.parametrize(("to", "most"), [("safetensors", 1 << 30), ("webdataset", 40_000), ("kohya", 1),
                                          ("folder", 1)])
def test_an_interrupted_export_goes_on(encoded, tmp_path, monkeypatch, to, most):
    whole = export(encoded, to, tmp_path / "whole", tar_bytes=most)
    renames, plain = [], atomic.rename

    def rename(source, target):
        if len(renames) == 3:
            raise KeyboardInterrupt
        renames.append(target)
        plain(source, target)

    monkeypatch.setattr(atomic, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        export(encoded, to, tmp_path / "out", tar_bytes=most)
    monkeypatch.undo()
    left = files_of(tmp_path / "out")
    assert left.items() < files_of(tmp_path / "whole").items() and len(left) == 3
    (tmp_path / "out" / ".0123456789abcdef.partial").write_text("of a run that was killed")
    report = export(encoded, to, tmp_path / "out", tar_bytes=most)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert (report.files, report.written) == (whole.files, whole.files - 2)
    assert "2 files from before" in report.as_text()


def test_only_a_new_directory_or_the_same_export_is_written_to(make, tmp_path):
    made, out = make(), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(PathError, match="is not empty"):
        export(made.path, "safetensors", out)
    assert files_of(out) == {"mine.txt": b"mine"}
    (out / "mine.txt").unlink()
    export(made.path, "safetensors", out)
    before = files_of(out)
    with pytest.raises(PathError, match="has an export of another manifest, or in another format"):
        export(made.path, "webdataset", out)
    (out / MARKER).write_bytes(b"{}")
    with pytest.raises(PathError, match="cannot be read"):
        export(made.path, "safetensors", out)
    with pytest.raises(PathError, match="is a file, expected a new directory"):
        export(made.path, "safetensors", made.path)
    assert files_of(out) == before | {MARKER: b"{}"}


def test_a_picture_that_is_gone_or_edited_is_refused(encoded, photos, tmp_path):
    data = (photos / "3.png").read_bytes()
    (photos / "3.png").write_bytes(data + b"x")
    with pytest.raises(CacheError) as caught:
        export(encoded, "folder", tmp_path / "out")
    assert str(caught.value) == "the picture of '3.png' is not in its source as it was encoded: it was moved or edited"
    assert not (tmp_path / "out").exists(), "all pictures are checked before anything is written"
    (photos / "3.png").unlink()
    with pytest.raises(CacheError, match=r"the picture of '3\.png' is not in its source: No such file"):
        export(encoded, "kohya", tmp_path / "kohya")
    assert not (tmp_path / "kohya").exists()
    assert export(encoded, "safetensors", tmp_path / "rows").samples == 7


def test_a_family_or_a_format_that_is_not_known(make, prep, tmp_path, monkeypatch):
    made = make()
    monkeypatch.delitem(kohya.ARCHITECTURES, "sd15")
    with pytest.raises(UsageError, match="the family is 'sd15', expected one that sd-scripts caches latents of"):
        export(made.path, "kohya", tmp_path / "out")
    told = prep("export", made.path, "--to", "webdatset", "-o", tmp_path / "out")
    assert told.code == 2 and "--to is 'webdatset', expected one of" in told.err and "'webdataset'?" in told.err
    assert not (tmp_path / "out").exists()


def test_damage_ends_the_export_with_the_rows_name(make, prep, tmp_path):
    made = make()
    shard = next(made.manifest.cache_root.glob("shards/*/*/latent/c*"))
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    told = prep("export", made.path, "--to", "safetensors", "-o", tmp_path / "out")
    assert told.code == 7 and "checksum" in told.err, told.err


@given(st.text(max_size=40))
def test_a_name_stays_below_its_directory_on_any_system(name):
    path = safe_path(name)
    parts = path.split("/")
    assert all(part not in ("", ".", "..") and not part.endswith((".", " ")) for part in parts)
    assert not set(path) & set('\\:*?"<>|\0') and safe_path(path) == path


def test_equal_stems_and_sources_get_names_of_their_own(make):
    samples = Samples(open_manifest(make().manifest))
    names = ["a.png", "a.jpg", "A.webp", "a-2.png", "../a.png", "b/c.png"]
    samples.columns = type("Columns", (), {"name": lambda self, number: names[number], "source": [0] * 6,
                                           "__len__": lambda self: 6})()
    assert samples.stems == ["a", "a-2", "A-3", "a-2-2", "_/a", "b/c"]
    samples = Samples(samples_opened := open_manifest(make().manifest))
    assert len(set(samples.stems)) == len(samples_opened.samples)


def test_float16_rows_become_float32():
    from prep.arrays import ArraySpec
    from prep.export.sample import StoredRow

    values = np.array([[1.5, -2.25], [65504, 6e-8]], np.float16)
    row = StoredRow(spec=ArraySpec(name="x", dtype="float16", shape=(2, 2)), data=values.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(row.values(), values.astype(np.float32))
    assert row.values().dtype == np.float32 and run.FORMATS[0] == "safetensors"


def test_files_reach_the_disk_together(encoded, tmp_path, monkeypatch):
    synced, directories, sync, sync_dir = [], [], atomic.sync, atomic.sync_dir
    monkeypatch.setattr(atomic, "sync", lambda handle: (synced.append(handle.name), sync(handle)))
    monkeypatch.setattr(atomic, "sync_dir", lambda path, **at: (directories.append(path), sync_dir(path, **at)))
    report = export(encoded, "safetensors", tmp_path / "out")
    assert len(synced) == report.files + 1 and report.files >= 3, "each file, and the mark of the export"
    assert directories.count(tmp_path / "out") == 2, "once for the mark, and once for all files"


def test_a_disk_that_fails_leaves_nothing_half_written(encoded, tmp_path, monkeypatch):
    def fails(handle):
        raise OSError(errno.EIO, "Input/output error", handle.name)

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr("prep.export.run._begin", lambda output, _: output.mkdir())
        patch.setattr(atomic, "sync", fails)
        export(encoded, "safetensors", out)
    assert files_of(out) == {}


def test_references_lie_beside_the_pictures_of_a_folder(tmp_path):
    colors = {"../control/a.JPG": "teal", "other/a.png": "navy"}
    references = {name: saved(Image.new("RGB", (60, 40), color)) for name, color in colors.items()}
    pictures = {name: saved(Image.new("RGB", (128, 144), (name[0] == "a" and "red") or "lime"))
                for name in ("a.png", "sub/b.png")}
    path = write_small(tmp_path, pictures=pictures, references=references)
    report = export(path, "folder", tmp_path / "out")
    folder, files = tmp_path / "out" / "train", files_of(tmp_path / "out" / "train")
    assert (report.samples, report.files) == (2, len(files))
    assert {name for name in files if "control" in name} == {
        "control_1/1_photos/a.jpg", "control_2/1_photos/a.png"}
    assert [files["control_1/1_photos/a.jpg"], files["control_2/1_photos/a.png"]] == [*references.values()]
    lines = [json.loads(line) for line in files["metadata.jsonl"].splitlines()]
    assert [(line["file_name"], line["control_1_file_name"], line["control_2_file_name"]) for line in lines] == [
        ("1_photos/a.png", "control_1/1_photos/a.jpg", "control_2/1_photos/a.png"),
        ("1_photos/sub_b.png", None, None)]
    (folder.parent.parent / "control" / "a.JPG").unlink()
    with pytest.raises(CacheError, match=r"a reference of 'a.png', '../control/a.JPG', is not in its source"):
        export(path, "folder", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_references_are_refused_where_they_would_be_lost(tmp_path):
    path = write_small(tmp_path, pictures={}, references={"x.png": saved(Image.new("RGB", (60, 40)))})
    with pytest.raises(UsageError, match="samples have references, for which sd-scripts has no caches") as caught:
        export(path, "kohya", tmp_path / "out")
    assert caught.value.hint == "--to folder, safetensors and webdataset have references"
    assert not (tmp_path / "out").exists()
