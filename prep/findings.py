"""What a finding's code means, how bad it is, and what to do about it. Codes are stable: scripts match on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prep.formatting import grouped, printable, shell_name
from prep.parse import Unparsed, brief, expect, suggest

Severity = Literal["error", "warning", "info"]
REJECTED = 30  # pictures that are told by name, each on a line
SEVERITIES = ("error", "warning", "info")

# code: (severity, what it means, what to do)
CODES: dict[str, tuple[Severity, str, str]] = {
    # files
    "unreadable-file": ("error", "the file cannot be read", "check its permissions and the disk"),
    "too-large": ("error", "above 1 GiB, or more than memory holds", "make it smaller"),
    "empty-file": ("error", "the file has 0 bytes", "fetch it again"),
    "special-file": ("error", "not a regular file", "remove it from the directory"),
    "name-too-long": ("error", "a name that leaves no room for its mask's", "rename the picture"),
    "dangling-link": ("error", "a link to nothing", "remove the link, or bring back its target"),
    "link-loop": ("error", "links that lead to each other", "remove them"),
    "link-outside": ("info", "a link to a file outside the source", "nothing, when that is meant"),
    "directory-loop": ("warning", "a link to a directory of the same source", "nothing; it is read once"),
    "hidden-file": ("info", "a hidden picture, left out", "rename it to use it"),
    "empty-source": ("warning", "a source without any picture that is taken", "look at its path, and at include and "
                     "exclude; of tars, name the files"),
    "cache-inside": ("warning", "a latent cache among the pictures, left out", "keep caches outside the pictures"),
    "unsupported-format": ("info", "a kind of picture that is not read; an error where an extra would read it",
                           "install the extra that is named, or convert it to PNG, JPEG or WebP"),
    "wrong-extension": ("info", "the extension does not fit the content", "rename it, if other tools are to read it"),
    # tars
    "path-traversal": ("error", "a tar's member would land outside its directory when unpacked", "make the tar again"),
    "packed-archive": ("error", "a compressed tar", "unpack it to a plain .tar"),
    "not-an-archive": ("error", "the content is no tar", "fetch it again"),
    "empty-archive": ("warning", "a tar without members", "remove it"),
    "archive-unended": ("warning", "a tar without its end mark: perhaps cut", "fetch it again, or count its samples"),
    "bad-archive": ("error", "a tar that takes too long or too much memory to list, or crashes its reader",
                    "make the tar again"),
    "duplicate-key": ("warning", "a key comes again in its tar; the first is used", "make the tar again"),
    # pictures that cannot be used
    "not-an-image": ("error", "the content is no picture", "fetch it again, or remove it"),
    "unreadable": ("error", "the picture's header cannot be understood", "open it in an editor and save it again"),
    "truncated": ("error", "the file ends too early", "fetch it again"),
    "corrupt-data": ("error", "the picture's data is damaged", "fetch it again"),
    "decoder-hung": ("error", "decoding takes longer than any picture should", "save it again, or remove it"),
    "decoder-crashed": ("error", "the decoder crashes on it, or takes all memory", "save it again, or remove it"),
    "too-many-pixels": ("error", "more pixels than can be decoded safely", "make it smaller"),
    "odd-colours": ("error", "a color mode or range that has no one meaning", "save it as 8-bit RGB"),
    # pictures that can
    "bad-checksum": ("warning", "a stored checksum does not match", "save it again, or fetch it again"),
    "missing-eoi": ("warning", "JPEG without its end marker", "fetch it again, if you can"),
    "trailing-data": ("info", "bytes after the picture's end", "nothing"),
    "metadata-bomb": ("info", "a comment of absurd size, ignored", "nothing"),
    "many-pixels": ("warning", "unusually many pixels", "make it smaller; decoding takes much memory"),
    "not-rgb": ("info", "CMYK colors, converted", "nothing; compare the colors if they matter"),
    "high-bit-depth": ("info", "more than 8 bits per channel, reduced", "nothing"),
    "low-bit-depth": ("info", "fewer than 8 bits per channel", "nothing"),
    "palette": ("info", "a palette of at most 256 colors", "nothing"),
    "grayscale": ("info", "no colors", "nothing, when that is meant"),
    "has-alpha": ("warning", "transparency, flattened onto a color", "choose the color: [image] alpha"),
    "fully-transparent": ("warning", "transparent everywhere", "remove it"),
    "blank": ("warning", "all pixels are the same", "remove it"),
    "animated": ("warning", "several frames, the first is used", "nothing, or save the frame you want"),
    "multi-page": ("warning", "several pages, the first is used", "nothing, or save the page you want"),
    "exif-invalid": ("info", "invalid EXIF, taken as upright", "look whether the picture stands upright"),
    "non-srgb-profile": ("info", "another color space, converted to sRGB", "nothing"),
    "invalid-profile": ("warning", "an unusable color profile, taken as sRGB", "compare the colors if they matter"),
    "too-small": ("warning", "below 32 pixels a side; an error where no bucket takes it", "remove it"),
    "extreme-aspect": ("warning", "longer than any bucket", "crop it"),
    # copies
    "exact-duplicate": ("warning", "same bytes as another file", "remove one, or use repeats"),
    "pixel-duplicate": ("warning", "same pixels as another file", "remove one, or use repeats"),
    "near-duplicate": ("warning", "nearly the same picture as another file", "remove one, when that is not meant"),
    "mirrored-duplicate": ("info", "mirror image of another file", "nothing, when that is meant"),
    "duplicates-skipped": ("info", "too many pictures to look for all near-duplicates", "scan a part of them"),
    # captions
    "missing-caption": ("warning", "picture without a caption", "write one, or choose --missing-caption"),
    "empty-caption": ("warning", "caption without text", "write one, or choose --missing-caption"),
    "caption-encoding": ("error", "caption is not UTF-8", "save it as UTF-8"),
    "caption-utf16": ("warning", "caption is UTF-16; read, though other tools do not", "save it as UTF-8"),
    "caption-bom": ("info", "caption starts with a byte order mark, left out", "nothing"),
    "caption-control-characters": ("error", "control characters in a caption", "save it as plain text"),
    "caption-json": ("error", "a JSON caption that cannot be understood", 'write {"caption": "…"}'),
    "caption-multiline": ("info", "several lines, each a caption", 'nothing, or [caption] lines = "join"'),
    "caption-over-limit": ("warning", "more tokens than the model's text encoder takes", "shorten it"),
    "caption-too-long": ("warning", "longer than any text encoder takes", "shorten it"),
    "orphan-caption": ("warning", "caption without a picture", "remove it, or look for its picture"),
    "second-caption": ("info", "a second caption file, not used", "keep one of the two"),
    "bad-json": ("warning", "JSON beside a caption that cannot be parsed; not used", "fetch it again, or remove it"),
    "bad-table": ("error", "a table of captions, or a row of it, that cannot be used", "mend the table"),
    "table-without-picture": ("warning", "rows of a table name pictures that are not there", "look for the pictures"),
    "stem-collision": ("warning", "two pictures of one name share caption and mask", "rename one"),
    # masks
    "mask-size-mismatch": ("error", "mask and picture differ in shape", "make the mask again"),
    "mask-resized": ("info", "mask and picture differ in size, not in shape", "nothing"),
    "mask-empty": ("warning", "mask is black everywhere: nothing is trained", "paint it, or remove the picture"),
    "mask-full": ("info", "mask is white everywhere", "nothing; it is the same as none"),
    "mask-inverted": ("warning", "mask is white around a black middle", "invert it, when that is not meant"),
    "mask-not-gray": ("warning", "mask has colors or transparency", "save it as gray"),
    "orphan-mask": ("warning", "mask without a picture", "remove it, or look for its picture"),
    "masks-unused": ("info", "masks lie beside the pictures and are not used", "--mask sidecar"),
    # said by bucketing and encoding, not by a scan
    "heavy-crop": ("warning", "more of a picture is cut away than wanted", "crop it by hand, or more buckets"),
    "heavy-upscale": ("warning", "a picture is enlarged more than wanted", "remove it, or [image] upscale"),
    "small-bucket": ("warning", "a bucket of fewer pictures than wanted", "add pictures, or merge buckets"),
    "changed-meanwhile": ("error", "the file changed while it was encoded", "encode again"),
    "not-finite": ("error", "the model gives no finite latent", "look at the picture, or encode in float32"),
    "not-encoded": ("error", "a row could not be made", "see why in the finding, and encode again"),
    "prompt-not-encoded": ("warning", "a sample prompt could not be encoded", "see why, and encode again"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is to be said of one file."""

    path: str  # the item's name, with its source before it where a recipe has several; or a path as the user knows it
    code: str  # stable, kebab-case
    severity: Severity
    detail: str  # for people: what was seen, what was wanted
    other: str | None = None  # of a duplicate: the path of the picture that it resembles; no table on disk has it
    likeness: float | None = None  # of a duplicate: the correlation of the two, at most 1; 1: the same pixels

    def as_json(self) -> dict[str, Any]:
        """The finding in every document of `--json`; `other` and `likeness` only where it has them."""
        document: dict[str, Any] = {"path": self.path, "code": self.code, "severity": self.severity,
                                    "detail": self.detail}
        if self.other is not None:
            document["other"] = self.other
        if self.likeness is not None:
            document["likeness"] = self.likeness
        return document


def rejected_line(found: Finding) -> str:
    """The line about a picture that is left out."""
    return f"rejected: {shell_name(found.path)}: {found.code}: {printable(found.detail)}"


def rejected_lines(found: Sequence[Finding], *, every: bool = False) -> list[str]:
    """The lines about several; unless `every`, of more than `REJECTED` the first, and how many have which code."""
    lines = [rejected_line(one) for one in (found if every else found[:REJECTED])]
    if len(found) > len(lines):
        sums = ", ".join(f"{grouped(count)} {code}" for code, count in Counter(one.code for one in found).most_common())
        lines.append(f"and {grouped(len(found) - REJECTED)} more; in all: {sums}; --json lists all by name")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    """Which findings a scan tells; decides no row."""

    ignore: tuple[str, ...] = ()  # codes of findings that are not told
    severity: tuple[tuple[str, str], ...] = ()  # code and how bad it is: error, warning or info


def finding(path: str, code: str, detail: str, *, as_error: bool = False, other: str | None = None,
            likeness: float | None = None) -> Finding:
    """A finding as severe as its code is; `as_error` makes it an error."""
    return Finding(path=path, code=code, severity="error" if as_error else CODES[code][0], detail=detail, other=other,
                   likeness=likeness)


def parse_code(value: Any, where: str) -> str:
    """`value` when it is the code of a finding. Raises `Unparsed`."""
    code = expect(value, str, where)
    if code not in CODES:
        raise Unparsed(f"{where} has {brief(code)}, expected a finding's code{suggest(code, CODES)}")
    return code


def apply_policy(findings: Iterable[Finding], choice: ScanOptions, *, select: Collection[str] = (),
                 ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings that are told, as severe as `choice` says; `select` (none: all) stands above what it ignores."""
    severity: dict[str, Any] = dict(choice.severity)
    left_out = {*ignore, *(code for code in choice.ignore if code not in select)}
    return tuple(replace(one, severity=severity.get(one.code, one.severity)) for one in findings
                 if one.code not in left_out and (not select or one.code in select))
