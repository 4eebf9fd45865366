"""Training in several processes: the same steps as in one, one message for a failure, and no finished step is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import FORKS, Launcher, ranks_of
from pieces import whole
from real_manifest import build
from runs import events
from safetensors.torch import load_file
from together import damage, damage_late_row, ended, second, steps_of, until
from torchrun import environment, torchrun

from prep.errors import ConfigError, PathError
from prep.fs.place import Local
from prep.loader.draws import validation
from prep.loader.rows import Rows
from prep.runs.requests import ask
from train import evaluate
from train.check import check
from train.config.load import parse
from train.parallel.ranks import Ranks
from train.setup import RunRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo on Windows needs another set-up")
BARE = ("--device", "cpu", "--set", "lora.rank=2", "--batch-size", 4, "--lr", "1e-3", "--set", "precision=fp32")
FEW = (*BARE, "--set", "sample.every=0")


def same(one, other):
    """Whether two runs have the same weights, but for the order in which gradients were added."""
    first, second = (load_file(run / "lora.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    assert any(value.abs().max() > 0 for name, value in first.items() if "lora_up" in name)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=2e-5)


@pytest.fixture(scope="module")
def launch():
    """`launch(run, …)` forks processes: see tests/faults/launcher.py."""
    launcher = Launcher(training=True)
    yield launcher
    launcher.close()


HERE = Path(__file__).parents[3]
SENSITIVE = ("--device", "cpu", "--quiet", "--precision", "fp32", "--batch-size", 6, "--micro-batch", 3, "--steps", 3,
             "--lr", 1, "--set", "optimizer.eps=1", "--set", "optimizer.clip=0", "--set", "checkpoint.every=1",
             "--set", "sample.every=0", "--set", "validation.every=0")
METHODS = {"lora": ("--rank", 2), "full": ("--method", "full"), "divided": ("--method", "full", "--shard")}


def moments(run, step):
    """What AdamW keeps of the gradients so far: a tenth of the last one and nine tenths of what it kept before. It
    grows with them, as the weights do with an eps this large; of usual AdamW the weights hardly do."""
    path = run / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors"
    tensors = load_file(path) if path.is_file() else whole(path.with_suffix(""))
    return {name: value for name, value in tensors.items() if name.startswith("exp_avg/")}


@pytest.mark.few("divided")
@FORKS
@pytest.mark.parametrize(("kind", "count"), [
    ("lora", 2), ("divided", 2), *(pytest.param(kind, count, marks=pytest.mark.slow)
                                   for kind, count in (("lora", 4), ("full", 2), ("full", 4), ("divided", 4)))])
def test_gradients_are_those_of_one_process(make, launch, tmp_path, kind, count):
    """Each of them and their norm, of passes that the processes cannot divide evenly; of four, one has no sample."""
    path, runs = make().path, (tmp_path / "one", tmp_path / "several")
    for run, ranks in zip(runs, (1, count), strict=True):
        words = ["run", path, "-o", run, *SENSITIVE, *METHODS[kind]]
        for ending in launch(*ranks_of(*[words] * ranks)):
            assert ending["code"] == 0, ending["err"]
    one, several = map(steps_of, runs)
    for event, other in zip(one, several, strict=True):
        assert event["samples"] == other["samples"]
        assert event["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert event["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    for step in (1, 3):
        wanted, found = (moments(run, step) for run in runs)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():  # sums of float32 in another order
            assert float((value - found[name]).abs().max()) <= 3e-5 * float(value.abs().max()), (step, name)
    first = torch.cat([value.flatten() for value in moments(runs[0], 1).values()])
    assert float(first.norm()) == pytest.approx(0.1 * one[0]["grad_norm"], rel=1e-4), "gradients were scaled or clipped"


def other_code(root):
    """Where Python finds Latentry with a comment more."""
    for name in ("prep", "train"):
        shutil.copytree(HERE / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (root / "train" / "loop.py").open("a") as file:
        file.write("# as of another version\n")
    return root


@FORKS
@pytest.mark.parametrize("what", ["settings", *(pytest.param(what, marks=pytest.mark.slow)
                                                for what in ("manifest", "checkpoint", "code"))])
def test_processes_that_do_not_train_the_same_do_not_begin(make, launch, tiny_model, tmp_path, what):
    """One message, and one exit code."""
    first, second = (["run", make().path, *FEW, "--steps", 3, "-o", tmp_path / "run"] for _ in range(2))
    homes = None
    if what == "settings":
        second += ["--lr", "2e-3"]
    elif what == "manifest":
        second[1] = build(tmp_path / "other", tiny_model, counts=(4, 4)).path
    elif what == "checkpoint":
        assert launch(*ranks_of([*first, "--set", "checkpoint.every=1"]))[0]["code"] == 0
        first, second = [*first, "--resume"], [*second, "--resume", "--from", "step-2"]
    else:
        homes = HERE, other_code(tmp_path / "other")
    errors, codes = forked(launch, first, second) if homes is None else whole_processes(homes, first, second)
    assert codes == [ConfigError.exit_code] * 2, errors
    assert errors[0].endswith(f"error: rank 1 has another {what} than rank 0, so they cannot train together\nhint: "
                              "give all ranks the same files, settings and version of Latentry\n"), errors
    assert errors[0].count("error: ") == 1 and errors[1] == "", errors
    assert (tmp_path / "run").exists() == (what == "checkpoint"), "a run was begun"


def forked(launch, *lines):
    """What each of some ranks wrote as its errors, and its exit code; one that waits for another has none."""
    endings = launch(*ranks_of(*lines, kill_after=60))
    return [ending["err"] for ending in endings], [ending["code"] for ending in endings]


def whole_processes(homes, *lines):
    """The same of processes that import their code from these directories."""
    runs = [subprocess.Popen([sys.executable, "-m", "train", *run["argv"][0]], cwd=home, stderr=subprocess.PIPE,
                             text=True, env=environment() | run["environment"] | {"PYTHONPATH": str(home)})
            for home, run in zip(homes, ranks_of(*lines), strict=True)]
    try:
        return [run.communicate(timeout=120)[1] for run in runs], [run.returncode for run in runs]
    finally:
        for run in runs:
            run.kill()


@pytest.mark.slow  # tests/faults/test_training.py has two processes, and one that continues them
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_processes_takes_the_same_steps_and_resumes_the_others_runs(make, train, tmp_path, count):
    path = make().path
    words = ("run", path, *FEW, "--steps", 6, "--set", "micro_batch=2", "--set", "checkpoint.every=4")
    assert train(*words, "-o", tmp_path / "one").code == 0
    done = torchrun(count, *words, "-o", tmp_path / "several")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ready to train") == 1 and f"on cpu, {count} processes" in done.stderr
    assert done.stdout == f"{tmp_path / 'several' / 'lora.safetensors'}\n"
    same(tmp_path / "one", tmp_path / "several")
    for one, several in zip(*(steps_of(tmp_path / name) for name in ("one", "several")), strict=True):
        assert one["samples"] == several["samples"] and one["loss"] == pytest.approx(several["loss"], rel=1e-4)
    replayed = [train("replay", tmp_path / name, "--step", 3, "--json").json["samples"] for name in ("one", "several")]
    for samples in replayed:
        for sample in samples:
            sample["loss"] = round(sample["loss"], 4)
    assert replayed[0] == replayed[1] and len(replayed[0]) > 1
    (tmp_path / "several" / "lora.safetensors").unlink()
    resumed = train("run", path, "-o", tmp_path / "several", "--resume", "--from", "step-000004", "--device", "cpu")
    assert resumed.code == 0
    same(tmp_path / "one", tmp_path / "several")


@pytest.mark.slow
def test_a_failure_of_one_process_is_one_message_and_costs_no_finished_step(make, tmp_path):
    made = make()
    damage_late_row(made)
    done = torchrun(2, "run", made.path, *FEW, "--steps", 40, "-o", tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "checksum" in done.stderr and "hint: " in done.stderr
    assert "train/loop.py" not in done.stderr, "a traceback of ours"
    last = steps_of(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}").is_dir()


LOOKS = ("--steps", 1, "--set", "sample.steps=2", "--micro-batch", 2, "--set", "ema.decay=0.9")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_validation_and_pictures_of_several_processes_are_those_of_one(make, train, tmp_path, count):
    """Bit by bit, before a step has rounded anything in another order; of three processes one draws nothing."""
    path = make(validation=5).path
    for ranks, name in ((1, "one"), (count, "several")):
        done = torchrun(ranks, "run", path, *BARE, *LOOKS, "--set", "sample.every=1", "--set",
                        "validation.timesteps=3", "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
    first, other = ([event for event in events(tmp_path / name) if event["event"] in ("validation", "sample")
                     and event["step"] == 0] for name in ("one", "several"))
    assert [event["event"] for event in first] == ["validation", "sample"] and first[0]["samples"] == 5
    assert other == first
    drawn = {(tmp_path / name / "samples" / "step-000000.png").read_bytes() for name in ("one", "several")}
    assert len(drawn) == 1


@pytest.mark.slow
def test_a_failure_of_any_process_in_between_is_a_warning(make, tmp_path):
    """Of rank 1, which validates every second forward pass."""
    made = make(validation=5)
    setup = check(RunRequest(manifest=made.path), parse({"batch_size": 4}, "")).setup
    request = list(validation(setup.index, 2, count=2, timesteps=1000))[1]
    assert len({shot.sample for shot in request.draws}) == 1
    damage(made, setup, (request, request.draws[0]))
    done = torchrun(2, "run", made.path, *FEW, *LOOKS, "--set", "validation.timesteps=2", "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    texts = [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert len(texts) == 2 and all("no validation: rank 1 of 2 failed: " in text and "checksum" in text
                                   for text in texts)
    assert (tmp_path / "run" / "lora.safetensors").is_file()


def test_prompts_that_not_all_read_alike(make, setup_of, monkeypatch):
    """As when the file is written between two reads."""
    setup = setup_of(make())
    monkeypatch.setattr(Ranks, "gather_bytes", lambda ranks, data: [data, data if b"failed" in data else b"[]"])
    with pytest.raises(PathError, match="the processes do not read the same prompts") as caught:
        evaluate.agreed_prompts(Rows(setup.index), setup, setup.manifest.folder, Ranks(rank=0, world=2))
    assert caught.value.hint == "all must see the same files"


@pytest.mark.slow
def test_what_the_processes_find_before_the_first_step(make, tmp_path):
    path = make().path
    done = torchrun(2, "run", path, *FEW, "--batch-size", 1, "--steps", 2, "-o", tmp_path / "run")
    assert "error: batch_size is 1, but 2 ranks divide a step's samples" in done.stderr
    assert done.stderr.count("error: ") == 1 and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the second process in /proc")
@pytest.mark.parametrize("count", [2, 4])  # more than two meet by way of the first
def test_the_others_end_with_a_checkpoint_when_one_is_killed(make, tmp_path, count):
    path = make().path
    err = ended_by(lambda run: os.kill(second(run.pid), signal.SIGKILL), path, tmp_path / "run", count)
    assert f"error: another of the {count} ranks ended without a message" in err, err


@pytest.mark.slow
def test_an_interruption_is_told_once(make, tmp_path):
    err = ended_by(lambda run: run.send_signal(signal.SIGTERM), make().path, tmp_path / "run")
    assert err.count("interrupted") == 1 and "interrupted after step " in err, err
    assert events(tmp_path / "run")[-1]["event"] == "stopped"


def ended_by(blow, path, run, count=2):
    """What a long run in so many processes says when it is dealt a blow: the last step has a checkpoint."""
    err = ended(count, blow, ("run", path, *FEW, "--set", "checkpoint.every=0", "--steps", 100_000), run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps_of(run)[-1]['step']:06d}"]
    return err


@FORKS
@pytest.mark.parametrize("kind", ["lora", pytest.param("divided", marks=pytest.mark.slow)])
def test_a_request_is_heard_by_all_processes_at_one_step(make, launch, tmp_path, kind):
    """Only the first one looks for it. The pictures are those of one step, and the run goes on as if nothing had been
    but them."""
    path, run = make().path, tmp_path / "run"
    words = ["run", path, "-o", run, *SENSITIVE[:-8], *METHODS[kind], "--steps", 100_000, "--set", "sample.every=0",
             "--set", "validation.every=0", "--set", "sample.steps=2", "--set", "sample.size=[64, 64]"]

    def bid():
        for kind in ("sample", "stop"):
            until(lambda: (run / "log.jsonl").exists() and len(steps_of(run)) > 2)
            ask(Local(run), kind)
            until(lambda: any(event["event"] in ("sample", "stopped") for event in events(run)))

    asking = threading.Thread(target=bid)
    asking.start()
    endings = launch(*ranks_of(*[words] * 2, kill_after=100))
    asking.join()
    assert [ending["code"] for ending in endings] == [130, 130], endings
    found = [(event["event"], event["step"]) for event in events(run) if event["event"] not in ("start", "step")]
    (drawn, (_, saved), stopped) = found
    assert drawn[0] == "sample" and stopped == ("stopped", saved) and drawn[1] < saved, found
    assert (run / "checkpoints" / f"step-{saved:06d}").is_dir() and len(steps_of(run)) == saved
    ending, _ = launch(*ranks_of(*[[*words, "--resume", "--steps", saved + 1]] * 2))
    assert ending["code"] == 0, ending["err"]
