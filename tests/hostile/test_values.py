"""Each value of a manifest and its tables that would do harm, and what is said of it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from victims import file_of, victim

from prep.errors import CacheError, ManifestError
from prep.loader.index import open_index
from prep.maintenance.verify import verify
from prep.manifest import describe as audits
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.manifest.tables import FINDINGS, SAMPLES, SHARDS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return victim(tmp_path_factory.mktemp("victim") / "v")


@pytest.fixture
def target(whole):
    yield whole
    whole.restore()
    whole.restore_damage()


def at(document: Any, path: str) -> tuple[Any, Any]:
    *above, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in above:
        document = document[name]
    return document, last


DOCUMENT = {
    "latents.factor": [(0, "latents.factor is 0, expected 8 for family 'sd15'"), (True, "a whole number")],
    "latents.channels": [(1 << 40, "expected 4 for family 'sd15'")],
    "latents.scaling_factor": [("1e99", "latents.scaling_factor is 1e+99, expected a number from -1000000.0 to"),
                               ("0", "latents are divided by it")],
    "latents.mean": [(["1"], "latents.mean has 1 numbers, expected one for each of 4 channels"),
                     (["1"] * 4, "latents.std is None, expected a list")],
    "latents.shift_factor": [("-9999999", "expected a number from")],
    "latents.more": [(1, "unknown key 'more' in latents")],
    "prompts.unconditional.more": [(1, "unknown key 'more' in prompts.unconditional")],
    "prompts.unconditional.row": [
        (1 << 24, "expected a count of at most 16777215"), (-1, "expected a count of at most")],
    "prompts.unconditional.shard": [(1 << 40, "expected a count of at most 2147483647")],
    "prompts.samples.0": [({"prompt": "x"}, "prompts.samples[0] lacks 'negative'"), ([], "expected a table")],
    "prompts.samples.0.prompt": [("\ud800", "without unpaired surrogates"), (None, "expected a string")],
    "prompts.file": [("../" * 2000 + "x", "expected a path relative"), ("x" * 300, "expected a path relative")],
    "fields.other": [({}, "unknown key 'other' in fields")],
    "fields.text.arrays": [({}, "fields.text.arrays lacks 'hidden'")],
    "fields.mask.arrays.mask.dtype": [
        ("float32", "fields.mask.arrays.mask.dtype is 'float32', expected one of: uint8")],
    "fields.latent.arrays.latent.dtype": [("uint8", "expected one of: bfloat16")],
    "fields.latent.arrays.latent.dims": [
        (["h"], "fields.latent.arrays.latent.dims is ['h'], expected ['c', 'h', 'w']")],
    "fields.latent.context": [({"a": {"b": {"c": 1}}}, "expected a string or a whole number"),
                              ({"a\0": 1}, "contains a NUL, expected none in the input of keys"),
                              ({"a": "\0"}, "fields.latent.context.a contains a NUL, expected none"),
                              ({"a": None}, "expected a string or a whole number")],
    "buckets.0.size": [([0, 8], "buckets[0].size is [0, 8], expected multiples of 8, at most"),
                       ([12, 8], "expected multiples of 8"), ([1 << 20, 8], "expected multiples of 8, at most"),
                       ([1 << 16, 1 << 16], "with an area of at most 536870912"),
                       ([16, 8], "buckets has a size twice, expected distinct sizes")],
    "buckets.0.train": [(7, "samples.train is 24, expected 23, the sum over the buckets")],
    "buckets": [([], "the sum over the buckets")],
    "models.more": [("ab" * 32, "unknown key 'more' in models")],
    "tables": [({}, "tables lacks 'samples'")],
    "options": [
        ([{"path": "/etc/passwd"}], "options[0] is '/etc/passwd', expected a path relative"), ([{}], "lacks 'path'")],
    "cache": [
        ("/", "expected a path relative"), ("a\0", "expected a path relative"), ("C:x", "expected a path relative")],
    "sources": [([["x"]], "sources is ['x'], expected a string")],
}  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"),
                         [(path, *case) for path, cases in DOCUMENT.items() for case in cases])
def test_a_value_of_the_document(target, path, value, message):
    document = target.copy()
    place, name = at(document, path)
    place[name] = value
    target.write(document)
    with pytest.raises(ManifestError) as caught:
        read_manifest(target.path)
    assert message in caught.value.message and caught.value.exit_code == 4


def test_a_manifest_without_text(target):
    document = target.copy()
    del document["fields"]["text"]
    target.write(document)
    with pytest.raises(ManifestError, match="fields lacks 'text', which is required"):
        read_manifest(target.path)


def test_a_document_of_many_buckets_or_levels(target):
    document = target.copy()
    empty = {"train": 0, "validation": 0, "prior": 0}
    document["buckets"] += [{"size": [8 * number, 16], **empty} for number in range(1, 4100)]
    target.write(document)
    with pytest.raises(ManifestError, match="buckets has 4102 members, expected at most 4096"):
        read_manifest(target.path)
    for levels in (20, 500, 100_000):
        target.write({**target.copy(), "options": "@"}, {"@": "[" * levels + "]" * levels})
        with pytest.raises(ManifestError, match=r"has more than 16 levels of nesting|is not JSON"):
            read_manifest(target.path)


NAN = float("nan")
SAMPLE = {
    "0.source": [(3, "the sample table has source 3 at index 0, expected a number from 0 to 2"), (-1, "source -1")],
    "0.role": [("tarin", "role number 3 at index 0, expected one of train, validation, prior")],
    "0.width": [(0, "width 0 at index 0")], "0.height": [(-5, "height -5 at index 0")],
    "0.bucket": [(3, "bucket 3 at index 0, expected a number from 0 to 2"), (-1, "bucket -1")],
    "0.repeats": [(0, "repeats 0"), (1 << 30, "repeats 1073741824 at index 0, expected a number from 1 to")],
    "0.weight": [(NAN, "weight nan"), (float("inf"), "weight inf"), (-1.0, "weight -1.0")],
    "0.coverage": [(NAN, "coverage nan at index 0, expected null, or 0 to 1"), (1.5, "coverage 1.5")],
    "0.views": [
        ([], "view count 0 at index 0, expected at least 1")],
    "0.texts": [([], "text count 0 at index 0")],
    "0.texts.0.weight": [(NAN, "text weight nan")],
    "0.texts.0.row": [(99, "has its text in row 99 of shard"), (-1, "has its text in row -1 of shard")],
    "0.texts.0.shard": [(1 << 30, "which the manifest's shard table does not have"), (0, "has its text in shard ")],
    "0.views.0.latent_shard": [(-1, "has its latent in row"), (5, "has its latent in")],
    "0.views.0.mask_shard": [(-2, "mask_shard -2 at index 0, expected a shard, or -1 with row -1")],
    "0.views.0.mask_row": [(1 << 20, "mask")],
    "0.views.0.crop_x": [(-1, "crop_x -1 at index 0, expected a crop within the scaled picture"),
                         ((1 << 31) - 1, "crop_x 2147483647 at index 0")],
    "0.views.0.scaled_height": [(0, "crop_y 0 at index 0, expected a crop within")],
}  # fmt: skip
SHARD = {
    "0.rows": [(0, "row 0 of the shard table is not valid: rows is 0"), ((1 << 24) + 1, "rows is 16777217")],
    "0.bytes": [(1, "bytes is 1, expected a number from")],
    "0.field": [
        ("../x", "name in field is '../x'"), ("text", "row 1 of the shard table is not valid: it is out of order")],
    "0.shapes": [("{}", "it has shapes for [], but dtypes for ['latent']"),
                 ("[1]", "shapes is [1], expected a table"),
                 ('{"latent": [1]}', "expected canonical JSON"), ("[" * 4000, "shapes is not canonical JSON"),
                 ('{"latent":[0]}', "shapes.latent[0] is 0"),
                 ("[" * 5000, "shapes has 5000 characters, expected at most"),
                 ('{"latent":[9999,99999]}', "has rows of 1999780002 bytes, expected at most 134217728"),
                 ('{"latent":[1.5]}', "shapes is not canonical JSON: 'canonical JSON has no floats")],
    "0.dtypes": [('{"latent":"object"}', "dtypes.latent is 'object', expected one of")],
    "0.digest": [(b"\xff" * 32, "it is out of order or a duplicate")],
}  # fmt: skip


def refused(target, message):
    """By inspect, verify and train, each in one message."""
    audit = open_manifest(read_manifest(target.path))
    with pytest.raises(CacheError) as caught:
        audits.describe_manifest(audit)
    assert message in caught.value.message and "prep encode" in caught.value.hint
    report = verify(open_manifest(read_manifest(target.path)), quick=True)
    assert not report["ok"] and any(message in one["what"] for one in report["damaged"])
    with pytest.raises(CacheError) as caught:
        open_index(read_manifest(target.path))
    assert message in caught.value.message and caught.value.exit_code == 7


@pytest.mark.parametrize(("name", "path", "value", "message"), [
    (name, path, *case) for name, table in (("samples", SAMPLE), ("shards", SHARD)) for path, cases in table.items()
    for case in cases])
def test_a_value_of_a_table(target, name, path, value, message):
    schema = {"samples": SAMPLES, "shards": SHARDS}[name]
    rows = target.rows(name, schema)
    place, last = at(rows, path)
    place[last] = value
    undo = target.put_table(name, file_of(pa.Table.from_pylist(rows, schema=schema)))
    refused(target, message)
    undo()


@pytest.mark.parametrize("change", ["twice", "lost", "swapped"])
def test_rows_of_the_sample_table(target, change):
    rows = target.rows("samples", SAMPLES)
    changed = {"twice": rows[:1] + rows, "lost": rows[1:], "swapped": rows[1::-1] + rows[2:]}[change]
    undo = target.put_table("samples", file_of(pa.Table.from_pylist(changed, schema=SAMPLES)))
    refused(target, "as in the manifest" if change == "lost" else "expected ids in ascending order, each once")
    undo()


def test_a_severity_that_is_none(target):
    rows = target.rows("findings", FINDINGS)
    rows[0]["severity"] = "\x1b[31mfatal"
    undo = target.put_table("findings", file_of(pa.Table.from_pylist(rows, schema=FINDINGS)))
    with pytest.raises(CacheError, match=r"the finding table has the severity '\\x1b\[31mfatal', expected one"):
        audits.describe_manifest(open_manifest(read_manifest(target.path)))
    undo()


def test_a_prompt_row_of_another_field(target):
    document = target.copy()
    document["prompts"]["samples"][0]["positive"] = {"shard": 0, "row": 0}
    target.write(document)
    refused(target, "the manifest has a prompt in row 0 of shard number 0, which is not a text row")


def test_what_the_commands_say(target, prep, train):
    """One line and its hint, exit 7 for the cache and 4 for the manifest; never a traceback."""
    rows = target.rows("samples", SAMPLES)
    rows[0]["bucket"] = 99
    undo = target.put_table("samples", file_of(pa.Table.from_pylist(rows, schema=SAMPLES)))
    for result in (prep("inspect", target.path), prep("inspect", target.path, "--html", target.root / "page.html"),
                   prep("verify", target.path, "--quick"), prep("verify", target.path),
                   train("check", target.path, "--json")):
        assert result.code == 7 and "Traceback" not in result.err, result.err
        assert "bucket 99 at index 0, expected a number from 0 to 2" in " ".join(result.out.split()) + result.err
    undo()
    document = target.copy()
    document["cache"] = "\0"
    target.write(document)
    for result in (prep("inspect", target.path), prep("verify", target.path), train("check", target.path),
                   train("run", target.path, "-o", target.root / "run")):
        assert result.code == 4 and "error: cache is '\\x00', expected a path relative" in result.out + result.err
    assert not (target.root / "run").exists() and not (target.root / "page.html").exists()
