"""Nothing that a file says becomes HTML: every page is made of the same elements, whatever its texts are."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_pages import CODES, TEXTS, Outline, bucket_html, manifest_html, mask_html, origin, scan_html
from run_pages import run_html

from prep.formatting import printable
from prep.pages import layout
from prep.report.snapshots.scan import CARDS, PAIRS, scan_page
from prep.scan.scanner import ScanReport

PLAIN = tuple(f"plain text {number}" for number in range(TEXTS))
ATTACKS = ("</title><script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "' onload='alert(1)",
           "</style><style>*{display:none}", "{{ 7*7 }}{% include 'page.html' %}", "-->&lt;b&gt;<!--&amp;&#60;",
           "data:text/html,<iframe src=javascript:alert(1)>\u202e\u0000\x1b[31m")
fragments = st.sampled_from(["<", ">", "\"", "'", "&", "</bdi>", "<script>", "{{", "}}", "{%", "]]>", "<!--", "/", "_",
                             " ", "\n", "&lt;", "&#60;", "javascript:", "\u202e"])
texts = st.lists(st.lists(fragments | st.text(max_size=8), min_size=1, max_size=12).map("".join),
                 min_size=TEXTS, max_size=TEXTS, unique=True)
PAGES = {"scan": lambda words, _: scan_html(words), "buckets": lambda words, _: bucket_html(words), "masks": mask_html,
         "manifest": manifest_html, "run": run_html}


def made(kind, words):
    with tempfile.TemporaryDirectory() as root:
        return PAGES[kind](words, Path(root) / "made")


@cache
def plain_elements(kind):
    return Outline(made(kind, PLAIN)).elements


@pytest.mark.parametrize("kind", ["scan", "buckets", "masks"])
@settings(max_examples=12)
@given(words=texts)
@example(words=list(ATTACKS))
def test_texts_stay_texts(kind, words):
    check(kind, words)


@pytest.mark.parametrize("kind", ["manifest", "run"])
@pytest.mark.parametrize("words", [ATTACKS, ATTACKS[::-1]], ids=["forward", "backward"])
def test_texts_of_manifests_and_runs_stay_texts(kind, words):
    """Not from drawn texts: each example writes a cache, or pictures."""
    check(kind, words)


def check(kind, words):
    hostile = Outline(made(kind, words))
    assert hostile.elements == plain_elements(kind)
    shown = " ".join(hostile.words.split())
    for word in words[:4]:
        assert " ".join(printable(word).split()) in shown
    assert printable(words[0]) + ": " in hostile.words or kind in ("manifest", "run"), "the title names the data set"


def test_the_test_of_texts_sees_elements_and_attributes():
    page = scan_html(PLAIN)
    for change in (("plain text 3", "<b>plain</b>"), ('<p class="name">', '<p class="name" onclick="x">')):
        assert change[0] in page
        assert Outline(page.replace(*change)).elements != Outline(page).elements


def test_one_template_draws_crops_and_masks():
    """Its boxes are nowhere else made of HTML: neither in another template nor in a script."""
    drawn = {path.name for path in Path(layout.__file__).parent.rglob("*.*")
             if path.suffix in (".html", ".js") and re.search('class="(shade|crop)"|createElementNS', path.read_text())}
    assert drawn == {"overlay.html"}


def test_a_page_of_many_findings_is_bounded_and_says_what_it_leaves_out():
    usual = [f"holiday/somewhere/picture {number:04}.jpg" for number in range(TEXTS)]
    page = scan_html(usual, repeats=500)  # 17,500 findings of five codes, and 3,499 near-duplicates
    assert len(page) < 4 << 20 and page.count("<tr>") < 2100
    assert 'Duplicates <span class="tally">3,499</span>' in page and page.count('<article class="pair') == PAIRS
    assert f"The {PAIRS} worst are shown here. prep scan --json lists every finding." in page
    assert page.count('<li class="card') <= CARDS and "3,500 files have findings." in page
    assert page.count("3,300 more rows are not shown here. prep scan --json lists every finding.") == len(CODES)


def test_of_many_codes_the_worst_come_first(monkeypatch):
    monkeypatch.setattr("prep.report.snapshots.scan.ALL_ROWS", 10)
    page = scan_html(PLAIN)
    errors, rest = page.split('id="code-truncated"')[1].split("</details>", 1)
    assert errors.count("<tr>") == 1 + TEXTS and "not shown" not in errors
    left = re.findall(r"(\d+) (more )?rows? (?:is|are) not shown here", rest)
    assert sorted(int(count) for count, _ in left) == [4, 6, 7, 7, 7] and "None." not in rest


def test_a_page_of_no_pictures():
    page = scan_page(origin(PLAIN), ScanReport(pictures=0, samples=0, findings=()), {})
    assert "<strong>No picture was found</strong>" in page and "Check the path of the source" in page
    assert 'class="meter' not in page and "data:image" not in page


def test_names_that_are_not_unicode_are_shown():
    words = [f"\udcff{number}" for number in range(TEXTS)]
    assert "\\udcff3" in Outline(scan_html(words).encode().decode()).words
    assert "\\udcff3" in Outline(bucket_html(words).encode().decode()).words


def test_paths_may_be_broken_after_directories_and_inside_long_names():
    page = scan_html([*PLAIN[:6], f"some/dir/short_name.png of {'long_' * 5}name {'x' * 45}"])
    long = "long_long_long_<wbr>long_long_name"
    assert f"some/<wbr>dir/<wbr>short_name.png of {long} {'x' * 16}<wbr>{'x' * 16}<wbr>{'x' * 13}" in page
