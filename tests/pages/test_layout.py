"""Pages in a real browser, wide and narrow, light and dark: nothing overlaps, nothing is cut off, nothing is loaded.

Needs Chromium, `apt-get install chromium`; without it these tests are skipped. tests/report tests pages without one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from report_pages import bucket_html, manifest_html, mask_html, scan_html
from run_pages import run_html

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
USUAL = ("holiday/beach_0042.jpg", "holiday/a red heart on a checked ground.png", "portraits/IMG_20240229_120000.jpeg",
         "a small white robot stands on a mossy gray rock, in the style of an old photograph, with soft light",
         "backpack_dog/backpack_dog_03.jpg", "cat.webp", "photos-000001.tar/00100010.jpg")
UNUSUAL = ("W" * 120 + ".jpg", "/".join(["directory"] * 24) + "/x.png", "\u6d77\u8fb9\u7684\u7167\u7247" * 12 + ".png",
           "supercalifragilistic" * 14, "\u05d0\u05d1\u05d2 <b>& \u202e" * 9, "\U0001f469\u200d\U0001f680" * 30,
           "_".join(["under"] * 40))
PAGES = ("scan", "many", "unusual scan", "buckets", "unusual buckets", "masks", "unusual masks", "manifest",
         "unusual manifest", "run", "unusual run")
WIDTHS = (1200, 390)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def pages(browser, tmp_path_factory):
    """The path of each page."""
    root = tmp_path_factory.mktemp("pages")
    made = {"many": scan_html(USUAL, repeats=500)}  # 21,000 findings
    for kind, texts in (("", USUAL), ("unusual ", UNUSUAL)):
        made |= {f"{kind}scan": scan_html(texts), f"{kind}buckets": bucket_html(texts),
                 f"{kind}masks": mask_html(texts, root / f"{kind}masks"),
                 f"{kind}manifest": manifest_html(texts, root / f"{kind}manifest"),
                 f"{kind}run": run_html(texts, root / f"{kind}run")}
    for name, text in made.items():
        (root / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: root / f"{name}.html" for name in made}


@pytest.mark.parametrize(("name", "width"), [  # with unusual texts, what is narrow breaks first
    pytest.param(name, width, marks=() if (width == min(WIDTHS)) == name.startswith("unusual") else pytest.mark.slow)
    for name in PAGES for width in WIDTHS])
def test_nothing_overlaps_breaks_or_is_cut_off(browser, pages, name, width):
    for scheme in SCHEMES[:1] if name == "many" else SCHEMES:
        browser.open(pages[name], width=width, scheme=scheme)
        assert browser.run(CHECK) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_file_and_obeys_its_own_policy(browser, pages, name):
    browser.open(pages[name])
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.complaints() == []


@pytest.mark.parametrize(("style", "complaint"), [
    (".cards { display: block; } .card { margin-bottom: -3rem; }", "is overlapped by its neighbor"),
    (".card img { max-width: none; width: 60rem; }", "leaves its box"),
    (".scroll { overflow: visible; } td { white-space: nowrap; }", "the page is"),
    (".card .name { overflow: hidden; height: .6rem; }", "is cut off"),
    ("td { word-break: break-all; width: 1rem; min-width: 1rem !important; max-width: 1rem !important; }", "breaks"),
    (":root { --soft: #ccc; }", "is hard to read"),
])
def test_the_check_sees_faults(browser, pages, style, complaint):
    browser.open(pages["scan"], width=390)
    browser.run(f"document.head.append(Object.assign(document.createElement('style'), {{textContent: {style!r}}}))")
    assert any(complaint in one for one in browser.run(CHECK))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_severity_has_a_color_and_a_shape(browser, pages, scheme):
    browser.open(pages["scan"], scheme=scheme)
    seen = browser.run("""[...document.querySelectorAll("#codes .badge")].map(one => [one.textContent.trim(),
        getComputedStyle(one).color, getComputedStyle(one).backgroundColor,
        one.querySelector("use").getAttribute("href")])""")
    severities = {tuple(one) for one in seen}
    assert {one[0] for one in severities} == {"error", "warning", "info"} and len(severities) == 3
    for part in (1, 2, 3):
        assert len({one[part] for one in severities}) == 3
    ink = browser.run("getComputedStyle(document.body).color")
    assert ink not in {one[1] for one in severities}


@pytest.mark.parametrize(("name", "box", "what"), [
    ("masks", "show-masks", ".shade"), ("manifest", "show-masks", ".shade"),
    ("manifest", "show-crops", ".crop")])
def test_masks_and_crops_can_be_hidden_without_scripts(browser, pages, name, box, what):
    browser.open(pages[name])
    state = f"""[...document.querySelectorAll("{what}")].map(getComputedStyle).map(
        one => one.visibility + one.outlineStyle)"""
    before = browser.run(state)
    browser.run(f"document.getElementById('{box}').click()")
    after = browser.run(state)
    assert before and all(old != new for old, new in zip(before, after, strict=True))


def test_a_duplicate_stands_beside_what_it_resembles(browser, pages):
    for width in WIDTHS:
        browser.open(pages["scan"], width=width)
        for left, right in browser.run("""[...document.querySelectorAll(".pair")].map(one =>
                [...one.querySelectorAll("figure")].map(two => two.getBoundingClientRect()).map(
                two => [two.left, two.right, two.top]))"""):
            assert left[1] <= right[0] and left[2] == right[2], "one row, also on a narrow screen"
