"""Checks values from JSON and TOML; each message names the field, the value found and what was expected."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from prep.digest import canonical, digest_json

T = TypeVar("T")


class Unparsed(ValueError):
    """A value is not as expected; callers convert this to their own kind of error."""


def expect(value: Any, kind: type[T], where: str) -> T:
    """`value`, if its type is exactly `kind` (a bool is not an int; an int is accepted as a float)."""
    if kind is float and type(value) is int and abs(value) < 1 << 1023:  # larger integers do not fit a float
        return float(value)  # type: ignore[return-value]
    if type(value) is not kind:
        raise Unparsed(f"{where} is {brief(value)}, expected {_NAMES.get(kind, kind.__name__)}")
    return value


class Repeated(dict[str, Any]):
    """A JSON object with a name more than once; the last value is that of the dict."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self.pairs = list(pairs)
        super().__init__(self.pairs)
        counts = Counter(name for name, _ in self.pairs)
        self.repeated = {name for name, count in counts.items() if count > 1}


def keep_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `json`, which drops all but the last value of a name."""
    table = dict(pairs)
    return table if len(table) == len(pairs) else Repeated(pairs)


_NAMES: dict[type, str] = {str: "a string", int: "a whole number", float: "a number", bool: "true or false",
                           dict: "a table", list: "a list"}


def one_of(value: Any, choices: Iterable[str], where: str) -> str:
    """`value`, if it is one of `choices`."""
    options = list(choices)
    if value not in options or not isinstance(value, str):
        near = suggest(value, options) if isinstance(value, str) else ""
        raise Unparsed(f"{where} is {brief(value)}, expected one of: {', '.join(options)}{near}")
    return value


def brief(value: Any) -> str:
    """`value` as shown in messages: shortened, because it may come from an untrusted file."""
    try:
        spelled = repr(value[:BRIEF]) if isinstance(value, str) else repr(value)
    except ValueError:  # TOML and YAML spell numbers in hex that have more digits than Python writes
        return "a number of thousands of digits" if isinstance(value, int) else "a value with such a number"
    return spelled if isinstance(value, str) or len(spelled) <= BRIEF else f"{spelled[:BRIEF]}…"


BRIEF = 80  # characters


def color_of(text: str, where: str = "color", *, also: tuple[str, ...] = ()) -> RGB:
    """(red, green, blue) of `#rrggbb` or a name in `COLORS`; the message also lists the choices in `also`."""
    if text in COLORS:
        return COLORS[text]
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise Unparsed(f"{where} is {text!r}, expected #rrggbb, {', '.join((*COLORS, *also))}")
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def alpha_of(text: str, where: str = "alpha") -> Alpha | None:
    """What becomes of transparency, by the setting of a recipe; `None`: it is refused. Raises `Unparsed`."""
    if text == REFUSED:
        return None
    return KEPT if text == KEPT else color_of(text, where, also=(KEPT, REFUSED))


def alpha_setting(alpha: Alpha | None) -> str:
    """The setting that `alpha_of` reads as `alpha`."""
    if alpha is None or alpha == KEPT:
        return alpha or REFUSED
    return "#{:02x}{:02x}{:02x}".format(*alpha)


def color_below(alpha: Alpha | None) -> RGB | None:
    """The color below transparency for what takes no transparent pictures: white where it is kept, as the pipeline of
    Qwen-Image-2.1 shows them to its text encoder; `None`: it is refused."""
    return COLORS["white"] if alpha == KEPT else alpha


def bytes_of(text: str) -> int:
    """A number of bytes from a text like 200GB or 1.5 TiB; units are powers of 1024. Raises `Unparsed`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([KMGTP]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise Unparsed(f"is {brief(text)}, expected a size like 200GB or 2TB")
    return int(float(match[1]) * (1 << 10 * (" KMGTP".index(match[2].upper()) if match[2] else 0)))


def seconds_of(text: str) -> float:
    """The seconds of a text like 30ms, 30 (milliseconds) or 0.1s. Raises `Unparsed`."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?(ms|s|)", text)
    if not match:
        raise Unparsed(f"is {brief(text)}, expected a time like 30ms or 0.1s")
    return float(match[1]) * (1 if match[2] == "s" else 1e-3)


def parse_size(text: str, where: str) -> tuple[int, int]:
    """(width, height) of `1024x768`."""
    parts = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if not parts:
        raise Unparsed(f"{where} has {brief(text)}, expected a width and a height in pixels, like 1024x768")
    return int(parts[1]), int(parts[2])


def rgb_of(value: Any, where: str) -> RGB:
    """`value` as (red, green, blue), if it is a list of those, each from 0 to 255."""
    parts = list_of(value, lambda part, at: expect(part, int, at), where)
    if len(parts) != 3 or not all(0 <= part <= 255 for part in parts):
        raise Unparsed(f"{where} is {parts}, expected red, green and blue from 0 to 255")
    return parts[0], parts[1], parts[2]


RGB = tuple[int, int, int]
KEPT: Literal["keep"] = "keep"
REFUSED = "reject"
Alpha = RGB | Literal["keep"]  # what becomes of transparency: a color replaces it, or the VAE is given it, too
COLORS = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (128, 128, 128), "grey": (128, 128, 128)}


def within(value: float, low: float, high: float, where: str) -> None:
    """Raises `Unparsed` if `value` is outside [low, high]."""
    if not low <= value <= high:
        raise Unparsed(f"{where} is {brief(value)}, expected a number from {low} to {high}")


def known_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises `Unparsed` for the first unknown key of `table`, with the most similar known key."""
    options = list(known)
    for key in table:
        if key not in options:
            wanted = f"known are: {', '.join(sorted(options))}"
            raise Unparsed(f"unknown key '{key[:BRIEF]}' in {where}{suggest(key, options)} ({wanted})")


def suggest(word: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or "" if no option is similar."""
    near = closest(word, options)
    return f"; did you mean '{near}'?" if near else ""


def closest(word: str, options: Iterable[str]) -> str:
    """The option that is similar to `word`, in upper or lower case, or that alone begins with it; else ""."""
    if len(word) > LONG:
        return ""
    known = {option.lower(): option for option in options}
    low = word.lower()
    near = difflib.get_close_matches(low, known, n=1) or [name for name in known if name.startswith(low)]
    return known[near[0]] if word and len(near) == 1 else ""


LONG = 1 << 10  # characters; a longer word is not a typing error


def digest_of(value: Any, where: str) -> str:
    """`value`, if it is 64 lower-case hex digits: only such strings may become paths in a cache."""
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise Unparsed(f"{where} is {brief(value)}, expected 64 lower-case hex digits")
    return value


def list_of(value: Any, each: Callable[[Any, str], T], where: str) -> list[T]:
    """The list `value` with `each` applied to every member."""
    return [each(inner, f"{where}[{number}]") for number, inner in enumerate(expect(value, list, where))]


def sealed_json(data: bytes, where: str) -> dict[str, Any]:
    """The document in `data`, if its bytes are canonical and its `self` digest matches. Raises `Unparsed`.

    This detects accidental edits; anyone can give an edited document its digest, so its values must still be checked.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"{where} is not JSON: {str(error)[:BRIEF]}") from None
    table: dict[str, Any] = expect(document, dict, where)
    if b"\\ud" in data or data.count(b"[") + data.count(b"{") > DEPTH:
        _check_inside(table, where)
    try:
        spelled = canonical(table)
    except (TypeError, RecursionError) as error:
        raise Unparsed(f"{where} is not canonical: {error}") from None
    if spelled != data:
        raise Unparsed(f"{where} is not in canonical form; it was edited or damaged")
    body = {key: value for key, value in table.items() if key != "self"}
    if table.get("self") != digest_json(body):
        raise Unparsed(f"{where} does not match its own digest; it was edited or damaged")
    return table


DEPTH = 16  # of nested tables and lists; Latentry's documents have 6 levels


def _check_inside(document: Any, where: str) -> None:
    """Raises `Unparsed` if a document is nested too deeply, or has a string that cannot be a file's name."""
    level = [document]
    for _ in range(DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _unicode(value, where)
        level = below
        if not level:
            return
    raise Unparsed(f"{where} has more than {DEPTH} levels of nesting")


def _unicode(text: str, where: str) -> None:
    """Raises `Unparsed` for unpaired surrogates, except those that encode bytes of a name that is not UTF-8."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Unparsed(f"{where} is {brief(text)}, expected a string without unpaired surrogates") from None


def count(value: Any, where: str, most: int = (1 << 53) - 1) -> int:
    """`value`, if it is a whole number from 0 to `most`; all JSON readers keep numbers up to the default exact."""
    number = expect(value, int, where)
    if not 0 <= number <= most:
        raise Unparsed(f"{where} is {brief(number)}, expected a count{'' if most >> 52 else f' of at most {most}'}")
    return number


def decimal(value: Any, where: str) -> str:
    """`value`, if it is a decimal number as a string: canonical JSON has no floats."""
    if not _NUMBER.fullmatch(expect(value, str, where)):
        raise Unparsed(f"{where} is {brief(value)}, expected a decimal number as a string")
    return str(value)


_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?(e-?[0-9]{1,2})?")


def relative(text: str, where: str) -> None:
    """Raises `Unparsed` unless `text` is a relative POSIX path that systems accept; it may contain `..`.

    That is needed for a cache on another disk, or a model beside the project. A directory there is opened as a cache or
    a model only if it is marked as one.
    """
    bad = not text or text.startswith("/") or "\\" in text or "\0" in text or ":" in text.split("/")[0]
    if bad or len(text) > PATH or max(map(len, text.split("/"))) > NAME:
        raise Unparsed(f"{where} is {brief(text)}, expected a path relative to the manifest")


PATH, NAME = 4096, 255  # most characters of a path, and of a name in it: Linux accepts no more bytes


def hub_id(text: str, where: str) -> str:
    """`text`, if it is a Hub id: `name` or `owner/name`, perhaps with `@` and a branch, tag or commit."""
    named, _, revision = text.partition("@")
    parts = named.split("/")
    fine = all(part and part.strip(".") and all(c.isascii() and (c.isalnum() or c in "-_.") for c in part)
               for part in (*parts, *(revision.split("/") if "@" in text else ())))
    if not fine or len(parts) > 2 or len(text) > 200:
        raise Unparsed(f"{where} is {text[:80]!r}, expected a Hub id like 'owner/name'")
    return text
