"""What an earlier scan compared: its pictures in order and the pairs among them, so that only new ones are compared."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from prep.parse import Unparsed
from prep.scan.duplicates.correlation import Near

DIGEST = 16  # first bytes of a file's SHA-256
_HEAD = struct.Struct("<?QQ")  # whether every pair was looked for; how many pictures and pairs
_PAIR = np.dtype([("first", "<u4"), ("second", "<u4"), ("mirrored", "?"), ("product", "<f4"), ("score", "<f8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Two pictures that were measured, by index: their likeness, and the product of their signatures (0: none made)."""

    near: Near
    product: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Pictures that were all compared with one another, and the pairs among them."""

    every: bool  # pairs of any kind; otherwise, for each picture, the likeliest earlier one
    pictures: tuple[bytes, ...]  # `DIGEST` bytes of each, in the order of the comparison
    links: tuple[Link, ...]

    def among(self, pictures: Sequence[bytes]) -> tuple[list[Link], set[int]]:
        """(the links that hold among `pictures`, by their indices there; the pictures still to be compared).

        Where only the likeliest earlier picture is known, a picture that has lost it is to be compared again, and so
        are all if the order of known ones has changed.
        """
        place = {digest: index for index, digest in enumerate(pictures)}
        now = [place.get(digest, -1) for digest in self.pictures]
        fresh = set(range(len(pictures))) - set(now)
        known = [index for index in now if index >= 0]
        if not self.every and any(low > high for low, high in pairwise(known)):
            return [], set(range(len(pictures)))
        links: list[Link] = []
        for link in self.links:
            ends = now[link.near.first], now[link.near.second]
            if min(ends) >= 0:
                links.append(replace(link, near=replace(link.near, first=min(ends), second=max(ends))))
            elif not self.every and ends[1] >= 0:
                fresh.add(ends[1])
        return [link for link in links if self.every or link.near.second not in fresh], fresh

    def first(self, count: int) -> Compared:
        """The first pictures of a comparison that goes on, with the pairs among them."""
        return replace(self, pictures=self.pictures[:count],
                       links=tuple(link for link in self.links if link.near.second < count))

    def as_bytes(self) -> bytes:
        """A record of `compared_from`."""
        rows = np.array([(link.near.first, link.near.second, link.near.mirrored, link.product, link.near.score)
                         for link in self.links], _PAIR)
        return _HEAD.pack(self.every, len(self.pictures), len(rows)) + b"".join(self.pictures) + rows.tobytes()


def compared_from(record: bytes) -> Compared:
    """What `as_bytes` wrote. Raises `Unparsed`."""
    try:
        every, count, pairs = _HEAD.unpack_from(record)
        digests = record[_HEAD.size :][: count * DIGEST]
        rows = np.frombuffer(record, _PAIR, pairs, _HEAD.size + count * DIGEST)
    except (struct.error, ValueError, OverflowError) as error:
        raise Unparsed(f"no record of a comparison: {error}") from None
    links = tuple(Link(near=Near(first=first, second=second, score=score, mirrored=mirrored), product=product)
                  for first, second, mirrored, product, score in rows.tolist())
    if len(digests) != count * DIGEST or any(link.near.second >= count for link in links):
        raise Unparsed("a record of a comparison names pictures that it lacks")
    pictures = tuple(digests[start : start + DIGEST] for start in range(0, len(digests), DIGEST))
    return Compared(every=every, pictures=pictures, links=links)
