"""The door: plain files are read, and nothing else is opened, waited for or followed."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from pictures import draw
from walking import item_of

from prep.cache.store import check_can_create, open_cache
from prep.errors import CacheError
from prep.fs import untrusted as door
from prep.fs.blob import Blob, TooLarge, open_descriptor, read_blob
from prep.fs.tree import tree
from prep.scan.examine import check_item

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


def test_a_plain_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1000)
    assert door.read_regular(path, 3000) == b"abc" * 1000 and door.size_regular(path) == 3000
    path.write_bytes(b"")
    assert door.read_regular(path, 0) == b""
    with pytest.raises(FileNotFoundError):
        door.read_regular(tmp_path / "nothing", 1)


def test_a_file_larger_than_it_can_be(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with pytest.raises(door.NotRegularFile, match=r"^file has 1099511627776 bytes, expected at most 10$"):
        door.read_regular(path, 10)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secret")
    for opening in (door.open_regular, door.size_regular, lambda path: door.read_regular(path, 10)):
        with pytest.raises(door.NotRegularFile, match=r"^link is a link, expected a plain file: a cache must not"):
            opening(link)
    (tmp_path / "there").symlink_to(tmp_path)
    for listing in (door.check_dir, door.entries, lambda path: list(tree(path))):
        with pytest.raises(door.NotRegularFile, match=r"^there is a link, expected a directory"):
            listing(tmp_path / "there")


@needs_pipes
def test_nothing_is_waited_for(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(door.NotRegularFile, match="pipe is a pipe, expected a plain file"):
        door.open_regular(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # names of sockets are short
        server.bind("socket")
        with pytest.raises(door.NotRegularFile, match="socket is a socket, expected a plain file"):
            door.open_regular(tmp_path / "socket")
    with pytest.raises(door.NotRegularFile, match="is a device, expected a plain file"):
        door.open_regular(door.Path(os.devnull))
    with pytest.raises(door.NotRegularFile, match="is a directory, expected a plain file"):
        door.open_regular(tmp_path)


@needs_pipes
def test_what_takes_a_files_place_after_we_looked_is_seen(tmp_path, monkeypatch):
    """The look says "a plain file", and then there is a pipe or a link."""
    pipe, plain, link = tmp_path / "pipe", tmp_path / "plain", tmp_path / "link"
    os.mkfifo(pipe)
    plain.touch()
    link.symlink_to(plain)
    status = plain.lstat()
    monkeypatch.setattr(door.Path, "lstat", lambda _: status)
    with pytest.raises(door.NotRegularFile, match="is a pipe"):
        door.open_regular(pipe)
    with pytest.raises(OSError):
        door.open_regular(link)


def test_the_files_of_a_tree(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").touch()
    assert sorted(tree(tmp_path)) == [("a/b", 3), ("c", 0)]
    assert [entry.name for entry in door.entries(tmp_path)] == ["a", "c"]
    assert door.entries(tmp_path / "nothing") == []
    (tmp_path / "a" / "d").mkdir()
    with pytest.raises(door.NotRegularFile, match="d is a directory nested deeper than any in a shard"):
        list(tree(tmp_path))
    (tmp_path / "a" / "d").rmdir()
    (tmp_path / "a" / "e").symlink_to(tmp_path / "c")
    with pytest.raises(door.NotRegularFile, match="e is a link"):
        list(tree(tmp_path))


def test_a_directory_of_very_many_files_is_no_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("prep.fs.tree.MOST_FILES", 3)
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(door.NotRegularFile, match="has more than 3 files, expected a shard"):
        list(tree(tmp_path))


def test_without_the_flags_looking_is_all_there_is(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(door, "PLAIN", os.O_RDONLY)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert door.read_regular(tmp_path / "file", 1) == b"x"
    with pytest.raises(door.NotRegularFile, match="is a link"):
        door.open_regular(tmp_path / "link")


def test_a_junction_is_a_link():
    class Status:
        st_mode = 0o40755  # a directory, says Windows
        st_reparse_tag = 0xA0000003

    assert door.is_link(Status())
    Status.st_reparse_tag = 0x9000001A  # a file kept in the cloud
    assert not door.is_link(Status())


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


@pytest.mark.parametrize("name", ["shards", "tables", "commits", "plans", "damaged", "tmp", "lock", "facts", "x"])
def test_a_cache_with_a_link_in_it_is_not_opened(cache, outside, name):
    if (cache.root / name).exists():
        (cache.root / name).rmdir()
    (cache.root / name).symlink_to(outside)
    for opening in (lambda: open_cache(cache.root, create=False), lambda: check_can_create(cache.root)):
        with pytest.raises(CacheError, match=f": {name} is a link, expected a plain file: a cache must not") as caught:
            opening()
        assert "a link to the whole cache" in caught.value.hint


def test_a_link_to_the_whole_cache_is_fine(cache, outside):
    (outside / "link").symlink_to(cache.root)
    assert open_cache(outside / "link", create=False).root == outside / "link"


@pytest.mark.parametrize("place", ["shards", "shards/ab", "shards/ab/" + "ab" * 32, "commits/ab", "tables", "damaged"])
def test_no_path_of_a_cache_leads_through_a_link(cache, outside, place):
    link = cache.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    named = {"shards": cache.shard, "commits": cache.commit, "tables": cache.table, "damaged": cache.damaged}
    with pytest.raises(CacheError, match=f"{place}: .* is a link, expected a directory"):
        named[place.partition("/")[0]]("ab" * 32)


@pytest.mark.parametrize("place", ["commits", "commits/ab"])
def test_what_lies_behind_a_link_is_not_listed(cache, outside, place):
    target = outside / "ab" if place == "commits" else outside
    target.mkdir(exist_ok=True)
    (target / ("ab" * 32 + ".json")).touch()
    (cache.root / place).parent.mkdir(exist_ok=True)
    (cache.root / place).symlink_to(outside)
    if place == "commits":
        with pytest.raises(OSError, match="is a link"):
            list(cache.names("commits"))
    else:
        assert list(cache.names("commits")) == []


def test_what_goes_while_it_is_looked_at_is_nothing_strange(tmp_path, monkeypatch):
    """The journal of another encoder's table of facts is there for a moment."""
    (tmp_path / "facts.sqlite").write_bytes(b"")
    (tmp_path / "facts.sqlite-journal").write_bytes(b"")
    listed = list(os.scandir(tmp_path))
    (tmp_path / "facts.sqlite-journal").unlink()
    monkeypatch.setattr("prep.fs.untrusted.os.scandir", lambda _: contextlib.nullcontext(listed))
    door.check_cache_root(tmp_path)


# ---- files that have nothing to give now -----------------------------------------------------------------------------


@pytest.fixture
def nothing_now():
    """A descriptor that has nothing to give now and is not at its end, as files of /proc, /sys and FUSE may be."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading
    os.close(writing)
    with contextlib.suppress(OSError):
        os.close(reading)


@needs_pipes
def test_a_stream_does_not_take_nothing_now_for_the_end(nothing_now):
    with door.stream_of(nothing_now) as stream:
        for read in (lambda: stream.read(10), stream.read, stream.readline):
            with pytest.raises(BlockingIOError, match="no data available now"):
                read()


@needs_pipes
def test_bytes_are_not_read_from_what_has_nothing_now(nothing_now):
    with pytest.raises(BlockingIOError, match="available now, expected a file that can be read without waiting"):
        door.read_bytes(nothing_now, 100, 0, "file")


@needs_pipes
@pytest.mark.parametrize("kind", ["picture", "caption", "mask", "metadata"])
def test_a_file_that_has_nothing_now_is_a_finding(tmp_path, monkeypatch, nothing_now, kind):
    def opened(path):
        return nothing_now if Path(path).name == kind else open_descriptor(path)

    blobs = {name: Blob(file=str(draw(tmp_path / f"{name}.png", (64, 64), seed=1)))
             for name in ("picture", "caption", "mask", "metadata")} | {kind: Blob(file=str(tmp_path / kind))}
    blobs["caption"].path.write_text("a cat")
    monkeypatch.setattr("prep.fs.blob.open_descriptor", opened)
    found = check_item(item_of("a.png", **blobs)).findings
    assert "it has no data available now" in " ".join(one.detail for one in found)


@pytest.mark.parametrize("system", ["with O_NONBLOCK", "without"])
def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch, system):
    if system == "without":
        monkeypatch.setattr("prep.fs.blob._FLAGS", os.O_RDONLY)
    (tmp_path / "a").write_bytes(b"x" * 100)
    monkeypatch.setattr("prep.fs.blob.MOST_BYTES", 150)
    assert read_blob(Blob(file=str(tmp_path / "a"))) == b"x" * 100
    assert read_blob(Blob(file=str(tmp_path / "a"), offset=90, length=5)) == b"x" * 5
    monkeypatch.setattr(os, "fstat", lambda _: Sized(0))
    assert read_blob(Blob(file=str(tmp_path / "a"))) == b"x" * 100, "a size of 0 is none, in /proc"
    (tmp_path / "a").write_bytes(b"x" * 200)
    with pytest.raises(TooLarge, match="it has more than 150 bytes"):
        read_blob(Blob(file=str(tmp_path / "a")))


class Sized:
    """What `fstat` says of a plain file of this size."""

    st_mode = 0o100644

    def __init__(self, size: int) -> None:
        self.st_size = size
