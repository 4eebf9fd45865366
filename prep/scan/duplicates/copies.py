"""Reports copies among the pictures of a scan: same bytes, same pixels, and near-duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prep.findings import Finding, finding
from prep.fs.blob import Blob
from prep.scan.duplicates.correlation import LIMIT, Near
from prep.scan.duplicates.identity import Identity
from prep.scan.duplicates.signature import LIMIT as MOST
from prep.similarity.rank import rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedPicture:
    """A decodable picture: about 600 bytes, with everything that it refers to."""

    name: str
    identity: Identity
    picture: Blob


Pixels = Callable[[Sequence[ScannedPicture]],
                  Sequence[str]]  # pictures → a digest of all pixels of each, "" if it cannot be decoded


def exact_copies(seen: Iterable[ScannedPicture], pixels: Pixels) -> tuple[list[Finding], list[ScannedPicture]]:
    """One finding for each exact copy of another picture, and the other pictures, by rank.

    The original is the first by `rank`. `pixels` is called only for pictures whose size and sample match.
    """
    files: dict[str, str] = {}
    findings: list[Finding] = []
    others: list[ScannedPicture] = []
    for picture in sorted(seen, key=lambda picture: rank(picture.name, picture.identity.size)):
        if picture.identity.file in files:
            findings.append(_copy_finding(picture, "exact-duplicate", "bytes", files[picture.identity.file]))
        else:
            others.append(picture)
        files.setdefault(picture.identity.file, picture.name)
    samples = Counter(_sample(picture) for picture in others)
    suspects = [picture for picture in others if samples[_sample(picture)] > 1]
    digests = dict(zip((picture.name for picture in suspects), pixels(suspects), strict=True))
    same: dict[str, str] = {}
    distinct: list[ScannedPicture] = []
    for picture in others:
        digest = digests.get(picture.name, "")
        if digest and digest in same:
            findings.append(_copy_finding(picture, "pixel-duplicate", "pixels", same[digest]))
        else:
            distinct.append(picture)
        same.setdefault(digest, picture.name)
    return findings, distinct


def _copy_finding(picture: ScannedPicture, code: str, what: str, original: str) -> Finding:
    return finding(picture.name, code, f"same {what} as {original}", other=original, likeness=1.0)


def _sample(picture: ScannedPicture) -> tuple[int, int, int]:
    return *picture.identity.size, picture.identity.sample


def skipped_finding(distinct: Sequence[ScannedPicture]) -> list[Finding]:
    """The finding that the search for near-duplicates was limited or skipped, if there are too many pictures."""
    if len(distinct) <= LIMIT:
        return []
    if len(distinct) <= MOST:
        says = f"cropped near-duplicates are searched for among at most {LIMIT}, those of whole pictures among all"
    else:
        says = f"near-duplicates are searched for among at most {MOST}"
    return [finding(".", "duplicates-skipped", f"{len(distinct)} pictures; {says}")]


def near_findings(nears: Iterable[Near], distinct: Sequence[ScannedPicture]) -> list[Finding]:
    """Findings on near-duplicates among pictures sorted by rank, one for each, with the first picture it resembles."""
    nearest: dict[int, Near] = {}
    for near in sorted(nears, key=lambda near: near.mirrored):
        nearest.setdefault(near.second, near)
    return [_near_finding(near, distinct) for near in nearest.values()]


def _near_finding(near: Near, distinct: Sequence[ScannedPicture]) -> Finding:
    code = "mirrored-duplicate" if near.mirrored else "near-duplicate"
    alike = "the mirror image of" if near.mirrored else "nearly the same picture as"
    other, likeness = distinct[near.first].name, round(min(near.score, 1.0), 4)  # rounding may exceed 1 by 1e-7
    return finding(distinct[near.second].name, code, f"{alike} {other} ({likeness:.1%} alike)", other=other,
                   likeness=likeness)
