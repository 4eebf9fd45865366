"""Readers written from the format page, in processes where `prep` cannot be imported, see what our reader sees."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prep.cache.reader import Reader
from prep.manifest.document import read_manifest
from prep.manifest.opened import OpenedManifest, open_manifest

HERE = Path(__file__).parent
READERS = ("standalone.py", "by_bytes.py")

# Runs in a process of its own: nothing of ours is found, and what a reader yields is digested.
STANDALONE = """
import hashlib, json, sys
from pathlib import Path
sys.modules["prep"] = sys.modules["train"] = None
sys.path.insert(0, sys.argv[1])
from standalone import Dataset

def told(arrays):
    return None if arrays is None else {name: [str(value.dtype), list(value.shape),
                                               hashlib.sha256(value.tobytes()).hexdigest()]
                                        for name, value in arrays.items()}

def plain(fields, *skipped):
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()
            if name not in skipped}

data = Dataset(Path(sys.argv[2]))
samples = [{**plain(sample, "views", "texts"),
            "views": [{**plain(view, "latent", "mask"), "latent": told(view["latent"]), "mask": told(view["mask"])}
                      for view in sample["views"]],
            "texts": [{**plain(text, "hidden"), "hidden": told({"hidden": text["hidden"]})}
                      for text in sample["texts"]]} for sample in data]
prompts = [[prompt, told(positive), told(negative)] for prompt, positive, negative in data.prompts()]
assert "prep" not in [name for name, module in sys.modules.items() if module is not None]
print(json.dumps({"samples": samples, "prompts": prompts, "findings": data.findings}))
"""

BY_BYTES = """
import hashlib, json, sys
from pathlib import Path
sys.modules["prep"] = sys.modules["train"] = sys.modules["zarr"] = sys.modules["tensorstore"] = None
sys.path.insert(0, sys.argv[1])
import by_bytes

found = {}
for root in sorted(Path(sys.argv[2]).glob("shards/*/*")):
    assert by_bytes.digest(root) == root.name
    keys = by_bytes.keys(root)
    for folder in sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != "key"):
        for key, value in zip(keys, by_bytes.rows(root, folder), strict=True):
            found[f"{root.name} {folder} {key}"] = [list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model) -> Path:
    """A real manifest: several buckets, masks for some, captions in two scripts, prompts with a negative, a finding."""
    from pictures import draw, draw_mask

    from prep.cli.console import run as run_command
    from prep.cli.main import app

    root = tmp_path_factory.mktemp("standalone")
    photos = root / "photos"
    for number, size in enumerate([(96, 96), (144, 64), (64, 144), (97, 96), (150, 60)]):
        picture = draw(photos / f"{number}.png", size, seed=number, alpha=number == 3)
        picture.with_suffix(".txt").write_text(f"picture number {number % 3}")
        if number in (0, 2):
            draw_mask(photos / f"{number}-masklabel.png", size)
    (photos / "0.txt").write_text("ein roter Hünd 犬 🐕", encoding="utf-8")
    (photos / "9.png").write_bytes(b"no picture")
    (photos / "9.txt").write_text("nothing")
    (root / "prompts.txt").write_text("a dog --n ugly\npicture number 1\n")
    words = ["encode", photos, "--model", tiny_model, "--cache", root / "cache", "-o", root / "m.json", "--quiet",
             "--resolution", 96, "--step", 16, "--mask", "sidecar", "--prompts", root / "prompts.txt"]
    with pytest.raises(SystemExit) as ending:
        run_command(app, "prep", [str(word) for word in words])
    assert not ending.value.code
    return root / "m.json"


def run(program: str, *arguments: object) -> dict:
    done = subprocess.run([sys.executable, "-c", program, HERE, *map(str, arguments)], capture_output=True, text=True,
                          cwd=HERE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ours(audit: OpenedManifest, field: str, shard: int, row: int) -> dict | None:
    """A row as our reader has it, told as the other process tells it."""
    if shard < 0:
        return None
    reader, digest = Reader(audit.cache), audit.shards[shard]["digest"]
    found = {}
    for name in audit.manifest.fields[field].arrays:
        spec, _ = reader.array_info(digest, name)
        value = np.empty(spec.row_bytes, np.uint8)
        reader.read_into(value, digest, name, row)
        found[name] = [spec.dtype, list(spec.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return found


def test_a_reader_of_sixty_lines_sees_every_value(whole):
    audit = open_manifest(read_manifest(whole))
    told = run(STANDALONE, whole)
    table = audit.samples.table.to_pylist()
    assert len(told["samples"]) == len(table) == 5 and len(audit.manifest.buckets) >= 3
    assert any(view["mask"] for sample in told["samples"] for view in sample["views"])
    for theirs, sample in zip(told["samples"], table, strict=True):
        for name in ("name", "source", "role", "width", "height", "bucket", "repeats", "weight", "coverage"):
            assert theirs[name] == sample[name], name
        assert (theirs["id"], theirs["picture"]) == (sample["id"].hex(), sample["picture"].hex())
        for their_view, view in zip(theirs["views"], sample["views"], strict=True):
            assert their_view["latent"] == ours(audit, "latent", view["latent_shard"], view["latent_row"])
            assert their_view["mask"] == ours(audit, "mask", view["mask_shard"], view["mask_row"])
            assert {name: their_view[name] for name in view} == view
        for their_text, text in zip(theirs["texts"], sample["texts"], strict=True):
            assert their_text["hidden"] == ours(audit, "text", text["shard"], text["row"])
            assert (their_text["caption"], their_text["weight"]) == (text["caption"], text["weight"])
    assert {dtype for sample in told["samples"] for view in sample["views"] for dtype, *_ in view["latent"].values()
            } == {"bfloat16"}
    document = audit.manifest.document["prompts"]
    wanted = [[None, ours(audit, "text", **document["unconditional"]), None]]
    wanted += [[one["prompt"], ours(audit, "text", **one["positive"]), ours(audit, "text", **one["negative_row"])]
               for one in document["samples"]]
    assert told["prompts"] == wanted and [prompt for prompt, *_ in wanted] == [None, "a dog", "picture number 1"]
    assert told["findings"] == audit.findings and audit.findings


def test_a_reader_of_bytes_sees_every_row(whole):
    audit = open_manifest(read_manifest(whole))
    reader, wanted = Reader(audit.cache), {}
    for shard in audit.shards:
        for name in shard["shapes"]:
            spec, rows = reader.array_info(shard["digest"], name)
            for row, key in enumerate(reader.keys(shard["digest"])):
                value = np.empty(spec.row_bytes, np.uint8)
                reader.read_into(value, shard["digest"], name, row)
                wanted[f"{shard['digest']} {name} {bytes(key).hex()}"] = [
                    list(spec.shape), hashlib.sha256(value.tobytes()).hexdigest()]
            assert rows == row + 1
    assert run(BY_BYTES, audit.cache.root) == wanted and len(wanted) > 12


@pytest.mark.parametrize("reader", READERS)
def test_the_readers_are_short_and_ours_is_not_in_them(reader):
    text = (HERE / reader).read_text()
    assert len(text.splitlines()) <= 60 and "prep" not in text and "train" not in text


@pytest.mark.parametrize("what", ["shards", "tables"])
def test_they_refuse_a_flipped_bit(whole, tmp_path, what):
    """What a reader must check, it does: a row's file and a table's, each with one bit changed."""
    shutil.copytree(whole.parent, tmp_path / "copy")
    encoded = tmp_path / "copy" / "m.json"
    audit = open_manifest(read_manifest(encoded))
    digest = audit.shards[0]["digest"]
    path = (audit.cache.table(audit.manifest.document["tables"]["samples"]) if what == "tables"
            else next(audit.cache.shard(digest).glob("latent/c*")))
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    program = STANDALONE if what == "tables" else BY_BYTES
    done = subprocess.run([sys.executable, "-c", program, HERE, encoded if what == "tables" else audit.cache.root],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and ("is damaged" in done.stderr or "AssertionError" in done.stderr), done.stderr
