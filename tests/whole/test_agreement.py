"""scan, bucket, encode and mask agree on the same files: one severity, one count, one name."""

from __future__ import annotations

import shutil

import pytest
from pictures import draw, draw_mask

from prep.manifest.document import read_manifest

OPTIONS = ("--resolution", 128)


@pytest.fixture
def ask(prep, tiny_model, tmp_path):
    """`ask(source)`: the documents of scan, bucket, encode and mask."""
    def go(source):
        made = {
            "scan": prep("scan", source, "--json"),
            "bucket": prep("bucket", source, *OPTIONS, "--json"),
            "encode": prep("encode", source, *OPTIONS, "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                           tmp_path / "m.json", "--missing-caption", "empty", "--device", "cpu", "--json"),
            "mask": prep("mask", source, "--with", "threshold", "-o", tmp_path / "made", "--json")}
        assert all(one.code < 2 for one in made.values()), {name: one.err for name, one in made.items()}
        return {name: one.json for name, one in made.items()}

    return go


def agree(found):
    """Checks the four documents against each other; gives the names of pictures that are left out."""
    scanned = {(one["path"], one["code"]): one["severity"] for one in found["scan"]["findings"]}
    rejected = found["encode"]["rejected"]
    for one in (*found["bucket"]["rejected"], *found["bucket"]["findings"], *rejected, *found["mask"]["findings"]):
        of_mask = "its mask " in one["detail"]  # a scan has such findings at the mask's own name
        same = [severity for (path, code), severity in scanned.items() if code == one["code"]
                and (path == one["path"] or (of_mask and path.rpartition("/")[2] in one["detail"]))]
        assert same == [one["severity"]] or (of_mask and set(same) == {one["severity"]}), one
    names = {one["path"] for one in rejected}
    assert len(names) == len(rejected), "each once"
    assert {one["path"] for one in found["bucket"]["rejected"]} <= names
    samples = sum(found["encode"]["samples"].values())
    assert found["scan"]["samples"] == samples and found["scan"]["pictures"] == samples + len(names)
    return names


def test_a_folder_of_all_kinds(ask, photos, tmp_path):
    shutil.copy(photos / "0.png", photos / "a b'c.png")
    draw(photos / "tiny.png", (20, 300), seed=1)  # as 7.png is: no bucket is as small
    (photos / "cut.png").write_bytes((photos / "1.png").read_bytes()[:200])
    (photos / "none.jpg").write_text("no picture")
    draw_mask(photos / "3-masklabel.png", (50, 200))
    (photos / "4-masklabel.png").write_text("no mask")
    assert agree(ask(photos)) == {"tiny.png", "cut.png", "none.jpg", "3.png", "4.png", "7.png"}
    assert read_manifest(tmp_path / "m.json").document["rejected"] == 6


def test_names_are_those_of_a_shell(prep, photos, tiny_model, tmp_path):
    for name in ("a b.png", "it's.png", "$HOME.png", "line\nfeed.png", "café.png"):
        (photos / name).write_bytes(b"no picture")
    shown = ["'a b.png'", "'it'\"'\"'s.png'", "'$HOME.png'", "$'line\\nfeed.png'", "café.png"]
    encoded = prep("encode", photos, *OPTIONS, "--model", tiny_model, "--cache", tmp_path / "c", "-o",
                   tmp_path / "m.json", "--missing-caption", "empty", "--device", "cpu")
    for out in (encoded.out, prep("bucket", photos, *OPTIONS).out):
        assert all(f"rejected: {name}: not-an-image" in out for name in shown), out


@pytest.mark.slow
@pytest.mark.real_data
def test_the_bad_files(ask, real_data, tmp_path):
    for name in ("images", "masks", "pairs"):
        shutil.copytree(real_data / "bad" / name, tmp_path / "bad" / name)
    agree(ask(tmp_path / "bad"))
