"""The page of what embeddings say of a set: its texts stay texts, circles do not overlap, and nothing is cut off."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import dist
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_pages import Outline

from prep.findings import finding
from prep.formatting import printable
from prep.pages import layout
from prep.pages.layout import render
from prep.pages.overlay import Shot
from prep.pages.similarity import DRAWN, HEIGHT, LEAST, ROWS, WIDTH, cluster_map, similarity_page
from prep.similarity.analysis import analyze
from prep.similarity.options import SimilarityOptions
from prep.similarity.shares import Cluster, Picture

CHECK = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
BASE = Path(layout.__file__).parent.as_uri()  # where the page finds its style
TEXTS = 7
PLAIN = tuple(f"plain text {number}" for number in range(TEXTS))
USUAL = ("holiday/beach_0042.jpg", "holiday/a red heart on a checked ground.png", "portraits/IMG_20240229_120000.jpeg",
         "cat.webp", "backpack_dog/backpack_dog_03.jpg", "photos-000001.tar/00100010.jpg", "x.png")
ATTACKS = ("</title><script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "' onload='alert(1)",
           "</style><style>*{display:none}", "{{ 7*7 }}{% include 'page.html' %}", "</desc></svg><b>&amp;&#60;",
           "W" * 120 + "/" + "/".join(["directory"] * 24) + "\u05d0\u05d1 \u202e\u0000\x1b[31m")
texts = st.lists(st.text(st.sampled_from("<>\"'&/{%}_ -a\u202e\u05d0\n") | st.characters(codec="utf-8"), min_size=1,
                         max_size=40), min_size=TEXTS, max_size=TEXTS, unique=True)


def analyzed(words):
    """Each text is a picture of its own source, with eight more of a clump; the first has a copy."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.eye(len(words), 32), 9, axis=0) + 0.05 * rng.normal(size=(9 * len(words), 32))
    rows[1] = rows[0] + 0.001
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    pictures = [Picture(name=f"{word}{number or ''}", size=(64, 64), source=word) for word in words
                for number in range(9)]
    return analyze(pictures, rows.astype(np.float16), SimilarityOptions(clusters=len(words)))


def html_of(found, words, address=f"{BASE}/static/icon.svg"):
    page = similarity_page(
        found, shot=lambda name: Shot(name=name, address=address, lazy=True),
        link=lambda name: "sample/1", all_of=lambda number: f"?cluster={number}", what=words[0], elsewhere=words[1])
    return render("similarity.html", page=page, name=words[0], base=BASE, home="", root="", has_run=False, edits=False,
                  compares=False, embedded=True)


@settings(max_examples=4)
@given(words=texts)
@example(words=list(ATTACKS))
def test_texts_stay_texts(words):
    hostile, plain = (Outline(html_of(analyzed(each), each)) for each in (words, PLAIN))
    assert hostile.elements == plain.elements
    shown = " ".join(hostile.words.split())
    for word in words[:4]:
        assert " ".join(printable(word).split()) in shown


def test_the_page_has_all_that_was_found():
    found = analyzed(PLAIN)
    page = html_of(found, PLAIN)
    assert page.count('<circle class="picture"') == page.count('href="#cluster-') == TEXTS
    assert all(f'id="cluster-{number}"' in page and f'href="#cluster-{number}"' in page for number in range(1, 8))
    assert 'role="group" aria-labelledby="map-name" aria-describedby="map-says">' in page
    assert page.count('<title id="map-name">') == page.count('<desc id="map-says">') == 1
    assert "plain text 01" in page and "<code>semantic-duplicate</code>" in page and "uniform-source" in page
    assert 'cluster 1, ' in page and ": 9 pictures, 14% of an epoch" in page and "<dt>" in page
    empty = analyze([], np.zeros((0, 4), np.float16), SimilarityOptions())
    page = html_of(empty, PLAIN)
    assert "Nothing stands out" in page and "No pictures with embeddings." in page and "<svg class=\"plot" not in page


def test_a_page_of_very_many_is_bounded_and_says_what_it_leaves_out():
    cluster = Cluster(medoid="x.jpg", pictures=3, share=0.01, sources=(("x", 3),), examples=("y.jpg",), place=(0.0, 0))
    many = replace(analyzed(PLAIN), clusters=(cluster,) * 300, findings=(finding("x.jpg", "outlier", "far"),) * 5000)
    page = html_of(many, PLAIN)
    assert page.count('<li id="cluster-') == page.count("<circle class=\"picture\"") == DRAWN
    assert "236 smaller clusters not shown." in page and page.count("<code>outlier</code>") == ROWS
    assert "4,800 more rows are not shown here. plain text 1" in page and len(page) < 1 << 20


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(-1, 1), st.floats(-1, 1)), max_size=DRAWN))
@settings(max_examples=25, deadline=None)
def test_circles_stay_on_the_map_and_apart(drawn):
    clusters = [Cluster(medoid=str(number), pictures=count, share=0.0, sources=(), examples=(), place=(x, y))
                for number, (count, x, y) in enumerate(drawn)]
    circles = cluster_map(clusters).circles
    assert [circle.number for circle in circles] == list(range(1, len(drawn) + 1))
    for circle in circles:
        assert circle.radius >= LEAST
        assert circle.radius <= circle.x <= WIDTH - circle.radius
        assert circle.radius <= circle.y <= HEIGHT - circle.radius
    for first, second in combinations(circles, 2):  # numbers never touch, and there is room to click
        assert dist((first.x, first.y), (second.x, second.y)) > 0.75 * (first.radius + second.radius)


@pytest.mark.parametrize("words", [USUAL, ATTACKS], ids=["usual", "unusual"])
def test_nothing_overlaps_breaks_or_is_cut_off(browser, tmp_path, words):
    path = tmp_path / "page.html"
    path.write_text(html_of(analyzed(words), words), encoding="utf-8")
    for width, scheme in ((1200, "light"), (390, "dark")):
        browser.open(path, width=width, height=4000, scheme=scheme)
        browser.run("Promise.all([...document.images].map(one => (one.loading = 'eager', one.decode())))")
        assert browser.run(CHECK) == [] and browser.complaints() == []
    browser.run("document.querySelector('.map a').focus()")
    browser.press("Enter")
    assert browser.run("location.hash") == "#cluster-1"
