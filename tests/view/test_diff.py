"""Two manifests side by side: which samples changed, why, and both of each."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_manifest import write_small
from viewing import viewing_here

from prep.manifest.diff import sides_of
from prep.manifest.diff_samples import REASONS, changes, compare_samples
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.pages.words import compared

BEFORE = ("a.png", "sub/b.png", "c.png", "a red heart", "a <b>blue</b> square on gray", "the same", "bad.png")
AFTER = ("a.png", "sub/b.png", "renamed.png", "a red heart", "a <b>blue</b> circle on gray", "the same", "bad.png")


@pytest.fixture
def manifests(tmp_path):
    return [write_small(tmp_path / name, texts) for name, texts in (("before", BEFORE), ("after", AFTER))]


@pytest.fixture
def server(manifests):
    with viewing_here(manifests[1], before=manifests[0]) as running:
        yield running


def opened(path):
    return open_manifest(read_manifest(path))


def test_manifests_of_one_name_are_told_apart(server, manifests):
    text = server.get("/diff").text.replace("<wbr>", "")
    assert f"<h1><bdi>{manifests[0]}</bdi> → <bdi>{manifests[1]}</bdi></h1>" in text


@pytest.mark.parametrize("turned", [False, True])
def test_changes_are_those_of_prep_diff(manifests, turned):
    a, b = sides_of(*(opened(path) for path in (reversed(manifests) if turned else manifests)))
    found, named = changes(a, b), compare_samples(a, b)
    names = [one.samples.table["name"].to_pylist() for one in (a, b)]
    assert set(found.reasons) == set(REASONS) and (found.old < 0).sum() == len(named["added"])
    rows = {names[1][new]: {name for name in REASONS if found.reasons[name][row]}
            for row, (old, new) in enumerate(zip(found.old.tolist(), found.new.tolist(), strict=True))}
    assert rows == {**{one["name"]: set(one["why"]) for one in named["changed"]},
                    **{one["to"]: {"name", *one["why"]} for one in named["renamed"]}}
    assert rows == {"sub/b.png": {"caption"}, ("c.png" if turned else "renamed.png"): {"name"}}


def test_samples_that_were_added_and_removed(small, manifests):
    from dataclasses import replace

    from prep.manifest.samples import open_samples

    side = sides_of(small, small)[0]
    assert len(changes(side, side)) == 0
    fewer = replace(side, samples=open_samples(side.samples.table.slice(1)), masks=None, texts=None)
    less, more = changes(side, fewer), changes(fewer, side)
    assert less.reasons["removed"].all() and (less.old.tolist(), less.new.tolist()) == ([0], [-1])
    assert more.reasons["added"].all() and (more.old.tolist(), more.new.tolist()) == ([-1], [0])
    none = replace(side, samples=open_samples(side.samples.table.slice(0, 0)), masks=None, texts=None)
    assert np.array_equal(changes(side, none).old, [0, 1, 2]) and len(changes(none, none)) == 0


def test_keys_that_cannot_be_read_are_not_compared(manifests):
    for path in (manifests[0].parent / "cache" / "shards").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"")
    a, b = sides_of(*(opened(path) for path in manifests))
    assert a.masks is a.texts is None
    assert changes(a, b).reasons["caption"].sum() == 1  # by the captions themselves


def test_the_page_of_changes(server):
    text = server.get("/diff").text
    assert "2 samples differ" in text and text.count('<article class="pair"') == 2
    assert '<span>a &lt;b&gt;blue&lt;/b&gt;</span> <del>square</del> <ins>circle</ins> <span>on gray</span>' in text
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["renamed", "caption"]
    assert re.findall(r"<h3>(.*?)</h3>", server.get("/diff?why=caption").text) == ["caption"]
    assert server.get("/diff?why=name&page=7").text.count('<article class="pair"') == 1
    answer = server.get("/diff?why=%3Cb%3E")
    assert answer.status == 400 and "why is &#39;&lt;b&gt;&#39;, expected one of: name, caption" in answer.text


def test_both_manifests_have_their_pages(server):
    assert "renamed.png" in server.get("/").text and "renamed.png" not in server.get("/before/").text
    text = server.get("/before/?q=square").text
    link = re.search(rf'href="({server.base}/before/sample/\d+\?q=square)"', text)[1]
    page = server.ask("GET", link).text
    assert "square" in page and f'href="{server.base}/before/?q=square"' in page
    assert f'href="{server.base}/diff"' in page
    for path in ("/before/thumbnail/0", "/before/findings", "/before/latent/0/0/0", "/before/static/page.css"):
        assert server.get(path).status == 200
    for path in ("/before/diff", "/before", "/before/before/", "/before/sample/9", "/before/../sample/0"):
        assert server.get(path).status == 404


def test_without_another_manifest_there_are_no_changes(manifests):
    with viewing_here(manifests[0]) as server:
        assert server.get("/diff").status == server.get("/before/").status == 404
        assert "Changes" not in server.get().text
    with viewing_here(manifests[0], before=manifests[0]) as server:
        assert "No sample differs" in server.get("/diff").text


@pytest.mark.parametrize(("old", "new", "words"), [
    (["a b"], ["a c"], [("same", "a"), ("gone", "b"), ("new", "c")]), (["a"], ["a", "b"], [("new", "b")]),
    (["a", "b"], ["a"], [("gone", "b")]), ([], ["a"], [("new", "a")]), (["a"], ["a"], []),
])
def test_words_that_differ(old, new, words):
    assert list(compared(old, new)) == words


def test_the_other_manifest_must_be_one(prep, manifests, tmp_path):
    assert prep("view", manifests[0], "--since", tmp_path / "none.json").code == 4
