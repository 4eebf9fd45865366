"""`prep scan`: which findings are told and how bad they are, tokens of captions, the page, what is remembered."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from contextlib import closing
from html.parser import HTMLParser

import pytest
from pictures import draw, saved
from PIL import Image

from prep.fs import memo
from prep.scan import memo as remembered
from prep.scan.memo import usual_path

MODEL_FREE = ("--jobs", 1)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "in"
    draw(root / "a.png", (96, 80), seed=1).with_suffix(".txt").write_text("words")
    draw(root / "copy of a.png", (96, 80), seed=1)
    (root / "broken.png").write_bytes(b"")
    (root / "broken.txt").write_text("words")
    return root


def codes(result):
    return {(one["path"], one["code"], one["severity"]) for one in result.json["findings"]}


ALL = {("broken.png", "empty-file", "error"), ("copy of a.png", "exact-duplicate", "warning"),
       ("copy of a.png", "missing-caption", "warning")}


@pytest.mark.parametrize(("options", "wanted", "code"), [
    ((), ALL, 1),
    (("--select", "exact-duplicate"), {("copy of a.png", "exact-duplicate", "warning")}, 0),
    (("--select", "exact-duplicate", "--strict"), {("copy of a.png", "exact-duplicate", "warning")}, 1),
    (("--select", "empty-file", "--select", "missing-caption", "--ignore", "empty-file"),
     {("copy of a.png", "missing-caption", "warning")}, 0),
    (("--ignore", "empty-file", "--ignore", "exact-duplicate", "--ignore", "missing-caption", "--strict"), set(), 0),
])
def test_options(prep, source, options, wanted, code):
    result = prep("scan", source, "--json", *MODEL_FREE, *options)
    assert (codes(result), result.code) == (wanted, code)
    assert (result.json["pictures"], result.json["samples"]) == (3, 2)  # what is not told is wrong all the same


def test_json_names_the_other_picture_of_a_duplicate(prep, source):
    findings = {one["code"]: one for one in prep("scan", source, "--json", *MODEL_FREE).json["findings"]}
    assert findings["exact-duplicate"] == {
        "path": "copy of a.png", "code": "exact-duplicate", "severity": "warning", "detail": "same bytes as a.png",
        "other": "a.png", "likeness": 1.0}
    assert set(findings["empty-file"]) == {"path", "code", "severity", "detail"}


RECIPE = """
[scan]
ignore = ["missing-caption"]
severity = {exact-duplicate = "error", empty-file = "info"}
[mask]
from = "sidecar"
[[source]]
path = "in"
"""


def test_recipes(prep, source, tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    result = prep("scan", tmp_path / "r.toml", "--json", *MODEL_FREE)
    assert codes(result) == {("broken.png", "empty-file", "info"), ("copy of a.png", "exact-duplicate", "error")}
    assert result.code == 1 and result.json["samples"] == 2
    result = prep("scan", tmp_path / "r.toml", "--json", *MODEL_FREE, "--select", "missing-caption")
    assert codes(result) == {("copy of a.png", "missing-caption", "warning")} and result.code == 0


def test_masks_named_by_the_command_stand_above_the_recipe(prep, source, tmp_path):
    (tmp_path / "r.toml").write_text("[[source]]\npath = 'in'\n")
    (tmp_path / "mks").mkdir()
    Image.new("L", (64, 64)).save(tmp_path / "mks" / "lost.png")
    scan = ("scan", tmp_path / "r.toml", "--json", "--select", "orphan-mask")
    assert codes(prep(*scan)) == set()
    assert codes(prep(*scan, "--mask", tmp_path / "mks")) == {("mks/lost.png", "orphan-mask", "warning")}
    wrong = prep(*scan, "--mask", tmp_path / "gone")
    assert wrong.code == 3 and "alpha or an existing directory (prep mask makes one)" in wrong.err


@pytest.mark.parametrize(("policy", "severity", "end"), [
    ("stop", "warning", "no caption file"), ("reject", "warning", "no caption file; the picture is skipped"),
    ("empty", "info", "; an empty one is used"), ("filename", "info", "; its name is used"),
    ("constant", "info", "; 'a cat' is used")])
def test_a_missing_caption_is_told_with_what_becomes_of_it(prep, source, tmp_path, policy, severity, end):
    own = f"caption = {{missing = '{policy}', constant = 'a cat'}}"
    (tmp_path / "other").mkdir()
    (tmp_path / "r.toml").write_text(f"[[source]]\npath = 'other'\n[[source]]\npath = 'in'\n{own}\n")
    result = prep("scan", tmp_path / "r.toml", "--json", "--select", "missing-caption")
    (one,) = result.json["findings"]
    assert (one["path"], one["severity"]) == ("in/copy of a.png", severity)
    assert one["detail"].startswith("no caption") and one["detail"].endswith(end)
    whole = 1 + (policy != "reject")  # of three pictures, one of which is broken
    assert (result.json["pictures"], result.json["samples"]) == (3, whole)


@pytest.mark.parametrize(("text", "said"), [
    ('ignore = ["near-duplicat"]',
     "scan.ignore[0] has 'near-duplicat', expected a finding's code; did you mean 'near-duplicate'?"),
    ('severity = {blnak = "error"}', "scan.severity has 'blnak', expected a finding's code; did you mean 'blank'?"),
    ('severity = {blank = "bad"}', "scan.severity.blank is 'bad', expected one of: error, warning, info"),
    ('ignored = []', "unknown key 'ignored' in [scan]; did you mean 'ignore'?"),
    ('ignore = "blank"', "scan.ignore is 'blank', expected a list"),
])
def test_recipes_that_are_wrong(prep, source, tmp_path, text, said):
    (tmp_path / "r.toml").write_text(f'[scan]\n{text}\n[[source]]\npath = "in"\n')
    result = prep("scan", tmp_path / "r.toml")
    assert result.code == 3 and said in result.err


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_codes_that_are_none(prep, source, option):
    result = prep("scan", source, option, "near-dup")
    assert result.code == 2 and result.out == ""
    assert f"{option} has 'near-dup', expected a finding's code; did you mean 'near-duplicate'?" in result.err


def test_the_sums_are_one_screen(prep, source, monkeypatch):
    for number in range(20):
        (source / f"{number}.png").write_bytes(b"")
    monkeypatch.setattr("prep.cli.scan.screen_width", lambda: 120)
    out = prep("scan", source, *MODEL_FREE).out
    assert re.search(r"^error +empty-file +21  0.png +the file has 0 bytes$", out, re.MULTILINE)
    assert "2 of 23 pictures are usable; 21 errors, 2 warnings, 0 info\nlist every finding with --all or" in out
    assert out.count("  file has 0 bytes") == 10 and "and 11 more errors" in out
    for option in ("--all", "--select=empty-file"):
        every = prep("scan", source, *MODEL_FREE, option).out
        assert every.count("  file has 0 bytes") == 21 and "--select" not in every


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_in_every_variant(prep, source, tiny_model, tmp_path):
    (source / "a.txt").write_text("word " * 75 + "\nfew words")
    (source / "b.txt").write_text("word " * 76)
    draw(source / "b.png", (96, 80), seed=3)
    found = prep("scan", source, "--json", *MODEL_FREE, "--model", tiny_model, "--select", "caption-over-limit").json
    (told,) = found["findings"] if len(found["findings"]) == 1 else (found["findings"][-1],)
    assert told["path"] == "b.png" and told["severity"] == "warning"
    tokens = int(re.fullmatch(r"CLIP reads 75 of (\d+) tokens, and not '.*word'", told["detail"])[1])
    assert tokens > 75
    (tmp_path / "r.toml").write_text('[caption]\nmissing = "empty"\nprefix = "' + "word " * 77 + '"\n[[source]]\n'
                                     'path = "in"\n')
    found = prep("scan", tmp_path / "r.toml", "--json", *MODEL_FREE, "--model", tiny_model,
                 "--select", "caption-over-limit").json["findings"]
    assert {one["path"] for one in found} >= {"a.png", "b.png"}


def without(path, name):
    """Takes a name out of a JSON file."""
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))


def test_models_that_are_none(prep, source, tmp_path, tiny_model):
    result = prep("scan", source, "--model", "nobody/nothing")
    assert result.code == 6 and "hint: name a directory; this command downloads nothing" in result.err
    import shutil

    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer" / "vocab.json").write_text("[")
    result = prep("scan", source, "--model", tmp_path / "model")
    assert result.code == 6 and f"cannot load the tokenizer in {tmp_path}/model/tokenizer: " in result.err
    without(tmp_path / "model" / "model_index.json", "tokenizer")
    result = prep("scan", source, "--model", tmp_path / "model")
    assert result.code == 6 and f"tokenizer in {tmp_path}/model/model_index.json is None, expected" in result.err
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(tiny_model, tmp_path / "model")
    without(tmp_path / "model" / "tokenizer" / "tokenizer_config.json", "model_max_length")
    result = prep("scan", source, "--model", tmp_path / "model")
    assert result.code == 6
    assert "tokens, its text encoder only 77" in result.err and "hint: set model_max_length in" in result.err


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would do: tags, what they would load, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_has_everything_and_needs_nothing(prep, source, tmp_path):
    name = "<script>alert(1)</script>&\u202e.png".replace("/", "_")
    (source / name).write_bytes(saved(Image.new("RGB", (80, 80), "navy")))
    result = prep("scan", source, "--write-report", tmp_path / "r.html", *MODEL_FREE)
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert result.code == 1 and "script" not in page.tags
    assert page.loaded and all(one.startswith(("data:image/jpeg;base64,", "#")) for one in page.loaded)
    assert "3 of 4 pictures can be used" in page.text and "the files with the 1 error below" in page.text
    for code in ("empty-file", "exact-duplicate", "missing-caption", "blank"):
        assert code in page.text
    assert "<script>alert(1)<_script>&\\u202e.png" in page.text
    pictures = [one for one in page.loaded if not one.startswith("#")]
    assert len(pictures) == 4, "the copy beside its original, and two with findings of their own"
    again = prep("scan", source, "--write-report", tmp_path / "r.html", *MODEL_FREE)
    assert again.code == 1 and (tmp_path / "r.html").read_text() == text


def test_the_page_replaces_no_other_file_and_lies_apart(prep, source, tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine")
    result = prep("scan", source, "--write-report", tmp_path / "mine.html")
    assert result.code == 5 and "exists and is no page, so it is not replaced" in result.err
    assert (tmp_path / "mine.html").read_text() == "<p>mine"
    result = prep("scan", source, "--write-report", source / "r.html")
    assert result.code == 5 and "lies inside pictures" in result.err and not (source / "r.html").exists()


@pytest.mark.parametrize(("alpha", "severity", "says", "samples"), [
    ("black", "warning", "25% of its pixels are transparent or translucent", 2),
    ("keep", "info", "25% of its pixels are transparent or translucent; that is kept", 2),
    ("reject", "warning", "25% of its pixels are transparent or translucent; such pictures are skipped", 1),
])
def test_transparency_is_told_as_the_recipe_has_it(prep, tmp_path, alpha, severity, says, samples):
    draw(tmp_path / "in/0.png", (96, 80), seed=1).with_suffix(".txt").write_text("words")
    clear = draw(tmp_path / "in/1.png", (96, 80), seed=2)
    clear.with_suffix(".txt").write_text("words")
    with Image.open(clear) as picture:
        picture.putalpha(Image.new("L", (96, 80), 255))
        picture.paste((0, 0, 0, 0), (0, 0, 48, 40))
        picture.save(clear)
    (tmp_path / "d.toml").write_text(f"[model]\nfamily = 'qwenimage21'\n[image]\nresolution = 64\nstep = 32\n"
                                     f"alpha = '{alpha}'\n[[source]]\npath = 'in'\n")
    result = prep("scan", tmp_path / "d.toml", "--json", *MODEL_FREE)
    assert [(one["severity"], one["detail"]) for one in result.json["findings"] if one["code"] == "has-alpha"] == [
        (severity, says)]
    assert result.json["samples"] == samples


# ---- what is remembered ----------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """How many workers each scan started."""
    from prep.workers.pool import WorkerPool

    counts = []
    real = WorkerPool.close
    monkeypatch.setattr(WorkerPool, "close", lambda self: (counts.append(self.started), real(self))[1])
    return lambda: max([counts.pop() for _ in range(len(counts))], default=0)


def test_a_second_scan_opens_nothing_and_says_the_same(prep, source, started, monkeypatch):
    draw(source / "near a.png", (96, 80), seed=1).write_bytes(
        saved(Image.open(source / "a.png").resize((72, 60))))
    first = prep("scan", source, "--json", *MODEL_FREE)
    assert started() == 1 and "near-duplicate" in first.out
    monkeypatch.setattr("prep.scan.compare.near_duplicates", None)
    again = prep("scan", source, "--json", *MODEL_FREE)
    assert (again.code, again.out) == (first.code, first.out) and started() == 0


def test_sources_of_one_name_in_two_places_are_remembered_apart(prep, tmp_path, monkeypatch):
    for number, place in enumerate(("here", "there")):
        for seed in range(2):
            draw(tmp_path / place / "photos" / f"{seed}.png", (96, 80), seed=2 * number + seed)
    for again in (False, True):
        if again:
            monkeypatch.setattr("prep.scan.compare.near_duplicates", None)
        for place in ("here", "there"):
            monkeypatch.chdir(tmp_path / place)
            assert prep("scan", "photos", "--json", *MODEL_FREE).json["pictures"] == 2


def test_what_changed_is_read_and_compared_with_what_did_not(prep, source, started):
    prep("scan", source, *MODEL_FREE)
    (source / "near a.png").write_bytes(saved(Image.open(source / "a.png").resize((72, 60))))
    found = codes(prep("scan", source, "--json", *MODEL_FREE))
    assert ("near a.png", "near-duplicate", "warning") in found
    (source / "a.txt").write_text("")
    found = codes(prep("scan", source, "--json", *MODEL_FREE))
    assert ("a.png", "empty-caption", "warning") in found
    (source / "a.json").write_text("{}")
    assert codes(prep("scan", source, "--json", *MODEL_FREE)) == found
    (source / "a.json").write_text("{")
    found.add(("a.json", "bad-json", "warning"))
    assert codes(prep("scan", source, "--json", *MODEL_FREE)) == found
    started()
    assert codes(prep("scan", source, "--json", "--rehash", *MODEL_FREE)) == found and started() == 1


def test_other_checks_other_names_and_files_at_work(prep, source, started, monkeypatch, tmp_path):
    prep("scan", source, *MODEL_FREE)
    started()
    monkeypatch.setattr(remembered, "VERSION", 99)
    prep("scan", source, *MODEL_FREE)
    assert started() == 1
    source.rename(tmp_path / "elsewhere")
    prep("scan", tmp_path / "elsewhere", *MODEL_FREE)
    assert started() == 1
    monkeypatch.setattr(memo, "REST_NS", 1 << 62)
    draw(tmp_path / "elsewhere" / "new.png", (96, 80), seed=9)
    for _ in range(2):
        prep("scan", tmp_path / "elsewhere", *MODEL_FREE)
        assert started() == 1


@pytest.mark.parametrize("damage", [
    "bytes", "values", *(pytest.param(damage, marks=pytest.mark.slow)
                         for damage in ("empty", "schema", "directory", "thumbs"))])
def test_a_damaged_table_costs_a_scan_and_nothing_else(prep, source, damage):
    first = prep("scan", source, "--json", *MODEL_FREE)
    table = usual_path()
    if damage == "bytes":
        table.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    elif damage == "empty":
        table.write_bytes(b"")
    elif damage == "directory":
        table.unlink()
        table.mkdir()
    else:
        change = {"values": "UPDATE memory SET value = x'00112233445566'", "schema": "DROP TABLE memory",
                  "thumbs": "DELETE FROM memory WHERE length(value) > 1000 OR value LIKE '%[]'"}[damage]
        connection = sqlite3.connect(table)
        connection.execute(change)
        connection.commit()
        connection.close()
    for _ in range(2):
        assert prep("scan", source, "--json", *MODEL_FREE).out == first.out


def test_what_nobody_asks_for_is_forgotten(prep, source, tmp_path, monkeypatch):
    prep("scan", source, *MODEL_FREE)
    draw(tmp_path / "other" / "b.png", (96, 80), seed=5)
    now = time.time()
    monkeypatch.setattr(memo.time, "time", lambda: now + (memo.DAYS + 1) * 86400.0)
    before = rows()
    prep("scan", tmp_path / "other", *MODEL_FREE)
    assert 0 < rows() < before


def rows():
    with closing(sqlite3.connect(usual_path())) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM memory")
    return count


def test_a_user_without_a_home_scans_all_the_same(prep, source, monkeypatch):
    monkeypatch.setattr(memo, "user_cache", lambda: None)
    assert usual_path() is None and codes(prep("scan", source, "--json", *MODEL_FREE)) == ALL


def test_nothing_is_written_beside_the_pictures(prep, source):
    before = sorted(source.rglob("*"))
    prep("scan", source, *MODEL_FREE)
    assert sorted(source.rglob("*")) == before
