"""`prep codes` lists every finding code with its meaning and what to do."""

from __future__ import annotations

from prep.findings import CODES


def test_all_codes(prep):
    result = prep("codes")
    assert result.code == 0
    assert [tuple(line.split("\t")) for line in result.out.splitlines()] == [
        (severity, code, meaning, remedy) for code, (severity, meaning, remedy) in CODES.items()]


def test_one_code(prep):
    severity, meaning, remedy = CODES["truncated"]
    assert prep("codes", "truncated").out == f"{severity} truncated: {meaning}\nwhat to do: {remedy}\n"


def test_an_unknown_code_is_corrected(prep):
    result = prep("codes", "near-dup")
    assert result.code == 2 and "did you mean 'near-duplicate'?" in result.err
    assert "hint: prep codes lists all codes" in result.err


def test_json(prep):
    assert [one["code"] for one in prep("codes", "--json").json["codes"]] == list(CODES)
    (one,) = prep("codes", "blank", "--json").json["codes"]
    assert (one["severity"], one["meaning"], one["remedy"]) == CODES["blank"]
