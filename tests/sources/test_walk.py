"""Sources by name: directories, tars with braces and globs; every kind yields the same items."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tarred import member, tar_of

from prep.errors import PathError
from prep.sources import tar_paths
from prep.sources.companions import Companions
from prep.sources.item import Item
from prep.sources.tar_paths import tars_of
from prep.sources.walk import is_tars, labelled, places_of, walk_source


@pytest.fixture
def tars(tmp_path):
    for name in ("a/0.tar", "a/1.tar", "b/0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tar_of([f"{name[0]}{name[2]}.jpg"]))
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("a/0.tar", ["a/0.tar"]), ("a/{0..1}.tar", ["a/0.tar", "a/1.tar"]), ("{b,a}/0.tar", ["b/0.tar", "a/0.tar"]),
     ("*/0.tar", ["a/0.tar", "b/0.tar"]), ("{a,*}/*.tar", ["a/0.tar", "a/1.tar", "b/0.tar"])],
)  # fmt: skip
def test_braces_and_globs(tars, pattern, names):
    assert tars_of(tars / pattern) == [tars / name for name in names]
    assert places_of(tars / pattern) == [tars / name for name in names]


def test_a_file_that_is_called_like_a_pattern_is_that_file(tars):
    odd = tars / "{x,y}.tar"
    odd.write_bytes(tar_of([]))
    assert tars_of(odd) == [odd]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("x.tar", "does not exist"), ("a/{0..9}.tar", r"2\.tar does not exist, and neither do 7 others of"),
     ("z*.tar", "matches no file"), ("{0..999999999}.tar", "names more than 1000000 tars"),
     ("{a.tar", "source .* cannot be expanded"),
     ("**a/x.tar", r"cannot be expanded: '\*\*a' mixes \*\* with other characters"),
     ("a/" + "*/" * 900 + "x.tar", "matches no file"),
     ("x" * 5000 + ".tar", "source /.*… has 5[0-9]+ characters, expected at most 4096")],
)  # fmt: skip
def test_patterns_that_name_nothing(tars, pattern, says):
    with pytest.raises(PathError, match=says):
        tars_of(tars / pattern)


@pytest.mark.parametrize("source", ["pipe:cat a.tar", "http://example.org/a.tar", "hf://b/photos"])
def test_other_schemes_are_refused(source):
    with pytest.raises(PathError, match=r"has the scheme '[a-z0-9]+', expected a local path, or s3, gs, az"):
        is_tars(Path(source))


def test_directories_may_be_called_like_tars(tmp_path):
    (tmp_path / "photos.tar").mkdir()
    assert not is_tars(tmp_path / "photos.tar")
    assert not is_tars(Path("C:/photos"))


def test_names_say_which_tar(tars):
    places = [tars / "a/0.tar", tars / "a/1.tar"]
    assert [label for _, label in labelled(places)] == ["0.tar", "1.tar"]
    assert [label for _, label in labelled([tars / "a/0.tar", tars / "b/0.tar"])] == ["a/0.tar", "b/0.tar"]
    names = [one.name for one in walk_source(tars / "*/*.tar", source=0, masks="none") if isinstance(one, Item)]
    assert names == ["a/0.tar/a0.jpg", "a/1.tar/a1.jpg", "b/0.tar/b0.jpg"]


@pytest.mark.parametrize("mask", ["0.mask.png", "0-masklabel.png"])
def test_masks_in_tars_are_used_only_where_they_are_asked_for(tmp_path, mask):
    (tmp_path / "a.tar").write_bytes(tar_of([member("0.jpg", b""), member(mask, b"")]))
    found = {kind: list(walk_source(tmp_path / "a.tar", source=0, masks=kind)) for kind in ("sidecar", "none", "alpha")}
    assert {kind: one[0].mask is not None for kind, one in found.items()} == {
        "sidecar": True, "none": False, "alpha": False}
    assert [one.code for one in found["none"][1:]] == ["masks-unused"]
    assert found["none"][1].detail == "1 mask beside the pictures is not used; --mask sidecar uses it"
    assert len(found["sidecar"]) == len(found["alpha"]) == 1


def test_masks_of_a_directory_go_with_keys(tars, tmp_path):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks/a0-masklabel.png").write_bytes(b"")
    masks = Companions.read(tmp_path / "masks", "mask")
    (item,) = walk_source(tars / "a/0.tar", source=0, masks=masks)
    assert item.mask.file == str(tmp_path / "masks/a0-masklabel.png")
    assert list(masks.orphans()) == []


def test_a_tar_gives_the_rows_of_its_directory(prep, photos, tiny_model, tmp_path):
    """The same pictures, captions and masks from a directory and from tars: the same keys, so nothing is encoded."""
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    half = len(files) // 2 // 2 * 2
    for number, some in enumerate((files[:half], files[half:])):
        members = [member(path.relative_to(photos).as_posix(), path.read_bytes()) for path in some]
        (tmp_path / f"p-{number}.tar").write_bytes(tar_of(members))
    common = ["--model", tiny_model, "--resolution", 64, "--step", 16, "--cache", tmp_path / "cache", "--json"]
    first = json.loads(prep("encode", photos, "-o", tmp_path / "a.json", *common).out)
    second = json.loads(prep("encode", tmp_path / "p-{0..1}.tar", "-o", tmp_path / "b.json", *common).out)
    assert first["encoded"]["latent"] and not any(second["encoded"].values())
    assert second["samples"] == first["samples"]


def test_braces_of_no_end_are_not_expanded(monkeypatch, tars):
    monkeypatch.setattr(tar_paths, "MOST_TARS", 1)
    with pytest.raises(PathError, match=r"source .* names more than 1 tars"):
        tars_of(tars / "a/{0..1}.tar")
