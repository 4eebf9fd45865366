"""The whole road on real photographs: scan, bucket, encode with masks, train, resume, verify; and twice over."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.real_data


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """One cache for all tests of this file."""
    return tmp_path_factory.mktemp("flow")


@pytest.fixture
def encode(prep, real_data, tiny_model, home):
    def go(resolution, *options):
        result = prep("encode", real_data / "photos", "--model", tiny_model, "--cache", home / "cache",
                      "-o", home / f"{resolution}.json", "--resolution", resolution, "--mask", real_data / "masks",
                      "--validation", "0.1", "--json", *options)
        assert result.code == 0, result.err
        return result.json

    return go


@pytest.mark.parametrize("resolution", [128, *(pytest.param(side, marks=pytest.mark.slow) for side in (256, 512))])
def test_encode_train_resume_verify(prep, train, encode, home, resolution):
    first = encode(resolution)
    assert first["encoded"]["latent"] == 63 and first["encoded"]["mask"] == 24 and not first["rejected"]
    assert encode(resolution)["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    manifest, run = home / f"{resolution}.json", home / f"run{resolution}"
    settings = ("--method", "full", "--batch-size", 4, "--lr", "2e-3", "--masked", "--set", "validation.every=10",
                "--set", "checkpoint.every=15", "--set", "sample.every=0")
    assert train("check", manifest, *settings, "--steps", 30).code == 0
    result = train("run", manifest, "-o", run, *settings, "--steps", 20, "--device", "cpu", "--quiet")
    assert result.code == 0, result.err
    result = train("run", manifest, "-o", run, *settings, "--steps", 30, "--resume", "--device", "cpu", "--quiet")
    assert result.code == 0, result.err
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if entry["event"] == "step"]
    validation = [entry["loss"] for entry in log if entry["event"] == "validation"]
    assert len(losses) == 30 and np.isfinite(losses).all() and np.isfinite(validation).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) and validation[-1] < validation[0]
    assert prep("verify", manifest).code == 0


def test_scan_and_bucket(prep, real_data):
    scan = prep("scan", real_data / "photos", "--mask", real_data / "masks", "--json")
    assert scan.code == 0 and scan.json["samples"] == 63
    loud = [one for one in scan.json["findings"] if one["severity"] != "info"]
    assert [one["code"] for one in loud] == ["near-duplicate"]
    assert loud[0]["path"] in ("cat/cat_02.jpg", "cat/cat_03.jpg")
    bucket = prep("bucket", real_data / "photos", "--resolution", 512, "--batch-size", 4, "--json").json
    assert sum(one["pictures"] for one in bucket["buckets"]) == 63 and not bucket["left_out"]
