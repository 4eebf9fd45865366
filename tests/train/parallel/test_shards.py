"""A model that is divided among processes: the steps of one process, whoever continues them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from beside import training_adapter
from pieces import NAMES, flip, whole
from runs import events
from safetensors.torch import load_file
from together import damage_late_row, ended, second, steps_of
from torch import nn
from torchrun import environment, torchrun

from prep.errors import ConfigError, ModelError
from prep.models.families.registry import FAMILIES
from prep.models.hub import locate
from train import evaluate
from train.check import check
from train.check.requirements import check_libraries
from train.config.load import parse
from train.failures import Progress, explanation
from train.models.denoiser import load
from train.optim import ema
from train.parallel import division
from train.parallel.errors import RankFailed, RankLost
from train.parallel.ranks import ALONE, Ranks
from train.parallel.shards import OwnRows, span
from train.runs.checkpoint import read_state
from train.setup import RunRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo on Windows needs another set-up")
COMMON = ("--device", "cpu", "--precision", "fp32", "--batch-size", 6, "--micro-batch", 3, "--lr", "1e-3", "--steps", 4,
          "--set", "checkpoint.every=2", "--set", "sample.steps=2", "--set", "validation.timesteps=2", "--set",
          "ema.decay=0.9", "--set", "ema.snapshots=true")  # four processes divide a micro-batch of three: one is idle
CPU = torch.device("cpu")
KINDS = {"lora": ("--rank", 2, "--set", "gradient_checkpointing=true"),
         "beside": ("--rank", 2),
         "preserve": ("--rank", 2, "--set", "preserve.prior=true", "--set", "preserve.unmasked=0.5", "--set",
                      "preserve.prompted=0.5", "--set", 'preserve.prompts=["", "a red circle"]'),
         "slider": ("--rank", 2, "--set", "slider.positive=a red circle"), "pairs": ("--rank", 2),
         "full": ("--method", "full", "--set", "optimizer.clip=0.1")}


def near(one, other, name):
    """Whether the tensors of both are the same but for the order of sums, of which AdamW may make much."""
    pieces = other / name.with_suffix("")
    first, second = load_file(one / name), whole(pieces) if pieces.is_dir() else load_file(other / name)
    assert first.keys() == second.keys()
    for each, value in first.items():
        torch.testing.assert_close(value, second[each], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_gradients_are_those_of_one_process():
    """Of a UNet and a transformer, all weights and LoRA, in two passes. Sums of 1e-6 differ by their order."""
    script = Path(__file__).parents[2] / "support" / "divided_gradients.py"
    done = subprocess.run([sys.executable, "-m",
                           "torch.distributed.run", "--nproc-per-node", "2", script], env=environment(), check=False,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "returned a view tensor" not in done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 8
    for case in cases:
        assert case["worst"] < 1e-5 and not case["whole"], case


def others_read_pieces(train, path, folder, tmp_path):
    """Each rank has written half of them. Pictures and new runs begin with them; a damaged one is refused by name."""
    state, run = read_state(folder), folder.parents[1]
    assert state.version == 4 and {name.rpartition("/")[0] for name in state.files} == {*NAMES, "unet"}
    for name in NAMES:
        one, two = sorted(folder.joinpath(name).iterdir())[:2]
        assert 0.45 < one.stat().st_size / (one.stat().st_size + two.stat().st_size) < 0.65
    assert train("sample", run, "--checkpoint", "step-2", "-o", tmp_path / "drawn.png", "--device", "cpu").code == 0
    assert train("check", path, "--method", "full", "--init-from", folder).code == 0
    piece = folder / "optimizer" / "shard-00002-of-00003.safetensors"
    before = flip(piece)
    result = train("run", path, *COMMON, *KINDS["full"], "-o", run, "--resume", "--from", "step-2")
    assert f"error: {piece}: its bytes do not match their digest\n" in result.err, result.err
    piece.write_bytes(before)
    last = folder / "ema-0.10" / "shard-00002-of-00002.safetensors"
    before = flip(last)
    merge = ("merge", run, "--ema", "0.15", "-o", tmp_path / "mean.safetensors")
    result = train(*merge)
    assert f"error: {last.parent}: its bytes do not match their digest\n" in result.err, result.err
    last.write_bytes(before)
    last.rename(run / "aside")
    result = train(*merge)
    assert f"{last.parent}: its piece ema-0.10/{last.name} is missing\n" in result.err, result.err
    (run / "aside").rename(last)
    last = folder / "ema" / "shard-00002-of-00002.safetensors"
    last.rename(run / "aside")
    result = train("check", path, "--method", "full", "--init-from", folder)
    assert "ema.safetensors: its piece ema/shard-00002-of-00002.safetensors is missing\n" in result.err, result.err
    (run / "aside").rename(last)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [
    ("lora", 4), ("beside", 2), ("full", 2), ("preserve", 2), ("slider", 2), ("pairs", 2)])
def test_a_run_is_that_of_one_process_and_continued_by_one(make, setup_of, train, tmp_path, kind, count):
    """Also what is validated and drawn in between, with the average in place of the weights; also beside a training
    adapter, and with what the base predicts, which each process asks as often as others."""
    made = make(validation=3, prior=kind == "preserve", pairs=kind == "pairs")
    one, run = tmp_path / "one", tmp_path / "divided"
    path, words = made.path, ("run", made.path, *COMMON, *KINDS[kind])
    if kind == "beside":
        training_adapter(setup_of(made, lora={"rank": 3, "targets": "kohya-conv"}), tmp_path / "beside.safetensors")
        words = (*words, "--set", f"base.adapter={tmp_path / 'beside.safetensors'}")
    assert train(*words, "-o", one).code == 0
    done = torchrun(count, *words, "--shard", "-o", run)
    assert done.returncode == 0, done.stderr
    for event, other in zip(events(one), events(run), strict=True):
        assert (event["event"], event["step"]) == (other["event"], other["step"]), other
        for name in {"loss", "grad_norm", "samples", "parameters"} & event.keys():
            assert event[name] == pytest.approx(other[name], rel=1e-4)
    names = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert len(names) == 11
    for name in names:
        near(one, run, name)
    for each in (one, run):
        assert train("merge", each, "--ema", "0.15", "-o", each / "mean.safetensors").code == 0
    near(one, run, Path("mean.safetensors"))
    result = min(names, key=lambda name: len(name.parts))
    if kind == "full":
        others_read_pieces(train, path, run / "checkpoints" / "step-000002", tmp_path)
    (run / result).unlink()
    assert train(*words, "-o", run, "--resume", "--from", "step-2").code == 0
    near(one, run, result)
    assert [event["ranks"] for event in events(run) if event["event"] == "start"] == [count, 1]


@pytest.mark.slow
def test_a_divided_run_continues_a_whole_one_and_survives_a_damaged_row(make, train, tmp_path):
    """The failure is known to all before a pass: one message, and a checkpoint of the last whole step."""
    made, run = make(), tmp_path / "run"
    words = ("run", made.path, *COMMON, *KINDS["full"], "--batch-size", 4, "--micro-batch", 4, "--set",
             "validation.every=0", "--set", "sample.every=0", "-o", run)
    damage_late_row(made)
    assert train(*words, "--steps", 1).code == 0
    done = torchrun(2, *words, "--steps", 40, "--shard", "--resume")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1 and "checksum" in done.stderr, done.stderr
    last = steps_of(run)[-1]["step"]
    assert (run / "checkpoints" / f"step-{last:06d}" / "unet").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the second process in /proc")
def test_the_others_end_when_one_is_killed(make, tmp_path):
    """Without a checkpoint of that step: a part of every weight is gone."""
    words = ("run", make().path, *COMMON, *KINDS["lora"], "--set", "sample.every=0", "--steps", 100_000, "--shard")
    err = ended(2, lambda run: os.kill(second(run.pid), signal.SIGKILL), words, tmp_path / "run")
    assert "error: another of the 2 ranks ended without a message" in err, err
    kept = max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert int(kept[5:]) % 2 == 0


@pytest.mark.parametrize("name", ["adafactor", "adamw-8bit", "prodigy"])
def test_optimizers_that_need_whole_weights(make, name):
    settings = {"optimizer": {"name": name}, "parallel": {"shard": True}}
    fault, = check(RunRequest(manifest=make().path), parse(settings, "")).faults
    assert fault.message == f"optimizer.name is '{name}', which needs whole weights, but parallel.shard divides them"
    assert fault.hint == "--set optimizer.name=adamw, or --no-shard"


@pytest.mark.parametrize("name", ["channels_last", "compile"])
def test_what_makes_whole_models_faster_is_refused(make, name):
    settings = parse({"parallel": {"shard": True}, name: True}, "x")
    fault, = check(RunRequest(manifest=make().path), settings).faults
    assert fault.message == f"{name} is on, which is only for models that are not divided, but parallel.shard is on"
    assert fault.hint == f"--set {name}=false, or --no-shard"


def test_an_average_in_host_memory_is_refused(make):
    settings = {"parallel": {"shard": True}, "ema": {"decay": 0.9, "device": "cpu"}}
    fault, = check(RunRequest(manifest=make().path), parse(settings, "")).faults
    assert fault.message == ("ema.device is 'cpu', which is only for models that are not divided, but parallel.shard "
                             "is on: each rank has its part of the average beside that of the weights")
    assert fault.hint == "--set ema.device=model, or --no-shard"


def test_blocks_that_run_with_references_only():
    """A rank without references would not take part in gathering their weights."""
    settings = parse({"parallel": {"shard": True}, "micro_batch": 1}, "")
    check_libraries(settings, FAMILIES["flux3"], references=False)
    check_libraries(settings, FAMILIES["flux2"], references=True)
    with pytest.raises(ConfigError) as caught:
        check_libraries(settings, FAMILIES["flux3"], references=True)
    assert caught.value.message == ("parallel.shard is on, but denoisers of family 'flux3' have blocks that run with "
                                    "references only, and all ranks must run the same")
    assert caught.value.hint == "--no-shard"


def test_an_early_torch(make, monkeypatch):
    monkeypatch.setattr("train.check.requirements.version", lambda name: "2.8.1+cpu")
    fault, = check(RunRequest(manifest=make().path), parse({"parallel": {"shard": True}}, "")).faults
    assert fault.message == "parallel.shard needs torch 2.9 or later, but 2.8.1+cpu is installed"


def test_a_model_that_cannot_be_divided(monkeypatch):
    def refuse(module, **options):
        raise ValueError("fully_shard doesn't support scalar parameters")

    monkeypatch.setattr(division, "init_device_mesh", lambda *args: None)
    monkeypatch.setattr(division, "get_world_size", lambda: 2)
    monkeypatch.setattr(division, "fully_shard", refuse)
    with pytest.raises(ConfigError, match="the model cannot be divided among processes: fully_shard doesn't") as caught:
        division.divide(nn.Linear(1, 1), torch.device("cpu"))
    assert caught.value.hint == "--no-shard"


def test_a_torch_without_what_divides_models(monkeypatch):
    monkeypatch.setitem(sys.modules, "train.parallel.division", None)
    with pytest.raises(ConfigError, match="this torch cannot divide a model among processes") as caught:
        ALONE.divide(nn.Linear(1, 1), torch.device("cpu"))
    assert caught.value.hint == "--no-shard, or another torch"


def test_blocks_are_gathered_alone_inner_ones_first():
    class Block(nn.Module):
        def __init__(self, *inner):
            super().__init__()
            self.inner = nn.ModuleList(inner)

    model = nn.Sequential(Block(nn.Linear(1, 1)), nn.ReLU())
    model._no_split_modules = ["Block", "Linear"]
    assert division._blocks(model) == [model[0].inner[0], model[0]]
    plain = Block(nn.Linear(1, 1), nn.Linear(1, 1))
    assert division._blocks(plain) == [plain.inner[1], plain.inner[0]]


@pytest.mark.parametrize(("count", "wanted"), [(5, [[0, 1], [2, 3], [4]]), (2, [[0], [1], []]),
                                               (4, [[0, 1], [2, 3], []])])
def test_rows_are_those_of_fsdp(count, wanted):
    """As `torch.chunk` divides; later ranks may have none."""
    found = [list(span(count, Ranks(rank=rank, world=3))) for rank in range(3)]
    assert found == wanted


LOADED = [{"lora": {"rank": 2, "targets": "kohya-conv"}, "precision": "bf16"}, {"lora": {"kind": "lokr"}},
          {"method": "full", "full": {"freeze": ["attn2"]}}]


@pytest.mark.parametrize("settings", LOADED, ids=str)
def test_a_rank_keeps_only_its_rows_of_what_is_read(tiny_model, settings):
    """Also of adapters, whose values do not depend on the base; of the model there are shapes and dtypes."""
    config = parse(settings, "")
    whole = dict(load(locate(tiny_model), config, "epsilon", CPU).model.named_parameters())
    own = OwnRows(Ranks(rank=1, world=3))
    given = load(locate(tiny_model), config, "epsilon", CPU, weights_on=CPU, keep=own, parts=3,
                 place=lambda model, device: None)
    assert given.model.state_dict().keys() == load(locate(tiny_model), config, "epsilon", CPU).model.state_dict().keys()
    for name, value in given.model.named_parameters():
        assert value.is_meta and (value.shape, value.dtype) == (whole[name].shape, whole[name].dtype), name
        assert value.requires_grad == whole[name].requires_grad, name
        rows = span(len(value), own.ranks)
        assert torch.equal(own.rows.pop(name.replace(".base_layer.", ".")), whole[name][rows.start : rows.stop]), name
    assert not own.rows


@pytest.mark.parametrize("settings", LOADED, ids=str)
def test_a_model_is_divided_without_being_whole(tiny_model, settings):
    config, own = parse(settings, ""), OwnRows(ALONE)
    whole = load(locate(tiny_model), config, "epsilon", CPU).model
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = load(locate(tiny_model), config, "epsilon", CPU, weights_on=CPU, keep=own,
                     place=lambda model, device: division.divide(model, device, own.rows)).model
        values = {name: value.full_tensor() for name, value in model.named_parameters()}
        assert not own.rows and values.keys() == dict(whole.named_parameters()).keys()
        assert all(torch.equal(values[name], value) for name, value in whole.named_parameters())
        assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in whole.named_buffers())
        given = torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 8, 32)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, config.precision == "bf16"):
            assert torch.equal(model(*given).sample, whole(*given).sample)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("error", "ends"), [
    (RankLost("another ended"), True), (torch.OutOfMemoryError(), True), (RuntimeError("shapes differ"), True),
    (ModelError("the VAE is torn"), False), (RankFailed("rank 0 of 2 failed: a row is damaged", rank=0), False)])
def test_a_failure_between_steps_ends_a_divided_run_that_others_may_not_have(make, setup_of, monkeypatch, tmp_path,
                                                                             error, ends):
    """They wait for this rank in the middle of a pass. All read the same files, and have the same error with them."""
    setup, said = setup_of(make(), sample={"every": 0}), []
    monkeypatch.setattr(evaluate, "validate", lambda *args: (_ for _ in ()).throw(error))
    trainee = SimpleNamespace(ranks=Ranks(rank=1, world=2), model=SimpleNamespace(sharded=True), average=None,
                              slide=None, denoiser=SimpleNamespace(parameters={}),
                              spec=SimpleNamespace(averages=False))
    progress = Progress(device=torch.device("cpu"), saved=3)
    with pytest.raises(type(error)) if ends else nullcontext():
        evaluate.evaluate(trainee, None, setup, tmp_path, Said(said), progress)
    assert said == ([] if ends else [f"no validation: {error.message}"])
    if isinstance(error, torch.OutOfMemoryError):
        found = explanation(error, setup, tmp_path, progress)
        assert found.message == "cpu ran out of memory while validating, and a divided model needs all processes"
        assert found.hint == "--resume continues from step 3: --micro-batch 2 or --set validation.every=0"
        progress.during = "evaluating"
        assert explanation(error, setup, tmp_path, progress).hint == (
            "--resume continues from step 3: smaller pictures (sample.size) or --set evaluate.every=0")


class Said:
    """A log that keeps the texts of warnings."""

    def __init__(self, texts):
        self.texts = texts

    def phase(self, title):
        return nullcontext()

    def __call__(self, event, step, *, text):
        self.texts.append(text)


def test_an_average_is_swapped_in_within_the_same_memory():
    shadow, weight = {"a": torch.zeros(2)}, nn.Parameter(torch.ones(2))
    places = shadow["a"].data_ptr(), weight.data_ptr()
    with ema.swapped_in(shadow, {"a": weight}, copied=True):
        assert weight.tolist() == [0, 0] and shadow["a"].tolist() == [1, 1]
    assert weight.tolist() == [1, 1] and shadow["a"].tolist() == [0, 0]
    assert places == (shadow["a"].data_ptr(), weight.data_ptr())
