"""TensorBoard reads what the log says, once for each step; a tracker that fails does not end the run."""

from __future__ import annotations

import json
import struct
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
from runs import events, go

from prep.training.schema import Logging
from train.check import check
from train.config.load import parse
from train.setup import RunRequest
from train.trackers import tracked
from train.trackers.tracked import check_trackers, tracking
from train.trackers.wandb import Wandb

QUICK = ("--batch-size", "4", "--rank", "2", "--set", "sample.every=2", "--set", "sample.steps=1", "--set",
         "validation.every=2", "--set", "checkpoint.every=2", "--set", "sample.size=[64, 64]", "--quiet")


def read(run):
    """Step and value of each number, by name, and the steps of the pictures, as TensorBoard reads them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    scalars = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    pictures = [(one.step, one.encoded_image_string, (one.width, one.height)) for one in found.Images("samples")]
    return scalars, pictures


@pytest.mark.slow
def test_tensorboard_reads_each_step_once_also_of_a_resumed_run(train, make, tmp_path):
    pytest.importorskip("tensorboard")
    made, run = make(), tmp_path / "run"
    first = train("run", made.path, *QUICK, "-o", run, "--steps", "4", "--set", "log.tensorboard=true")
    assert first.code == 0, first.err
    for more in (("--from", "step-000002"), ()):  # steps 3 and 4 again, then nothing but 5 and 6
        again = train("run", made.path, "-o", run, "--resume", *more, "--steps", "6" if not more else "4", "--quiet")
        assert again.code == 0, again.err
    scalars, pictures = read(run)
    log = events(run)
    for tag in ("loss", "lr", "grad_norm", "wait"):
        wanted = [(event["step"], event[tag]) for event in log if event["event"] == "step"]
        assert [step for step, _ in scalars[tag]] == [1, 2, 3, 4, 5, 6]
        assert scalars[tag] == [(step, pytest.approx(value)) for step, value in wanted]
    held = [(event["step"], pytest.approx(event["loss"])) for event in log if event["event"] == "validation"]
    assert scalars["validation/loss"] == held and [step for step, _ in held] == [0, 2, 4, 6]
    assert [step for step, _, _ in pictures] == [0, 2, 4, 6]
    for step, data, size in pictures:
        assert data == (run / "samples" / f"step-{step:06d}.png").read_bytes() and size[0] >= 64


def records(data):
    """The records of a file of W&B: a log of LevelDB's format in blocks of 32 KiB, after a header of seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if -at % 32768 in range(1, 7):  # no room for a record's header
            at += -at % 32768
            continue
        length, part = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if part in (1, 4):  # whole, or the last of its parts
            yield whole
            whole = b""


def sent(run):
    """The numbers of each step that W&B kept in its offline runs, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json)
                              for item in record.history.item})
    return found


def test_weights_and_biases_keeps_what_the_log_says(train, make, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made, run = make(), tmp_path / "run"
    first = train("run", made.path, *QUICK, "-o", run, "--steps", "2", "--set", "log.wandb=hearts")
    assert first.code == 0, first.err
    name = (run / "wandb" / "id.txt").read_text()
    again = train("run", made.path, "-o", run, "--resume", "--steps", "4", "--quiet")
    assert again.code == 0, again.err
    warnings = [event for event in events(run) if event["event"] == "warning"]
    assert warnings == [] and (run / "wandb" / "id.txt").read_text() == name
    assert {path.stem for path in (run / "wandb").glob("offline-run-*/*.wandb")} == {f"run-{name}"}
    found = sent(run)
    for tag, event_of in (("loss", "step"), ("validation/loss", "validation")):
        wanted = [(event["step"], event["loss"]) for event in events(run) if event["event"] == event_of]
        assert [(one["_step"], one[tag]) for one in found if tag in one] == wanted
    assert [one["_step"] for one in found if any(name.startswith("samples/") for name in one)] == [0, 2, 4]


def test_a_run_is_sent_under_one_name(tmp_path, monkeypatch):
    """With a stand-in for the library: what it is asked for."""
    asked, told, closed = [], [], []
    fake = ModuleType("wandb")
    fake.Settings = dict
    fake.Image = lambda path: ("picture", path)
    fake.init = lambda **given: (asked.append(given), SimpleNamespace(
        log=lambda values, step: told.append((step, values)), finish=lambda: closed.append(True)))[1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        shown = Wandb(tmp_path, "hearts", {"steps": 3})
        shown({"event": "step", "step": 1, "loss": 0.5, "lr": None})
        shown({"event": "sample", "step": 1, "picture": "samples/x.png"})
        shown({"event": "checkpoint", "step": 1, "folder": "x"})
        shown.close()
    assert told == 2 * [(1, {"loss": 0.5}), (1, {"samples": ("picture", str(tmp_path / "samples/x.png"))})]
    first, second = asked
    assert first == second and first["project"] == "hearts" and first["resume"] == "allow" and len(closed) == 2
    assert first["config"] == {"steps": 3} and first["dir"] == str(tmp_path) and len(first["id"]) == 16


def test_a_tracker_that_fails_is_a_warning(make, setup_of, tmp_path, monkeypatch):
    class Failing:
        def __init__(self, run, step, config):
            self.closed = False

        def __call__(self, event):
            if event["step"] == 2:
                raise OSError("the disk of the tracker is full")

        def close(self):
            raise OSError("still full")

    monkeypatch.setattr(tracked, "_TRACKERS", {"tensorboard": ("tensorboard", Failing)})
    seen = []
    setup = setup_of(make(), batch_size=4, steps=3, validation={"every": 0}, sample={"every": 0}, lora={"rank": 2},
                     log={"tensorboard": True})
    with tracking(seen.append, setup.config, tmp_path / "run") as watch:
        go(setup, tmp_path / "run", watch=watch)
    warnings = [event for event in seen if event["event"] == "warning"]
    text = "log.tensorboard shows no more: OSError: the disk of the tracker is full"
    assert warnings == [{"event": "warning", "step": 2, "text": text}]
    assert [event["step"] for event in seen if event["event"] == "step"] == [1, 2, 3]
    assert (tmp_path / "run" / "lora.safetensors").is_file()


def test_the_log_of_a_run_names_a_tracker_that_fails(train, make, tmp_path, monkeypatch):
    def fail(run, step, config):
        raise PermissionError("no place for it")

    monkeypatch.setattr(tracked, "_TRACKERS", {"tensorboard": ("json", fail)})
    result = train("run", make().path, *QUICK, "-o", tmp_path / "run", "--steps", "1", "--set", "log.tensorboard=true")
    assert result.code == 0, result.err
    (warning,) = [event for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert warning["text"] == "log.tensorboard shows no more: PermissionError: no place for it"
    json.dumps(warning)


def test_the_library_is_asked_for_before_the_run(make, monkeypatch):
    monkeypatch.setattr(tracked, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    settings = parse({"log": {"tensorboard": True}}, "test")
    (fault,) = check(RunRequest(manifest=make().path), settings).faults
    assert fault.message == "log.tensorboard is set, which needs the library tensorboard"
    assert fault.hint == "pip install 'latentry[tensorboard]'"
    check_trackers(Logging())
