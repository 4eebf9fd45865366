"""`prep import`: caches of sd-scripts become rows that `train` reads; what is not as it should be is named."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sd_scripts
import tiny_pipelines
import torch
from jsonschema import Draft202012Validator
from pictures import draw_mask, swapped_profile
from PIL import Image

from prep.export.sample import Samples
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

SCHEMA = Path(__file__).parents[2] / "manifests" / "schemas" / "import.schema.json"


@pytest.fixture
def run(prep, folder, tmp_path):
    """`run(model, …)` imports `folder` into m.json."""
    def call(model, *words, source=folder, code=0):
        told = prep("import", source, "--from", "kohya-npz", "--model", model, "--cache", tmp_path / "cache",
                    "-o", tmp_path / "m.json", "--device", "cpu", "--quiet", *words)
        assert told.code == code, told.err
        return told

    return call


@pytest.fixture
def manifest(tmp_path):
    return lambda: read_manifest(tmp_path / "m.json")


def samples_of(manifest):
    return {sample.name: sample for sample in Samples(open_manifest(manifest))}


def bfloat16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


def findings_of(told):
    return {(one["path"], one["code"]): one["detail"] for one in told.json["rejected"]}


def test_latents_and_placements_are_those_of_the_caches(run, caches, folder, sd15, manifest, prep, train, tmp_path):
    files = caches(sd15, "sd")
    told = run(sd15, "--json")
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(told.json)
    assert told.json["imported"] == told.json["samples"]["train"] == 6 and told.json["rejected"] == []
    assert told.json["verified"]["compared"] + told.json["verified"]["unclear"] == 6
    assert told.json["verified"]["compared"] >= 4 and told.json["verified"]["deviation"] < 0.1
    samples = samples_of(manifest())
    for path, file in zip(sorted(folder.glob("*.png")), files, strict=True):
        with np.load(file) as arrays, Image.open(path) as picture:
            sample = samples[path.name]
            (view,) = sample.views
            np.testing.assert_array_equal(sample.latent(view)["latent"].values(), bfloat16(arrays["latents"]))
            reso, resized = sd_scripts.select_bucket(*picture.size, sd_scripts.buckets(96, 16))
            placement = sample.placement(view)
            assert (placement.bucket, placement.scaled) == (reso, resized) and sample.size == picture.size
            assert placement.crop == ((resized[0] - reso[0]) // 2, (resized[1] - reso[1]) // 2)
    assert prep("verify", tmp_path / "m.json").code == 0
    assert "imported from kohya-npz, VAE verified: " in prep("inspect", tmp_path / "m.json").out
    assert "VAE unverified" not in train("check", tmp_path / "m.json", "--steps", 2).out


def test_an_import_trains(run, caches, sdxl, train, tmp_path):
    """A LoRA of SDXL, whose size conditions come from the placements."""
    caches(sdxl, "sdxl", flip=True)
    run(sdxl, "--flip", "both", "--dtype", "float32")
    ending = train("run", tmp_path / "m.json", "-o", tmp_path / "run", "--device", "cpu", "--steps", 2, "--batch-size",
                   2, "--rank", 2, "--quiet", "--set", "sample.every=0")
    assert ending.code == 0, ending.err
    assert list((tmp_path / "run").glob("*.safetensors"))


def test_batches_have_the_cached_latents(run, caches, folder, sdxl, manifest):
    from prep import api

    files = caches(sdxl, "sdxl", flip=True)
    run(sdxl, "--flip", "both", "--dtype", "float32")
    cached = []
    for file in files:
        with np.load(file) as arrays:
            cached += [arrays["latents"], arrays["latents_flipped"]]
    seen = 0
    scale = np.float32(manifest().document["latents"]["scaling_factor"])
    for batch in api.batches(manifest().path, batch_size=2, steps=6):
        for latent in batch["latents"].numpy():
            assert any(latent.shape == one.shape and (latent == one * scale).all() for one in cached)
            seen += 1
    assert seen >= 6


@pytest.mark.few("sd15")
@pytest.mark.parametrize("family", ["sd15", "flux", "sd3"])
def test_an_export_comes_back(prep, run, folder, sd15, tmp_path, manifest, family):
    """Encoded, exported, imported: the same numbers at the same places, also of crops that are not in the middle."""
    model = sd15 if family == "sd15" else tiny_pipelines.save(family, tmp_path / family)
    options = ("--resolution", 96, "--step", 16) if family == "sd15" else ("--resolution", "64,96", "--step", 16)
    told = prep("encode", folder, "--model", model, "--cache", tmp_path / "own", "-o", tmp_path / "own.json", *options,
                "--crop", "random", "--flip", "both", "--device", "cpu", "--quiet")
    assert told.code == 0, told.err
    assert prep("export", tmp_path / "own.json", "--to", "kohya", "-o", tmp_path / "out", "--quiet").code == 0
    told = run(model, "--flip", "both", "--verify", 3 if family == "sd15" else 0, "--json",
               source=tmp_path / "out" / "train")
    assert told.json["rejected"] == []
    there, here = (list(Samples(open_manifest(each))) for each in (read_manifest(tmp_path / "own.json"), manifest()))
    assert len(there) == len(here) >= 6
    wanted = {(one.name, one.bucket): one for one in there}
    for sample in here:
        other = wanted[Path(sample.name).name, sample.bucket]
        assert [sample.placement(view) for view in sample.views] == [other.placement(view) for view in other.views]
        for mine, theirs in zip(sample.views, other.views, strict=True):
            a, b = sample.latent(mine)["latent"].values(), other.latent(theirs)["latent"].values()
            if family == "flux":  # normalized and back in float32: the last bit of a bfloat16 near 0 may be another
                np.testing.assert_allclose(a, b, rtol=2 ** -7, atol=1e-6)
            else:
                np.testing.assert_array_equal(a, b)


def test_masks_of_an_export_come_back_from_their_directory(prep, run, folder, sd15, tmp_path, manifest):
    """The export has them as coarse as latents only, so the import makes them of the files again."""
    (tmp_path / "masks").mkdir()
    for path in folder.glob("[01].png"):
        with Image.open(path) as picture:
            draw_mask(tmp_path / "masks" / f"{path.stem}-masklabel.png", picture.size)
    masks = ("--mask", tmp_path / "masks")
    told = prep("encode", folder, "--model", sd15, "--cache", tmp_path / "own", "-o", tmp_path / "own.json",
                "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", *masks)
    assert told.code == 0, told.err
    assert prep("export", tmp_path / "own.json", "--to", "kohya", "-o", tmp_path / "out", "--quiet").code == 0
    assert run(sd15, *masks, "--json", source=tmp_path / "out" / "train").json["rejected"] == []
    there, here = (list(Samples(open_manifest(each))) for each in (read_manifest(tmp_path / "own.json"), manifest()))
    wanted = {one.name: one.mask(next(iter(one.views))) for one in there}
    assert sum(one is not None for one in wanted.values()) == 2
    for sample in here:
        mine, theirs = sample.mask(next(iter(sample.views))), wanted[Path(sample.name).name]
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine.values(), theirs.values())


@pytest.mark.parametrize(("family", "word"), [("flux", "flux"), ("lumina2", "lumina"), ("sd3", "sd3")])
def test_architectures_whose_caches_hold_several_sizes(run, caches, folder, tmp_path, manifest, family, word):
    model = tiny_pipelines.save(family, tmp_path / family)
    vae = sd_scripts.load_vae(model)
    files = caches(model, word)
    for path in folder.glob("*.png"):
        sd_scripts.cache_latents(path, vae, word, [(64, 64)])  # the same file, with another size
    told = run(model, "--verify", 0, "--dtype", "float32", "--json")
    assert told.json["imported"] == 12 and told.json["samples"]["train"] == 12
    document = manifest().document
    assert document["latents"]["imported"] == {"from": "kohya-npz", "verified": 0, "options": []}
    shift, scale = float(document["latents"]["shift_factor"]), float(document["latents"]["scaling_factor"])
    for sample in Samples(open_manifest(manifest())):
        with np.load(files[int(Path(sample.name).stem)]) as arrays:
            width, height = (side // 8 for side in sample.bucket)
            cached = arrays[f"latents_{height}x{width}"]
        wanted = cached / scale + shift if word in ("flux", "lumina") else cached
        np.testing.assert_allclose(sample.latent(sample.views[0])["latent"].values(), wanted, rtol=1e-5, atol=1e-6)


# ---- comparing -------------------------------------------------------------------------------------------------------


def changed(file, **arrays):
    with np.load(file) as old:
        np.savez(file, **{**{name: old[name] for name in old.files}, **arrays})


def latents(file):
    with np.load(file) as arrays:
        return arrays["latents"]


def spoil_scale(files, folder):
    for file in files:
        changed(file, latents=latents(file) * np.float32(0.18215))
    return "it is multiplied by 0.18"


def spoil_mirrored(files, folder):
    for file in files:
        changed(file, latents=np.ascontiguousarray(latents(file)[..., ::-1]))
    return "it is that of the mirrored picture"


def spoil_crop(files, folder):
    """Latents of pictures that were cropped at their upper left corner."""
    vae = sd_scripts.load_vae(folder.parent / "vae")
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        with Image.open(path) as picture:
            reso, resized = sd_scripts.select_bucket(*picture.size, sd_scripts.buckets(96, 16))
            larger = picture.convert("RGB").resize((resized[0] + 32, resized[1] + 32))
            pixels = np.asarray(larger)[:reso[1], :reso[0]]
        changed(files[number], latents=sd_scripts.encode(vae, pixels, word="sd", seed=0))
    return "it is of another VAE, crop or picture"


def spoil_picture(files, folder):
    """Another picture of the same size, as one that was edited since."""
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        with Image.open(path) as picture:
            Image.fromarray(np.random.default_rng(number).integers(0, 256, (3, 4, 3), np.uint8)).resize(
                picture.size, Image.Resampling.BICUBIC).save(path)
    return "it is of another VAE, crop or picture"


@pytest.mark.parametrize("spoil", [spoil_scale, spoil_mirrored, spoil_crop, spoil_picture])
def test_latents_of_something_else_are_refused(run, caches, folder, sd15, tmp_path, spoil):
    shutil.copytree(sd15, tmp_path / "vae")
    why = spoil(caches(sd15, "sd"), folder)
    told = run(sd15, code=7)
    assert "that were compared are not what the VAE of" in told.err and why in " ".join(told.err.split())
    assert not (tmp_path / "m.json").exists() and not (tmp_path / "cache").exists()


def test_latents_of_another_vae_are_refused(run, caches, sd15, tmp_path):
    other = tiny_pipelines.save("sd15", tmp_path / "other", seed=3)
    caches(other, "sd")
    assert "another VAE, crop or picture" in " ".join(run(sd15, code=7).err.split())


def test_pictures_are_compared_as_sd_scripts_reads_them(run, caches, folder, sd15):
    """It drops transparency, and shows the colors below; and takes no notice of color profiles."""
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        with Image.open(path) as picture:
            changed_picture = picture.convert("RGB")
        if number % 2:
            changed_picture.putalpha(Image.linear_gradient("L").resize(changed_picture.size))
            changed_picture.save(path)
        else:
            changed_picture.save(path, icc_profile=swapped_profile())
    caches(sd15)
    told = run(sd15, "--json").json
    assert told["verified"]["compared"] >= 4 and told["verified"]["deviation"] < 0.1


def test_without_a_comparison_it_is_said_everywhere(run, caches, sd15, prep, train, tmp_path, manifest):
    caches(sd15, "sd")
    told = run(sd15, "--verify", 0)
    assert "VAE unverified: no latent was compared" in told.out
    unverified = manifest().digest
    assert "imported from kohya-npz, VAE unverified" in prep("inspect", tmp_path / "m.json").out
    checked = train("check", tmp_path / "m.json", "--steps", 2)
    assert checked.code == 0 and "VAE unverified: none was compared" in checked.out
    assert "prep import" in checked.out and "--verify 8" in checked.out
    told = run(sd15, "--verify", 2, "--json")  # rows are reused
    assert told.json["imported"] == 0 and told.json["reused"]["latent"] == 6
    assert told.json["verified"]["compared"] == 2 and manifest().digest != unverified
    assert "VAE unverified" not in train("check", tmp_path / "m.json", "--steps", 2).out


def test_noise_tells_nothing(run, caches, prep, folder, tmp_path, manifest):
    """Of a VAE of random weights, whose posterior is wider than pictures differ."""
    model = tiny_pipelines.save("sd15", tmp_path / "random")
    caches(model)
    told = run(model, "--json")
    assert told.json["verified"] == {"compared": 0, "unclear": 6, "deviation": 0.0}
    assert "VAE unverified" in prep("inspect", tmp_path / "m.json").out
    told = prep("import", folder, "--from", "kohya-npz", "--model", model, "--cache", tmp_path / "cache", "-o",
                tmp_path / "m.json", "--device", "cpu")
    assert "6 latents would also fit the mirrored picture" in told.err
    assert manifest().document["latents"]["imported"]["verified"] == 0


def test_pictures_that_were_not_scaled(run, caches, folder, sd15, tmp_path, manifest):
    """With `bucket_no_upscale`, the crop is another one, and the comparison finds out."""
    caches(sd15, "sd", unscaled_steps=64)
    told = run(sd15, "--resolution", 512, code=7)
    assert "--bucket-no-upscale if sd-scripts had it" in " ".join(told.err.split())
    told = run(sd15, "--resolution", 512, "--bucket-no-upscale", "--json")
    assert told.json["verified"]["compared"] >= 4
    assert manifest().document["latents"]["imported"]["options"] == ["--bucket-no-upscale"]
    sample = samples_of(manifest())["0.png"]
    placement = sample.placement(sample.views[0])
    assert (placement.scaled, placement.crop, placement.bucket) == ((200, 200), (4, 4), (192, 192))


# ---- findings --------------------------------------------------------------------------------------------------------


def test_each_picture_that_is_skipped_is_named(run, caches, folder, sd15, tmp_path, manifest):
    files = caches(sd15, "sd")
    files[0].unlink()  # without a cache
    with Image.open(folder / "1.png") as picture:  # replaced by a larger one
        picture.resize((480, 400)).save(folder / "1.png")
    files[2].write_bytes(files[2].read_bytes()[:-100])
    changed(files[3], crop_ltrb=np.array([5000, 0, 6000, 1]))
    array = latents(files[4])
    array[0, 0, 0] = np.nan
    changed(files[4], latents=array)
    told = run(sd15, "--json", "--strict", code=1)
    found = findings_of(told)
    assert dict(found.keys()) == {
        "0.png": "no-latents", "1.png": "stale-latents", "2.png": "bad-latents", "3.png": "bad-latents",
        "4.png": "not-finite"}
    assert "made of a picture of 240x200, but this one has 480x400" in found["1.png", "stale-latents"]
    assert "is not a zip of arrays, or is cut off" in found["2.png", "bad-latents"]
    assert "crop_ltrb is [5000.0, 0.0, 6000.0, 1.0], which no crop of" in found["3.png", "bad-latents"]
    assert list(samples_of(manifest())) == ["5.png"]


def test_a_size_in_the_file_goes_before_that_in_its_name(run, caches, folder, sd15):
    files = caches(sd15, "sd", legacy=True)
    with Image.open(folder / "1.png") as picture:
        picture.resize((480, 400)).save(folder / "1.png")
    changed(files[2], latents=np.zeros((16, 12, 12), np.float32))
    changed(files[3], latents=np.zeros((4, 12, 12, 1), np.float32))
    changed(files[4], original_size=np.array([1, 2, 3]))
    found = findings_of(run(sd15, "--json", "--verify", 0))
    assert "made of a picture of 240x200, but this one has 480x400" in found["1.png", "stale-latents"]
    assert "latents of 16 channels, expected 4 of family 'sd15'" in found["2.png", "bad-latents"]
    assert "expected floats of channels, height and width" in found["3.png", "bad-latents"]
    assert "has 'original_size' of [3], expected 2 numbers" in found["4.png", "bad-latents"]


def test_pictures_of_one_stem_are_left_out(run, caches, folder, sd15):
    with Image.open(folder / "0.png") as picture:
        picture.save(folder / "0.jpg")
    caches(sd15, "sd")
    found = findings_of(run(sd15, "--json"))
    assert set(found) == {("0.jpg", "latents-shared"), ("0.png", "latents-shared")}
    assert "shares 0_0200x0200_sd.npz with 0.jpg" in found["0.png", "latents-shared"]


def test_other_caches_of_a_picture_are_named(run, caches, folder, sd15, manifest):
    caches(sd15, "sd")
    shutil.copy(folder / "0_0200x0200_sd.npz", folder / "0_0064x0064_sd.npz")
    caches(sd15, "sd", legacy=True)
    run(sd15)
    told = [(one["path"], one["detail"]) for one in open_manifest(manifest()).findings
            if one["code"] == "latents-unused"]
    assert len(told) == 7
    assert ("0.png", "0_0064x0064_sd.npz is another cache of it; 0.npz is used") in told


def test_pictures_that_exif_turns(run, caches, folder, sd15):
    """sd-scripts takes them as they are stored."""
    with Image.open(folder / "1.png") as picture:
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.convert("RGB").save(folder / "6.jpg", exif=exif)
    (folder / "6.txt").write_text("turned")
    sd_scripts.cache_latents(folder / "6.jpg", sd_scripts.load_vae(sd15), "sd", [(96, 96)])
    caches(sd15, "sd")
    found = findings_of(run(sd15, "--json"))
    assert "sd-scripts does not turn pictures as their EXIF data says" in found["6.jpg", "stale-latents"]


def test_mirrored_latents_are_imported_where_they_are_wanted(run, prep, caches, sd15, folder, tmp_path, manifest):
    files = caches(sd15, "sd", flip=True, mask=True)
    told = prep("import", folder, "--from", "kohya-npz", "--model", sd15, "--cache", tmp_path / "cache", "-o",
                tmp_path / "m.json", "--device", "cpu", "--verify", 0)
    assert ("6 caches with masks, which are not imported: masks are made of the pictures' own files, --mask sidecar, "
            "--mask alpha or --mask DIR\n") in told.err
    assert "6 caches with mirrored latents, too; --flip both imports them" in told.err
    with np.load(files[0]) as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "latents_flipped"}
    np.savez(files[0], **kept)
    found = findings_of(run(sd15, "--flip", "always", "--json"))
    assert 'no latents of the mirrored picture, which flip = "always" needs' in found["0.png", "bad-latents"]
    sample = samples_of(manifest())["1.png"]
    with np.load(files[1]) as arrays:
        np.testing.assert_array_equal(sample.latent(sample.views[0])["latent"].values(),
                                      bfloat16(arrays["latents_flipped"]))
    assert sample.placement(sample.views[0]).flip


def test_a_checksum_that_differs_is_found(run, caches, sd15):
    (file, *_) = caches(sd15, "sd")
    data = bytearray(file.read_bytes())
    at = data.index(b"latents.npy") + 200
    data[at] ^= 1
    file.write_bytes(data)
    found = findings_of(run(sd15, "--json"))
    assert "has 'latents' damaged: Bad CRC-32" in found["0.png", "bad-latents"]


def test_rows_are_never_those_that_are_encoded(run, caches, prep, folder, sd15, tmp_path, manifest):
    """In one cache: neither an import nor an encoding takes the other's latents; texts are shared."""
    caches(sd15, "sd")
    run(sd15)
    told = prep("encode", folder, "--model", sd15, "--cache", tmp_path / "cache", "-o", tmp_path / "own.json",
                "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--json")
    assert told.code == 0 and told.json["encoded"]["latent"] == 6 and told.json["encoded"]["text"] == 0
    own = read_manifest(tmp_path / "own.json")
    assert "imported" not in own.document["latents"]
    told = prep("diff", tmp_path / "own.json", tmp_path / "m.json").out
    assert "origin of latents: imported from kohya-npz, VAE verified: 6 latents compared, was encoded" in told
    a, b = (samples_of(each)["0.png"] for each in (own, manifest()))
    assert a.of.columns.ids[a.number].tobytes() == b.of.columns.ids[b.number].tobytes()
    assert (a.latent(a.views[0])["latent"].values() != b.latent(b.views[0])["latent"].values()).any()


def test_an_import_that_was_stopped_goes_on(run, caches, sd15, monkeypatch, tmp_path, manifest):
    from prep.imports.source import NpzRows

    caches(sd15, "sd")
    run(sd15)
    whole = (tmp_path / "m.json").read_bytes()
    (tmp_path / "m.json").unlink()
    shutil.rmtree(tmp_path / "cache")
    plain, made = NpzRows.row, []

    def row(self, target):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(target)
        return plain(self, target)

    monkeypatch.setattr(NpzRows, "row", row)
    run(sd15, code=130)
    assert not (tmp_path / "m.json").exists()
    monkeypatch.undo()
    run(sd15)
    assert (tmp_path / "m.json").read_bytes() == whole


@pytest.mark.slow
def test_damaged_rows_are_imported_again(run, caches, sd15, prep, tmp_path):
    caches(sd15, "sd")
    run(sd15)
    for path in (tmp_path / "cache" / "shards").glob("*/*/latent/c*"):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    told = prep("verify", tmp_path / "m.json")
    assert told.code == 7 and "latents were imported; what imports damaged ones again" in told.out
    assert "--from kohya-npz" in told.out and "--recheck --cache" in told.out
    shards = len(list((tmp_path / "cache" / "shards").glob("*/*/latent/c*")))
    assert run(sd15, "--recheck", "--json").json["imported"] == shards
    assert prep("verify", tmp_path / "m.json").code == 0


@pytest.mark.slow
def test_a_file_that_changes_meanwhile_is_a_finding(run, caches, sd15, monkeypatch):
    from prep.imports import source

    files = caches(sd15, "sd")
    plain = source.read_blob
    monkeypatch.setattr(source, "read_blob", lambda blob: plain(blob) + (b"x" if blob.file == str(files[0]) else b""))
    found = findings_of(run(sd15, "--json", code=1))
    assert "changed while it was being imported; run the command again" in found["0.png", "changed-meanwhile"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_caches_do_not_have_is_refused(run, prep, folder, sd15, tmp_path):
    def recipe(text, source=folder):
        path = tmp_path / "dataset.toml"
        path.write_text(f'[model]\npath = "{sd15}"\n{text}\n[[source]]\npath = "{source}"\n')
        return path

    told = run(sd15, source=recipe('[image]\ncrop = "random"\nviews = 2\n'), code=3)
    assert "image.crop is 'random' with 2 views, expected 'center'" in told.err
    shutil.copytree(folder, tmp_path / "control", ignore=shutil.ignore_patterns("*.npz", "*.txt"))
    told = run(sd15, "--references", tmp_path / "control", code=3)
    assert "pictures have references, which sd-scripts' caches do not hold" in told.err
    told = run(sd15, source=recipe('posterior = "mean+std"\n'), code=3)
    assert "model.posterior is 'mean+std', but sd-scripts caches one sample of it" in told.err
    with zipfile.ZipFile(tmp_path / "a.zip", "w"):
        pass
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    told = run(sd15, source=tmp_path / "a.tar", code=3)
    assert "is not a directory on this computer, expected one of pictures with" in " ".join(told.err.split())
    assert "--from is 'kohya', expected kohya-npz" in prep("import", folder, "--from", "kohya", "--model", sd15,
                                                           "--cache", tmp_path / "c").err
    told = run(sd15, code=8)
    assert "no pictures to encode in" in told.err and "has no cache of latents beside it" in told.err
    assert "hint: let sd-scripts make its caches again, or make latents of the pictures: prep encode SOURCE" in told.err


def test_a_family_that_sd_scripts_does_not_train(run, folder, tmp_path):
    model = tiny_pipelines.save("pixart_sigma", tmp_path / "pixart")
    assert "expected one that sd-scripts caches latents of" in run(model, code=2).err


@pytest.mark.slow
def test_latents_that_are_no_file_or_not_finite_are_told_as_that(run, caches, folder, sd15):
    """And not as defects of the pictures, which `prep scan` would find sound."""
    for path in folder.iterdir():
        if path.stem != "0":
            path.unlink()
    (cache,) = caches(sd15, "sd")
    array = latents(cache)
    array[0, 0, 0] = np.nan
    changed(cache, latents=array)
    told = run(sd15, code=8)
    assert "not-finite: its latents" in told.err and "make its caches again, with --no_half_vae" in told.err
    cache.unlink()
    cache.mkdir()
    assert f"its latents {cache.name}: are no file" in run(sd15, code=8).err
