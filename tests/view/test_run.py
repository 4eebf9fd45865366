"""The pages of a run: history, pictures through time, the hardest samples; also while the run is going on."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from run_pages import SIZES, STEPS
from small_manifest import write_small
from viewed_runs import records, write_run
from viewing import viewing_here

from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.pages.overlay import Shot
from prep.pages.run import films_of
from prep.runs.history import Grid
from prep.runs.losses import HEAD, RECORD, adjusted, hardness, short_ids
from prep.runs.sheets import keyed_prompts
from prep.view.memory import Memory
from prep.view.run import Fresh, RunFiles


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


@pytest.fixture
def server(run):
    with viewing_here(run.parent / "manifest.json", run) as running:
        yield running


def grid(step, *prompts):
    return Grid(step=step, picture=f"samples/{step}.png", prompts=prompts, sizes=((8, 8),) * len(prompts))


# ---- films -----------------------------------------------------------------------------------------------------------


def shape(grids, most, prompts=9):
    """Each film's prompt, and the step, grid and place of its pictures; and the note."""
    def pictures(number):
        return {prompt: (number, place) for place, prompt in enumerate(keyed_prompts(grids[number]))}

    films, note = films_of(grids, pictures, lambda name, place: Shot(name=name, address=place), steps=most,
                           prompts=prompts)
    return [(film.prompt, [(frame.step, *frame.shot.address) for frame in film.frames]) for film in films], note


def test_pictures_are_put_together_by_prompt():
    grids = [grid(0, "a", "b"), grid(5, "b", "c", "b"), grid(9, "b", "a")]
    every = [("a", [(0, 0, 0), (9, 2, 1)]), ("b", [(0, 0, 1), (5, 1, 0), (9, 2, 0)]), ("c", [(5, 1, 1)]),
             ("b", [(5, 1, 2)])]
    assert shape(grids, 9) == (every, "") and shape([], 9) == ([], "")
    assert shape(grids, 9, prompts=2) == (every[:2], "2 of 4 prompts are shown.")


def test_a_log_without_prompts_has_whole_grids(run):
    log = [{"event": "sample", "step": step, "picture": f"samples/step-{step:06d}.png"} for step in (10, 20, 10)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    with viewing_here(run.parent / "manifest.json", run) as server:
        text = server.get("/run").text
        assert re.findall(r"/cell/([^\"]*)", text) == ["2/all?step=10", "1/all?step=20"], "the newest of a step"
        assert "All prompts" in text


@pytest.mark.parametrize(("most", "steps"), [(1, [0]), (2, [0, 99]), (4, [0, 33, 66, 99])])
def test_of_many_steps_some_are_shown(most, steps):
    ((_, frames),), note = shape([grid(step, "a") for step in range(100)], most)
    assert [step for step, _, _ in frames] == steps
    assert note == f"{most} of 100 steps with pictures are shown, evenly spread; all are in samples."


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_hardness_is_the_mean_of_adjusted_losses():
    random = np.random.default_rng(0)
    ids = random.integers(0, 256, (30, 32), np.uint8)
    found = np.zeros(2000, RECORD)
    found["loss"], found["timestep"] = random.random(2000), random.integers(0, 1000, 2000)
    owners = random.integers(0, 29, 2000)  # the last sample is never shown
    found["id"] = short_ids(ids)[owners]
    found["id"][::50] = 7  # of another manifest
    hard = hardness(found, ids)
    for sample in range(30):
        mine = found["id"] == short_ids(ids)[sample]
        assert hard.shown[sample] == mine.sum()
        if mine.any():
            assert hard.ratio[sample] == pytest.approx(adjusted(found)[mine].mean())
            assert hard.loss[sample] == pytest.approx(found["loss"][mine].mean())
    assert np.isnan(hard.ratio[29]) and hard.showings == 1960
    assert len(hardness(found, ids[:0]).ratio) == 0 and hardness(found[:0], ids).showings == 0


# ---- pages -----------------------------------------------------------------------------------------------------------


def names(text):
    found = re.findall(r'<p class="name"><a [^>]*><bdi>(.*?)</bdi>', text)
    return [one.replace("<wbr>", "") for one in found]


def test_the_page_of_a_run(server, run):
    text = server.get("/run").text
    assert f"Finished: {STEPS} of {STEPS} steps" in text and text.count('class="plot"') == 4
    assert "lowest validation loss (step 40)" in text and "training time" in text and "loss, smoothed" not in text
    assert text.index("validation loss") < text.index("samples per second")
    assert f"<code>train sample {run.resolve()} --compare</code><button type=\"button\" class=\"copy\">Copy" in text
    assert "1 is typical" in text and 'data-ask' not in text
    assert "saw &lt;b&gt;a prompt&lt;/b&gt;" in text.replace("<wbr>", "") and "Validation loss by timestep" in text
    assert text.count('<figure class="film">') == 3 and text.count("<li data-step=") == 3 * STEPS // 10
    assert names(text) == ["sub/b.png", "a.png"]
    assert "<span>2.08 times the usual loss</span> · <span>loss 0.9000</span> · <span>shown 1 time</span>" in text


def test_samples_are_sorted_and_filtered_by_their_losses(server):
    assert names(server.get("/?sort=loss&order=down").text) == ["sub/b.png", "a.png", "c.png"]
    assert names(server.get("/?sort=loss").text) == ["a.png", "sub/b.png", "c.png"]
    assert names(server.get("/?loss=1").text) == ["sub/b.png"] and names(server.get("/?loss=0").text) != []
    answer = server.get("/?loss=x")
    assert answer.status == 400 and "loss is &#39;x&#39;, expected a number, 1 for the usual loss" in answer.text


def test_a_sample_has_its_losses(server):
    number = {name: server.get(f"/sample/{number}").text for number in range(3)
              for name in re.findall(r"<h1><bdi>(.*?)</bdi>", server.get(f"/sample/{number}").text)}
    assert "0.46 times the usual loss, 0.2000 on average" in number["a.png"] and "Its losses" in number["a.png"]
    assert "the run has not shown it" in number["c.png"] and "Its losses" not in number["c.png"]


def test_sampled_pictures(server):
    for cell, size in enumerate(SIZES):
        answer = server.get(f"/cell/3/{cell}")
        assert answer.headers["content-type"] == "image/jpeg"
        picture = Image.open(io.BytesIO(answer.body))
        assert picture.size == size and abs(picture.getpixel((5, 5))[0] - (3 * STEPS + cell)) < 3
    whole = Image.open(io.BytesIO(server.get("/cell/0/all").body))
    assert whole.width > SIZES[0][0]
    for path in ("/cell/4/0", "/cell/0/3", "/cell/-1/0", "/cell/0/-1", "/cell/0/ALL", "/cell/0", "/cell/../run.json/0"):
        assert server.get(path).status == 404


@pytest.mark.parametrize("path", ["../secret.png", "samples/../../secret.png", "/{root}/secret.png", "samples/..",
                                  "samples", "samples/link.png", "samples/pipe.png", "samples/not.png", "run.json"])
def test_a_log_cannot_name_other_files(run, path):
    import os

    root = run.parent
    Image.new("RGB", (8, 8), "red").save(root / "secret.png")
    (run / "samples" / "link.png").symlink_to(root / "secret.png")
    (run / "samples" / "not.png").write_bytes(b"no picture")
    os.mkfifo(run / "samples" / "pipe.png")
    line = {"event": "sample", "step": 9, "picture": path.format(root=root), "prompts": ["x"], "sizes": [[8, 8]]}
    (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    files = RunFiles(run, open_manifest(read_manifest(root / "manifest.json")).samples, Memory())
    (found,) = files.history.grids
    assert files.cell(found, 0) is None and files.cell(found, -1) is None


def test_a_run_that_goes_on(run):
    log = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(log[:5]))
    kept = records(run.parent)
    (run / "losses.bin").write_bytes(HEAD + kept[:1].tobytes())
    with viewing_here(run.parent / "manifest.json", run) as server:
        text = server.get("/run").text
        assert "Running, or killed: 4 of 40 steps" in text and "it has no heartbeat" in text
        assert names(server.get("/?loss=0").text) == ["a.png"]
        with (run / "log.jsonl").open("a") as file:
            file.write("".join(log[5:]))
        (run / "losses.bin").write_bytes(HEAD + kept.tobytes())
        wait_for(lambda: "Finished: 40 of 40 steps" in server.get("/run").text)
        wait_for(lambda: names(server.get("/?loss=0").text) == ["a.png", "sub/b.png"])


def beating(run, **other):
    """Writes a heartbeat of this process into a run that goes on, or another one."""
    from prep.runs.heartbeat import NAME, Heartbeat, boot_id, own_start

    log = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(log[:5]))
    now = time.time()
    usual = {"token": "a" * 32, "pid": os.getpid(), "host": "gpu-7", "boot": boot_id(), "start": own_start(),
             "time": now, "phase": "validating step 4", "since": now, "step": 4, "stepped": now - 75}
    beat = Heartbeat(**{**usual, "host": os.uname().nodename, **other})
    (run / NAME).write_bytes(beat.spell())
    return beat


def test_a_run_that_is_trained_tells_what_it_does(run):
    beat = beating(run)
    with viewing_here(run.parent / "manifest.json", run) as server:
        answer = server.get("/run")
        assert "Running: 4 of 40 steps" in answer.text and "<code>train " not in answer.text
        assert f"Validating step 4, process {os.getpid()} on {beat.host} · last step <span data-ago=" in answer.text
        assert "1 min ago</span>" in answer.text and answer.text.count("data-ask=") == 2
        tag = answer.headers["etag"]
        again = server.get("/run", if_none_match=tag)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        beating(run, step=5, stepped=beat.stepped + 60)
        answer = server.get("/run", if_none_match=tag)
        assert answer.status == 200 and "Running: 5 of 40 steps" in answer.text and answer.headers["etag"] != tag


@pytest.mark.parametrize(("beat", "said"), [
    ({"start": "1"}, "Killed: 4 of 40 steps"), ({"ended": "the disk is full"}, "Failed: 4 of 40 steps"),
    ({"host": "gpu-7"}, "Running, or killed: 4 of 40 steps")],
    ids=["killed", "failed", "silent"])
def test_a_run_that_is_trained_no_more(run, beat, said):
    beating(run, **beat, **({"time": time.time() - 7300} if "host" in beat else {}))
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    (run / "checkpoints" / "step-000004" / "state.json").write_text("{}")
    with viewing_here(run.parent / "manifest.json", run) as server:
        text = server.get("/run").text
        assert said in text and "data-ask=" not in text
        assert f"<code>train run --resume -o {run.resolve()}</code>" in text
        why = {"start": "has ended without a message, at: validating step 4.", "ended": "the disk is full.",
               "host": f"The last sign of process {os.getpid()} on gpu-7 is 2.0 h old."}
        assert why[next(iter(beat))] in text


def pressed(server, kind, **headers):
    """What a button of the page sends."""
    token = re.search(r'data-token="([^"]+)"', server.get("/run").text)[1]
    given = {"origin": f"http://127.0.0.1:{server.port}", "x_latentry_edit": token, **headers}
    return server.ask("POST", f"{server.base}/ask/{kind}", body=b"",
                      **{name: value for name, value in given.items() if value is not None})


def test_buttons_ask_the_process(run):
    beating(run)
    with viewing_here(run.parent / "manifest.json", run) as server:
        assert pressed(server, "sample").text == (
            f"Asked: process {os.getpid()} on {os.uname().nodename} draws sample pictures after the step that it is "
            "at.")
        assert (run / "sample.request").read_text() == "a" * 32 + "\n"
        assert "Drawing after this step …" in server.get("/run").text
        beating(run, ended="x")
        answer = pressed(server, "stop")
        assert answer.status == 409 and answer.text.startswith(f"no process trains {run}: process ")
        assert not (run / "stop.request").exists()


def test_only_the_page_itself_can_ask(run):
    beating(run)
    with viewing_here(run.parent / "manifest.json", run) as server:
        for wrong in ({"x_latentry_edit": "x"}, {"x_latentry_edit": None}, {"origin": None}, {
                "origin": "http://elsewhere.example"}, {"sec_fetch_site": "cross-site"}, {"host": "elsewhere.example"}):
            assert pressed(server, "stop", **wrong).status == 403, wrong
        assert server.get("/ask/stop").status in (404, 405) and pressed(server, "remove").status == 404
        assert not (run / "stop.request").exists()
    with viewing_here(run.parent / "manifest.json") as server:  # of a manifest nothing is asked
        given = {"origin": f"http://127.0.0.1:{server.port}", "x_latentry_edit": ""}
        assert server.ask("POST", f"{server.base}/ask/stop", body=b"", **given).status == 405


def test_two_runs_are_compared(run, tmp_path):
    shutil.copytree(run, tmp_path / "other" / "run")
    manifest = run.parent / "manifest.json"
    with viewing_here(manifest, run, before=manifest, before_run=tmp_path / "other" / "run") as server:
        answer = server.get("/compare")
        assert "Nothing: these runs have the same settings, data and models." in answer.text
        assert "<bdi>other/<wbr>run</bdi>" in answer.text
        assert server.get("/compare", if_none_match=answer.headers["etag"]).status == 304
        assert all(f'"{server.base}/compare"' in server.get(page).text for page in ("/run", "/before/run", "/"))
        for picture in re.findall('src="([^"]*/cell/[^"]*)"', answer.text):
            assert server.ask("GET", picture).status == 200
        with (run / "log.jsonl").open("a") as log:
            log.write('{"event": "step", "step": 41, "loss": 0.1}\n')
        assert server.get("/compare", if_none_match=answer.headers["etag"]).status == 200
        assert "no process trains" in server.post("/before/ask/sample").text
    with viewing_here(manifest, run, before=manifest) as server:
        assert server.get("/compare").status == 404
        assert "/compare" not in server.get("/run").text


def test_since_may_be_a_run(prep, run):
    refused = prep("view", run, "--since", run.parent)
    assert refused.code != 0 and f"{run.parent} is not a training run: it has no run.json" in refused.err


def test_a_run_on_a_disk_that_is_not_writable(run, monkeypatch):
    def refused(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    beating(run)
    monkeypatch.setattr("prep.fs.atomic.write_passing", refused)
    with viewing_here(run.parent / "manifest.json", run) as server:
        answer = pressed(server, "stop")
        assert answer.status == 507 and answer.text == "it cannot be asked: Permission denied"


def wait_for(true):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_run_that_has_just_begun(run):
    (run / "log.jsonl").unlink()
    (run / "losses.bin").unlink()
    with viewing_here(run.parent / "manifest.json", run) as server:
        text = server.get("/run").text
        assert "The log has no steps yet." in text and "no sample pictures yet" in text
        assert "no losses of samples" in text
        assert server.get("/?sort=loss&order=down").status == 200


def test_a_file_is_read_again_when_it_has_changed(tmp_path):
    path, read = tmp_path / "x", []
    fresh = Fresh(path, lambda: read.append(1) or len(read))
    assert [fresh.value(), fresh.value()] == [1, 1]
    path.write_text("x")
    wait_for(lambda: fresh.value() == 2)
    assert fresh.value() == 2


def test_a_manifest_has_no_run(tmp_path):
    with viewing_here(write_small(tmp_path)) as server:
        assert server.get("/run").status == server.get("/cell/0/0").status == 404
        text = server.get().text
        assert "Loss" not in text and 'href="/run' not in text and "data-ask" not in text
        assert f"<code>train run {tmp_path}/manifest.json</code><button type=\"button\" class=\"copy\">Copy" in text


# ---- the command -----------------------------------------------------------------------------------------------------


def test_what_is_no_run(prep, tmp_path, run):
    (tmp_path / "empty").mkdir()
    result = prep("view", tmp_path / "empty", "--quiet")
    assert result.code == 5 and result.err == (
        f"error: {tmp_path}/empty has no picture that can be used, and is no training run\n"
        f"hint: prep scan {tmp_path}/empty says what is there; of a manifest, name its file\n")
    result = prep("view", run.parent / "manifest.json", "--manifest", "x.json")
    assert result.code == 2 and result.err == (
        f"error: --manifest is for a RUN, but {run.parent}/manifest.json is not a directory\nhint: prep view x.json\n")
    (run.parent / "manifest.json").rename(run.parent / "moved.json")
    result = prep("view", run)
    assert result.code == 7 and "is gone: " in result.err and "hint: name it with --manifest\n" in result.err
    (run / "run.json").write_text("{}")
    assert prep("view", run).code == 7


def test_a_run_whose_manifest_has_moved(run):
    from viewing import viewing

    (run.parent / "manifest.json").rename(run.parent / "moved.json")
    with viewing(run, "--manifest", run.parent / "moved.json") as server:
        assert server.url.endswith("/run")
        assert server.ask("GET", server.base).status == 200
        assert server.interrupt()[0] == 0
