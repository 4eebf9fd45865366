"""Measures a directory as a place for a cache: how fast it takes shards and small files, and what it cannot do."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from prep.doctor.check import Check
from prep.formatting import format_bytes
from prep.fs import atomic

PIECE, PIECES = 1 << 23, 8  # of the large file: 64 MiB, a quarter of a shard
FILES = 20  # small files, written as commits are
LITTLE = 10 << 30  # bytes: some 50,000 pictures at 512 pixels with text rows of a small encoder
SLOW = 30e6  # bytes a second: a shard takes nine seconds
LATE = 0.2  # seconds for a small file
PROBE = ".latentry-doctor-"  # of the directory that the measurement makes, and removes


def check_disk(folder: Path) -> list[Check]:
    """Checks room, speed and abilities of the disk of `folder`; makes and removes a directory. Raises `OSError`."""
    place = folder / f"{PROBE}{secrets.token_hex(8)}"
    atomic.make_dir(place)
    try:
        return [_room(folder), _large(place), _small(place), _links(place)]
    finally:
        atomic.remove_tree(place)


def _room(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    what = f"{format_bytes(free)} free in {folder}"
    if free < LITTLE:
        return Check(name="room", state="warning", what=what,
                     hint="prep encode --dry-run says how much a cache will take; --cache names another disk")
    return Check(name="room", state="ok", what=what)


def _large(place: Path) -> Check:
    """Random bytes, since some disks compress."""
    data = os.urandom(PIECE)
    begun = time.perf_counter()
    with atomic.create(place / "large") as handle:
        for _ in range(PIECES):
            atomic.write(handle, data)
        atomic.sync(handle)
    rate = PIECE * PIECES / max(time.perf_counter() - begun, 1e-9)
    what = f"{format_bytes(PIECE * PIECES)} written and synced at {format_bytes(int(rate))}/s"
    if rate < SLOW:
        return Check(name="writing", state="warning", what=what, hint="put --cache on a local disk, and prep push or "
                     "copy it when it is whole")
    return Check(name="writing", state="ok", what=what)


def _small(place: Path) -> Check:
    begun = time.perf_counter()
    for number in range(FILES):
        atomic.write_atomic(place / f"{number}.json", b"{}")
    each = (time.perf_counter() - begun) / FILES
    what = f"a small file is on the disk in {1000 * each:.1f} ms"
    if each > LATE:
        return Check(name="syncing", state="warning", what=what,
                     hint="each shard needs two: put --cache on a local disk, and prep push or copy it when it is "
                     "whole")
    return Check(name="syncing", state="ok", what=what)


def _links(place: Path) -> Check:
    """Commits are created by a hard link, which never replaces another process's file; elsewhere by a rename."""
    try:
        (place / "link.json").hardlink_to(place / "0.json")
    except (OSError, NotImplementedError):  # the latter from Python, the former from the disk
        return Check(name="hard links", state="note", what="the file system has none, so commits are renamed: as safe, "
                     "but two processes may encode the same rows")
    return Check(name="hard links", state="ok", what="the file system has them")
