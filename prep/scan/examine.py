"""Examines one item in full: findings on its picture, caption and mask, and the picture's identity for duplicates.

A reference is an item of its own, without caption and mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from prep.captions.read import BadCaption, examine_caption, judge_captions
from prep.digest import digest_bytes
from prep.findings import Finding, finding
from prep.formatting import counted, printable_name
from prep.fs.blob import Blob, error_code, read_blob
from prep.geometry import Size, fits
from prep.images.decode import Picture, Pixels, decode_layers, decode_picture
from prep.images.formats.parts import BadPicture, Note
from prep.images.header import PictureHeader
from prep.images.mask import decode_mask_layers
from prep.images.thumbnail import encode_jpeg, shrink
from prep.scan.duplicates.correlation import Thumb
from prep.scan.duplicates.identity import Identity, identify, pixel_digest, sampled, thumb_of
from prep.scan.quality import quality_notes
from prep.sources.item import Item

MANY_PIXELS = 1 << 26  # above the largest 60-megapixel cameras
SMALL_SIDE = 32  # pixels: an icon; enlarged, it has no detail to learn
SMALL_REFERENCE = 64  # pixels: what a family scales references to has sides of several times its step of 16 or 32
WHITE = 240  # mean, of 255, from which part of a mask counts as white; soft edges keep it below 255
LONGEST = 4  # to 1: the longest bucket that trainers use, 2048x512

_EXTENSIONS = {"JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"}, "PNG": {".png"}, "WEBP": {".webp"}, "GIF": {".gif"},
               "TIFF": {".tif", ".tiff"}, "BMP": {".bmp", ".dib"}, "AVIF": {".avif"},
               "HEIC": {".heic", ".heif", ".hif"}, "JXL": {".jxl"}}
_INTENDED = {"low-bit-depth", "grayscale", "extreme-aspect"}  # of a reference
_SEVERAL = {"TIFF": ("multi-page", "pages; the first"), "HEIC": ("multi-page", "pictures; the primary one")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """The results of examining one item."""

    findings: tuple[Finding, ...]
    identity: Identity | None  # None: the picture cannot be decoded
    thumb: Thumb | None  # None: the same
    captions: tuple[str, ...]  # empty if they cannot be read

    @property
    def usable(self) -> bool:
        """Whether no finding has severity error."""
        return all(finding.severity != "error" for finding in self.findings)


def check_item(item: Item) -> Examined:
    """Reads and decodes all files of `item`. A pure function of these files; their faults become findings."""
    findings, seen = _check_picture(item)
    captions: tuple[str, ...] = ()
    if (seen is not None or item.caption is not None) and not item.is_reference:
        said, captions = _check_caption(item)
        findings += said
    findings += _check_mask(item, seen[0].size if seen else None)
    findings += _check_metadata(item)
    identity, thumb = seen or (None, None)
    return Examined(findings=tuple(findings), identity=identity, thumb=thumb, captions=captions)


def exact_pixels(picture: Blob, file: str | None = None) -> str:
    """A digest of all pixels of a picture that `check_item` could decode; "" if it can no longer be decoded, or its
    bytes have another digest than `file`."""
    whole = _decoded(picture, file)
    return "" if whole is None else pixel_digest(whole)


def thumbnail(picture: Blob, file: str | None = None) -> Thumb | None:
    """The thumbnail that `check_item` makes of the picture, again; `None` as in `exact_pixels`."""
    whole = _decoded(picture, file)
    return None if whole is None else thumb_of(sampled(whole), whole.size)


def preview_jpeg(picture: Blob, side: int) -> bytes:
    """A JPEG of a picture with its longer side at most `side` pixels; b"" if the picture cannot be decoded."""
    whole = _decoded(picture)
    return b"" if whole is None else encode_jpeg(shrink(whole, side))


def _decoded(picture: Blob, file: str | None = None) -> Picture | None:
    try:
        data = read_blob(picture)
        return decode_picture(data, alpha="white") if file in (None, digest_bytes(data)) else None
    except (OSError, MemoryError, BadPicture):
        return None


def _unreadable(path: str, error: OSError | MemoryError) -> Finding:
    if isinstance(error, MemoryError):
        return finding(path, "too-large", "takes more memory than there is")
    return finding(path, error_code(error), f"cannot be read: {error.strerror or error}")


# ---- the picture -----------------------------------------------------------------------------------------------------


def _check_picture(item: Item) -> tuple[list[Finding], tuple[Identity, Thumb] | None]:
    try:
        notes, seen = _picture_findings(read_blob(item.picture), item.picture.name if item.is_reference else item.label,
                                        reference=item.is_reference)
    except (OSError, MemoryError) as error:
        return [_unreadable(item.label, error)], None
    except BadPicture as error:
        return [finding(item.label, error.code, error.detail, as_error=True)], None
    return [finding(item.label, *note) for note in notes], seen


def _picture_findings(data: bytes, name: str, *, reference: bool) -> tuple[list[Note], tuple[Identity, Thumb]]:
    """Notes on the picture in `data`, and its identity and thumbnail. A `reference` may be plain, gray or blurred on
    purpose, like a map of edges."""
    header, picture, transparency = decode_layers(data, alpha="white")
    notes = [*header.notes, *_header_notes(header, name, SMALL_REFERENCE if reference else SMALL_SIDE)]
    alpha = None if transparency is None else np.asarray(transparency)
    if alpha is not None and not alpha.any():
        notes.append(("fully-transparent", "entirely transparent; nothing of it will be visible"))
    elif alpha is not None and alpha.min() < 255:
        notes.append(("has-alpha", f"{float((alpha < 255).mean()):.0%} of its pixels are transparent or translucent"))
    elif len(picture.getcolors(1) or ()) == 1:
        notes.append(("blank", "all pixels are the same"))
    if reference:
        notes = [note for note in notes if note[0] not in _INTENDED]
    elif not {"fully-transparent", "blank"} & {code for code, _ in notes}:
        notes += quality_notes(data, picture)
    return notes, identify(data, picture)


def _header_notes(header: PictureHeader, name: str, least: int) -> Iterator[Note]:
    """Notes on the facts in a header."""
    (width, height), extension = header.size, PurePosixPath(name).suffix.lower()
    if extension not in _EXTENSIONS[header.format]:
        yield "wrong-extension", f"content is {header.format}, the name ends in '{extension}'"
    if width * height > MANY_PIXELS:
        yield "many-pixels", f"{width}x{height} pixels take much memory"
    if header.frames > 1:
        code, what = _SEVERAL.get(header.format, ("animated", "frames; the first"))
        yield code, f"{header.frames} {what} is used"
    if header.bits > 8:
        yield "high-bit-depth", f"{header.bits} bits per channel; reduced to 8"
    if header.mode == "1":
        yield "low-bit-depth", "1 bit per pixel"
    if header.mode == "CMYK":
        yield "not-rgb", "colors are CMYK; converted to sRGB"
    if header.mode == "P" and header.format != "GIF":  # every GIF has a palette
        yield "palette", "has a palette of at most 256 colors"
    if header.mode in ("1", "L", "LA", "F") or header.mode.startswith("I"):
        yield "grayscale", "has one color channel"
    if min(width, height) < least:
        yield "too-small", f"{width}x{height} pixels, expected at least {least} each way"
    if max(width, height) > LONGEST * min(width, height):
        yield "extreme-aspect", f"{width}x{height} pixels, expected at most {LONGEST}:1"


# ---- its caption and mask --------------------------------------------------------------------------------------------


def _check_caption(item: Item) -> tuple[list[Finding], tuple[str, ...]]:
    if item.caption is None and not item.captions:
        return [finding(item.label, "missing-caption", item.uncaptioned or "no caption file")], ()
    try:
        captions, notes = (judge_captions(item.captions) if item.caption is None else
                        examine_caption(read_blob(item.caption), item.caption_format))
    except (OSError, MemoryError) as error:
        return [_unreadable(item.label, error)], ()
    except BadCaption as error:
        return [finding(item.label, error.code, error.detail, as_error=True)], ()
    return [finding(item.label, *note) for note in notes], captions


def _check_metadata(item: Item) -> list[Finding]:
    """A finding if an unused JSON file cannot be parsed: files downloaded with it may be incomplete, too."""
    if item.metadata is None:
        return []
    says = ""
    try:
        json.loads(data := read_blob(item.metadata))
    except OSError as error:
        says = f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        says = f"{counted(len(data), 'byte')} that are not UTF-8"
    except json.JSONDecodeError as error:
        says = f"{counted(len(data), 'byte')}, not valid JSON from character {error.pos} on ({error.msg})"
    except (ValueError, RecursionError, MemoryError):
        pass  # numbers too long, or nesting too deep, for this Python; other readers may accept them
    return [finding(display_path(item, item.metadata), "bad-json", says)] if says else []


def _check_mask(item: Item, size: Size | None) -> list[Finding]:
    """Findings under the mask's name; `size`: the picture's, None if that cannot be decoded."""
    if item.mask is None:
        return []
    where = display_path(item, item.mask)
    try:
        header, picture, colored = decode_mask_layers(read_blob(item.mask))
        mask = np.asarray(picture)
        notes = [*_mask_colors(header, colored), *_mask_values(mask)]
    except (OSError, MemoryError) as error:
        return [_unreadable(where, error)]
    except BadPicture as error:
        return [finding(where, error.code, error.detail, as_error=True)]
    high, wide = mask.shape
    if size is not None and (wide, high) != size:
        code = "mask-resized" if fits((wide, high), size) else "mask-size-mismatch"
        notes.append((code, f"mask has {wide}x{high} pixels, its picture {size[0]}x{size[1]}"))
    return [finding(where, *note) for note in notes]


def display_path(item: Item, other: Blob) -> str:
    """The label of a mask or another file beside its picture; its path if it lies elsewhere."""
    if other.path.parent != item.picture.path.parent:
        return printable_name(other.file)
    return str(PurePosixPath(item.label).with_name(printable_name(other.name)))


def _mask_colors(header: PictureHeader, colored: bool) -> Iterator[Note]:
    if header.has_alpha:
        yield "mask-not-gray", "mask has transparency, which counts as black"
    if colored:
        yield "mask-not-gray", "mask has colors; their brightness is used"


def _mask_values(mask: Pixels) -> Iterator[Note]:
    if not mask.any():
        yield "mask-empty", "mask is entirely black"
    elif mask.min() == 255:
        yield "mask-full", "mask is entirely white"
    elif _looks_inverted(mask):
        yield "mask-inverted", "mask has a white border and a black middle; white areas train"


def _looks_inverted(mask: Pixels) -> bool:
    """Whether nearly all of the outer sixteenth on each side is white, and nearly all of the middle third is black."""
    high, wide = mask.shape
    edge = max(high // 16, 1), max(wide // 16, 1)
    middle = mask[high // 3 : high - high // 3, wide // 3 : wide - wide // 3]
    rows = np.concatenate([mask[: edge[0]], mask[-edge[0] :]]).mean()
    columns = np.concatenate([mask[:, : edge[1]], mask[:, -edge[1] :]], axis=1).mean()
    return bool(min(rows, columns) >= WHITE and middle.mean() <= 255 - WHITE)
