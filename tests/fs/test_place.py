"""Places: a word is parsed once, and what it names behaves as `Path` does, in a store or not."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from prep.errors import PathError, UsageError
from prep.fs.place import (
    OUTPUT,
    Local,
    is_directory,
    is_file,
    is_here,
    is_link,
    local_of,
    mark_of,
    may_name,
    movable_name,
    place_below,
    place_of,
    real_name,
    relative_name,
    require_local,
    require_stored,
    shortest_name,
)
from prep.fs.remote.bucket import Bucket

AT = Bucket(scheme="s3", bucket="bucket", key="a/b/manifest.json")


@pytest.mark.parametrize("word", ["s3://bucket/a/b/manifest.json", Path("s3://bucket/a/b/manifest.json"), AT,
                                  "s3://bucket/a/x/../b/manifest.json", "s3://bucket//a/b/manifest.json/"])
def test_a_word_for_a_place_in_a_store(word):
    assert place_of(word) == AT and str(place_of(word)) == "s3://bucket/a/b/manifest.json"


@pytest.mark.parametrize("word", ["photos", "./photos", "/tmp/photos", "C:/photos", "s3", "s3a://bucket/a", "file:/x"])
def test_other_words_are_paths(word):
    assert place_of(word) == Path(word)
    assert place_below(Path("/recipes"), "photos") == Path("/recipes/photos")
    assert place_below(Path("/recipes"), "s3://bucket/a/b/manifest.json") == AT


@pytest.mark.parametrize("word", ["s3://", "s3://bucket/../other", "s3://user@bucket/a", "s3://bucket/a?versionId=1"])
def test_odd_urls_are_refused(word):
    with pytest.raises(PathError):
        place_of(word)


@pytest.mark.parametrize("make", [lambda names: Path("/bucket", *names),
                                  lambda names: Bucket("s3", "bucket", "/".join(names))])
def test_both_kinds_have_the_names_of_a_path(make):
    place, above = make(("a", "b", "x.tar.gz")), make(("a", "b"))
    assert (place.name, place.stem, place.suffix, place.parent) == ("x.tar.gz", "x.tar", ".gz", above)
    assert above / "x.tar.gz" == place
    assert place.with_name("y") == above / "y" and place.parents[1] == make(("a",))
    assert place.is_relative_to(above) and not above.is_relative_to(place)
    assert place.relative_to(make(("a",))) in (Path("b/x.tar.gz"), PurePosixPath("b/x.tar.gz"))
    assert place.parts[-3:] == ("a", "b", "x.tar.gz") and len({place, make(("a", "b", "x.tar.gz"))}) == 1
    with pytest.raises(ValueError, match="a/b"):
        above.relative_to(place)


def test_a_path_in_a_document_leads_on_in_its_store():
    assert place_below(AT.parent, "../cache") == Bucket("s3", "bucket", "a/cache")
    assert place_below(AT.parent, "s3://other/x") == Bucket("s3", "other", "x")
    assert AT.parent.follow("s3://bucket/x") is None, "it is no relative path"
    with pytest.raises(PathError, match=r"\.\./\.\./\.\./x leads out of the bucket of s3://bucket/a/b$"):
        place_below(AT.parent, "../../../x")


def test_documents_name_places(tmp_path, monkeypatch):
    """Relative to themselves, in a store to the working directory; what is in a store by its URL, or if it shall move
    with the document relative, too."""
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "m.json"
    assert relative_name(tmp_path / "x" / "c", here) == movable_name(tmp_path / "x" / "c", here) == "x/c"
    assert relative_name(tmp_path / "x", AT) == "x" and relative_name(tmp_path / "a:b", here) == "./a:b"
    assert relative_name(tmp_path / "a\\b", here) is None
    assert relative_name(AT, here) == movable_name(AT, here) == relative_name(AT, AT) == str(AT)
    assert movable_name(AT.parent.parent / "cache", AT) == "../cache"


def test_a_place_as_a_person_types_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shortest_name(tmp_path / "photos") == "photos" and shortest_name(Path("/x")) == "/x"
    assert shortest_name(AT) == real_name(AT) == str(AT)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    assert real_name(Path("link")) == os.path.realpath(tmp_path / "photos")
    assert is_link(Path("link")) and not is_link(tmp_path) and not is_link(AT)


def test_a_whole_bucket():
    whole = Bucket.parse("s3://bucket/")
    assert (str(whole), whole.key, whole.name, whole.suffix, whole.parent) == ("s3://bucket", "", "bucket", "", whole)
    assert whole / "x" == Bucket("s3", "bucket", "x") and whole.parents == ()


def test_names_from_listings_stay_as_they_are():
    """They are keys, and no paths: nothing of them is parsed again."""
    for name in ("what?", "a#b", "a\\b", "../x", "a//b"):
        odd = AT.parent / name
        assert odd.key == f"a/b/{name}" and Bucket.listed(odd.url) == odd


@pytest.mark.parametrize(("relative", "found"), [
    ("cache", "a/b/cache"), ("../cache", "a/cache"), ("../../cache", "cache"), ("../..", None), ("../../..", None),
    ("../../../other/cache", None), ("/cache", None), (".", "a/b")])
def test_relative_names_do_not_leave_the_bucket(relative, found):
    at = AT.parent.follow(relative)
    assert (None if at is None else at.key) == found


def test_what_works_on_this_computer_only(tmp_path):
    (tmp_path / "file").touch()
    assert require_local(str(tmp_path), "DIR") == require_local(tmp_path) == tmp_path
    assert is_here(tmp_path) and is_directory(tmp_path) and is_file(tmp_path / "file")
    assert not (is_here(AT) or is_directory(AT) or is_file(AT))
    for word in (AT, str(AT), Path(str(AT))):
        with pytest.raises(PathError, match=r"prompt file s3://bucket/a/b/manifest.json is in an object store, exp"):
            require_local(word, "prompt file")
        with pytest.raises(UsageError, match=r"output s3://bucket/a/b/manifest.json is in an object store, exp") as one:
            require_local(word, "output", OUTPUT, UsageError)
        assert one.value.hint == OUTPUT and require_stored(word, "s3://bucket", "name one") == AT
    with pytest.raises(PathError, match=r"is not in an object store, expected a URL like s3://bucket/set"):
        require_stored(tmp_path, "s3://bucket/set", "name one")


def test_files_of_a_place_are_called_what_a_person_called_them(tmp_path):
    """Here by their path, and copies by the URL of what they are copies of."""
    here = local_of(tmp_path / "run", lambda place: pytest.fail(f"{place} is brought"))
    assert here == Local(tmp_path / "run") and str(here / "a") == str(tmp_path / "run" / "a")
    copied = local_of(AT.parent, lambda place: tmp_path / place.name)
    assert (copied.path, copied.origin, copied.partial) == (tmp_path / "b", AT.parent, True)
    assert str(copied) == "s3://bucket/a/b" and copied / "x" == Local(tmp_path / "b" / "x", AT.parent / "x", True)
    assert str(copied.with_name("b-2")) == "s3://bucket/a/b-2" and copied.with_name("b-2").path == tmp_path / "b-2"


def test_what_is_made_of_copies_lies_elsewhere_and_names_paths_in_full(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    here, copied = Local(Path("run")), Local(tmp_path / "run", AT.parent)
    assert here.new_file("page.html") == Path("run", "page.html") and copied.new_file("page.html") == Path("page.html")
    assert here.name_of(Path("m.json")) == "../m.json" and copied.name_of(Path("m.json")) == f"{tmp_path}/m.json"
    assert here.name_of(AT) == copied.name_of(AT) == str(AT)


def test_documents_in_a_store_name_what_is_in_their_bucket(tmp_path):
    beside, other = AT.parent / "cache", Bucket(scheme="s3", bucket="other", key="cache")
    assert may_name(AT, beside) and not may_name(AT, other) and not may_name(AT, tmp_path)
    assert may_name(tmp_path, other) and may_name(tmp_path, tmp_path)


def test_a_file_has_one_mark_whatever_leads_to_it(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "same").hardlink_to(tmp_path / "a")
    marks = [mark_of(tmp_path / name) for name in ("a", "link", "same", "b")]
    assert marks[0] == marks[1] == marks[2] != marks[3]
    assert mark_of(AT) == mark_of(Bucket.parse(str(AT))) != mark_of(AT.parent)
    with pytest.raises(FileNotFoundError):
        mark_of(tmp_path / "c")
