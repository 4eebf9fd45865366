"""Remembers what a scan found in each item, so that the next scan opens no unchanged file. Disposable.

Records of the user's memory (`prep.fs.memo`), for all sources of a user. A record's name is computed from the item's
name and the stamps of its files; for results on a picture's bytes, from their digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from prep.fs.blob import Blob
from prep.fs.memo import Memo, is_at_rest, memo_path
from prep.fs.stamps import blob_stamp
from prep.images.plugins import decoders
from prep.parse import Unparsed
from prep.scan.duplicates.compared import Compared, compared_from
from prep.scan.duplicates.correlation import LIMIT, LONG, SIDE, Thumb
from prep.scan.duplicates.identity import Identity, smaller_half
from prep.scan.examine import Examined
from prep.scan.protocol import ExaminedMessage
from prep.sources.item import Item
from prep.workers.protocol import decode, encode

VERSION = 8  # of the checks and of these records: raised when a check of `prep.scan.examine` or its answer changes
_THUMB = struct.Struct("<BHH")  # whether it is taller than wide, and the lengths of the larger and the smaller half


def usual_path() -> Path | None:
    """The path of the memory for these versions of the decoders; `None` for a user without a home directory."""
    return memo_path("scan", f"{VERSION} {decoders()}")


Stamp = tuple[bytes, int]  # a record's name, and when one of its files last changed (ns)


class ScanMemo:
    """The memory of scans; for one thread. `save` writes new records. A damaged file raises nothing.

    `sources`: those that are scanned together.
    """

    def __init__(self, path: Path | None, *, trust: bool = True, sources: Iterable[str] = ()) -> None:
        self._memo = Memo(path, trust=trust)
        self._scope = b"compared" + json.dumps(list(sources)).encode()
        self._thumbs = 0  # noted

    def is_current(self, item: Item, stamp: Stamp | None) -> bool:
        """Whether an item, as it was read from a store, still has this stamp of its listing."""
        return stamp is not None and _stamp(item) == stamp

    def get(self, item: Item) -> tuple[Stamp | None, Examined | None]:
        """(stamp for `note`, remembered result). The stamp is `None` if files are gone or not at rest, the result if
        none is remembered."""
        begun, stamp = time.time_ns(), _stamp(item)
        if stamp is None:
            return None, None
        value, stable = self._memo.recall(stamp[0]), stamp if is_at_rest(stamp[1], begun) else None
        try:
            return stable, None if value is None else decode(value, ExaminedMessage).examined()
        except Unparsed:
            return stable, None

    def note(self, stamp: Stamp | None, item: Item, examined: Examined) -> None:
        """Remembers a result, if the item's files still have this `stamp`."""
        if stamp is None or _stamp(item) != stamp:
            return
        if any(finding.code == "unsupported-format" for finding in examined.findings):  # until its extra is installed
            return
        self._memo.note(stamp[0], encode(ExaminedMessage.of(examined, thumb=False)))
        if examined.thumb is not None and examined.identity is not None and self._thumbs < LIMIT:
            self._thumbs += 1  # 6 kB each; among more pictures, few thumbnails are compared
            self._memo.note(_name("thumb", examined.identity), _compressed(examined.thumb))
        self._memo.flush()

    def thumb(self, identity: Identity) -> Thumb | None:
        """The remembered thumbnail of a picture; `None` if there is none."""
        value = self._memo.recall(_name("thumb", identity))
        with suppress(ValueError, struct.error, zlib.error):
            return None if value is None else _decompressed(value)
        return None

    def pixels(self, identity: Identity) -> str:
        """The digest of all pixels of a picture; "" if it is not remembered."""
        return (self._memo.recall(_name("pixels", identity)) or b"").decode("ascii", "replace")

    def note_pixels(self, identity: Identity, digest: str) -> None:
        """Remembers the digest of all pixels, unless it is ""."""
        if digest:
            self._memo.note(_name("pixels", identity), digest.encode("ascii", "replace"))

    def compared(self) -> Compared | None:
        """What the last scan of the same sources compared; `None` if it is not remembered."""
        value = self._memo.recall(self._scope)
        with suppress(Unparsed):
            return None if value is None else compared_from(value)
        return None

    def note_compared(self, compared: Compared) -> None:
        """Remembers what a scan of these sources compared, instead of what the last one did."""
        self._memo.note(self._scope, compared.as_bytes())

    def save(self) -> None:
        """Writes new records."""
        self._memo.save()

    def close(self) -> None:
        """Writes new records and closes the memory."""
        self._memo.close()


def _stamp(item: Item) -> Stamp | None:
    """A digest that changes with an item and its files, and the time of their last change; `None` if a file is gone."""
    running = hashlib.blake2b(digest_size=16)
    said: tuple[object, ...] = (item.label, item.source, item.caption_format, item.captions)
    said += (item.uncaptioned,) if item.uncaptioned else ()
    said += ("reference",) if item.is_reference else ()
    running.update(repr(said).encode(errors="surrogatepass"))
    changed = 0
    # Not `blobs`: which is missing counts. References are examined as items of their own.
    for blob in (item.picture, item.caption, item.mask, item.metadata):
        if blob is None:
            running.update(b"none")
            continue
        try:
            stamp, when = blob_stamp(blob)
        except OSError:
            return None
        running.update(stamp)
        running.update(_place(blob))
        changed = max(changed, when)
    return running.digest(), changed


def _place(blob: Blob) -> bytes:
    """The path of a file, which findings on a mask may contain."""
    return os.fsencode(blob.file) + blob.member.encode(errors="surrogatepass")


def _name(what: str, identity: Identity) -> bytes:
    return what.encode("ascii") + bytes.fromhex(identity.file)


def _compressed(thumb: Thumb) -> bytes:
    """A thumbnail in half its size: only the larger half, from which the smaller one can be made again, stored as
    differences between neighbors with Huffman codes.

    For 63 photographs: 4.2 kB instead of 8.9. Median prediction would save a tenth more, but needs a loop over pixels.
    """
    tall = thumb.down.shape[1] > thumb.across.shape[1]
    larger, smaller = (thumb.down, thumb.across) if tall else (thumb.across, thumb.down)
    length = smaller.shape[1]
    rest = b"" if np.array_equal(smaller_half(larger, length, tall=tall), smaller) else smaller.tobytes()
    slopes = np.diff(larger, axis=1, prepend=np.uint8(0))
    running = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    return _THUMB.pack(tall, larger.shape[1], length) + running.compress(slopes.tobytes() + rest) + running.flush()


def _decompressed(record: bytes) -> Thumb:
    """The thumbnail in a record of `_compressed`. Raises `ValueError`, `struct.error`, `zlib.error`."""
    tall, long, short = _THUMB.unpack_from(record)
    data = zlib.decompressobj().decompress(record[_THUMB.size :], 2 * SIDE * LONG)
    slopes = np.frombuffer(data, np.uint8, SIDE * long).reshape(SIDE, long)
    larger = np.cumsum(slopes, axis=1, dtype=np.uint8)
    rest = np.frombuffer(data, np.uint8, offset=slopes.size)
    smaller = rest.reshape(SIDE, short) if len(rest) else smaller_half(larger, short, tall=bool(tall))
    return Thumb(across=smaller, down=larger) if tall else Thumb(across=larger, down=smaller)
