"""Computes SHA-256 of canonical JSON and of bytes, which names everything in a cache.

Canonical JSON: ASCII with \\u escapes, sorted keys, no spaces, no floats; each value has exactly one spelling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from json.encoder import encode_basestring_ascii
from typing import Any

BLOCK = 1 << 12  # strings that are spelled at a time
HOLE = "\0"  # placeholder for a value in `json_template`; no document contains this string
Json = Mapping[str, Any] | list[Any] | tuple[Any, ...] | str | int | bool | None


def canonical(value: Json) -> bytes:
    """`value` as canonical JSON. Raises `TypeError` for floats, which have no single spelling."""
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 of `data`, 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Json) -> str:
    """SHA-256 of the canonical bytes of `value`."""
    return digest_bytes(canonical(value))


def digest_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of the concatenated `parts`, without holding them all in memory."""
    running = hashlib.sha256()
    for part in parts:
        running.update(part)
    return running.hexdigest()


def with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with `self`: the SHA-256 of its canonical bytes without that key."""
    body = {key: value for key, value in document.items() if key != "self"}
    return {**body, "self": digest_json(body)}


def json_template(document: Mapping[str, Any]) -> list[str]:
    """The canonical spelling of `document`, split at its `HOLE`s, which are in the order of their keys.

    Joining the parts with the canonical spellings of values gives the spelling of the document with those values: so
    the text that many documents share is made once. (`string`, `integers`; `tests/vocabulary/test_keys.py` compares.)
    """
    return canonical(document).decode().split(string(HOLE))


def string(value: str) -> str:
    """The canonical spelling of a string."""
    return encode_basestring_ascii(value)


def integers(values: Iterable[int]) -> str:
    """The canonical spelling of a list of integers."""
    return f"[{','.join(map(int.__repr__, values))}]"


def digest_strings(values: Iterable[str]) -> str:
    """`digest_json` of a list of strings, four times as fast, and without the spelling of all: a plan has a million."""
    return digest_parts(_spelled(map(string, values)))


def _spelled(strings: Iterator[str]) -> Iterator[bytes]:
    """The list of these strings, which are spelled already, in parts."""
    yield b"["
    comma = ""
    while block := ",".join(islice(strings, BLOCK)):
        yield f"{comma}{block}".encode("ascii")
        comma = ","
    yield b"]"


def digest_spelled(spelled: str) -> str:
    """SHA-256 of a spelling that was assembled from the parts of a `json_template`."""
    return digest_bytes(spelled.encode("ascii"))


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"canonical JSON has no floats, got {value!r}")
    if isinstance(value, dict | Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys, got {key!r}")
            if type(inner) is not str:
                _refuse_floats(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            if type(inner) is not str:  # a plan has a hundred thousand of them
                _refuse_floats(inner)
