"""The script of a page in a real browser: search, filters, order, pages, tables; by keyboard; and texts that attack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_pages import MADE, TEXTS, jpeg, origin
from run_pages import run_html

from prep.findings import finding
from prep.pages.finder import EXAMPLE, FoundCard, cards_json
from prep.pages.overlay import Overlay, Shot
from prep.pages.parts import Caption, Card, CardReference, Column, Head, Section, Table
from prep.pages.snapshot import EmbeddedPictures, render_snapshot
from prep.report.snapshots.gallery import FEW, GROUPS, ORDERS

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
COUNT = 400
ATTACK = '</script><img src=x onerror="hurt()"> <b>bold</b>'
NAMES = "[...document.querySelectorAll('#cards .name')].map(one => one.textContent)"
SAID = "document.getElementById('find-said').textContent"


def html(count=COUNT):
    """A page of so many samples; every tenth has an attack in its name, caption and finding."""
    room, cards = EmbeddedPictures(), []
    shade = room.add(jpeg(5))
    for number in range(count):
        hostile = number % 10 == 0
        name = f"folder/{number:04} {ATTACK}" if hostile else f"folder/{number:04}.png"
        beside = Shot(name=f"{name}, decoded", address=room.add(jpeg(1))) if number % 200 == 0 else None
        findings = (finding(name, "truncated", f"saw {ATTACK}"),) if hostile else ()
        box = Overlay(left=5, top=5, width=60, height=80, shade=shade, outlined=True, coarse=True)
        references = tuple(CardReference(
            number=place, fact="640x480 to 64x48", shot=Shot(
                name=f"../control_{place}/{name}", address=room.add(jpeg(place)) if place == 1 else "", size=(640, 480),
                instead="not here", overlays=(Overlay(left=10, top=0, width=80, height=100, outlined=True),)))
            for place in range(1, number % 5))
        card = Card(shot=Shot(name=name, address=room.add(jpeg(number % 6)), size=(320, 213), overlays=(box,)),
                    captions=(Caption(text=f"a caption {number} {ATTACK if hostile else ''}", letters=900),), part=0.5,
                    facts=("train", "320x213 to 64x64"), findings=findings, tone="error" if findings else "",
                    beside=beside, references=references)
        groups = ("validation" if number % 4 == 0 else "train", f"{64 * (number % 3 + 1)}x64", "none",
                  "truncated" if hostile else "none")
        values = (None, float(number % 7), None if number % 2 else number / count, count - number, None,
                  20.0 if beside else None)
        cards.append(FoundCard(card=card, groups=groups, values=values))
    table = Table(caption="Numbers", columns=(Column(head="name", kind="code"), Column(head="count", kind="number")),
                  rows=(("b", "1,000"), ("a", "20"), ("c", ""), ("d", "-3.5")))
    head = Head(kind="Test", what="what", usable="usable", part=1.0, todo="Nothing.", tone="good")
    sections = [Section(id=name, title=name.title()) for name in ("facts", "findings", "buckets", "spread", "samples")]
    return render_snapshot(
        "manifest.html", origin(["title", "place"]), head=head, sections=sections, facts=[], fields=table,
        buckets=table, plot=Nothing, charts=[], cards=[one.card for one in cards[:FEW]], findings=table, channels=None,
        unusual=None, groups=GROUPS, orders=ORDERS, example=EXAMPLE, data=cards_json(cards, ORDERS, fixed=FEW))


class Nothing:
    """A plot without shapes."""

    shapes = ()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("found") / "page.html"
    path.write_text(html(), encoding="utf-8")
    return path


def choose(browser, name, value):
    browser.run(f"""(() => {{ const box = document.querySelector({name!r}); box.value = {value!r};
        box.dispatchEvent(new Event(box.tagName === "INPUT" ? "input" : "change")); }})()""")
    return browser.run("new Promise(done => setTimeout(done, 200))")


def test_it_searches_names_captions_and_findings(browser, page):
    browser.open(page)
    assert browser.run(SAID) == f"Samples 1 to 60 of {COUNT}."
    choose(browser, "#find-words", "CAPTION 123")
    assert browser.run(NAMES) == ["folder/0123.png"] and browser.run(SAID) == f"Samples 1 to 1 of 1, from {COUNT}."
    choose(browser, "#find-words", "truncated 0050")
    assert browser.run(NAMES) == [f"folder/0050 {ATTACK}"]
    choose(browser, "#find-words", "no such thing")
    assert browser.run(SAID) == "No sample fits." and browser.run(NAMES) == []


def test_it_filters_orders_and_pages(browser, page):
    browser.open(page)
    choose(browser, "[data-group='0']", "1")  # validation
    choose(browser, "[data-group='1']", "0")  # 128x64
    wanted = [number for number in range(COUNT) if number % 4 == 0 and number % 3 == 1]
    assert [int(name[7:11]) for name in browser.run(NAMES)] == wanted[:60]
    assert browser.run("document.querySelector(\"[data-group='2']\").closest('label').hidden"), "all are alike"
    choose(browser, "[data-group='0']", "")
    choose(browser, "[data-group='1']", "")
    choose(browser, "#find-order", "2")  # the least of the mask; those without one are last
    shown = [int(name[7:11]) for name in browser.run(NAMES)]
    assert shown == [*range(0, 120, 2)]
    choose(browser, "#find-order", "5")
    assert [int(name[7:11]) for name in browser.run(NAMES)][:3] == [0, 200, 1]
    choose(browser, "#find-order", "3")
    assert [int(name[7:11]) for name in browser.run(NAMES)][:2] == [0, 1], "the longest first"
    browser.run("document.querySelector('.card-pages [data-step=\"1\"]').click()")
    assert browser.run(SAID) == f"Samples 61 to 120 of {COUNT}."
    assert browser.run("document.querySelector('.card-pages output').textContent") == "Page 2 of 7"
    for _ in range(5):
        browser.run("document.querySelectorAll('.card-pages [data-step=\"1\"]')[1].click()")
    assert len(browser.run(NAMES)) == COUNT - 6 * 60
    assert browser.run("document.querySelectorAll('.card-pages [data-step=\"1\"]')[1].disabled")


def test_cards_of_the_script_are_those_of_the_template(browser, page, tmp_path):
    """The same card from HTML and from data has the same elements, classes and words."""
    (tmp_path / "few.html").write_text(html(11), encoding="utf-8")
    shape = """number => { const walk = node => node.nodeType === 3 ? node.data.replace(/\\s+/g, " ").trim() :
        [node.tagName.toLowerCase(), (node.getAttribute("class") || "").trim(),
         ...[...node.childNodes].map(walk).filter(one => one !== "")];
        const card = document.querySelectorAll("#cards > *")[number].cloneNode(true);
        card.normalize();
        return JSON.stringify(walk(card)); }"""
    browser.open(tmp_path / "few.html")
    fixed = [browser.run(f"({shape})({number})") for number in (0, 1, 4)]
    browser.open(page)
    choose(browser, "#find-words", "folder/0200")
    made = browser.run(f"({shape})(0)").replace("0200", "0000").replace("caption 200", "caption 0")
    assert made == fixed[0]
    choose(browser, "#find-words", "folder/0121")
    assert browser.run(f"({shape})(0)").replace("0121", "0001").replace("caption 121", "caption 1") == fixed[1]
    choose(browser, "#find-words", "folder/0124")  # with three references
    assert fixed[2].count('"li"') == 4
    assert browser.run(f"({shape})(0)").replace("0124", "0004").replace("caption 124", "caption 4") == fixed[2]


def test_texts_never_become_html(browser, page):
    for width in (1200, 390):
        browser.open(page, width=width)
        choose(browser, "#find-words", "bold")
        assert len(browser.run(NAMES)) == COUNT // 10 and browser.run("document.title").startswith("title: Test")
        assert browser.run("document.querySelectorAll('#cards b, #cards script, [onerror]').length") == 0
        assert browser.complaints() == [] and browser.requests() == [page.as_uri()]


@pytest.mark.parametrize(("width", "scheme"), [  # what is narrow breaks first
    (390, "dark"), *(pytest.param(*look, marks=pytest.mark.slow) for look in (
        (1200, "light"), (1200, "dark"), (390, "light")))])
def test_the_layout_holds_with_the_script_s_cards(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)
    browser.run("document.querySelector('.card-pages [data-step=\"1\"]').click()")
    browser.run("document.querySelector('.card-pages [data-step=\"1\"]').click()")
    assert browser.run(SAID) == f"Samples 121 to 180 of {COUNT}."
    assert browser.run(CHECK) == []


def test_by_keyboard_and_for_screen_readers(browser, page):
    browser.open(page)
    found = browser.run("""[...document.querySelectorAll(
        "#find input, #find select, .card-pages button, .order")].map(one => [one.tabIndex,
            one.labels?.length ? one.labels[0].textContent.trim() : one.textContent.trim()])""")
    assert all(index == 0 and name for index, name in found) and len(found) >= 14
    browser.run("document.querySelector('.card-pages [data-step=\"1\"]').focus()")
    for _ in range(6):
        browser.run("document.activeElement.click()")
    assert browser.run("document.activeElement.textContent") == "Previous page", "not lost on a disabled button"
    assert browser.run("document.getElementById('find-said').getAttribute('role')") == "status"


def test_real_keys_search_and_order(browser, page):
    """Tab reaches the search in a few steps from the heading before it; typing finds; Tab and Space turn a page."""
    browser.open(page)
    browser.run("document.querySelector('#find-words').scrollIntoView()")
    browser.run("(at => { at.tabIndex = -1; at.focus(); })(document.getElementById('samples-title'))")
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "find-words"
    browser.type("caption 12")
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run(SAID) == f"Samples 1 to 14 of 14, from {COUNT}."  # 120 to 129, and those that end with 12
    for _ in range(len("caption 12")):
        browser.press("Backspace")
    browser.run("new Promise(done => setTimeout(done, 200))")
    while browser.run("document.activeElement.dataset.step") != "1":
        browser.press("Tab")
        assert browser.run("document.activeElement.closest('#samples') !== null"), "the button comes before the end"
    browser.press(" ")
    assert browser.run(SAID) == f"Samples 61 to 120 of {COUNT}."


def test_tables_are_ordered_by_their_heads(browser, page):
    browser.open(page)
    names = "[...document.querySelectorAll('#buckets tbody td:first-child')].map(one => one.textContent)"
    press = "document.querySelectorAll('#buckets .order')[{}].click()"
    for column, wanted in ((1, "dabc"), (1, "badc"), (0, "abcd"), (0, "dcba")):
        browser.run(press.format(column))
        assert "".join(browser.run(names)) == wanted, "numbers as numbers; nothing comes last"
    assert browser.run("document.querySelectorAll('#buckets th')[0].getAttribute('aria-sort')") == "descending"
    assert browser.run("document.querySelectorAll('#buckets th')[1].getAttribute('aria-sort')") is None


def test_tables_of_a_page_about_a_run_are_sorted(browser, tmp_path):
    texts = [f"word {number}" for number in range(TEXTS)]
    (tmp_path / "run.html").write_text(run_html(texts, tmp_path / "run"), encoding="utf-8")
    browser.open(tmp_path / "run.html")
    column = "[...document.querySelectorAll('#events tbody tr')].map(row => Number(row.cells[0].textContent))"
    before = browser.run(column)
    browser.run("document.querySelector('#events th button').click()")
    assert browser.run(column) == sorted(before)
    browser.run("document.querySelector('#events th button').click()")
    assert browser.run(column) == sorted(before, reverse=True) != before


def test_without_its_script_the_page_shows_its_first_cards(browser, page, tmp_path):
    text = re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "plain.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "plain.html")
    assert len(browser.run(NAMES)) == FEW and browser.run(SAID) == ""
    assert browser.run("getComputedStyle(document.getElementById('find')).display") == "none"
    assert browser.run("document.querySelectorAll('.order').length") == 0 and MADE.isoformat() in text
