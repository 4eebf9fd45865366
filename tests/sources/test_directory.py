"""Names to items: pairing, leftovers, links, odd names. The files here hold no pictures; nothing is opened."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from walking import walk

from prep.errors import PathError
from prep.findings import Finding
from prep.fs.blob import Blob, error_code, read_blob
from prep.sources.item import Item

posix = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes and raw names are POSIX's")


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def run(root, mask_from="none"):
    found = list(walk(root, source=0, mask_from=mask_from))
    items = {one.name: one for one in found if isinstance(one, Item)}
    return items, {(one.path, one.code) for one in found if isinstance(one, Finding)}


def test_recursive_and_in_the_order_of_names(tmp_path):
    make(tmp_path, "b.jpg", "a.PNG", "sub/c.webp", "sub/deep/d.tiff", "a_sub/e.Avif")
    items, findings = run(tmp_path)
    assert list(items) == ["a.PNG", "b.jpg", "a_sub/e.Avif", "sub/c.webp", "sub/deep/d.tiff"]
    assert findings == set()
    assert items["sub/c.webp"].picture == Blob(file=str(tmp_path / "sub" / "c.webp"))


def test_captions(tmp_path):
    make(tmp_path, "a.jpg", "a.txt", "b.jpg", "b.caption", "C.JPG", "C.TXT", "v1.2.png", "v1.2.txt", "d.jpg", "e.jpg",
         "e.txt", "e.caption")  # fmt: skip
    items, findings = run(tmp_path)
    names = {name: item.caption and item.caption.path.name for name, item in items.items()}
    assert names == {"a.jpg": "a.txt", "b.jpg": "b.caption", "C.JPG": "C.TXT", "v1.2.png": "v1.2.txt", "d.jpg": None,
                     "e.jpg": "e.txt"}  # fmt: skip
    assert findings == {("e.caption", "second-caption")}
    assert items["v1.2.png"].caption == Blob(file=str(tmp_path / "v1.2.txt"))
    assert [items[name].caption_at for name in ("a.jpg", "C.JPG", "v1.2.png")] == [".txt", ".TXT", ".txt"]  # no records


def test_json_beside_a_caption(tmp_path):
    make(tmp_path, "a.jpg", "a.txt", "a.json", "b.jpg", "b.json", "c.jpg", "c.png", "c.caption", "c.JSON", "d.jpg",
         "d.txt", "d.jpg.json", "e.json")  # fmt: skip
    items, findings = run(tmp_path)
    names = {name: item.metadata and item.metadata.name for name, item in items.items()}
    assert names == {"a.jpg": "a.json", "b.jpg": None, "c.jpg": "c.JSON", "c.png": None, "d.jpg": None}
    assert items["b.jpg"].caption_format == "json" and items["a.jpg"].caption_format == "text"
    assert {code for _, code in findings} == {"stem-collision"}


def test_what_belongs_to_nothing(tmp_path):
    make(tmp_path, "a.jpg", "lost.txt", "README.txt", "prompts.txt", "x.psd", "x.txt", "notes.md", "Thumbs.db",
         "y-masklabel.png", "s.svg")  # fmt: skip
    _, findings = run(tmp_path, "sidecar")
    assert findings == {("lost.txt", "orphan-caption"), ("x.psd", "unsupported-format"),
                        ("s.svg", "unsupported-format"), ("y-masklabel.png", "orphan-mask")}


def test_one_stem_twice(tmp_path):
    make(tmp_path, "a.jpg", "a.png", "a.txt")
    items, findings = run(tmp_path)
    assert len(items) == 2
    assert findings == {("a.jpg", "stem-collision"), ("a.png", "stem-collision")}
    details = [one.detail for one in walk(tmp_path, source=0, mask_from="none") if isinstance(one, Finding)]
    assert details == ["shares its caption and mask with a.png", "shares its caption and mask with a.jpg"]


def test_masks_beside_the_pictures(tmp_path):
    make(tmp_path, "a.jpg", "a-masklabel.png", "b.jpg", "b-condlabel.png")
    items, findings = run(tmp_path, "sidecar")
    assert set(items) == {"a.jpg", "b.jpg"}
    assert items["a.jpg"].mask == Blob(file=str(tmp_path / "a-masklabel.png"))
    assert items["b.jpg"].mask is None
    assert findings == set()


@pytest.mark.parametrize("mask_from", ["none", "alpha"])
def test_masks_nobody_asked_for(tmp_path, mask_from):
    make(tmp_path, "a.jpg", "a-masklabel.png")
    items, findings = run(tmp_path, mask_from)
    assert items["a.jpg"].mask is None
    assert findings == ({(".", "masks-unused")} if mask_from == "none" else set())


def test_masks_in_a_directory_of_their_own(tmp_path):
    make(tmp_path / "in", "a.jpg", "sub/b.jpg", "sub/c.jpg", "d.jpg")
    make(tmp_path / "masks", "a.png", "a-masklabel.png", "sub/b-masklabel.png", "c.webp", "sub/lost.png")
    items, findings = run(tmp_path / "in", tmp_path / "masks")
    names = {name: item.mask and item.mask.path.name for name, item in items.items()}
    assert names == {"a.jpg": "a-masklabel.png", "d.jpg": None, "sub/b.jpg": "b-masklabel.png", "sub/c.jpg": "c.webp"}
    assert findings == {("masks/sub/lost.png", "orphan-mask"), ("masks/a.png", "second-mask")}


def test_a_second_mask_beside_its_picture(tmp_path):
    make(tmp_path, "a.jpg", "a-masklabel.jpg", "a-masklabel.png")
    items, findings = run(tmp_path, "sidecar")
    assert items["a.jpg"].mask.name == "a-masklabel.jpg" and findings == {("a-masklabel.png", "second-mask")}
    assert run(tmp_path, "none")[1] == {(".", "masks-unused")}


def test_findings_do_not_depend_on_how_the_masks_directory_was_typed(tmp_path, monkeypatch):
    make(tmp_path / "in", "a.jpg")
    make(tmp_path / "mks", "sub/lost.png")
    monkeypatch.chdir(tmp_path)
    for typed in (Path("mks"), tmp_path / "mks", Path("in/../mks"), Path("./mks")):
        assert run(tmp_path / "in", typed)[1] == {("mks/sub/lost.png", "orphan-mask")}


def test_a_mask_of_another_directory_is_not_taken(tmp_path):
    make(tmp_path / "in", "one/a.jpg", "two/a.jpg")
    make(tmp_path / "masks", "one/a.png")
    items, _ = run(tmp_path / "in", tmp_path / "masks")
    assert items["one/a.jpg"].mask is not None
    assert items["two/a.jpg"].mask is None


def test_hidden_and_system_files(tmp_path):
    make(tmp_path, "a.jpg", ".hidden.jpg", "._a.jpg", ".git/b.jpg", "__MACOSX/a.jpg", "@eaDir/a.jpg", ".DS_Store")
    items, findings = run(tmp_path)
    assert set(items) == {"a.jpg"}
    assert findings == {(".hidden.jpg", "hidden-file")}


def test_a_cache_is_never_read(tmp_path):
    make(tmp_path, "a.jpg", "cache/latentry.json", "cache/x.jpg")
    items, findings = run(tmp_path)
    assert set(items) == {"a.jpg"}
    assert findings == {("cache/", "cache-inside")}


@pytest.mark.parametrize(("name", "says"), [("gone", "does not exist"), ("a.jpg", "is not a directory")])
def test_root_must_be_a_directory(tmp_path, name, says):
    make(tmp_path, "a.jpg")
    with pytest.raises(PathError, match=says):
        list(walk(tmp_path / name, source=0, mask_from="none"))
    with pytest.raises(PathError, match=says):
        list(walk(tmp_path, source=0, mask_from=tmp_path / name))


def test_root_must_not_be_a_cache(tmp_path):
    make(tmp_path, "latentry.json", "shards/x")
    with pytest.raises(PathError, match="holds no pictures"):
        list(walk(tmp_path, source=0, mask_from="none"))


def test_a_directory_named_like_a_picture(tmp_path):
    make(tmp_path, "a.jpg/b.png")
    assert set(run(tmp_path)[0]) == {"a.jpg/b.png"}


@posix
def test_links(tmp_path):
    make(tmp_path / "in", "real.jpg", "sub/inner.jpg")
    make(tmp_path / "out", "far.jpg")
    source = tmp_path / "in"
    for name, target in {"good.jpg": "real.jpg", "loop_a.jpg": "loop_b.jpg", "loop_b.jpg": "loop_a.jpg",
                         "self.jpg": "self.jpg", "gone.jpg": "nothing.jpg", "far.jpg": "../out/far.jpg",
                         "sub/up": "..", "other": "../out", "again": "../out", "deep": "sub"}.items():
        (source / name).symlink_to(target)
    items, findings = run(source)
    assert set(items) == {"real.jpg", "good.jpg", "far.jpg", "sub/inner.jpg", "again/far.jpg"}
    assert findings == {("loop_a.jpg", "link-loop"), ("loop_b.jpg", "link-loop"), ("self.jpg", "link-loop"),
                        ("gone.jpg", "dangling-link"), ("far.jpg", "link-outside"), ("sub/up", "directory-loop"),
                        ("deep", "directory-loop")}


@posix
def test_pipes_and_raw_names(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"x")
    make(tmp_path, "line\nbreak.jpg", "back\\slash.jpg", "-rf.jpg")
    items, findings = run(tmp_path)
    assert set(items) == {"-rf.jpg", "back\\slash.jpg", "caf\\xe9.jpg", "line\nbreak.jpg"}
    assert findings == {("pipe.jpg", "special-file")}
    assert read_blob(items["caf\\xe9.jpg"].picture) == b"x"
    for name in items:
        name.encode("utf-8")


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root reads everything")
def test_a_directory_that_cannot_be_read(tmp_path):
    make(tmp_path, "a.jpg", "shut/b.jpg")
    (tmp_path / "shut").chmod(0)
    try:
        items, findings = run(tmp_path)
    finally:
        (tmp_path / "shut").chmod(0o755)
    assert set(items) == {"a.jpg"}
    assert findings == {("shut/", "unreadable-file")}


def test_blobs(tmp_path):
    path = tmp_path / "tar"
    path.write_bytes(bytes(range(100)))
    assert read_blob(Blob(file=str(path))) == bytes(range(100))
    assert read_blob(Blob(file=str(path), offset=10, length=5)) == bytes(range(10, 15))
    with pytest.raises(OSError, match="file ends after 2 of 5 bytes from 98"):
        read_blob(Blob(file=str(path), offset=98, length=5))


@posix
def test_what_is_no_file_is_not_read(tmp_path):
    """A table may name anything in the source as a mask: a pipe waits for ever, a device may never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="is a pipe or a device, expected a regular file") as caught:
            read_blob(Blob(file=str(tmp_path / name)))
        assert error_code(caught.value) == "special-file"
    with pytest.raises(OSError, match="is a directory, expected a regular file") as caught:
        read_blob(Blob(file=str(tmp_path)))
    assert error_code(caught.value) == "special-file"
