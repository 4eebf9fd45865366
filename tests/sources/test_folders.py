"""What a source in a store lists is what the same files list on a disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import ObjectEntry
from prep.sources import folders
from prep.sources.tree import Directory

URL = "s3://bucket/photos"
FOLDERS = st.lists(st.sampled_from(["a", "b", "c d", "ü"]), max_size=4).map("/".join)
FILES = st.sampled_from(["1.png", "1.txt", "1-masklabel.png", "0.jpg", "z.webp", ".hidden", "metadata.jsonl", "x.psd"])
NAMES = st.sets(st.tuples(FOLDERS, FILES).map(lambda both: "/".join(filter(None, both))), min_size=1, max_size=12)


def on_a_disk(names: Iterable[str]) -> list[Directory]:
    with TemporaryDirectory() as there:
        for name in names:
            path = Path(there, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
        return list(folders.folders_of(Path(there)))


def in_a_store(names: Iterable[str]) -> list[Directory]:
    listed = {name: ObjectEntry(size=1, written=0.0, version="1") for name in sorted(names)}
    with mock.patch.object(folders, "list_objects", return_value=listed):
        return list(folders.folders_of(Bucket.parse(URL)))


def told(found: Iterable[Directory]) -> list[object]:
    """All that a directory says but where it lies; what holds nothing has no object."""
    return [(one.prefix, *astuple(one)[4:]) for one in found]


@pytest.mark.parametrize("names", [
    ["a/b/1.png", "a/c/2.png"],  # a directory of directories only: the first of them was lost
    ["a/b/c/1.png"],
    ["a/b/1.png", "a/c.png"],
])
def test_no_directory_is_lost(names: list[str]) -> None:
    found = [one.prefix + name for one in in_a_store(names) for name in one.pictures]
    assert sorted(found) == names


@given(NAMES)
def test_a_prefix_is_listed_like_a_directory(names: set[str]) -> None:
    assert told(in_a_store(names)) == told(on_a_disk(names))
