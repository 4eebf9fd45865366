"""Finds near-duplicates among the pictures of a scan: of all kinds among few, of whole pictures only among many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from prep.parse import Unparsed
from prep.scan.duplicates.copies import ScannedPicture
from prep.scan.duplicates.correlation import LIMIT, SAME, SIDE, Near, Thumb, near_duplicates, whole_correlation
from prep.scan.duplicates.signature import LIMIT as MOST
from prep.scan.duplicates.signature import Pair, likely_pairs
from prep.scan.examiner import Examiner
from prep.scan.memo import ScanMemo
from prep.scan.protocol import PictureMessage
from prep.scan.worker import PIXELS, THUMB
from prep.workers.service import Task

T = TypeVar("T")

AT_ONCE = 256  # pairs whose thumbnails are in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoders:
    """What it takes to decode a picture again: an examiner, threads, and the memory of earlier results."""

    examiner: Examiner
    pool: Executor
    memory: ScanMemo
    lost: list[str] = field(default_factory=list)  # names of pictures that are gone, or whose worker was lost


def find_near(distinct: Sequence[ScannedPicture], thumbs: Mapping[str, Thumb], makers: Decoders,
              tick: Callable[[int], object]) -> Sequence[Near]:
    """The near-duplicates among pictures sorted by rank, from memory if the same pictures were compared before.

    `thumbs`: known thumbnails by digest of the file.
    """
    name, known = makers.memory.nears(bytes.fromhex(one.identity.file) for one in distinct)
    if known is not None and all(near.second < len(distinct) for near in known):
        return known
    if len(distinct) > MOST:
        return ()
    nears = (tuple(_among_many(distinct, makers, tick)) if len(distinct) > LIMIT
             else near_duplicates(_thumbs(distinct, thumbs, makers), tick))
    if not makers.lost:
        makers.memory.note_nears(name, nears)
    return nears


def pixel_digests(pictures: Sequence[ScannedPicture], makers: Decoders) -> list[str]:
    """A digest of all pixels of each picture, remembered or computed; "" if the picture can no longer be decoded."""
    known = [makers.memory.pixels(one.identity) for one in pictures]
    lacking = [one for one, digest in zip(pictures, known, strict=True) if not digest]
    made = makers.pool.map(lambda one: _asked(makers, PIXELS, one) or "", lacking)
    found = {one.identity.file: digest for one, digest in zip(lacking, made, strict=True)}
    for one in lacking:
        makers.memory.note_pixels(one.identity, found[one.identity.file])
    return [digest or found[one.identity.file] for one, digest in zip(pictures, known, strict=True)]


def _among_many(distinct: Sequence[ScannedPicture], makers: Decoders, tick: Callable[[int], object]) -> Iterator[Near]:
    """Near-duplicates of whole pictures; remakes thumbnails of likely pairs only."""
    pairs = likely_pairs([one.identity.signature for one in distinct], tick)
    while some := list(islice(pairs, AT_ONCE)):
        indices = sorted({index for pair in some for index in (pair.first, pair.second)})
        thumbs = dict(zip(indices, _thumbs([distinct[index] for index in indices], {}, makers), strict=True))
        for pair in some:
            yield from _measured(pair, thumbs)


def _measured(pair: Pair, thumbs: Mapping[int, Thumb]) -> Iterator[Near]:
    score = whole_correlation(thumbs[pair.first], thumbs[pair.second], mirrored=pair.mirrored)
    if score >= SAME:
        yield Near(first=pair.first, second=pair.second, score=score, mirrored=pair.mirrored)


def _thumbs(pictures: Sequence[ScannedPicture], known: Mapping[str, Thumb], makers: Decoders) -> list[Thumb]:
    """The thumbnail of each picture: known, remembered, or made again."""
    found = [known.get(one.identity.file) or makers.memory.thumb(one.identity) for one in pictures]
    lacking = [one for one, thumb in zip(pictures, found, strict=True) if thumb is None]
    made = makers.pool.map(lambda one: _made_again(one, makers), lacking)
    return [thumb or next(made) for thumb in found]


def _made_again(picture: ScannedPicture, makers: Decoders) -> Thumb:
    """A thumbnail; a flat one, which matches nothing, if the picture is lost meanwhile."""
    with suppress(Unparsed):
        if (found := _asked(makers, THUMB, picture)) is not None:
            return found.thumb()
    makers.lost.append(picture.name)
    flat = np.zeros((SIDE, 2), np.uint8)
    return Thumb(across=flat, down=flat)


def _asked(makers: Decoders, task: Task[PictureMessage, T], picture: ScannedPicture) -> T | None:
    """A worker's answer about a picture; `None` if it can no longer be decoded, or the worker is lost."""
    return makers.examiner.again(task, picture.picture, picture.identity.file)
