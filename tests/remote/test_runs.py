"""Runs in an object store: the run is the one on a disk, and whatever happens, what the store shows is whole."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torchrun import environment, torchrun

from prep.errors import PathError
from prep.fs.remote import retry
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import run_root
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import list_objects
from train.runs.stored.layout import others
from train.runs.stored.stored import kept_in

STEPS = 6
RUN = ("--steps", STEPS, "--batch-size", 2, "--precision", "fp32", "--device", "cpu", "--quiet", "--set",
       "checkpoint.every=2", "--set", "optimizer.name=adamw", "--set", "lora.rank=2", "--set", "sample.every=0")
SAMPLES = ("sample.every=3", "sample.steps=2")
TIMES = ("seconds", "wait", "samples_per_second")


def worked_on(url):
    """The directory in which this computer works on the run at a URL."""
    return run_root(Bucket.parse(url))


@pytest.fixture
def made(make, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    return make()


def changed(words, *settings):
    """`words` with these settings, in place of theirs where they have them."""
    given = {setting.partition("=")[0]: setting for setting in settings}
    replaced = [given.pop(str(word).partition("=")[0], word) for word in words]
    return [*replaced, *(part for setting in given.values() for part in ("--set", setting))]


@pytest.fixture
def words(made, tiny_model):
    return ("run", made.path, "--model", tiny_model, *RUN)


@pytest.fixture
def url(store):
    return f"{store.url}/runs/cat"


def objects(store, url):
    """The bytes of a run's objects, by name, seen without the proxy."""
    prefix = url.removeprefix("s3://bucket/")
    return {name: store.server.get(f"{prefix}/{name}") for name in list_objects(url)}


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(data):
    """The events of a log without their times."""
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES}
            for line in data.splitlines()]


def steps_of(there):
    return sorted(name.split("/")[1] for name in there if name.endswith("/state.json") and "aside" not in name)


def require_same(there, here):
    """The objects of a run are the files of one on a disk, but for paths in run.json."""
    assert set(there) - {"writer.json"} == set(here)
    for name in sorted(set(here) - {"log.jsonl", "run.json", "loss.png"}):
        assert there[name] == here[name], name
    events = [[one for one in timeless(each["log.jsonl"]) if one["event"] != "start"] for each in (there, here)]
    assert events[0] == events[1]


def require_whole(store, url):
    """Every checkpoint that the store shows has the files that its state.json lists."""
    there = objects(store, url)
    for step in steps_of(there):
        listed = json.loads(there[f"checkpoints/{step}/state.json"])["files"]
        for name, facts in listed.items():
            assert hashlib.sha256(there[f"checkpoints/{step}/{name}"]).hexdigest() == facts["sha256"]
    return there


@pytest.fixture
def here(train, words, tmp_path):
    """The same run on a disk."""
    assert train(*words, "-o", tmp_path / "cat").code == 0
    return files(tmp_path / "cat")


def test_a_run_in_a_store_is_checked_before_it_is_continued(train, words, store, url, tmp_path, monkeypatch):
    """By what the store has, also on another computer; nothing is written there."""
    assert train(*words, "-o", url).code == 0
    before = objects(store, url)
    new_computer(monkeypatch, tmp_path)
    check = ("check", words[1], "--model", words[3], "-o", url, "--resume")
    result = train(*check, "--steps", 8)
    assert result.code == 0, result.err
    assert result.out.startswith(f"continues {url} from step-000006 to step 8\na LoRA of rank 2 on ")
    result = train(*check, "--rank", 4)
    assert result.code == 3 and "lora.rank is 4, but the checkpoint was trained with 2" in result.err
    assert train(*check, "--from", "step-3").code == 5
    assert objects(store, url) == before and not worked_on(url).exists()
    assert not any((tmp_path / "copies2").rglob("*.safetensors")), "weights are not downloaded"
    result = train("check", words[1], "--model", words[3], "-o", f"{store.url}/runs/dog", "--resume")
    assert result.code == 5 and "is not a training run: it has no run.json" in result.err
    for name in [name for name in before if name.startswith("checkpoints/")]:
        store.server.delete(f"{url.removeprefix('s3://bucket/')}/{name}")
    result = train(*check, "--json")
    assert result.code == 0 and result.json["resume"]["checkpoint"] is None
    assert train(*check).out.startswith(f"{url} has no checkpoint yet: the run begins\n")
    told = train("check", "-o", url, "--resume")
    assert told.code == 2 and "no MANIFEST is given, and the run has no checkpoint yet\nhint: name the MAN" in told.err


def new_computer(monkeypatch, tmp_path, number=2):
    copies = tmp_path / f"copies{number}"
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", str(copies))
    return copies


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library that keeps a run's files as it does: links to logs, and a file that grows with each
    step. The names of the runs that were asked for."""
    names = []

    def init(**given):
        names.append(given["id"])
        folder = Path(given["dir"]) / "wandb"
        own = folder / f"run-{len(names)}-{given['id']}"
        (own / "logs").mkdir(parents=True)
        (own / "logs" / "debug.log").write_text("begun")
        for name, target in (("debug.log", own / "logs" / "debug.log"), ("latest-run", own)):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)
        kept = (own / f"run-{given['id']}.wandb").open("a")
        return SimpleNamespace(log=lambda values, step: print(values, file=kept, flush=True), finish=kept.close)

    library = ModuleType("wandb")
    library.Settings, library.Image, library.init, library.__spec__ = dict, str, init, ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return names


@pytest.mark.slow
def test_a_run_of_wandb_continues_on_another_computer(train, words, store, url, tmp_path, monkeypatch, wandb):
    """Of the library's files only the run's name there is in the store."""
    words = (*words, "--set", "log.wandb=hearts")
    told = train(*words, "-o", url)
    assert told.code == 0 and "not uploaded" not in told.err, told.err
    there = require_whole(store, url)
    assert steps_of(there)[-1] == "step-000006"
    assert [name for name in there if name.startswith("wandb/")] == ["wandb/id.txt"]
    assert there["wandb/id.txt"].decode() == wandb[0]
    assert (worked_on(url) / "wandb" / "debug.log").is_symlink()
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--steps", 8, "--resume", "-o", url)
    assert told.code == 0 and "not uploaded" not in told.err, told.err
    assert len(wandb) == 2 and wandb[0] == wandb[1]
    assert steps_of(require_whole(store, url))[-1] == "step-000008"


def test_a_link_in_a_run_is_not_uploaded(tmp_path):
    (tmp_path / "loss.png").write_bytes(b"x")
    (tmp_path / "more.png").symlink_to(tmp_path / "loss.png")
    assert others(tmp_path) == ["loss.png"]


def test_the_run_is_the_one_on_a_disk(train, words, store, url, tmp_path):
    words = changed(words, *SAMPLES)
    assert train(*words, "-o", tmp_path / "cat").code == 0
    here = files(tmp_path / "cat")
    told = train(*words, "-o", url)
    assert told.code == 0, told.err
    assert told.out == f"{url}/lora.safetensors\n"
    there = require_whole(store, url)
    require_same(there, here)
    assert files(worked_on(url)).keys() == here.keys() | {"writer.json"}
    sent = [path for method, path, _ in store.proxy.asked if method == "PUT" and "log.jsonl" not in path]
    assert not [path for path in set(sent) if sent.count(path) > 1 and "losses.bin" not in path and ".png" not in path]
    document = json.loads(there["run.json"])
    assert document["manifest"].startswith("/"), "absolute: the working copy may go"
    told = train(*words, "-o", url)
    assert told.code == 5 and f"error: {url} already holds a run\nhint: add --resume to continue it" in told.err
    assert f"; or name another: -o {url}-2\n" in told.err


def dies_after(store, count):
    """From the request of that number on, counting what changes the store, no answer is given any more."""
    asked = []

    def rule(method, path, before):
        if method in ("PUT", "POST", "DELETE") and "/runs/" in path:
            asked.append(path)
        return "drop" if len(asked) > count else ""

    store.proxy.rule = rule


def end_midway(train, words, store, url, count, monkeypatch):
    """A run of which the store sees the first `count` changes only; what training did then on its computer is lost."""
    monkeypatch.setenv(retry.PATIENCE, "0")
    dies_after(store, count)
    told = train(*words, "-o", url)
    store.proxy.forget()
    monkeypatch.setenv(retry.PATIENCE, "20")
    assert told.code in (0, 7), told.err
    return told


def resumed_elsewhere(train, words, store, url, tmp_path, monkeypatch, here):
    """On another computer the run continues from what the store has, and ends as if nothing had been."""
    require_whole(store, url)
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "-o", url)
    assert told.code == 0, told.err
    require_same(require_whole(store, url), here)


AVERAGED = ("ema.snapshots=true", "checkpoint.every=1", "checkpoint.keep=2")


def averages_of(there, step=STEPS):
    """The names of the power-function averages up to a step, wherever they are kept: without an average twice."""
    found = [tuple(name.split("/")[-2:]) for name in there if "/ema-0." in name and "aside" not in name]
    assert len(set(found)) == len(found)
    return {each for each in found if int(each[0][5:]) <= step}


def test_power_function_averages_of_removed_checkpoints_stay(train, words, store, url, tmp_path, monkeypatch):
    """As on a disk. What the store has is copied there, and not sent again."""
    words = changed(words, *AVERAGED)
    assert train(*words, "-o", tmp_path / "cat").code == 0
    here = files(tmp_path / "cat")
    told = train(*words, "-o", url)
    assert told.code == 0, told.err
    there = require_whole(store, url)
    require_same(there, here)
    assert len(averages_of(there)) == 2 * STEPS and steps_of(there) == ["step-000005", "step-000006"]
    sent = [path for method, path, _ in store.proxy.asked if method == "PUT" and "/ema-0." in path]
    assert len(sent) <= 2 * STEPS + 2 * (STEPS - 2), "once, and a copy of each that was there"
    for place, name in ((tmp_path / "cat", "one"), (url, "other"), (f"{url}/checkpoints/step-000006", "third")):
        told = train("merge", place, "--ema", "0.15", "-o", tmp_path / f"{name}.safetensors")
        assert told.code == 0 and "of 12 snapshots" in told.out, told.err
    assert len({(tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "other", "third")}) == 1
    told = train("merge", f"{url}/checkpoints/step-000005", "--ema", "0.15", "-o", tmp_path / "early.safetensors")
    assert told.code == 0 and "at step 5, of 10 snapshots" in told.out, told.err
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "--from", "step-5", "-o", url)
    assert told.code == 0, told.err
    after = require_whole(store, url)
    assert averages_of(after) == averages_of(there)
    for name in averages_of(after):
        one, other = (next(data for each, data in kept.items() if each.endswith("/".join(name)) and "aside" not in each)
                      for kept in (after, here))
        assert one == other, name


@pytest.mark.slow
@pytest.mark.parametrize("count", range(6, 60, 3))
def test_no_average_is_lost_wherever_a_run_in_a_store_ends(train, words, store, url, tmp_path, monkeypatch, count):
    """Up to the checkpoint from which it is continued elsewhere, if perhaps twice; afterwards all are there. Those of
    later steps, whose checkpoints came too late, are set aside."""
    words = changed(words, *AVERAGED)
    assert train(*words, "-o", tmp_path / "cat-2").code == 0
    here = files(tmp_path / "cat-2")
    if end_midway(train, words, store, url, count, monkeypatch).code == 0:
        pytest.skip("it had ended")
    there = require_whole(store, url)
    newest = max((int(step[5:]) for step in steps_of(there)), default=0)
    assert {tuple(name.split("/")[-2:]) for name in there if "/ema-0." in name} >= averages_of(here, newest)
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "-o", url)
    assert told.code == 0, told.err
    assert averages_of(require_whole(store, url)) == averages_of(here)


def test_what_is_left_of_a_removed_checkpoint_is_removed_later(train, words, store, url, tmp_path, monkeypatch):
    """Its state.json goes first. An average that is not kept yet is kept; what is there stays as it is."""
    words = changed(words, *AVERAGED)
    assert train(*words, "-o", url).code == 0
    before, prefix = objects(store, url), url.removeprefix("s3://bucket/")
    name = "averages/step-000003/ema-0.05.safetensors"
    store.server.delete(f"{prefix}/{name}")
    for step in ("step-000002", "step-000003"):
        for file in ("lora.safetensors", "ema-0.05.safetensors"):
            kept = before["checkpoints/step-000005/lora.safetensors" if file[0] == "l" else f"averages/{step}/{file}"]
            store.server.put(f"{prefix}/checkpoints/{step}/{file}", kept if step[-1] == "3" else b"half of it")
    new_computer(monkeypatch, tmp_path)
    assert train(*(STEPS + 1 if word == STEPS else word for word in words), "--resume", "-o", url).code == 0
    after = require_whole(store, url)
    assert {each.split("/")[1] for each in after if each.startswith("checkpoints/")} == {"step-000006", "step-000007"}
    kept = {each: data for each, data in before.items() if each.startswith("averages/")}
    assert kept.items() <= after.items() and len(kept) == 8


@pytest.mark.parametrize("count", [14])
def test_a_run_continues_on_another_computer(train, words, here, store, url, tmp_path, monkeypatch, count):
    assert end_midway(train, words, store, url, count, monkeypatch).code == 7
    resumed_elsewhere(train, words, store, url, tmp_path, monkeypatch, here)


@pytest.mark.slow
@pytest.mark.parametrize("count", range(2, 40))
def test_a_run_continues_from_wherever_it_ended(train, words, store, url, tmp_path, monkeypatch, count):
    words = changed(words, *SAMPLES)
    assert train(*words, "-o", tmp_path / "cat-2").code == 0
    here = files(tmp_path / "cat-2")
    if end_midway(train, words, store, url, count, monkeypatch).code == 0:
        pytest.skip("it had ended")
    resumed_elsewhere(train, words, store, url, tmp_path, monkeypatch, here)


def test_what_could_not_be_uploaded_is_on_the_same_computer(train, words, here, store, url, monkeypatch):
    told = end_midway(train, words, store, url, 9, monkeypatch)
    assert f"error: {url} is not all uploaded: " in told.err
    assert f"all is whole in {worked_on(url)}: the same command with --resume, on this computer, uploads it" in told.err
    mine = files(worked_on(url))
    assert f"{url} is not all uploaded: ".encode() in mine.pop("heartbeat.json"), "why it failed"
    require_same(mine, here | {"log.jsonl": mine["log.jsonl"]})
    store.proxy.forget()
    told = train(*words, "--resume", "-o", url)
    assert told.code == 0, told.err
    assert not store.proxy.count("GET", "checkpoints/step-000006/lora"), "its own checkpoint, not the store's"
    require_same(require_whole(store, url), here)


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while(train, words, here, store, url, monkeypatch):
    """Training goes on, the log says so, and in the end all is there."""
    monkeypatch.setenv(retry.PATIENCE, "0")
    count = iter(range(10**6))
    store.proxy.rule = lambda method, path, before: (
        "503" if "checkpoints/step-000002" in path and next(count) < 1 else "")
    told = train(*words, "-o", url)
    assert told.code == 0, told.err
    there = require_whole(store, url)
    warned = [one["text"] for one in timeless(there["log.jsonl"]) if one["event"] == "warning"]
    assert len(warned) <= 1 and all("not uploaded yet, training goes on: " in text for text in warned)
    assert set(there) - {"writer.json"} == set(here)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "drop", "lose", "flip sent", "truncate"])
def test_each_request_fails_once(train, words, here, store, url, fault):
    store.proxy.rule = lambda method, path, before: fault if before == 0 and "list-type" not in path else ""
    told = train(*words, "-o", url)
    assert told.code == 0, told.err
    require_same(require_whole(store, url), here)


def test_credentials_that_are_refused_are_told_before_training(train, words, store, url):
    store.proxy.rule = lambda method, path, before: "403" if "runs" in path else ""
    told = train(*words, "-o", url)
    assert told.code == 7 and "the store answered 403 Forbidden" in told.err and "a-secret" not in told.err
    assert "hint: check the credentials in the environment (AWS_ACCESS_KEY_ID, " in told.err
    assert not (worked_on(url) / "log.jsonl").exists()
    store.proxy.rule = lambda method, path, before: "403" if method == "PUT" else ""
    told = train(*words, "-o", url)
    assert told.code == 7 and "403" in told.err
    assert "step" not in (worked_on(url) / "log.jsonl").read_text(), "they may read, and not write"


def test_what_arrives_as_something_else_is_not_published(train, words, store, url):
    store.proxy.rule = lambda method, path, before: (
        "flip sent" if method == "PUT" and "step-000002/lora" in path else "")
    told = train(*words, "--set", "checkpoint.keep=0", "-o", url)
    assert told.code == 7 and "/lora.safetensors does not read back as it was written, after 3 uploads\n" in told.err
    assert steps_of(objects(store, url)) == [] and (worked_on(url) / "lora.safetensors").is_file()


def test_places_that_cannot_be_a_run(train, words, store, url):
    told = train(*words, "-o", "s3://no-such-bucket/runs/cat")
    assert told.code == 7 and "error: s3://no-such-bucket/runs/cat: the store answered 404" in told.err
    told = train(*words, "-o", "s3://bucket")
    assert told.code == 5 and "s3://bucket is a bucket, expected a place in it for the run" in told.err
    store.server.put(f"{store.prefix}/cache/latentry.json", b"{}")
    told = train(*words, "-o", f"{store.url}/cache/runs/cat")
    assert told.code == 5 and f"run {store.url}/cache/runs/cat lies in the cache {store.url}/cache" in told.err
    assert train("check", *words[1:-15], "-o", f"{store.url}/cache/cat").code == 5
    store.server.put(f"{store.prefix}/a/run.json", b'{"format": "of another program"}')
    store.server.put(f"{store.prefix}/a/b/run.json", b'{"format": "latentry/run"}')
    for command in (words, ("check", *words[1:-15])):
        told = train(*command, "-o", f"{store.url}/a/b/cat")
        assert told.code == 5 and f"run {store.url}/a/b/cat would lie in the run {store.url}/a/b\n" in told.err
    told = train(*words, "-o", store.url)
    assert told.code == 5 and f"{store.url} is not empty and is not a training run" in told.err
    told = train(*words, "--resume", "-o", url)
    assert told.code == 5 and f"error: {url} is not a training run: it has no run.json\nhint: omit --resume" in told.err


def test_a_run_needs_no_access_above_it(store, url, monkeypatch):
    """A store may also refuse, without the right to list, to tell of an object that there is none."""
    run = kept_in(Bucket.parse(url))
    store.proxy.rule = lambda method, path, before: "403" if method == "HEAD" else ""
    run.prepare(resume=False, named=None)
    assert store.proxy.count("HEAD", "/latentry.json") >= 3
    store.server.put(f"{store.prefix}/latentry.json", b"{}")
    store.proxy.rule = lambda method, path, before: (
        "403" if method == "HEAD" and f"{store.prefix}/latentry.json" not in path else "")
    with pytest.raises(PathError, match=f"lies in the cache {store.url}$"):
        run.prepare(resume=False, named=None)
    store.proxy.rule = lambda method, path, before: "500" if method == "HEAD" else ""
    monkeypatch.setenv(retry.PATIENCE, "0")
    with pytest.raises(StoreError, match="the store answered 500"):
        run.prepare(resume=False, named=None)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_begun_by_resume(train, words, here, store, url, monkeypatch, tmp_path):
    assert end_midway(train, words, store, url, 2, monkeypatch).code == 7
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "-o", url)
    assert told.code == 5 and "already holds a run" in told.err
    told = train(*words, "--resume", "--from", "step-2", "-o", url)
    assert told.code == 5 and f"error: {url} has no checkpoint\nhint: omit --from to begin with the first" in told.err
    told = train(*words, "--resume", "-o", url)
    assert told.code == 0 and f"note: {url} has no checkpoint yet: the run begins" in told.err
    require_same(require_whole(store, url), here)


@pytest.fixture
def at_claim(monkeypatch):
    """`at_claim(action)`: `action` is done once, when a run was prepared and is not yet claimed."""
    from train.runs.stored.stored import StoredRun

    def put(action):
        claim, left = StoredRun.claim, [action]

        def claimed(self, step):
            if left:
                left.pop()()
            claim(self, step)

        monkeypatch.setattr(StoredRun, "claim", claimed)

    return put


@pytest.mark.slow
def test_of_two_that_begin_one_run_one_ends(train, words, here, store, url, at_claim, monkeypatch, tmp_path):
    def other():
        with monkeypatch.context() as there:
            there.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "other"))
            assert train(*words, "--set", "seed=7", "-o", url).code == 0

    at_claim(other)
    told = train(*words, "-o", url)
    assert told.code == 5 and f"error: {url} already holds a run\nhint: add --resume" in told.err
    assert f"; or name another: -o {url}-2\n" in told.err
    assert require_whole(store, url)["lora.safetensors"] != here["lora.safetensors"], "that of the other"


@pytest.mark.slow
def test_of_two_that_continue_one_run_one_ends(train, words, here, store, url, at_claim, monkeypatch, tmp_path):
    assert end_midway(train, words, store, url, 14, monkeypatch).code == 7
    before = steps_of(objects(store, url))

    def other():
        with monkeypatch.context() as there:
            there.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "other"))
            assert train(*words, "--resume", "-o", url).code == 0

    at_claim(other)
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "-o", url)
    assert before != steps_of(here)
    assert told.code == 5 and f"error: another program trained in {url} meanwhile\nhint: run the same" in told.err
    require_same(require_whole(store, url), here)


def test_a_program_that_finds_another_writer_ends(train, words, store, url, tmp_path):
    """Before it overwrites anything."""
    asked = []

    def rule(method, path, before):
        if method == "PUT" and "step-000002/state.json" in path:
            asked.append(path)
            prefix = url.removeprefix("s3://bucket/")
            store.server.put(f"{prefix}/writer.json", json.dumps(
                {"format": "latentry/run-writer", "version": 1, "token": "f" * 32, "host": "other",
                 "since": "2026-11-23T12:00:00Z"}).encode())
        return ""

    store.proxy.rule = rule
    told = train(*words, "-o", url)
    assert told.code == 5, told.err
    assert f"error: another program continues {url}, or removed it: other, since 2026-11-23T12:00:00Z\n" in told.err
    assert f"nothing of it was overwritten; what was trained here is in {worked_on(url)}" in told.err
    there = require_whole(store, url)
    assert steps_of(there) == ["step-000002"] and "lora.safetensors" not in there
    store.server.delete(f"{url.removeprefix('s3://bucket/')}/writer.json")


def test_old_checkpoints_go_here_and_there(train, words, store, url, monkeypatch):
    told = train(*words, "--set", "checkpoint.keep=1", "-o", url)
    assert told.code == 0, told.err
    assert steps_of(require_whole(store, url)) == ["step-000006"]
    assert steps_of(files(worked_on(url))) == ["step-000006"]
    there = objects(store, url)
    assert not [name for name in there if "step-000002" in name and name.startswith("checkpoints")]


@pytest.mark.slow
def test_a_checkpoint_is_there_while_it_is_uploaded(train, words, store, url):
    """However slow the store: `keep` removes nothing that is being uploaded, and the newest comes after it."""
    store.proxy.rule = lambda method, path, before: (
        time.sleep(0.5) or "" if method == "PUT" and "checkpoints" in path else "")
    told = train(*changed(words, "checkpoint.keep=1", "checkpoint.every=1"), "-o", url)
    assert told.code == 0, told.err
    there = require_whole(store, url)
    assert steps_of(there) == steps_of(files(worked_on(url))) == ["step-000006"]
    assert not [one for one in timeless(there["log.jsonl"]) if one["event"] == "warning"]


@pytest.mark.slow
def test_from_sets_newer_ones_aside_in_the_store(train, words, here, store, url, monkeypatch, tmp_path):
    """With their pictures: those of steps 4 to 6, which are drawn no more."""
    assert train(*changed(words, *SAMPLES, "sample.every=1"), "-o", url).code == 0
    before, first = objects(store, url), os.environ["LATENTRY_REMOTE_DIR"]
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "--from", "step-3", "-o", url)
    assert told.code == 5 and f"{url} has no checkpoint 'step-3', expected one of: step-000002, step-" in told.err
    told = train(*words, "--resume", "--from", "step-2", "-o", url)
    assert told.code == 0, told.err
    there = require_whole(store, url)
    aside = {name for name in there if "aside" in name}
    pictures = {f"step-{step:06d}.png" for step in range(3, STEPS + 1)}
    assert {name.split("/")[1] for name in aside} == {
        "aside-step-000004", "aside-step-000006", *(f"aside-{name}" for name in pictures)}
    assert all(there[f"samples/aside-{name}"] == before[f"samples/{name}"] for name in pictures)
    assert {name for name in there if name.startswith("samples/")} - aside == {
        f"samples/step-{step:06d}.png" for step in range(3)}
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", first)  # where the pictures still are
    told = train(*words, "--resume", "--from", "step-4", "-o", url)
    assert told.code == 0, told.err
    again = objects(store, url)
    assert {name for name in again if name.startswith("samples/")} == {
        name for name in there if name.startswith("samples/")}


@pytest.mark.slow
def test_a_checkpoint_of_another_run_here_is_set_aside(train, words, here, store, url, monkeypatch, tmp_path):
    """One that was not uploaded, and another computer has continued the run since."""
    assert end_midway(train, words, store, url, 14, monkeypatch).code == 7
    first = os.environ["LATENTRY_REMOTE_DIR"]
    new_computer(monkeypatch, tmp_path)
    assert train(*words, "--resume", "-o", url, "--steps", 5).code == 0
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", first)
    told = train(*words, "--resume", "-o", url)
    assert told.code == 0, told.err
    assert "warning: a checkpoint here is not of the run that the store has, and was set aside: " in told.err
    assert (worked_on(url) / "checkpoints" / "aside-step-000006").is_dir()
    assert "step-000006" in steps_of(require_whole(store, url))


@pytest.mark.slow
def test_what_is_here_of_a_run_that_was_removed_there(train, words, store, url):
    assert train(*words, "-o", url).code == 0
    for name in list_objects(url):
        store.server.delete(f"{url.removeprefix('s3://bucket/')}/{name}")
    told = train(*words, "-o", url)
    assert told.code == 0, told.err
    assert f"warning: {url} is gone from the store; what was here of it was set aside: {worked_on(url)}.asi" in told.err


@pytest.mark.slow
def test_damage_is_not_continued_from(train, words, store, url, monkeypatch, tmp_path):
    assert train(*words, "-o", url).code == 0
    name = f"{url.removeprefix('s3://bucket/')}/checkpoints/step-000006/optimizer.safetensors"
    data = store.server.get(name)
    store.server.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    new_computer(monkeypatch, tmp_path)
    told = train(*words, "--resume", "-o", url)
    assert told.code == 7
    assert "optimizer.safetensors is damaged: its bytes do not match its digest (downloaded 3 times)" in told.err
    store.server.delete(name)
    told = train(*words, "--resume", "-o", url)
    assert told.code == 7 and "it is missing in the store" in told.err
    assert train(*words, "--resume", "--from", "step-4", "-o", url).code == 0


@pytest.mark.slow
def test_a_resume_finds_the_manifest_of_a_run_in_a_store(train, words, store, url, monkeypatch, tmp_path):
    assert train(*words, "-o", url).code == 0
    new_computer(monkeypatch, tmp_path)
    told = train("run", "--resume", "-o", url, "--steps", 7, "--device", "cpu")
    assert told.code == 0, told.err
    assert steps_of(require_whole(store, url))[-1] == "step-000007"


@pytest.mark.slow
def test_no_credentials_are_written(train, words, store, url):
    assert train(*words, "-o", url).code == 0
    there = [*objects(store, url).values(), *files(worked_on(url)).values()]
    assert not [data for data in there if b"a-secret" in data or b"a-key" in data]


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(train, words, store, url, monkeypatch, tmp_path):
    """A run in the store and the same one here, read on a computer that has nothing of it."""
    for place in (tmp_path / "cat", url):
        assert train(*changed(words, *SAMPLES), "-o", place).code == 0
    new_computer(monkeypatch, tmp_path, 3)
    store.proxy.forget()
    return tmp_path / "cat"


def test_commands_read_a_run_by_its_url(train, there, store, url, tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (("worst",), ("replay", "--step", 3)):
        told = train(command[0], url, *command[1:], "--json")
        assert told.code == 0, told.err
        assert told.json == train(command[0], there, *command[1:], "--json").json
    assert not store.proxy.count("GET", "lora.safetensors"), "no weights are downloaded for that"
    told = train("report", url, "--json")
    assert told.code == 0, told.err
    assert told.json["output"] == "report.html" and told.json["step"] == STEPS and told.json["status"] == "finished"
    assert url in (tmp_path / "report.html").read_text().replace("<wbr>", "")
    pictures = []
    for run, name in ((url, "there.png"), (there, "here.png")):
        told = train("sample", run, "-o", tmp_path / name, "--steps", 2, "--device", "cpu", "--quiet")
        assert told.code == 0, told.err
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    store.proxy.forget()
    assert train("sample", url, "-o", tmp_path / "there.png", "--steps", 2, "--device", "cpu", "--quiet").code == 0
    assert not store.proxy.count("GET", "lora.safetensors"), "the copy is as it was"
    assert not store.proxy.count("GET", "optimizer"), "only to continue a run"
    for run, name in ((url, "there"), (there, "here")):
        told = train("merge", run, "-o", tmp_path / name, "--quiet")
        assert told.code == 0, told.err
    assert files(tmp_path / "there").keys() == files(tmp_path / "here").keys()
    merged = []
    for run, name in ((url, "there-4"), (there, "here-4")):
        told = train("merge", f"{run}/checkpoints/step-000004", "-o", tmp_path / name, "--quiet")
        assert told.code == 0, told.err
        merged.append(load_file(tmp_path / name / "unet/diffusion_pytorch_model.safetensors"))
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0].keys() | merged[1].keys())
    assert not worked_on(url).exists(), "the place for training is not touched"


@pytest.mark.slow
def test_a_run_begins_with_weights_in_a_store(train, words, there, store, url, tmp_path):
    results = []
    for number, init in enumerate((f"{url}/lora.safetensors", url, f"{url}/checkpoints/step-000004", there)):
        told = train(*words, "--steps", 1, "--init-from", init, "-o", tmp_path / f"from{number}")
        assert told.code == 0, told.err
        results.append((tmp_path / f"from{number}" / "lora.safetensors").read_bytes())
    assert results[1] == results[3]


@pytest.mark.slow
def test_damaged_weights_in_a_store_have_a_hint_that_fits_what_reads_them(train, words, store, url, tmp_path):
    assert train(*words, "-o", url).code == 0
    name = f"{url.removeprefix('s3://bucket/')}/checkpoints/step-000006/lora.safetensors"
    data = store.server.get(name)
    commands = [(*words, "-o", tmp_path / "new", "--init-from", url),
                (*words, "-o", tmp_path / "new", "--init-from", f"{url}/checkpoints/step-000006"),
                ("sample", url, "-o", tmp_path / "a.png", "--device", "cpu")]
    for damage, said in ((lambda: store.server.put(name, data[:-1] + bytes([data[-1] ^ 1])), " is damaged: its bytes "),
                         (lambda: store.server.delete(name), ": it is missing in the store\n")):
        damage()
        for command in commands:
            told = train(*command)
            assert told.code == 7 and said in told.err, told.err
            assert told.err.endswith("hint: name undamaged weights, like those of another checkpoint of the run\n")


@pytest.mark.slow
def test_what_reading_refuses(train, there, url, tmp_path):
    told = train("report", f"{url}-2")
    assert told.code == 5 and f"error: {url}-2 is not a training run: it has no run.json\nhint: name the" in told.err
    told = train("merge", there, "-o", f"{url}-merged")
    assert told.code == 2 and f"{url}-merged is in an object store, expected a path on this computer" in told.err
    told = train("sample", url, "--checkpoint", "step-5", "-o", tmp_path / "a.png")
    assert told.code == 5 and f"{url} has no checkpoint\nhint: show" in told.err


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("point", ["run.json", "writer.json", "step-000002/lora", "step-000002/state",
                                   "step-000004/opt", "losses.bin", "README.md"])
def test_a_killed_process_leaves_what_is_whole(train, words, here, store, url, tmp_path, monkeypatch, point):
    store.proxy.rule = lambda method, path, before: "hang" if method == "PUT" and point in path else ""
    process = subprocess.Popen([sys.executable, "-m", "train", *map(str, words), "-o", url], env=environment(),
                               stderr=subprocess.PIPE, text=True)
    assert store.proxy.hung.wait(90), process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store.proxy.forget()
    time.sleep(0.5)
    if point == "run.json":
        for name in list_objects(url):  # the request may have arrived
            store.server.delete(f"{url.removeprefix('s3://bucket/')}/{name}")
        told = train(*words, "-o", url)
        assert told.code == 0, told.err
        require_same(require_whole(store, url), here)
    else:
        resumed_elsewhere(train, words, store, url, tmp_path, monkeypatch, here)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_uploads_its_checkpoint(train, words, here, store, url, tmp_path, monkeypatch, number):
    words = (*changed(words, "checkpoint.every=1000"), "--steps", 2000)
    process = subprocess.Popen([sys.executable, "-m", "train", *map(str, words), "-o", url], env=environment(),
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while '"step", "step": 2,' not in ((worked_on(url) / "log.jsonl").read_text()
                                       if (worked_on(url) / "log.jsonl").exists() else ""):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    there = require_whole(store, url)
    (step,) = steps_of(there)
    assert timeless(there["log.jsonl"])[-1] == {"event": "stopped", "step": int(step[5:])}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [(), ("--shard",), ("--shard", "--set", "method=full")],
                         ids=["whole", "divided", "divided-full"])
def test_ranks_train_one_run(train, words, store, url, tmp_path, monkeypatch, shared):
    words = [*words, *shared]
    told = torchrun(2, *words, "-o", url)
    assert told.returncode == 0, told.stderr
    there = require_whole(store, url)
    assert steps_of(there) == ["step-000002", "step-000004", "step-000006"] and "README.md" in there
    new_computer(monkeypatch, tmp_path)
    told = torchrun(2, *words, "--resume", "--steps", 8, "-o", url)
    assert told.returncode == 0, told.stderr
    assert steps_of(require_whole(store, url))[-1] == "step-000008"
    losses = [one["loss"] for one in timeless(objects(store, url)["log.jsonl"]) if one["event"] == "step"]
    assert len(losses) == 8


def test_a_start_that_failed_while_it_loaded_is_no_other_run(tmp_path):
    from train.runs.stored.bring import make_way

    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "heartbeat.json").write_text("{}")
    assert make_way("s3://bucket/cat", tmp_path / "cat") == [] and (tmp_path / "cat").is_dir()
    (tmp_path / "cat" / "run.json").write_text("{}")
    assert len(make_way("s3://bucket/cat", tmp_path / "cat")) == 1 and not (tmp_path / "cat").exists()


def test_requests_are_for_the_computer_that_trains(train, words, url):
    from prep.runs.heartbeat import NAME
    from train.runs.heart import Heart
    from train.runs.log import Log

    assert train(*words, "-o", url, "--steps", 1).code == 0
    result = train("stop", url)
    assert result.code == 5 and f"{url} is in an object store, and no process of this computer trains it" in result.err
    assert f"; it was last trained on {os.uname().nodename}, since " in result.err and "hint: run this " in result.err
    folder = worked_on(url)
    with Log(folder / "log.jsonl", lambda event: None) as log, Heart(folder, log) as heart:
        assert (folder / NAME).is_file() and NAME not in others(folder)
        assert train("sample-now", url).code == 0 and heart.sample.wait(30)
