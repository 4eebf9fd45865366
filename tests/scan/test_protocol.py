"""Answers of a scan's workers survive the way, and are checked beyond their types."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from walking import item_of

from prep.findings import Finding
from prep.fs.blob import Blob
from prep.parse import Unparsed
from prep.scan.duplicates.correlation import LONG, SIDE, Thumb
from prep.scan.duplicates.identity import Identity
from prep.scan.duplicates.signature import LENGTH
from prep.scan.examine import Examined
from prep.scan.protocol import BlobMessage, ExaminedMessage, ItemMessage, ThumbMessage
from prep.workers.protocol import decode, encode

DIGEST = "0" * 64
FINDING = {"path": "a", "code": "blank", "severity": "warning", "detail": "x"}
IDENTITY = {"file": DIGEST, "sample": 1, "size": [2, 3], "signature": b""}
GOOD = [[FINDING], IDENTITY, None, ["b"]]


def again(message):
    return decode(encode(message), type(message))


def test_items_survive_the_way(tmp_path):
    """Paths that are not UTF-8, too."""
    odd = Blob(file=os.fsdecode(b"/p/\xff.png"), offset=3, length=5, member="a")
    one = item_of(tmp_path / "a.png", picture=odd, caption=odd, metadata=Blob(file="b"), captions=("x", "ネコ"),
               caption_format="json")
    assert again(ItemMessage.of(one)).item() == one


def test_thumbnails_survive_the_way():
    thumb = Thumb(across=np.arange(SIDE * 3, dtype=np.uint8).reshape(SIDE, 3),
                  down=np.arange(SIDE * 2, dtype=np.uint8).reshape(SIDE, 2))
    found = again(ThumbMessage.of(thumb)).thumb()
    assert found.across.tobytes() == thumb.across.tobytes() and found.down.tobytes() == thumb.down.tobytes()


@given(st.lists(st.builds(Finding, path=st.text(st.characters(codec="utf-8")), code=st.sampled_from(["blank"]),
                          severity=st.sampled_from(["error", "warning", "info"]), detail=st.text("ab"))),
       st.none() | st.builds(Identity, file=st.just(DIGEST), sample=st.integers(0, 2**32 - 1),
                             size=st.tuples(st.integers(1, 1 << 30), st.integers(1, 9)),
                             signature=st.sampled_from([b"", bytes(range(LENGTH))])),
       st.lists(st.text("ab ")))
def test_what_is_found_survives_the_way(findings, identity, captions):
    found = Examined(findings=tuple(findings), identity=identity, thumb=None, captions=tuple(captions))
    assert again(ExaminedMessage.of(found)).examined() == found


def changed(place: int, value: object) -> list[object]:
    return [*GOOD[:place], value, *GOOD[place + 1:]]


@pytest.mark.parametrize(("change", "says"), [
    (changed(3, [3]), "Expected `str`, got `int`"), (changed(3, None), "Expected `array`"),
    (changed(0, 7), "Expected `array`, got `int`"), (changed(0, [["a"]]), "Expected `object`, got `array`"),
    (changed(0, [{**FINDING, "severity": "fatal"}]), "Invalid enum value 'fatal'"),
    (changed(0, [{**FINDING, "code": "nonsense"}]), "a finding has the unknown code 'nonsense'"),
    (changed(0, [{"path": "a"}]), "missing required field"),
    (changed(1, [1]), "Expected `object | null`, got `array`"),
    *((changed(1, {**IDENTITY, **part}), says) for part, says in (
        ({"size": [2, -3]}, "2x-3 pixels"), ({"size": [0, 3]}, "0x3 pixels"), ({"size": [2]}, "Expected `array` of"),
        ({"sample": -1}, "a picture has 2x3 pixels, sample -1 and a signature of 0 bytes"),
        ({"sample": 1 << 32}, "sample 4294967296"),
        ({"signature": b"x"}, "a signature of 1 bytes"), ({"file": "00"}, "the digest of a picture"),
        ({"signature": 4}, "Expected `bytes`, got `int`"))),
    (changed(2, [b"x", b""]), "half a thumbnail has 1 bytes"), (changed(2, [b"", b""]), "half a thumbnail has 0 bytes"),
    (changed(2, [b"x" * SIDE * (LONG + 1), b"x" * SIDE]), f"rows of {SIDE} up to {LONG}"),
    (GOOD[:1], "Expected `array` of at least length 4"), ({}, "Expected `array`, got `object`"),
])  # fmt: skip
def test_what_a_worker_says_is_checked(change, says):
    assert decode(encode(GOOD), ExaminedMessage).examined().identity.size == (2, 3)
    with pytest.raises(Unparsed) as error:
        decode(encode(change), ExaminedMessage).examined()
    assert says in str(error.value)


def test_no_blob_is_made_of_anything_else():
    with pytest.raises(Unparsed, match="Expected `int`, got `str`"):
        decode(encode([b"a", "0", None, ""]), BlobMessage)
