"""`prep encode`: what is encoded again and what is not, and that the rows are what the models make of the pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from pictures import draw, draw_mask
from PIL import Image
from row_values import read_row

from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.manifest.document import read_manifest
from prep.manifest.tables import SAMPLES, SHARDS, read_table

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*options)` encodes the photos into cache and m.json; the report must be a success."""

    def go(*options, cache="cache", manifest="m.json", code=0):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o", tmp_path / manifest,
                      *SMALL, "--json", *options)
        assert result.code == code, result.err
        return result.json if code == 0 else result

    return go


def rows_of(manifest: Path):
    """Each sample's name with its arrays as float32, and its table row."""
    opened = read_manifest(manifest)
    cache = Cache(root=opened.cache_root)
    table = read_table(cache, opened.document["tables"]["shards"], SHARDS)
    shards = [digest.hex() for digest in table["digest"].to_pylist()]
    reader = Reader(cache)
    found = {}
    for sample in read_table(cache, opened.document["tables"]["samples"], SAMPLES).to_pylist():
        view, text = sample["views"][0], sample["texts"][0]
        arrays = {"latent": read_row(reader, shards[view["latent_shard"]], "latent", view["latent_row"]),
                  "hidden": read_row(reader, shards[text["shard"]], "hidden", text["row"])}
        if view["mask_shard"] >= 0:
            arrays["mask"] = read_row(reader, shards[view["mask_shard"]], "mask", view["mask_row"])
        found[sample["name"]] = (arrays, sample)
    return found


def by_hand(path: Path, sample: dict, bucket: tuple[int, int]) -> np.ndarray:
    """The bucket's pixels in a few lines of Pillow: float32 [1, 3, H, W] in -1..1."""
    picture = Image.open(path)
    if picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    view = sample["views"][0]
    scaled = picture.convert("RGB").resize((view["scaled_width"], view["scaled_height"]), Image.Resampling.LANCZOS)
    left, top = view["crop_x"], view["crop_y"]
    cut = np.asarray(scaled.crop((left, top, left + bucket[0], top + bucket[1])))
    return cut.transpose(2, 0, 1)[None].astype(np.float32) / 127.5 - 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-7)])
def test_latents_equal_the_vae_on_pictures_prepared_by_hand(encode, photos, tiny_model, tmp_path, dtype, tolerance):
    encode("--dtype", dtype, "--compute", "float32", "--mask", "sidecar")
    vae = AutoencoderKL.from_pretrained(tiny_model / "vae", low_cpu_mem_usage=False)
    buckets = read_manifest(tmp_path / "m.json").buckets
    rows = rows_of(tmp_path / "m.json")
    assert len(rows) == 8
    for name, (arrays, sample) in rows.items():
        pixels = by_hand(photos / name, sample, buckets[sample["bucket"]])
        with torch.no_grad():
            wanted = vae.encode(torch.from_numpy(pixels)).latent_dist.mean[0].numpy()
        # Flattening transparency twice rounds twice: one level of 255 in a few pixels of the one picture with alpha.
        slack = 0.02 if name == "5.png" else 0
        np.testing.assert_allclose(arrays["latent"], wanted, rtol=tolerance, atol=tolerance + slack)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-7)])
def test_text_rows_equal_encode_prompt(encode, tiny_model, tmp_path, dtype, tolerance):
    encode("--dtype", dtype, "--compute", "float32")
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model, safety_checker=None, low_cpu_mem_usage=False)
    for arrays, sample in rows_of(tmp_path / "m.json").values():
        with torch.no_grad():
            wanted = pipeline.encode_prompt(sample["texts"][0]["caption"], "cpu", 1, False)[0][0].numpy()
        np.testing.assert_allclose(arrays["hidden"], wanted, rtol=tolerance, atol=tolerance)


def test_masks_are_area_means_at_latent_cells(encode, tmp_path):
    encode("--mask", "sidecar")
    rows = rows_of(tmp_path / "m.json")
    assert {name for name, (arrays, _) in rows.items() if "mask" in arrays} == {"0.png", "2.png", "5.png"}
    mask = rows["0.png"][0]["mask"]  # 96x96 in a bucket of its own size: no resampling
    np.testing.assert_array_equal(mask, np.repeat([[[255] * 6 + [0] * 6]], 12, axis=1))
    assert rows["0.png"][1]["coverage"] == pytest.approx(0.5)
    assert rows["1.png"][1]["coverage"] is None


def test_alpha_as_mask(encode, photos, tmp_path):
    encode("--mask", "alpha")
    rows = rows_of(tmp_path / "m.json")
    assert {name for name, (arrays, _) in rows.items() if "mask" in arrays} == {"5.png"}
    alpha = np.asarray(Image.open(photos / "5.png").getchannel("A"), dtype=float)
    assert rows["5.png"][0]["mask"].mean() == pytest.approx(alpha[:96].mean(), abs=2)


def test_a_mask_of_another_shape_is_refused_and_one_of_another_size_is_stretched(encode, photos, tmp_path):
    draw_mask(photos / "0-masklabel.png", (96, 48))
    draw_mask(photos / "2-masklabel.png", (288, 128))
    report = encode("--mask", "sidecar")
    assert [(one["path"], one["code"]) for one in report["rejected"]] == [("0.png", "mask-size-mismatch")]
    assert rows_of(tmp_path / "m.json")["2.png"][1]["coverage"] == pytest.approx(0.5, abs=0.01)


def test_a_second_run_encodes_nothing_and_leaves_the_same_bytes(encode, tmp_path):
    first = encode("--mask", "sidecar", "--validation", 0.2)
    assert first["encoded"] == {"latent": 8, "mask": 3, "text": 7}  # six captions, and the unconditional row
    before = (tmp_path / "m.json").read_bytes(), (tmp_path / "m.json").stat().st_mtime_ns
    again = encode("--mask", "sidecar", "--validation", 0.2)
    assert again["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert again["reused"] == {"latent": 8, "mask": 3, "text": 7}
    assert ((tmp_path / "m.json").read_bytes(), (tmp_path / "m.json").stat().st_mtime_ns) == before
    assert not list((tmp_path / "cache" / "plans").glob("*"))


def test_masks_switched_on_encode_no_latent(encode):
    encode("--mask", "none")
    assert encode("--mask", "sidecar")["encoded"] == {"latent": 0, "mask": 3, "text": 0}
    assert encode("--mask", "none")["encoded"] == {"latent": 0, "mask": 0, "text": 0}


def test_one_caption_changed_encodes_one_text_row(encode, photos, tmp_path):
    encode()
    (photos / "3.txt").write_text("another caption")
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 1}
    assert rows_of(tmp_path / "m.json")["3.png"][1]["texts"][0]["caption"] == "another caption"


def test_bytes_replaced_under_same_name_size_and_mtime_are_noticed(encode, photos, monkeypatch):
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)  # as if the files had been at rest for long
    path = photos / "4.png"
    other = bytearray(path.read_bytes())
    encode()
    stat = path.stat()
    draw(path, (64, 144), seed=99)
    changed = path.read_bytes()
    padded = changed + b"\0" * (len(other) - len(changed))  # the size stays, too
    path.write_bytes(padded[: len(other)] if len(changed) <= len(other) else changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert encode()["encoded"]["latent"] == 1


def test_renaming_and_copying_encode_nothing(encode, photos, tmp_path):
    encode()
    for suffix in (".png", ".txt"):
        (photos / f"1{suffix}").rename(photos / f"zebra{suffix}")
        shutil.copy(photos / f"2{suffix}", photos / f"copy{suffix}")
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    rows = rows_of(tmp_path / "m.json")
    assert {"zebra.png", "copy.png", "2.png"} <= set(rows) and "1.png" not in rows
    assert rows["copy.png"][1]["id"] != rows["2.png"][1]["id"]


def test_another_resolution_dtype_or_vae_leaves_old_rows_alone(encode, prep, photos, tiny_model, tmp_path):
    encode()
    first = (tmp_path / "m.json").read_bytes()
    assert encode("--resolution", 64, manifest="small.json")["encoded"]["latent"] == 8
    assert encode("--dtype", "float16", manifest="half.json")["encoded"] == {"latent": 8, "mask": 0, "text": 7}
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere"}))
    assert encode("--model", other, manifest="renamed.json")["encoded"]["latent"] == 0  # the same weights
    perturb(other / "vae" / "diffusion_pytorch_model.safetensors")
    assert encode("--model", other, manifest="other.json")["encoded"] == {"latent": 8, "mask": 0, "text": 0}
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert (tmp_path / "m.json").read_bytes() == first


def perturb(path: Path) -> None:
    """Changes one weight."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, path, metadata={"format": "pt"})


def test_manifest_does_not_depend_on_threads_or_order(encode, tmp_path, photos):
    encode("--jobs", 1, "--mask", "sidecar")
    one = read_manifest(tmp_path / "m.json").document
    encode("--jobs", 4, "--mask", "sidecar", cache="cache2", manifest="m2.json")
    two = read_manifest(tmp_path / "m2.json").document
    assert {**one, "cache": "", "self": ""} == {**two, "cache": "", "self": ""}


def test_batch_size_and_threads_are_not_in_the_keys(encode):
    encode("--batch-size", 1)
    assert encode("--batch-size", 3, "--jobs", 3)["encoded"] == {"latent": 0, "mask": 0, "text": 0}


def interrupt(*_, **__):
    raise KeyboardInterrupt


def spoil(path: Path) -> None:
    """Damages a PNG's pixels and mends the checksums, so that only decoding shows it."""
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT")
    size = int.from_bytes(data[start - 4:start], "big")
    data[start + 40:start + 60] = bytes(range(20))
    data[start + 4 + size:start + 8 + size] = zlib.crc32(data[start:start + 4 + size]).to_bytes(4, "big")
    path.write_bytes(data)


def test_a_broken_picture_is_a_finding_and_is_not_tried_again(encode, photos, tmp_path, monkeypatch, decode_here):
    spoil(photos / "6.png")
    report = encode()
    assert [(one["path"], one["code"]) for one in report["rejected"]] == [("6.png", "corrupt-data")]
    assert report["samples"]["train"] == 7
    before = (tmp_path / "m.json").read_bytes()
    monkeypatch.setattr("prep.encode.engines.decoding.decode_picture", lambda *_, **__: pytest.fail("decoded again"))
    again = encode()
    assert again["encoded"]["latent"] == 0 and len(again["rejected"]) == 1
    assert (tmp_path / "m.json").read_bytes() == before


def test_broken_pictures_do_not_stop_the_run_and_rows_that_fail_without_cause_do(encode, photos, monkeypatch):
    for number in range(4):
        spoil(photos / f"{number}.png")
    assert len(encode("--max-rejects", 0)["rejected"]) == 4
    monkeypatch.setattr("prep.models.vae.VaeEncoder.begin", lambda self, pixels: lambda: [None] * len(pixels))
    result = encode("--max-rejects", 2, "--resolution", 64, code=7)
    assert ("3 rows failed (a latent that is not finite, a file that changed meanwhile, a decoder that crashed), more "
            "than --max-rejects 2; the last: " in result.err and "bad pictures do not count" in result.err)


def test_strict_is_for_pictures_that_are_left_out(encode, prep, photos, tiny_model, tmp_path):
    assert encode("--strict")["rejected"] == []
    spoil(photos / "6.png")
    args = ("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *SMALL)
    assert prep(*args).code == 0
    result = prep(*args, "--strict")
    assert result.code == 1 and "6.png" in result.out and result.out.rstrip().splitlines()[-1].startswith(
        str(tmp_path / "m.json")), "the manifest is written all the same"


def test_a_file_that_cannot_be_read_now_is_made_later_by_the_same_plan(encode, photos, tmp_path, monkeypatch,
                                                                       decode_here):
    encode(cache="whole", manifest="whole.json")
    from prep.encode.engines import decoding

    read = decoding.read_blob

    def failing(blob):
        if blob.path.name == "3.png":
            raise OSError(5, "Input/output error")
        return read(blob)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "read_blob", failing)
        patch.setattr("prep.encode.run.assemble_manifest", interrupt)
        encode(code=130)
    again = encode()
    assert again["encoded"] == {"latent": 1, "mask": 0, "text": 0} and not again["rejected"]
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "read_blob", failing)
        (photos / "3.png").write_bytes((photos / "3.png").read_bytes() + b"\0")
        report = encode(code=1)
        assert [(one["path"], one["code"]) for one in report.json["rejected"]] == [("3.png", "unreadable-file")]
    assert encode()["encoded"]["latent"] == 1


def test_a_task_that_another_process_finished_is_not_run_again(encode, tmp_path, monkeypatch):
    encode("--mask", "sidecar")
    whole = (tmp_path / "m.json").read_bytes()
    from prep.cache.ledger.ledger import empty_ledger

    for module in ("plan", "manifest.assemble"):
        monkeypatch.setattr(f"prep.encode.{module}.load_ledger", lambda *_, **__: empty_ledger())  # it ended just now
    monkeypatch.setattr("prep.encode.engines.rows._decoded", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr("prep.models.text.encoder.TextEncoder.encode", lambda *_, **__: pytest.fail("encoded again"))
    result = encode("--mask", "sidecar", code=7)  # the faked ledger has nothing to seal from
    assert "unconditional" in result.err and (tmp_path / "m.json").read_bytes() == whole


def test_nothing_to_encode(prep, encode, photos, tiny_model, tmp_path):
    (tmp_path / "empty").mkdir()
    result = prep("encode", tmp_path / "empty", "--model", tiny_model, "--cache", tmp_path / "c",
                  "-o", tmp_path / "e.json")
    assert result.code == 8 and f"no pictures to encode in {tmp_path}/empty\n" in result.err
    assert not (tmp_path / "c").exists()


def test_what_is_wrong_with_the_output_shows_before_anything_is_made(encode, tmp_path):
    (tmp_path / "adir").mkdir()
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    for output, message in (("no/m.json", "there is no directory"), ("adir", "is a directory, expected a file name"),
                            ("mine.json", "exists and is no manifest, so it is not replaced"), ("x" * 300, "too long")):
        result = encode(manifest=output, code=5)
        assert message in result.err and not (tmp_path / "cache").exists()
    assert (tmp_path / "mine.json").read_text() == '{"mine": 1}'


def test_recheck_repairs_damage_that_no_record_tells_of(prep, encode, tmp_path):
    """As when a bit flips on the disk, or `prep verify` could not write what it found."""
    encode()
    path = sorted((tmp_path / "cache").glob("shards/*/*/latent/c.*"))[0]
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    assert encode()["encoded"]["latent"] == 0
    assert encode("--recheck", "--dry-run")["encoded"]["latent"] == 1
    for record in (tmp_path / "cache" / "damaged").glob("*.json"):
        record.unlink()
    assert encode("--recheck")["encoded"] == {"latent": 1, "mask": 0, "text": 0}
    assert prep("verify", tmp_path / "m.json").code == 0
    assert not any(encode("--recheck")["encoded"].values())


def test_a_manifest_is_read_through_the_link_that_it_was_written_through(prep, train, encode, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "m.json").touch()
    (tmp_path / "latest.json").symlink_to(Path("store", "m.json"))
    encode(manifest="latest.json", cache="store/cache")
    assert (tmp_path / "latest.json").is_symlink() and (tmp_path / "store" / "m.json").stat().st_size
    for name in ("latest.json", "store/m.json"):
        assert prep("verify", tmp_path / name).code == 0
        assert train("check", tmp_path / name).code == 0
    assert prep("gc", tmp_path / "store" / "cache", "--keep", tmp_path / "latest.json").code == 0
    again = encode(manifest="latest.json", cache="store/cache")
    assert not any(again["encoded"].values()) and (tmp_path / "latest.json").is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes as POSIX has them")
def test_a_pipe_is_no_manifest(encode, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    result = encode(manifest="pipe", code=5)
    assert "is a pipe, expected a file name" in result.err and (tmp_path / "pipe").is_fifo()


def test_recipe_prompts_and_model_are_not_overwritten(prep, photos, tiny_model, tmp_path):
    model, recipe, prompts = tmp_path / "model", tmp_path / "recipe.toml", tmp_path / "p.txt"
    shutil.copytree(tiny_model, model)
    recipe.write_text('[[source]]\npath = "photos"\n[image]\nresolution = 96\nstep = 16\n')
    prompts.write_text("a dog\n")
    for output in (recipe, prompts, model / "model_index.json", model / "m.json"):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        result = prep("encode", recipe, "--model", model, "--prompts", prompts, "--cache", tmp_path / "cache",
                      "-o", output)
        assert result.code == 5, result.err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_output_through_a_link_goes_where_the_link_leads(prep, encode, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "else" / "real.json")
    encode(manifest="link.json")
    assert (tmp_path / "link.json").is_symlink() and prep("verify", tmp_path / "else" / "real.json").code == 0


def test_names_that_other_systems_read_otherwise(prep, tiny_model, tmp_path):
    draw(tmp_path / "a:b" / "1.png", (96, 96), seed=1).with_suffix(".txt").write_text("a")
    go = ("encode", tmp_path / "a:b", "--model", tiny_model, "--cache", tmp_path / "c:c",
          "-o", tmp_path / "m.json", *SMALL)
    assert prep(*go).code == 0
    assert read_manifest(tmp_path / "m.json").document["cache"] == "./c:c"
    assert prep("verify", tmp_path / "m.json").code == 0
    result = prep(*go[:5], tmp_path / "back\\slash", *go[6:])
    assert result.code == 5 and "no portable relative path leads from manifest" in result.err


def test_a_prompt_file_that_is_no_prompt_file(encode, tmp_path):
    (tmp_path / "p.txt").write_text("a prompt of some length\n" * 20000)
    result = encode("--prompts", tmp_path / "p.txt", code=3)
    assert f"prompt file {tmp_path / 'p.txt'} (--prompts) has 480000 bytes, expected at most 262144" in result.err


def test_a_read_only_cache_with_nothing_to_do_is_fine(encode, tmp_path, monkeypatch):
    encode()
    opened = Path.open

    def refusing(self, mode="r", *args, **kwargs):
        if self.name == "lock":
            raise OSError(30, "Read-only file system", str(self))
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 0}


def test_a_full_disk_is_one_error_and_the_next_run_goes_on(encode, tmp_path, monkeypatch):
    from prep.fs import atomic

    write, budget = atomic.write, [60_000]

    def small(handle, data):
        budget[0] -= len(data)
        if budget[0] < 0:
            raise OSError(28, "No space left on device", "cache")
        write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write", small)
        result = encode(code=7)
    assert result.err == ("error: cache: No space left on device\n"
                          "hint: free some space and run the same command again; finished work is kept\n")
    assert not list((tmp_path / "cache" / "tmp").glob("*")) and not (tmp_path / "m.json").exists()
    encode()
    encode(cache="whole", manifest="w.json")
    one, two = (read_manifest(tmp_path / name).document for name in ("m.json", "w.json"))
    assert {**one, "cache": "", "self": ""} == {**two, "cache": "", "self": ""}


def test_dry_run_writes_nothing(encode, tmp_path):
    report = encode("--dry-run")
    assert report["encoded"] == {"latent": 8, "mask": 3, "text": 7} and report["bytes"] > 0
    assert not (tmp_path / "cache").exists() and not (tmp_path / "m.json").exists()


def test_missing_captions_stop_with_names(encode, photos):
    (photos / "2.txt").unlink()
    result = encode(code=3)
    assert "pictures without a caption (1): 2.png" in result.err and "--missing-caption" in result.err
    assert encode("--missing-caption", "filename")["samples"]["train"] == 8


def test_prompts_become_rows(encode, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two of them\na red dog\n\na blue cat --n ugly\n")
    assert encode("--prompts", prompts)["encoded"]["text"] == 7 + 3
    document = read_manifest(tmp_path / "m.json").document["prompts"]
    assert document["file"] == "prompts.txt"
    pairs = [(one["prompt"], one["negative"]) for one in document["samples"]]
    assert pairs == [("a red dog", None), ("a blue cat", "ugly")]
    assert document["samples"][0]["negative_row"] == document["unconditional"]
    prompts.write_text("a red dog\na green bird\n")
    assert encode("--prompts", prompts)["encoded"] == {"latent": 0, "mask": 0, "text": 1}


def test_an_interrupted_run_goes_on_to_the_same_bytes(encode, tmp_path, monkeypatch):
    encode("--mask", "sidecar", cache="whole", manifest="whole.json")
    from prep.encode.engines import local

    finish, calls = local.commit_task, []

    def interrupted(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        finish(*args)

    with monkeypatch.context() as patch:
        patch.setattr(local, "commit_task", interrupted)
        result = encode("--mask", "sidecar", code=130)
    assert "Run the same command again" in result.err and not (tmp_path / "m.json").exists()
    rest = encode("--mask", "sidecar")
    assert sum(rest["reused"].values()) > 0 and sum(rest["encoded"].values()) > 0
    one, two = (read_manifest(tmp_path / name).document for name in ("whole.json", "m.json"))
    assert {**one, "cache": "", "self": ""} == {**two, "cache": "", "self": ""}


@pytest.mark.parametrize("array", ["latent", "std"])
def test_a_value_that_is_not_finite_is_computed_again_in_float32(tiny_model, monkeypatch, array):
    from prep.models.vae import VaeEncoder

    encoder = VaeEncoder(tiny_model, device="cpu", compute="bfloat16", dtype="float32", with_std=True)
    forward, seen = encoder._forward, []

    def sometimes(pixels, dtype):
        arrays = forward(pixels, dtype)
        seen.append((len(arrays["latent"]), dtype))
        if dtype != torch.float32:
            arrays[array][1] = float("nan")
        return arrays

    monkeypatch.setattr(encoder, "_forward", sometimes)
    rows = encoder.encode(np.zeros((3, 64, 64, 3), np.uint8))
    assert seen == [(3, torch.bfloat16), (1, torch.float32)]
    assert all(row is not None and np.isfinite(each).all() for row in rows for each in row.values())
    assert {name for row in rows for name in row} == {"latent", "std"}
    monkeypatch.setattr(encoder, "_forward", lambda pixels, _: {
        "latent": torch.zeros(len(pixels), 4, 8, 8), array: torch.full((len(pixels), 4, 8, 8), float("inf"))})
    assert encoder.encode(np.zeros((2, 64, 64, 3), np.uint8)) == [None, None]


def test_a_color_is_the_same_however_it_is_spelled(encode):
    assert encode("--alpha", "gray")["encoded"]["latent"] == 8
    assert encode("--alpha", "grey")["encoded"]["latent"] == 0
    assert encode("--alpha", "#808080")["encoded"]["latent"] == 0
    assert encode("--alpha", "#808081")["encoded"]["latent"] == 1  # the one picture with transparency


def test_a_huge_file_and_a_picture_that_memory_does_not_hold_are_findings(encode, photos, monkeypatch, decode_here):
    from prep.images.decode import decode_picture, read_header

    with (photos / "0.png").open("wb") as stream:
        stream.truncate(1 << 41)

    def exhausted(name, call):
        def called(data, **options):
            if data == (photos / name).read_bytes():
                raise MemoryError
            return call(data, **options)

        return called

    with monkeypatch.context() as patch:
        patch.setattr("prep.encode.engines.decoding.decode_picture", exhausted("1.png", decode_picture))
        patch.setattr("prep.dataset.facts.read_header", exhausted("2.png", read_header))
        found = {one["path"]: one for one in encode()["rejected"]}
    assert set(found) == {"0.png", "1.png", "2.png"}
    assert "it has 2199023255552 bytes, expected at most 1073741824" in found["0.png"]["detail"]
    assert found["1.png"]["code"] == "too-large" and "takes more memory than there is" in found["1.png"]["detail"]
    assert found["2.png"]["code"] == "too-large" and "take more memory than there is" in found["2.png"]["detail"]
    assert encode()["encoded"]["latent"] == 2  # there is enough memory now


def test_a_file_that_became_huge_meanwhile(photos):
    from prep.encode.engines.decoding import pixels_of
    from prep.encode.engines.protocol import PictureMessage
    from prep.fs.blob import Blob
    from prep.geometry import Placement

    with (photos / "0.png").open("wb") as stream:
        stream.truncate(1 << 41)
    made = pixels_of(PictureMessage.of("picture", Blob(file=str(photos / "0.png")), "cd" * 32, color="white", factor=8,
                                       placement=Placement(scaled=(8, 8), crop=(0, 0), bucket=(8, 8))))
    assert made.code == "too-large" and "cannot be read: it has 2199023255552 bytes" in made.detail and not made.bad


def test_the_command_is_kept_as_far_as_it_says_something(encode, tmp_path, tiny_model, photos):
    encode("--mask", "sidecar", "--alpha", "white")  # white is the default anyway
    found = read_manifest(tmp_path / "m.json")
    wanted = ["--model", tiny_model, "--dtype", "float32", "--resolution", "96", "--step", "16", "--mask", "sidecar"]
    assert [word.resolve() if isinstance(word, Path) else word for word in found.options] == wanted
    before = (tmp_path / "m.json").read_bytes()
    encode("--mask", "sidecar")
    assert (tmp_path / "m.json").read_bytes() == before


def test_masks_that_match_no_picture_are_no_masks(prep, train, encode, photos, tiny_model, tmp_path):
    """A wrong suffix or directory must not end as training that was never masked."""
    for path in photos.glob("*-masklabel.png"):
        path.rename(photos / path.name.replace("-masklabel", "_mask"))
    (tmp_path / "masks").mkdir()
    for source in ("sidecar", tmp_path / "masks"):
        result = encode("--mask", source, "--missing-caption", "reject", code=3)
        assert f"masks are requested ({source}), but none of 8 pictures has one" in result.err
        assert "NAME-masklabel.png" in result.err and not (tmp_path / "cache").exists()


def test_masks_beside_the_pictures_are_used_unless_the_command_says_none(encode, photos, tmp_path):
    assert encode()["masks"] == {"found": 3, "used": 3}
    plain = (tmp_path / "m.json").read_bytes()
    assert encode("--mask", "auto")["masks"] == {"found": 3, "used": 3}
    assert (tmp_path / "m.json").read_bytes() == plain, "the default needs no option to be shown again"
    assert encode("--mask", "none")["masks"] is None
    assert "mask" not in read_manifest(tmp_path / "m.json").document["fields"]


def test_without_masks_the_default_is_none(encode, photos, tmp_path):
    for path in photos.glob("*-masklabel.png"):
        path.unlink()
    assert encode()["masks"] == {"found": 0, "used": 0}
    document = read_manifest(tmp_path / "m.json").document
    assert "mask" not in document["fields"] and not any("mask" in str(word) for word in document["options"])


def test_masks_that_were_found_and_used_are_counted(prep, photos, tiny_model, tmp_path):
    def encode(*args):
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
                    *SMALL, *args)

    assert re.search("8 train, 0 validation, 0 prior samples in [0-9.]+ s; 3 masks found, 3 used$", encode().out, re.M)
    draw_mask(photos / "0-masklabel.png", (96, 48))  # of another shape: its picture is left out
    draw_mask(photos / "lost-masklabel.png", (96, 48))  # of no picture
    assert re.search(" 7 train, 0 validation, .*; 4 masks found, 2 used$", encode().out, re.M)
    twice = encode("--resolution", "64,96", "--cache", tmp_path / "c2")
    assert re.search("; 4 masks found, 2 used$", twice.out, re.M), "each is counted once, at whatever resolutions"
    none = encode("--mask", "none")
    assert re.search(" samples in [0-9.]+ s$", none.out, re.M)
    assert "note: 4 masks beside the pictures are not used; --mask sidecar uses them" in none.err
    assert re.search("; 1 mask found, 1 used$", encode("--mask", "alpha").out, re.M)
    for path in photos.glob("*-masklabel.png"):
        path.unlink()
    assert re.search(" samples in [0-9.]+ s; no masks found$", encode().out, re.M)


def test_masks_that_are_black_everywhere_are_named(prep, photos, tiny_model, tmp_path):
    def encode():
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
                    *SMALL, "--mask", "sidecar")

    assert "black" not in encode().err
    for number, size in ((0, (96, 96)), (2, (144, 64))):
        Image.new("L", size).save(photos / f"{number}-masklabel.png")
    for _ in range(2):  # made, and there already
        done = encode()
        assert done.code == 0 and re.search(r"^2 masks entirely black; with masked loss these samples would not "
                                            r"train: [02].png, [02].png$", done.err, re.MULTILINE), done.err


def test_no_picture_that_can_be_trained_on_is_an_error_and_writes_no_manifest(encode, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.models.vae.VaeEncoder.begin", lambda self, pixels: lambda: [None] * len(pixels))
    for _ in range(2):  # also when the cache knows it
        failed = encode(code=8)
        assert re.search(r"none of \d pictures to train on could be encoded; the first, \d.png, not-f", failed.err)
        assert not (tmp_path / "m.json").exists()


def test_pictures_that_all_change_meanwhile_are_no_fault_of_the_model(encode, photos, tmp_path, monkeypatch):
    from prep.encode import planned as planning

    plan = planning._plan

    def late(*args, **settings):
        planned = plan(*args, **settings)
        for number, path in enumerate(sorted(photos.glob("?.png"))):
            with Image.open(path) as picture:
                size = picture.size
            draw(path, size, seed=70 + number)
        return planned

    monkeypatch.setattr(planning, "_plan", late)
    failed = encode(code=8)
    monkeypatch.setattr(planning, "_plan", plan)
    assert "changed-meanwhile" in failed.err and "hint: run the same command again" in failed.err
    again = encode()
    assert (again["samples"]["train"], again["rejected"]) == (8, [])


def test_a_cache_that_does_not_give_back_what_was_encoded_is_an_error(encode, tmp_path, monkeypatch):
    from prep.cache.ledger import inventory
    from prep.cache.ledger.ledger import load_ledger

    def unread(cache, digest):
        if (cache.shard(digest) / "latent").exists():
            raise CacheError("Input/output error")
        return real(cache, digest)

    def load(cache, **options):
        with monkeypatch.context() as patch:
            patch.setattr(inventory, "read_keys", unread)
            return load_ledger(cache, **options)

    real = inventory.read_keys
    with monkeypatch.context() as patch:
        patch.setattr("prep.encode.manifest.assemble.load_ledger", load)
        failed = encode(code=7)
    assert "0.png were encoded, but cannot be read from the cache" in failed.err
    assert not (tmp_path / "m.json").exists()
    assert not encode()["rejected"]
