"""The commands as one types them: exit codes, streams, JSON, files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pictures import draw
from PIL import Image
from safetensors import safe_open
from torch._inductor import cpp_builder

from prep.fs.place import Local
from prep.manifest.document import read_manifest
from train import evaluate
from train.cli.sample import unused_picture
from train.memory import forecast
from train.models.denoiser import load

SCHEMAS = Path(__file__).parents[3] / "manifests" / "schemas"
SMALL = ("--device", "cpu", "--set", "lora.rank=2", "--set", "sample.steps=2", "--set", "sample.size=[64, 64]")


@pytest.fixture(autouse=True)
def counted_once(monkeypatch):
    """Counting a step's memory takes seconds; what it is says tests/train/memory."""
    count, counted = forecast.count, _counted

    def once(found, room, world=1):
        return counted.get(room.kind) or counted.setdefault(room.kind, count(found, room, world))

    monkeypatch.setattr(forecast, "count", once)


_counted: dict[str, object] = {}


def run(train, made, *options, steps=3):
    return train("run", made.path, "-o", made.root / "run", "--steps", steps, *SMALL, *options)


def test_a_run_goes_on_when_nobody_reads_stderr_any_more(train, make, monkeypatch):
    """As with `2>&1 | tee log` when tee dies. Exit code 0 without a result would be taken for success."""
    made, (read, write) = make(), os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as broken:  # noqa: PTH123  # a descriptor
        monkeypatch.setattr(sys, "stderr", broken)
        result = run(train, made)
        monkeypatch.undo()
    assert result.code == 0 and result.out.endswith("lora.safetensors\n")
    assert (made.root / "run" / "lora.safetensors").is_file()
    log = [json.loads(line)["event"] for line in (made.root / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1] == "end" and log.count("step") == 3


def test_check_says_how_long_sequences_with_references_are(train, make):
    """Of the largest shape that is trained; nothing is said without references."""
    assert "sequence" not in train("check", make().path, "--steps", 8).out
    result = train("check", make(references=((64, 64), (48, 32))).path, "--steps", 8)
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if "sequence" in line]
    side = 8  # pixels of a cell, which sd15 takes one by one
    alone, more = (64 // side) ** 2, (64 // side) ** 2 + 48 * 32 // side**2
    assert line == (f"longest sequence: 64x64 with 2 references of 64x64 and 48x32, {alone + more} tokens of pictures, "
                    f"{(alone + more) / alone:.1f} times those without")


def test_check_says_what_would_be_trained(train, make):
    path = make().path
    result = train("check", path, "--batch-size", 2, "--steps", 8)
    assert result.code == 0 and result.err == ""
    what, on, *plan = result.out.splitlines()
    assert what.startswith("a LoRA of rank 16 on ")
    assert what.endswith("tiny (sd15, epsilon), 18,432 trained parameters")
    assert on == ("7 training samples and 2 validation samples in 2 buckets: "
                  "latent bfloat16, mask uint8 for 6 of 9 (used), text bfloat16")
    assert plan == ["7 samples per epoch, in 4 steps with up to 2 samples, in micro-batches with up to 2",
                    "1 step of the first epoch has fewer than 2 samples (1), so its gradient is smaller",
                    plan[2], "8 steps = 2.0 epochs; ready to train", plan[4]]
    assert plan[4].startswith("estimated memory at the peak: ")
    assert plan[2].startswith("estimated share of the run, in forward passes: training ")
    assert "(2 samples, 2 times), sample pictures " in plan[2]
    result = train("check", path, "--method", "full", "--no-masked", "--batch-size", 2, "--underfill", "drop")
    assert result.out.startswith("every weight of ")
    assert "mask uint8 for 6 of 9 (not used: loss.masked is false), text" in result.out
    assert "\ndropped: 80/" in result.out


def test_check_says_with_which_micro_batch_fewer_steps_are_short(train, make):
    path = make(counts=(6, 6)).path
    told = train("check", path, "--batch-size", 4).out.splitlines()
    assert told[3] == "2 steps of the first epoch have fewer than 4 samples (2), so their gradients are smaller"
    assert told[4] == "with --micro-batch 2 there are no such steps"
    assert told[6].endswith("; ready to train")
    assert "such steps" not in train("check", path, "--batch-size", 4, "--micro-batch", 2).out
    assert "such steps" not in train("check", path, "--batch-size", 4, "--world-size", 4).out


def test_check_says_where_a_run_without_o_would_stop(train, make, monkeypatch):
    """runs/NAME already holds a run, is something else, or cannot be written: a note, as nobody asked for it."""
    made = make()
    monkeypatch.chdir(made.root)
    place, told = Path("runs") / made.path.stem, "note: train run without -o would stop: "
    assert told not in train("check", made.path).out
    assert train("run", made.path, "--steps", 1, *SMALL, "--set", "sample.every=0").code == 0
    result, refused = train("check", made.path), train("run", made.path, "--steps", 1, *SMALL)
    said = f"{place} already holds a run; add --resume to continue it; or name another: -o {place}-2"
    assert result.code == 0 and result.out.endswith(f"\n{told}{said}\n") and "ready to train" in result.out
    assert refused.code == 5 and refused.err.endswith("error: {}\nhint: {}\n".format(*said.split("; ", 1)))
    report = train("check", made.path, "--json").json
    assert report["ok"] and report["notes"] == [f"train run without -o would stop: {said}"]
    assert told not in train("check", made.path, "-o", "other").out
    (made.root / f"{place}-2").mkdir()
    (typed,) = re.findall("name another: (.*)", train("run", made.path, "--steps", 1, *SMALL).err)
    assert typed == f"-o {place}-3"
    assert train("run", made.path, "--steps", 1, *SMALL, "--set", "sample.every=0", *typed.split()).code == 0
    assert (made.root / f"{place}-3" / "lora.safetensors").is_file()
    shutil.rmtree(place)
    place.mkdir()
    (place / "mine.txt").touch()
    assert f"{told}{place} is not empty and is not a training run; name another" in train("check", made.path).out
    shutil.rmtree(place)
    monkeypatch.setattr("train.runs.directory.os.access", lambda path, mode: not mode & os.W_OK)  # for root, too
    result = train("check", made.path)
    assert result.code == 0 and f"{told}run {place} cannot be written: no permission to write in " in result.out


def test_check_says_how_many_masks_are_black_everywhere(prep, train, tiny_model, tmp_path):
    for number in range(3):
        draw(tmp_path / "photos" / f"{number}.png", (96, 96), seed=number).with_suffix(".txt").write_text("a thing")
        if number:
            Image.new("L", (96, 96), 255 * (number - 1)).save(tmp_path / "photos" / f"{number}-masklabel.png")
    prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
         "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--mask", "sidecar")
    result = train("check", tmp_path / "m.json", "--masked")
    assert "mask uint8 for 2 of 3, 1 of them entirely black (used), text" in result.out, result.err


def test_check_reports_as_json(train, make):
    result = train("check", make().path, "--batch-size", 2, "--underfill", "repeat", "--json")
    assert result.code == 0
    assert result.json == {"format": "latentry/check", "version": 1, "ok": True, "faults": [], "masked": True,
                           "steps_per_epoch": 4, "step_sizes": {"2": 4}, "left_out": [],
                           "repeated": result.json["repeated"], "notes": [], "shares": result.json["shares"],
                           "memory": result.json["memory"]}
    assert sum(result.json["shares"][part] for part in (
        "training", "validation", "sampling", "evaluation")) == pytest.approx(1)
    assert len(result.json["repeated"]) == 1 and result.json["repeated"][0].startswith("80/")


def test_check_tells_what_nodes_take(train, make, capsys):
    path = make().path
    result = train("check", path, "--world-size", 8, "--nodes", 2, "--node-cache", "1KB", "--samples", "1e6")
    assert result.code == 3, "train run would refuse it"
    assert "batch_size is 4, but 8 ranks divide a step's samples\nhint: --batch-size 8 or more" in result.err
    result = train("check", path, "--world-size", 8, "--nodes", 2, "--node-cache", "1KB", "--samples", "1e6",
                   "--batch-size", 8, "--micro-batch", 4)
    assert result.code == 0
    assert re.search(r"8 ranks on 2 nodes: 1,000,00\d samples and 125,00\d steps an epoch; planning a step takes "
                     r"\d+\.\d ms, the index [0-9.]+ MiB of a node's memory", result.out)
    assert "4 ranks have no sample of a micro-batch" in result.out and "again and again" in result.out
    assert re.search(r"a node downloads [0-9.]+ [KM]iB for its first step \(0\.0 s at 1 GB/s\), about", result.out)
    told = train("check", path, "--world-size", 2, "--node-cache", "1G", "--json").json["outlook"]
    assert told["later"] == 0 and told["first"] == told["bytes"] > 0 and told["samples"] == 7
    assert "2 ranks on 1 node: 7 samples" in train("check", path, "--world-size", 2, "--node-cache", "1G").out
    said = train("check", path, "--world-size", 2, "--node-cache", "1G", "--store-latency", "30ms").out
    seconds = ceil(told["requests"] / 32) * 0.03
    assert (f"the headers of all shards, {told['requests']} requests for " in said
            and f": {seconds:.1f} s, if the store answers in 30 ms" in said and "is the limit" not in said)
    said = train("check", path, "--world-size", 2, "--samples", 1e9, "--store-latency", "30ms").out
    assert re.search(r"tables of [0-9.]+ [GT]iB and the headers of all shards, [0-9,]{11,} requests for [0-9.]+ "
                     r"[GT]iB: [0-9.]+ days, if the store answers", said)
    assert ("note: reading the headers of all shards is the limit of the start: a cache of larger shards has fewer "
            "(prep compact --shard-mib), and so have several manifests") in said
    assert "note: memory for the index is the limit: each rank holds that of all samples; fewer ranks" in said
    for given, said in [(("--samples", 9), "--node-cache or --samples is given without --world-size"),
                        (("--nodes", 2), "--nodes is 2, but --world-size is not given"),
                        (("--world-size", 8, "--nodes", 3), "--world-size is 8, expected a multiple of --nodes, which"),
                        (("--world-size", 2, "--samples", "inf"), "Invalid value for '--samples'"),
                        (("--world-size", 2, "--store-latency", "1s"), "--store-latency is given without --node-cache"),
                        (("--world-size", 2, "--samples", 9, "--store-latency", "3h"),
                         "--store-latency is '3h', expected a time like 30ms or 0.1s"),
                        (("--world-size", 2, "--node-cache", "much"), "--node-cache is 'much', expected a size like")]:
        result = train("check", path, *given)
        assert result.code in (2, 3) and said in result.err


def test_check_ends_with_the_first_fault_s_code(train, make, tmp_path):
    path = make(masks=False).path
    result = train("check", path, "--masked", "--batch-size", 64, "--underfill", "drop")
    assert result.code == 7
    assert result.err.startswith("error: manifest has no field 'mask', but the settings ask for masked loss\nhint: ")
    assert "drops all 7 samples" in result.err
    result = train("check", path, "--masked", "--json")
    assert result.code == 7 and result.err == "" and not result.json["ok"]
    assert result.json["faults"][0]["what"].startswith("manifest has no field 'mask'")


@pytest.mark.parametrize(("options", "code", "said"), [
    (["--set", "lora.rnak=3"], 3, "did you mean 'rank'"),
    (["--set", "rank"], 3, "--set is 'rank', expected NAME=VALUE"),
    (["--steps", "3", "--epochs", "2"], 3, "steps is 3 and epochs is 2, expected one of them"),
    (["-c", "gone.toml"], 3, "cannot read gone.toml"),
    (["--model", "/nowhere"], 6, "/nowhere"),
    (["--batch-size", "64", "--underfill", "drop"], 8, "drops all 7 samples"),
    (["--no-such-option"], 2, "No such option"),
])
def test_faults_end_a_run_before_it_makes_a_directory(train, make, options, code, said):
    made = make()
    result = train("run", made.path, "-o", made.root / "run", *options)
    assert result.code == code and said in result.err and result.out == ""
    assert not (made.root / "run").exists()


def test_a_device_that_is_not_there_is_said(train, make):
    made = make()
    result = train("run", made.path, "-o", made.root / "run", "--device", "cuda:7")
    assert result.code == 2 and "--device is 'cuda:7', but this machine has no such device" in result.err
    expected = "expected auto, cpu, cuda, cuda:N or mps: torch finds cpu"
    for words in (("run", made.path, "-o", made.root / "run"), ("run", "gone.json"),
                  ("sample", "gone", "-o", made.root / "new" / "a.png")):
        result = train(*words, "--device", "gpu")
        said = f"error: --device is 'gpu', {expected}.*\nhint: a GPU of NVIDIA or AMD is --device cuda\n"
        assert result.code == 2 and re.fullmatch(said, result.err), "before anything is read"
    assert not (made.root / "new").exists()
    assert f"--device is 'gpu', {expected}" in train("check", made.path, "--device", "gpu").err
    assert not (made.root / "run").exists()


def test_an_optimizer_that_needs_another_device(train, make):
    made, paged = make(), ("--set", "optimizer.name=adamw-8bit-paged")
    for words in (("check", made.path), ("run", made.path, "-o", made.root / "run"),
                  ("check", made.path, "--device", "cpu")):
        result = train(*words, *paged)
        assert result.code == 3
        assert "optimizer.name is 'adamw-8bit-paged', which needs cuda, but the device is cpu" in result.err
    assert not (made.root / "run").exists()


def test_check_finds_that_torch_compile_lacks_its_compiler(train, make, tmp_path, monkeypatch):
    """With the words of run, which loads no model before."""
    made = make()
    words = (made.path, "--device", "cpu", "-o", made.root / "run")
    with cpp_builder.config.patch({"cpp.cxx": (None, str(tmp_path / "no g++"))}):
        cpp_builder.cpp_compiler_search.cache_clear()
        results = [train(command, *words, "--compile") for command in ("check", "run")]
        results.append(train("check", *words, "--set", "compile=true"))
        assert train("check", *words, "--no-compile").code == 0
    cpp_builder.cpp_compiler_search.cache_clear()
    for result in results:
        assert result.code == 3, result.err
        assert "error: compile is on, but torch.compile failed: No working C++ compiler found in " in result.err
        assert result.err.endswith("\nhint: --no-compile, also with --resume; or install what it needs, like a C++ "
                                   "compiler\n")
    assert results[0].err == results[1].err[-len(results[0].err):] and not (made.root / "run").exists()
    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", lambda search: "g++")
    assert train("check", *words, "--compile").code == 0


def test_check_finds_what_run_would_refuse_of_its_place_and_device(train, make, monkeypatch):
    made = make()
    result = train("check", made.path, "--device", "cuda:7", "-o", made.root / "cache" / "run")
    assert result.code == 5 and "--device is 'cuda:7', but this machine has no such device" in result.err
    assert " lies inside cache " in result.err
    assert "ready to train" not in result.out
    run(train, made)
    result = train("check", made.path, "-o", made.root / "run", "--json")
    assert result.code == 5 and "already holds a run" in result.json["faults"][0]["what"]
    monkeypatch.setattr("train.runs.directory.shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    for result in (train("check", made.path), train("run", made.path, "-o", made.root / "other")):
        assert result.code == 5 and " has 1 byte of free space, expected " in result.err
    assert not (made.root / "other").exists()


@pytest.mark.slow
def test_sample_works_from_the_result_when_checkpoints_are_gone(train, make):
    made = make()
    for method, more in (("lora", ["--set", "ema.decay=0.5"]), ("full", [])):
        folder = made.root / method
        assert train("run", made.path, "-o", folder, "--steps", 3, *SMALL, "--method", method, "--lr", "0.01",
                     *more).code == 0
        grids = [made.root / f"{method}-{number}.png" for number in range(2)]
        assert train("sample", folder, "-o", grids[0], "--device", "cpu", "--compare").code == 0
        shutil.rmtree(folder / "checkpoints")
        result = train("sample", folder, "-o", grids[1], "--device", "cpu", "--compare")
        assert result.code == 0, result.err
        assert grids[0].read_bytes() == grids[1].read_bytes()
    result = train("sample", folder, "-o", grids[1], "--device", "cpu", "--checkpoint", "step-3")
    assert result.code == 5 and f"{folder} has no checkpoint\n" in result.err


def test_run_says_its_result_on_stdout_and_everything_else_on_stderr(train, make):
    made = make()
    result = run(train, made)
    assert result.code == 0, result.err
    assert result.out == f"{made.root / 'run' / 'lora.safetensors'}\n"
    assert "trained parameters on cpu" in result.err and "step 3: validation loss" in result.err
    before = result.err[: result.err.index("3 steps, 2 per epoch")].splitlines()
    checked = [line for line in train("check", made.path, "--steps", 3, *SMALL).out.splitlines()
               if not line.startswith("estimated memory")]  # which takes seconds
    assert before[: len(checked)] == checked
    assert before[-1] == f"writes to {made.root / 'run'}; a checkpoint takes about 27.2 KiB, the newest 3 are kept"
    assert (made.root / "run" / "samples" / "step-000003.png").is_file()


@pytest.mark.slow
def test_quiet_says_only_warnings(train, make):
    made = make()
    (made.root / "prompts.txt").write_text("a green dragon\n")
    result = run(train, made, "--quiet", "--json")
    assert result.code == 0 and result.json["event"] == "end"
    assert {line.partition(":")[0] for line in result.err.splitlines()} == {"warning"}
    assert "the prompt in line 1 of " in result.err and "a green dragon" not in result.err


def test_a_second_run_needs_resume_and_keeps_its_settings(train, make):
    made = make()
    assert run(train, made, "--lr", "0.01").code == 0
    again = run(train, made)
    assert again.code == 5 and "hint: add --resume to continue it" in again.err
    resumed = train("run", made.path, "-o", made.root / "run", "--resume", "--steps", 4)
    assert resumed.code == 0, resumed.err
    facts = json.loads((made.root / "run" / "run.json").read_text())["config"]
    assert facts["optimizer"]["lr"] == 0.01 and facts["lora"]["rank"] == 2 and facts["steps"] == 4
    other = run(train, made, "--resume", "--set", "caption_dropout=0.5", steps=5)
    assert other.code == 3 and "caption_dropout is 0.5, but the checkpoint was trained with 0.0" in other.err
    other = run(train, made, "--resume", "--lr", "0.02", steps=5)
    assert other.code == 0 and "note: optimizer.lr is 0.02, was 0.01\n" in other.err


def test_a_resume_finds_the_manifest_of_its_run(train, make, monkeypatch):
    made = make()
    assert run(train, made).code == 0
    resumed = train("run", "--resume", "-o", made.root / "run", "--steps", 4)
    assert resumed.code == 0 and "step 4: checkpoints/step-000004" in resumed.err, resumed.err
    copy = made.path.rename(made.root / "elsewhere.json")
    monkeypatch.chdir(made.root.parent)
    place = made.root.relative_to(made.root.parent)
    gone = train("run", "--resume", "-o", place / "run", "--steps", 5)
    assert gone.code == 7 and "the manifest of " in gone.err and " is gone: " in gone.err
    assert gone.err.endswith(f"; or name where it is now: train run MANIFEST --resume -o {place}/run\n")
    (moves,) = re.findall("hint: put the run's copy of it back: (cp .*); or name", gone.err)
    subprocess.run(["sh", "-c", moves], check=True)
    assert train("run", "--resume", "-o", place / "run", "--steps", 5).code == 0
    assert train("run", copy, "--resume", "-o", place / "run", "--steps", 6).code == 0


@pytest.mark.parametrize("words", [(), ("--resume",), ("-o", "run")])
def test_a_run_needs_a_manifest_unless_it_has_one(train, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    result = train("run", *words)
    assert (result.code, result.err) == (2, "error: no MANIFEST is given\nhint: train run MANIFEST is for a new run; "
                                            "train run --resume -o RUN takes that of the run that is continued\n")
    assert not list(tmp_path.iterdir())


def interrupt_after(monkeypatch, step, times=1):
    """Presses Ctrl-C as soon as so many steps are made."""
    when_step(monkeypatch, step, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(times)])


def test_ctrl_c_is_answered_once_with_what_is_saved_and_how_to_go_on(train, make, monkeypatch):
    made = make()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        result = run(train, made)
    saved = f"interrupted after step 2; saved {made.root / 'run'}/checkpoints/step-000002. "
    assert result.code == 130 and result.err.endswith(f"{saved}Run the same command again with --resume to continue\n")
    assert result.err.count("--resume") == 1 and "stopped" not in result.err
    assert (made.root / "run" / "checkpoints" / "step-000002").is_dir()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        result = run(train, made, "--resume", "--from", "2", "--json", steps=5)
    assert result.err.endswith("step-000004. Run the same command again without --from to continue\n")
    assert result.json["error"] == {"exit_code": 130, "kind": "interrupted", "message":
                                    f"interrupted after step 4; saved {made.root / 'run'}/checkpoints/step-000004",
                                    "hint": "run the same command again without --from to continue"}
    assert run(train, made, "--resume", steps=5).code == 0


def when_step(monkeypatch, step, act):
    """Acts as soon as so many steps are made."""
    from train.runs.watch import RunDisplay

    plain = RunDisplay.take

    def take(self, event):
        plain(self, event)
        if (event["event"], event["step"]) == ("step", step):
            act()

    monkeypatch.setattr(RunDisplay, "take", take)


def asking(folder, *commands):
    """Types these commands, and returns once the thread beside the steps has taken them; what they printed."""
    from typer.testing import CliRunner

    from prep.runs.requests import request_path
    from train.cli.main import app

    said = [CliRunner().invoke(app, [*command.split(), str(folder)], catch_exceptions=False) for command in commands]
    until = time.monotonic() + 30
    while any(request_path(folder, kind).exists() for kind in ("stop", "sample")) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)  # it removes a request, and then sets what the loop looks at
    return [one.output for one in said]


def test_pictures_that_are_asked_for_while_others_are_drawn_are_drawn_as_well(train, make, monkeypatch):
    made, said = make(), []
    draw = evaluate.pictures

    def asked_again(*args, **kwargs):
        if not said:
            said.extend(asking(made.root / "run", "sample-now"))
        return draw(*args, **kwargs)

    monkeypatch.setattr(evaluate, "pictures", asked_again)
    with monkeypatch.context() as patch:
        when_step(patch, 2, lambda: asking(made.root / "run", "sample-now"))
        assert run(train, made, "--set", "sample.every=0", "--set", "validation.every=0", steps=4).code == 0
    steps = [event["step"] for event in map(json.loads, (made.root / "run" / "log.jsonl").read_text().splitlines())
             if event["event"] == "sample"]
    assert steps == [2, 3]


def test_a_run_is_stopped_and_draws_pictures_when_it_is_asked(train, make, monkeypatch):
    made, said = make(), []
    folder, more = made.root / "run", ("--set", "sample.every=0", "--set", "validation.every=0")
    with monkeypatch.context() as patch:
        when_step(patch, 2, lambda: said.extend(asking(folder, "sample-now")))
        assert run(train, made, *more, steps=4).code == 0
    drawn = [event for event in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
             if event["event"] == "sample"]
    assert [event["step"] for event in drawn] == [2] and (folder / "samples" / "step-000002.png").is_file()
    assert said == [f"process {os.getpid()} on {os.uname().nodename} draws sample pictures after the step that it is "
                    "at\n"]
    with monkeypatch.context() as patch:
        when_step(patch, 5, lambda: said.extend(asking(folder, "stop --json")))
        result = run(train, made, *more, "--resume", steps=9)
    assert result.code == 130 and result.err.endswith(
        f"interrupted after step 5; saved {folder}/checkpoints/step-000005. Run the same command again with --resume "
        "to continue\n")
    answer = json.loads(said[-1])
    Draft202012Validator(json.loads((SCHEMAS / "request.schema.json").read_text())).validate(answer)
    assert answer.pop("step") <= 5 and answer.pop("phase")  # of the last heartbeat
    assert answer == {"format": "latentry/request", "version": 1, "request": "stop", "pid": os.getpid(),
                      "host": os.uname().nodename}
    assert not list(folder.glob("*.request")) and not (folder / "heartbeat.json").exists()
    result = train("stop", folder)
    assert result.code == 5 and result.err == (
        f"error: no process trains {folder}\nhint: train run --resume -o {folder} continues it, unless it has "
        "finished\n")
    assert run(train, made, *more, "--resume", steps=6).code == 0
    result = run(train, made, *more, "--resume", steps=6)
    assert result.code == 0 and "already finished: 6 of 6 steps; lora.safetensors" in result.err


def test_a_start_that_was_killed_while_it_loaded_leaves_room_for_the_next(train, make):
    made = make()
    (made.root / "run").mkdir()
    (made.root / "run" / "heartbeat.json").write_text("{}")
    (made.root / "run" / "stop.request").write_text("x")
    assert run(train, made, "--set", "sample.every=0", "--set", "validation.every=0").code == 0


def test_stop_of_what_is_no_run(train, make, tmp_path):
    result = train("stop", tmp_path)
    assert result.code == 5 and "is not a training run" in result.err
    assert train("sample-now", tmp_path / "none").code == 5


def test_a_second_ctrl_c_says_no_more_than_is_known(train, make, monkeypatch):
    made = make()
    monkeypatch.setattr("train.runs.heart.AGAIN", 0.0)
    interrupt_after(monkeypatch, 2, times=2)
    result = run(train, made)
    assert result.code == 130 and result.err.endswith(
        "interrupted; finished work is kept. Run the same command again with --resume to continue, or as it is if "
        "there was no checkpoint yet\n")


def test_check_says_how_a_run_would_be_continued_and_writes_nothing(train, make):
    made = make()
    assert run(train, made, "--set", "checkpoint.every=2", "--set", "sample.every=0").code == 0
    before = bytes_of(made.root)
    words = ("check", made.path, "-o", made.root / "run", "--resume", "--device", "cpu")
    place, more = made.root / "run", ("--steps", 8, "--lr", "0.02", "--set", "caption_dropout=0.5")
    told = train(*words).out.splitlines()
    assert told[0] == f"continues {place} from step-000003 and has no step left"
    again = train("check", *words[2:]).out.splitlines()
    one, other = ([text for text in lines if "memory" not in text] for lines in (told, again))  # what is free now
    assert other == one and len(told) == len(again), "the run knows its manifest"
    assert told[1].startswith("a LoRA of rank 2 on "), "the settings are the run's"
    planned = train(*words, "--world-size", 2, "--samples", 1000)
    assert planned.code == 0 and "\n2 ranks on 1 node: " in planned.out, planned.err
    told = train(*words, *more, "--adopt", "--from", "step-2")
    assert told.code == 0 and told.out.startswith(f"continues {place} from step-000002 to step 8\n"), told.err
    assert told.out.endswith(
        "\nnote: steps is 8, was 3\nnote: optimizer.lr is 0.02, was 0.0001\n"
        "note: accepted: caption_dropout is 0.5, was 0.0\n"
        "note: the run would set newer checkpoints aside: step-000003\n")
    told = train(*words, *more, "--adopt", "--json").json
    assert told["ok"] and told["resume"] == {
        "checkpoint": "step-000003", "step": 3, "newer": [], "adopted": ["caption_dropout is 0.5, was 0.0"],
        "changes": ["steps is 8, was 3", "optimizer.lr is 0.02, was 0.0001"]}
    assert bytes_of(made.root) == before


def test_check_refuses_to_resume_what_run_refuses(train, make, monkeypatch):
    """With its words and its exit code, before anything is written."""
    made = make()
    monkeypatch.chdir(made.root)
    assert run(train, made, "--set", "sample.every=0", "--set", "validation.every=0", steps=3).code == 0
    before = bytes_of(made.root)
    for options in (
            ["--resume", "--set", "caption_dropout=0.5"], ["--resume", "--rank", "4"], ["--resume", "--steps", "2"],
            ["--resume", "--from", "step-9"], ["--resume", "--init-from", "x"], ["--from", "step-3"], ["--adopt"],
            ["--resume", "--model", "/nowhere"], ["--resume", "-o", "other"], ["--resume", "--device", "cuda:7"]):
        words = (made.path, "-o", made.root / "run", *options)
        checked, refused = train("check", *words), train("run", *words)
        assert checked.code == refused.code != 0, options
        assert checked.err and refused.err.endswith(checked.err) and bytes_of(made.root) == before, options
        assert "ready to train" not in checked.out, options


def test_check_finds_data_and_checkpoints_that_do_not_fit_a_resumed_run(train, make, tmp_path, monkeypatch):
    made = make()
    assert run(train, made, "--set", "sample.every=0").code == 0
    words = ("check", made.path, "-o", made.root / "run", "--resume", "--device", "cpu")
    monkeypatch.setattr("train.runs.directory.shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    result = train(*words, "--rank", 4)  # every fault at once
    assert result.code == 5 and " has 1 byte of free space" in result.err and "lora.rank is 4, but" in result.err
    monkeypatch.undo()
    make(counts=(5, 3))
    result = train(*words)
    assert result.code == 7 and "the data differ from those that step-000003 was trained on: " in result.err
    result = train(*words, "--adopt")
    assert result.code == 0 and "\nnote: accepted: " in result.out, result.err
    (made.root / "run" / "checkpoints" / "step-000003" / "lora.safetensors").unlink()
    result = train(*words, "--json")
    assert result.code == 7 and not result.json["ok"] and result.json["steps_per_epoch"] == 0
    assert "lora.safetensors" in result.json["faults"][0]["what"]


def bytes_of(root):
    """Every file below, its bytes and its time."""
    return {path.relative_to(root): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
            for path in root.rglob("*")}


def test_adopted_changes_are_in_the_result(train, make):
    made = make()
    assert run(train, made).code == 0
    done = run(train, made, "--resume", "--adopt", "--set", "caption_dropout=0.5", steps=4)
    assert done.code == 0 and "note: accepted: caption_dropout is 0.5, was 0.0\n" in done.err
    with safe_open(made.root / "run" / "lora.safetensors", "pt") as file:
        assert json.loads(file.metadata()["latentry.adopted"]) == [
            {"changes": ["caption_dropout is 0.5, was 0.0"], "step": 3}]


@pytest.mark.slow
def test_a_run_goes_on_from_an_older_checkpoint(train, make):
    made = make()
    assert run(train, made, "--set", "checkpoint.every=1").code == 0
    done = run(train, made, "--resume", "--from", "step-1", "--set", "checkpoint.every=1")
    assert done.code == 0 and "a newer checkpoint was set aside: checkpoints/aside-step-000002" in done.err


@pytest.mark.slow
def test_the_way_back_to_a_checkpoint_that_was_set_aside(train, make):
    """By the commands of the hint, twice: what took its place meanwhile is set aside in turn."""
    made = make()
    every, folder = ("--set", "checkpoint.every=1"), made.root / "run" / "checkpoints"
    assert run(train, made, *every, "--lr", "0.01").code == 0
    first = (folder / "step-000003" / "lora.safetensors").read_bytes()
    done = run(train, made, *every, "--resume", "--from", "checkpoints/step-000001", "--lr", "0.02")
    assert done.code == 0 and "(--from aside-step-000003 tells the way back)" in done.err
    second = (folder / "step-000003" / "lora.safetensors").read_bytes()
    assert first != second
    for name, wanted in (("aside-step-000003", first), (f"{folder}/aside-2-step-000003", second)):
        refused = run(train, made, "--resume", "--from", name)
        assert refused.code == 5 and (
            f"error: checkpoint {Path(name).name} of {made.root / 'run'} was set aside, expected one of: step-000001, "
            "step-000002, step-000003\nhint: mv ") in refused.err
        (moves,) = re.findall("hint: (mv .*), then --resume --from step-000003: the log", refused.err)
        subprocess.run(["sh", "-c", moves], check=True)
        assert (folder / "step-000003" / "lora.safetensors").read_bytes() == wanted
        done = run(train, made, "--resume", "--from", "step-000003", steps=3)
        assert done.code == 0, done.err
    assert "aside-9-step-000003', expected one of" in run(train, made, "--resume", "--from", "aside-9-step-000003").err


def test_a_run_that_went_on_meanwhile_is_left_alone(train, make, monkeypatch):
    from train.runs import directory

    made = make()
    assert run(train, made, "--set", "checkpoint.every=1").code == 0
    plain = directory.lock_run

    def others(local, manifest):
        shutil.rmtree(local.path / "checkpoints" / "step-000003")
        return plain(local, manifest)

    monkeypatch.setattr("train.runs.directory.lock_run", others)
    result = run(train, made, "--resume", steps=5)
    assert result.code == 5 and f"error: another program trained in {made.root / 'run'} meanwhile\n" in result.err
    assert "hint: run the same command again" in result.err


def test_edited_prompts_never_end_a_run(train, make):
    """Gone from the start, and the pictures are still made."""
    made = make()
    (made.root / "prompts.txt").unlink()
    result = run(train, made)
    assert result.code == 0 and "using the manifest's prompts" in result.err
    assert (made.root / "run" / "samples" / "step-000003.png").is_file()


def test_a_bad_line_of_the_prompt_file_is_an_error_at_the_start_and_later_a_warning(train, make):
    made = make()
    path = made.root / "prompts.txt"
    path.write_text("a red circle\na blue square --ar 3\n")
    said = f"prompt file {path} (prompts.file in {made.path}), line 2: unknown option, expected --n, --w, "
    for result in (train("check", made.path), run(train, made)):
        assert result.code == 3 and f"error: {said}" in result.err, result.err
    assert not (made.root / "run").exists()
    assert train("check", made.path, "--set", "sample.every=0").code == 0
    path.write_text("a red circle\n")
    assert run(train, made, steps=2).code == 0
    path.write_text("a red circle\na blue square --ar 3\n")
    result = run(train, made, "--resume")
    assert result.code == 0 and f"warning: {said}" in result.err and "manifest's prompts" not in result.err
    result = train("sample", made.root / "run", "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 3 and said.rpartition("m.json")[2] in result.err and "(prompts.file in " in result.err
    result = train("sample", made.root / "run", "--prompts", path, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 3 and f"error: prompt file {path} (--prompts), line 2: unknown option '--ar'" in result.err


@pytest.mark.parametrize(("settings", "loaded"), [
    ((), 1), (("lora.init=pissa", "precision=bf16"), 1),
    *(pytest.param(settings, loaded, marks=pytest.mark.slow) for settings, loaded in [
        (("quantization=nf4", "channels_last=true", "gradient_checkpointing=true"), 1), (("lora.dora=true",), 1),
        (("lora.kind=lokr", "ema.decay=0.5"), 1), (("method=full",), 2)])])
def test_sample_shows_before_and_after_side_by_side(train, make, monkeypatch, settings, loaded):
    made, loads = make(), []
    assert run(train, made, "--lr", "0.05", *(word for each in settings for word in ("--set", each)), steps=6).code == 0
    grid = made.root / "g.png"
    with monkeypatch.context() as patched:
        patched.setattr("train.sample.load", lambda *words, **named: loads.append(named) or load(*words, **named))
        result = train("sample", made.root / "run", "--compare", "-o", grid, "--device", "cpu", "--quiet")
    assert result.code == 0 and result.out == f"{grid}\n" and len(loads) == loaded, result.err
    pixels = np.asarray(Image.open(grid))
    assert pixels.shape == (2 * (192 + 14), 2 * 192, 3)  # 64 pixels shown three times as large
    before, after = pixels[14:206, :192], pixels[14:206, 192:]
    assert not np.array_equal(before, after)
    for option, wanted in (("--base", before), ("--checkpoint=step-000006", after),
                           *(() if "method=full" in settings else [("--weights=0", before), ("--weights=1", after)])):
        assert train("sample", made.root / "run", option, "-o", grid, "--device", "cpu").code == 0
        assert np.array_equal(np.asarray(Image.open(grid))[14:206, :192], wanted)
    last = np.asarray(Image.open(made.root / "run" / "samples" / "step-000006.png"))
    assert np.array_equal(last[14:206, :192], after)


def test_sample_with_prompts_of_one_s_own(train, make):
    made = make()
    assert run(train, made).code == 0
    own = made.root / "own.txt"
    own.write_text("\n# later\n")
    result = train("sample", made.root / "run", "--prompts", own, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 5 and result.err.endswith(f"error: prompt file {own} has no prompts\nhint: write one on each "
                                                    "line, or give one with --prompt TEXT\n"), result.err
    own.write_text("a red circle\nunheard of\n")
    result = train("sample", made.root / "run", "--prompts", own, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 0 and "warning: the prompt in line 2 of " in result.err
    own.write_text("unheard of\n")
    result = train("sample", made.root / "run", "--prompts", own, "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 7 and "the cache has no text row of any prompt in" in result.err
    named, back = re.findall(r"prep prompts (\S+)", result.err)  # as they are typed in this directory
    assert Path(named).resolve() == own.resolve() and Path(back).resolve() == (made.root / "prompts.txt").resolve()
    assert "; these replace the manifest's prompts, and prep prompts " in result.err


def test_a_base_model_that_has_moved_is_named_with_model(train, make, tiny_model, monkeypatch):
    made = make()
    monkeypatch.chdir(made.root)
    shutil.copytree(tiny_model, "models/base")
    assert run(train, made, "--model", "models/base", steps=2).code == 0
    Path("models/base").rename("models/moved")
    again = ("run", made.path, "-o", "run", "--resume", "--steps", 3, *SMALL)
    commands = [("sample", "run", "-o", "g.png", "--device", "cpu"), ("replay", "run", "--step", 1),
                ("merge", "run", "-o", "merged"), again]  # which writes the new place into the run
    for command in commands:
        failed = train(*command)
        assert failed.code == 6 and failed.err.splitlines()[-2:] == [
            "error: the base model of run is gone: run/../models/base does not exist",
            "hint: name where it is now with --model DIR"], failed.err
        done = train(*command, "--model", "models/moved")
        assert done.code == 0, done.err
    helps = [" ".join(train(name, "--help").out.split()) for name in ("run", "sample", "replay", "merge")]
    assert all("if it has moved" in text for text in helps), helps


def test_sample_of_what_is_no_run_or_has_no_checkpoint(train, make, tmp_path):
    assert train("sample", tmp_path / "nothing").code == 5
    made = make()
    assert run(train, made).code == 0
    result = train("sample", made.root / "run", "--checkpoint", "step-9", "-o", tmp_path / "g.png")
    assert result.code == 5 and "has no checkpoint 'step-9', expected one of: step-000003" in result.err


def test_without_prompts_captions_are_sampled_and_said_to_be(train, make, tmp_path):
    made = make(prompts=None)
    result = run(train, made)
    assert result.code == 0
    assert "no prompt file: sample pictures show captions of validation samples (to add prompts: prep prompts " in (
        result.err)
    assert (made.root / "run" / "samples" / "step-000003.png").is_file()
    assert train("sample", made.root / "run", "-o", tmp_path / "g.png", "--device", "cpu").code == 0


def test_a_manifest_without_prompts_and_captions_says_so(train, make, tmp_path, monkeypatch):
    made = make(prompts=None)
    assert run(train, made).code == 0
    monkeypatch.setattr("train.sampling.prompts.of_captions", lambda index: ((), "validation"))
    result = train("sample", made.root / "run", "-o", tmp_path / "g.png", "--device", "cpu")
    assert result.code == 7 and "the manifest has no sample prompts and no captions" in result.err
    assert "hint: encode a prompt with --prompt TEXT, or" in result.err


@pytest.mark.slow
def test_options_of_sample_come_before_the_settings_of_prompts_in_a_file(prep, train, make, tiny_model):
    """What is typed is meant; --n and the size stay the prompt's. In --prompt, a setting is typed for that prompt."""
    made = make()
    assert run(train, made).code == 0
    own, grids, typed = made.root / "own.txt", [], ("--seed", 7, "--steps", 1, "--guidance", 4)
    for number, (line, options) in enumerate([
            ("--w 80 --d 5 --s 3 --l 2", ()), ("--w 80 --d 5 --s 3 --l 2", typed), ("--w 80", typed),
            ("--w 80 --d 7 --s 1 --l 4", ())]):
        own.write_text(f"a red circle {line}\n")
        grids.append(made.root / f"{number}.png")
        done = train("sample", made.root / "run", "--prompts", own, "-o", grids[-1], "--device", "cpu", *options)
        assert done.code == 0, done.err
    first, *others = (grid.read_bytes() for grid in grids)
    assert others[0] == others[1] == others[2] != first
    typed = ("--prompt", "a red circle --w 80 --d 7 --s 1 --l 4", "--seed", 5, "--steps", 3, "--guidance", 2)
    done = train("sample", made.root / "run", *typed, "-o", grids[0], "--device", "cpu")
    assert done.code == 0 and grids[0].read_bytes() == others[0], done.err


@pytest.mark.parametrize(("option", "value", "most"), [
    ("--seed", 1 << 63, "9223372036854775807"), ("--guidance", "inf", "100"), ("--guidance", "100.5", "100")], ids=str)
def test_numbers_of_sample_have_the_bounds_of_their_settings(train, tmp_path, option, value, most):
    result = train("sample", tmp_path / "run", option, value)
    assert result.code == 2 and f"'{option}'" in result.err, result.err
    assert f"less than or equal to {most}" in result.err


def test_what_lies_in_a_run_is_not_taken_for_one(train, make):
    made = make()
    assert run(train, made, steps=2).code == 0
    place = made.root / "run"
    for command in (("sample",), ("replay", "--step", 1), ("worst",), ("report",)):
        for inner, hint in (("checkpoints/step-000002", f"name its run, {place}; train sample takes --checkpoint "
                             "step-000002"), ("lora.safetensors", f"name its run, {place}")):
            result = train(*command, place / inner)
            assert result.code == 5 and result.err.endswith(f"hint: {hint}\n"), result.err
        result = train(*command, made.root / "nowhere")
        assert result.code == 5 and result.err == (
            f"error: {made.root / 'nowhere'} does not exist, expected the directory of a run\n"
            "hint: name the directory that train run wrote (-o)\n")


@pytest.mark.parametrize(("weights", "shown"), [((), 3), (("--weights", "-1,0.5"), 2)], ids=["usual", "named"])
def test_sample_shows_a_slider_at_weights_side_by_side(train, make, weights, shown):
    made = make()
    settings = ("slider.positive=a red circle", "slider.strength=20")
    assert run(train, made, "--lr", "0.05", *(word for each in settings for word in ("--set", each)), steps=2).code == 0
    result = train("sample", made.root / "run", *weights, "-o", made.root / "g.png", "--device", "cpu", "--quiet")
    assert result.code == 0, result.err
    pixels = np.asarray(Image.open(made.root / "g.png"))
    assert pixels.shape == (2 * (192 + 14), shown * 192, 3)
    columns = [pixels[14:206, start : start + 192] for start in range(0, shown * 192, 192)]
    assert len({column.tobytes() for column in columns}) == shown


@pytest.mark.parametrize(("words", "said"), [
    (("--weights", "1,x"), "--weights is '1,x', expected numbers from -10 to 10, like -1,0,1"),
    (("--weights", "nan"), "--weights is 'nan', expected numbers from -10 to 10, like -1,0,1"),
    (("--weights", "0,1", "--base"), "--weights is given with --base or --compare, expected one of them")])
def test_weights_that_no_grid_has(train, tmp_path, words, said):
    result = train("sample", tmp_path / "run", *words)
    assert result.code == 2 and result.err.startswith(f"error: {said}\n")


def test_a_full_run_has_no_adapters_to_weight(train, make):
    made = make()
    assert run(train, made, "--method", "full", steps=1).code == 0
    result = train("sample", made.root / "run", "--weights", "0,1", "-o", made.root / "g.png", "--device", "cpu")
    assert result.code == 2 and result.err.startswith(
        "error: --weights is given, which is for the adapters of a LoRA, but the run trained all weights\n")


@pytest.mark.parametrize(("options", "said"), [
    (("--base", "--compare"), "--base is given with --compare, which shows the model before training anyway"),
    (("--base", "--checkpoint", "step-3"), "--base is given with --checkpoint, but it shows the model before training"),
], ids=["compare", "checkpoint"])
def test_options_of_sample_that_contradict_each_other(train, tmp_path, options, said):
    result = train("sample", tmp_path / "run", *options)
    assert result.code == 2 and result.err == f"error: {said}\nhint: omit one of them\n"


def test_sample_encodes_a_prompt_itself_and_writes_nothing_but_the_grid(prep, train, tiny_model, photos, tmp_path):
    """The row that it makes is that of prep encode: the same picture, bit by bit."""
    (tmp_path / "p.txt").write_text("a red circle --n blurry\n")
    for number in range(8):
        (photos / f"{number}.txt").write_text("a thing")
    encode = ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
              "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--compute", "float32"]
    assert prep(*encode).code == 0
    assert train("run", tmp_path / "m.json", "-o", tmp_path / "run", "--steps", 1, *SMALL).code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    options = ["--device", "cpu", "--seed", 3, "-o"]
    result = train("sample", tmp_path / "run", "--prompt", "a red circle --n blurry --w 64 --h 64", *options,
                   tmp_path / "one.png")
    assert result.code == 0, result.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
            and path.name != "one.png"} == before
    assert prep(*encode, "--prompts", tmp_path / "p.txt").code == 0
    assert train("sample", tmp_path / "run", *options, tmp_path / "two.png").code == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    result = train("sample", tmp_path / "run", "--prompt", "a --ar 3", *options, tmp_path / "x.png")
    assert result.code == 3 and "error: --prompt: unknown option '--ar'" in result.err
    result = train("sample", tmp_path / "run", "--prompt", "a", "--prompts", tmp_path / "p.txt")
    assert result.code == 2 and "--prompt and --prompts are both given, expected one of them" in result.err


def test_init_writes_every_setting_and_replaces_nothing(train, make, tmp_path):
    from prep.training.table import as_toml

    path = tmp_path / "new" / "train.toml"
    result = train("init", "-o", path)
    assert result.code == 0 and result.out == f"wrote {path}; train run MANIFEST -c {path} reads it\n"
    assert path.read_text() == as_toml()
    assert train("check", make().path, "-c", path).code == 0
    path.write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for place in (path, tmp_path / "dangling"):
        result = train("init", "-o", place)
        assert result.code == 5 and result.err == (f"error: {place} exists, expected a new file\n"
                                                   "hint: name another with -o\n")
    assert path.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_advice_of_the_tool_lets_a_run_go_on(prep, train, tiny_model, photos, tmp_path):
    """Prompts that were edited and encoded, shards that were compacted: other bytes, the same steps."""
    for number in range(8):
        (photos / f"{number}.txt").write_text("a thing")
    (tmp_path / "p.txt").write_text("a red circle\n")
    encode = ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
              "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--prompts", tmp_path / "p.txt"]
    assert prep(*encode).code == 0
    go = ["run", tmp_path / "m.json", "-o", tmp_path / "run", *SMALL, "--set", "sample.every=0", "--quiet"]
    assert train(*go, "--steps", 1).code == 0
    before = (tmp_path / "m.json").read_bytes()
    (tmp_path / "p.txt").write_text("a red circle\na green dragon\n")
    assert prep(*encode).code == 0
    assert prep("compact", tmp_path / "c").code == 0 and prep(*encode).code == 0
    assert (tmp_path / "m.json").read_bytes() != before
    result = train(*go, "--steps", 2, "--resume")
    assert result.code == 0, result.err


def test_a_run_goes_on_after_a_repair(prep, train, tiny_model, photos, tmp_path):
    """A damaged row ends training with a checkpoint and a command; after that command --resume goes on."""
    for number in range(8):
        (photos / f"{number}.txt").write_text(f"picture {number}")
    encode = ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
              "--resolution", 96, "--step", 16, "--device", "cpu", "--quiet", "--batch-size", 1]
    assert prep(*encode).code == 0
    go = ["run", tmp_path / "m.json", "-o", tmp_path / "run", *SMALL, "--set", "sample.every=0", "--quiet"]
    assert train(*go, "--steps", 2, "--set", "validation.every=0").code == 0
    for path in (tmp_path / "c" / "shards").glob("*/*/hidden/c*"):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    result = train(*go, "--steps", 9, "--resume")
    assert result.code == 7 and "prep verify" in result.err
    assert prep("verify", tmp_path / "m.json").code == 7 and prep(*encode).code == 0
    assert prep("verify", tmp_path / "m.json").code == 0
    result = train(*go, "--steps", 9, "--resume")
    assert result.code == 0, result.err


@pytest.mark.parametrize("command", [[], ["init"], ["check"], ["run"], ["sample"]], ids=str)
def test_help_is_quick_and_loads_nothing_heavy(command):
    code = ("import sys; from train.cli.main import main; sys.argv = ['train', *sys.argv[1:], '--help']\n"
            "try: main()\nexcept SystemExit as end: assert not end.code\n"
            "assert not {'torch', 'diffusers', 'numpy', 'pyarrow', 'peft'} & set(sys.modules)")
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - begun < 3  # 0.15 s alone; this machine may be busy


@pytest.mark.parametrize("command", ["sample", "evaluate", "worst", "replay --step 1", "report"])
def test_what_is_no_run_is_said_before_anything_heavy_is_loaded(command, tmp_path):
    code = ("import sys; from train.cli.main import main; sys.argv = ['train', *sys.argv[1:]]\n"
            "try: main()\nexcept SystemExit as end: assert end.code == 5, end.code\n"
            "assert not {'torch', 'diffusers', 'peft'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, *command.split(), tmp_path / "none"], check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "none does not exist, expected the directory of a run" in done.stderr, done.stderr


def test_a_run_that_another_program_is_in_is_left_alone(train, make):
    from train.check import check
    from train.config.load import load_config
    from train.runs.directory import lock_run
    from train.setup import RunRequest

    made = make()
    setup = check(RunRequest(manifest=made.path), load_config(None, {})).setup
    with lock_run(Local(made.root / "run"), setup.manifest):
        result = run(train, made)
    assert result.code == 5 and "another program is training in" in result.err
    assert not list((made.root / "run").iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
@pytest.mark.parametrize("what", ["file", "readonly", "dangling"])
def test_a_directory_that_cannot_be_made_is_the_paths_matter(train, make, monkeypatch, what):
    """Also for a superuser, whom no mode stops."""
    made = make()
    place = made.root / "place"
    if what == "file":
        place.write_text("x")
    elif what == "dangling":
        place.symlink_to(made.root / "nowhere" / "at" / "all")
    else:
        monkeypatch.setattr("train.runs.directory.write_atomic", refuse)
    result = train("run", made.path, "-o", place if what == "dangling" else place / "run", *SMALL)
    assert result.code == 5 and "\nerror: " in f"\n{result.err}" and "Traceback" not in result.err


def refuse(path, data):
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.slow
def test_a_grid_never_lands_among_pictures_or_over_another_file(train, make):
    made = make()
    assert run(train, made).code == 0
    (made.root / "photos").mkdir()
    (made.root / "notes.txt").write_text("mine")
    mine = draw(made.root / "mine.png", (8, 8), seed=1).read_bytes()
    for place, said in (("photos/grid.png", "lies inside pictures"), ("cache/grid.png", "lies inside cache"),
                        ("notes.txt", "exists and is no grid of pictures, so it is not replaced"),
                        ("mine.png", "exists and is no grid of pictures, so it is not replaced"),
                        ("run", "is a directory, expected a file name"),
                        ("notes.txt/g.png", "notes.txt is not a directory"),
                        ("notes.txt/new/g.png", "notes.txt is not a directory"),
                        ("g.jpg", "g.jpg is named like a .jpg file, expected a PNG picture"),
                        ("new.d/g.WebP", "g.WebP is named like a .WebP file, expected a PNG picture")):
        result = train("sample", made.root / "run", "-o", made.root / place, "--device", "cpu")
        assert result.code == 5 and said in result.err, place
    assert (made.root / "notes.txt").read_text() == "mine" and not list((made.root / "photos").iterdir())
    assert (made.root / "mine.png").read_bytes() == mine
    assert not (made.root / "new.d").exists()
    for _ in range(2):  # into a new directory, and over the last one
        assert train("sample", made.root / "run", "-o", made.root / "new" / "g.png", "--device", "cpu").code == 0


@pytest.mark.slow
def test_a_full_fine_tune_is_sampled_and_a_torn_checkpoint_is_said(train, make):
    made = make()
    assert run(train, made, "--method", "full", "--set", "checkpoint.every=2", steps=3).code == 0
    result = train("sample", made.root / "run", "--compare", "-o", made.root / "g.png", "--device", "cpu",
                   "--guidance", 1)
    assert result.code == 0, result.err
    for sampler, said in (("DDIMSchedule", "sample.sampler is 'DDIMSchedule', which cannot sample this model of family "
                           "'sd15', expected one of: DDIMScheduler, "), ("DDPMScheduler", "")):
        result = train("sample", made.root / "run", "-o", made.root / "g.png", "--device", "cpu", "--sampler", sampler)
        assert said in result.err and bool(result.code) == bool(said), result.err
    last = made.root / "run" / "checkpoints" / "step-000003"
    torn = last / "unet" / "diffusion_pytorch_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100] + b"\1" * 100)
    result = train("sample", made.root / "run", "-o", made.root / "h.png", "--device", "cpu")
    assert result.code == 7 and result.err.endswith("hint: --checkpoint step-000002 shows another checkpoint; --base "
                                                    "shows the model before training\n"), result.err
    torn.write_bytes(torn.read_bytes()[:-100])
    result = run(train, made, "--method", "full", "--resume", "--set", "checkpoint.every=2", steps=4)
    assert result.code == 7 and "hint: --resume --from step-000002 continues from another checkpoint" in result.err
    result = run(train, made, "--method", "full", "--resume", "--from", "step-000002", "--set", "checkpoint.every=2",
                 steps=4)
    assert result.code == 0 and not last.exists(), result.err


@pytest.mark.parametrize(("options", "said"), [
    (["--set", "lora.rank=8", "--rank", "4"], "lora.rank is given twice, by --rank 4 and by --set lora.rank=8"),
    (["--set", "lora.rank=8", "--set", "lora.rank=4"],
     "lora.rank is given twice, by --set lora.rank=8 and by --set lora.rank=4"),
    (["--set", "lora.rank=8", "--set", "lora={rank = 4, alpha = 2}"],
     "lora.rank is given twice, by --set lora.rank=8 and by --set lora={rank = 4, alpha = 2}"),
    (["--no-masked", "--set", "loss.masked=true"],
     "loss.masked is given twice, by --no-masked and by --set loss.masked=true"),
    (["--compile", "--set", "compile=false"], "compile is given twice, by --compile and by --set compile=false"),
    (["--batch-size", "2", "--set", "batch_size=4"],
     "batch_size is given twice, by --batch-size 2 and by --set batch_size=4"),
])
@pytest.mark.parametrize("command", ["check", "run"])
def test_two_values_of_a_setting_are_refused(train, make, command, options, said):
    made = make()
    result = train(command, made.path, "-o", made.root / "run", *options)
    assert result.code == 2 and not (made.root / "run").exists()
    assert result.err == f"error: {said}, expected one value\nhint: omit one of them\n"


def test_the_same_value_twice_is_one(train, make):
    result = train("check", make().path, "--rank", 4, "--set", "lora.rank=4", "--set", "lora.rank=4", "--lr", "1e-3",
                   "--set", "optimizer.lr=0.001")
    assert result.code == 0 and "a LoRA of rank 4 on" in result.out


def test_a_section_given_as_an_option_leaves_the_rest_of_the_file_s(tmp_path):
    (tmp_path / "train.toml").write_text("[lora]\nrank = 2\nalpha = 0.5\n")
    from train.cli.options import read_settings

    lora = read_settings(tmp_path / "train.toml", ["lora={rank = 4}"], {}).lora
    assert (lora.rank, lora.alpha) == (4, 0.5)


def test_settings_that_this_computer_makes_no_use_of_are_named(train, make):
    """By run always, and by check as far as it knows."""
    made, settings = make(), ("--set", "tf32=true", "--shard")
    one = "note: parallel.shard has no effect: there is one process; several are started with torchrun"
    cpu = "note: tf32 has no effect: the device is cpu, expected an NVIDIA GPU for it"
    checked = [train("check", made.path, *settings, *more).out for more in ((), ("--device", "cpu"),
                                                                           ("--world-size", 1), ("--world-size", 2))]
    assert [cpu in out for out in checked] == [True] * 4
    assert [one in out for out in checked] == [False, False, True, False]
    result = run(train, made, *settings, "--set", "sample.every=0", "--quiet", steps=1)
    assert result.code == 0 and [line for line in result.err.splitlines() if "no effect" in line] == [
        "note: sample.steps and sample.size have no effect: sample.every is 0, and only train sample uses such "
        "settings then", cpu, one]


@pytest.mark.parametrize("where", ["beside", "here"])
def test_the_settings_file_of_init_is_used_and_named(train, make, tmp_path, monkeypatch, where):
    made, here = make(), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    place = made.root if where == "beside" else here
    (place / "train.toml").write_text("steps = 7\nbatch_size = 2\nsample.every = 0\nlora.rank = 2\n")
    spelled = f"settings: {Path('train.toml') if where == 'here' else place / 'train.toml'}\n"
    found = train("check", made.path)
    assert found.err == spelled and "7 steps = " in found.out
    assert "\n3 steps = " in train("check", made.path, "--steps", 3).out
    (here / "other.toml").write_text("steps = 9")
    named = train("check", made.path, "-c", here / "other.toml")
    assert named.err == "" and "9 steps = " in named.out
    begun = train("run", made.path, "-o", made.root / "run", "--steps", 1, "--device", "cpu")
    assert begun.code == 0 and spelled in begun.err
    assert json.loads((made.root / "run" / "run.json").read_text())["config"]["batch_size"] == 2
    (place / "train.toml").write_text("steps = 99")
    again = train("run", made.path, "-o", made.root / "run", "--resume", "--steps", 1, "--device", "cpu")
    assert "settings: " not in again.err, "a run that is continued keeps its own"


def test_two_settings_files_are_not_chosen_from(train, make, tmp_path, monkeypatch):
    made, here = make(), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for place in (here, made.root):
        (place / "train.toml").write_text("steps = 7\n")
    failed = train("check", made.path)
    assert failed.code == 2 and "two files of settings" in failed.err and "hint: name one: -c " in failed.err
    monkeypatch.chdir(made.root)
    assert train("check", made.path).code == 0


def test_a_cache_that_has_moved_is_named_once(prep, train, make, tmp_path, monkeypatch):
    made = make()
    folder = made.root / "run"
    assert run(train, made, steps=1).code == 0
    cache = read_manifest(made.path).cache_root
    cache.rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    commands = {"verify": (prep, "verify", made.path), "inspect": (prep, "inspect", made.path),
                "check": (train, "check", made.path), "worst": (train, "worst", folder),
                "replay": (train, "replay", folder, "--step", 1),
                "resume": (train, "run", made.path, "-o", folder, "--resume", "--steps", 2, "--device", "cpu")}
    for program, *words in commands.values():
        lost = program(*words)
        assert lost.code == 7 and "--cache CACHE" in lost.err
        assert re.search(r"error: the cache of \S+\.json, \S+/cache, does not exist\n", lost.err), lost.err
    for name, (program, *words) in commands.items():
        found = program(*words, "--cache", "elsewhere")
        assert found.code == 0, (name, found.err)
    assert train("worst", folder).code == 0, "the run knows where it was continued"
    assert not cache.exists()
def test_a_grid_without_a_name_replaces_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(unused_picture("grid").name)
        Path(found[-1]).touch()
    assert found == ["grid.png", "grid-2.png", "grid-3.png"]
