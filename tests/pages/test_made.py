"""Captions of models, and tags, in a real browser: accepted, asked again, counted; by keys, narrow and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from viewing import viewing_source

from prep.dataset.edits.log import UndoLog
from prep.fs.below import Below

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
HOSTILE = "<script> document.title = 'owned' </script>"
SMALL = {"image.resolution": 64, "image.step": 16}
LOOKS = pytest.mark.parametrize(("width", "scheme"), [  # what is narrow breaks first
    (390, "dark"), *(pytest.param(*look, marks=pytest.mark.slow) for look in (
        (1200, "light"), (1200, "dark"), (390, "light")))])


@pytest.fixture
def edits(tmp_path):
    return tmp_path / "edits"


@pytest.fixture
def server(browser, tmp_path, edits):
    """Four pictures: of a, b and c a model made the captions, where b had one before, and d is a person's alone."""
    root = tmp_path / "pictures"
    root.mkdir()
    log = UndoLog(Below(edits, (".undo",)))
    edits.mkdir()
    for name, color in (("a", "olive"), ("b", "teal"), ("c", "maroon"), ("d", "navy")):
        Image.new("RGB", (160, 120), color).save(root / f"{name}.png")
    for name, words in (("a", f"red cat, {HOSTILE}"), ("b", "red dog, sitting on a long sofa"), ("c", "red cat")):
        log.add(f"{name}.txt", "caption", None, f"{words}\n".encode(), by=f"org/model-{HOSTILE}", how="0" * 64)
        (edits / f"{name}.txt").write_text(f"{words}\n")
    (root / "b.txt").write_text("a dog, as a person saw it")
    (root / "d.txt").write_text("a fish")
    with viewing_source(root, edits, **SMALL) as running:
        yield running


def until(browser, condition):
    browser.run(f"new Promise(done => {{ const wait = () => {condition} ? done() : setTimeout(wait, 5); wait(); }})")


def states(browser):
    return browser.run("[...document.querySelectorAll('.card')].map("
                       "card => card.querySelector('.state')?.textContent ?? '')")


@LOOKS
def test_the_pages_fit(browser, server, edits, width, scheme):
    for path in ("", "?made=look&tag=red cat", "tags?q=cat", "sample/0", "sample/1"):
        browser.open(server.url + path, width=width, height=4000, scheme=scheme)
        until(browser, "[...document.images].every(one => one.complete && one.naturalWidth)")
        assert browser.run(CHECK) == [] and browser.complaints() == [], path
        assert browser.run("document.title") != "owned"
        assert browser.run("document.querySelectorAll('main script').length") == 0
        assert browser.run("[...document.querySelectorAll('input:not([type=hidden]), textarea')]"
                           ".every(one => one.labels.length)")


def test_captions_are_accepted_by_keys_and_taken_back(browser, server, edits):
    browser.open(server.url)
    assert states(browser) == ["to look at", "to look at", "to look at", ""]
    browser.run("document.querySelector('.card textarea').focus()")
    browser.press("Control+Shift+Enter")
    until(browser, "document.activeElement === document.querySelectorAll('.card textarea')[1]")
    assert states(browser)[0] == "accepted" and browser.run("document.querySelector('.card .accept').hidden")
    assert not browser.run("document.querySelector('.card .undo').disabled")
    browser.type("x")  # what is no longer the model's is saved, not accepted
    browser.press("Control+Shift+Enter")
    until(browser, "document.querySelectorAll('.card [role=status]')[1].textContent.startsWith('These words are not')")
    browser.press("Control+Enter")
    until(browser, "document.activeElement === document.querySelectorAll('.card textarea')[2]")
    assert states(browser)[:3] == ["accepted", "changed by a person", "to look at"]
    browser.forget()
    browser.run("document.querySelector('.card .undo').click()")
    browser.loaded()
    assert states(browser)[:3] == ["to look at", "changed by a person", "to look at"] and browser.complaints() == []


def test_all_on_the_page_are_accepted_and_taken_back(browser, server, edits):
    browser.open(server.url)
    (edits / "c.txt").write_text("changed meanwhile\n")
    browser.run("document.querySelector('#accept-all [type=submit]').click()")
    told = "document.querySelector('#accept-all [role=status]').textContent"
    until(browser, f"{told}.includes('accepted')")
    assert browser.run(told) == "2 accepted. 1 not: their cards say why."
    assert states(browser) == ["accepted", "accepted", "to look at", ""]
    assert "was changed elsewhere" in browser.run("document.querySelectorAll('.card [role=status]')[2].textContent")
    until(browser, "document.activeElement === document.querySelector('#accept-all .undo')")
    browser.press("Enter")
    until(browser, f"{told}.includes('again')")
    assert states(browser)[:2] == ["to look at", "to look at"] and browser.complaints() == []


def test_a_caption_is_asked_again(browser, server, edits):
    browser.open(server.url)
    browser.forget()
    browser.run("document.querySelector('.card .again').click()")
    browser.loaded()
    assert states(browser)[0].startswith("rejected") and not (edits / "a.txt").exists()
    assert browser.run("document.querySelector('.card [role=status]').textContent").startswith("Rejected: a.txt is as")
    copy = "document.querySelector('main .next .copy')"
    browser.run(f"{copy}.click()")
    until(browser, f"['Copied', 'Selected'].includes({copy}.textContent)")
    assert "prep caption SOURCE --model" in browser.run(f"{copy}.previousElementSibling.textContent")
    assert browser.complaints() == []


def test_a_tag_leads_to_its_samples_and_the_form_filled(browser, server):
    browser.open(server.url + "tags")
    browser.forget()
    browser.run("[...document.querySelectorAll('.tags a')].find(one => one.textContent === 'red cat').click()")
    browser.loaded()
    until(browser, "document.querySelectorAll('.card').length === 2")
    assert browser.run("document.querySelector('[name=find]').value") == "red cat"
    assert browser.run("document.querySelector('[name=find]').closest('details').open")
    assert browser.run("document.querySelector('[name=whole]').checked") and browser.complaints() == []
