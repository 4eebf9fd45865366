"""What findings call a file: one name for each, whatever was typed, and lines that no name can forge."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import draw, draw_mask

from prep.batching.plan import require_steps, step_plan
from prep.encode import run as command_encode
from prep.errors import EmptyPlanError
from prep.findings import Finding, rejected_line, rejected_lines
from prep.fs.blob import open_descriptor
from prep.masks import run as command_mask
from prep.masks.methods import MadeMasks

FORGED = "b\nerror: fake.png"
SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--quiet")


@pytest.fixture
def two(tmp_path):
    """A recipe of two sources that have files of the same names: a good one, one that is none, one without caption."""
    (tmp_path / "mks").mkdir()
    for source in ("one", "two"):
        for name in ("good.png", "sub/alone.png"):
            draw(tmp_path / source / name, (96, 96), seed=len(source + name))
        (tmp_path / source / "good.txt").write_text("a good one")
        (tmp_path / source / "bad.png").write_bytes(b"no picture")
        draw_mask(tmp_path / "mks" / f"{source}.png", (96, 96))
    draw(tmp_path / "two" / "two.png", (96, 96), seed=9).with_suffix(".txt").write_text("of two")
    recipe = tmp_path / "r.toml"
    recipe.write_text("[mask]\nfrom = 'mks'\n[caption]\nmissing = 'reject'\n"
                      "[[source]]\npath = 'one'\n[[source]]\npath = 'two'\n")
    return recipe


BAD = {("one/bad.png", "not-an-image"), ("two/bad.png", "not-an-image")}
ALONE = {("one/sub/alone.png", "missing-caption"), ("two/sub/alone.png", "missing-caption")}


def said(findings):
    return {(one["path"], one["code"]) for one in findings}


def test_files_of_several_sources_are_told_apart(prep, two, tiny_model, tmp_path):
    encoded = prep("encode", two, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model", tiny_model,
                   *SMALL, "--json")
    assert encoded.code == 0 and said(encoded.json["rejected"]) == BAD | ALONE
    document = prep("inspect", tmp_path / "m.json", "--json").json
    assert document["rejected"] == 4
    assert said(document["findings"]) == BAD | ALONE | {("mks/one.png", "orphan-mask")}
    for name in ("bad.png", "two/bad.png"):
        found = prep("inspect", tmp_path / "m.json", "--sample", name, "--json").json["findings"]
        assert said(found) == {one for one in BAD if one[0].endswith(name)}


def test_a_sample_is_found_by_the_name_that_findings_give_it(prep, two, tiny_model, tmp_path):
    prep("encode", two, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model", tiny_model, *SMALL)
    assert len(prep("inspect", tmp_path / "m.json", "--sample", "good.png", "--json").json["samples"]) == 2
    (one,) = prep("inspect", tmp_path / "m.json", "--sample", "two/good.png", "--json").json["samples"]
    assert (one["name"], one["source"]) == ("good.png", 1)
    missing = prep("inspect", tmp_path / "m.json", "--sample", "source[2]/good.png")
    assert missing.code == 2 and "manifest has no sample 'source[2]/good.png'" in missing.err


def test_a_sample_is_found_by_a_name_that_is_not_utf_8(prep, tiny_model, tmp_path):
    """As the shell completes it; on a disk that takes such names, the picture has one."""
    draw(tmp_path / "in" / "\\xff.png", (96, 96), seed=1)  # the name that the manifest gives to the byte 0xff
    prep("encode", tmp_path / "in", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model", tiny_model,
         "--missing-caption", "empty", *SMALL)
    found = prep("inspect", tmp_path / "m.json", "--sample", "\udcff.png", "--json")
    assert found.code == 0 and [one["name"] for one in found.json["samples"]] == ["\\xff.png"]
    missing = prep("inspect", tmp_path / "m.json", "--sample", "\udcfe.png")
    assert missing.code == 2 and r"manifest has no sample '\xfe.png'" in missing.err


def test_scan_and_bucket_tell_them_apart(prep, two):
    findings = prep("scan", two, "--json").json["findings"]
    assert said(findings) >= BAD | ALONE | {("mks/one.png", "orphan-mask"), ("two/good.png", "exact-duplicate")}
    (copied,) = [one["detail"] for one in findings if one["path"] == "two/good.png"]
    assert copied == "same bytes as one/good.png"
    assert not [one for one in findings if one["path"] == "mks/two.png"]
    view = prep("bucket", two, "--batch-size", 4, "--underfill", "repeat", *SMALL[:4], "--json").json
    assert {one["name"] for one in view["pictures"]} >= {"one/good.png", "two/good.png"}
    assert all(name.startswith(("one/", "two/")) for name in view["repeated"])


def test_what_one_source_has_alone_keeps_its_name(prep, two, tmp_path):
    assert ("bad.png", "not-an-image") in said(prep("scan", tmp_path / "one", "--json").json["findings"])


def test_rows_that_fail_later_are_told_apart(prep, two, tiny_model, tmp_path, monkeypatch, decode_here):
    """What only the engine notices: a picture, and a mask, that cannot be read any more."""
    from prep.encode.engines import decoding

    def failing(blob):
        if blob.path.parts[-2:] in (("two", "good.png"), ("mks", "two.png")):
            raise PermissionError(13, "Permission denied")
        return read(blob)

    read = decoding.read_blob
    draw(tmp_path / "two" / "good.png", (96, 96), seed=77)  # no copy of the other source's
    monkeypatch.setattr(decoding, "read_blob", failing)
    report = prep("encode", two, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model", tiny_model,
                  *SMALL, "--json").json
    details = {one["path"]: one["detail"] for one in report["rejected"] if one["code"] == "unreadable-file"}
    assert details == {
        "two/good.png": "two/good.png cannot be read: Permission denied",
        "two/two.png": "two/two.png: its mask two.png cannot be read: Permission denied"}


@pytest.mark.parametrize(("name", "said"), [
    ("a.png", "cannot be read: Permission denied"),
    ("a.txt", "its caption a.txt cannot be read: Permission denied"),
    ("a-masklabel.png", "its mask a-masklabel.png cannot be read: Permission denied"),
])
def test_the_file_that_cannot_be_read_is_named(prep, tiny_model, tmp_path, monkeypatch, name, said):
    picture = draw(tmp_path / "in" / "a.png", (96, 96), seed=1)
    picture.with_suffix(".txt").write_text("a")
    draw_mask(tmp_path / "in" / "a-masklabel.png", (96, 96))
    draw(tmp_path / "in" / "b.png", (96, 96), seed=2).with_suffix(".txt").write_text("b")
    draw_mask(tmp_path / "in" / "b-masklabel.png", (96, 96))

    def refusing(path):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", path)
        return open_descriptor(path)

    monkeypatch.setattr("prep.fs.blob.open_descriptor", refusing)
    report = prep("encode", tmp_path / "in", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--mask",
                  "sidecar", "--model", tiny_model, *SMALL, "--dry-run", "--json").json
    assert [(one["path"], one["code"], one["detail"]) for one in report["rejected"]] == [
        ("a.png", "unreadable-file", said)]


def test_names_forge_no_line():
    finding = Finding(path=FORGED, code="truncated", severity="error", detail="ends\nhint: early")
    assert rejected_line(finding) == r"rejected: $'b\nerror: fake.png': truncated: ends\nhint: early"
    encoded = command_encode.EncodeReport(manifest=Path(FORGED), encoded={}, reused={}, rejected=(finding,), notices=(),
                                          bytes=0,
                                          samples={}, dry_run=False).as_text(0)
    masked = command_mask.MaskReport(made=MadeMasks(written=0, kept=0, skipped=0, findings=(finding,), black=(FORGED,)),
                                     output=Path(FORGED), pages=(Path(FORGED),)).as_text()
    for text in (encoded, masked):
        assert rejected_line(finding) in text.splitlines()
        assert not [line for line in text.splitlines() if line.startswith(("error", "hint"))]


def test_of_very_many_rejections_the_first_are_named_and_all_are_counted():
    found = [Finding(path=f"{number}.png", code="truncated" if number % 3 else "blank", severity="error", detail="x")
             for number in range(33)]
    assert rejected_lines(found[:30]) == [rejected_line(one) for one in found[:30]]
    assert rejected_lines(found)[:-1] == [rejected_line(one) for one in found if one not in (found[31], found[32])]
    assert rejected_lines(found)[-1] == "and 2 more; in all: 22 truncated, 11 blank; --all lists all by name"
    assert rejected_lines(found, every=True) == [rejected_line(one) for one in found]


def test_a_pipe_gets_the_first_findings_of_each_code(prep, tiny_model, tmp_path):
    """Once it got 145,745 lines, each time; --all lists all, and JSON always does."""
    for number in range(23):
        draw(tmp_path / "in" / f"{number:02d}.png", (96, 96), seed=number)
    (tmp_path / "in" / "00.txt").write_text("x")
    (tmp_path / "in" / "bad.png").write_bytes(b"no picture")
    asked = ("encode", tmp_path / "in", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model", tiny_model,
             "--missing-caption", "reject", *SMALL)
    commands = (asked, ("inspect", tmp_path / "m.json"))
    for command in commands:
        few, all_of_them = prep(*command), prep(*command, "--all")
        assert few.code == all_of_them.code == 0, few.err
        assert few.out.count("missing-caption") == 21 and "bad.png" in few.out
        assert "and 2 more; in all: 22 missing-caption, 1 not-an-image; --all lists all by name" in few.out
        assert all_of_them.out.count("missing-caption") == 22 and "in all" not in all_of_them.out
    assert len(prep(*asked, "--json").json["rejected"]) == 23
    assert len(prep("inspect", tmp_path / "m.json", "--json").json["findings"]) == 23


def test_no_line_of_bucket_has_all_names(prep, tmp_path):
    for number in range(34):
        draw(tmp_path / "in" / f"{number:02d}.png", (96, 96), seed=number)
    asked = ("bucket", tmp_path / "in", "--resolution", 192, "--step", 16, "--upscale", "allow")
    assert "33.png" not in prep(*asked).out and " and 4 more" in prep(*asked).out
    assert "33.png" in prep(*asked, "--all").out and "33.png" in prep(*asked, "--json").out


def test_names_forge_no_line_of_an_error(prep, tiny_model, tmp_path):
    draw(tmp_path / "in" / FORGED, (96, 96), seed=1)
    result = prep("encode", tmp_path / "in", "--cache", tmp_path / "cache", "--model", tiny_model, *SMALL)
    assert result.code == 3 and r"pictures without a caption (1): $'b\nerror: fake.png'" in result.err
    with pytest.raises(EmptyPlanError, match=r"drops all 1 samples \(\$'b\\nerror: fake.png'\), expected at"):
        require_steps(step_plan([1], seed=0, batch_size=2, underfill="drop"), [((64, 64), ())], [FORGED])


def test_a_finding_as_json():
    assert Finding(path="a", code="b", severity="info", detail="d").as_json() == {
        "path": "a", "code": "b", "severity": "info", "detail": "d"}


def test_names_of_samples_forge_no_line_of_train():
    from train.cli.check import _as_text
    from train.cli.memory import Fitting
    from train.cli.summary import uneven_lines
    from train.setup import CheckReport

    report = CheckReport(faults=(), setup=None, plan=None, left_out=(FORGED,), repeated=(FORGED, "c"))
    text = _as_text(report, None, Fitting(forecast=None))
    assert text == "dropped: b\\nerror: fake.png\nrepeated: b\\nerror: fake.png\nrepeated: c"
    assert uneven_lines(report) == [
        "note: 1 sample dropped in the first epoch: $'b\\nerror: fake.png'; train check lists all",
        "note: 2 samples repeated to fill up: $'b\\nerror: fake.png', c; train check lists all"]


@pytest.mark.parametrize(("make", "detail"), [
    (lambda root: (root / "notes.md").write_text("x"), "no pictures in it"),
    (lambda root: (root / "a.tar").write_bytes(b""),
     "no pictures in it, but 1 tars: name them, like '*.tar'"),
    (lambda root: draw(root / "a.png", (96, 96), seed=1), "no picture is used: include and exclude leave out all 1")])
def test_a_source_of_nothing_is_told(prep, tmp_path, make, detail):
    (tmp_path / "void").mkdir()
    make(tmp_path / "void")
    draw(tmp_path / "full" / "b.png", (96, 96), seed=2).with_suffix(".txt").write_text("b")
    alone = "[[source]]\npath = 'void'\ninclude = ['*.jgp']\n"
    (tmp_path / "both.toml").write_text(f"[[source]]\npath = 'full'\n{alone}")
    (tmp_path / "alone.toml").write_text(alone)
    both, one = prep("scan", tmp_path / "both.toml", "--json"), prep("scan", tmp_path / "alone.toml", "--json")
    told = {"code": "empty-source", "severity": "warning", "detail": detail}
    assert (both.code, both.json["findings"]) == (0, [{"path": "void/.", **told}])
    assert (one.code, one.json["findings"]) == (1, [{"path": ".", **told}])  # a scan of nothing is no success
