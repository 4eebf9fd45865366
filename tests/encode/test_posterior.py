"""`prep encode --posterior mean+std`: rows with the deviations of the VAE, in every command that reads a cache."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from row_values import read_row
from runs import events

from prep.cache.reader import Reader
from prep.images.decode import decode_picture
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models import latents

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--mask", "none", "--flip", "both", "--validation", 0.2)


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*options)` encodes the photos into cache and m.json."""

    def go(*options, manifest="m.json", code=0):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / manifest,
                      *SMALL, "--json", *options)
        assert result.code == code, result.err
        return result.json if code == 0 else result

    return go


def rows_of(path):
    """Mean and deviation of each view, by sample and view."""
    index = open_index(read_manifest(path))
    reader, views, found = Reader(index.cache), index.samples.views, {}
    for sample in range(len(index.samples)):
        for view in range(int(index.samples.view_offsets[sample]), int(index.samples.view_offsets[sample + 1])):
            place = index.ref(int(views["latent_shard"][view]), int(views["latent_row"][view]))
            arrays = index.manifest.fields["latent"].arrays
            found[index.samples.name(sample), int(views["flip"][view])] = [
                read_row(reader, place.shard, array, place.row) for array in arrays]
    return found


def test_rows_are_the_vaes_distribution_and_means_do_not_change(encode, photos, tiny_model, tmp_path):
    count = encode("--dtype", "float32")["encoded"]["latent"]
    both = encode("--dtype", "float32", "--posterior", "mean+std", manifest="both.json")
    assert both["encoded"] == {"latent": count, "mask": 0, "text": 0}, "other keys, and the text is the same"
    means, found = rows_of(tmp_path / "m.json"), rows_of(tmp_path / "both.json")
    fields = json.loads((tmp_path / "both.json").read_bytes())["fields"]
    assert fields["latent"]["context"]["posterior"] == "mean+std"
    cell = {"dims": ["c", "h", "w"], "dtype": "float32"}
    assert fields["latent"]["arrays"] == {"latent": cell, "std": cell}
    vae = AutoencoderKL.from_pretrained(tiny_model / "vae", low_cpu_mem_usage=False)
    assert found.keys() == means.keys() and len(found) == count > 10
    for name, (mean, std) in found.items():
        assert np.array_equal(mean, means[name][0]) and (std > 0).all()
        if name == ("0.png", 0):
            pixels = np.asarray(decode_picture((photos / "0.png").read_bytes(), alpha="white"))
            image = torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(np.float32) / 127.5 - 1)
            with torch.no_grad():
                wanted = vae.encode(image).latent_dist
            np.testing.assert_allclose(mean, wanted.mean[0], atol=1e-5)
            np.testing.assert_allclose(std, wanted.std[0], rtol=1e-4)


def test_every_command_reads_them(encode, prep, train, tmp_path):
    encode()
    encode("--posterior", "mean+std", "--shard-mib", 1, manifest="both.json")
    said = prep("diff", tmp_path / "m.json", tmp_path / "both.json")
    assert "the mean+std of the VAE's posterior is stored, was mean" in said.out
    assert "std" in prep("inspect", tmp_path / "both.json").out
    assert "bfloat16/bfloat16" in train("check", tmp_path / "both.json").out
    assert prep("compact", tmp_path / "cache").code == 0
    again = encode("--posterior", "mean+std", manifest="both.json")
    assert again["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert prep("verify", tmp_path / "both.json").code == 0
    result = train("run", tmp_path / "both.json", "-o", tmp_path / "run", "--steps", 2, "--batch-size", 2,
                   "--device", "cpu", "--set", "lora.rank=2", "--set", "sample.every=0")
    assert result.code == 0, result.err
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"] == [1, 2]


def test_a_damaged_deviation_is_found_and_its_row_encoded_again(encode, prep, tmp_path):
    encode("--posterior", "mean+std")
    before = rows_of(tmp_path / "m.json")
    path = next((tmp_path / "cache" / "shards").glob("*/*/std/c.*"))
    path.chmod(0o644)
    path.write_bytes(b"\1" * 8 + path.read_bytes()[8:])
    found = prep("verify", tmp_path / "m.json")
    assert found.code == 7 and "array 'std'" in found.out
    assert encode("--posterior", "mean+std")["encoded"]["latent"] == 1
    after = rows_of(tmp_path / "m.json")
    assert all(np.array_equal(one, other) for name in before
               for one, other in zip(before[name], after[name], strict=True))


def test_a_recipe_names_it_and_a_wrong_word_is_refused(encode, prep, photos, tiny_model, tmp_path):
    recipe = tmp_path / "dataset.toml"
    recipe.write_text(f'[model]\npath = "{tiny_model}"\nposterior = "mean+std"\n[image]\nresolution = 96\nstep = 16\n'
                      '[[source]]\npath = "photos"\n')
    result = prep("encode", recipe, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--device", "cpu")
    assert result.code == 0, result.err
    assert "std" in read_manifest(tmp_path / "m.json").fields["latent"].arrays
    assert "model.posterior is 'sample', expected one of: mean, mean+std" in encode("--posterior", "sample", code=3).err


def test_a_vae_without_a_posterior_is_refused(encode, tiny_model, tmp_path, monkeypatch):
    plain = replace(latents.GEOMETRIES["AutoencoderKL"], posterior=False)
    monkeypatch.setattr(latents, "GEOMETRIES", {**latents.GEOMETRIES, "AutoencoderKL": plain})
    said = encode("--posterior", "mean+std", code=3).err
    assert (f"model.posterior is 'mean+std', but AutoencoderKL, the VAE of {tiny_model}, encodes a picture to one "
            "latent, without a standard deviation") in said
    assert "hint: leave it out: nothing is lost" in said and not (tmp_path / "cache").exists()


def test_a_manifest_whose_shards_lack_deviations_is_refused(encode, train, tmp_path):
    from prep.digest import canonical, digest_json

    encode()
    document = json.loads((tmp_path / "m.json").read_bytes())
    document["fields"]["latent"]["arrays"]["std"] = document["fields"]["latent"]["arrays"]["latent"]
    del document["self"]
    (tmp_path / "m.json").write_bytes(canonical({**document, "self": digest_json(document)}))
    said = train("check", tmp_path / "m.json")
    assert said.code == 7 and "holds latent latent:" in said.err and "std:" in said.err
