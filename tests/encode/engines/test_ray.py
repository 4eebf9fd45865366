"""The driver of the Ray engine, with workers that fail in every way: what is sent again, replaced, and given up."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeRay, Never, RayError

from prep.cache.records import Task
from prep.cache.store import open_cache
from prep.encode.engines import ray as engine
from prep.encode.engines import ray_worker
from prep.encode.engines.claims import Claims
from prep.encode.engines.job import Outcome, RayOptions
from prep.encode.engines.ray_worker import RayWorker
from prep.errors import CacheError, ModelError, Problem, UsageError
from prep.fs.remote.bucket import Bucket
from prep.progress import silent
from prep.workers.actors import SILENCE
from prep.workers.crew import Failure
from prep.workers.ray import Share

FIELDS = ("mask", "mask", *["text"] * 10, *["latent"] * 6)


@dataclass(kw_only=True)
class Job:
    """As much of a job as the driver needs."""

    cache: Any
    tasks: Sequence[Task]
    device: str = "auto"
    jobs: int = 4
    max_rejects: int = 10
    latents: Any = None
    claims: Claims = field(default_factory=Claims)

    @property
    def targets(self):
        works = {field: {key: SimpleNamespace(name=f"{key}.png", file=f"{key}.png") for task in self.tasks
                         if task.field == field for key in task.rows} for field in ("latent", "mask")}
        return SimpleNamespace(latents=works["latent"], masks=works["mask"])

    def share(self, tasks):
        return Job(cache=self.cache, tasks=tasks)


def task(number, field):
    return Task(key=f"{number:064x}", field=field, rows=(f"{field}{number}a", f"{field}{number}b"))


TASKS = [task(number, field) for number, field in enumerate(FIELDS)]


def done(job):
    """What a worker answers that encoded everything."""
    rows = Counter[str]()
    for one in job.tasks:
        rows[one.field] += len(one.rows)
    return Outcome(encoded=dict(rows), transient=())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(behave, …)` runs all tasks on a cluster of such workers; `run.ray` is that cluster, `run.made` the tasks."""
    cache = open_cache(tmp_path / "cache", create=True)

    def go(behave=lambda number, job: done(job), *, options=None, progress=silent, job=None, **cluster):
        def watched(number, job):
            answer = behave(number, job)
            if isinstance(answer, Outcome):
                go.made += [one.key for one in job.tasks]
            return answer

        go.made = []
        go.ray = FakeRay(watched, **cluster)
        monkeypatch.setattr(engine, "library", lambda _: go.ray)
        monkeypatch.setattr("time.monotonic", go.ray.monotonic)
        outcome = engine.run(job or Job(cache=cache, tasks=TASKS), options or RayOptions(workers=2), progress)
        assert sorted(go.ray.killed) == sorted({actor.number for actor in go.ray.actors})
        assert not list((tmp_path / "cache" / "tmp").glob("*"))
        return outcome

    go.cache = cache
    return go


def test_every_task_is_encoded_once(run):
    outcome = run()
    assert sorted(run.made) == sorted(one.key for one in TASKS)
    assert outcome.encoded == {"mask": 4, "text": 20, "latent": 12} and not outcome.transient and not outcome.notices
    assert len(run.ray.actors) == 2
    assert run.ray.options["max_restarts"] == run.ray.options["max_task_retries"] == 0
    # `settled_heap` does nothing for a thread that has an arena of its own.
    assert run.ray.options["runtime_env"] == {"env_vars": {"MALLOC_ARENA_MAX": "1"}}
    started, ended = run.ray.calls
    assert ended == "shutdown" and started["address"] == "local" and not started["include_dashboard"]
    assert started["job_config"]._runtime_env_has_working_dir(), "or workers find modules in the current directory"
    assert not Path(started["_temp_dir"]).parent.exists()


def test_a_cluster_of_ours_that_others_can_reach_is_refused(run, monkeypatch):
    """As after `import ray` in a program that wanted another one."""
    monkeypatch.setattr(FakeRay, "address", "10.0.0.7")
    with pytest.raises(UsageError, match=r"listens on 10\.0\.0\.7, 10\.0\.0\.7, expected only 127"):
        run()
    assert run.ray.calls[-1] == "shutdown" and not run.ray.actors
    run(options=RayOptions(address="10.0.0.7:6379", workers=2))


@pytest.mark.parametrize("point", range(10))
def test_a_worker_that_dies_is_replaced_and_its_blocks_are_sent_again(run, point):
    asked = []

    def behave(number, job):
        asked.append(number)
        if len(asked) == point + 1:
            raise RayError("The actor died.\nIts node is gone.")
        return done(job)

    outcome = run(behave)
    assert sorted(run.made) == sorted(one.key for one in TASKS) and not outcome.transient
    assert outcome.notices == ("note: 1 worker of the Ray cluster lost and replaced",)
    assert outcome.encoded == {"mask": 4, "text": 20, "latent": 12}
    assert len(run.ray.actors) <= 3


def test_a_worker_that_dies_before_it_has_started(run):
    def starts(number):
        if number in (0, 2, 3):
            raise RayError("no")

    outcome = run(starts=starts)
    assert sorted(run.made) == sorted(one.key for one in TASKS)
    assert outcome.notices == ("note: 3 workers of the Ray cluster lost and replaced",)


def test_a_task_that_kills_its_worker_becomes_findings_after_three_attempts(run):
    def behave(number, job):
        if TASKS[14] in job.tasks:
            tried.append(len(job.tasks))
            raise RayError("killed")
        return done(job)

    tried = []
    outcome = run(behave)
    assert tried == [1, 1, 1] and sorted(run.made) == sorted(one.key for one in TASKS if one is not TASKS[14])
    assert [one.path for one in outcome.transient] == ["latent14a.png", "latent14b.png"]
    assert {one.detail for one in outcome.transient} >= {
        "latent14a.png was not encoded: its task failed 3 times, the last time because killed; run the command again"}
    assert {one.code for one in outcome.transient} == {"not-encoded"}


def test_text_tasks_that_fail_together_are_tried_one_by_one(run):
    """Only one is to blame; captions have no file, so a note names them."""
    def behave(number, job):
        if TASKS[5] in job.tasks:
            tried.append(len(job.tasks))
            return Failure(problem=None, said="RuntimeError: odd")
        return done(job)

    tried = []
    outcome = run(behave)
    assert tried == [8, 1, 1] and len(run.made) == len(TASKS) - 1 and not outcome.transient
    assert outcome.notices == (
        "note: 2 captions not encoded: the task failed 3 times; the last time: RuntimeError: odd",)


def test_embeddings_that_fail_are_no_findings_of_pictures(run):
    """Training needs none, and of a sample that lacks its own the manifest warns."""
    def behave(number, job):
        if any(one.field == "embedding" for one in job.tasks):
            raise RayError("killed")
        return done(job)

    job = Job(cache=run.cache, tasks=[*TASKS[:2], task(99, "embedding")])
    outcome = run(behave, job=job)
    assert not outcome.transient and len(run.made) == 2
    assert outcome.notices[0] == "note: 2 embeddings not encoded: the task failed 3 times; the last time: killed"


def test_too_many_failures_end_the_run(run):
    with pytest.raises(CacheError, match=r"11 rows failed .* a task failed 3 times; the last time: killed"):
        run(lambda number, job: (_ for _ in ()).throw(RayError("killed")))
    with pytest.raises(CacheError, match=r"rows failed .* the last: it is not finite"):
        run(lambda number, job: Outcome(encoded={}, transient=(), failed=4))


def test_a_problem_that_every_worker_would_have_ends_the_run(run):
    with pytest.raises(ModelError, match="of another family"):
        run(lambda number, job: Failure(problem=ModelError("it is of another family"), said="it"))
    assert set(run.ray.killed) == {0, 1} and run.ray.calls[-1] == "shutdown"


def test_workers_that_never_finish_anything(run):
    other = UsageError("node x has Latentry 2, expected 1, as the command")
    with pytest.raises(UsageError, match="node x has Latentry 2"):
        run(starts=lambda number: Failure(problem=other, said=other.message))
    outcome = run(starts=lambda number: Failure(problem=other, said=other.message) if number == 0 else None)
    assert sorted(run.made) == sorted(one.key for one in TASKS) and len(run.ray.actors) == 2  # not replaced
    assert outcome.notices == (f"note: a worker of the Ray cluster was not used: {other.message}",)

    def starts(number):
        raise RayError("no memory\nat all")

    with pytest.raises(CacheError, match="8 workers of the Ray cluster were lost in a row, and none finished a task; "
                                         "the last: no memory"):
        run(starts=starts)


def test_a_worker_that_takes_too_long_is_replaced(run):
    def behave(number, job):
        return Never if number == 0 else done(job)

    outcome = run(behave, options=RayOptions(workers=2, seconds=50.0))
    assert sorted(run.made) == sorted(one.key for one in TASKS) and run.ray.now >= 50
    assert "lost and replaced" in outcome.notices[0]


def test_a_worker_that_does_not_answer_is_replaced(run):
    outcome = run(lambda number, job: Never if number == 1 else done(job),
                  beats=lambda number: Never if number == 1 else 0)
    assert sorted(run.made) == sorted(one.key for one in TASKS)
    assert SILENCE <= run.ray.now < 2 * SILENCE and "lost and replaced" in outcome.notices[0]


def test_a_worker_that_dies_while_it_is_asked(run):
    def beats(number):
        if number == 1:
            raise RayError("gone")
        return 0

    run(lambda number, job: Never if number == 1 else done(job), beats=beats)
    assert sorted(run.made) == sorted(one.key for one in TASKS)


def test_a_cluster_that_starts_no_worker(run):
    with pytest.raises(UsageError, match=r"no worker started on the Ray cluster within 300 s; each needs 1 CPU and "
                                         "0 GPUs"):
        run(starts=lambda number: Never)


def test_a_cluster_without_what_a_worker_needs(run):
    with pytest.raises(UsageError, match="no node of the Ray cluster has 1 GPUs and a CPU, which a worker needs"):
        run(options=RayOptions(gpus=1.0))


@pytest.mark.parametrize(("resources", "options", "wanted"), [
    ([{"CPU": 4.0}], {}, (1, 4, 0.0)), ([{"CPU": 4.0}], {"workers": 2}, (2, 2, 0.0)),
    ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}], {}, (6, 1, 1.0)),
    ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 3.0}], {"gpus": 2.0}, (3, 1, 2.0)),
    ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0}], {"gpus": 0.0}, (2, 2, 0.0)),
    ([{"CPU": 1.0}], {"workers": 3, "gpus": None}, (3, 1, 0.0)),
])
def test_how_many_workers_a_cluster_gets(resources, options, wanted):
    found = Share.of(FakeRay(done, resources=resources), **{"workers": None, "gpus": None, **options})
    assert (found.workers, found.cpus, found.gpus) == wanted


def test_a_request_to_stop_completes_what_is_under_way(run):
    job = Job(cache=run.cache, tasks=TASKS)

    def behave(number, given):
        if len(run.made) >= 4:
            job.claims.stop()
        return done(given)

    run(behave, job=job)
    assert 4 < len(run.made) < len(TASKS)


def test_rows_are_counted_once_however_often_they_are_made(run):
    seen = Counter()

    @contextmanager
    def progress(title, total, unit):
        def tick(count):
            assert count >= 0
            seen[title] += count

        yield tick
        seen[f"{title} of"] = total

    def behave(number, job):
        return Never if number == 0 else done(job)

    run(behave, beats=lambda number: 1, options=RayOptions(workers=2, seconds=30.0), progress=progress)
    for title, rows in (("encoding masks (1 of 3)", 4), ("encoding text (2 of 3)", 20),
                        ("encoding latents (3 of 3)", 12)):
        assert seen[f"{title} of"] == rows <= seen[title]


def test_without_a_cluster(run):
    with pytest.raises(UsageError, match=r"no connection to the Ray cluster 'auto': Could not find any running Ray"):
        run(options=RayOptions(address="auto"), refuses=ConnectionError("Could not find any running Ray\nat all"))


def test_without_the_token_of_a_cluster(run):
    """Ray's own error then, which is no ConnectionError."""
    said = "Token authentication is enabled but no authentication token was found"
    with pytest.raises(UsageError, match=f"no connection to the Ray cluster 'auto': {said}") as error:
        run(options=RayOptions(address="auto"), refuses=RayError(f"{said}\nand more"))
    assert "copy ~/.ray/auth_token from its head to this machine; " in error.value.hint


@pytest.mark.parametrize("device", ["all", "cuda:0,cuda:1"])
def test_several_devices_are_not_for_a_worker(run, device):
    with pytest.raises(UsageError, match=f"--device is '{device}' with --engine ray, expected one device"):
        run(job=Job(cache=run.cache, tasks=TASKS, device=device))


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--engine ray needs the package ray, which is not installed") as error:
        engine.library("auto")
    assert error.value.hint == "pip install 'latentry[ray]', on all nodes"


@pytest.mark.parametrize(("words", "said"), [
    (("--workers", 2), "--workers is given without --engine ray, expected both"),
    (("--address", "auto"), "--address is given without --engine ray, expected both"),
    (("--engine", "spark"), "--engine is 'spark', expected local or ray"),
    (("--engine", "ray", "--num-gpus-per-worker", 1.5), "--num-gpus-per-worker is 1.5, expected a whole number, or"),
    (("--engine", "ray", "--num-gpus-per-worker", 1e-5), "--num-gpus-per-worker is 1e-05, expected a whole number")])
def test_options_of_the_engine(prep, photos, tmp_path, words, said):
    result = prep("encode", photos, "--cache", tmp_path / "cache", *words)
    assert result.code == 2 and said in result.err


@pytest.mark.parametrize("words", [("--workers", 99), ("--address", "nowhere:1"), ("--num-gpus-per-worker", 1),
                                   ("--task-seconds", 5)])
def test_options_of_workers_that_are_not_started(prep, photos, tmp_path, words):
    result = prep("encode", photos, "--cache", tmp_path / "cache", "--engine", "ray", "--dry-run", *words)
    assert result.code == 2 and f"omit {words[0]}" in result.err
    assert f"{words[0]} is given with --dry-run, which starts no workers" in result.err


# ---- in a worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_n7(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "n7")


@pytest.mark.usefixtures("on_n7")
def test_a_problem_of_one_node_names_it(run, monkeypatch):
    """Also a store for which that node alone has no credentials; the hint, the class and the exit code stay."""
    def fail(*_, **__):
        raise CacheError("s3://bucket/cache: no credentials", hint="set AWS_ACCESS_KEY_ID")

    monkeypatch.setattr(ray_worker, "open_to_encode", fail)
    there = Job(cache=SimpleNamespace(store=Bucket.parse("s3://bucket/cache")), tasks=[])
    starts = pickle.loads(pickle.dumps(RayWorker().start(there, None, engine.version("latentry"), ".")))
    with pytest.raises(CacheError) as error:
        run(starts=lambda number: starts)
    assert str(error.value) == error.value.message == "on node n7: s3://bucket/cache: no credentials"
    assert error.value.hint == "set AWS_ACCESS_KEY_ID"
    monkeypatch.setattr(ray_worker.local, "run", fail)
    with pytest.raises(CacheError, match=r"^on node n7: s3://bucket/cache: no credentials$"):
        run(lambda number, job: RayWorker().encode(job))
    old = RayWorker().start(there, None, "77", ".")
    assert old.said.startswith("node n7 has Latentry") and old.said.count("n7") == 1


def test_a_node_with_another_version_or_cache(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(cache=run.cache, tasks=[])
    worker = RayWorker()
    answer = worker.start(job, run.cache.root / "tmp" / "none", engine.version("latentry"), str(tmp_path))
    assert isinstance(answer.problem, CacheError) and " is another directory than on the node of the " in answer.said
    answer = RayWorker().start(job, tmp_path, "77", str(tmp_path / "none"))
    assert isinstance(answer.problem, UsageError) and answer.said.endswith("expected 77, as the command")
    assert " has Latentry " in answer.said
    missing = Job(cache=type(run.cache)(root=tmp_path / "elsewhere"), tasks=[])
    answer = RayWorker().start(missing, tmp_path, engine.version("latentry"), str(tmp_path))
    assert isinstance(answer.problem, CacheError) and "there is no cache in" in answer.said
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("error", "problem", "said"), [
    (ModelError("no"), True, "no"), (RuntimeError("odd\nand more"), False, "RuntimeError: odd")])
@pytest.mark.usefixtures("on_n7")
def test_an_error_in_a_worker_is_its_answer(monkeypatch, error, problem, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(ray_worker.local, "run", fail)
    answer = RayWorker().encode(Job(cache=None, tasks=[]))
    assert isinstance(answer.problem, Problem) == problem and answer.said == f"on node n7: {said}"
