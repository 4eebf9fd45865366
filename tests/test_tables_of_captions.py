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

from prep.records import Finding, Item
from prep.sources.directory import walk
from prep.sources.tables import BadTable, Tables, rows_of

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
    assert items["a.png"].caption.name == "a.txt" and items["a.png"].captions == () and said == []


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


@pytest.mark.parametrize("row", [{"image_path": "a.png", "caption": "x"}, {"file": "a.png", "prompt": "x"},
                                 {"file_name": ".\\a.png", "captions": ["x"]}])
def test_other_names_of_the_columns(folder, tmp_path, row):
    write(tmp_path / "t.jsonl", [row])
    assert walked(folder, table=tmp_path / "t.jsonl")[0]["a.png"].captions == ("x",)


@pytest.mark.parametrize("name", ["../a.png", "sub/../../a.png", "/etc/passwd", "C:\\a.png", "..\\a.png", "a\0.png"])
def test_rows_that_lead_out_of_the_source(folder, tmp_path, name):
    write(tmp_path / "t.json", [{"file_name": name, "text": "x"}, ROWS[0]])
    items, said = walked(folder, table=tmp_path / "t.json")
    assert said == [("t.json", "bad-table")] and items["a.png"].captions == ("a cat",)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [("t.jsonl", b"{}\n{", "line 2 is not JSON"), ("t.jsonl", b"[1]", "line 1 is list"),
     ("t.json", b"7", "is JSON of int"), ("t.json", b'{"a": 7}', "entry 'a' is int"),
     ("t.json", b"[7]", "row 1 is int"),
     ("t.csv", b"file_name,text\na.png,x,y\n", "line 2 has more values"),
     ("t.csv", b'file_name\n"a', "is not CSV"), ("t.csv", b"\xff", "byte 0 is not UTF-8"),
     ("t.parquet", b"PAR1", "is no Parquet file"), ("t.xlsx", b"", "is '.xlsx', expected a table")],
)  # fmt: skip
def test_tables_that_cannot_be_read(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadTable, match=says.replace("[", r"\[").replace("(", r"\(")):
        list(rows_of(tmp_path / name))


def test_rows_that_cannot_be_used_do_not_stop_the_others(folder, tmp_path):
    write(tmp_path / "t.jsonl", [{"text": "no name"}, {"file_name": "x.png", "text": 7}] + [{}] * 40 + ROWS)
    tables = Tables(root=folder)
    tables.add(tmp_path / "t.jsonl", "", "t.jsonl")
    assert len(tables.findings) == 21 and "22 more of its rows" in tables.findings[-1].detail
    assert "line 1: has no file_name" in tables.findings[0].detail
    assert tables.find("a.png").captions == ("a cat",)
    tables.add(tmp_path / "gone.jsonl", "", "gone.jsonl")
    assert tables.findings[-1].code == "unreadable-file"


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
    tables = Tables(root=folder)
    tables.add(folder / f"t{suffix}", "", "t")
    assert all(one.code == "bad-table" for one in tables.findings)
