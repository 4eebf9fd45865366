"""Rows that were rejected stay so until they are asked for again; then they are rows like others."""

from __future__ import annotations

import errno
import json

import pytest
from pictures import draw

from prep.cache.store import open_cache
from prep.encode.engines import decoding
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture

PLAIN = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu")
SMALL = (*PLAIN, "--mask", "sidecar", "--json")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(*options, cache="cache"):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o", tmp_path / "m.json",
                      *SMALL, *options)
        assert result.code == 0, result.err
        return result.json

    return go


@pytest.fixture
def decoder(monkeypatch, decode_here):
    """`decoder.lacking = sizes`: pictures of these sizes cannot be decoded, `decoder.says` why."""
    decode = decode_picture

    class Decoder:
        lacking: tuple = ()
        says = "no decoder"

    def lacks(data, **options):
        picture = decode(data, **options)
        if picture.size in Decoder.lacking:
            raise BadPicture("undecodable", Decoder.says)
        return picture

    monkeypatch.setattr("prep.encode.engines.decoding.decode_picture", lacks)
    return Decoder


def commits(tmp_path):
    return sorted(open_cache(tmp_path / "cache", create=False).names("commits"))


def test_a_decoder_that_came_later_mends_what_was_rejected(encode, decoder, tmp_path):
    encode(cache="whole")
    undisturbed = (tmp_path / "m.json").read_bytes()
    decoder.lacking = ((144, 64), (97, 96))
    first = encode()
    assert first["encoded"]["latent"] == 6 and len(first["rejected"]) == 2
    assert encode()["encoded"]["latent"] == 0
    decoder.lacking = ()
    assert len(encode()["rejected"]) == 2  # nobody asked
    before = commits(tmp_path)
    assert encode("--retry-rejects", "--dry-run")["encoded"] == {"latent": 2, "mask": 0, "text": 0}
    assert commits(tmp_path) == before and len(encode()["rejected"]) == 2
    mended = encode("--retry-rejects")
    assert mended["encoded"] == {"latent": 2, "mask": 0, "text": 0} and mended["rejected"] == []
    assert encode()["rejected"] == []
    assert samples(tmp_path, undisturbed) == samples(tmp_path, (tmp_path / "m.json").read_bytes())


def test_parts_and_dry_runs_tell_what_was_rejected(prep, encode, decoder, photos, tiny_model, tmp_path):
    """A part tells what it and those before it could not make, and is as strict as a run of everything."""
    decoder.lacking = ((144, 64), (97, 96))
    words = ("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", *SMALL)
    result = prep(*words, "--part", "0/1", "--strict")
    assert result.code == 1
    told = result.json["rejected"]
    assert len(told) == 2 and {one["detail"] for one in told} == {"no decoder"}
    assert prep(*words, "--part", "0/1").code == 0
    assert encode("--dry-run")["rejected"] == told == encode()["rejected"]
    assert encode("--dry-run", "--retry-rejects")["rejected"] == []


def samples(tmp_path, manifest):
    return json.loads(manifest)["samples"]


def test_what_is_rejected_again_says_why_now_and_adds_no_commits(encode, decoder, tmp_path):
    decoder.lacking = ((144, 64), (97, 96))
    encode()
    seen = []
    for says in ("worse", "still worse"):
        decoder.says = says
        again = encode("--retry-rejects")
        assert again["encoded"]["latent"] == 0
        assert {one["detail"] for one in again["rejected"]} == {says}
        seen.append(commits(tmp_path))
    assert seen[0] == seen[1]
    decoder.lacking = ((97, 96),)
    assert encode("--retry-rejects")["encoded"]["latent"] == 1
    decoder.lacking = ()
    assert encode("--retry-rejects")["rejected"] == []


def test_a_retry_that_is_interrupted_is_taken_up_by_the_next_run(prep, encode, decoder, tmp_path, monkeypatch):
    decoder.lacking = ((144, 64), (97, 96))
    encode()
    decoder.lacking = ()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("prep.encode.engines.local.run", interrupt)
        with pytest.raises(AssertionError):
            encode("--retry-rejects")
    assert encode()["encoded"]["latent"] == 2


def test_what_a_task_rejects_is_known_while_other_files_of_it_cannot_be_read(
    prep, decoder, tiny_model, tmp_path, monkeypatch
):
    """Also where an earlier run could make as little of the task, and rejected nothing."""
    for number in range(3):
        draw(tmp_path / "photos" / f"{number}.png", (96 + number, 96), seed=number).with_suffix(".txt").write_text("x")
    shut: set[str] = set()
    read = decoding.read_blob

    def refuse(blob):
        if blob.path.name in shut:
            raise PermissionError(errno.EACCES, "Permission denied", str(blob.path))
        return read(blob)

    def rejected():
        command = ("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                   tmp_path / "m.json", *PLAIN, "--json")
        return [(one["path"], one["code"]) for one in prep(*command).json["rejected"]]

    monkeypatch.setattr(decoding, "read_blob", refuse)
    shut = {"0.png", "1.png"}
    for _ in range(2):
        assert rejected() == [("0.png", "unreadable-file"), ("1.png", "unreadable-file")]
    shut, decoder.lacking = {"0.png"}, ((97, 96),)
    for _ in range(2):
        assert rejected() == [("0.png", "unreadable-file"), ("1.png", "undecodable")]
    shut, decoder.lacking = set(), ()
    assert rejected() == [("1.png", "undecodable")]
