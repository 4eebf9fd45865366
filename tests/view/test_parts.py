"""Addresses, memory, numbers of pictures, and the guard's tickets, each by itself."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_manifest import write_small

from prep.arrays import ArraySpec
from prep.cache.values import values_of
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.manifest.select import Query
from prep.parse import Unparsed
from prep.view.guard import Guard
from prep.view.memory import Memory
from prep.view.params import address, number_of, query_of
from prep.view.pictures import Pictures, statistics

BUCKETS = (((64, 64), ()), ((96, 64), ()))


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", [
    Query(), Query(text="a&b=c #? ü <x>"), Query(role="prior", source=1, bucket=1), Query(masked=True),
    Query(masked=False, sort="mask", descending=True), Query(low=0.125, high=1.0), Query(low=0.0),
    Query(finding="blank"), Query(hard=1.5, sort="loss"), Query(cluster=0, sort="alike", descending=True),
])
def test_an_address_leads_to_its_query(query):
    from urllib.parse import parse_qsl

    spelled = address(query, BUCKETS, page=3)
    assert spelled.startswith("?") and spelled.isascii() and "page=3" in spelled
    assert query_of(parse_qsl(spelled[1:]), BUCKETS, 2) == query
    assert address(Query(), BUCKETS) == ""


@pytest.mark.parametrize(("given", "message"), [
    ([("x", "1")], "a name in the address is 'x', expected one of: q"),
    ([("q", "a"), ("q", "b")], "q is given twice, expected once"),
    ([("q", "x" * 501)], "q has 501 characters, expected at most 500"),
    ([("bucket", "1x1")], "bucket is '1x1', expected one of: 64x64, 96x64"),
    ([("source", "2")], "source is '2', expected a whole number from 0 to 1"),
    ([("from", "101")], "from is '101', expected percent from 0 to 100"),
    ([("to", "1e1")], "to is '1e1', expected percent from 0 to 100"),
    ([("to", "-1")], "to is '-1', expected percent from 0 to 100"),
    ([("mask", "maybe")], "mask is 'maybe', expected one of: yes, no"),
    ([("sort", "size")], "sort is 'size', expected one of: name, id"),
])
def test_what_an_address_cannot_say(given, message):
    with pytest.raises(Unparsed) as error:
        query_of(given, BUCKETS, 2)
    assert str(error.value).startswith(message)


def test_numbers_are_plain():
    assert number_of("12", "n", 12) == 12
    for text in ("13", "-1", "1.0", "", "٣", "1_0", " 1", "0" * 10):
        with pytest.raises(Unparsed):
            number_of(text, "n", 12)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_dropped():
    memory, made = Memory(most=3 * 1200), []

    def get(key):
        return memory.get(key, lambda: made.append(key) or bytes(1000))

    for key in "abcabd":  # d drops c
        get(key)
    assert made == list("abcd") and memory.bytes == 3600
    get("b")
    get("a")
    assert made == list("abcd")
    get("c")
    assert made == list("abcdc")


def test_one_that_is_larger_than_all_room_is_kept_alone():
    memory = Memory(most=100)
    memory.get("a", lambda: b"x")
    assert memory.get("b", lambda: bytes(500)) == bytes(500) and memory.bytes == 700


def test_many_who_ask_at_a_time_wait_for_one():
    memory, made, begun = Memory(), [], threading.Barrier(8)

    def ask(_):
        begun.wait()
        return memory.get("x", lambda: made.append(1) or b"x")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [b"x"] * 8
    assert made == [1]


def test_an_error_is_not_kept():
    memory = Memory(at_once=1)
    with pytest.raises(ZeroDivisionError):
        memory.get("x", lambda: bytes(1 // 0))
    assert memory.get("x", lambda: None) is None and memory.get("x", lambda: b"never") is None


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_numbers_of_every_dtype():
    values = np.array([[1.5, -2.0, 0.0]], np.float32)
    high = (values.view(np.uint32) >> 16).astype("<u2")
    for dtype, stored in (("bfloat16", high), ("float16", values.astype("<f2")), ("float32", values.astype("<f4"))):
        spec = ArraySpec(name="latent", dtype=dtype, shape=(1, 3))
        numbers = values_of(spec, np.frombuffer(stored.tobytes(), np.uint8))
        assert numbers.dtype == np.float32 and np.array_equal(numbers, values)
    mask = ArraySpec(name="mask", dtype="uint8", shape=(2, 2))
    assert values_of(mask, np.arange(4, dtype=np.uint8)).tolist() == [[0, 1], [2, 3]]


def test_statistics_leave_out_what_is_not_finite():
    latent = np.array([[[1, 3], [np.nan, np.inf]], [[2, 2], [2, 2]], [[np.nan] * 2] * 2], np.float32)
    first, second, third = statistics(latent)
    assert (first.low, first.high, first.mean, first.std, first.bad) == (1, 3, 2, 1, 2)
    assert (second.low, second.std, second.bad) == (2, 0, 0)
    assert np.isnan(third.mean) and third.bad == 4


def test_an_original_that_has_changed_is_not_shown(tmp_path):
    import io

    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (128, 144), "red").save(stream, "PNG")
    opened = open_manifest(read_manifest(write_small(tmp_path, pictures={"a.png": stream.getvalue()})))
    number = opened.samples.table["name"].to_pylist().index("a.png")
    assert Pictures(opened).thumbnail(number) is not None
    (tmp_path / "photos" / "a.png").write_bytes(stream.getvalue() + b"changed")
    pictures = Pictures(opened)
    assert pictures.thumbnail(number) is pictures.view(number, 0) is pictures.whole(number) is None


def test_a_damaged_latent_is_not_shown(small):
    for path in (small.cache.root / "shards").glob("*/*/latent/c*"):
        path.chmod(0o600)
        path.write_bytes(b"")
    pictures = Pictures(small)
    assert pictures.latent(0, 0) is None and pictures.channel(0, 0, 0) is None


# ---- the guard -------------------------------------------------------------------------------------------------------


def answer(guard, path, method="GET"):
    """(status, headers) of a request."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"host", b"127.0.0.1:1")]}
    asyncio.run(guard(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"])


def test_a_ticket_is_good_for_one_request():
    guard = Guard(None, "t" * 43)
    old, ticket = guard.ticket(), guard.ticket()
    assert answer(guard, ticket, "HEAD")[0] == 404
    status, headers = answer(guard, ticket)
    assert status == 303 and headers[b"location"] == b"/" + b"t" * 43 + b"/" and b"content-security-policy" in headers
    assert answer(guard, ticket)[0] == answer(guard, old)[0] == 404


def test_a_wrong_ticket_uses_the_right_one_up():
    """Nobody may guess again and again."""
    guard = Guard(None, "t" * 43)
    ticket = guard.ticket()
    assert answer(guard, "/open/none")[0] == 404 and answer(guard, ticket)[0] == 404
    ticket = guard.ticket()
    assert answer(guard, "/elsewhere")[0] == 404 and answer(guard, ticket)[0] == 303


def test_the_app_gets_the_path_after_the_token():
    seen = []

    async def app(scope, _receive, send):
        seen.append((scope["path"], scope["raw_path"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})

    guard = Guard(app, "token")
    status, headers = answer(guard, "/token/sample/1")
    assert status == 200 and headers[b"x"] == b"y" and headers[b"cache-control"] == b"no-store"
    assert answer(guard, "/token/")[0] == 200 and seen == [("/sample/1", b"/sample/1"), ("/", b"/")]
