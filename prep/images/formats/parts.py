"""The parts of an unwrapped picture file, and the errors for files that cannot be unwrapped."""

from __future__ import annotations

from dataclasses import dataclass

Note = tuple[str, str]  # (code of prep.findings.CODES, what was seen)


class BadPicture(Exception):
    """A picture cannot be used; becomes a finding of severity error. `code` is one of prep.findings.CODES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class NoDecoder(BadPicture):
    """The decoder is an extra that is not installed. The picture may be fine, so this is never remembered."""

    def __init__(self, what: str, *, package: str, extra: str) -> None:
        super().__init__("unsupported-format", f"is {what}, which needs the package {package}, which is not installed; "
                         f"left out: pip install 'latentry[{extra}]' reads it")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureParts:
    """One picture file, unwrapped."""

    format: str  # JPEG PNG WEBP BMP TIFF GIF AVIF HEIC JXL
    body: bytes  # the bytes for the decoder
    exif: bytes | None  # None: none, or the format's decoder reads it
    profile: bytes | None  # ICC; the same
    frames: int | None  # the same
    bits: int | None  # per channel as stored; the same
    notes: tuple[Note, ...]
