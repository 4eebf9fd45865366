"""Reports for the terminal: what must be in them, and that names cannot steer the terminal."""

from __future__ import annotations

import re

import pytest

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.preview import TrainSample, preview_epoch
from prep.findings import Finding, rejected_line
from prep.formatting import format_bytes, join_names, join_texts, printable
from prep.maintenance.verify import verify
from prep.manifest import describe as audit
from prep.report.terminal.buckets import outlook_tables
from prep.report.terminal.manifest import inspect_tables, sample_text, verify_tables
from prep.report.terminal.scan import finding_parts, findings_table
from prep.report.terminal.tables import page


def outlook_for(pictures, *, rules=None, **overrides):
    placed = assign_buckets(pictures, rules or Rules(resolution=512))
    showings = [TrainSample(id=f"{one.index:04}", name=one.name, bucket=one.placement.bucket, repeats=1)
                for one in placed.pictures]
    return preview_epoch(placed, showings, **{"batch_size": 4, **overrides})


def test_outlook_names_everybody_concerned():
    pictures = [("left.png", (512, 512)), ("cut.png", (512, 470)), ("tiny.png", (9, 90))]
    text = outlook_tables(outlook_for(pictures, underfill="drop", micro_batch=2, world=4))
    assert "0 steps per epoch, each of up to 4 samples in 2 micro-batches of 2; underfill drop" in text
    assert "2 of 4 ranks idle: a step has 2 micro-batches; use smaller micro-batches" in text
    assert "dropped in epoch 0 (2): cut.png, left.png" in text
    assert "cannot be used, expected at least 64 pixels on the short side (1): tiny.png (9x90)" in text


def test_outlook_tells_of_cuts_enlargements_and_repeats():
    rules = Rules(resolution=512, kind="single", upscale="allow")
    text = outlook_tables(outlook_for([("wide.png", (512, 128))], rules=rules, underfill="repeat"))
    assert "cropped by 10 % or more (1): wide.png (75 %)" in text
    assert "enlarged (1): wide.png (x4.00)" in text
    assert "repeated in epoch 0 (3): wide.png, wide.png, wide.png" in text


def test_outlook_tells_of_merges_and_of_buckets_that_stay_small():
    rules = Rules(resolution=512, min_bucket=2)
    merged = outlook_tables(outlook_for([("a", (512, 512)), ("b", (512, 512)), ("c", (640, 512))], rules=rules))
    assert "merged: 576x448 into 512x512 (1 picture, cropped by 20.0 % instead of 2.8 %)" in merged
    alone = outlook_tables(outlook_for([("big", (512, 512)), ("thumb", (64, 64))], rules=rules))
    assert "in a bucket below min_bucket (2): big, thumb" in alone


def test_long_lists_are_cut_short():
    outlook = outlook_for([(f"{number:02}", (512, 512)) for number in range(63)], batch_size=64, underfill="drop")
    text = outlook_tables(outlook, width=200)
    assert "dropped in epoch 0 (63)" in text
    assert "29 and 33 more" in text
    assert "60, 61, 62" not in outlook_tables(outlook) and "60, 61, 62" in outlook_tables(outlook, every=True)


def test_findings():
    findings = [Finding(path="a.png", code="truncated", severity="error", detail="ends early"),
                Finding(path="b.png", code="has-alpha", severity="info", detail="x")]
    text = findings_table(findings, pictures=3, usable=2, every=False, width=200)
    assert "error  truncated  a.png  ends early" in text
    assert text.endswith("2 of 3 pictures are usable; 1 error, 0 warnings, 1 info")
    none = findings_table([], pictures=3, usable=3, every=False)
    assert none == "3 of 3 pictures are usable; 0 errors, 0 warnings, 0 info"
    assert findings_table([], pictures=1, usable=1, every=False).startswith("1 of 1 picture is usable;")


def test_many_findings_are_a_screen_unless_all_are_asked_for():
    findings = [Finding(path=f"somewhere/deep/down/below/{number:03}.png", code=code, severity=severity, detail="x")
                for number in range(300) for code, severity in (("truncated", "error"), ("has-alpha", "warning"))]
    text = findings_table(findings, pictures=300, usable=0, every=False, width=200)
    lines = text.splitlines()
    assert len(lines) < 24, "a screen"
    assert sum("truncated  somewhere" in line for line in lines) == 10 and "and 290 more errors" in lines
    (alpha,) = [line for line in lines if "has-alpha" in line]
    assert re.search(r"300  ….*below/000.png  transparency, flattened", alpha)
    assert lines[-2] == "0 of 300 pictures are usable; 300 errors, 300 warnings, 0 info"
    assert lines[-1] == (
        "list every finding with --all or --select CODE; full report with --html FILE.html, or --json")
    every = findings_table(findings, pictures=300, usable=0, every=True, width=200)
    assert len(every.splitlines()) > 600 and "--select" not in every and "example" in every


def test_inspect(small):
    text = inspect_tables(audit.describe_manifest(small))
    assert "hub" not in text
    assert "some/model" in text
    assert "latent  latent  bfloat16  c h w          [4, 8, 8] [4, 8, 12]     3       2" in text
    assert "64x64       2           0      0" in text
    assert "1 sample; on average 50.0% of the picture trains" in text
    assert "ends <early>" in text


def test_inspect_of_many_findings_counts_them(small):
    document = audit.describe_manifest(small)
    (one, *_) = document["findings"]
    document["findings"] = [{**one, "path": f"{number}.png"} for number in range(21)]
    *_, sums, _, end = inspect_tables(document, width=200).splitlines()
    assert sums.split()[:4] == [one["severity"], one["code"], "21", "0.png"]
    assert end == "list every finding with --all or --json, or one sample's with --sample NAME"
    for width in (None, 200):
        assert "20.png" not in inspect_tables(document, width=width)
        assert "20.png" in inspect_tables(document, width=width, every=True)


def test_one_sample(small):
    text = sample_text(audit.describe_samples(small, "a.png"))
    assert "scaled to 64x72, cropped at (0, 4)" in text
    assert "50.0%" in text
    assert "<script>alert('caption')</script> & \\x1b[31mred" in text
    assert "\x1b" not in text
    assert "no mask" in sample_text(audit.describe_samples(small, "c.png"))


def test_verify(small):
    assert verify_tables(verify(small)).endswith("all verified")
    assert verify_tables(verify(small, quick=True)).endswith("sizes, documents and indexes verified")
    (path,) = (small.cache.root / "shards").glob("*/*/mask/c*")
    path.chmod(0o600)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    text = verify_tables(verify(small))
    assert "a.png" in text
    assert text.endswith("to repair, run prep encode again: 1 mask row will be re-encoded")


@pytest.mark.parametrize(("text", "shown"), [
    ("plain ünï 图.png", "plain ünï 图.png"), ("\x1b[2J", "\\x1b[2J"), ("a\nb", "a\\nb"),
    ("\u202egnp.exe", "\\u202egnp.exe"), ("\udcff", "\\udcff"), ("[bold]x[/bold]", "[bold]x[/bold]"),
])
def test_nothing_steers_the_terminal(text, shown):
    assert printable(text) == shown
    findings = [Finding(path=text, code="c", severity="info", detail="")]
    assert shown in findings_table(findings, pictures=1, usable=1, every=False)


@pytest.mark.parametrize("name", ["my cat.png", "it's.png", "a$b.png", "a\nb.png", "source[1]/plain.png"])
def test_a_name_is_spelled_the_same_everywhere_and_for_a_shell(name):
    found = Finding(path=name, code="truncated", severity="error", detail="")
    said = rejected_line(found).removeprefix("rejected: ").partition(": truncated")[0]
    for width in (None, 120):
        assert said in findings_table([found], pictures=1, usable=0, every=False, width=width)
        assert said in page(*finding_parts([found.as_json()], width=width), width=width)
    assert said in findings_table([found] * 30, pictures=1, usable=0, every=False, width=120).split("example")[1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_folds_the_explanation_and_never_the_path(width):
    path, detail = "folder/" * 9 + "name.png", "is damaged, expected something else " * 5
    findings = [Finding(path=path, code="truncated", severity="error", detail=detail)]
    lines = findings_table(findings, pictures=1, usable=1, every=False, width=width).splitlines()[:-1]
    (whole,) = [line for line in lines if path in line]
    assert len(lines) > 2 and " ".join(" ".join(lines[1:]).replace(path, "").split()).endswith(detail.strip())
    assert all(len(line) <= width for line in lines if line != whole)


def test_a_pipe_gets_a_line_for_each_finding():
    findings = [Finding(path=f"{'d' * 90}/{number}.png", code="truncated", severity="error", detail="ends " * 60)
                for number in range(300)]
    lines = findings_table(findings, pictures=300, usable=0, every=False).splitlines()
    assert [line.split("\t") for line in lines[:300]] == [["error", "truncated", one.path, one.detail]
                                                          for one in findings]
    assert len(lines) == 301


def test_names_in_a_line():
    assert join_names(["a", "b\nerror: c", "d"], 2) == "a, $'b\\nerror: c' and 1 more"
    assert join_texts(["a (x1.00)", "b\nerror: c", "d"], None) == "a (x1.00), b\\nerror: c, d"
    assert join_names(["a"], 2) == "a"


@pytest.mark.parametrize(("count", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"),
                                             (3 << 30, "3.0 GiB")])
def test_bytes(count, text):
    assert format_bytes(count) == text
