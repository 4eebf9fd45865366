"""Writes and checks the documents of a run, run.json and state.json: each holds the SHA-256 of its own content.

A document is JSON with sorted keys and an indent of one, so it has exactly one spelling; `self` is the digest of that
spelling without the key `self`. Unlike documents of a cache, those of a run hold floats, in Python's shortest spelling.
The digest detects accidents, not intent (anyone can give an edited document its digest), so callers check the values as
well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.fs.untrusted import NotRegularFile, check_root, open_regular, read_regular
from prep.parse import Unparsed, brief, expect

# Bytes of a document: more than JSON takes for the settings in a file of the size that `train` reads.
MOST = 1 << 25
ELSEWHERE = "to keep a run elsewhere, name that directory, or a link to the whole run"


def with_checksum(body: Mapping[str, Any]) -> bytes:
    """The bytes of a document with its `self`."""
    return _spell({**body, "self": digest_bytes(_spell(body))})


def read_sealed(path: Path, kind: str, keys: Mapping[int, Iterable[str]]) -> dict[str, Any]:
    """The document at `path`, of format `kind` and one of the versions in `keys`, with exactly the keys given there.

    Version 1 had no `self`. Raises `Unparsed`, `OSError`.
    """
    data = read_regular(path, MOST)
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


def check_links(folder: Path) -> None:
    """Raises `CacheError` if anything in the directory of a run, or of a checkpoint, is neither a regular file nor a
    directory: a run may come from a stranger, and a link in it could lead out of it."""
    try:
        check_root(folder)
    except NotRegularFile as error:
        raise refused(Path(error.filename), error, f"remove it: a run must not contain links; {ELSEWHERE}") from None


def refused(path: Path, error: Exception, hint: str) -> CacheError:
    """The `CacheError` for `error` in a file of a run."""
    return CacheError(f"{path}: {reason(error)}", hint=hint)


def reason(error: Exception) -> str:
    """Why a file of a run cannot be read."""
    if isinstance(error, NotRegularFile):
        return str(error.strerror).partition(":")[0]  # the rest of the message is about caches
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _is_sealed(body: Mapping[str, Any], data: bytes) -> bool:
    try:
        plain = _spell({key: value for key, value in body.items() if key != "self"})
        return body.get("self") == digest_bytes(plain) and data == _spell(body)
    except (ValueError, RecursionError):  # NaN or infinity, which JSON lacks
        return False


def _spell(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
