"""Names of pictures in findings: those of their sources' directories, as short as tells them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from prep.fs.labels import labels_of, source_prefixes, sources_of


@pytest.mark.parametrize(("places", "prefixes"), [
    (["/a/photos"], [""]),
    (["/a/10_sks dog", "/a/reg"], ["10_sks dog/", "reg/"]),
    (["img", "reg"], ["img/", "reg/"]),
    (["/a/photos", "/b/photos"], ["a/photos/", "b/photos/"]),
    (["/a/x/photos", "/b/x/photos", "/c"], ["a/x/photos/", "b/x/photos/", "c/"]),
    (["/a/photos", "/a/photos"], ["photos/", "photos (2)/"]),
    (["/a/photos", "/a/photos", "/a/photos (2)"], ["photos/", "photos (2)/", "photos (2) (2)/"]),
    (["/a/photos", "/a/photos/sub"], ["photos/", "sub/"]),
    (["/a/train.tar", "/a/reg.tar"], ["", ""]),
    (["/a/x.tar", "/b/x.tar", "/c/photos"], ["a/", "b/", "c/photos/"]),
    (["/a/*.tar", "/a/a*.tar"], ["", "(2)/"]),
    (["/a/*/x.tar", "/b/*/x.tar"], ["a/", "b/"]),
    (["s3://bucket/photos", "/a/other"], ["photos/", "other/"]),
    (["s3://one/photos", "s3://two/photos"], ["one/photos/", "two/photos/"]),
    ([None, "/a/photos"], ["source[0]/", "photos/"])])
def test_prefixes(places, prefixes):
    found = source_prefixes([None if place is None else Path(place) for place in places])
    assert list(found) == prefixes


def test_labels_lead_back_to_sources_also_those_of_older_manifests():
    prefixes = source_prefixes([Path("/a/img"), Path("/a/reg")])
    assert labels_of(1, "sub/0.jpg", prefixes) == ["reg/sub/0.jpg", "source[1]/sub/0.jpg"]
    assert sources_of("reg/sub/0.jpg", prefixes) == sources_of("source[1]/sub/0.jpg", prefixes) == [(1, "sub/0.jpg")]
    assert sources_of("other/0.jpg", prefixes) == []
