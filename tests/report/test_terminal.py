"""Reports for the terminal: what must be in them, and that names cannot steer the terminal."""

from __future__ import annotations

import re

import pytest

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.preview import TrainSample, preview_epoch
from prep.findings import Finding
from prep.formatting import format_bytes, join_names, printable
from prep.maintenance.verify import verify
from prep.manifest import describe as audit
from prep.report.terminal.buckets import outlook_tables
from prep.report.terminal.manifest import inspect_tables, sample_text, verify_tables
from prep.report.terminal.scan import findings_table


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")


def outlook_for(pictures, *, rules=None, **overrides):
    placed = assign_buckets(pictures, rules or Rules(resolution=512))
    showings = [TrainSample(id=f"{one.index:04}", name=one.name, bucket=one.placement.bucket, repeats=1)
                for one in placed.pictures]
    return preview_epoch(placed, showings, **{"batch_size": 4, **overrides})


def test_outlook_names_everybody_concerned():
    pictures = [("left.png", (512, 512)), ("cut.png", (512, 470)), ("tiny.png", (9, 90))]
    text = outlook_tables(outlook_for(pictures, underfill="drop", micro_batch=2, world=4))
    assert "0 steps an epoch, each of up to 4 samples in 2 micro-batches of 2; underfill drop" in text
    assert "2 of 4 ranks have nothing to do: a step has 2 micro-batches; make micro-batches smaller" in text
    assert "left out in epoch 0 (2): cut.png, left.png" in text
    assert "cannot be used, expected at least 64 pixels on the short side (1): tiny.png (9x90)" in text


def test_outlook_tells_of_cuts_enlargements_and_repeats():
    rules = Rules(resolution=512, kind="single", upscale="allow")
    text = outlook_tables(outlook_for([("wide.png", (512, 128))], rules=rules, underfill="repeat"))
    assert "cut by 10 % or more (1): wide.png (75 %)" in text
    assert "enlarged (1): wide.png (x4.00)" in text
    assert "shown again in epoch 0 (3): wide.png, wide.png, wide.png" in text


def test_outlook_tells_of_merges_and_of_buckets_that_stay_small():
    rules = Rules(resolution=512, min_bucket=2)
    merged = outlook_tables(outlook_for([("a", (512, 512)), ("b", (512, 512)), ("c", (640, 512))], rules=rules))
    assert "merged: 576x448 into 512x512 (1 pictures, cut by 20.0 % instead of 2.8 %)" in merged
    alone = outlook_tables(outlook_for([("big", (512, 512)), ("thumb", (64, 64))], rules=rules))
    assert "in a bucket below min_bucket (2): big, thumb" in alone


def test_long_lists_are_cut_short():
    text = outlook_tables(outlook_for([(f"{number:02}", (512, 512)) for number in range(63)], batch_size=64,
                                      underfill="drop"))
    assert "left out in epoch 0 (63)" in text
    assert "29 and 33 more" in text


def test_findings():
    findings = [Finding(path="a.png", code="truncated", severity="error", detail="ends early"),
                Finding(path="b.png", code="has-alpha", severity="info", detail="x")]
    text = findings_table(findings, pictures=3, usable=2, every=False)
    assert "error  truncated  a.png  ends early" in text
    assert text.endswith("2 of 3 pictures are usable; 1 error, 0 warning, 1 info")
    none = findings_table([], pictures=3, usable=3, every=False)
    assert none == "3 of 3 pictures are usable; 0 error, 0 warning, 0 info"


def test_many_findings_are_a_screen_unless_all_are_asked_for():
    findings = [Finding(path=f"somewhere/deep/down/below/{number:03}.png", code=code, severity=severity, detail="x")
                for number in range(300) for code, severity in (("truncated", "error"), ("has-alpha", "warning"))]
    text = findings_table(findings, pictures=300, usable=0, every=False)
    lines = text.splitlines()
    assert len(lines) < 24, "a screen"
    assert sum("truncated  somewhere" in line for line in lines) == 10 and "and 290 more of severity error" in lines
    (alpha,) = [line for line in lines if "has-alpha" in line]
    assert re.search(r"300  ….*below/000.png  transparency, flattened", alpha)
    assert lines[-2] == "0 of 300 pictures are usable; 300 error, 300 warning, 0 info"
    assert lines[-1] == "by name: --all, or --select CODE; --html FILE.html, or --json"
    every = findings_table(findings, pictures=300, usable=0, every=True)
    assert len(every.splitlines()) > 600 and "by name" not in every and "such as" in every


def test_inspect(small):
    text = inspect_tables(audit.describe_manifest(small))
    assert "hub" not in text
    assert "some/model" in text
    assert "latent  latent  bfloat16  c h w          [4, 8, 8] [4, 8, 12]     3       2" in text
    assert "64x64       2           0      0" in text
    assert "1 samples, training 50.0% of the picture on average" in text
    assert "ends <early>" in text


def test_inspect_of_many_findings_counts_them(small):
    document = audit.describe_manifest(small)
    (one, *_) = document["findings"]
    document["findings"] = [{**one, "path": f"{number}.png"} for number in range(21)]
    *_, sums, _, end = inspect_tables(document).splitlines()
    assert sums.split()[:4] == [one["severity"], one["code"], "21", "0.png"]
    assert end == "by name: --json, or --sample NAME" and "20.png" not in inspect_tables(document)


def test_one_sample(small):
    text = sample_text(audit.describe_samples(small, "a.png"))
    assert "scaled to 64x72, cut at (0, 4)" in text
    assert "50.0%" in text
    assert "<script>alert('caption')</script> & \\x1b[31mred" in text
    assert "\x1b" not in text
    assert "no mask" in sample_text(audit.describe_samples(small, "c.png"))


def test_verify(small):
    assert verify_tables(verify(small)).endswith("every byte as it should be")
    assert verify_tables(verify(small, quick=True)).endswith("sizes, documents and indexes as they should be")
    (path,) = (small.cache.root / "shards").glob("*/*/mask/c*")
    path.chmod(0o600)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    text = verify_tables(verify(small))
    assert "a.png" in text
    assert text.endswith("prep encode, run again, repairs this: 1 mask rows to be made")


@pytest.mark.parametrize(("text", "shown"), [
    ("plain ünï 图.png", "plain ünï 图.png"), ("\x1b[2J", "\\x1b[2J"), ("a\nb", "a\\nb"),
    ("\u202egnp.exe", "\\u202egnp.exe"), ("\udcff", "\\udcff"), ("[bold]x[/bold]", "[bold]x[/bold]"),
])
def test_nothing_steers_the_terminal(text, shown):
    assert printable(text) == shown
    findings = [Finding(path=text, code="c", severity="info", detail="")]
    assert shown in findings_table(findings, pictures=1, usable=1, every=False)


def test_a_narrow_terminal_folds_and_loses_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "n" * 100
    findings = [Finding(path=name, code="c", severity="info", detail="")]
    text = findings_table(findings, pictures=1, usable=1, every=False)
    assert text.count("n") >= 100
    assert max(map(len, text.splitlines()[:-1])) <= 40


def test_names_in_a_line():
    assert join_names(["a", "b\nerror: c", "d"], 2) == "a, b\\nerror: c and 1 more"
    assert join_names(["a"], 2) == "a"


@pytest.mark.parametrize(("count", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"),
                                             (3 << 30, "3.0 GiB")])
def test_bytes(count, text):
    assert format_bytes(count) == text
