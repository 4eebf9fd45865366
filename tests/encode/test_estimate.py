"""`prep encode --dry-run`: rows, bytes, memory and time of a run, and nothing written."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prep.cache.store import Cache
from prep.manifest.document import read_manifest
from prep.models.device import memory
from prep.workers.pool import WorkerPool

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--mask", "sidecar")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*options)` encodes the photos into cache and m.json; its report."""

    def go(*options, model=tiny_model, code=0):
        result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      *SMALL, *options)
        assert result.code == code, result.err
        return result

    return go


def rows_in(cache) -> int:
    """Bytes of the values of all rows of a cache: its arrays without keys, checksums and indexes."""
    import json

    found = 0
    for shard in Cache(root=cache).shards():
        for document in Cache(root=cache).shard(shard).glob("*/zarr.json"):
            array = json.loads(document.read_text())
            size = {"uint8": 1, "bfloat16": 2, "float32": 4}[array["data_type"]]
            found += size * int(np.prod(array["shape"])) * (document.parent.name != "key")
    return found


def files(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("options", [(), ("--dtype", "float32"), ("--posterior", "mean+std")], ids=" ".join)
def test_bytes_are_those_of_the_rows_that_the_run_makes(encode, tmp_path, options):
    told = encode(*options, "--dry-run", "--json").json
    made = encode(*options, "--json").json
    fields = told["estimate"]["fields"]
    assert {name: one["encode"] for name, one in fields.items()} == told["encoded"] == made["encoded"]
    assert sum(one["bytes"] for one in fields.values()) == told["bytes"] == rows_in(tmp_path / "cache")
    assert all(one["stored"] == one["bytes"] and one["reuse"] == 0 for one in fields.values())
    factor = 1 if "float32" in options else 2
    assert fields["latent"]["padded_float32"] == factor * fields["latent"]["bytes"]
    assert fields["mask"]["padded_float32"] == 4 * fields["mask"]["bytes"]
    assert made["estimate"] is None


def test_reused_rows_count_among_all_rows_and_not_among_those_to_make(encode, photos, tmp_path):
    encode()
    before = rows_in(tmp_path / "cache")
    (photos / "0.txt").write_text("another caption")
    told = encode("--dry-run", "--json").json["estimate"]["fields"]
    assert told["text"]["encode"] == 1 and told["text"]["reuse"] > 1 and told["latent"]["encode"] == 0
    row = told["text"]["bytes"]
    assert told["text"]["stored"] == row * (1 + told["text"]["reuse"])
    assert sum(told[name]["stored"] for name in ("latent", "mask")) + row * told["text"]["reuse"] == before


def test_trimmed_text_is_compared_with_rows_of_full_length(prep, photos, tmp_path):
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    tiny_pipelines.save("zimage", tmp_path / "model")
    words = ("encode", photos, "--model", tmp_path / "model", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
             *SMALL, "--json")
    told = prep(*words, "--dry-run").json
    assert prep(*words).code == 0
    width = 32
    text = told["estimate"]["fields"]["text"]
    assert text["padded_float32"] == 4 * 512 * width * text["encode"] > 10 * text["bytes"]
    again = prep(*words, "--dry-run").json["estimate"]["fields"]["text"]
    assert again == {**text, "encode": 0, "bytes": 0, "reuse": text["encode"]}
    assert sum(one["bytes"] for one in told["estimate"]["fields"].values()) == rows_in(tmp_path / "cache")


def test_weights_are_those_of_the_largest_encoder_in_its_compute_dtype(encode, tiny_model):
    from safetensors import safe_open

    def numbers(path):
        with safe_open(path, "np") as file:
            return sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118  # not a dict

    largest = max(numbers(tiny_model / "vae/diffusion_pytorch_model.safetensors"),
                  numbers(tiny_model / "text_encoder/model.safetensors"))
    assert encode("--dry-run", "--json").json["estimate"]["weights"] == 2 * largest
    assert encode("--dry-run", "--compute", "float32", "--json").json["estimate"]["weights"] == 4 * largest
    encode()
    assert encode("--dry-run", "--json").json["estimate"]["weights"] == 0


def test_measuring_encodes_a_few_rows_and_writes_nothing(encode, tmp_path, photos, monkeypatch):
    from prep.encode.engines import measure as measuring

    before = files(photos)
    monkeypatch.setattr(measuring, "TEXTS", 3)
    report = encode("--dry-run", "--measure", "--batch-size", 2, "--json").json
    found = report["estimate"]["measured"]
    assert found["rows"] == {"mask": 3, "text": 3, "latent": 2}
    assert found["seconds"] >= 0 and 1 << 26 < found["memory"] < 1 << 40
    assert not (tmp_path / "cache").exists() and not (tmp_path / "m.json").exists() and files(photos) == before
    encode()
    kept = files(tmp_path / "cache")
    again = encode("--dry-run", "--measure", "--json").json["estimate"]
    assert again["measured"] is None, "nothing is missing"
    assert files(tmp_path / "cache") == kept and read_manifest(tmp_path / "m.json")


def test_time_grows_with_rows_and_pixels_but_not_the_time_to_load(encode, photos, monkeypatch):
    from prep.encode.engines import measure as measuring
    from prep.encode.engines import tools
    from prep.models.text import encoder as text_encoder

    clock = iter(range(10_000))
    monkeypatch.setattr(tools, "WorkerPool", partial(WorkerPool, processes=False))
    monkeypatch.setattr(measuring, "_timed", lambda work: (2.0, work()))
    for module in (measuring, text_encoder):  # their clock alone: threads of other tests read the usual one
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = {}
    for field in ("_masks", "_texts", "_latents"):
        run = getattr(measuring, field)
        monkeypatch.setattr(measuring, field, lambda job, tasks, pool, run=run, field=field: seen.setdefault(
            field, (run(job, tasks, pool), job, tasks))[0])
    encode("--dry-run", "--measure", "--batch-size", 2, "--jobs", 4)
    (loading, masks, count), _, _ = seen["_masks"]
    assert loading == 0 and masks == 2 / count * 3 / 4
    (loading, latents, count), job, tasks = seen["_latents"]
    areas = [np.prod(job.bucket_of(task)) * len(task.rows) for task in tasks]
    largest = max(np.prod(job.bucket_of(task)) for task in tasks)
    assert count == 2 and loading == 1 and latents == pytest.approx(2 / 2 * sum(areas) / largest)


def test_a_report_for_people(encode):
    said = encode("--dry-run", "--measure").out
    assert "latent: 8 to encode (" in said and "text: 7 to encode (" in said and ", 0 reused" in said
    assert "; as float32, with padded text: " in said and " times as much\n" in said
    assert "weights of the largest encoder: " in said
    assert "time: about 0:00:" in said and "; peak memory: about " in said and "(measured with 3 mask, 7 text, " in said
    plain = encode("--dry-run").out
    assert "time: about" not in plain and "latent: 8 to encode" in plain
    encode()
    assert "weights of" not in encode("--dry-run").out


def test_memory_at_the_peak_is_told(encode, tiny_model, monkeypatch):
    from prep.models.device import peaks

    told = encode("--dry-run", "--json").json["estimate"]["memory"]
    vae = max((peaks.vae_peak(tiny_model, "bfloat16", size) for size in ((96, 96), (112, 80), (80, 112))),
              key=lambda peak: peak.each)
    assert told["text"] > 0 and told["batch_size"] == 4 and 0.5 * vae.of(4) < told["latent"] <= vae.of(4)
    assert told["largest_batch"] > 4 and told["free"] > told["latent"]
    monkeypatch.setattr(peaks, "available", lambda: told["latent"] - 1)
    monkeypatch.setattr(peaks, "PLENTY", 1 << 30)
    less = encode("--dry-run", "--json").json["estimate"]["memory"]
    assert less["batch_size"] == less["largest_batch"] == 3 and less["latent"] < told["latent"]
    assert encode("--dry-run", "--batch-size", 4, "--json").json["estimate"]["memory"]["batch_size"] == 4
    words = encode("--dry-run").out
    assert "estimated memory at the peak: text encoder " in words
    assert " for 3 of the largest pictures at a time; " in words
    assert "are free, enough for 3 pictures at a time" in words
    monkeypatch.setattr(peaks, "available", lambda: 1000)
    for options in (("--dry-run",), ("--mask", "none")):
        said = encode(*options, code=9).err
        assert "of memory" in said and "1000 bytes are available" in said
    monkeypatch.undo()
    encode()
    assert encode("--dry-run", "--json").json["estimate"]["memory"] is None


def test_measuring_without_a_dry_run_is_refused(encode):
    said = encode("--measure", code=2).err
    assert "--measure is given without --dry-run, expected both" in said and "add --dry-run" in said


def test_peak_memory_is_that_of_the_device_if_it_has_memory_of_its_own(monkeypatch):
    assert memory.peak_memory("cpu") > 1 << 26
    monkeypatch.setattr(sys, "platform", "win32")
    assert memory.peak_memory("cpu") is None
    monkeypatch.setattr(memory, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 12345)
    assert memory.peak_memory("cuda:0") == 12345


def test_unknown_memory_is_left_out_of_the_report():
    from prep.encode.forecast.estimate import Estimate, Measured

    found = Estimate(fields={}, weights=5, measured=Measured(seconds=61, loading=1, memory=None, rows={"text": 2}))
    assert found.as_lines() == ["weights of the largest encoder: 5 bytes", "time: about 0:01:01 (measured with 2 text)"]
    assert replace(found, measured=None).as_json() == {"fields": {}, "weights": 5, "memory": None,
                                                        "measured": None}
