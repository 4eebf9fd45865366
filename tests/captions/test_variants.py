"""Variants of captions: all where they are few, drawn by the line's own key where they are many."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.captions.options import CaptionOptions as Choice
from prep.captions.variants import has_wildcards, variants_of

PLAIN = Choice()
LINES = st.lists(st.text("ab ,{|}é", min_size=1, max_size=30).map(lambda text: " ".join(text.split())).filter(bool),
                 min_size=1, max_size=4)


def captions(lines, choice):
    return [caption for caption, _ in variants_of(lines, choice)]


def test_without_chance_lines_are_the_captions():
    assert variants_of(["a {b|c}, d", "e"], PLAIN) == (("a {b|c}, d", 0.5), ("e", 0.5))
    assert variants_of(["e", "e"], PLAIN) == (("e", 1.0),)
    assert variants_of(["e"] * 3 + ["f"], PLAIN) == (("e", 0.75), ("f", 0.25))


def test_few_wildcards_are_all_taken():
    wild = Choice(wildcards=True)
    assert variants_of(["a {red|blue} {cat|dog}"], wild) == tuple(
        (f"a {color} {pet}", 0.25) for color in ("red", "blue") for pet in ("cat", "dog"))
    assert captions(["{a|}x {one}"], wild) == ["ax {one}", "x {one}"]


def test_many_wildcards_are_drawn():
    wild = Choice(wildcards=True, variants=8)
    found = variants_of(["{a|b|c} {a|b|c} {a|b|c}"], wild)
    assert 4 <= len(found) <= 8
    assert all(set(caption.split()) <= set("abc") for caption, _ in found)


def test_shuffled_tags_stay_the_same_tags():
    found = variants_of(["ohwx, b, c, d"], Choice(shuffle=True, keep_tokens=1, variants=64))
    orders = {tuple(caption.split(", ")) for caption, _ in found}
    assert orders == {("ohwx", *order) for order in permutations("bcd")}  # 6 orders, 64 draws
    assert sum(weight for _, weight in found) == pytest.approx(1)


def test_what_is_between_separators_of_kept_tags_is_shuffled():
    found = captions(["1girl, ohwx ||| b, c ||| best, end"], Choice(shuffle=True, variants=32))
    assert set(found) == {"1girl, ohwx, b, c, best, end", "1girl, ohwx, c, b, best, end"}
    assert captions(["a ||| b"], PLAIN) == ["a, b"], "the separator itself is never trained"
    assert captions(["a ||| b"], Choice(keep_separator="")) == ["a ||| b"]


def test_tags_are_left_out_as_often_as_asked():
    line = ", ".join(f"t{number}" for number in range(20))
    choice = Choice(dropout=0.25, keep_tokens=2, variants=400)
    kept = Counter()
    for caption, weight in variants_of([line], choice):
        tags = caption.split(", ")
        assert tags[:2] == ["t0", "t1"]
        assert tags == sorted(tags, key=lambda tag: int(tag[1:])), "without shuffling, the order stays"
        kept.update(dict.fromkeys(tags, weight))
    assert all(0.66 < kept[f"t{number}"] < 0.84 for number in range(2, 20))  # 0.75 and 4 standard deviations of 400


def test_something_always_remains():
    assert all(captions([line], Choice(dropout=1.0)) == [wanted] for line, wanted in
               {"a, b": "a", "a ||| b": "a", "a": "a"}.items())


@pytest.mark.parametrize(
    ("caption", "choice", "wanted"),
    [("a cat", Choice(trigger="ohwx"), "ohwx, a cat"),
     ("an ohwx cat", Choice(trigger="ohwx"), "an ohwx cat"),
     ("an ohwxy cat", Choice(trigger="ohwx"), "ohwx, an ohwxy cat"),
     ("a [trigger] cat", Choice(trigger="ohwx"), "a ohwx cat"),
     ("a cat", Choice(prefix="photo of", suffix=", 35mm"), "photo of a cat, 35mm"),
     ("a cat", Choice(suffix="at night"), "a cat at night"),
     ("", Choice(prefix="photo of", trigger="ohwx"), "")],
)  # fmt: skip
def test_trigger_prefix_and_suffix(caption, choice, wanted):
    assert captions([caption], choice) == [wanted]


def test_double_braces_are_braces_of_text():
    wild = Choice(wildcards=True)
    assert captions(["a {{b|c}} {d|e}"], wild) == ["a {b|c} d", "a {b|c} e"]
    assert captions(["{{{a|b}}"], wild) == ["{{a|b}"], "as sd-scripts reads it: the first two of three are one"
    assert captions(["a {{b|c}}"], Choice()) == ["a {{b|c}}"], "without wildcards nothing is read into a caption"
    assert has_wildcards("{a|b}") and not has_wildcards("{{a|b}}") and not has_wildcards("{a}")


def test_tags_that_stay_together():
    """One tag while it is shuffled, left out or kept; a separator where they met, in the end."""
    tags = Choice(shuffle=True, together=";;;", variants=50, keep_tokens=1)
    drawn = captions(["ohwx;;;dog, red;;;collar, grass, sky"], tags)
    assert sorted(drawn) == sorted(f"ohwx, dog, {', '.join(order)}" for order in
                                   permutations(["red, collar", "grass", "sky"]))
    left = captions(["red;;;collar, grass"], Choice(dropout=0.5, together=";;;", variants=50))
    assert set(left) == {"red, collar, grass", "red, collar", "grass"}
    assert captions(["a;;;b"], Choice(together=";;;")) == ["a, b"]
    assert captions(["a;;;b"], Choice()) == ["a;;;b"]


@given(LINES, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 3), st.integers(1, 12))
def test_any_lines(lines, wildcards, shuffle, dropout, keep, most):
    choice = Choice(variants=most, wildcards=wildcards, shuffle=shuffle, dropout=dropout, keep_tokens=keep)
    found = variants_of(lines, choice)
    assert 1 <= len(found) <= max(most, len(lines))
    assert sum(weight for _, weight in found) == pytest.approx(1)
    assert len({caption for caption, _ in found}) == len(found)
    assert all(caption == " ".join(caption.split()) for caption, _ in found)
    assert found == variants_of(lines, choice)
    assert Counter(dict(found)) == pytest.approx(Counter(dict(variants_of(lines[::-1], choice)))), "order is no matter"


def test_golden():
    """What was cached stays valid: the same line gives these variants for ever, or MEANING is raised."""
    choice = Choice(shuffle=True, dropout=0.2, wildcards=True, keep_tokens=1, variants=4)
    assert captions(["ohwx, {red|blue} fur, sitting, outdoors, mat"], choice) == GOLDEN


GOLDEN = ["ohwx, outdoors, mat, sitting, red fur", "ohwx, mat, outdoors, sitting, blue fur",
          "ohwx, blue fur, outdoors, mat", "ohwx, mat, blue fur, outdoors, sitting"]


def test_wildcards_are_seen():
    assert has_wildcards("a {b|c}")
    assert not has_wildcards("a {b} | c }")


def test_more_variants_begin_with_the_fewer():
    few, many = Choice(shuffle=True, variants=2), Choice(shuffle=True, variants=6)
    line = "a, b, c, d, e, f"
    assert captions([line], many)[:2] == captions([line], few)
    assert captions([line], replace(many, variants=1)) == captions([line], few)[:1]
