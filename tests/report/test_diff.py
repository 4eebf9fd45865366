"""The text of `prep diff`: each line once, names spelled out, long lists cut."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.fs.place import place_of
from prep.manifest import diff, diff_samples
from prep.manifest.opened import OpenedManifest
from prep.report.terminal.diff import LISTED, REASONS, changes_text


@pytest.fixture
def document(small: OpenedManifest) -> dict[str, Any]:
    """The document of a manifest and itself, made to differ by the tests."""
    found = deepcopy(diff.compare(small.manifest, small.manifest))
    assert found["same"] and found["identical"] and not found["notes"]
    return {**found, "same": False, "identical": False}


def lines_of(document: dict[str, Any]) -> list[str]:
    return changes_text(document).splitlines()[1:]


def test_a_manifest_and_itself(small: OpenedManifest) -> None:
    text = changes_text(diff.compare(small.manifest, small.manifest))
    digest = small.manifest.digest[:12]
    assert text.splitlines() == [f"from manifest.json ({digest}) to manifest.json ({digest})",
                                 "the manifests are identical"]


@pytest.mark.parametrize(("first", "second", "named"), [
    ("a/m.json", "b/m.json", ("a/m.json", "b/m.json")), ("a/old.json", "b/new.json", ("old.json", "new.json")),
    ("m.json", "m.json", ("m.json", "m.json")),
    ("s3://one/data/m.json", "s3://two/data/m.json", ("s3://one/data/m.json", "s3://two/data/m.json")),
    ("m.json", "s3://one/data/m.json", ("m.json", "s3://one/data/m.json")),
])
def test_manifests_of_one_name_are_told_apart(small: OpenedManifest, first: str, second: str, named: tuple[str, str]
                                              ) -> None:
    sides = [replace(small.manifest, path=place_of(path)) for path in (first, second)]
    found = diff.compare(*sides)
    assert (found["a"]["manifest"], found["b"]["manifest"]) == named
    digest = small.manifest.digest[:12]
    assert changes_text(found).startswith(f"from {named[0]} ({digest}) to {named[1]} ({digest})\n")


def test_names_from_strangers_are_spelled_out(document: dict[str, Any]) -> None:
    document["samples"]["added"] = ["\x1b[31mred.png"]
    document["findings"]["added"] = [{"path": "a\nb", "code": "truncated", "severity": "error", "detail": ""}]
    document["notes"] = ["\x1b[2J"]
    assert lines_of(document) == ["not compared: \\x1b[2J", "samples added (1): $'\\x1b[31mred.png'",
                                  "finding new: error truncated: a\\nb"]


def test_long_lists_are_cut(document: dict[str, Any]) -> None:
    many = LISTED + 3
    document["buckets"] = [{"size": [64, 8 * place], "a": None, "b": {"train": 2, "validation": 0, "prior": 1}}
                           for place in range(1, many + 1)]
    document["findings"]["removed"] = [{"path": str(place), "code": "blank", "severity": "warning", "detail": ""}
                                       for place in range(many)]
    reasons = list(REASONS)
    document["samples"]["changed"] = [{"name": str(place), "why": reasons[:place + 1]} for place in range(len(reasons))]
    lines = changes_text(document, width=200).splitlines()[1:]
    assert lines.count("buckets: and 3 more") == lines.count("findings gone: and 3 more") == 1
    assert lines.count(f"samples changed for other reasons: and {len(reasons) - LISTED} more") == 1
    assert "bucket 64x8: 2 train, 1 prior, new" in lines and len(lines) == 3 * (LISTED + 1)
    assert len(lines_of(document)) == 2 * many + len(reasons), "all, where nobody reads along"


def test_every_reason_has_words(document: dict[str, Any]) -> None:
    document["samples"]["changed"] = [{"name": why, "why": [why]} for why in list(REASONS)[:LISTED]]
    assert len(set(lines_of(document))) == LISTED
    document["samples"]["renamed"] = [{"from": "a", "to": "b", "why": ["caption"]}]
    assert "samples renamed (1): a to b (caption)" in lines_of(document)


def test_the_reasons_that_are_told_are_those_that_are_found(small: OpenedManifest) -> None:
    side = diff_samples.Side(samples=small.samples, buckets=small.manifest.buckets,
                             reference_sizes=np.empty((0, 2)), sources=(0,), masks=None,
                             texts=None)
    every = np.arange(len(small.samples))
    found = diff_samples._reasons(side, side, every, every)
    assert {*found, "source"} == set(REASONS) and not np.any(list(found.values()))


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_names_that_come_several_times_are_matched_as_often_as_both_have_them(a: list[int], b: list[int]) -> None:
    counted = [diff_samples._counted(np.array(one, np.int64)) for one in (a, b)]
    assert [len(np.unique(one)) for one in counted] == [len(a), len(b)]
    assert len(np.intersect1d(*counted)) == (Counter(a) & Counter(b)).total()
