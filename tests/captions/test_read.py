"""Caption bytes in, strings and notes out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.captions.read import BadCaption, examine_caption, read_caption


@pytest.mark.parametrize(
    ("data", "caption", "codes"),
    [(b"a cat\n", "a cat", []),
     (b"  a \t cat  ", "a cat", []),
     ("été 猫 кот قطة 🐈".encode(), "été 猫 кот قطة 🐈", []),
     (b"\xef\xbb\xbfa cat", "a cat", ["caption-bom"]),
     ("a cat".encode("utf-16"), "a cat", ["caption-utf16"]),
     (b"\xfe\xff" + "a cat".encode("utf-16-be"), "a cat", ["caption-utf16"]),
     (b"cat " * 600, ("cat " * 600).strip(), ["caption-too-long"])],
)  # fmt: skip
def test_captions(data, caption, codes):
    captions, notes = examine_caption(data)
    assert captions == (caption,)
    assert [code for code, _ in notes] == codes
    assert read_caption(data) == (caption,)


@pytest.mark.parametrize(("data", "size"), [(b"", "0 bytes"), (b"\n", "1 byte"), (b" \r\n\t ", "5 bytes"),
                                               (b"\xef\xbb\xbf", "3 bytes")])
def test_no_text_is_no_caption(data, size):
    captions, notes = examine_caption(data)
    assert captions == ()
    assert notes[-1] == ("empty-caption", f"caption file has {size} and no text")


def test_json_of_other_keys_is_no_caption():
    captions, ((code, says),) = examine_caption(b'{"caption_short": "a cat"}', "json")
    assert (captions, code) == ((), "empty-caption")
    assert says == "caption file has 26 bytes and no text under any of captions, texts, caption, text, prompt, tags"


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [(b"caf\xe9 noir", "caption-encoding", "byte 3 of the caption is e9, expected UTF-8 text"),
     (b"\xff\xfea", "caption-encoding", "byte 0 of the caption is 61, expected UTF-16-LE text"),
     (b"a\0cat\0", "caption-control-characters", "caption has 2 control characters, expected plain text"),
     (b"a \x1b[31mcat", "caption-control-characters", "caption has 1 control character, expected plain")],
)  # fmt: skip
def test_bad_captions(data, code, says):
    with pytest.raises(BadCaption) as caught:
        read_caption(data)
    assert caught.value.code == code
    assert says in caught.value.detail


@pytest.mark.parametrize("document", ['"\\ud800"', '["a cat", "\\udcff"]', '{"text": "a", "tags": ["\\ude00\\ud83d"]}'])
def test_halves_of_characters(document):
    """JSON can spell them; nothing that is made of a caption can: no key, no table."""
    with pytest.raises(BadCaption, match=r"has [12] unpaired surrogates?, expected valid Unicode") as caught:
        read_caption(document.encode(), "json")
    assert caught.value.code == "caption-encoding"
    assert read_caption(b'"\\ud83d\\ude00"', "json") == ("\U0001f600",)


def test_lines_are_captions():
    assert examine_caption(b"a cat\r\n\r\n  on a mat\r\n") == (
        ("a cat", "on a mat"), (("caption-multiline", "2 lines, each a caption"),))


def test_long_and_multiline_notes_have_numbers():
    _, notes = examine_caption(b"one\ntwo\n" + b"word " * 600)
    assert notes == (("caption-multiline", "3 lines, each a caption"),
                     ("caption-too-long", "600 words; text encoders cut what exceeds 77 to 512 tokens"))


@pytest.mark.parametrize(
    ("table", "captions"),
    [({"caption": "a cat"}, ("a cat",)),
     ({"captions": ["a cat", "", "a\ncat on a mat"]}, ("a cat", "a cat on a mat")),
     ({"text": "a cat", "width": 512}, ("a cat",)),
     ({"caption": "a cat", "tags": "fur, whiskers"}, ("a cat, fur, whiskers",)),
     ({"caption": "a cat", "tags": ["fur", "whiskers"]}, ("a cat, fur, whiskers",)),
     ({"tags": ["fur"]}, ("fur",)),
     ("a cat", ("a cat",)),
     (["a cat", "a mat"], ("a cat", "a mat")),
     ({"width": 512}, ()), ({}, ())],
)  # fmt: skip
def test_json_captions(table, captions):
    assert read_caption(json.dumps(table).encode(), "json") == captions


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"{", "caption is not JSON"), (b"7", "JSON of int"), (b'{"caption": 7}', "'caption' of the caption is int"),
     (b'{"captions": [null]}', "'captions' of the caption is NoneType"), (b"[" * 100_000, "caption is not JSON")],
)  # fmt: skip
def test_bad_json_captions(data, says):
    with pytest.raises(BadCaption) as caught:
        read_caption(data, "json")
    assert caught.value.code == "caption-json"
    assert says in caught.value.detail


@given(st.binary(max_size=200) | st.text(max_size=99).map(str.encode), st.sampled_from(["text", "json"]))
def test_any_bytes_give_lines_or_a_reason(data, form):
    try:
        captions = read_caption(data, form)
    except BadCaption:
        return
    for caption in captions:
        assert caption == " ".join(caption.split())
        assert caption
