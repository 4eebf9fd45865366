"""URLs as messages show them, lists of names, and what a copy of a cache did."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prep.findings import Finding, rejected_line
from prep.formatting import listed, shards_moved, without_secrets

PLACES = st.sampled_from(["bucket/m.json", "bucket", "bucket/a b/c@d/e:f", "huggingface.co/owner/name@v1"])
BEGINNINGS = st.sampled_from(["s3://", "s3:/", "https://"])
SECRETS = st.text("W/:@?#%.", max_size=12)  # any that has a letter has this one, which no place has
USERS = st.text("W%.", max_size=6)


@given(BEGINNINGS, PLACES)
def test_a_url_without_secrets_is_shown_as_it_is(beginning, place):
    assert without_secrets(f"{beginning}{place}") == f"{beginning}{place}"


@given(BEGINNINGS, PLACES, st.sampled_from("?#"), SECRETS)
def test_a_query_is_not_shown(beginning, place, mark, token):
    shown = without_secrets(f"{beginning}{place}{mark}token={token}")
    assert shown == f"{beginning}{place}" or (place == "bucket" and shown == beginning)


@given(BEGINNINGS, USERS, SECRETS, PLACES, st.sampled_from(["", "?token=W", "#W", "?to=W@W"]))
@example("s3://", "W", "W/W", "bucket/m.json", "")
@example("s3://", "W", "W/W?W", "bucket/m.json", "")
@example("s3://", "W", "W@W/W#W", "bucket/m.json", "")
def test_a_password_is_not_shown_whatever_it_has(beginning, user, password, place, more):
    shown = without_secrets(f"{beginning}{user}:{password}@{place}{more}")
    assert "W" not in shown and shown.startswith(beginning)


@given(BEGINNINGS, USERS, st.sampled_from(["bucket/m.json", "bucket"]))
def test_what_follows_a_user_is_shown(beginning, user, place):
    for named in (f"{user}@", f"{user}:W@", f"{user}:W/W@", f"{user}:@"):
        assert without_secrets(f"{beginning}{named}{place}") == f"{beginning}{place}"


@pytest.mark.parametrize(("text", "shown"), [
    ("s3://user:word/m.json", "s3://m.json"), ("s3://user:word", "s3://"), ("s3://", "s3://"),
    ("bucket/m?token=word", "bucket/m"), ("./a:b@c#d", "./a:b@c#d"), ("", "")])
def test_a_user_without_a_place_and_what_is_no_url(text, shown):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(("names", "told"), [((), ""), (("a",), "a"), (("a", "b"), "a and b"),
                                             (("a", "b", "c"), "a, b and c")])
def test_names_are_listed(names, told):
    assert listed(names) == told


@pytest.mark.parametrize(("shards", "moved", "size", "told"), [
    (4, 4, 2048, "4 shards (2.0 KiB) sent"), (1, 1, 0, "1 shard (0 bytes) sent"), (0, 0, 9, "0 shards (9 bytes) sent"),
    (4, 1, 2048, "1 of 4 shards (2.0 KiB) sent, the rest was there"),
    (4, 0, 2048, "0 of 4 shards (2.0 KiB) sent, the rest was there"),
    (4, 0, 0, "nothing sent, 4 shards were there"), (1, 0, 0, "nothing sent, 1 shard was there"),
])
def test_what_a_copy_did(shards, moved, size, told):
    assert shards_moved(shards, moved, size, "sent", "there") == told


@pytest.mark.parametrize(("severity", "begins"), [("error", "rejected"), ("warning", "warning"), ("info", "info")])
def test_only_a_picture_that_is_left_out_is_called_rejected(severity, begins):
    said = rejected_line(Finding(path="a b.png", code="caption-repeated", severity=severity, detail="as of 3 others"))
    assert said == f"{begins}: 'a b.png': caption-repeated: as of 3 others"
