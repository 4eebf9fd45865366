"""A scan on a cluster, with workers that fail in every way: it reports what a scan without one reports."""

from __future__ import annotations

import shutil
from collections import Counter
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from fake_ray import Never, RayError
from near_ray import NearRay
from pictures import draw
from walking import walk

from prep.errors import CacheError, PathError, Problem, UsageError
from prep.images.plugins import decoders
from prep.scan.crew import ray_crew
from prep.scan.memo import ScanMemo
from prep.scan.ray_worker import ScanWorker
from prep.scan.scanner import scan
from prep.workers import actors, crew
from prep.workers.crew import Failure
from prep.workers.ray import Share

PICTURES = 20


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Pictures, one of which is a copy, one almost, and one no picture."""
    monkeypatch.setattr(crew, "PACE", 0.005)
    root = tmp_path / "photos"
    for number in range(PICTURES - 3):
        draw(root / f"{number}.png", (64, 48), seed=number).with_suffix(".txt").write_text(f"words {number}")
    shutil.copy(root / "3.png", root / "copy.png")
    draw(root / "near.png", (66, 50), seed=4)
    (root / "none.png").write_bytes(b"no picture")
    return root


@pytest.fixture
def run(photos):
    """`run(behave, …)`: the report of a scan by such workers; `run.crew` and `run.ray` made it, with `run.notes`."""
    def go(behave=lambda number, name: None, *, workers=2, memory=None, places=dict):
        go.ray = NearRay(behave)
        go.notes = []
        go.crew = ray_crew(go.ray, Share.of(go.ray, workers, 0.0), places, go.notes.append)
        try:
            return scan(walk(photos, source=0, mask_from="none"), jobs=9, crew=go.crew, memory=memory)
        finally:
            assert all(actor.dead.is_set() for actor in go.ray.actors), "all are ended"

    return go


@pytest.fixture
def wanted(photos):
    return scan(walk(photos, source=0, mask_from="none"), jobs=2)


def test_the_report_is_that_of_this_computer(run, wanted):
    assert run() == wanted and wanted.pictures == PICTURES
    codes = {one.code for one in wanted.findings}
    assert codes == {"exact-duplicate", "near-duplicate", "not-an-image", "missing-caption"}
    assert len(run.ray.actors) == 2 and not run.notes
    assert run.ray.options["max_restarts"] == run.ray.options["max_task_retries"] == 0
    assert run.ray.options["max_concurrency"] == 2 and run.crew.at_once == 4


@pytest.mark.parametrize("point", range(0, 17, 8))
def test_a_worker_that_dies_is_replaced_and_its_items_are_sent_again(run, wanted, point):
    asked = []

    def behave(number, name):
        if name in ("examine", "decode_again"):
            asked.append(number)
            if len(asked) == point + 1:
                raise RayError("The actor died.\nIts node is gone.")

    assert run(behave) == wanted
    assert run.notes == ["note: 1 worker of the Ray cluster lost and replaced"]
    assert len(run.ray.actors) <= 3


def test_items_that_cost_three_workers_become_findings_and_are_not_remembered(run, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.fs.memo.REST_NS", -10**12)
    plain, tried = ScanWorker.examine, Counter()

    def examine(self, items):
        if any(item.name == "5.png" for item in items):
            tried.update([len(items)])
            raise RayError("killed")
        return plain(self, items)

    monkeypatch.setattr(ScanWorker, "examine", examine)
    memory = ScanMemo(tmp_path / "memo")
    report = run(memory=memory)
    memory.close()
    lost = [one for one in report.findings if "was not examined" in one.detail]
    assert sum(tried.values()) == 3 and {one.path for one in lost} >= {"5.png"}
    assert {(one.code, one.detail) for one in lost} == {("decoder-crashed", "was not examined: its worker of the Ray "
                                                         "cluster was lost 3 times; the last time: killed")}
    monkeypatch.setattr(ScanWorker, "examine", plain)
    seen = Counter()
    memory = ScanMemo(tmp_path / "memo")
    assert run(lambda number, name: seen.update([name]), memory=memory) == wanted
    memory.close()
    assert 0 < seen["examine"] <= len(lost), "the others were remembered"


def test_workers_that_never_finish_anything(run):
    def behave(number, name):
        if name == "examine":
            raise RayError("no memory\nat all")

    with pytest.raises(CacheError, match="8 workers of the Ray cluster were lost in a row, and none finished a task; "
                                         "the last: "):
        run(behave)


def test_a_worker_that_dies_before_it_has_started(run, wanted):
    def behave(number, name):
        if name == "start" and number in (0, 2):
            raise RayError("no")

    assert run(behave) == wanted
    assert run.notes == ["note: 2 workers of the Ray cluster lost and replaced"]


def test_a_worker_that_does_not_answer_is_replaced(run, wanted, monkeypatch):
    monkeypatch.setattr(actors, "BEAT", 0.0)
    monkeypatch.setattr(actors, "SILENCE", 0.1)
    silent = ("examine", "decode_again", "beat")
    assert run(lambda number, name: Never if number == 0 and name in silent else None) == wanted
    assert run.notes == ["note: 1 worker of the Ray cluster lost and replaced"]


def test_a_worker_that_dies_while_it_is_asked(run, wanted, monkeypatch):
    monkeypatch.setattr(actors, "BEAT", 0.0)

    def behave(number, name):
        if number == 0 and name in ("beat", "examine"):
            if name == "examine":
                return Never
            raise RayError("gone")
        return None

    assert run(behave) == wanted


def test_workers_that_do_not_fit_their_nodes(run, wanted):
    other = UsageError("node x has Latentry 2, expected 1, as the command")
    refused = Failure(problem=other, said=other.message)
    assert run(lambda number, name: refused if name == "start" and number == 0 else None) == wanted
    assert run.notes == [f"note: a worker of the Ray cluster was not used: {other.message}"]
    assert len(run.ray.actors) == 2, "it is not replaced"
    with pytest.raises(UsageError, match="node x has Latentry 2"):
        run(lambda number, name: refused if name == "start" else None)


def test_a_cluster_that_starts_no_worker(run, monkeypatch):
    monkeypatch.setattr(actors, "START", 0)
    with pytest.raises(UsageError, match="no worker started on the Ray cluster within 0 s; each needs 1 CPU and 0 "):
        run(lambda number, name: Never if name == "start" else None)


@pytest.mark.parametrize(("failure", "error", "said"), [
    (Failure(problem=CacheError("the store is away"), said="the store is away"), CacheError, "the store is away"),
    (Failure(problem=None, said="KeyError: odd"), RuntimeError, "in a worker of the Ray cluster: KeyError: odd")])
def test_an_error_in_a_worker_ends_the_scan(run, failure, error, said):
    with pytest.raises(error, match=said):
        run(lambda number, name: failure if name == "examine" else None)


def test_what_a_worker_looks_at_before_it_starts(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here, changed = str(tmp_path), photos.stat().st_mtime_ns
    good = (version("latentry"), decoders(), here, {"photos": changed}, 1)
    assert ScanWorker().start(*good) is None
    for place, value, kind, said in (
            (0, "77", UsageError, "expected 77, as the command"),
            (1, "pillow 1", UsageError, "expected pillow 1, as the command"),
            (3, {"photos": changed + 1}, PathError, "photos on node "),
            (3, {"elsewhere": changed}, PathError, "elsewhere cannot be read on node ")):
        answer = ScanWorker().start(*good[:place], value, *good[place + 1:])
        assert isinstance(answer.problem, kind) and said in answer.said
    assert "decodes pictures with" in ScanWorker().start(good[0], "x", *good[2:]).said
    assert "is another one than on the node of the command" in ScanWorker().start(*good[:3], {here: 1}, 1).said


def test_a_problem_of_one_node_names_it(monkeypatch):
    """As a store for which that node alone has no credentials."""
    def fail(_):
        raise PathError("s3://bucket/photos: no credentials", hint="set AWS_ACCESS_KEY_ID")

    monkeypatch.setattr("platform.node", lambda: "n7")
    worker = ScanWorker()
    worker._examiner = SimpleNamespace(examine=fail)
    answer = worker.examine([])
    assert answer.said == answer.problem.message == "on node n7: s3://bucket/photos: no credentials"
    assert isinstance(answer.problem, PathError) and answer.problem.hint == "set AWS_ACCESS_KEY_ID"


@pytest.mark.parametrize(("error", "problem"), [(CacheError("no"), True), (RuntimeError("odd\nand more"), False)])
def test_an_error_of_a_worker_is_its_answer(monkeypatch, error, problem):
    def fail(items):
        raise error

    worker = ScanWorker()
    monkeypatch.setattr("platform.node", lambda: "n7")
    worker._examiner = type("Failing", (), {"examine": staticmethod(fail)})()
    answer = worker.examine([])
    assert isinstance(answer.problem, Problem) == problem
    assert answer.said == f"on node n7: {'no' if problem else 'RuntimeError: odd'}" and worker.beat() == 0


@pytest.mark.parametrize(("words", "said"), [
    (("--workers", 2), "--workers is given without --engine ray, expected both"),
    (("--address", "auto"), "--address is given without --engine ray, expected both"),
    (("--engine", "spark"), "--engine is 'spark', expected local or ray")])
def test_options_of_the_engine(prep, photos, words, said):
    result = prep("scan", photos, *words)
    assert result.code == 2 and said in result.err
