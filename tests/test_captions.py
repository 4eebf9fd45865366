"""Caption bytes in, strings and notes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.captions import BadCaption, examine_caption, read_caption


@pytest.mark.parametrize(
    ("data", "caption", "codes"),
    [(b"a cat\n", "a cat", []),
     (b"  a \t cat  ", "a cat", []),
     ("été 猫 кот قطة 🐈".encode(), "été 猫 кот قطة 🐈", []),
     (b"\xef\xbb\xbfa cat", "a cat", ["caption-bom"]),
     ("a cat".encode("utf-16"), "a cat", ["caption-utf16"]),
     (b"\xfe\xff" + "a cat".encode("utf-16-be"), "a cat", ["caption-utf16"]),
     (b"a cat\r\n\r\non a mat\r\n", "a cat on a mat", ["caption-multiline"]),
     (b"cat " * 600, ("cat " * 600).strip(), ["caption-too-long"])],
)  # fmt: skip
def test_captions(data, caption, codes):
    captions, notes = examine_caption(data)
    assert captions == (caption,)
    assert [code for code, _ in notes] == codes
    assert read_caption(data) == (caption,)


@pytest.mark.parametrize("data", [b"", b" \r\n\t ", b"\xef\xbb\xbf"])
def test_no_text_is_no_caption(data):
    captions, notes = examine_caption(data)
    assert captions == ()
    assert notes[-1] == ("empty-caption", f"caption file has {len(data)} bytes and no text")


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [(b"caf\xe9 noir", "caption-encoding", "byte 3 of the caption is e9, expected UTF-8 text"),
     (b"\xff\xfea", "caption-encoding", "byte 0 of the caption is 61, expected UTF-16-LE text"),
     (b"a\0cat\0", "caption-control-characters", "caption has 2 control characters, expected plain text"),
     (b"a \x1b[31mcat", "caption-control-characters", "caption has 1 control characters")],
)  # fmt: skip
def test_bad_captions(data, code, says):
    with pytest.raises(BadCaption) as caught:
        read_caption(data)
    assert caught.value.code == code
    assert says in caught.value.detail


def test_long_and_multiline_notes_have_numbers():
    _, notes = examine_caption(b"one\ntwo\n" + b"word " * 600)
    assert notes == (("caption-multiline", "3 lines, joined by spaces"),
                     ("caption-too-long", "602 words; text encoders cut what exceeds 77 to 512 tokens"))


@given(st.binary(max_size=200))
def test_any_bytes_give_one_line_or_a_reason(data):
    try:
        captions = read_caption(data)
    except BadCaption:
        return
    for caption in captions:
        assert caption == " ".join(caption.split())
        assert caption
