"""Selecting and sorting columns agrees with doing it sample by sample."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from synthetic import Scale, build

from prep.manifest.opened import open_manifest
from prep.manifest.samples import open_samples
from prep.manifest.select import LIKENESS, REMEMBERED, SORTS, Compared, LowerCase, Query, Selector
from prep.manifest.tables import FINDINGS, SAMPLES

FOUND = [("0000/00000003.png", "blank", "warning"), ("source[1]/0000/00000004.png", "blank", "warning"),
         ("source[0]/0000/00000005.png", "blank", "warning"), ("0000/00000003.png", "truncated", "error"),
         ("source[1]/none.png", "has-alpha", "info")]


@pytest.fixture(scope="module")
def selector(tmp_path_factory):
    """300 samples in batches of 70, of two sources, every split, several captions; some findings."""
    manifest = build(tmp_path_factory.mktemp("synthetic"), Scale(samples=300, buckets=5, batch_rows=70))
    opened = open_manifest(manifest)
    made = Selector(opened)
    rows = opened.samples.table.to_pylist()
    for number, row in enumerate(rows):
        row |= {"source": number % 2, "role": ("train", "validation", "prior")[number % 3], "weight": number % 7 / 4,
                "coverage": None if number % 4 else number / 300, "width": 1 + number * 37 % 101}
        row["texts"] = row["texts"] * (1 + number % 3)
        row["texts"][-1] = {**row["texts"][-1], "caption": f"{'x' * (number % 11)} Straße No. {number} (a+b) İ"}
    schema = SAMPLES.remove_metadata()
    table = pa.Table.from_batches([pa.RecordBatch.from_pylist(rows[at:at + 70], schema=schema)
                                   for at in range(0, 300, 70)])
    made.samples = open_samples(table)
    for number, row in enumerate(rows):
        row["loss"] = None if number % 5 == 0 else number * 7 % 11 / 4
        row |= {"cluster": number % 6 - 1, "alike": None if number % 6 == 0 else number * 5 % 13 / 13,
                "typical": None if number % 6 == 0 else number * 3 % 17 / 17}
    made.learn(np.array([np.nan if row["loss"] is None else row["loss"] for row in rows]))
    made.compare(Compared(clusters=np.array([row["cluster"] for row in rows]), findings=FINDINGS.empty_table(), **{
        name: np.array([np.nan if row[name] is None else row[name] for row in rows]) for name in LIKENESS}))
    made.rows, made.opened = rows, opened
    made.__dict__["findings"] = pa.Table.from_pylist(
        [{"path": path, "code": code, "severity": severity, "detail": ""} for path, code, severity in FOUND],
        schema=FINDINGS)
    return made


def fits(row, query):
    text = query.text.lower()
    coverage = row["coverage"]
    labels = {row["name"], f"source[{row['source']}]/{row['name']}"}
    return all((
        not text or any(text in words.lower() for words in (row["name"], *(one["caption"] for one in row["texts"]))),
        not query.role or row["role"] == query.role,
        query.source is None or row["source"] == query.source,
        query.bucket is None or row["bucket"] == query.bucket,
        query.masked is None or (coverage is not None) == query.masked,
        query.low is None or (coverage is not None and np.float32(coverage) >= query.low),
        query.high is None or (coverage is not None and np.float32(coverage) <= query.high),
        query.hard is None or (row["loss"] is not None and row["loss"] >= query.hard),
        query.cluster is None or row["cluster"] == query.cluster,
        not query.finding or any(path in labels and code == query.finding for path, code, _ in FOUND),
    ))


def key(number, row, sort):
    coverage = math.inf if row["coverage"] is None else row["coverage"]
    loss, alike, typical = (math.inf if row[name] is None else row[name] for name in ("loss", *LIKENESS))
    return {"id": number, "name": row["name"], "mask": coverage, "weight": row["weight"],
            "caption": max(len(one["caption"]) for one in row["texts"]), "pixels": row["width"] * row["height"],
            "loss": loss, "alike": alike, "typical": typical}[sort]


@pytest.mark.parametrize("query", [
    Query(), Query(text="NUMBER 1"), Query(text="straße"), Query(text="(a+b)"), Query(text=".*"), Query(text="\\E|a"),
    Query(text="000/000001"), Query(text="STRASSE"), Query(text="x"), Query(text="e"), Query(text=" ("),
    Query(text="NO."), Query(text="nowhere"), Query(role="prior"), Query(source=1), Query(bucket=3),
    Query(masked=True), Query(masked=False), Query(low=0.25), Query(low=0.25, high=0.5),
    Query(high=0.1), Query(hard=1.5), Query(hard=0.0, masked=True), Query(finding="blank"),
    Query(cluster=0), Query(cluster=4, masked=True), Query(cluster=9),
    Query(finding="truncated"), Query(finding="has-alpha"), Query(finding="near-duplicate"),
    Query(text="number 2", role="train", source=0, masked=True, low=0.1),
], ids=str)
def test_samples_that_fit(selector, query):
    wanted = {number for number, row in enumerate(selector.rows) if fits(row, query)}
    assert set(selector.select(query).tolist()) == wanted


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_orders(selector, sort, descending):
    """Samples without a mask come last in both directions; equal ones are in the table's order."""
    found = selector.select(Query(sort=sort, descending=descending)).tolist()
    keys = {number: key(number, row, sort) for number, row in enumerate(selector.rows)}
    finite = [number for number in keys if keys[number] != math.inf]
    none = [number for number in keys if keys[number] == math.inf]
    assert found == sorted(finite, key=keys.__getitem__, reverse=descending) + none if not descending else \
        [keys[one] for one in found] == sorted((keys[one] for one in finite), reverse=True) + [math.inf] * len(none)
    for before, after in pairwise(found):
        assert keys[before] != keys[after] or before < after


def test_a_selection_is_remembered_and_the_oldest_forgotten(selector):
    first = selector.select(Query(text="number 1"))
    assert selector.select(Query(text="number 1")) is first
    for number in range(REMEMBERED):
        selector.select(Query(text=f"number {number}", masked=True))
    assert selector.select(Query(text="number 1")) is not first and len(selector._known) == REMEMBERED


def test_other_losses_are_learned(selector):
    other = Selector(selector.opened)
    assert len(other.select(Query(hard=0.0))) == 0
    assert other.select(Query(sort="loss")).tolist() == other.select(Query(sort="id")).tolist()
    losses = np.arange(300.0)
    other.learn(losses)
    kept = other.select(Query(hard=10.0))
    assert len(kept) == 290 and other.select(Query(sort="loss", descending=True))[0] == 299
    other.learn(losses)  # the same
    assert other.select(Query(hard=10.0)) is kept
    other.learn(-losses)
    assert other.select(Query(hard=0.0)).tolist() == [0] and other.select(Query(sort="loss"))[0] == 299


def test_findings(selector, small):
    assert {one["code"] for one in selector.findings_of(selector_number(selector, 3))} == {"blank", "truncated"}
    assert len(selector.findings_with("")) == len(FOUND) and len(selector.findings_with("blank")) == 3
    real = Selector(small)
    assert real.codes == {"truncated": 1} and real.findings.to_pylist()[0]["detail"] == "ends <early>"


def selector_number(selector, number):
    return next(at for at, row in enumerate(selector.rows) if row["name"] == f"0000/{number:08}.png")


def test_samples_of_findings(selector):
    names = [(int(source), selector.samples.name(at)) for at, source in enumerate(selector.samples.source)]
    first = {}
    for at, (source, name) in enumerate(names):
        first.setdefault(f"source[{source}]/{name}", at)
        first.setdefault(name, at)
    paths = [path for pair in names[:40] for path in (pair[1], f"source[{pair[0]}]/{pair[1]}")]
    assert selector.samples_of([*paths, "none.png", "source[7]/none.png"]) == {path: first[path] for path in paths}
    assert selector.samples_of([]) == {}


def test_the_worst_findings_come_first(small):
    table = pa.Table.from_pylist([{"path": path, "code": code, "severity": severity, "detail": ""}
                                  for path, code, severity in FOUND], schema=FINDINGS)
    listed = SimpleNamespace(samples=small.samples, findings_table=table, prefixes=small.prefixes)
    assert [one["severity"] for one in Selector(listed).findings.to_pylist()] == [
        "error", "warning", "warning", "warning", "info"]


def test_a_manifest_without_samples(selector):
    empty = Selector(selector.opened)
    empty.samples = open_samples(selector.opened.samples.table.slice(0, 0))
    for sort in SORTS:
        assert len(empty.select(replace(Query(text="x"), sort=sort))) == 0


@pytest.mark.parametrize("many", [0, 3, 10**6])
def test_texts_are_searched_alike_by_place_and_by_byte(monkeypatch, many):
    """Also in slices of arrays, with empty strings, and never across the ends of two strings."""
    monkeypatch.setattr("prep.manifest.select.MANY", many)
    for words in (["ab", "", "ba", "aaab", "Ab", "b", "a"], ["äb", "ÄB", "", "aB", "b", "Straße", "日本"], [""], []):
        for strings in (pa.array(words, pa.string()), pa.array(["ab", *words, "ab"])[1:-1]):
            for needle in ("ab", "b", "äb", "aa", "aab", "本", "abb", "ba", "x"):
                found = LowerCase(strings).contain(needle.encode())
                assert found.tolist() == [needle in word.lower() for word in words], (words, needle)


def test_what_embeddings_say_comes_later(selector):
    """Findings, too; what was selected before is selected again."""
    other = Selector(selector.opened)
    assert len(other.select(Query(cluster=2))) == 0 and other.clusters == [] and "outlier" not in other.codes
    named = other.samples.name(7)
    found = pa.Table.from_pylist([{"path": named, "code": "outlier", "severity": "info", "detail": "far"}],
                                 schema=FINDINGS)
    said = Compared(clusters=np.arange(300) % 3, alike=np.arange(300.0), typical=-np.arange(300.0), findings=found)
    other.compare(said)
    kept = other.select(Query(cluster=2))
    assert len(kept) == 100 and other.clusters == [(0, 100), (1, 100), (2, 100)] and other.codes["outlier"] == 1
    assert other.select(Query(finding="outlier")).tolist() == [7] and other.findings_of(7)[-1]["code"] == "outlier"
    assert other.select(Query(sort="typical"))[0] == 299 == other.select(Query(sort="alike", descending=True))[0]
    other.compare(said)  # the same
    assert other.select(Query(cluster=2)) is kept
