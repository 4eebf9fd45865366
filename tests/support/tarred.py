"""Tars for tests, in memory."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable


def member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = (len(data) if kind == tarfile.REGTYPE else 0), kind, target
    return info, data


def tar_of(members: Iterable[tuple | str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", encoding="utf-8", errors="surrogateescape") as tar:
        for one in members:
            info, data = member(one, one.encode("utf-8", "surrogateescape")) if isinstance(one, str) else one
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()
