"""Every message that a user can be told has a test, and all are spelled the same way.

The first half holds that for all sources at once; the second is those messages that no other test file expects.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from functools import cache, partial
from types import SimpleNamespace

import messages
import pytest
from messages import ROOT, Message, Module, literals_of, messages_of, modules_of, untested
from PIL import Image
from real_manifest import build
from small_manifest import write_small

from prep import errors
from prep.digest import canonical, with_checksum
from prep.errors import CacheError, ManifestError, ModelError, Problem
from prep.fs.place import Local
from prep.parse import Unparsed, sealed_json

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu")


@cache
def told(*, hints: bool = False) -> list[Message]:
    return messages_of(modules_of(), hints=hints)


def planted(source: str) -> list[Message]:
    return messages_of([Module(name="planted.py", tree=ast.parse(source))])


def test_every_message_is_expected_by_some_test():
    """Never empty by accident: the sources have far more than a hundred."""
    found = told()
    assert len(found) > 150 and {message.where.partition("/")[0] for message in found} == {"prep", "train"}
    missing = untested(found, literals_of(ROOT))
    assert not missing, "no test expects:\n" + "\n".join(f"{one.where}: {one.pieces}" for one in missing)


@pytest.mark.parametrize("source", [
    "def f(x):\n    raise ConfigError(f'{x} is upside down')",
    "def f(x):\n    what = f'{x} is upside down'\n    raise CacheError(what, hint='turn it')",
    "def f(x):\n    raise Unparsed('the ' + ('cup' if x else 'glass') + ' is upside down') from None",
    "def _fault(x, what):\n    return errors.CacheError(f'{x}: {what}')\n"
    "def f(x):\n    raise _fault(x, 'is upside down')",
])
def test_a_message_without_a_test_is_found(source):
    found = planted(source)
    assert untested(found, ["all is well here", "is up", "upside down, says another"]), found
    assert not untested(found, ["the cup is upside down", "the glass is upside down"])
    assert not untested(found, [f"{messages.HOLE} is upside down"]) or "glass" in source


def test_what_is_passed_on_is_no_message():
    assert not planted("def f(error):\n    raise ConfigError(str(error), hint='x') from None\nValueError('a word')")


def test_two_messages_do_not_share_a_test():
    """What stands in both says nothing of either; all pieces in order do."""
    found = planted("def f(x):\n    raise ConfigError(f'{x}, expected one of: {x}')\n"
                    "def g(x):\n    raise ConfigError(f'cup {x}, expected one of: {x}')")
    assert len(untested(found, ["expected one of"])) == 1  # its only piece
    assert not untested(found, ["cup 3, expected one of: 4"])


@pytest.mark.parametrize("hints", [False, True], ids=["messages", "hints"])
def test_messages_and_hints_are_spelled_alike(hints):
    """They begin small (or with a value), end without a full stop, and are one line."""
    found = told(hints=hints)
    assert len(found) > 150
    for message in found:
        text = message.text
        assert text.strip() == text and text, message.where
        assert not text[0].isupper() or text.startswith("SOURCE is "), message.where
        assert not text.endswith((".", "!")) or text.endswith("..."), message.where
        assert "\n" not in text and "  " not in text, message.where


def test_the_tree_of_errors_is_its_docstring():
    for name in messages.KINDS - {"Problem", "Unparsed"}:
        assert f"{name}" in errors.__doc__ and str(getattr(errors, name).exit_code) in errors.__doc__
    problem = Problem("what", hint="how")
    assert (str(problem), problem.message, problem.hint, Problem("what").hint) == ("what", "what", "how", "")


# What the command line says, where no other file tests it.

@pytest.mark.parametrize("recipe", [False, True])
def test_sources_that_are_none(prep, tmp_path, recipe):
    hint = "" if recipe else ("hint: SOURCE is a directory of pictures, here or in a store (s3://bucket/photos), "
                              "a .tar (braces and globs allowed) or a recipe .toml\n")
    (tmp_path / "file.png").touch()
    for path, said in (("file.png", f"error: source {tmp_path}/file.png is not a directory\n"),
                       ("nothing", f"error: source {tmp_path}/nothing does not exist\n")):
        (tmp_path / "r.toml").write_text(f"[[source]]\npath = '{path}'")
        result = prep("scan", tmp_path / ("r.toml" if recipe else path))
        assert (result.code, result.out, result.err) == (5, "", said + hint)


def test_a_recipe_that_cannot_be_read(prep, tmp_path):
    result = prep("scan", tmp_path / "nothing.toml")
    assert (result.code, result.err) == (5, f"error: cannot read recipe {tmp_path}/nothing.toml: "
                                            "No such file or directory\n")


def test_encoding_needs_a_model(prep, photos, tmp_path):
    result = prep("encode", photos, "--cache", tmp_path / "cache")
    assert (result.code, result.err) == (6, "error: no model is named, so the encoders are unknown\n"
                                            "hint: add --model MODEL, or set path in [model] of the recipe\n")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("model", ["not a model", "/nowhere/at/all"])
def test_a_model_that_is_none(prep, photos, tmp_path, model):
    result = prep("encode", photos, "--cache", tmp_path / "cache", "--model", model)
    assert result.code == 6 and f"error: model {model} is neither a directory nor a Hub id" in result.err


def test_a_model_that_cannot_be_downloaded(prep, photos, tmp_path):
    """Tests are offline, so --download fails as it does without a network."""
    result = prep("encode", photos, "--cache", tmp_path / "cache", "--model", "latentry/nowhere", "--download")
    assert result.code == 6 and "error: model 'latentry/nowhere' could not be downloaded: " in result.err


def test_masks_of_no_known_method_or_into_a_file(prep, photos, tmp_path):
    result = prep("mask", photos, "--with", "alpa", "-o", tmp_path / "masks")
    assert result.code == 2
    assert result.err == ("error: --with is 'alpa', expected one of: alpha, color, threshold, clipseg, segment, "
                          "rembg; did you mean 'alpha'?\n")
    (tmp_path / "file").touch()
    result = prep("mask", photos, "--with", "alpha", "-o", tmp_path / "file")
    assert (result.code, result.err) == (5, f"error: {tmp_path}/file is a file, expected a directory for masks\n")


def test_many_pictures_without_captions(prep, tiny_model, tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(10):
        Image.new("RGB", (96, 96), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    result = prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "cache", *SMALL)
    assert result.code == 3
    names = ", ".join(f"{number}.png" for number in range(8))
    assert f"error: pictures without a caption (10): {names} and 2 more" in result.err


@pytest.mark.parametrize(("words", "said"), [
    (None, "error: cannot read prompt file {} (--prompts): No such file or directory"),
    (b"a \xff", "error: prompt file {} (--prompts): byte 2 is not UTF-8, expected UTF-8 text"),
])
def test_prompt_files_that_cannot_be_read(prep, photos, tiny_model, tmp_path, words, said):
    path = tmp_path / "prompts.txt"
    if words is not None:
        path.write_bytes(words)
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "--prompts", path)
    assert result.code == 5 and said.format(path) in result.err


@pytest.mark.parametrize(("lost", "said"), [
    ("cache", "no portable relative path leads from manifest {0}/m.json to cache {0}/cache"),
    ("tiny", "no portable relative path leads from manifest {0}/m.json to model {1}"),
])
def test_nothing_relative_leads_to_another_drive(prep, photos, tiny_model, tmp_path, monkeypatch, lost, said):
    """As on Windows, where a cache on D: has no path relative to C:."""
    from prep.fs.place import relative_name

    real = relative_name
    for module in ("encode.manifest.document", "fs.place"):
        monkeypatch.setattr(f"prep.{module}.relative_name",
                            lambda target, path: None if target.name == lost else real(target, path))
    (photos / "0-masklabel.png").unlink()
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  *SMALL)
    assert result.code == 5 and said.format(tmp_path, tiny_model) in result.err
    assert "hint: keep them on one drive, without " in result.err and not (tmp_path / "cache").exists()


# Documents.

@pytest.mark.parametrize(("data", "said"), [
    (b'{"a":1.5}', "x is not canonical: canonical JSON has no floats, got 1.5"),
    (b'{"a": 1}', "x is not in canonical form; it was edited or damaged"),
    (b'{"a":1}', "x does not match its own digest; it was edited or damaged"),
    (b'{"a"', "x is not JSON: "),
    (b"[]", r"x is [], expected a table"),
])
def test_sealed_documents(data, said):
    with pytest.raises(Unparsed) as error:
        sealed_json(data, "x")
    assert str(error.value).startswith(said)


def test_manifests_that_are_none(prep, tmp_path):
    path = tmp_path / "m.json"
    path.touch()
    os.truncate(path, (1 << 20) + 1)
    result = prep("inspect", path)
    assert (result.code, result.err) == (4, f"error: {path} is larger than 1048576 bytes, so it is not a manifest\n"
                                         "hint: name the manifest.json that prep encode wrote\n")
    path.write_bytes(canonical(with_checksum({"format": "latentry/manifest", "version": 1})))
    result = prep("inspect", path)
    assert result.code == 4 and result.err.startswith(f"error: {path} lacks 'cache'\nhint: run the prep encode command")


@pytest.mark.parametrize("command", ["inspect", "verify", "check", "run"])
def test_a_recipe_in_place_of_a_manifest(prep, train, tmp_path, command):
    path = tmp_path / "my data.toml"
    path.write_text("[model]\npath = 'x'\n\n[[source]]\npath = 'photos'\n")
    result = (train if command in ("check", "run") else prep)(command, path)
    assert result.code == 4 and f"error: {path} is a recipe, expected a manifest\n" in result.err
    assert f"hint: make one: prep encode '{path}' --cache cache -o manifest.json\n" in result.err


@pytest.mark.parametrize(("name", "data"), [
    ("lora.safetensors", b"\x40\0\0\0\0\0\0\0{}\xff\xfe"), ("train.toml", b"steps = 5\n"), ("a.txt", b"a cat\n"),
    ("model_index.json", b'{"_class_name": "StableDiffusionPipeline"}')])
@pytest.mark.parametrize("command", ["inspect", "check"])
def test_another_file_in_place_of_a_manifest(prep, train, tmp_path, command, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    result = (train if command == "check" else prep)(command, path)
    assert result.code == 4 and f"error: {path} is no manifest\n" in result.err
    assert "hint: name the manifest.json that prep encode wrote\n" in result.err


@pytest.mark.parametrize("data", [b"", b"\0" * 512, b'{"buckets":[{"size":[6'])
def test_a_manifest_torn_by_a_power_failure_is_still_one(prep, tmp_path, data):
    path = tmp_path / "manifest.json"
    path.write_bytes(data)
    result = prep("inspect", path)
    assert result.code == 4 and f"error: {path} is not JSON" in result.err
    assert "hint: run the prep encode command again" in result.err


def test_a_manifest_with_a_bucket_of_three_sides_is_not_written(tmp_path):
    from prep.manifest.document import read_manifest, write_manifest

    small = write_small(tmp_path)
    document = dict(read_manifest(small).document)
    document["buckets"] = [{**document["buckets"][0], "size": [64, 64, 3]}]
    del document["self"]
    with pytest.raises(ManifestError, match=re.escape(
            "the new manifest is not valid: buckets[0].size is [64, 64, 3], expected width and height")):
        write_manifest(small, document)


def test_a_sample_in_a_shard_that_the_table_lacks(tmp_path):
    from prep.manifest.describe import describe_samples
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    audit = open_manifest(read_manifest(write_small(tmp_path)))
    vars(audit)["shards"] = []
    with pytest.raises(CacheError, match=r"the sample table names shard number \d, but there are 0 shards"):
        describe_samples(audit, "a.png")


# The cache.

@pytest.fixture
def cache(tmp_path):
    from prep.cache.store import open_cache

    return open_cache(tmp_path / "cache", create=True)


def test_damage_records_of_another_shard(cache):
    from prep.cache.damage import recorded

    shard = "ab" * 32
    cache.damaged(shard).parent.mkdir()
    body = {"format": "latentry/damage", "version": 2, "shard": shard, "damages": []}
    cache.damaged(shard).write_bytes(canonical(with_checksum(body)))
    (found,) = recorded(cache, shard)
    assert found.what == f"damage record has another shard or version, expected version 1 for shard {shard}"


def test_names_in_shards():
    from prep.cache.shard_format import checked_name

    with pytest.raises(Unparsed, match=r"name in x is '\.\./up', expected lower-case letters, digits and underscores"):
        checked_name("../up", "x")


def test_tables_that_cannot_be_read_or_are_others(cache):
    from prep.manifest.tables import FINDINGS, build_shards, read_table, write_table

    digest = write_table(cache, build_shards([]))
    with pytest.raises(CacheError, match=rf"table {digest} cannot be read: it has columns \['digest', .*\], expected"):
        read_table(cache, digest, FINDINGS)
    cache.table(digest).unlink()
    cache.table(digest).mkdir()
    with pytest.raises(CacheError, match=f"table {digest} cannot be read: .* is a directory, expected a plain file"):
        read_table(cache, digest, FINDINGS)


def test_no_manifest_without_the_unconditional_row(cache):
    from prep.encode.manifest.assemble import assemble_manifest as seal_manifest
    from prep.fs.memo import Memo

    wanted = SimpleNamespace(targets=SimpleNamespace(keys=list, samples=(), unconditional="ab" * 32))
    with pytest.raises(CacheError, match="the unconditional text row could not be encoded"):
        seal_manifest(wanted, cache, cache.root.parent / "m.json", frame={}, prompt_bytes=None,
                      facts=Memo(None))


# Models.

@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the model, to be broken."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_what_a_pipeline_directory_lacks(model):
    from prep.models.configs import pipeline_index
    from prep.models.families.registry import FAMILIES
    from prep.models.files import read_config
    from prep.models.fingerprint import text_fingerprint
    from prep.models.pipeline import prediction_of
    from prep.models.weights import weight_files

    with pytest.raises(ModelError, match=r"model .*/gone is not a directory") as error:
        pipeline_index(model / "gone")
    assert "model_index.json" in error.value.hint
    (model / "list.json").write_text("[]")
    with pytest.raises(ModelError, match=r"list.json holds list, expected an object"):
        read_config(model / "list.json")
    with pytest.raises(ModelError, match=r"scheduler has no model.safetensors") as error:
        weight_files(model / "scheduler", "model")
    assert "safe_serialization" in error.value.hint
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps({"prediction_type": "sample"}))
    with pytest.raises(ModelError, match="model predicts 'sample', expected epsilon or v_prediction"):
        prediction_of(model, FAMILIES["sd15"])
    shutil.rmtree(model / "tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer has no tokenizer_config\.json"):
        text_fingerprint(model)


def test_encoders_that_do_not_load(model):
    from prep.models.families.registry import FAMILIES
    from prep.models.family import TextOptions
    from prep.models.text.encoder import TextEncoder
    from prep.models.vae import VaeEncoder

    sd15 = partial(TextEncoder, family=FAMILIES["sd15"], options=TextOptions(max_length=77))
    for encoder, part, said in ((VaeEncoder, "vae", f"{model}/vae/diffusion_pytorch_model.safetensors has a tensor"),
                                (sd15, "text_encoder", f"cannot load the text encoder in {model}/text_enc")):
        for weights in (model / part).glob("*.safetensors"):
            weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"F99"', 1))
        with pytest.raises(ModelError) as error:
            encoder(model, device="cpu", compute="float32", dtype="float32")
        assert error.value.message.startswith(said) and error.value.exit_code == 6


def test_plans_that_are_none():
    from prep.batching.plan import require_steps, step_plan

    with pytest.raises(errors.ConfigError, match="batch_size is 0, expected at least 1"):
        step_plan([1], seed=0, batch_size=0)
    with pytest.raises(errors.EmptyPlanError) as error:
        require_steps(step_plan([1], seed=0, batch_size=2, underfill="drop"), [((64, 64), ())])
    assert error.value.message == ("underfill 'drop' drops all 1 samples, expected at least one step of "
                                   "batch_size 2 in micro-batches of 2; samples by bucket: 64x64: 1")


# Training.

@pytest.fixture
def made(tmp_path, tiny_model):
    """A small manifest that can be trained on."""
    return build(tmp_path, tiny_model)


def test_a_shard_that_shrank(train, made):
    path = min((made.root / "cache" / "shards").glob("*/*/latent/c.*"))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    result = train("check", made.path)
    shard = path.parent.parent.name
    pattern = rf"error: shard {shard} \(\d+ latent rows\) has \d+ bytes, expected \d+\nhint: prep encode "
    assert result.code == 7 and re.match(pattern, result.err)


@pytest.mark.parametrize("path", ["unet", "vae"])
def test_parts_of_a_model_that_do_not_load(model, path):
    import torch

    from train.config.load import parse
    from train.models.denoiser import load
    from train.sampling.sampler import decoded

    for weights in (model / path).glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(ModelError) as error:
        if path == "unet":
            load(model, parse({"precision": "fp32"}, "test"), "epsilon", torch.device("cpu"))
        else:
            decoded([[torch.zeros(1, 4, 2, 2)]], model, (), torch.device("cpu"))
    assert error.value.message.startswith(f"{model}/{path}/diffusion_pytorch_model.safetensors has a tensor of ")
    assert "F99, expected one of: " in error.value.message and "\n" not in error.value.message


def test_lora_targets_that_name_nothing(train, made):
    result = train("check", made.path, "--set", "lora.targets=[]")
    assert result.code == 3
    assert ("lora.targets is [], expected names of layers like 'to_q', or attention, all-linear, kohya, kohya-conv"
            in result.err)


def test_a_run_without_a_checkpoint(train, made, tmp_path):
    from train.check import check
    from train.config.load import load_config
    from train.runs.directory import claim_run
    from train.setup import RunRequest

    claim_run(Local(tmp_path / "run"), check(RunRequest(manifest=made.path), load_config(None)).setup)
    result = train("sample", tmp_path / "run", "--device", "cpu", "-o", tmp_path / "grid.png")
    assert result.code == 5
    assert result.err == (f"error: {tmp_path}/run has no checkpoint\n"
                          "hint: show the model before training with --base\n")
    result = train("sample", tmp_path / "run", "--device", "cpu", "--checkpoint", "step-1", "-o", tmp_path / "grid.png")
    assert f"{tmp_path}/run has no checkpoint\n" in result.err
    result = train("run", made.path, "-o", tmp_path / "run", "--resume")
    assert result.code == 5 and "hint: omit --resume to start this run\n" in result.err
    result = train("run", made.path, "-o", tmp_path / "run", "--resume", "--from", "step-1")
    assert result.code == 5 and "hint: omit --resume to start this run\n" in result.err
    (tmp_path / "run" / "lora.safetensors").write_bytes(b"")
    result = train("run", made.path, "-o", tmp_path / "run", "--resume")
    assert result.code == 5 and f"-o {tmp_path}/run-2 --init-from {tmp_path}/run begins another run" in result.err


@pytest.mark.parametrize(("options", "said"), [
    (["--from", "step-1"], "--from is given without --resume"), (["--adopt"], "--adopt is given without --resume")])
def test_options_of_a_resumed_run(train, made, options, said):
    result = train("run", made.path, *options)
    assert result.code == 2 and result.err == f"error: {said}\nhint: add --resume\n"


def test_runs_and_checkpoints_of_another_version(tmp_path):
    from train.runs.checkpoint import read_state
    from train.runs.directory import read_run

    for name in ("run.json", "state.json"):
        (tmp_path / name).write_text('{"format": "latentry/other", "version": 9}')
    with pytest.raises(CacheError, match="it has format 'latentry/other' version 9, this program reads 'latentry/run' "
                                         "version 1 or 2"):
        read_run(Local(tmp_path))
    with pytest.raises(CacheError, match="it has format 'latentry/other' version 9, this program reads "
                                         "'latentry/checkpoint' version 1 or 2 or 3"):
        read_state(tmp_path)


def test_rows_that_do_not_fit_their_buffer(made):
    import torch

    from prep.loader.index import open_index
    from prep.loader.rows import Rows

    rows = Rows(open_index(made.manifest))
    number = next(number for number, shard in enumerate(rows.index.shards) if shard.field == "text")
    with pytest.raises(CacheError) as error:
        rows.fill(torch.empty(1, 3, 3), "text", "hidden", [rows.index.ref(number, 0)])
    assert error.value.message == (f"shard {rows.index.shards[number].digest}, array 'hidden' has rows [8, 32] "
                                   "bfloat16, expected text rows [3, 3] float32")
