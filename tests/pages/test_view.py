"""The live pages in a real browser: load, search, filter, page, open, keyboard, narrow, dark, and hostile names."""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from small_manifest import write_small
from synthetic import Scale, build
from viewed_runs import write_run
from viewing import viewing_here, viewing_source

from prep.runs.heartbeat import NAME, Heartbeat

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
HOSTILE = ("<script>document.title='owned'</script>.png", "\"><img src=x onerror=\"document.title='owned'\">.png",
           "javascript:document.title='owned'", "</bdi></a><script>document.title='owned'</script>",
           "{{ 7 * 7 }}<svg/onload=document.title='owned'> \u202e\x1b[31m", "'\"&lt;b&gt;" * 30,
           "<iframe srcdoc='<script>top.document.title=1</script>'>")
LOOKS = pytest.mark.parametrize(("width", "scheme"), [
    (1200, "light"), (390, "dark"), pytest.param(1200, "dark", marks=pytest.mark.slow),
    pytest.param(390, "light", marks=pytest.mark.slow)])
PATHS = ("", "sample/0", "sample/1", "findings", "findings?code=truncated",
         "?q=%3Cscript%3Edocument.title%3D%27owned%27%3C%2Fscript%3E",
         "?q=%22%3E%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E",
         "sample/0?q=%22%20onfocus%3D%22alert(1)")


def png(color, size=(128, 144)):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def small(browser, tmp_path_factory):
    """Three samples with hostile texts and names of references, without their pictures."""
    path = write_small(tmp_path_factory.mktemp("small"), HOSTILE, {}, {
        f"../{number}{name}": png("red") for number, name in enumerate(HOSTILE)})
    with viewing_here(path) as running:
        yield running


@pytest.fixture(scope="module")
def usual(browser, tmp_path_factory):
    pictures = {"a.png": png("green"), "sub/b.png": png("navy")}
    references = {"../control_1/a.png": png("olive"), "wide.png": png("teal", (144, 64)), "../gone.png": png("red")}
    path = write_small(tmp_path_factory.mktemp("usual"), pictures=pictures, references=references)
    (path.parent / "gone.png").unlink()
    with viewing_here(path) as running:
        yield running


@pytest.fixture(scope="module")
def trained(browser, tmp_path_factory):
    """A run with hostile prompts, and one as usual."""
    with ExitStack() as held:
        runs = [write_run(root, *texts) for root, texts in ((tmp_path_factory.mktemp("run"), ()), (
            tmp_path_factory.mktemp("hostile"), (HOSTILE, HOSTILE)))]
        (runs[1] / NAME).write_bytes(Heartbeat(
            token=HOSTILE[0], pid=7, host=HOSTILE[0], boot="another", start="", time=time.time(), phase=HOSTILE[4],
            since=0.0, step=1, stepped=0.0).spell())
        yield [held.enter_context(viewing_here(run.parent / "manifest.json", run)) for run in runs]


@pytest.fixture(scope="module")
def many(browser, tmp_path_factory):
    """200 samples: four pages."""
    root = tmp_path_factory.mktemp("many")
    build(root, Scale(samples=200, buckets=4))
    with viewing_here(root / "m.json") as running:
        yield running


def shown(browser):
    """Lets pictures load that are out of sight, too."""
    browser.run("""Promise.all([...document.images].map(one => (one.loading = "eager", one.complete ? 0 :
        new Promise(done => one.onload = one.onerror = done))))""")


@LOOKS
@pytest.mark.parametrize("path", [*PATHS[:3], *(pytest.param(path, marks=pytest.mark.slow) for path in PATHS[3:5])])
def test_nothing_overlaps_or_is_cut_off(browser, usual, small, path, width, scheme):
    for running in (usual, small):
        browser.open(running.url + path, width=width, scheme=scheme)
        shown(browser)
        wrong = browser.run(CHECK)  # words of hostile texts without spaces may break
        assert [one for one in wrong if running is usual or "breaks" not in one] == [] and browser.complaints() == []


@pytest.mark.parametrize("path", PATHS)
def test_names_captions_and_searches_stay_text(browser, small, path):
    browser.open(small.url + path)
    shown(browser)
    assert browser.complaints() == [] and browser.run("document.title") != "owned"
    assert browser.run("document.querySelectorAll('script, iframe, [onerror], [onload], [onfocus]').length") == 1
    assert all(one.startswith(small.url) for one in browser.requests())
    assert browser.run("[...document.links].every(one => one.href.startsWith(location.origin))")


def test_the_policy_stops_what_would_be_injected(browser, usual):
    """The second wall: markup that got through would neither run nor load."""
    browser.open(usual.url)
    browser.run("""document.body.insertAdjacentHTML("beforeend", '<img src="https://elsewhere.example/x.png">' +
        '<img src="x" onerror="document.title = 1"><p style="color: red">')
        || document.body.append(Object.assign(document.createElement("script"),
                                              {textContent: "document.title = 2"}))""")
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("document.title") == "manifest.json, Latentry"
    said = " ".join(browser.complaints())
    assert "elsewhere.example" in said and "script-src" in said and "style-src" in said


@LOOKS
def test_the_page_of_a_run(browser, trained, width, scheme):
    for running in trained:
        for path in ("run", "sample/0"):
            browser.open(running.url + path, width=width, scheme=scheme)
            shown(browser)
            wrong = [one for one in browser.run(CHECK) if running is trained[0] or "breaks" not in one]
            assert wrong == [] and browser.complaints() == [] and browser.run("document.title") != "owned"


@pytest.mark.parametrize("width", [pytest.param(1200, marks=pytest.mark.slow), 390])
def test_two_manifests_side_by_side(browser, tmp_path_factory, width):
    roots = [tmp_path_factory.mktemp(name) for name in ("before", "after")]
    before = write_small(roots[0], pictures={"a.png": png("green")})
    after = write_small(roots[1], HOSTILE, {"a.png": png("olive")})
    with viewing_here(after, before=before) as running:
        for scheme in ("light", "dark"):
            browser.open(running.url + "diff", width=width, scheme=scheme)
            shown(browser)
            assert [one for one in browser.run(CHECK) if "breaks" not in one] == [] and browser.complaints() == []
            assert browser.run("document.querySelectorAll('article.pair').length") == 3
            assert browser.run("document.title") != "owned"


@pytest.fixture(scope="module")
def source(browser, tmp_path_factory):
    """Pictures that are not encoded, with hostile names and captions."""
    root = tmp_path_factory.mktemp("pictures")
    for at, (name, text) in enumerate([("a", "plain"), *((f"<img src=x onerror=alert({at})>", text)
                                                         for at, text in enumerate(HOSTILE))]):
        (root / f"{name}.png").write_bytes(png("olive" if at else "green"))
        (root / f"{name}.txt").write_text(text.replace("\x1b", ""))
    Image.new("L", (128, 144), 90).save(root / "a-masklabel.png")
    with viewing_source(root, **{"image.resolution": 64, "image.step": 16}) as running:
        yield running


@LOOKS
def test_the_pages_of_a_source(browser, source, width, scheme):
    for path in ("", "sample/0", "?q=plain", "findings"):
        browser.open(source.url + path, width=width, scheme=scheme)
        shown(browser)
        assert [one for one in browser.run(CHECK) if "breaks" not in one] == [] and browser.complaints() == []
        assert browser.run("document.title") != "owned"
        assert browser.run("document.querySelectorAll('[onerror], [onload], iframe').length") == 0
    browser.open(source.url + "?mask=yes")
    browser.run("document.querySelector('.card .name a').focus()")
    browser.press("Enter")
    browser.loaded()
    shown(browser)
    assert browser.run("[...document.images].every(one => one.naturalWidth > 0)")
    assert browser.run("document.querySelectorAll('svg image.shade').length") == 1


def test_sliders_move_through_time(browser, trained):
    browser.open(trained[0].url + "run")
    now = "[...document.querySelectorAll('.live li.now')].map(one => one.dataset.step + one.checkVisibility())"
    assert browser.run(now) == ["40true"] * 3
    assert browser.run("[...document.querySelectorAll('.film li')].filter(one => one.checkVisibility()).length") == 3
    browser.run("document.querySelector('.film input').focus()")
    browser.press("ArrowLeft")
    assert browser.run(now) == ["30true"] * 3
    assert browser.run("document.querySelector('.film input').getAttribute('aria-valuetext')") == "step 30"
    browser.run("document.getElementById('together').click()")
    browser.run("document.querySelectorAll('.film input')[1].focus()")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.run(now) == ["30true", "10true", "30true"]
    browser.run("document.getElementById('beside').click()")
    assert browser.run("[...document.querySelectorAll('.film li')].filter(one => one.checkVisibility()).length") == 12


@pytest.fixture
def going(browser, tmp_path):
    """A run that is trained, and what adds to its log, as far as a number of lines."""
    run = write_run(tmp_path)
    log = (run / "log.jsonl").read_text().splitlines(keepends=True)

    def told(lines, **other):
        step = max(json.loads(line)["step"] for line in log[:lines])
        (run / "log.jsonl").write_text("".join(log[:lines]))
        beat = Heartbeat(token="a", pid=os.getpid(), host="gpu-7", boot="another", start="", time=time.time(),
                         phase="training", since=time.time(), step=step, stepped=time.time() - 4)
        (run / NAME).write_bytes(replace(beat, **other).spell())

    told(22)
    with viewing_here(tmp_path / "manifest.json", run) as running:
        yield run, running, told


@LOOKS
def test_the_page_of_a_run_that_is_trained(browser, going, width, scheme):
    run, running, told = going
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    (run / "checkpoints" / "step-000010" / "state.json").write_text("{}")
    for other in ({}, {"asked": ("sample",), "phase": "validating step 17"}, {"ended": "the disk is full"},
                  {"time": 0.0}):
        told(22, **other)
        browser.open(running.url + "run", width=width, scheme=scheme)
        shown(browser)
        assert browser.run(CHECK) == [] and browser.complaints() == []


def until(browser, script):
    browser.run(f"""new Promise((done, failed) => {{ const began = Date.now(), look = () => ({script}) ? done() :
        Date.now() - began > 30000 ? failed(new Error("never: " + {json.dumps(script)})) : setTimeout(look, 50);
        look(); }})""")


def test_a_page_lives_and_keeps_its_place(browser, going):
    run, running, told = going
    browser.open(running.url + "run")
    assert "last step 4 s ago" in browser.run("document.getElementById('state').textContent")
    browser.run("window.mine = 1; document.querySelector('.curve details').open = true")
    browser.run("[...document.images].forEach(one => one.mine = true)")
    browser.run("document.querySelector('.film input').focus(); scrollTo(0, 500)")
    before = browser.run("scrollY")
    told(41)
    until(browser, "document.getElementById('state').textContent.includes('Running: 26 of 40 steps')")
    assert browser.run("document.querySelectorAll('.film li').length") == 6, "pictures of two steps"
    assert browser.run("[...document.querySelectorAll('.film img')].map(one => one.mine)") == [True, None] * 3
    assert browser.run("[mine, document.querySelector('.curve details').open, scrollY]") == [1, True, before]
    assert browser.run("document.activeElement.type") == "range"
    assert browser.run("[...document.querySelectorAll('.live li.now')].map(one => one.dataset.step)") == ["20"] * 3
    browser.press("ArrowLeft")
    told(60)
    until(browser, "document.querySelectorAll('.film li').length >= 9")
    assert browser.run("[...document.querySelectorAll('.live li.now')].map(one => one.dataset.step)") == ["10"] * 3
    browser.run("document.getElementById('ask-sample').click()")
    until(browser, "document.getElementById('said').textContent.startsWith('Asked: process ')")
    until(browser, "document.getElementById('ask-sample').disabled")
    assert (run / "sample.request").read_text() == "a\n"
    told(60, ended="the disk is full")
    until(browser, "document.getElementById('state').textContent.includes('Failed: ')")
    assert browser.run("document.querySelectorAll('[data-ask]').length") == 0 and browser.complaints() == []


def test_the_next_command_is_copied(browser, trained):
    browser.open(trained[0].url + "run")
    browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    browser.run("document.querySelector('.copy').focus()")
    browser.press("Enter")
    until(browser, "document.querySelector('.copy').textContent === 'Copied'")
    assert browser.run("window.copied").startswith("train sample /")
    assert browser.run("window.copied === document.querySelector('.next code').textContent")


def names(browser):
    return browser.run("[...document.querySelectorAll('.card .name')].map(one => one.textContent)")


def test_searching_with_the_keyboard(browser, many):
    browser.open(many.url)
    assert len(names(browser)) == 60
    browser.press("/")
    assert browser.run("document.activeElement.id") == "q" and browser.run("q.value") == ""
    browser.run("q.value = 'NUMBER 19'")
    browser.press("Enter")
    browser.loaded()
    assert names(browser) == ["0000/00000019.png", *(f"0000/{number:08}.png" for number in range(190, 200))]
    assert browser.run("location.search") == "?q=NUMBER+19"  # empty fields are left out
    assert browser.run("q.value") == "NUMBER 19"


def test_paging_and_opening_with_the_keyboard(browser, many):
    browser.open(many.url)
    browser.press("ArrowRight")
    browser.loaded()
    assert browser.run("location.search") == "?page=2" and names(browser)[0] == "0000/00000060.png"
    browser.press("ArrowLeft")
    browser.loaded()
    assert names(browser)[0] == "0000/00000000.png"
    browser.run("document.querySelectorAll('.card .name a')[59].focus()")
    browser.press("Enter")
    browser.loaded()
    assert browser.run("document.querySelector('h1').textContent") == "0000/00000059.png"
    browser.press("ArrowRight")
    browser.loaded()
    assert browser.run("document.querySelector('h1').textContent") == "0000/00000060.png"
    browser.press("Escape")
    browser.loaded()
    assert browser.run("location.search") == "?page=2"  # where that sample is


def test_filters_are_kept_from_page_to_page(browser, many):
    browser.open(many.url)
    browser.run("document.querySelector('details.more').open = true")
    browser.run("document.querySelector('[name=bucket]').value = '16x8'")
    browser.run("document.querySelector('[name=sort]').value = 'id'")
    browser.run("document.querySelector('form.filters button').focus()")
    browser.press("Enter")
    browser.loaded()
    assert browser.run("location.search") == "?bucket=16x8&sort=id"
    assert browser.run("document.querySelector('#found').textContent") == "Samples found 50 of 200"
    assert browser.run("document.querySelector('details.more').open")
    assert browser.run("document.querySelector('.card .name a').search") == "?bucket=16x8&sort=id"


def test_keys_are_left_to_fields(browser, many):
    browser.open(many.url + "?page=2")
    browser.run("q.focus()")
    browser.press("ArrowRight")
    browser.press("Escape")
    assert browser.run("location.search") == "?page=2"


def test_crops_and_masks_can_be_hidden(browser, usual):
    browser.open(usual.url + "?q=a.png")
    browser.run("document.querySelector('.card .name a').focus()")
    browser.press("Enter")
    browser.loaded()
    for box, what in (("show-crops", ".crop"), ("show-masks", ".shade")):
        assert browser.run(f"getComputedStyle(document.querySelector('{what}')).visibility") == "visible"
        browser.run(f"document.getElementById('{box}').click()")
        assert browser.run(f"getComputedStyle(document.querySelector('{what}')).visibility") == "hidden"


def test_what_a_screen_reader_needs(browser, usual):
    for path in ("", "sample/0", "findings"):
        browser.open(usual.url + path)
        assert browser.run("document.documentElement.lang") == "en"
        assert browser.run("document.querySelectorAll('h1').length") == 1
        assert browser.run("""[...document.querySelectorAll("input, select")].every(one => one.labels.length)""")
        assert browser.run("""[...document.images].every(one => one.hasAttribute("alt"))""")
        assert browser.run("""[...document.querySelectorAll("section")].every(one =>
            document.getElementById(one.getAttribute("aria-labelledby")))""")
