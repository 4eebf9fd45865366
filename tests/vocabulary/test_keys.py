"""Keys: golden vectors that must never change by accident, and what a key depends on.

A vector here changes only together with a `meaning`: caches in the field are named by these digests.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_key import latent_key, mask_key

from prep import keys
from prep.digest import BLOCK, HOLE, canonical, digest_json, digest_parts, digest_strings, with_checksum
from prep.geometry import Placement
from prep.images.decode import POLICY
from prep.parse import Unparsed, sealed_json

PLACEMENT = Placement(scaled=(100, 96), crop=(2, 0), bucket=(96, 96))
LATENT = keys.latent_context(image={"meaning": 1, "resize": "lanczos", "mask_cell": "mean"}, vae="ab" * 32,
                             posterior="mean", compute="float32", stored="bfloat16")
MASK = keys.mask_context(image={"meaning": 1, "resize": "lanczos", "mask_cell": "mean"}, origin="file", factor=8)
TEXT = keys.text_context(text="cd" * 32, max_length=77, layout="full", compute="float32", stored="bfloat16")
PICTURE = "01" * 32
SEEN = [keys.SeenPicture(picture=PICTURE, placement=PLACEMENT, alpha=None),
        keys.SeenPicture(picture="23" * 32, placement=PLACEMENT, alpha=(255, 255, 255))]

GOLDEN = {
    "latent": (latent_key(PICTURE, PLACEMENT, None, LATENT),
               "debb3f5ca05d577795fa295b1bf529d3b6c459e38b8227949ddce806b00bd43d"),
    "latent with alpha": (latent_key(PICTURE, PLACEMENT, (255, 255, 255), LATENT),
                          "0c206235a85d6629024a6a93e72039a9728999135a1c3e132b0e634536621ec1"),
    "latent with transparency": (latent_key(PICTURE, PLACEMENT, "keep", LATENT),
                                 "ce965b90ed448c9bb18cbf96b89740ee7add42b946f5637d6048bba57307d2cc"),
    "imported latent": (keys.ImportedLatentKeys(keys.imported_context(
        origin="kohya-npz", vae="ab" * 32, stored="bfloat16")).key(PICTURE, "23" * 32, PLACEMENT),
        "b5138e55a059719479a45328eabc158dad4c9d6e8c166e19a7876d6432fc4e5e"),
    "mask": (mask_key(PICTURE, PLACEMENT, MASK),
             "da4b9c854c2f7ce26901d94e7b4481a8f1584e3e7c876b0d7b11c41968abdcb4"),
    "masked latent": (keys.MaskedLatentKeys(LATENT, MASK).key(PICTURE, "23" * 32, PLACEMENT, (255, 255, 255)),
                      "95c4c090110b344c60b00eec7fd70c38fe1dce414657cdf76f887ddf86cfd351"),
    "drawn mask": (mask_key(keys.drawn_origin(PICTURE), PLACEMENT, MASK),
                   "54845b6cb8a15cfd70af864624902fe198c2c0cfa82ceb4cc079e16a291f69be"),
    "text": (keys.text_key("a red dog", TEXT),
             "1ea7cf897472e8592d5fdf602249ecc626726e0f47349a6b3edbd56d85508974"),
    "text, not ASCII": (keys.text_key("ein roter Hünd 犬 🐕", TEXT),
                        "9ed05797d3af7b6034ea360bf9efb46698bb098826abfe565e4e224fad837200"),
    "negative": (keys.negative_key("a red dog", {**TEXT, "layout": "trimmed", "max_length": 256, "negatives": "own"}),
                 "298c9fa0676007c4c6b3c7fe0479992d4343b902214622c066ef6324bb6dddce"),
    "unconditional": (keys.unconditional_key(TEXT),
                      "19993ecfe3090a176fcddc4b42200dbe8c700038d586e1838069683ea0b0c01a"),
    "text with pictures": (keys.text_key("a red dog", TEXT, SEEN),
               "d02027930fb08ba647b8b7e8c7aee576926444d4481d94ee1b32c881354e1e15"),
    "negative with pictures": (keys.negative_key("a red dog", {**TEXT, "negatives": "own"}, SEEN),
               "c9af49e2bdf956856cdb1179c30cc8290fd0ddcabb9e096aee5053932c222086"),
    "unconditional with pictures": (keys.unconditional_key(TEXT, SEEN),
               "714b3438f5aa859de22f26d59facb115944a9885dba7d34125a4e6622f9a7556"),
    "sample": (keys.sample_id(PICTURE, (96, 96), 0),
               "be21b04e40213c194f9ec64cb44e1315374a2961c86f808b47eefb4982ba6766"),
}


@pytest.mark.parametrize(("key", "wanted"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_vectors(key, wanted):
    assert key == wanted


def test_golden_vectors_of_the_policy_that_ships():
    """A word of the policy spelled otherwise would make every cache in the field stale."""
    latents = keys.latent_context(image=POLICY, vae="ab" * 32, posterior="mean", compute="float32", stored="bfloat16")
    masks = keys.mask_context(image=POLICY, origin="file", factor=8)
    placed = Placement(scaled=(64, 72), crop=(0, 4), bucket=(64, 64))
    assert digest_json(POLICY) == "1026a64196e8a452057f5e1d8527ac36356fca41b93047c6e64990db1765ddc5"
    assert latent_key("cd" * 32, placed, None, latents) == (
        "390be939020e2719484fc93e7dcae55552560f5bcc2d1bf9ca2b35c0479164aa")
    assert mask_key("cd" * 32, placed, masks) == (
        "c3fb1c4e010a980a593476332da49bf9b0f06e25c4904353d77a6d50a409e2c8")


def test_canonical_json_is_what_the_standard_library_sorts():
    value = {"b": [1, "ü", None, True], "a": {"z": -5, "": "\ud83d"}}
    assert canonical(value) == b'{"a":{"":"\\ud83d","z":-5},"b":[1,"\\u00fc",null,true]}'


@pytest.mark.parametrize("value", [1.5, {"a": [0.1]}, {1: 2}, {"a": float("nan")}])
def test_canonical_json_refuses_floats_and_odd_keys(value):
    with pytest.raises(TypeError):
        canonical(value)


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                           lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(json_values)
def test_canonical_bytes_round_trip_and_are_one_spelling(value):
    spelled = canonical(value)
    assert json.loads(spelled) == value
    assert canonical(json.loads(spelled)) == spelled


whole = st.integers(0, 1 << 40)
pairs = st.tuples(whole, whole)
placements = st.builds(Placement, scaled=pairs, crop=pairs, bucket=pairs, flip=st.booleans())
contexts = st.dictionaries(st.text().filter(lambda word: word != HOLE),
                           whole | st.text().filter(lambda word: HOLE not in word)
                           | st.dictionaries(st.text(st.characters(exclude_characters=HOLE)), whole))


def spelled(placement: Placement) -> dict[str, object]:
    return {"scaled": list(placement.scaled), "crop": list(placement.crop), "bucket": list(placement.bucket),
            "flip": int(placement.flip)}


@given(contexts, st.text(), placements, st.none() | st.tuples(whole, whole, whole), pairs, whole)
def test_keys_are_digests_of_canonical_json_however_they_are_put_together(context, words, placement, alpha, pair, copy):
    shared = {"context": context, "placement": spelled(placement)}
    assert keys.LatentKeys(context).key(words, placement, alpha) == latent_key(words, placement, alpha, context) \
        == digest_json({"kind": "latent", "picture": words, "alpha": alpha, **shared})
    assert keys.MaskKeys(context).key(words, placement) == mask_key(words, placement, context) \
        == digest_json({"kind": "mask", "origin": words, **shared})
    assert keys.MaskedLatentKeys(context, {"factor": 8}).key(words, words, placement, alpha) == digest_json(
        {"kind": "masked latent", "picture": words, "origin": words, "alpha": alpha, "mask": {"factor": 8}, **shared})
    assert keys.TextKeys(context).key(words) == keys.text_key(words, context) \
        == digest_json({"kind": "text", "caption": words, "context": context})
    own = {**context, "negatives": "own"}
    assert keys.TextKeys(own).negative(words) == keys.negative_key(words, own) \
        == digest_json({"kind": "text", "negative": words, "context": own})
    plain = {name: value for name, value in context.items() if name != "negatives"}
    assert keys.TextKeys(plain).negative(words) == keys.text_key(words, plain)
    assert keys.TextKeys(context).unconditional == keys.unconditional_key(context)
    seen = keys.SeenPicture(picture=words, placement=placement, alpha=alpha)
    shown = {"kind": "text", "references": [{"picture": words, "placement": spelled(placement), "alpha": alpha}]}
    assert keys.TextKeys(context).key(words, [seen]) == keys.text_key(words, context, [seen]) \
        == digest_json({**shown, "caption": words, "context": context})
    assert keys.TextKeys(own).negative(words, [seen]) == digest_json({**shown, "negative": words, "context": own})
    assert keys.TextKeys(context).without_prompt([seen]) == digest_json(
        {**shown, "unconditional": 1, "context": context})
    assert keys.sample_id(words, pair, copy) == digest_json(
        {"kind": "sample", "picture": words, "bucket": list(pair), "copy": copy})


@pytest.mark.parametrize("key", [
    lambda seen: keys.text_key("a cat", TEXT, seen), lambda seen: keys.negative_key("a cat", TEXT, seen),
    lambda seen: keys.negative_key("a cat", {**TEXT, "negatives": "own"}, seen),
    lambda seen: keys.unconditional_key(TEXT, seen)], ids=["caption", "negative", "own negative", "no prompt"])
def test_a_text_with_pictures_has_another_key_for_each_of_their_pixels_and_orders(key):
    first, second = SEEN
    shown = [[], [first], [second], [first, second], [second, first], [first, first],
             [replace(first, alpha=(0, 0, 0))],
             *([replace(first, placement=replace(PLACEMENT, **change))] for change in (
                 {"flip": True}, {"crop": (1, 0)}, {"scaled": (100, 97)}, {"bucket": (96, 88)}))]
    assert len({key(seen) for seen in shown}) == len(shown)


@given(st.lists(st.text()))
def test_digest_of_strings(values):
    assert digest_strings(values) == digest_json(values)


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_digest_of_more_strings_than_are_spelled_at_a_time(count):
    values = [str(number) for number in range(count)]
    assert digest_strings(iter(values)) == digest_json(values)


def test_a_context_that_would_be_cut_in_the_wrong_place_makes_no_key():
    with pytest.raises(ValueError, match="unpack"):
        keys.text_key("a cat", {"meaning": HOLE})


@given(st.lists(st.binary()))
def test_digest_of_parts_is_the_digest_of_their_sum(parts):
    import hashlib

    assert digest_parts(parts) == hashlib.sha256(b"".join(parts)).hexdigest()


CHANGES = {
    "picture": lambda: latent_key("02" * 32, PLACEMENT, None, LATENT),
    "scaled": lambda: latent_key(PICTURE, Placement(scaled=(101, 96), crop=(2, 0), bucket=(96, 96)), None, LATENT),
    "crop": lambda: latent_key(PICTURE, Placement(scaled=(100, 96), crop=(3, 0), bucket=(96, 96)), None, LATENT),
    "bucket": lambda: latent_key(PICTURE, Placement(scaled=(100, 96), crop=(2, 0), bucket=(96, 88)), None, LATENT),
    "flip": lambda: latent_key(PICTURE, Placement(scaled=(100, 96), crop=(2, 0), bucket=(96, 96), flip=True), None,
                                    LATENT),
    "alpha": lambda: latent_key(PICTURE, PLACEMENT, (0, 0, 0), LATENT),
    **{name: (lambda name=name: latent_key(PICTURE, PLACEMENT, None, {**LATENT, name: "x"})) for name in LATENT},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_input_that_decides_a_latent_changes_its_key(change):
    assert change() != latent_key(PICTURE, PLACEMENT, None, LATENT)


def test_mask_and_latent_policies_do_not_touch_each_other():
    assert "mask_cell" not in LATENT["image"] and "resize" in LATENT["image"]
    assert "mask_cell" in MASK["image"] and "resize" not in MASK["image"]


def test_no_prompt_is_not_the_empty_caption():
    assert keys.unconditional_key(TEXT) != keys.text_key("", TEXT)


def test_copies_of_a_picture_are_samples_of_their_own():
    assert keys.sample_id(PICTURE, (96, 96), 0) != keys.sample_id(PICTURE, (96, 96), 1)


def test_a_sealed_document_reads_back_and_any_edit_shows():
    data = canonical(with_checksum({"format": "x", "rows": 3}))
    assert sealed_json(data, "x")["rows"] == 3
    for spoiled in (data.replace(b"3", b"4"), data + b" ", data.replace(b'"format"', b'"Format"'), b"[]", b"\xff", b"{",
                    json.dumps(json.loads(data), indent=1).encode()):
        with pytest.raises(Unparsed):
            sealed_json(spoiled, "x")


def test_digest_of_json_is_sha256_of_canonical_bytes():
    import hashlib

    assert digest_json({"b": 1, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()
