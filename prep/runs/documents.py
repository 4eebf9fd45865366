"""Writes and checks the documents of a run, run.json and state.json: each holds the SHA-256 of its own content.

A document is JSON with sorted keys and an indent of one, so it has exactly one spelling; `self` is the digest of that
spelling without the key `self`. Unlike documents of a cache, those of a run hold floats, in Python's shortest spelling.
The digest detects accidents, not intent (anyone can seal a document again), so callers check the values as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.fs.untrusted import NotRegularFile, open_regular
from prep.parse import Unparsed, brief, expect

MOST = 1 << 22  # bytes of a document


def seal(body: Mapping[str, Any]) -> bytes:
    """The bytes of a document with its `self`."""
    return _spell({**body, "self": digest_bytes(_spell(body))})


def read_sealed(path: Path, kind: str, keys: Mapping[int, Iterable[str]]) -> dict[str, Any]:
    """The document at `path`, of format `kind` and one of the versions in `keys`, with exactly the keys given there.

    Version 1 had no `self`. Raises `Unparsed`, `OSError`.
    """
    with open_plain(path) as handle:
        data = handle.read(MOST + 1)
    if len(data) > MOST:
        raise Unparsed(f"it has more than {MOST} bytes, expected a document of a run")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"it is not JSON: {str(error)[:80]}") from None
    body = expect(parsed, dict, "it")
    version = body.get("version")
    if body.get("format") != kind or type(version) is not int or version not in keys:
        raise Unparsed(f"it has format {brief(body.get('format'))} version {brief(version)}, this program reads "
                       f"'{kind}' version {' or '.join(map(str, keys))}")
    if set(body) - {"self"} != set(keys[version]) or ("self" in body) != (version > 1):
        raise Unparsed(f"it has the keys {brief(sorted(body))}, expected {', '.join(sorted(keys[version]))}")
    if version > 1 and not _is_sealed(body, data):
        raise Unparsed("it does not match its own digest; it was edited or damaged")
    return body


def open_plain(path: Path) -> BinaryIO:
    """Opens a regular file of a run for reading. Raises `OSError`, as `NotRegularFile` for links and special files."""
    return os.fdopen(open_regular(path), "rb")


def refused(path: Path, error: Exception, hint: str) -> CacheError:
    """The `CacheError` for `error` in a file of a run."""
    if isinstance(error, NotRegularFile):
        said = str(error.strerror).partition(":")[0]  # the rest of the message is about caches
    elif isinstance(error, OSError):
        said = str(error.strerror or error)
    else:
        said = str(error)
    return CacheError(f"{path}: {said}", hint=hint)


def _is_sealed(body: Mapping[str, Any], data: bytes) -> bool:
    try:
        plain = _spell({key: value for key, value in body.items() if key != "self"})
        return body.get("self") == digest_bytes(plain) and data == _spell(body)
    except (ValueError, RecursionError):  # NaN or infinity, which JSON lacks
        return False


def _spell(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
