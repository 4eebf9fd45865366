"""The pages of a project: what they show, what they take, and what they refuse."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from viewed_runs import write_run
from viewing import Viewing, studio_here

from prep.cli.forms import step_forms
from prep.demo import write_demo
from prep.jobs.queue import add, job_of, jobs_of
from prep.runs.documents import with_checksum
from prep.runs.heartbeat import boot_id, own_start
from prep.studio.looks import Looks
from prep.studio.project import read_project
from prep.studio.steps import next_step
from prep.view.guard import App, Receive, Scope, Send

PATIENCE = 60.0  # seconds, on a busy machine
FORMS = step_forms()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio") / "a project <b>"
    write_demo(folder)
    return folder


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Viewing]:
    with studio_here(tmp_path, FORMS) as running:
        yield running


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_project_is_read_and_its_next_step_found(demo: Path, tmp_path: Path) -> None:
    project = read_project(demo)
    assert (project.pictures, project.recipes, project.settings) == (("photos",), ("dataset.toml",), ("train.toml",))
    assert (project.models, project.manifests, project.runs) == (("model",), (), ())
    assert next_step(project).form == "prep-encode"
    assert next_step(read_project(tmp_path)).form == "prep-init"


def test_all_pages_of_a_project(demo: Path) -> None:
    with studio_here(demo, FORMS) as running:
        home = running.get("/").text
        assert "a project &lt;b&gt;" in home
        assert "<b>" not in home
        for form in FORMS:
            page = running.get(f"/form/{form.name}")
            assert page.status == 200
            assert f"{form.program} {form.command}" in page.text
        assert "prep encode dataset.toml --cache cache --model model" in running.get("/form/prep-encode").text
        assert running.get("/look/recipes/dataset.toml/").status == 200
        assert 'href="' + running.base + '/">Project</a>' in running.get("/look/pictures/photos/").text
        assert "the project has no model among its runs" in running.get("/look/runs/model/").text
        for nowhere in ("/form/prep-gc", "/look/pictures/..%2f/", "/look/runs/model/", "/look/x/photos/", "/jobs/7",
                        "/x", "/jobs/..", "/static/../app.py", "/api/x"):
            assert running.get(nowhere).status in (404, 409), nowhere


def test_form_shows_the_command_and_adds_it(studio: Viewing, tmp_path: Path) -> None:
    page = studio.get("/form/prep-scan?source=a%20b&model=%22%3Cx").text
    assert "prep scan &#39;a b&#39; --model &#39;&#34;&lt;x&#39;" in page
    assert "still to be filled: source" in studio.get("/form/prep-scan?source=").text
    assert studio.post("/form/prep-scan?source=").status == 409
    answer = studio.post("/form/prep-scan?source=missing")
    assert answer.headers["x-latentry-next"] == f"{studio.base}/jobs/000001"
    wait_for(lambda: job_of(tmp_path, "1").is_over)
    assert "source missing does not exist" in studio.get("/jobs/1").text
    assert "Failed with 5" in studio.get("/jobs/1").text


def test_pages_of_jobs_have_tags_that_change_with_them(studio: Viewing, tmp_path: Path) -> None:
    for path in ("/", "/jobs"):
        tag = studio.get(path).headers["etag"]
        assert studio.get(path, if_none_match=tag).status == 304
    studio.post("/queue/pause")
    assert studio.get("/jobs", if_none_match=tag).status == 200
    tag = studio.get("/jobs").headers["etag"]
    add(tmp_path, ("prep", "codes"))
    assert studio.get("/jobs", if_none_match=tag).status == 200


def test_queue_waits_for_a_person_if_it_was_there_before(tmp_path: Path) -> None:
    add(tmp_path, ("prep", "codes"))
    with studio_here(tmp_path, FORMS) as running:
        for path in ("/", "/jobs", "/jobs/1"):
            assert "The queue is paused" in running.get(path).text
        time.sleep(1.5)
        assert [job.state for job in jobs_of(tmp_path)] == ["waiting"]
        running.post("/queue/start")
        wait_for(lambda: job_of(tmp_path, "1").is_over)
        assert "The queue is paused" not in running.get("/jobs/1").text
    assert job_of(tmp_path, "1").state == "done"


def test_lost_job_is_explained(studio: Viewing, tmp_path: Path) -> None:
    studio.post("/queue/pause")
    job = add(tmp_path, ("prep", "codes"))
    (job.folder / "started.json").write_text('{"host": "elsewhere", "time": 1.0}')
    os.utime(job.folder / "started.json", (1, 1))
    assert "The process that kept this job is gone" in studio.get("/jobs/1").text


def test_jobs_by_json(studio: Viewing, tmp_path: Path) -> None:
    studio.post("/queue/pause")
    for _ in range(2):
        answer = studio.post("/api/jobs", json.dumps({"words": ["prep", "codes"]}).encode())
        assert answer.status == 200
    assert json.loads(answer.body)["jobs"][0]["name"] == "000002"
    studio.post("/api/jobs/2/first")
    listed = json.loads(studio.get("/api/jobs").body)
    assert ([job["name"] for job in listed["jobs"]], listed["paused"]) == (["000002", "000001"], True)
    assert json.loads(studio.post("/api/jobs/1/remove").body)["jobs"][0]["command"] == "prep codes"
    assert json.loads(studio.get("/api/jobs/2").body)["log"] == ""
    for body in (b"", b"[]", b"{}", b'{"words": "prep"}', b'{"words": ["sh", "-c", "ls"]}', b"\xff", b"[" * 9999):
        refused = studio.post("/api/jobs", body)
        assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (409, "usage"), body
    large = studio.post("/api/jobs", b" " * (1 << 20) + b"{}")
    assert json.loads(large.body)["error"]["message"] == "the body has 1048578 bytes, expected at most 1048576"
    assert studio.post("/api/jobs/2/burn").status == 404
    assert [job.name for job in jobs_of(tmp_path)] == ["000002"]


@pytest.mark.parametrize("path", ["/form/prep-scan?source=a", "/jobs/1/stop", "/queue/start", "/api/jobs",
                                  "/forecast/prep-encode?source=a", "/look/runs/run/ask/sample"])
def test_others_can_send_nothing(studio: Viewing, tmp_path: Path, path: str) -> None:
    own = {"origin": f"http://127.0.0.1:{studio.port}", "x_latentry_edit": studio.edit_token}
    for without in ({"origin": "http://evil.test"}, {"x_latentry_edit": "x"}, {"sec_fetch_site": "cross-site"},
                    {"host": "evil.test"}):
        assert studio.ask("POST", studio.base + path, body=b"{}", **{**own, **without}).status == 403
    assert studio.ask("POST", path, body=b"{}", **own).status == 404  # without the token
    assert studio.get(path).status in (200, 404, 405, 409)
    assert not (tmp_path / "jobs").exists()


def test_log_of_a_job_is_text(studio: Viewing, tmp_path: Path) -> None:
    studio.post("/queue/pause")
    job = add(tmp_path, ("prep", "scan", "<script>alert(1)</script>"))
    (job.folder / "log.txt").write_bytes(b"<script>alert(2)</script> \x1b[31m \xff\n" + b"x" * 100_000)
    page = studio.get("/jobs/1").text
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "xxx" in page  # a line longer than what is shown


@pytest.mark.skipif(sys.platform == "win32", reason="names and pipes of POSIX")
def test_names_that_no_address_has_and_pipes_are_left_out(tmp_path: Path) -> None:
    for name in ("photos", os.fsdecode(b"\xff"), "a\nb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").touch()
    for ending in ("json", "toml", "gguf"):
        os.mkfifo(tmp_path / f"pipe.{ending}")
    project = read_project(tmp_path)
    assert (project.pictures, project.manifests, project.models) == (("photos",), (), ())
    assert (project.recipes, project.settings) == ((), ())


def test_words_that_are_no_text_are_told(studio: Viewing, tmp_path: Path) -> None:
    studio.post("/queue/pause")
    add(tmp_path, ("prep", "scan", "\udcff"))
    assert json.loads(studio.get("/api/jobs").body)["jobs"][0]["words"][2] == "\udcff"
    assert json.loads(studio.get("/api/jobs/1").body)["jobs"][0]["state"] == "waiting"
    assert "prep scan $&#39;\\udcff&#39;" in studio.get("/jobs/1").text


def test_jobs_that_cannot_be_read(studio: Viewing, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_bytes(b"")
    for path in ("/", "/jobs"):
        assert "jobs is a file, expected a directory" in studio.get(path).text
    refused = studio.post("/api/jobs", b'{"words": ["prep", "codes"]}')
    assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (409, "path")


def test_run_is_opened_once_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory gets a new heartbeat every two seconds."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    opened: list[str] = []

    def open_site(_: Looks, kind: str, name: str) -> tuple[App, Any]:
        opened.append(name)
        return _not_called, SimpleNamespace(pictures=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(Looks, "_opened", open_site)
    looks = Looks(tmp_path, "", "")
    for number in range(3):
        looks.opened("runs", "run")
        (tmp_path / "run" / f"heartbeat-{number}").touch()
    assert opened == ["run"]
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "run.json").write_text("[]")
    looks.opened("runs", "run")
    assert opened == ["run", "run"]


def test_slow_place_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, opening = threading.Event(), threading.Event()
    for name in ("slow", "quick"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")

    def open_site(_: Looks, kind: str, name: str) -> tuple[App, Any]:
        opening.set()
        assert name == "quick" or slow.wait(PATIENCE)
        return _not_called, SimpleNamespace(pictures=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(Looks, "_opened", open_site)
    looks = Looks(tmp_path, "", "")
    thread = threading.Thread(target=looks.opened, args=("runs", "slow"))
    thread.start()
    assert opening.wait(PATIENCE)
    looks.opened("runs", "quick")
    assert thread.is_alive()
    slow.set()
    thread.join()


def test_oldest_place_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for name in "abcdef":
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")

    def open_site(_: Looks, kind: str, name: str) -> tuple[App, Any]:
        return _not_called, SimpleNamespace(pictures=SimpleNamespace(close=lambda: closed.append(name)))

    monkeypatch.setattr(Looks, "_opened", open_site)
    looks = Looks(tmp_path, "", "")
    for name in "abcdaef":
        looks.opened("runs", name)
    assert closed == ["b", "c"]


@pytest.mark.skipif(sys.platform == "win32", reason="links of POSIX")
def test_links_are_named_and_not_looked_into(tmp_path: Path) -> None:
    (tmp_path / "outside" / "model").mkdir(parents=True)
    (tmp_path / "outside" / "a.png").touch()
    (tmp_path / "outside" / "model" / "model_index.json").touch()
    project = tmp_path / "project"
    project.mkdir()
    (project / "photos").symlink_to(tmp_path / "outside")
    (project / "model").symlink_to(tmp_path / "outside" / "model")
    found = read_project(project)
    assert (found.pictures, found.links, found.models) == ((), ("photos",), ("model",))
    with studio_here(project, FORMS) as running:
        assert "<bdi>photos</bdi>. Steps take them by name." in running.get("/").text
        assert "the project has no photos among its pictures" in running.get("/look/pictures/photos/").text


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """A project with two runs, of which one trained other settings and prompts."""
    write_run(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "runs" / "<i>")
    place = tmp_path / "runs" / "<i>"
    body = json.loads((place / "run.json").read_bytes())
    del body["self"]
    body |= {"manifest": "../../manifest.json", "config": {"steps": 5, "lora": {"rank": 8}}}
    (place / "run.json").write_bytes(with_checksum(body))
    log = (place / "log.jsonl").read_text().replace("a blue square", "a green square")
    (place / "log.jsonl").write_text(log)
    return tmp_path


def test_runs_are_compared(two_runs: Path) -> None:
    with studio_here(two_runs, FORMS) as running:
        home = running.get("/").text
        assert 'value="runs/&lt;i&gt;" aria-label="Compare runs/&lt;i&gt;" checked' in home
        answer = running.get("/compare?run=run&run=runs%2F%3Ci%3E")
        page = answer.text
        assert running.get("/compare?run=run&run=runs%2F%3Ci%3E", if_none_match=answer.headers["etag"]).status == 304
        assert "<i>" not in page
        for differs in ("<code>lora.rank</code>", "<code>steps</code>", "<code>manifest</code>"):
            assert differs in page
        assert page.count('class="second"') == 2 * 3  # a legend and a line in each chart
        assert page.count('class="film"') == 2 * 2  # prompts that both have
        assert "2 prompts that one run alone has are left out." in page
        for picture in re.findall('src="([^"]*/cell/[^"]*)"', page):
            assert running.ask("GET", picture).headers["content-type"] == "image/jpeg"
        for chosen, says in (("run=run", "1 run is chosen, expected 2 to 4"),
                             ("run=run&run=run", "1 run is chosen"), ("", "0 runs are chosen"),
                             ("&".join(f"run={name}" for name in "abcde"), "5 runs are chosen, expected 2 to 4")):
            refused = running.get(f"/compare?{chosen}")
            assert (refused.status, says in refused.text) == (400, True)
        assert "the project has no x among its runs" in running.get("/compare?run=run&run=x").text


def test_run_is_asked_for_pictures(two_runs: Path) -> None:
    beat = {"format": "latentry/heartbeat", "version": 1, "token": "abc", "pid": os.getpid(), "host": platform.node(),
            "boot": boot_id(), "start": own_start(), "time": time.time(), "phase": "training", "since": 1.0, "step": 4,
            "stepped": time.time(), "asked": [], "ended": None}
    with studio_here(two_runs, FORMS) as running:
        assert "no process trains" in running.post("/look/runs/run/ask/sample").text
        (two_runs / "run" / "heartbeat.json").write_text(json.dumps(beat))
        assert f'data-ask="{running.base}/look/runs/run/ask/sample"' in running.get("/look/runs/run/run").text
        assert "draws sample pictures after the step" in running.post("/look/runs/run/ask/sample").text
        assert (two_runs / "run" / "sample.request").read_text() == "abc\n"


async def _not_called(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(scope)
