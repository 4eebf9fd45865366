"""Whatever a table or a tar makes of the worker that reads it, the command gets findings, and believes no lies."""

from __future__ import annotations

import json
import threading

import pytest
from tarred import tar_of

from prep.findings import Finding
from prep.fs.blob import blob_at
from prep.sources import readers
from prep.sources.item import Item
from prep.sources.table_files import TablePart
from prep.sources.tar_members import TarPart
from prep.sources.walk import walk_source
from prep.workers.pool import WorkerLost, WorkerPool


class Answers:
    """In place of a pool: answers, or is lost."""

    def __init__(self, *parts, lost: WorkerLost | None = None) -> None:
        self.parts, self.lost, self.asked, self.closed = list(parts), lost, 0, threading.Event()

    def ask(self, _task, _question, _limits):
        self.asked += 1
        if self.lost is not None:
            raise self.lost
        return self.parts


LOST = [
    (WorkerLost("slow", "more than 60 seconds"), "reading it took more than 60 seconds"),
    (WorkerLost("memory", "more than 1.0 GiB of memory"), "reading it took more than 1.0 GiB of memory"),
    (WorkerLost("crash", "by SIGSEGV"), "its reader ended by SIGSEGV"),
    (WorkerLost("closed", "the command ended before"), "the command ended before it was read"),
]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(b"a picture, as far as names go")
    (tmp_path / "in/metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a cat"}))
    (tmp_path / "a.tar").write_bytes(tar_of(["0.png", "0.txt"]))
    return tmp_path


def found(path, workers):
    both = list(walk_source(path, source=0, masks="none", workers=workers))
    return ([one for one in both if isinstance(one, Item)],
            [(one.path, one.code, one.detail) for one in both if isinstance(one, Finding)])


@pytest.mark.parametrize(("lost", "detail"), LOST, ids=[lost.cause for lost, _ in LOST])
def test_a_reader_that_is_lost_is_a_finding(source, monkeypatch, lost, detail):
    monkeypatch.setattr("prep.fs.memo.REST_NS", 0)
    workers = Answers(lost=lost)
    items, said = found(source / "in", workers)
    assert len(items) == 1 and said == [("metadata.jsonl", "bad-table", detail)]
    for _ in range(2):  # the load may have been to blame: it is not remembered
        assert found(source / "a.tar", workers) == ([], [("a.tar", "bad-archive", detail)])
    assert workers.asked == 3


BEYOND, OUTSIDE = "a member lies outside the tar", "a member would be unpacked outside its directory"


@pytest.mark.parametrize(("part", "says"), [
    *((TarPart([(b"0.png", *place)], []), BEYOND)
      for place in ((512, 1 << 40), (-512, 5), (512, -5), (1 << 62, 1 << 62))),
    *((TarPart([(name, 512, 5)], []), OUTSIDE) for name in (b"../0.png", b"/etc/passwd", b"a/../../b.png")),
    (TarPart([], [(b"0.png", "no-code", "x")]), "a finding has the unknown code 'no-code'"),
])  # fmt: skip
def test_a_reader_that_lies_of_a_tar_is_not_believed(source, part, says):
    items, ((_, code, detail),) = found(source / "a.tar", Answers(TarPart([(b"1.png", 512, 5)], []), part))
    assert items == [] and (code, detail) == ("bad-archive", f"its reader ended with an invalid answer: {says}")


@pytest.mark.parametrize("ending", [("no-code", "x"), ("blank", "x")])
def test_a_reader_that_lies_of_a_table_is_not_believed(source, ending):
    items, ((_, code, detail),) = found(source / "in", Answers(TablePart([], 0, ending)))
    assert len(items) == 1 and code == "bad-table"
    assert detail == "its reader ended with an invalid answer: a finding's code is not one of a table"


def test_a_small_table_that_takes_much_memory(source, monkeypatch):
    """A worker's memory is bounded by the size of the file: lists take twenty times as many bytes as their JSON."""
    monkeypatch.setattr(readers, "TABLE_MEMORY", 1 << 28)
    monkeypatch.setattr(readers, "PARSED", 0)
    (source / "in/metadata.jsonl").write_text("[" + "[]," * 8_000_000 + "7]")
    with readers.readers() as workers:
        items, said = found(source / "in", workers)
        assert said == [("metadata.jsonl", "bad-table", "reading it took more than 256.0 MiB of memory")]
        assert len(items) == 1
        (source / "in/metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a cat"}))
        assert found(source / "in", workers)[0][0].captions == ("a cat",)


def test_one_worker_reads_all(source):
    with readers.readers() as workers:
        assert workers.started == 0
        assert found(source / "in", workers)[1] == [] and len(found(source / "a.tar", workers)[0]) == 1
        assert workers.started == 1


def test_large_files_get_more_of_everything(source, monkeypatch):
    asked = []
    monkeypatch.setattr(WorkerPool, "ask", lambda _self, task, _path, limits: asked.append((task.name, limits)) or [])
    for size in (0, 1 << 32):
        for path in (source / "in/metadata.jsonl", source / "a.tar"):
            with path.open("r+b") as stream:
                stream.truncate(size)
    with readers.readers() as workers:
        readers.read_table(workers, blob_at(source / "in/metadata.jsonl"))
        readers.read_tar(workers, blob_at(source / "a.tar"))
        readers.read_table(workers, blob_at(source / "gone.csv"))
    (_, table), (_, tar), (_, gone) = asked
    assert (table.seconds, tar.seconds, gone.seconds) == (60 + (1 << 14), 60 + (1 << 10), 60)
    assert table.memory == readers.TABLE_MEMORY + 16 * (1 << 32) and tar.memory == readers.TAR_MEMORY
