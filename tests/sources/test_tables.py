"""Tables of captions: Hugging Face's metadata, kohya's JSON, JSON lines; no row leads out of its source."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import draw
from walking import tables_of, walk

from prep.findings import Finding
from prep.fs.blob import blob_at
from prep.sources import table_files
from prep.sources.item import Item
from prep.sources.table_files import BadTable, rows_of

ROWS = [{"file_name": "a.png", "text": "a cat"}, {"file_name": "sub/b.png", "text": "a mat"}]


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    else:
        path.write_text(json.dumps(rows))


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "sub/b.png"):
        draw(tmp_path / "photos" / name, (64, 64), seed=1)
    return tmp_path / "photos"


def walked(root, mask_from="sidecar", table=None):
    found = list(walk(root, source=0, mask_from=mask_from, table=table))
    return ({one.name: one for one in found if isinstance(one, Item)},
            [(one.path, one.code) for one in found if isinstance(one, Finding)])


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_hugging_faces_metadata(folder, name):
    write(folder / name, ROWS)
    items, said = walked(folder)
    assert {name: item.captions for name, item in items.items()} == {"a.png": ("a cat",), "sub/b.png": ("a mat",)}
    assert said == []


def test_a_table_names_pictures_below_itself(folder):
    write(folder / "sub/metadata.jsonl", [{"file_name": "b.png", "caption": "a mat", "tags": ["red"]}])
    items, said = walked(folder)
    assert items["sub/b.png"].captions == ("a mat, red",) and items["a.png"].captions == () and said == []


def test_a_caption_file_goes_before_the_table(folder):
    write(folder / "metadata.jsonl", ROWS)
    (folder / "a.txt").write_text("a dog")
    items, said = walked(folder)
    assert items["a.png"].caption.name == "a.txt" and items["a.png"].captions == ()
    assert said == [("metadata.jsonl", "second-caption")]


def test_masks_of_a_table(folder):
    write(folder / "metadata.jsonl", [{**ROWS[0], "mask_file_name": "sub/b.png"}])
    assert walked(folder)[0]["a.png"].mask.file == str(folder / "sub/b.png")
    assert walked(folder, mask_from="none")[0]["a.png"].mask is None


def test_kohyas_json_by_path_and_by_stem(folder, tmp_path):
    table = tmp_path / "meta.json"
    table.write_text(json.dumps({"a": {"tags": "fur, red"}, str(folder / "sub/b.png"): {"caption": "a mat"},
                                 "c": {"caption": "lost"}}))
    items, said = walked(folder, table=table)
    assert {name: item.captions for name, item in items.items()} == {"a.png": ("fur, red",), "sub/b.png": ("a mat",)}
    assert said == [(".", "table-without-picture")]


def test_captions_by_name(folder, tmp_path):
    """diffusion-pipe's captions.json."""
    write(tmp_path / "captions.json", {"a.png": ["a cat", "red fur"], "sub/b.png": "a mat"})
    items, said = walked(folder, table=tmp_path / "captions.json")
    assert {name: item.captions for name, item in items.items()} == {"a.png": ("a cat", "red fur"),
                                                                     "sub/b.png": ("a mat",)}  # fmt: skip
    assert said == []
    write(tmp_path / "captions.json", {"a.png": ["a cat", 7]})
    assert walked(folder, table=tmp_path / "captions.json")[1] == [("captions.json", "bad-table")]


@pytest.mark.parametrize("row", [{"image_path": "a.png", "caption": "x"}, {"file": "a.png", "prompt": "x"},
                                 {"file_name": ".\\a.png", "captions": ["x"]}])
def test_other_names_of_the_columns(folder, tmp_path, row):
    write(tmp_path / "t.jsonl", [row])
    assert walked(folder, table=tmp_path / "t.jsonl")[0]["a.png"].captions == ("x",)


@pytest.mark.parametrize("name", ["../a.png", "sub/../../a.png", "/etc/passwd", "C:\\a.png", "..\\a.png", "a\0.png",
                                  "\\a.png", "\\\\server\\a.png", "\ud800.png"])
def test_rows_that_lead_out_of_the_source(folder, tmp_path, name):
    write(tmp_path / "t.json", [{"file_name": name, "text": "x"}, ROWS[0]])
    items, said = walked(folder, table=tmp_path / "t.json")
    assert said == [("t.json", "bad-table")] and items["a.png"].captions == ("a cat",)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [("t.json", b"7", "is JSON of int"), ("t.json", b"{", "the table is not JSON"),
     ("t.csv", b'"a', "line 1 is not CSV"), ("t.csv", b"\xff", "line 1 byte 0 is not UTF-8"),
     ("t.csv", b"file_name,text,text\n", "two columns 'text'"),
     ("t.parquet", b"PAR1", "is not a readable Parquet file"), ("t.xlsx", b"", "is '.xlsx', expected a table")],
)  # fmt: skip
def test_tables_that_cannot_be_read(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadTable, match=says.replace("[", r"\[").replace("(", r"\(")):
        list(rows_of(blob_at(tmp_path / name)))


NAMES = ["0.png", "1.png", "2.png", "3.png"]


def lines(*rows):
    return "".join(f"{row}\n" for row in rows)


def json_lines(second):
    """Four rows, the second of which is this line."""
    return lines(*(second if name == "1.png" else json.dumps({"file_name": name, "text": "x"}) for name in NAMES))


BAD_ROWS = {  # a table whose second row cannot be used; what is said; whether its picture is known
    "jsonl comma": ("metadata.jsonl", json_lines('{"file_name":"1.png","text":"x",}'), "line 2 is not JSON", False),
    "jsonl list": ("metadata.jsonl", json_lines("[1]"), "line 2 is list, expected a table", False),
    "jsonl bytes": ("metadata.jsonl", json_lines('{"file_name":"1.png","text":"\udcff"}'), "is not UTF-8", False),
    "jsonl twice": ("metadata.jsonl", json_lines('{"file_name":"1.png","text":"x","text":"y"}'),
                    "line 2: has 'text' twice, expected once", True),
    "csv comma": ("metadata.csv", lines("file_name,text", "0.png,x", "1.png,a dog, running", "2.png,x", "3.png,x"),
                  "line 3 has more values than there are columns", True),
    "csv bytes": ("metadata.csv", lines("file_name,text", "0.png,x", "1.png,\udcff", "2.png,x", "3.png,x"),
                  "line 3 byte 29 is not UTF-8", False),
    "csv quotation mark": ("metadata.csv", lines("file_name,text", "0.png,x", '1.png,"x"y', "2.png,x", "3.png,x"),
                           "line 3 is not CSV", False),
    "csv mark left open": ("metadata.csv", lines("file_name,text", "0.png,x", '1.png,"a dog', "2.png,x", "3.png,x"),
                           "line 3 is not CSV", False),
    "csv mark open up to another": ("metadata.csv", lines("file_name,text", "0.png,x", '1.png,"a dog', '2.png,"x"',
                                                          "3.png,x"), "line 3 is not CSV", False),
    "json row": ("t.json", '[{"file_name":"0.png","text":"x"}, 7, {"file_name":"2.png","text":"x"}, '
                 '{"file_name":"3.png","text":"x"}]', "row 2 is int, expected a table", False),
    "json entry": ("t.json", '{"0.png":"x","1.png":7,"2.png":"x","3.png":"x"}', "entry '1.png' is int", False),
    "json entry twice": ("t.json", '{"0.png":"x","1.png":{"caption":"x","caption":"y"},"2.png":"x","3.png":"x"}',
                         "entry '1.png': has 'caption' twice", True),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_one_finding_and_takes_no_other_with_it(tmp_path, case):
    name, text, says, known = BAD_ROWS[case]
    for number, picture in enumerate(NAMES):
        draw(tmp_path / "photos" / picture, (64, 64), seed=number)
    table = tmp_path / name if name == "t.json" else tmp_path / "photos" / name
    table.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = list(walk(tmp_path / "photos", source=0, mask_from="none", table=table if name == "t.json" else None))
    items = {one.name: one for one in found if isinstance(one, Item)}
    assert [bool(items[one].captions) for one in NAMES] == [True, False, True, True]
    (said,) = [one for one in found if isinstance(one, Finding)]
    assert (said.path, said.code, said.severity) == (name, "bad-table", "error") and says in said.detail
    where = "entry '1.png'" if "entry" in case else "line 3" if name.endswith("csv") else "line 2"
    told = f"{where} of {name} cannot be used" if known else f"no row in {name}"
    assert items["1.png"].uncaptioned == f"no caption file, and {told}"


REPEATED = {  # tables by name, the one that a recipe names first; where the second row of a.png is, and the first
    "jsonl": ({"photos/metadata.jsonl": lines('{"file":"a.png","text":"a"}', '{"file":"./a.png","text":"b"}')},
              "metadata.jsonl", "line 2", "line 1 of metadata.jsonl"),
    "csv": ({"photos/metadata.csv": lines("file_name,text", "a.png,a", "a.png,b")}, "metadata.csv", "line 3",
            "line 2 of metadata.csv"),
    "json by name": ({"t.json": '{"a.png": "a", "a.png": "b"}'}, "t.json", "entry 'a.png'", "entry 'a.png' of t.json"),
    "json by stem": ({"t.json": '{"a.png": "a", "a": "b"}'}, "t.json", "entry 'a'", "entry 'a.png' of t.json"),
    "json rows": ({"t.json": '[{"file":"a.png","text":"a"},{"file":"a.png","text":"a"}]'}, "t.json", "row 2",
                  "row 1 of t.json"),
    "two tables": ({"photos/metadata.csv": "file_name,text\na.png,a\n",
                    "photos/metadata.jsonl": '{"file_name":"a.png","text":"b"}'}, "metadata.jsonl", "line 1",
                   "line 2 of metadata.csv"),
    "the recipe's and another": ({"t.jsonl": '{"file_name":"a.png","text":"a"}',
                                  "photos/metadata.csv": "file_name,text\na.png,b\n"}, "metadata.csv", "line 2",
                                 "line 1 of t.jsonl"),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_second_row_of_a_picture_is_told_and_the_first_is_used(tmp_path, case):
    tables, table, where, first = REPEATED[case]
    draw(tmp_path / "photos" / "a.png", (64, 64), seed=1)
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    named = next((tmp_path / name for name in tables if name.startswith("t.")), None)
    item, said = walk(tmp_path / "photos", source=0, mask_from="none", table=named)
    assert item.captions == ("a",)
    assert (said.path, said.code, said.severity) == (table, "duplicate-row", "warning")
    assert said.detail.startswith(f"{where}: a.png has a row") and f"{first}, which is used" in said.detail


def test_parquet_with_a_second_row(folder):
    pq.write_table(pa.table({"file_name": ["a.png", "a.png"], "text": ["a", "b"]}), folder / "metadata.parquet")
    items, said = walked(folder)
    assert items["a.png"].captions == ("a",) and said == [("metadata.parquet", "duplicate-row")]
    two = pa.table([["a.png"], ["a"], ["b"]], names=["file_name", "text", "text"])
    pq.write_table(two, folder / "metadata.parquet")
    assert walked(folder)[1] == [("metadata.parquet", "bad-table")]


def test_many_marks_left_open_end_the_table(tmp_path, monkeypatch):
    """Each would read all lines below it again."""
    monkeypatch.setattr(table_files, "MOST_AGAIN", 1000)
    (tmp_path / "t.csv").write_text("file_name,text\n" + '1.png,"x"y\n' * 900)
    (part,) = table_files.read_parts(blob_at(tmp_path / "t.csv"))
    assert part.ending is None and len(part.rows) + part.more_faults == 900
    (tmp_path / "t.csv").write_text("file_name,text\n" + '"1.png\n' * 900)
    (part,) = table_files.read_parts(blob_at(tmp_path / "t.csv"))
    assert part.ending is not None and "the lines below it are not read" in part.ending[1]


def test_a_row_without_a_caption_is_named(folder):
    (folder / "metadata.csv").write_text("file_name,text\na.png\nsub/b.png,b\n")
    items, said = walked(folder)
    assert said == [] and items["a.png"].uncaptioned == "no caption file, and no caption in line 2 of metadata.csv"


def test_rows_that_cannot_be_used_do_not_stop_the_others(folder, tmp_path):
    write(tmp_path / "t.jsonl", [{"text": "no name"}, {"file_name": "x.png", "text": 7}] + [{}] * 40 + ROWS)
    tables = tables_of(folder)
    tables.add(blob_at(tmp_path / "t.jsonl"), "", "t.jsonl")
    assert len(tables.findings) == 21 and "22 more rows" in tables.findings[-1].detail
    assert "line 1: has no file_name" in tables.findings[0].detail
    assert tables.find("a.png").captions == ("a cat",)
    tables.add(blob_at(tmp_path / "gone.jsonl"), "", "gone.jsonl")
    assert tables.findings[-1].code == "unreadable-file"


@pytest.mark.parametrize("mask", ["\ud800.png", "a/\udcff/b.png"])
def test_no_mask_is_called_half_a_character(folder, mask):
    """JSON can spell it, `open` cannot: a worker would end with a bug."""
    (folder / "metadata.jsonl").write_text(json.dumps({**ROWS[0], "mask_file_name": mask}))
    items, said = walked(folder)
    assert items["a.png"].mask is None and said == [("metadata.jsonl", "bad-table")]


@pytest.mark.parametrize("mask", ["\\masks\\a.png", "//masks/a.png", "/masks/a.png"])
def test_a_path_from_windows_is_no_path_from_the_root(folder, mask):
    """Its first backslash made an absolute path of it, after it was looked at."""
    write(folder / "metadata.jsonl", [{**ROWS[0], "mask_file_name": mask}])
    items, said = walked(folder)
    assert items["a.png"].mask is None and said == [("metadata.jsonl", "bad-table")]


def test_long_names_of_pictures_that_are_not_there_are_cut(folder):
    write(folder / "metadata.jsonl", [{"file_name": f"{number}{'x' * 100_000}.png", "text": "x"} for number in "ab"])
    (said,) = [one for one in walk(folder, source=0, mask_from="none") if isinstance(one, Finding)]
    assert said.code == "table-without-picture" and len(said.detail) < 600


@pytest.mark.parametrize("odd", [
    pa.array([1 << 30], pa.date32()), pa.array([1 << 62], pa.duration("s")), pa.array([0], pa.timestamp("ns", "a/b")),
    pa.array([b"\xff"]), pa.array([{"bytes": b"x"}]), pa.array([[["x"]]]), pa.array([7]), pa.array([[7]])])
def test_columns_that_are_no_text(folder, odd):
    """Python has no such dates, and looks for time zones on the disk."""
    pq.write_table(pa.table({"file_name": ["a.png"], "caption": odd}), folder / "metadata.parquet")
    items, said = walked(folder)
    assert items["a.png"].captions == () and said == [("metadata.parquet", "bad-table")]
    with pytest.raises(BadTable, match=r"column 'caption' is .*, expected text or lists of text"):
        list(rows_of(blob_at(folder / "metadata.parquet")))
    pq.write_table(pa.table({"file_name": ["a.png"], "image": odd, "text": ["x"]}), folder / "metadata.parquet")
    items, said = walked(folder)
    assert items["a.png"].captions == ("x",) and said == [], "a column of pictures has nothing to say"


@pytest.mark.parametrize("text", [
    pa.array(["x", None, "y", None]), pa.array([["x", "z"], None, [], ["y"]]), pa.array([None] * 4),
    pa.array(["x", "y", "x", None]).dictionary_encode(), pa.array(["x", "y", "", "x"], pa.large_string()),
    pa.array([["x"], ["y"], None, ["z", None]], pa.large_list(pa.string()))])
def test_text_however_it_is_stored(tmp_path, text):
    pq.write_table(pa.table({"file_name": ["a", "b", "c", "d"], "captions": text}), tmp_path / "t.parquet")
    assert [row["captions"] for _, row in rows_of(blob_at(tmp_path / "t.parquet"))] == text.to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("lists", [False, True])
def test_a_small_file_of_many_long_texts(folder, lists):
    """Nothing of it is spelled out: 20,000 times one text of a hundred thousand characters, in a few kilobytes."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int8()), pa.array(["x" * 100_000]))
    if lists:
        text = pa.ListArray.from_arrays(pa.array(range(0, 20_001, 20), pa.int32()), text)
    pq.write_table(pa.table({"file_name": ["a.png"] * len(text), "captions": text}), folder / "metadata.parquet")
    assert (folder / "metadata.parquet").stat().st_size < 20_000
    (said,) = [one for one in walk(folder, source=0, mask_from="none")
               if isinstance(one, Finding) and one.code != "duplicate-row"]
    assert said.detail == "has more than 10000000 rows or 268435456 bytes of text"


def test_a_small_file_of_many_rows(folder, monkeypatch):
    monkeypatch.setattr(table_files, "MOST_ROWS", 5000)
    for rows, detail in ((5000, None), (5001, "has more than 5000 rows or 268435456 bytes of text")):
        pq.write_table(pa.table({"file_name": ["a.png"] * rows, "text": ["x"] * rows}), folder / "metadata.parquet")
        said = [one.detail for one in walk(folder, source=0, mask_from="none") if isinstance(one, Finding)]
        assert [one for one in said if "row before" not in one and "more rows of pictures" not in one] == (
            [] if detail is None else [detail])


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "t.json"])
def test_other_tables_have_as_many_rows_at_most(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(table_files, "MOST_ROWS", 2)
    path = (folder if name.startswith("metadata") else tmp_path) / name
    for rows, details in ((ROWS, []), ([*ROWS, ROWS[0]], ["has more than 2 rows"])):
        write(path, rows)
        found = list(walk(folder, source=0, mask_from="none", table=None if path.parent == folder else path))
        told = [one.detail for one in found if isinstance(one, Finding) and one.code == "bad-table"]
        assert told == details
        assert [one.captions for one in found if isinstance(one, Item)] == [("a cat",), ("a mat",)]


def test_texts_that_a_file_declares_are_counted_before_they_are_read(folder, monkeypatch):
    """Four columns of 300 MB in a few kilobytes: all of them would be in memory at once."""
    text = pa.array(["a" * (75 << 20)])
    pq.write_table(pa.table({"file_name": ["a.png"], **dict.fromkeys(("text", "caption", "tags", "prompt"), text)}),
                   folder / "metadata.parquet", compression="zstd", use_dictionary=False, write_statistics=False)
    assert (folder / "metadata.parquet").stat().st_size < 100_000
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", lambda *_, **__: pytest.fail("they were read"))
    (said,) = [one for one in walk(folder, source=0, mask_from="none") if isinstance(one, Finding)]
    assert (said.code, said.detail) == ("bad-table", "has more than 10000000 rows or 268435456 bytes of text")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_lines_end_with_cr_and_lf_alone(folder, separator, ending):
    """`json.dumps` with ensure_ascii=False, and others' tools, write all the rest into a string as it is."""
    texts = [json.dumps({"file_name": row["file_name"], "text": f"a{separator}b"}, ensure_ascii=False) for row in ROWS]
    (folder / "metadata.jsonl").write_bytes((ending.join(texts) + ending).encode())
    items, said = walked(folder)
    assert said == [] and [item.captions for item in items.values()] == [("a b",), ("a b",)]
    (folder / "metadata.jsonl").write_bytes((ending.join([texts[0], "", "{"]) + ending).encode())
    assert walked(folder)[1] == [("metadata.jsonl", "bad-table")]
    found = [one.detail for one in walk(folder, source=0, mask_from="none") if isinstance(one, Finding)]
    assert found[0].startswith("line 3 is not JSON")


def test_cells_of_csv_have_line_breaks_of_any_kind(folder):
    for text in ("a\u2028b", "a\nb", "a\r\nb"):
        write(folder / "metadata.csv", [{**row, "text": text} for row in ROWS])
        items, said = walked(folder)
        assert said == [] and [item.captions for item in items.values()] == [("a b",), ("a b",)], repr(text)


def test_a_recipe_names_a_table(folder, prep, tmp_path):
    write(tmp_path / "t.jsonl", ROWS)
    (tmp_path / "r.toml").write_text("[[source]]\npath = 'photos'\ntable = 't.jsonl'\n")
    result = prep("scan", tmp_path / "r.toml", "--json")
    codes = {one["code"] for one in json.loads(result.out)["findings"]}
    assert "missing-caption" not in codes and result.code == 0


@given(st.sampled_from([".json", ".jsonl", ".csv", ".parquet"]), st.binary(max_size=200) | st.text().map(str.encode))
def test_any_bytes_are_rows_or_a_finding(tmp_path_factory, suffix, data):
    folder = tmp_path_factory.mktemp("table")
    (folder / f"t{suffix}").write_bytes(data)
    tables = tables_of(folder)
    tables.add(blob_at(folder / f"t{suffix}"), "", "t")
    assert all(one.code == "bad-table" for one in tables.findings)
