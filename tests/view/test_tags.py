"""The count of tags, and the filter by one: in the pages of pictures and manifests, and of many samples."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pictures import draw
from viewing import viewing_source

from prep.digest import digest_strings
from prep.geometry import Placement
from prep.manifest.samples import Sample, Text, View
from prep.manifest.select import Query, Selector, TagIndex
from prep.manifest.unencoded import NO_KEY, unencoded
from prep.view.edit.replace import Rewording

SMALL = {"image.resolution": 64, "image.step": 16, "image.shortest": 32}
HOSTILE = "<script>document.title='owned'</script>"


@pytest.fixture
def pictures(tmp_path):
    for number, words in enumerate(("cat, sitting,  blue eyes", "black cat, sitting, cat, cat", f"dog, {HOSTILE}", "")):
        path = draw(tmp_path / "pictures" / f"{number}.png", (96, 80), seed=number)
        if words:
            path.with_suffix(".txt").write_text(words)
    return tmp_path / "pictures"


def counts(server, path="/tags"):
    return {tag.replace("<wbr>", ""): (int(count), address) for address, tag, count in re.findall(
        r'<li><a href="([^"]*)"[^>]*><bdi>(.*?)</bdi></a>.*?<span class="number">(\d+)</span>',
        server.get(path).text.partition('class="tags"')[2])}


def test_tags_are_counted_and_lead_to_their_samples(pictures):
    with viewing_source(pictures, **SMALL) as server:
        found = counts(server)
        assert {tag: count for tag, (count, _) in found.items()} == {
            "cat": 2, "sitting": 2, "black cat": 1, "blue eyes": 1, "dog": 1,
            "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;": 1}
        assert list(found)[:2] == ["cat", "sitting"]  # of equal ones by name
        for tag, shown in (("cat", 2), ("black cat", 1), ("blue eyes", 1)):
            address = found[tag][1].replace("&amp;", "&").removeprefix(server.base)
            assert server.get(address).text.count('class="card"') == shown
        assert "6 different tags in the captions of all samples" in server.get("/tags").text
        assert "script>document" not in server.get("/tags").text.replace("&lt;script&gt;", "")
        assert f'href="{server.base}/tags"' in server.get().text
        assert 'name="find"' not in server.get("/?tag=cat").text  # nothing is changed here
        narrowed = counts(server, "/tags?q=sitting")
        assert set(narrowed) == {"cat", "sitting", "black cat", "blue eyes"}
        assert "q=sitting&amp;tag=cat" in narrowed["cat"][1]
        assert "in the captions of 2 of 4 samples" in server.get("/tags?q=sitting").text
        assert "No caption has a tag." in server.get("/tags?q=nothing").text
        assert server.get("/?tag=Cat").text.count('class="card"') == 0  # as it is written
        assert server.get(f"/?tag={'x' * 501}").status == 400 and server.get("/tags?page=x").status == 200


def test_the_form_is_filled_with_the_tag(pictures, tmp_path):
    with viewing_source(pictures, tmp_path / "edits", **SMALL) as server:
        text = server.get("/?tag=cat").text
        assert 'name="find" maxlength="1000" value="cat"' in text and 'value="yes" checked' in text
        text = server.get("/replace?tag=cat&find=cat&with=&prepend=&whole=yes").text
        assert "2 captions change." in text
        plan = re.search(r'data-plan="(\w+)"', text)[1]
        answer = server.ask("POST", f"{server.base}/replace?tag=cat&find=cat&whole=yes", body=b"",
                            **{**server.form(0, "caption"), "x_latentry_plan": plan})
        assert answer.text == "Saved 2 captions."
        assert [(tmp_path / "edits" / f"{number}.txt").read_text() for number in (0, 1)] == [
            "sitting, blue eyes\n", "black cat, sitting\n"]
        assert "cat" not in counts(server) and counts(server)["sitting"][0] == 2  # counted anew
        assert server.get("/replace?find=a&whole=no").status == 400


@pytest.mark.parametrize(("caption", "words", "made"), [
    ("cat, black cat,cat", ("cat", "dog"), "dog, black cat,dog"), ("cat", ("cat", ""), ""),
    ("a cat", ("cat", "dog"), "a cat"), ("a,  cat , b", (" cat", ""), "a, b"), ("a, b", ("c", "d"), "a, b"),
    ("a, cat", ("cat", " x "), "a, x")])
def test_whole_tags_are_replaced(caption, words, made):
    assert " ".join(Rewording(*words, "", whole=True).of(caption).split()) == made


def listed(captions):
    """A selector of samples with these captions, each a tuple."""
    size = (64, 64)
    samples = [Sample(id=digest_strings([str(number)]), name=f"{number}.png", source=0, role="train",
                      picture=digest_strings(["p", str(number)]), size=size, bucket=size, repeats=1, weight=1.0,
                      views=(View(placement=Placement(scaled=size, crop=(0, 0), bucket=size, flip=False), latent=NO_KEY,
                                  mask=None),),
                      texts=tuple(Text(caption=caption, weight=1.0, key=NO_KEY) for caption in texts))
               for number, texts in enumerate(captions)]
    return Selector(unencoded(samples, [(size, ())], {}, []))


def texts_of(captions):
    return pa.array([[{"caption": caption} for caption in texts] for texts in captions])


def test_counts_are_those_of_counting_one_by_one():
    random, names = Random(1), [f"tag {number}" for number in range(40)]
    captions = [tuple(" , ".join(random.choices(names, k=random.randrange(6))) for _ in range(random.randint(1, 3)))
                for _ in range(500)]
    tags = [{tag.strip() for caption in texts for tag in caption.split(",")} - {""} for texts in captions]
    index = TagIndex(pa.chunked_array([texts_of(captions[:200]), texts_of(captions[200:])]))
    for chosen in (range(500), range(0, 500, 3), [7], []):
        wanted = Counter(tag for number in chosen for tag in tags[number])
        found, different = index.counted(np.array(chosen, np.int32), 10)
        assert found == sorted(wanted.items(), key=lambda pair: (-pair[1], pair[0]))[:10] and different == len(wanted)
    for name in ("tag 3", "tag 39", "none"):
        assert np.flatnonzero(index.having(name)).tolist() == [n for n, one in enumerate(tags) if name in one]


def test_no_more_tags_are_kept_than_fit(monkeypatch):
    monkeypatch.setattr("prep.manifest.select.MOST_TAGS", 3)
    captions = [("a, b",), ("c, d, e",), ("d",), ("dd, a",)]
    index = TagIndex(pa.chunked_array([texts_of(captions[:1]), texts_of(captions[1:])]))
    assert index.counted(np.arange(4), 9) == ([("a", 2), ("b", 1), ("c", 1)], 3) and not index.complete
    assert index.having("d") is None and index.having("a").tolist() == [True, False, False, True]
    selector = listed(captions)
    named = {selector.samples.name(number): number for number in range(4)}
    assert sorted(selector.select(Query(tag="d")).tolist()) == sorted(named[f"{number}.png"] for number in (1, 2))
    assert TagIndex(pa.chunked_array([], pa.list_(pa.struct([("caption", pa.string())])))).counted(
        np.arange(0), 5) == ([], 0)
