"""Editing in a real browser: a caption, a mask by pointer and keys, undo, conflicts, hostile text, narrow and dark."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from viewing import viewing_source

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
HOSTILE = "</textarea><script>document.title='owned'</script><img src=x onerror=document.title='owned'> & {{ 7 * 7 }}"
SMALL = {"image.resolution": 64, "image.step": 16}
LOOKS = pytest.mark.parametrize(("width", "scheme"), [  # what is narrow breaks first
    (390, "dark"), *(pytest.param(*look, marks=pytest.mark.slow) for look in (
        (1200, "light"), (1200, "dark"), (390, "light")))])


@pytest.fixture
def edits(tmp_path):
    return tmp_path / "edits"


@pytest.fixture
def server(browser, tmp_path, edits):
    root = tmp_path / "pictures"
    root.mkdir()
    Image.new("RGB", (160, 120), "olive").save(root / "a.png")
    (root / "a.txt").write_text("of a")
    with viewing_source(root, edits, **SMALL) as running:
        yield running


def opened(browser, server, **looks):
    browser.open(server.url + "sample/0", **looks)
    browser.run("new Promise(done => { const wait = () => document.querySelector('canvas').dataset.ready ? done() : "
                "setTimeout(wait, 5); wait(); })")


@pytest.fixture
def three(browser, tmp_path, edits):
    """Three pictures, the last one without a caption."""
    root = tmp_path / "pictures"
    root.mkdir()
    for name, color in (("a", "olive"), ("b", "teal"), ("c", "maroon")):
        Image.new("RGB", (160, 120), color).save(root / f"{name}.png")
    (root / "a.txt").write_text("a red cat")
    (root / "b.txt").write_text("a red dog\na big red dog\n")
    with viewing_source(root, edits, **SMALL, **{"caption.missing": "filename"}) as running:
        yield running


def until(browser, condition):
    browser.run(f"new Promise(done => {{ const wait = () => {condition} ? done() : setTimeout(wait, 5); wait(); }})")


def click(browser, where):
    browser.run(f"document.querySelector('{where}').click()")


def saved(browser, form):
    """Clicks Save, and returns what the page says after it was loaded again."""
    browser.forget()
    click(browser, f"#{form} [type=submit]")
    browser.loaded()
    return browser.run(f"document.querySelector('#{form} [role=status]').textContent")


def undone(browser, form):
    browser.forget()
    click(browser, f"#{form} .undo")
    browser.loaded()
    return browser.run(f"document.querySelector('#{form} [role=status]').textContent")


def pixels(edits):
    return np.asarray(Image.open(io.BytesIO((edits / "a-masklabel.png").read_bytes())))


@LOOKS
def test_the_forms_fit(browser, server, width, scheme):
    opened(browser, server, width=width, scheme=scheme)
    assert browser.run(CHECK) == [] and browser.complaints() == []
    assert browser.run("[...document.querySelectorAll('input, textarea')].every(one => one.labels.length)")
    browser.open(server.url + "edits", width=width, scheme=scheme)
    assert browser.run(CHECK) == [] and browser.complaints() == []


def test_a_caption_is_edited_and_undone(browser, server, edits):
    opened(browser, server)
    assert browser.run("words.value") == "of a\n" and browser.run("document.querySelector('.undo').disabled")
    browser.run("words.value = 'one\\n  two  words'; words.dispatchEvent(new Event('input'))")
    assert browser.run("document.querySelector('#edit-caption').dataset.changed") == "yes"
    assert saved(browser, "edit-caption") == "Saved to a.txt."
    assert (edits / "a.txt").read_text() == "one\ntwo words\n" and browser.run("words.value") == "one\ntwo words\n"
    assert browser.run("document.activeElement === words")
    assert undone(browser, "edit-caption") == "a.txt is as it was before the last save."
    assert browser.run("words.value") == "of a\n" and not (edits / "a.txt").exists()
    assert browser.complaints() == []


def test_a_hostile_caption_stays_text(browser, server, edits):
    opened(browser, server)
    browser.run(f"words.value = {HOSTILE!r}")
    assert saved(browser, "edit-caption") == "Saved to a.txt."
    assert (edits / "a.txt").read_text() == HOSTILE + "\n" and browser.run("words.value") == HOSTILE + "\n"
    for path in ("", "sample/0", "edits"):
        browser.open(server.url + path)
        assert browser.run("document.title") != "owned" and browser.complaints() == []
        assert browser.run("document.querySelectorAll('[onerror], main script').length") == 0


def test_keys_in_the_text_are_the_texts(browser, server):
    opened(browser, server)
    browser.run("words.focus()")
    for key in ("ArrowLeft", "Escape", "x", "/"):
        browser.press(key)
    assert browser.run("location.pathname").endswith("/sample/0") and "x/" in browser.run("words.value")
    left = "document.querySelector('#edit-caption').dataset.changed"
    assert browser.run(left) == "yes"  # so the browser would ask before it leaves the page
    browser.run(f"{left} = ''")


@LOOKS
def test_the_list_and_its_changes_fit(browser, three, width, scheme):
    for path in ("", "?q=cat", "replace?find=red&with=blue&prepend=sks, ", "replace?find=none", "replace?find=",
                 "findings"):
        browser.open(three.url + path, width=width, height=4000, scheme=scheme)
        until(browser, "[...document.images].every(one => one.complete && one.naturalWidth)")
        assert browser.run(CHECK) == [] and browser.complaints() == []
        assert browser.run("[...document.querySelectorAll('input:not([type=hidden]), textarea')]"
                           ".every(one => one.labels.length)")


def order(browser, name):
    """The place of a picture's card in the list."""
    return browser.run(f"[...document.querySelectorAll('.card .name')].findIndex(one => one.textContent === '{name}')")


def test_captions_are_edited_in_the_list(browser, three, edits):
    browser.open(three.url)
    fields = "document.querySelectorAll('.card textarea')"
    a, b, c = (order(browser, name) for name in ("a.png", "b.png", "c.png"))
    assert [browser.run(f"[{fields}[{at}].value, {fields}[{at}].placeholder]") for at in (a, b, c)] == [
        ["a red cat\n", "a red cat"], ["a red dog\na big red dog\n", "a red dog"], ["", "c"]]
    browser.run(f"{fields}[0].focus(), {fields}[0].select()")
    for turn, text in enumerate(("first", "second", "third")):
        browser.type(text)
        browser.press("Control+Enter")
        says = f"document.querySelectorAll('.card [role=status]')[{turn}].textContent"
        until(browser, f"{says}.startsWith('Saved to')")
        assert turn == 2 or browser.run(f"document.activeElement === {fields}[{turn + 1}]")
        browser.run(f"{fields}[{min(turn + 1, 2)}].select()")
    assert {(edits / f"{name}.txt").read_text() for name in "abc"} == {"first\n", "second\n", "third\n"}
    browser.run(f"{fields}[0].focus(), {fields}[0].select()")
    browser.type("again")  # with the version that the first save gave
    browser.press("Control+Enter")
    until(browser, f"document.activeElement === {fields}[1]")
    assert "again\n" in {(edits / f"{name}.txt").read_text() for name in "abc"}
    browser.press("Control+Enter")  # nothing to save: goes on
    assert browser.run(f"document.activeElement === {fields}[2]")
    browser.forget()
    click(browser, ".card .undo")
    browser.loaded()
    assert browser.run(f"{fields}[0].value") == "first\n" and browser.complaints() == []


def test_captions_are_changed_at_once_and_back(browser, three, edits):
    browser.open(three.url + "?q=red")
    browser.run("document.querySelector('[name=find]').value = 'red', document.querySelector('[name=with]').value = "
                "'blue', document.querySelector('[name=prepend]').value = 'sks, '")
    browser.forget()
    click(browser, "form[action$=replace] [type=submit]")
    browser.loaded()
    assert browser.run("document.querySelector('.lead').textContent") == "2 captions change. Nothing is saved yet."
    assert sorted(browser.run("[...document.querySelectorAll('.card ins')].map(one => one.textContent)")) == [
        "blue", "blue", "sks,", "sks,"] and not edits.exists()
    says = "document.querySelector('[role=status]').textContent"
    click(browser, "#reword [type=submit]")
    until(browser, f"{says} === 'Saved 2 captions.'")
    assert (edits / "a.txt").read_text() == "sks, a blue cat\n"
    assert (edits / "b.txt").read_text() == "sks, a blue dog\nsks, a big blue dog\n"
    click(browser, "#reword .undo")
    until(browser, f"{says} === '2 captions are as before.'")
    assert not list(edits.glob("*.txt"))
    click(browser, "#reword [type=submit]")
    until(browser, f"{says} === 'Saved 2 captions.'")
    assert browser.complaints() == []


def test_a_conflict_is_told_and_nothing_is_lost(browser, server, edits):
    opened(browser, server)
    assert server.save(0, "caption", b"by another tab").status == 200
    browser.run("words.value = 'mine'")
    click(browser, "#edit-caption [type=submit]")
    browser.run("new Promise(done => { const wait = () => "
                "document.querySelector('[role=status]').textContent.includes('elsewhere') ? done() : "
                "setTimeout(wait, 5); wait(); })")
    assert browser.run("words.value") == "mine" and (edits / "a.txt").read_text() == "by another tab\n"


def test_a_mask_is_painted_with_the_pointer(browser, server, edits):
    opened(browser, server, height=1600)
    browser.run("document.querySelector('[name=size]').value = 20; document.querySelector('canvas').scrollIntoView()")
    box = browser.run("JSON.parse(JSON.stringify(document.querySelector('canvas').getBoundingClientRect()))")
    browser.drag(*((box["x"] + at * box["width"], box["y"] + 0.5 * box["height"]) for at in (0.25, 0.5)))
    assert saved(browser, "edit-mask") == "Saved to a-masklabel.png."
    mask = pixels(edits)
    assert mask.shape == (120, 160) and not mask[60, 40:80].any() and mask[10].min() == mask[110].min() == 255
    assert mask[60, 0] == mask[60, 120] == 255
    opened(browser, server)  # what was saved is what is painted on
    click(browser, "[name=invert]")
    assert saved(browser, "edit-mask") == "Saved to a-masklabel.png." and np.array_equal(pixels(edits), 255 - mask)
    assert undone(browser, "edit-mask") == "a-masklabel.png is as it was before the last save."
    assert np.array_equal(pixels(edits), mask) and browser.complaints() == []
    undone(browser, "edit-mask")
    assert not (edits / "a-masklabel.png").exists()


def test_a_rectangle_and_a_fill(browser, server, edits):
    opened(browser, server, height=1600)
    click(browser, "[value=rectangle]")
    browser.run("document.querySelector('canvas').scrollIntoView()")
    box = browser.run("JSON.parse(JSON.stringify(document.querySelector('canvas').getBoundingClientRect()))")

    def at(x, y):
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    browser.drag(at(0.25, 0.25), at(0.6, 0.5), at(0.75, 0.75))
    click(browser, "[value=fill]")
    click(browser, "[value=trains]")
    click(browser, "[value=not]")
    browser.drag(at(0.1, 0.1))
    assert browser.run("document.querySelector('.box').hidden")
    click(browser, "[value=trains]")
    browser.drag(at(0.5, 0.5))
    assert saved(browser, "edit-mask").startswith("Saved")
    assert pixels(edits).min() == 255  # all was dark, and is filled at once
    undone(browser, "edit-mask")
    opened(browser, server, height=1600)
    browser.run("document.querySelector('canvas').focus()")
    for key in ("r", " ", "ArrowLeft", "ArrowUp", " ", "x", "f", "z", "r", " ", "Escape", "f", "x", " "):
        browser.press(key)
    assert saved(browser, "edit-mask").startswith("Saved")
    assert not pixels(edits).any()  # the rectangle was undone, the next one given up, and the whole picture filled


def test_the_picture_is_zoomed(browser, server):
    opened(browser, server)
    wide = browser.run("document.querySelector('canvas').clientWidth")
    browser.run("document.querySelector('canvas').focus()")
    for _ in range(4):
        browser.press("+")
    assert browser.run("document.querySelector('canvas').clientWidth") == 3 * wide
    assert browser.run("document.querySelector('.zoomed').scrollLeft") > 0
    assert browser.run(CHECK) == []
    for _ in range(40):
        browser.press("ArrowLeft")
    assert browser.run("document.querySelector('.zoomed').scrollLeft") == 0


def test_a_mask_is_painted_with_keys(browser, server, edits):
    opened(browser, server)
    click(browser, "[name=none]")
    browser.run("document.querySelector('canvas').focus()")
    for key in ("x", "]", " ", "ArrowLeft", "ArrowLeft", " ", "ArrowUp", " ", "z"):
        browser.press(key)
    assert browser.run("location.pathname").endswith("/sample/0")
    assert browser.run("document.querySelector('[name=size]').value") == "9"
    assert saved(browser, "edit-mask") == "Saved to a-masklabel.png."
    mask = pixels(edits)
    assert mask[60, 80] == 255 and mask[60, 66] == 255 and mask[60, 20] == mask[0, 0] == 0
    above = mask[:50].any()
    assert not above  # the last stroke was undone


@pytest.mark.slow
def test_strokes_are_undone_one_by_one(browser, server, edits):
    opened(browser, server)
    assert browser.run("document.querySelector('[name=back]').disabled")
    for name in ("none", "invert", "none"):
        click(browser, f"[name={name}]")
    click(browser, "[name=back]")
    click(browser, "[name=back]")
    assert saved(browser, "edit-mask") == "Saved to a-masklabel.png." and not pixels(edits).any()
    opened(browser, server)
    click(browser, "[name=all]")
    assert saved(browser, "edit-mask").startswith("Saved") and pixels(edits).min() == 255


def test_the_policy_lets_the_page_ask_this_server_alone(browser, server):
    opened(browser, server)
    assert browser.run("fetch('https://elsewhere.example/').then(() => 'sent', () => 'stopped')") == "stopped"
    assert any("connect-src" in one for one in browser.complaints())
