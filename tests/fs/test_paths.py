"""Paths that overlap are refused, whatever hides that they do."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.errors import CacheError, PathError, from_system
from prep.fs import paths
from prep.fs.paths import NamedPath, check_disjoint, check_not_cache, check_source


def places(photos: Path, cache: Path) -> list[NamedPath]:
    return [NamedPath(role="pictures", path=photos), NamedPath(role="cache", path=cache)]


@pytest.fixture
def photos(tmp_path):
    path = tmp_path / "photos"
    path.mkdir()
    return path


def test_places_side_by_side_are_fine(photos, tmp_path):
    check_disjoint(places(photos, tmp_path / "photos2"))
    check_disjoint([*places(photos, tmp_path / "cache"), NamedPath(role="manifest", path=tmp_path / "m.json")])


def test_equal(photos):
    with pytest.raises(PathError, match="are the same place") as error:
        check_disjoint(places(photos, photos / ".." / "photos"))
    assert error.value.exit_code == 5 and error.value.hint == "choose another path for the cache"


@pytest.mark.parametrize("role", ["grid", "run", "output"])
def test_what_is_there_already_is_not_the_one_to_move(photos, role):
    with pytest.raises(PathError, match="are the same place") as error:
        check_disjoint([NamedPath(role=role, path=photos), NamedPath(role="pictures", path=photos)])
    assert error.value.hint == f"choose another path for the {role} with -o"


def test_cache_inside_pictures_even_where_nothing_exists_yet(photos):
    with pytest.raises(PathError, match=r"cache '.*photos/a/b' lies inside pictures '.*photos'"):
        check_disjoint(places(photos, photos / "a" / "b"))


def test_pictures_inside_cache(photos, tmp_path):
    with pytest.raises(PathError, match=r"pictures .* lies inside cache"):
        check_disjoint(places(photos, tmp_path))


def test_through_a_link(photos, tmp_path):
    link = tmp_path / "elsewhere"
    link.symlink_to(photos, target_is_directory=True)
    with pytest.raises(PathError, match=r"lies inside pictures") as error:
        check_disjoint(places(photos, link / "cache"))
    assert f"(resolves to {photos / 'cache'})" in error.value.message
    with pytest.raises(PathError, match="are the same place"):
        check_disjoint(places(link, photos))


def test_relative_paths_are_resolved_against_the_current_directory(photos, monkeypatch):
    monkeypatch.chdir(photos)
    with pytest.raises(PathError, match="lies inside"):
        check_disjoint(places(photos, Path("cache")))


@pytest.mark.parametrize("cache", ["PHOTOS", "Photos/cache", "./pHOTOS/../PHOTOS/x"])
def test_by_letter_case_on_a_disk_that_ignores_it(photos, tmp_path, monkeypatch, cache):
    check_disjoint(places(photos, tmp_path / cache))  # this disk tells them apart
    monkeypatch.setattr(paths, "_folds_case", lambda _: True)
    with pytest.raises(PathError):
        check_disjoint(places(photos, tmp_path / cache))


def test_the_disk_is_asked_whether_it_ignores_case(photos, tmp_path):
    twin = tmp_path / "PHOTOS"
    assert paths._folds_case(photos) is False
    twin.symlink_to(photos)  # the same folder under the other spelling, as such a disk would show it
    assert paths._folds_case(photos) is True


def test_a_loop_of_links(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(PathError, match="cannot resolve"):
        check_disjoint(places(tmp_path / "a", tmp_path / "c"))


def test_a_source_must_be_there_and_no_cache(photos, tmp_path):
    check_source(photos)
    with pytest.raises(PathError, match="does not exist"):
        check_source(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match="is not a directory"):
        check_source(tmp_path / "file")
    (photos / "latentry.json").touch()
    (photos / "shards").mkdir()
    with pytest.raises(PathError, match="is part of the cache"):
        check_source(photos)
    with pytest.raises(PathError, match="is part of the cache"):
        check_not_cache(photos / "shards" / "ab")


@pytest.mark.parametrize(("cache", "output", "named"), [
    ("photos", "m.json", "pictures"), ("photos/cache", "m.json", "cache"), (".", "../m.json", "pictures"),
    ("cache", "photos/m.json", "manifest"), ("cache", "cache/m.json", "manifest"),
])
def test_encode_refuses_before_it_writes(prep, photos, tmp_path, monkeypatch, cache, output, named):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = prep("encode", "photos", "--model", "nowhere", "--cache", cache, "-o", output)
    assert result.code == 5 and result.err.startswith(f"error: {named}"), result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_masks_inside_pictures_are_refused(prep, photos, tmp_path):
    (photos / "masks").mkdir()
    result = prep("encode", photos, "--model", "nowhere", "--cache", tmp_path / "cache", "--mask", photos / "masks")
    assert result.code == 5 and "masks" in result.err
    result = prep("mask", photos, "--with", "alpha", "-o", photos / "made")
    assert result.code == 5 and "lies inside pictures" in result.err


def test_an_output_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PathError, match="cannot be written: no permission to write in"):
        paths.check_replaceable(tmp_path / "m.json", "manifest", lambda _: True)


def test_an_output_in_no_directory(tmp_path):
    with pytest.raises(PathError, match=r"manifest .*cannot be written: there is no directory .*nowhere") as error:
        paths.check_replaceable(tmp_path / "nowhere" / "m.json", "manifest", lambda _: True)
    assert error.value.hint


@pytest.mark.parametrize("inner", ["m.json", "deep/down/m.json"])
def test_an_output_below_a_file(tmp_path, inner):
    (file := tmp_path / "file").write_text("mine")
    with pytest.raises(PathError) as error:
        paths.check_replaceable(file / inner, "manifest", lambda _: True)
    assert error.value.message == f"manifest {file / inner} cannot be written: {file} is not a directory"
    assert error.value.hint == "name a file in a directory"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="devices and pipes as POSIX has them")
def test_an_output_that_is_no_file_is_neither_opened_nor_replaced(tmp_path):
    """To open a pipe would wait for who writes into it; to rename a file over /dev/null would replace it, as root."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(os.devnull)
    (tmp_path / "folder").mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        one.bind(os.path.relpath(tmp_path / "socket"))
        for path, kind in ((Path(os.devnull), "device"), (tmp_path / "link", "device"), (tmp_path / "pipe", "pipe"),
                           (tmp_path / "socket", "socket"), (tmp_path / "folder", "directory")):
            with pytest.raises(PathError) as caught:
                paths.check_replaceable(path, "manifest", lambda _: True)
            assert caught.value.message == f"manifest {path} is a {kind}, expected a file name"
            assert caught.value.hint.startswith("name a file")
    paths.check_replaceable(tmp_path / "new", "manifest", lambda _: False)


def test_what_lies_in_a_directory_of_the_cache_that_cannot_be_searched(tmp_path, monkeypatch):
    """As another user's: the cache is to be named, and its exit code given."""
    (tmp_path / paths.MARKER).touch()
    plain, closed = Path.is_file, tmp_path / "commits" / "ab"

    def refuse(path):
        if closed in path.parents:
            raise PermissionError(errno.EACCES, "no", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert paths.in_cache(closed / "abcd.json")


def test_what_lies_in_a_cache(tmp_path):
    (tmp_path / paths.MARKER).touch()
    for place in (tmp_path, tmp_path / "tmp" / "not there", str(tmp_path / "shards")):
        assert paths.in_cache(place)
    assert not paths.in_cache(tmp_path.parent) and not paths.in_cache("\0")


def test_what_the_system_refuses_in_a_cache_is_the_caches_matter(tmp_path):
    refused = OSError(errno.EIO, "Input/output error", str(tmp_path))
    assert isinstance(from_system(refused), PathError)
    assert isinstance(from_system(refused, in_cache=True), CacheError)
    assert isinstance(from_system(OSError(errno.ENOSPC, "No space left on device", str(tmp_path))), CacheError)


# ---- many places -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Directories, files and links that are several names of few places."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("a/b/c", "A/b", "d/e"):
        (root / folder).mkdir(parents=True)
    for file in ("a/1.tar", "a/b/2.tar", "d/3.tar"):
        (root / file).touch()
    (root / "d/4.tar").hardlink_to(root / "a/1.tar")
    for name, target in {"to_a": "a", "d/to_b": "a/b", "a/b/up": ".", "d/5.tar": "a/b/2.tar"}.items():
        (root / name).symlink_to(root / target)
    return root


PLACES = ["", "a", "A", "to_a", "a/b", "A/B", "d/to_b", "d/to_b/up/..", "a/b/c/../..", "a/1.tar", "to_a/1.tar",
          "d/4.tar", "a/b/up/2.tar", "d/5.tar", "d/3.tar", "D/3.tar", "d/e", "new", "NEW/x", "new/x/y", "d/n\u00e4",
          "d/na\u0308", "d/e/x", "A/b/x"]  # fmt: skip
ROLES = {"pictures": (), "cache": ("manifest",), "manifest": (), "run": ("cache", "pictures")}


def pair_by_pair(places: list[NamedPath]) -> str:
    """What is said of the places when each is compared with each."""
    for one, other in combinations(places, 2):
        at, there = paths.resolve(one.path), paths.resolve(other.path)
        if paths.same_place(at, there):
            return f"{one.role} {paths._show(one, at)} and {other.role} {paths._show(other, there)} are the same place"
        for inner, outer in (((one, at), (other, there)), ((other, there), (one, at))):
            if inner[0].role not in outer[0].may_hold and paths.is_inside(inner[1], outer[1]):
                shown = [f"{place.role} {paths._show(place, where)}" for place, where in (inner, outer)]
                return " lies inside ".join(shown)
    return ""


@pytest.mark.parametrize("folds", [None, True], ids=["as the disk says", "letter case ignored"])
@given(chosen=st.lists(st.tuples(st.sampled_from(sorted(ROLES)), st.sampled_from(PLACES)), max_size=5))
def test_many_places_are_compared_as_pairs_would_be(tree, folds, chosen):
    places = [NamedPath(role=role, path=tree / name, may_hold=ROLES[role]) for role, name in chosen]
    with pytest.MonkeyPatch.context() as patch:
        if folds:
            patch.setattr(paths, "_folds_case", lambda _: True)
        wanted, said = pair_by_pair(places), ""
        try:
            check_disjoint(places)
        except PathError as error:
            said = error.message
    assert said == wanted


def test_a_thousand_places_are_not_half_a_million_pairs(tmp_path, monkeypatch):
    asked, mark = [], paths._mark
    monkeypatch.setattr(paths, "_mark", lambda path: asked.append(path) or mark(path))
    for number in range(1000):
        (tmp_path / f"{number}.tar").touch()
    check_disjoint([NamedPath(role="pictures", path=tmp_path / f"{number}.tar") for number in range(1000)])
    assert 1000 < len(asked) < 1100
