"""Finds near-duplicates among the pictures of a scan: of all kinds among few, of whole pictures only among many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from prep.parse import Unparsed
from prep.scan.crew import DecodeAgain, ScanCrew
from prep.scan.duplicates.compared import DIGEST, Compared, Link
from prep.scan.duplicates.copies import ScannedPicture
from prep.scan.duplicates.correlation import LIMIT, SAME, SIDE, Near, Thumb, near_duplicates, whole_correlation
from prep.scan.duplicates.signature import BLOCK, Pair, likely_blocks
from prep.scan.duplicates.signature import LIMIT as MOST
from prep.scan.memo import ScanMemo
from prep.scan.protocol import ThumbMessage
from prep.scan.worker import PIXELS, THUMB
from prep.workers.crew import GivenUp
from prep.workers.service import Task

T = TypeVar("T")

AT_ONCE = 256  # pairs whose thumbnails are in memory
SAVED = 64 * BLOCK  # pictures after which a first comparison of many is remembered as far as it has come


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoders:
    """What it takes to decode a picture again: a crew, and the memory of earlier results."""

    crew: ScanCrew
    memory: ScanMemo
    lost: list[str] = field(default_factory=list)  # names of pictures that are gone, or whose worker was lost


def find_near(distinct: Sequence[ScannedPicture], thumbs: Mapping[str, Thumb], makers: Decoders,
              tick: Callable[[int], object]) -> Sequence[Near]:
    """The near-duplicates among pictures sorted by rank. Only pictures that were not compared before are compared.

    `thumbs`: known thumbnails by digest of the file.
    """
    if len(distinct) > MOST:
        return ()
    every = len(distinct) <= LIMIT
    pictures = tuple(bytes.fromhex(picture.identity.file)[:DIGEST] for picture in distinct)
    before = makers.memory.compared()
    if before is None or before.every != every:
        before = Compared(every=every, pictures=(), links=())
    known, fresh = before.among(pictures)
    links = known
    if fresh and every:
        nears = near_duplicates(_thumbs(distinct, thumbs, makers), tick, fresh)
        links = [*known, *(Link(near=near) for near in nears)]
    elif fresh:
        links, saved = [], len(before.pictures)
        for done, found in _among_many(distinct, makers, tick, known, fresh):
            links += found
            if done // SAVED > saved // SAVED and done < len(distinct):
                _note(Compared(every=every, pictures=pictures, links=tuple(links)).first(done), makers)
                makers.memory.save()
                saved = done
    compared = Compared(every=every, pictures=pictures, links=tuple(links))
    if compared != before:
        _note(compared, makers)
    return sorted((link.near for link in links if link.near.score >= SAME), key=lambda near: (near.first, near.second))


def _note(compared: Compared, makers: Decoders) -> None:
    if not makers.lost:
        makers.memory.note_compared(compared)


def pixel_digests(pictures: Sequence[ScannedPicture], makers: Decoders) -> list[str]:
    """A digest of all pixels of each picture, remembered or computed; "" if the picture can no longer be decoded."""
    remembered = [makers.memory.pixels(picture.identity) for picture in pictures]
    lacking = [picture for picture, digest in zip(pictures, remembered, strict=True) if not digest]
    made = _decoded_again(makers, PIXELS, lacking)
    digests = {picture.identity.file: digest or "" for picture, digest in zip(lacking, made, strict=True)}
    for picture in lacking:
        makers.memory.note_pixels(picture.identity, digests[picture.identity.file])
    return [digest or digests[picture.identity.file] for picture, digest in zip(pictures, remembered, strict=True)]


def _among_many(distinct: Sequence[ScannedPicture], makers: Decoders, tick: Callable[[int], object],
                known: Sequence[Link], fresh: Collection[int]) -> Iterator[tuple[int, list[Link]]]:
    """How many pictures are compared by now, and their likely pairs of whole pictures since it was last told, measured;
    remakes thumbnails of new pairs only."""
    measured = {(link.near.first, link.near.second, link.near.mirrored): link for link in known}
    before = [Pair(first=link.near.first, second=link.near.second, mirrored=link.near.mirrored, product=link.product)
              for link in known]
    some, told = list[Pair](), 0
    blocks = likely_blocks([picture.identity.signature for picture in distinct], tick, before, fresh)
    for number, block in enumerate(blocks, 1):
        some += block
        done = min(number * BLOCK, len(distinct))
        if len(some) >= AT_ONCE or done - told >= SAVED or done == len(distinct):
            yield done, [link for at in range(0, len(some), AT_ONCE)
                         for link in _links(some[at : at + AT_ONCE], measured, distinct, makers)]
            some, told = [], done


def _links(pairs: Sequence[Pair], measured: Mapping[tuple[int, int, bool], Link], distinct: Sequence[ScannedPicture],
           makers: Decoders) -> Iterator[Link]:
    """Pairs with their scores, as they were `measured` before or are now."""
    unknown = [pair for pair in pairs if (pair.first, pair.second, pair.mirrored) not in measured]
    indices = sorted({index for pair in unknown for index in (pair.first, pair.second)})
    thumbs = dict(zip(indices, _thumbs([distinct[index] for index in indices], {}, makers), strict=True))
    for pair in pairs:
        yield measured.get((pair.first, pair.second, pair.mirrored)) or _measured(pair, thumbs)


def _measured(pair: Pair, thumbs: Mapping[int, Thumb]) -> Link:
    score = whole_correlation(thumbs[pair.first], thumbs[pair.second], mirrored=pair.mirrored)
    near = Near(first=pair.first, second=pair.second, score=score, mirrored=pair.mirrored)
    return Link(near=near, product=pair.product)


def _thumbs(pictures: Sequence[ScannedPicture], known: Mapping[str, Thumb], makers: Decoders) -> list[Thumb]:
    """The thumbnail of each picture: known, remembered, or made again."""
    thumbs = [known.get(picture.identity.file) or makers.memory.thumb(picture.identity) for picture in pictures]
    lacking = [picture for picture, thumb in zip(pictures, thumbs, strict=True) if thumb is None]
    messages = _decoded_again(makers, THUMB, lacking)
    made = (_thumb(picture, message, makers) for picture, message in zip(lacking, messages, strict=True))
    return [thumb or next(made) for thumb in thumbs]


def _thumb(picture: ScannedPicture, message: ThumbMessage | None, makers: Decoders) -> Thumb:
    """A thumbnail; a flat one, which matches nothing, if the picture is lost meanwhile."""
    with suppress(Unparsed):
        if message is not None:
            return message.thumb()
    makers.lost.append(picture.name)
    flat = np.zeros((SIDE, 2), np.uint8)
    return Thumb(across=flat, down=flat)


def _decoded_again(makers: Decoders, task: Task[Any, T], pictures: Sequence[ScannedPicture]) -> Iterator[T | None]:
    """What a task makes of each picture; `None` if it can no longer be decoded, or the worker is lost."""
    requests = [DecodeAgain(task.name, picture.picture, picture.identity.file) for picture in pictures]
    for result in makers.crew.in_order(requests):
        yield None if isinstance(result, GivenUp) else result
