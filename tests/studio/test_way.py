"""The whole way in a browser: a folder becomes a recipe, a cache, a run and a picture, without a terminal."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from browser import Browser
from viewed_runs import write_run
from viewing import studio_here

from prep.cli.forms import step_forms
from prep.demo import write_demo
from prep.jobs.queue import jobs_of
from prep.studio.project import read_project

FORMS = step_forms()
PATIENCE = 300.0  # seconds for a job, on a busy machine
WIDTHS = (1200, 390)


def until(browser: Browser, true: str) -> None:
    """Waits until an expression is true on the page."""
    deadline = time.monotonic() + PATIENCE
    while not browser.run(f"Boolean({true})"):
        assert time.monotonic() < deadline, browser.run("document.body.innerText")
        time.sleep(0.1)


def take(browser: Browser, step: str, fields: dict[str, str]) -> None:
    """From the project's page: opens the form of a step, fills fields, adds the job and waits on its page for its end.
    """
    browser.forget()
    browser.run(f"[...document.querySelectorAll('#steps a')].find(one => one.textContent === '{step}').click()")
    browser.loaded()
    for name, value in fields.items():
        browser.run(f"""(field => {{ field.closest("details")?.setAttribute("open", ""); field.value = "{value}";
                        field.dispatchEvent(new Event("input", {{bubbles: true}})); }})(
                        document.getElementById("field-{name}"))""")
        until(browser, f"document.querySelector('#command code').textContent.includes('{value}')")
    until(browser, "!document.getElementById('add').disabled")
    browser.forget()
    browser.run("document.getElementById('add').click()")
    browser.loaded()
    until(browser, "/^Done/.test(document.getElementById('job-title').textContent)")
    assert browser.complaints() == []


@pytest.mark.slow
def test_from_a_folder_to_a_picture(browser: Browser, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_demo(project)
    (project / "dataset.toml").unlink()
    (project / "train.toml").unlink()
    with studio_here(project, FORMS) as running:
        for step, fields in (
                ("Describe the pictures", {}), ("Check the pictures", {}), ("Encode", {"missing_caption": "empty"}),
                ("Choose settings", {}), ("Check the run", {"steps": "2"}), ("Train", {"steps": "2"}),
                ("Draw", {"prompt": "a red heart"})):
            browser.open(running.url)
            take(browser, step, fields)
        browser.open(running.url)
        assert browser.run("[...document.querySelectorAll('#things a')].map(one => one.textContent)") == [
            "photos", "dataset.toml", "manifest.json", "run"]
        browser.forget()
        browser.run("[...document.querySelectorAll('#things a')].at(-1).click()")
        browser.loaded()
        assert "Run" in browser.run("document.querySelector('.site').innerText")
        assert browser.complaints() == []
    assert [job.state for job in jobs_of(project)] == ["done"] * 7
    assert read_project(project).runs == ("run",)
    assert (project / "grid.png").is_file()


def test_pages_fit_narrow_windows_and_both_schemes(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / ("a very long name of a project without any spaces in it at all" * 2)).mkdir()
    with studio_here(tmp_path, FORMS) as running:
        running.post("/queue/pause")
        running.post(f"/form/prep-scan?source={'x' * 300}")
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                for page in ("", "form/train-run", "jobs", "jobs/1"):
                    browser.open(running.url + page, width=width, scheme=scheme)
                    assert browser.run("document.documentElement.scrollWidth") <= width, page
                    assert browser.complaints() == []


def test_command_is_that_of_the_fields_though_answers_are_late(browser: Browser, tmp_path: Path) -> None:
    with studio_here(tmp_path, FORMS) as running:
        browser.open(f"{running.url}form/prep-scan")
        browser.run("""(real => { let asked = 0, late = 0; window.fetch = async (...given) => {
                    const answer = await real(...given), first = asked++ === 0;
                    if (first) await new Promise(done => setTimeout(done, 1000));
                    if (first) setTimeout(() => window.late = true, 100);
                    return answer; }; })(window.fetch)""")
        browser.run("document.getElementById('field-source').focus()")
        browser.type("one")
        time.sleep(0.5)  # the page has asked for the command
        browser.type("two")
        until(browser, "window.late")
        assert browser.run("document.querySelector('#command code').textContent") == "prep scan onetwo"
        assert not browser.run("document.getElementById('add').disabled")


def test_button_works_again_after_a_value_that_was_taken_back(browser: Browser, tmp_path: Path) -> None:
    with studio_here(tmp_path, FORMS) as running:
        browser.open(f"{running.url}form/prep-scan?source=one")
        for value in ("other", "one"):
            browser.run(f"""(field => {{ field.value = "{value}"; field.dispatchEvent(new Event("input",
                        {{bubbles: true}})); }})(document.getElementById("field-source"))""")
        until(browser, "!document.getElementById('add').disabled")
        assert browser.run("document.querySelector('#command code').textContent") == "prep scan one"


@pytest.mark.slow
def test_what_it_would_take_is_shown_beside_the_form(browser: Browser, tmp_path: Path) -> None:
    with studio_here(tmp_path, FORMS) as running:
        for width in WIDTHS:
            browser.open(f"{running.url}form/prep-encode?source=missing", width=width, scheme="dark")
            browser.run("document.getElementById('ask-1').focus()")
            browser.press("Enter")
            until(browser, "document.getElementById('forecast').innerText.includes('source missing does not exist')")
            assert browser.run("document.activeElement.id") == "ask-1"
            assert browser.run("document.documentElement.scrollWidth") <= width
            browser.run("document.getElementById('field-source').focus()")
            browser.type("x")
            assert browser.run("document.getElementById('ask-1').disabled")
            until(browser, "document.getElementById('forecast').innerText.includes('This is of other values')")
            assert browser.complaints() == []


def test_runs_are_compared_side_by_side(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    shutil.copytree(run, tmp_path / "second")
    step = "[...document.querySelectorAll('.film output')].map(one => one.textContent)"
    with studio_here(tmp_path, FORMS) as running:
        browser.open(running.url)
        browser.forget()
        browser.run("document.querySelector('#things form button').click()")
        browser.loaded()
        for width, scheme in zip(WIDTHS, ("light", "dark"), strict=True):
            browser.open(browser.run("location.href"), width=width, scheme=scheme)
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run(step) == ["step 40"] * 6
            browser.run("document.querySelector('.film input').focus()")
            browser.press("Home")
            assert browser.run(step) == ["step 10"] * 6
            assert len(set(browser.run("[...document.querySelectorAll('.film input')].map("
                                       "one => one.getAttribute('aria-label'))"))) == 6
            top = "one => Math.round(one.getBoundingClientRect().top)"
            first, second = browser.run(f"[...document.querySelectorAll('.film')].slice(0, 2).map({top})")
            assert first == second  # beside each other, also in a narrow window
            assert browser.complaints() == []


def test_forms_are_labelled_and_filled_by_keys(browser: Browser, tmp_path: Path) -> None:
    with studio_here(tmp_path, FORMS) as running:
        browser.open(f"{running.url}form/train-run")
        assert browser.run("[...document.querySelectorAll('#form input, #form select')].filter("
                           "one => !one.labels.length && !one.getAttribute('aria-label')).length") == 0
        browser.run("document.getElementById('field-manifest').focus()")
        browser.type("my set/manifest.json")
        until(browser, "document.querySelector('#command code').textContent.includes(\"'my set/manifest.json'\")")
        assert "manifest=my+set%2Fmanifest.json" in browser.run("location.search")
        browser.press("Tab")
        assert browser.run("document.activeElement.id").startswith("field-")
