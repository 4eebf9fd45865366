"""SIGKILL while training, at a change of the disk or at a message between ranks: resumed, all is as if it had never
happened. Weights, optimizer, moving average, losses, log and pictures are equal byte by byte to those of an undisturbed
run.

The processes are real, and so is their death; only its moment is chosen, by shim.py.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from harness import FORKS, Launcher, Stage, ranks_of, words_of
from runs import events
from safetensors.torch import load_file
from torch.testing import assert_close

from prep.digest import digest_bytes
from prep.runs.losses import read_losses
from train.runs.checkpoint import list_checkpoints, read_state

pytestmark = FORKS
LAST, EVERY = 7, 3  # the last step, and steps between checkpoints
COMMON = ("--device", "cpu", "--quiet", "--precision", "fp32", "--batch-size", 4, "--micro-batch", 2, "--steps", LAST,
          "--set", "checkpoint.keep=2", "--set", "validation.every=2", "--set",
          "validation.timesteps=1")  # two micro-batches are accumulated in a step
KINDS = {
    "lora": ("--rank", 2, "--set", "lora.dropout=0.2", "--set", "caption_dropout=0.3", "--set", "ema.decay=0.9",
             "--set", "ema.snapshots=true",
             "--lr", "1e-3", "--set", "sample.every=2", "--set", "sample.steps=2"),
    "full": ("--method", "full", "--set", "ema.decay=0.9", "--set", "ema.snapshots=true", "--lr", "1e-4",
             "--set", "schedule.name=cosine", "--set", "sample.every=0"),
}
WHEN = ("before", "half", "after")
KINDS_OF_TWO = {**KINDS, "divided": (*KINDS["full"], "--shard"),
                "divided-lora": (*KINDS["lora"], "--shard")}
CLOCK = ("seconds", "wait", "samples_per_second")
EACH = pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])


@dataclass(frozen=True)
class Training:
    """Runs of one kind in one home, each in some processes."""

    launch: Launcher
    manifest: Path
    home: Path
    kind: str

    def go(self, name, plans=({},), every=EVERY, **options):
        """Begins or continues the run `name` in a process for each of `plans`; how each ended."""
        run = self.home / name
        words = ["run", self.manifest, "-o", run, *COMMON, *KINDS_OF_TWO[self.kind],
                 "--set", f"checkpoint.every={every}"]
        if list((run / "checkpoints").glob("step-*")):
            words.append("--resume")
        runs = ranks_of(*[words] * len(plans), **options)
        return self.launch(*({**run, "shim": {"home": str(self.home), **plan}}
                             for run, plan in zip(runs, plans, strict=True)))

    def finish(self, name, ranks=1):
        """Continues the run to its end; its directory."""
        for ending in self.go(name, [{}] * ranks):
            assert ending["code"] == 0, ending["err"]
        return self.home / name

    def points(self):
        """Every change of the disk in an undisturbed run: those of a step, those of a checkpoint, and those with which
        pictures are written, if there are any."""
        record = self.home / "calls"
        ending = self.go("whole", [{"record": str(record)}])[0]
        assert ending["code"] == 0, ending["err"]
        names = [json.loads(line)[1] for line in record.read_text().splitlines()]
        begun = range(names.index("whole/losses.bin") + 1, len(names))
        steps = [number for number in begun if names[number] in ("whole/log.jsonl", "whole/losses.bin")]
        drawing = [number for number in begun if "/samples" in names[number]]
        saving = [number for number in begun if number not in (*steps, *drawing)]
        assert len(steps) > 2 * LAST and len(saving) > 50
        assert bool(drawing) == (self.kind == "lora")
        return [found for found in (steps, saving, drawing) if found]

    def points_of_pieces(self):
        """The changes of the disk with which each of two ranks writes the first two checkpoints of an undisturbed run.
        """
        records = [self.home / f"calls-{rank}" for rank in range(2)]
        for ending in self.go("whole", [{"record": str(record)} for record in records]):
            assert ending["code"] == 0, ending["err"]
        found = []
        for record in records:
            names = [json.loads(line)[1] for line in record.read_text().splitlines()]
            found.append([number for number, name in enumerate(names) if "checkpoints/" in name])
        assert len(found[0]) > len(found[1]) > 20
        return found

    def points_of_first(self):
        """The changes of the disk that the first of two ranks makes in an undisturbed run, after its log has begun and
        until the other one has ended well. That of its plot is none: without it there is a warning."""
        record = self.home / "calls"
        for ending in self.go("whole", [{"record": str(record)}, {}]):
            assert ending["code"] == 0, ending["err"]
        names = [json.loads(line)[1] for line in record.read_text().splitlines()]
        begun, last = names.index("whole/losses.bin"), len(names) - names[::-1].index("whole/README.md")
        return [number for number in range(begun + 1, last) if "loss.png" not in names[number]]

    def messages(self):
        """How many messages two ranks exchange in an undisturbed run."""
        record = self.home / "messages"
        for ending in self.go("whole", [{}, {"message": 1 << 30, "record": str(record)}]):
            assert ending["code"] == 0, ending["err"]
        events = [json.loads(line)[0] for line in record.read_text().splitlines()]
        return events.count("message")  # besides changes of the disk


@pytest.fixture(scope="module")
def training(tmp_path_factory, setting):
    """`training(kind, home)`; pictures are encoded once."""
    home = tmp_path_factory.mktemp("encoded")
    there = Stage(launch=None, pictures=setting[0], model=setting[1], home=home)
    (home / "prompts.txt").write_text("picture number 0\na red circle --n blurry\n")
    launcher = Launcher(there.encode("--validation", 0.2, "--prompts", home / "prompts.txt"), training=True)
    yield lambda kind, home: Training(launcher, there.manifest, home, kind)
    launcher.close()


@pytest.fixture(scope="module")
def undisturbed(training, tmp_path_factory):
    """`undisturbed(kind)`: two runs in two processes that nothing disturbs, of which the second has a checkpoint of
    step 4."""
    @cache
    def made(kind):
        there = training(kind, tmp_path_factory.mktemp("undisturbed"))
        for name, every in (("whole", EVERY), ("fourth", 4)):
            for ending in there.go(name, [{}] * 2, every):
                assert ending["code"] == 0, ending["err"]
        return there.home / "whole", there.home / "fourth"

    return made


def spread(points, count):
    """So many of the points, over all of them."""
    return [points[round((number + 0.5) * (len(points) - 1) / count)] for number in range(count)]


def scheduled(event):
    """Whether an undisturbed run has such an event: a lost rank makes the others save a checkpoint at any step."""
    if event["event"] == "checkpoint":
        return event["step"] % EVERY == 0 or event["step"] == LAST
    return event["event"] != "start"


def told(run):
    """The log, but for the clock, the steps at which it was continued, and checkpoints that were written once more."""
    found = [{name: value for name, value in event.items() if name not in CLOCK} for event in events(run)
             if scheduled(event)]
    return [event for number, event in enumerate(found) if number == 0 or event != found[number - 1]]


def same(one, other):
    """Whether two finished runs have the same results, checkpoints and logs, and nothing else beside them."""
    assert told(one) == told(other)
    last = f"checkpoints/step-{LAST:06d}"
    names = {path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file()
             and ("checkpoints/" not in path.as_posix() or last in path.as_posix())} - {"log.jsonl"}
    assert {"losses.bin", "README.md"} < names
    pictures = {event["picture"] for event in told(one) if event["event"] == "sample"}
    assert pictures == {name for name in names if name.startswith("samples/")}
    assert any(event["event"] == "validation" for event in told(one))
    for kept, pieces in (("optimizer", 3), ("ema", 2)):
        assert {f"{last}/{kept}.safetensors", f"{last}/{kept}/shard-00001-of-0000{pieces}.safetensors"} & names
    for name in sorted(names):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert not list(other.rglob(".*.partial"))


@EACH
@pytest.mark.parametrize("count", [1, pytest.param(24, marks=pytest.mark.slow)])
def test_killed_at_a_step_or_while_a_checkpoint_or_a_picture_is_written(training, tmp_path, kind, count):
    there = training(kind, tmp_path)
    for points in there.points():
        for point in spread(points, count):
            ending = there.go("killed", [{"kill": point, "when": WHEN[point % 3]}])[0]
            assert ending["signal"] == signal.SIGKILL, words_of(ending)
            same(tmp_path / "whole", there.finish("killed"))
            shutil.rmtree(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    "lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "divided"))])
@pytest.mark.parametrize("count", [2, pytest.param(36, marks=pytest.mark.slow)])
def test_one_of_two_ranks_killed_or_both(training, tmp_path, kind, count):
    """The other ends, too. Resumed with two ranks, all is byte by byte as it would have been."""
    there = training(kind, tmp_path)
    total = there.messages()
    for number, point in enumerate(spread(range(total // 6, total), count)):
        killed = ((1,), (0, 1), (0,))[number % 3]
        endings = there.go("killed", [{"message": point} if rank in killed else {} for rank in range(2)])
        for rank, ending in enumerate(endings):
            assert (ending["signal"] == signal.SIGKILL) == (rank in killed), words_of(ending)
            assert ending["code"] != 0
        if killed == (1,):
            assert "another of the 2 ranks ended without a message" in endings[0]["err"]
        same(tmp_path / "whole", there.finish("killed", 2))
        shutil.rmtree(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("count", [6])
def test_killed_while_each_rank_writes_its_pieces(training, tmp_path, count):
    """One of two ranks, or both. What is there as a checkpoint is whole, and is continued by both, byte by byte."""
    there = training("divided", tmp_path)
    points = there.points_of_pieces()
    for number in range(3 * count):
        killed = ((1,), (0,), (0, 1))[number % 3]
        plans = [{"kill": spread(points[rank], 3 * count)[number], "when": WHEN[number // 3 % 3]} if rank in killed
                 else {} for rank in range(2)]
        endings = there.go("killed", plans)
        assert any(endings[rank]["signal"] == signal.SIGKILL for rank in killed), words_of(endings)
        for ending in endings:
            assert ending["signal"] == signal.SIGKILL or ending["code"] != 0
        for folder in list_checkpoints(tmp_path / "killed"):
            for name in read_state(folder).files:
                assert digest_bytes((folder / name).read_bytes()) == read_state(folder).files[name].sha256
        same(tmp_path / "whole", there.finish("killed", 2))
        shutil.rmtree(tmp_path / "killed")


@pytest.mark.slow
def test_one_rank_s_disk_is_full(training, tmp_path):
    """It says so, all end, no half checkpoint is left, and the run is continued as if nothing had been."""
    there = training("divided", tmp_path)
    for point in spread(there.points_of_pieces()[1], 3):
        endings = there.go("killed", [{}, {"fail": point, "errno": "ENOSPC", "for": 0}])
        assert endings[1]["code"] and endings[0]["code"], words_of(endings)
        for words in ("error: rank 1 of 2 failed: ", "o space left"):
            assert words in endings[1]["err"], words_of(endings)
        assert endings[0]["err"] == "", words_of(endings)
        for folder in (tmp_path / "killed" / "checkpoints").iterdir():
            assert read_state(folder).version == 4, folder
        same(tmp_path / "whole", there.finish("killed", 2))
        shutil.rmtree(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["divided", "full"])
@pytest.mark.parametrize("count", [2, 24])
def test_the_first_rank_fails_alone_wherever_it_writes(training, tmp_path, kind, count):
    """Its log and the news of it are nobody else's, so it alone meets the full disk; the other one waits nowhere for
    it, and says nothing. When there is room again all finished steps of a whole model are kept, and the run is
    continued as if nothing had been."""
    there = training(kind, tmp_path)
    points = there.points_of_first()
    for number, point in enumerate(spread(points, count)):
        lasts = number % 2 == 0
        endings = there.go("killed", [{"fail": point, "errno": "ENOSPC", "for": 0 if lasts else 1}, {}], kill_after=60)
        assert [ending["signal"] for ending in endings] == [None, None], (point, endings)
        assert endings[0]["code"] == 7 and endings[1]["code"], (point, endings)
        assert "o space left" in endings[0]["err"] and endings[0]["err"].count("error: ") == 1, words_of(endings)
        assert endings[1]["err"] == "", words_of(endings)
        if not lasts and kind == "full":
            finished = [event["step"] for event in events(tmp_path / "killed") if event["event"] == "step"]
            kept = [read_state(folder).step for folder in list_checkpoints(tmp_path / "killed")]
            assert max(kept, default=0) == max(finished, default=0), point
        same(tmp_path / "whole", there.finish("killed", 2))
        shutil.rmtree(tmp_path / "killed")


PLACES = ("begin", "inside", "backward", "end")
MEMORY, BUG = "cpu ran out of memory in step 5, with ", "error: this is a bug in train; "
OF_SECOND = "error: rank 1 of 2 failed: "


def memory(where):
    return {"error": "memory", "where": where}


def bug(where):
    return {"error": "bug", "where": where}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "failures", "said"), [
    ("divided", (memory("begin"), memory("begin")), MEMORY), ("divided", (memory("backward"),) * 2, MEMORY),
    *(("divided", (None, memory(where)), OF_SECOND + MEMORY) for where in PLACES),
    *(("divided", (memory(where), None), "error: " + MEMORY) for where in PLACES[1::2]),
    ("divided", (bug("inside"), None), BUG), ("divided-lora", (None, bug("backward")), BUG)])
def test_ranks_of_a_divided_model_fail_in_a_pass(training, undisturbed, tmp_path, kind, failures, said):
    """Alone, while the other one waits for its weights, or both, in the second pass of a step. One message, of the one
    that failed first, and its exit code; nobody waits; and the run is continued from its last checkpoint."""
    there, (whole, _) = training(kind, tmp_path), undisturbed(kind)
    plans = [{} if one is None else {"pass": 8, **one} for one in failures]
    endings = there.go("failed", plans, kill_after=60)
    code = 70 if said == BUG else 9
    for ending, one in zip(endings, failures, strict=True):
        assert ending["signal"] is None and ending["code"] in ({70} if one is None else {code}), endings
    errors = "".join(ending["err"] for ending in endings)
    assert errors.count("error: ") == 1 and said in errors, endings
    assert [read_state(folder).step for folder in list_checkpoints(tmp_path / "failed")] == [3]
    same(whole, there.finish("failed", 2))


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("kind", "where", "number", "said", "hint"), [
    ("divided", "validation", 2, "validating", "--resume continues from step 3: --micro-batch 1 or --set "
     "validation.every=0"),
    ("divided-lora", "pictures", 1, "drawing sample pictures", "smaller pictures (sample.size) or --set "
     "sample.every=0")])
def test_a_rank_of_a_divided_model_fails_between_steps(training, undisturbed, tmp_path, failing, kind, where, number,
                                                       said, hint):
    """Without its part of the pass nothing goes on: the run ends, and continues from its last checkpoint."""
    there, (whole, _) = training(kind, tmp_path), undisturbed(kind)
    plans = [{"pass": number, **memory(where)} if rank == failing else {} for rank in range(2)]
    endings = there.go("failed", plans, kill_after=60)
    assert [ending["signal"] for ending in endings] == [None, None] and endings[failing]["code"] == 9, endings
    assert endings[failing]["err"] == (f"error: {'rank 1 of 2 failed: ' * failing}cpu ran out of memory while {said}, "
                                       f"and a divided model needs all processes\nhint: {hint}\n"), endings
    assert endings[1 - failing]["err"] == "" and endings[1 - failing]["code"] == 70, endings
    assert [read_state(folder).step for folder in list_checkpoints(tmp_path / "failed")] == [3] * (number > 1)
    same(whole, there.finish("failed", 2))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_continues_what_two_have_begun(training, tmp_path, killed):
    """The same samples and timesteps in each step; sums are in another order, so numbers are nearly the same."""
    there = training("full", tmp_path)
    total = there.messages()
    endings = there.go("killed", [{"message": total * 2 // 3} if rank == killed else {} for rank in range(2)])
    assert endings[killed]["signal"] == signal.SIGKILL and endings[1 - killed]["code"] != 0
    one, other = tmp_path / "whole", there.finish("killed", 1)
    assert any(event["event"] == "start" and event["ranks"] == 1 and event["step"] > 2 for event in events(other))
    shown = [sorted(read_losses(run / "losses.bin")[["step", "id", "timestep"]].tolist()) for run in (one, other)]
    assert shown[0] == shown[1] and len(shown[0]) > 2 * LAST
    name = "unet/diffusion_pytorch_model.safetensors"
    first, second = (load_file(run / name) for run in (one, other))
    assert first.keys() == second.keys()
    for each, value in first.items():
        assert_close(value, second[each], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [30])
def test_killed_at_a_random_moment(training, tmp_path, count):
    """By the clock, wherever the process is, alone or with another rank that is killed as well."""
    there, draw = training("lora", tmp_path), random.Random(count)
    whole = [tmp_path / f"whole{ranks}" for ranks in (1, 2)]
    begun = time.monotonic()
    for ranks, run in enumerate(whole, 1):
        there.finish(run.name, ranks)
    seconds = time.monotonic() - begun
    for number in range(count):
        ranks = 1 + number % 2
        while True:
            endings = there.go("killed", [{}] * ranks, kill_after=draw.uniform(0.2, 0.5) * seconds)
            if all(ending["signal"] == signal.SIGKILL for ending in endings):
                break
            seconds *= 0.9  # it was quicker than the first
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)  # a rank may have ended before there was one
        same(whole[ranks - 1], there.finish("killed", ranks))
        shutil.rmtree(tmp_path / "killed")
