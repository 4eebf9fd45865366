"""`prep encode --part I/N` and `prep seal`: parts that run twice, at once, are killed or stopped, or differ; and the
scripts of clusters that start them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from account import account, state
from harness import ENVIRONMENT, FORKS, Stage, words_of
from served import PrepServer

from prep.cache.store import Cache

pytestmark = FORKS
PARTS = 3
ROOT = Path(__file__).parents[2]
SCALE = ROOT / "manifests" / "scale"
SMALL = "--mask sidecar --resolution 96 --step 16 --dtype float32"


@pytest.fixture(scope="module")
def made(launch, setting, tmp_path_factory):
    pictures, model = setting
    home = tmp_path_factory.mktemp("made") / "whole"  # as far from the pictures as `there`: their path is relative
    home.mkdir()
    stage = Stage(launch=launch, pictures=pictures, model=model, home=home)
    assert stage.run(stage.encode(), task_rows=1)["codes"] == [0]
    return stage.home


@pytest.fixture
def whole(made):
    """What one run without parts leaves behind; tasks have one row each."""
    return state(made)


@pytest.fixture
def there(stage, tmp_path):
    return stage.at(tmp_path / "shared")


@pytest.fixture
def third_commit(stage, tmp_path):
    """The number of the change of the disk that writes it."""
    there = stage.at(tmp_path / "counted")
    calls = there.points(there.encode(), task_rows=1)
    return [number for number, (name, path) in enumerate(calls) if "cache/commits/" in path and name == "link"][2]


def parts(there, *numbers, **plan):
    """Runs parts at once."""
    return there.launch(*(there.one(there.part(number, PARTS), anywhere=True, task_rows=1, **plan)
                          for number in numbers))


def sealed(there, *options, **plan):
    ending = there.run(there.seal(PARTS, *options), task_rows=1, **plan)
    return ending["codes"], ending


def test_parts_make_what_one_run_makes(there, whole):
    endings = parts(there, *range(PARTS))
    assert [ending["codes"] for ending in endings] == [[0]] * PARTS, words_of(endings)
    reports = [json.loads(ending["out"]) for ending in endings]
    assert [one["part"] for one in reports] == ["0/3", "1/3", "2/3"] and not there.manifest.exists()
    assert sum(sum(one["encoded"].values()) for one in reports) == 11
    assert len(account(there.home).plans) == 1  # the last part does not know that it is the last
    codes, ending = sealed(there)
    assert codes == [0], words_of(ending)
    assert json.loads(ending["out"])["reused"] == {"latent": 5, "mask": 2, "text": 4}
    assert state(there.home) == whole


def test_parts_run_twice_and_on_two_machines_at_once(there, whole):
    for _ in range(2):
        endings = parts(there, 0, 1, 2, 2, 1, 0)
        assert [ending["codes"] for ending in endings] == [[0]] * 6, words_of(endings)
    assert sealed(there)[0] == [0] and state(there.home) == whole
    again = parts(there, 1)  # after the seal
    assert json.loads(again[0]["out"])["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert state(there.home) == whole


@pytest.mark.parametrize("share", [0.4, *(pytest.param(number / 40, marks=pytest.mark.slow)
                                              for number in range(40))])
def test_a_part_that_is_killed_and_run_again(there, whole, tmp_path, share):
    counted = there.at(tmp_path / "counted")
    points = len(counted.points(counted.part(1, PARTS), task_rows=1))
    killed = there.run(there.part(1, PARTS), kill=int(points * share), task_rows=1)
    assert killed["signal"] == signal.SIGKILL
    assert [ending["codes"] for ending in parts(there, 0, 2)] == [[0], [0]]
    missing = sealed(there)[0] == [7]
    assert missing or share > 0.85
    assert [ending["codes"] for ending in parts(there, 1)] == [[0]]
    assert sealed(there)[0] == [0]
    left = account(there.home)
    for name in left.staging:  # of the killed process; parts leave them to prep encode and prep gc
        assert name.startswith("cache/tmp/")
    assert state(there.home) == whole


def test_seal_says_what_is_missing_and_which_commands_make_it(there, whole):
    assert [ending["codes"] for ending in parts(there, 0)] == [[0]]
    codes, ending = sealed(there)
    assert codes == [7] and not there.manifest.exists()
    error = json.loads(ending["out"])["error"]
    assert "rows are missing in " in error["message"] and "; parts with work left: 1/3, 2/3" in error["message"]
    first, *commands = error["hint"].removeprefix("encode them, then seal again: ").split("; ")
    for command in (first, *commands):
        words = shlex.split(command)
        assert words[:2] == ["prep", "encode"]
        assert there.run([*words[1:], "--device", "cpu", "--json"], task_rows=1)["codes"] == [0]
    assert len(commands) == 1 and sealed(there)[0] == [0] and state(there.home) == whole


def test_without_the_number_of_parts_seal_names_the_command_that_makes_all(there, whole):
    ending = there.run(there.seal(), task_rows=1)
    assert ending["codes"] == [7] and "there is no cache in" in ending["err"]
    assert [ending["codes"] for ending in parts(there, 2)] == [[0]]
    error = json.loads(there.run(there.seal(), task_rows=1)["out"])["error"]
    assert "parts with work left" not in error["message"] and "--part" not in error["hint"]
    words = shlex.split(error["hint"].partition(": ")[2])
    assert there.run([*words[1:], "--device", "cpu", "--json"], task_rows=1)["codes"] == [0]
    assert state(there.home) == whole  # which wrote the manifest, too


def test_a_picture_that_changes_between_parts(there, whole, tmp_path):
    """The later parts follow another plan; the seal names the part that has to run again."""
    there = type(there)(launch=there.launch, pictures=shutil.copytree(there.pictures, tmp_path / "p"),
                        model=there.model, home=there.home)
    assert [ending["codes"] for ending in parts(there, 0, 1)] == [[0], [0]]
    (there.pictures / "1.txt").write_text("another caption")
    (there.pictures / "3.txt").write_text("and another")
    assert [ending["codes"] for ending in parts(there, 2)] == [[0]]
    for _ in range(2):
        codes, ending = sealed(there)
        if codes == [0]:
            break
        error = json.loads(ending["out"])["error"]
        assert "; 1 plan of other rows: parts with other options or of another version" in error["message"]
        for command in error["hint"].removeprefix("encode them, then seal again: ").split("; "):
            assert there.run([*shlex.split(command)[1:], "--device", "cpu", "--json"], task_rows=1)["codes"] == [0]
    assert codes == [0], words_of(ending)
    assert there.run(there.verify())["codes"] == [0]
    assert there.run(there.encode(), task_rows=1)["codes"] == [0]  # it has nothing left to do


def test_parts_with_other_options_do_not_count(there, whole):
    assert there.launch(*(there.one(there.part(number, PARTS, "--resolution", 64), task_rows=1)
                          for number in range(PARTS)))[0]["codes"] == [0]
    codes, ending = sealed(there)
    assert codes == [7]
    message = json.loads(ending["out"])["error"]["message"]
    assert "1 plan of other rows" in message and "5 latent, 2 mask" in message and "text" not in message
    assert [ending["codes"] for ending in parts(there, *range(PARTS))] == [[0]] * PARTS
    assert sealed(there)[0] == [0]


def test_rows_lost_since_the_plan_was_made_belong_to_parts_too(there, whole):
    """Each lost row has its part, whoever looks and whenever."""
    assert [ending["codes"] for ending in parts(there, 0, 1)] == [[0], [0]]
    cache = Cache(root=there.cache)
    lost = list(cache.shards())[:3]
    for digest in lost:
        shutil.rmtree(cache.shard(digest))
    assert [ending["codes"] for ending in parts(there, *range(PARTS))] == [[0]] * PARTS
    codes, ending = sealed(there)
    assert codes == [0], words_of(ending)
    assert set(lost) <= set(cache.shards()) and there.run(there.verify())["codes"] == [0]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_begins_no_other_task_and_completes_this_one(there, whole, third_commit, name):
    ending = there.run(there.encode(), signal=third_commit, name=name, task_rows=1, ahead=1)
    assert ending["codes"] == [75], words_of(ending)
    error = json.loads(ending["out"])["error"]
    assert error["message"].startswith(f"stopped by {name}: ") and " tasks finished; " in error["message"]
    assert error["message"].endswith(" rows left to encode") and error["kind"] == "stopped"
    left = account(there.home)  # one task was being written, one more row was made, and one was being made
    assert left.staging == [] and 2 <= len(left.commits) <= 6 and not there.manifest.exists()
    assert there.run(there.encode(), task_rows=1)["codes"] == [0]
    assert state(there.home) == whole


def test_without_grace_the_task_is_abandoned_and_nothing_is_half_written(there, whole, third_commit):
    for number in range(third_commit - 9, third_commit + 9, 6):
        ending = there.run(there.part(0, 1, "--grace", 0), signal=number, name="SIGTERM", task_rows=1)
        assert ending["codes"] in ([75], [0]), words_of(ending)
        assert account(there.home).staging == []
    assert there.run(there.part(0, 1), task_rows=1)["codes"] == [0]
    assert there.run(there.seal(1), task_rows=1)["codes"] == [0] and state(there.home) == whole


def test_a_signal_before_the_first_task(there):
    ending = there.run(there.encode(), signal=0, name="SIGUSR1", task_rows=1)
    assert ending["codes"] == [75] and "stopped by SIGUSR1 while no task was under way" in ending["err"]
    assert not there.manifest.exists()


def test_a_dry_run_tells_the_share_that_the_part_encodes(there):
    words = there.part(1, PARTS, "--json")
    told, made = (json.loads(there.run(argv)["out"]) for argv in ([*words, "--dry-run"], words))
    assert told["encoded"] == made["encoded"] != {}
    assert told["bytes"] == made["bytes"]


@pytest.mark.parametrize("text", ["3/3", "-1/3", "1", "1/0", "a/b", "/4", "1/1000000"])
def test_a_part_that_is_none(stage, text):
    ending = stage.run(stage.encode("--part", text))
    assert ending["codes"] == [2]
    assert f"--part is '{text}', expected I/N with I from 0 to N-1 and N at most 100000" in ending["err"]


def test_there_are_at_most_as_many_parts_to_seal(stage):
    ending = stage.run(stage.seal(count=100_001))
    assert ending["codes"] == [2] and "'--parts': Input should be less than or equal to 100000" in ending["err"]


@pytest.mark.parametrize("said", ["--retry-rejects is given with --part", "--recheck is given with --part"])
def test_what_changes_the_work_of_all_parts_is_for_no_part(stage, said):
    ending = stage.run(stage.part(0, 2, said.split()[0]))
    assert ending["codes"] == [2] and f"{said} 0/2, expected one of them" in ending["err"]


def test_a_picture_that_cannot_be_read_in_this_run_fails_the_part(there, tmp_path, whole):
    """Its row may be made later, so the part is not done, and there is no manifest."""
    pictures = shutil.copytree(there.pictures, tmp_path / "p")
    there = type(there)(launch=there.launch, pictures=pictures, model=there.model, home=there.home)
    before = (pictures / "0.png").read_bytes()
    ending = there.run(there.part(0, 1), task_rows=1, change=str(pictures / "0.png"))
    report = json.loads(ending["out"])
    assert ending["codes"] == [1] and report["rejected"][0]["code"] == "changed-meanwhile"
    (pictures / "0.png").write_bytes(before)
    assert there.run(there.seal(1), task_rows=1)["codes"] == [7]
    assert there.run(there.part(0, 1), there.seal(1), task_rows=1)["codes"] == [0, 0]


# ---- signals to all processes of a job -------------------------------------------------------------------------------

SLOW = """
import time
from prep.encode import plan
from prep.encode.engines import local
plan.TASK_ROWS, usual = 1, local.ticked
def ticked(rows, tick):
    for row in usual(rows, tick):
        time.sleep(0.3)
        yield row
local.ticked = ticked
from prep.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_signal_to_all_processes_ends_no_decoder(there, whole):
    """SLURM and Kubernetes send it to each process of a job."""
    words = [word for word in there.part(0, 1) if word != "--quiet"]
    with subprocess.Popen([sys.executable, "-c", SLOW, *words], start_new_session=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        until = time.monotonic() + 60
        while not list(there.cache.glob("commits/*/*.json")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert json.loads(out)["error"]["message"].startswith("stopped by SIGTERM: ") and "crash" not in err
    left = account(there.home)
    assert left.staging == [] and 0 < len(left.commits) < 11
    assert there.run(there.part(0, 1), there.seal(1), task_rows=1)["codes"] == [0, 0] and state(there.home) == whole


# ---- the scripts of clusters -----------------------------------------------------------------------------------------


@pytest.fixture
def served(launch, tmp_path):
    server = PrepServer(launch, tmp_path)
    yield server
    server.close()


@pytest.fixture
def slurm(there, served, tmp_path):
    """`slurm(**environment)` submits the script; what the jobs ended with."""
    def go(**more):
        place = tmp_path / f"jobs{len(list(tmp_path.glob('jobs*')))}"
        place.mkdir()
        words = [there.pictures, "--model", there.model, "--cache", there.cache, "-o", there.manifest, *SMALL.split(),
                 "--quiet"]
        path = f"{served.bin}:{ROOT}/tests/support/slurm:{os.environ['PATH']}"
        done = subprocess.run(["bash", SCALE / "slurm.sh", *words], capture_output=True, text=True, timeout=120,
                              env=served.environment(PATH=path, SLURM_STANDIN=str(place), PARTS="3", DEVICE="cpu",
                                                     **more))
        assert done.returncode == 0, done.stderr
        return done, {path.name.removesuffix(".codes"): path.read_text() for path in place.glob("*.codes")}, place

    return go


def test_the_slurm_script_encodes_and_seals(slurm, served, there, stage):
    assert stage.run(stage.encode())["codes"] == [0]
    done, codes, _ = slurm()
    assert codes == {"100": "0 0 0", "101": "0"}, done.stderr
    assert [words[0] for words in served.commands] == ["encode", "encode", "encode", "seal"]
    assert state(there.home) == state(stage.home)


def test_the_slurm_script_seals_nothing_that_is_not_there(slurm, there):
    done, codes, _ = slurm(SLURM_SKIP="1")
    assert codes["101"] == "7" and not there.manifest.exists()
    assert "parts with work left: 1/3" in done.stderr
    assert slurm()[1] == {"100": "0 0 0", "101": "0"} and there.manifest.exists()


def test_the_slurm_script_puts_a_stopped_part_back(slurm, served, there, monkeypatch):
    """A signal comes in the middle of the second part."""
    usual = served._launch

    def signaled(run):
        if "1/3" in run["argv"][0]:
            run["shim"] |= {"signal": 10, "name": "SIGUSR1", "task_rows": 1}
        return usual(run)

    monkeypatch.setattr(served, "_launch", signaled)
    done, codes, place = slurm()
    assert codes == {"100": "0 75 0", "101": ""} and (place / "scontrol").read_text() == "requeue 100\n", done.stderr
    assert "stopped by SIGUSR1" in done.stderr


def jobs(name, data):
    """The documents of a YAML file, with another place in place of /data."""
    return list(yaml.safe_load_all((SCALE / name).read_text().replace("/data", str(data))))


def test_the_jobs_of_kubernetes(served, there, stage, tmp_path):
    """Each index in a shell of its own, as the Job starts it."""
    (there.home / "photos").symlink_to(there.pictures)
    (there.home / "model").symlink_to(there.model)
    (encode,), (seal,) = jobs("job.yaml", there.home), jobs("seal.yaml", there.home)
    assert encode["spec"]["completionMode"] == "Indexed"

    def run(job, **environment):
        container = job["spec"]["template"]["spec"]["containers"][0]
        given = {one["name"]: one["value"] for one in container["env"]} | {"LATENTRY_USER_CACHE": str(tmp_path / "u")}
        program, flag, text = container["command"]
        assert text.startswith("exec prep "), "prep must get the signals"
        return subprocess.run([program, flag, f"{text} {SMALL} --quiet"], capture_output=True, text=True, timeout=120,
                              env=served.environment(**given, **environment, DEVICE="cpu"))

    completions = encode["spec"]["completions"]
    assert encode["spec"]["parallelism"] == completions
    early = run(seal)
    assert early.returncode == 7 and "there is no cache in" in early.stderr
    for index in range(completions):
        done = run(encode, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
        assert f"part {index}/{completions} is encoded" in done.stdout
    done = run(seal)
    assert done.returncode == 0 and (there.home / "manifest.json").exists(), done.stderr
    grace = int(next(text for text in encode["spec"]["template"]["spec"]["containers"][0]["command"]
                     if "--grace" in text).split("--grace")[1].split()[0])
    assert grace < encode["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    ignored, failed = encode["spec"]["podFailurePolicy"]["rules"]
    assert ignored["onExitCodes"]["values"] == [75] and 7 not in failed["onExitCodes"]["values"]


# ---- the page --------------------------------------------------------------------------------------------------------


def shown(section):
    """The commands in a section of manifests/scale.md."""
    text = (ROOT / "manifests" / "scale.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(("section", "count"), [
    ("One machine", 1), pytest.param("Job arrays", 8, marks=pytest.mark.slow)])
def test_the_commands_of_the_page_work(served, there, tmp_path, section, count):
    """Those of kubectl are tested above; `all` devices are a CPU here."""
    commands = shown(section)
    assert len(commands) == count
    (there.home / "photos").symlink_to(there.pictures)
    (there.home / "model").symlink_to(there.model)
    (tmp_path / "jobs").mkdir()
    path = f"{served.bin}:{ROOT}/tests/support/slurm:{os.environ['PATH']}"
    made = []
    for command in commands:
        if command.startswith("kubectl"):
            continue
        words = command.replace("--device all", "--device cpu").replace("slurm.sh", str(SCALE / "slurm.sh"))
        done = subprocess.run(["bash", "-c", f"{words} {SMALL}"], capture_output=True, text=True, cwd=there.home,
                              timeout=120, env=served.environment(PATH=path, SLURM_STANDIN=str(tmp_path / "jobs"),
                                                                  DEVICE="cpu"))
        assert done.returncode == 0, (command, done.stderr)
        if "seal" in command or "--part" not in command:
            made.append((there.home / "manifest.json").read_bytes())
            (there.home / "manifest.json").unlink()
            shutil.rmtree(there.cache)
    assert made and len(set(made)) == 1
