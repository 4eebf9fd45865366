"""Defines the codes of findings: severity, meaning and advice. Codes are stable: scripts match on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from prep.formatting import grouped, printable, shell_name
from prep.parse import Unparsed, brief, expect, list_of, one_of, suggest
from prep.setting import setting

T = TypeVar("T")
Severity = Literal["error", "warning", "info"]
LISTED = 20  # findings of each code that are listed by name, unless all are asked for
SEVERITIES = ("error", "warning", "info")

# code: (severity, what it means, what to do)
CODES: dict[str, tuple[Severity, str, str]] = {
    # files
    "unreadable-file": ("error", "the file cannot be read", "check its permissions and the disk"),
    "too-large": ("error", "above 1 GiB, or more than memory holds", "make it smaller"),
    "empty-file": ("error", "the file has 0 bytes", "download it again"),
    "special-file": ("error", "not a regular file", "remove it from the directory"),
    "name-too-long": ("error", "the name is too long for a mask of that name", "rename the picture"),
    "dangling-link": ("error", "a broken link", "remove the link, or restore its target"),
    "link-loop": ("error", "links that point to each other", "remove them"),
    "link-outside": ("info", "a link to a file outside the source", "nothing, if intended"),
    "directory-loop": ("warning", "a link to a directory of the same source; read once", "nothing"),
    "hidden-file": ("info", "a hidden picture, skipped", "rename it to use it"),
    "directory-object": ("info", "an object of a store that is called like a directory, and is no picture; skipped",
                         "rename it to use it"),
    "empty-source": ("warning", "no picture of a source is used", "check its path, include and exclude; name each "
                     "tar"),
    "shared-source": ("warning", "pictures that two sources have; each is a sample of both", "name each "
                      "directory once, or use include and exclude"),
    "cache-inside": ("warning", "a latent cache among the pictures, skipped", "keep caches outside the pictures"),
    "unsupported-format": ("info", "a picture format that is not read; an error if an extra reads it",
                           "install the named extra, or convert it to PNG, JPEG or WebP"),
    "wrong-extension": ("info", "the extension does not match the content", "rename it, if other tools should read it"),
    # tars
    "path-traversal": ("error", "a member of a tar that would be unpacked outside the directory", "make the tar again"),
    "packed-archive": ("error", "a compressed tar", "unpack it to a plain .tar"),
    "not-an-archive": ("error", "not a tar", "download it again"),
    "empty-archive": ("warning", "a tar without members", "remove it"),
    "archive-unended": ("warning", "a tar without its end marker; it may be cut off",
                        "download it again, or count its samples"),
    "bad-archive": ("error", "a tar that takes too long or too much memory to list, or crashes its reader",
                    "make the tar again"),
    "duplicate-key": ("warning", "a duplicate key in a tar; the first is used", "make the tar again"),
    # pictures that cannot be used
    "not-an-image": ("error", "not a picture", "download it again, or remove it"),
    "unreadable": ("error", "the picture's header cannot be parsed", "open it in an editor and save it again"),
    "truncated": ("error", "the file ends too early", "download it again"),
    "corrupt-data": ("error", "the picture's data is damaged", "download it again"),
    "decoder-hung": ("error", "decoding takes too long", "save it again, or remove it"),
    "decoder-crashed": ("error", "the decoder crashes or runs out of memory", "save it again, or remove it"),
    "too-many-pixels": ("error", "more pixels than can be decoded safely", "make it smaller"),
    "odd-colours": ("error", "ambiguous color mode or value range", "save it as 8-bit RGB"),
    # pictures that can
    "bad-checksum": ("warning", "a stored checksum does not match", "save it again, or download it again"),
    "missing-eoi": ("warning", "JPEG without its end marker", "download it again, if you can"),
    "trailing-data": ("info", "bytes after the picture's end", "nothing"),
    "metadata-bomb": ("info", "an oversized comment, ignored", "nothing"),
    "many-pixels": ("warning", "unusually many pixels", "make it smaller; decoding takes much memory"),
    "not-rgb": ("info", "CMYK colors, converted", "nothing; compare the colors if they matter"),
    "high-bit-depth": ("info", "more than 8 bits per channel, reduced", "nothing"),
    "low-bit-depth": ("info", "fewer than 8 bits per channel", "nothing"),
    "palette": ("info", "a palette of at most 256 colors", "nothing"),
    "grayscale": ("info", "no colors", "nothing, if intended"),
    "has-alpha": ("warning", "transparency, flattened onto a color unless it is kept", "choose: [image] alpha"),
    "fully-transparent": ("warning", "entirely transparent", "remove it"),
    "blank": ("warning", "all pixels are the same", "remove it"),
    "animated": ("warning", "several frames, the first is used", "nothing, or save the frame you want"),
    "multi-page": ("warning", "several pages, the first is used", "nothing, or save the page you want"),
    "exif-invalid": ("info", "invalid EXIF, taken as upright", "check that the picture is upright"),
    "non-srgb-profile": ("info", "another color space, converted to sRGB", "nothing"),
    "invalid-profile": ("warning", "an unusable color profile, taken as sRGB", "compare the colors if they matter"),
    "too-small": ("warning", "below 32 pixels on a side, or 64 of a reference; an error if no bucket fits",
                  "remove it"),
    "extreme-aspect": ("warning", "longer than any bucket", "crop it"),
    # pictures that one may not want
    "dark": ("info", "hardly a pixel is brighter than a third", "nothing, if intended"),
    "light": ("info", "nearly all pixels are almost white", "nothing, if intended"),
    "blurred": ("info", "few sharp edges, even at 512 pixels", "remove it, unless intended"),
    "low-information": ("info", "few gray levels, as in a plain or nearly empty picture", "nothing, if intended"),
    "plain-border": ("info", "solid bars at the edges (letterboxing)", "crop it"),
    "heavy-compression": ("info", "JPEG below quality 50", "find a better copy"),
    # copies
    "exact-duplicate": ("warning", "same bytes as another file", "remove one, or use repeats"),
    "pixel-duplicate": ("warning", "same pixels as another file", "remove one, or use repeats"),
    "near-duplicate": ("warning", "nearly the same picture as another file", "remove one, unless intended"),
    "mirrored-duplicate": ("info", "mirror image of another file", "nothing, if intended"),
    "duplicates-skipped": ("info", "too many pictures to compare all for near-duplicates", "scan fewer at a time"),
    # from embeddings
    "semantic-duplicate": ("info", "shows nearly the same as another picture, by their embeddings",
                           "keep one, or nothing, if intended"),
    "validation-leak": ("info", "a held-out picture shows nearly the same as one that trains",
                        "hold out both, or neither"),
    "outlier": ("info", "a picture that resembles none of the set", "look at it; nothing, if intended"),
    "dominant-cluster": ("info", "similar pictures take much of an epoch", "fewer repeats of them, or more others"),
    "uniform-source": ("info", "all pictures of a source resemble one another", "nothing, if it is of one subject"),
    "caption-misfit": ("info", "a caption fits many random pictures better than its own", "read it beside its picture"),
    "neighbors-limited": ("info", "too many pictures to compare all with all", "nothing"),
    # captions
    "missing-caption": ("warning", "picture without a caption", "write one, make it with prep caption, or choose "
                        "--missing-caption"),
    "empty-caption": ("warning", "caption without text", "write one, or choose --missing-caption"),
    "caption-encoding": ("error", "caption is not UTF-8", "save it as UTF-8"),
    "caption-utf16": ("warning", "caption is UTF-16; read, though other tools do not", "save it as UTF-8"),
    "caption-bom": ("info", "caption starts with a byte order mark, ignored", "nothing"),
    "caption-control-characters": ("error", "control characters in a caption", "save it as plain text"),
    "caption-json": ("error", "a JSON caption that cannot be parsed", 'write {"caption": "…"}'),
    "caption-multiline": ("info", "several lines, each a caption", 'nothing, or [caption] lines = "join"'),
    "caption-over-limit": ("warning", "more tokens than the model's text encoder takes; the rest is cut off",
                           "shorten it, or --text-windows, --max-length"),
    "caption-over-one-limit": ("info", "more tokens than one of several text encoders takes; another reads all",
                               "nothing"),
    "caption-too-long": ("warning", "longer than any text encoder takes", "shorten it"),
    "odd-length": ("info", "a caption far shorter or longer than the others", "nothing, if intended"),
    "not-captioned": ("error", "prep caption got no answer about the picture", "run the same command again"),
    "caption-refused": ("warning", "a model refused to describe the picture, which got no caption from it",
                        "write one, or ask another model, or with another --prompt"),
    "caption-cut": ("warning", "a model's caption was cut off at its most tokens", "--max-tokens, or a --prompt for a "
                    "shorter one"),
    "caption-repeated": ("warning", "a model said the same about many pictures", "look at them: prep view --edit; try "
                         "another model or --prompt"),
    "orphan-caption": ("warning", "caption without a picture", "remove it, or find its picture"),
    "second-caption": ("info", "a second caption file, not used", "keep one of the two"),
    "bad-json": ("warning", "JSON beside a caption cannot be parsed; not used", "download it again, or remove it"),
    "bad-table": ("error", "a table of captions, or a row of it, that cannot be used", "fix the table"),
    "duplicate-row": ("warning", "a second row of a picture in tables of captions; the first is used",
                      "remove one of the rows"),
    "table-without-picture": ("warning", "rows of a table name pictures that do not exist",
                              "find the pictures, or remove the rows"),
    "stem-collision": ("warning", "two pictures with the same name share caption and mask", "rename one"),
    "too-many-references": ("error", "a picture has more references than its model takes", "leave some out"),
    # masks
    "mask-size-mismatch": ("error", "mask and picture differ in shape", "make the mask again"),
    "mask-resized": ("info", "mask and picture differ in size, not in shape", "nothing"),
    "missing-mask": ("error", "a picture without a mask, which its model is to paint into", "make one: prep mask, or "
                     "prep view --edit; or let it be drawn by chance: --missing-mask draw"),
    "mask-empty": ("warning", "mask is entirely black: nothing trains, or is painted",
                   "paint it, or remove the picture"),
    "mask-full": ("info", "mask is entirely white", "nothing; it has no effect, or all is painted"),
    "mask-inverted": ("warning", "mask is white around a black middle", "invert it, unless intended"),
    "mask-not-gray": ("warning", "mask has colors or transparency", "save it as gray"),
    "second-mask": ("warning", "a second mask of a picture, not used", "keep one of the two"),
    "orphan-mask": ("warning", "mask without a picture", "remove it, or find its picture"),
    "masks-unused": ("info", "masks beside the pictures are not used", "--mask sidecar"),
    # references
    "missing-reference": ("error", "a picture without a reference that its recipe asks for",
                          'add it, or [references] missing = "none"'),
    "reference-size-mismatch": ("error", "the pictures of a pair differ in shape", "crop both alike"),
    "same-reference": ("error", "both pictures of a pair are the same", "replace one of them"),
    "second-reference": ("warning", "a second reference of a name in one directory, not used", "keep one of the two"),
    "orphan-reference": ("warning", "reference without a picture", "remove it, or find its picture"),
    # from importing latents that another program cached
    "no-latents": ("error", "a picture without a cache of latents beside it", "prep encode encodes it"),
    "stale-latents": ("error", "latents of a picture of another size", "make them again, or prep encode"),
    "bad-latents": ("error", "a cache of latents that is damaged, or not as sd-scripts makes them",
                    "make it again, or prep encode"),
    "latents-shared": ("error", "two pictures of one stem share a cache of latents", "rename one, and make both again"),
    "latents-unused": ("info", "another cache of latents of the same picture", "remove what is stale"),
    # from bucketing and encoding, not from a scan
    "heavy-crop": ("warning", "more of a picture is cropped than --max-crop", "crop it by hand, or use more buckets"),
    "heavy-upscale": ("warning", "a picture is enlarged more than --max-upscale", "remove it, or set [image] upscale"),
    "small-bucket": ("warning", "a bucket with fewer pictures than min_bucket", "add pictures, or merge buckets"),
    "changed-meanwhile": ("error", "the file changed while it was encoded", "encode again"),
    "not-finite": ("error", "the latent is not finite", "check the picture, or encode with --compute float32"),
    "not-encoded": ("error", "a row could not be encoded", "fix what the finding says, and encode again"),
    "not-embedded": ("warning", "the embedding of a picture could not be made; training needs none",
                     "encode again with --retry-rejects, or nothing"),
    "prompt-over-limit": ("warning", "a sample prompt has more tokens than the text encoder takes",
                          "shorten it, or --text-windows, --max-length"),
    "prompt-not-encoded": ("warning", "a sample prompt could not be encoded",
                           "fix what the finding says, and encode again"),
}

CHOSEN = {"duplicate-row", "duplicate-key", "stem-collision", "shared-source", "second-mask",
          "second-reference"}  # one of several is used


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding about one file."""

    path: str  # the item's name, with its source before it where a recipe has several; or a path as the user knows it
    code: str  # stable, kebab-case
    severity: Severity
    detail: str  # for people: what was seen, what was wanted
    other: str | None = None  # of a duplicate: the path of the picture that it resembles; no table on disk has it
    likeness: float | None = None  # of a duplicate: the correlation of the two, at most 1; 1: the same pixels

    def as_json(self) -> dict[str, Any]:
        """The finding as in every `--json` document; `other` and `likeness` only if it has them."""
        document: dict[str, Any] = {"path": self.path, "code": self.code, "severity": self.severity,
                                    "detail": self.detail}
        if self.other is not None:
            document["other"] = self.other
        if self.likeness is not None:
            document["likeness"] = self.likeness
        return document


def rejected_line(finding: Finding) -> str:
    """The line about a skipped picture; of one that is used all the same, it begins with how severe that is."""
    begins = "rejected" if finding.severity == "error" else finding.severity
    return f"{begins}: {shell_name(finding.path)}: {finding.code}: {printable(finding.detail)}"


def rejected_lines(findings: Sequence[Finding], *, every: bool = False) -> list[str]:
    """The lines about skipped pictures; unless `every`, the first of each code, then a count by code."""
    shown, rest = (findings, "") if every else first_of_each([finding.code for finding in findings], findings)
    return [*map(rejected_line, shown), *([rest] if rest else [])]


def first_of_each(codes: Sequence[str], items: Sequence[T]) -> tuple[Sequence[T], str]:
    """(the first `LISTED` of each code, a line that counts all by code; "" if that is all)."""
    seen: Counter[str] = Counter()
    shown = []
    for code, item in zip(codes, items, strict=True):
        seen[code] += 1
        if seen[code] <= LISTED:
            shown.append(item)
    sums = ", ".join(f"{grouped(count)} {code}" for code, count in seen.most_common())
    more = len(items) - len(shown)
    return shown, f"and {grouped(more)} more; in all: {sums}; --all lists all by name" if more else ""


def parse_code(value: Any, where: str) -> str:
    """`value`, if it is the code of a finding. Raises `Unparsed`."""
    code = expect(value, str, where)
    if code not in CODES:
        raise Unparsed(f"{where} has {brief(code)}, expected a finding's code{suggest(code, CODES)}")
    return code


def codes_check(value: Any, where: str) -> tuple[str, ...]:
    """Checks a list of codes. Raises `Unparsed`."""
    return tuple(list_of(value, parse_code, where))


def severities_check(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Checks a table of severities by code. Raises `Unparsed`."""
    return tuple((parse_code(code, where), one_of(kind, SEVERITIES, f"{where}.{code}"))
                 for code, kind in expect(value, dict, where).items())


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    """Which findings a scan reports, and how severe they are; no row depends on it."""

    ignore: tuple[str, ...] = setting((), check=codes_check, values="a list of codes",
                                      help="codes of findings that prep scan does not report")
    severity: tuple[tuple[str, str], ...] = setting((), check=severities_check, values="a table",
                                                    help="severity of findings, by code: {near-duplicate = \"error\"}")


def finding(path: str, code: str, detail: str, *, as_error: bool = False, other: str | None = None,
            likeness: float | None = None) -> Finding:
    """A finding with the severity of its code; `as_error` makes it an error."""
    return Finding(path=path, code=code, severity="error" if as_error else CODES[code][0], detail=detail, other=other,
                   likeness=likeness)


def apply_policy(findings: Iterable[Finding], choice: ScanOptions, *, select: Collection[str] = (),
                 ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings to report, with severities from `choice`; `select` (empty: all) overrides what `choice` ignores."""
    severity: dict[str, Any] = dict(choice.severity)
    left_out = {*ignore, *(code for code in choice.ignore if code not in select)}
    return tuple(replace(finding, severity=severity.get(finding.code, finding.severity)) for finding in findings
                 if finding.code not in left_out and (not select or finding.code in select))
