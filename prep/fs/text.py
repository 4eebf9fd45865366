"""Reads text files that people write, and TOML: UTF-8, with or without the byte order mark that Windows editors add."""

from __future__ import annotations

import codecs
import errno
import re
import tomllib
from pathlib import Path
from typing import Any

from prep.errors import ConfigError
from prep.fs.blob import TooLarge as TooLarge
from prep.fs.blob import open_file
from prep.fs.untrusted import read_up_to
from prep.parse import Unparsed

MOST_BYTES = 1 << 24  # of a recipe or settings; even one that lists every directory by hand has a hundredth of that


def read_text(path: Path, *, most: int = MOST_BYTES, regular: bool = False) -> str:
    """The text of a small file. Raises as `read_small` does, and `Unparsed` if it is not UTF-8."""
    return decode_text(read_small(path, most=most, regular=regular))


def read_small(path: Path, *, most: int = MOST_BYTES, regular: bool = False) -> bytes:
    """The bytes of a small file that a person names. Raises `OSError`; `TooLarge` above `most` bytes.

    The file may be a pipe: `train run -c <(make-settings)`. `regular` accepts only a regular file, for paths that come
    from another file.
    """
    with open_file(path) if regular else path.open("rb") as stream:
        data = read_up_to(stream, most + 1)
    if len(data) > most:
        raise TooLarge(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def decode_text(data: bytes, wanted: str = "UTF-8 text") -> str:
    """The text in `data`, without its byte order mark. Raises `Unparsed`, which names `wanted`, if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unparsed(f"byte {error.start} is not UTF-8, expected {wanted}") from None


def without_mark(data: bytes) -> bytes:
    """`data` without the UTF-8 byte order mark, if it starts with one."""
    return data.removeprefix(codecs.BOM_UTF8)


def parse_toml(text: str, where: str, *, hint: str = "") -> dict[str, Any]:
    """The tables of the TOML document `text`. Raises `ConfigError`, whose hint says how such a line is written, and
    then `hint`."""
    try:
        if long := _LONG_KEY.search(text):  # tomllib takes time with the square of a key's parts
            raise ValueError(f"a key has more than {KEY_PARTS} parts (line {text.count(chr(10), 0, long.start()) + 1})")
        return tomllib.loads(text)
    except RecursionError as error:
        fault = str(error)
    except ValueError as error:  # also for numbers with more digits than Python parses
        fault = str(error)
    raise ConfigError(f"{where} is not TOML: {fault}", hint="; ".join(filter(None, (_toml_advice(text, fault), hint))))


KEY_PARTS = 64  # of a dotted key, as in a.b.c
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(rf"(?<![\w\"'-])(?:{_PART}){{{KEY_PARTS}}}")


def _toml_advice(text: str, fault: str) -> str:
    """How the line that the message `fault` names is written, for the mistakes that people make most."""
    place = re.search(r"\(at line ([0-9]+)", fault)
    line = text.split("\n")[int(place[1]) - 1] if place else ""
    if re.search(r'"[^"]*\\', line):
        return r"a path with backslashes stands in single quotes, 'D:\pictures', or is written with /"
    if re.search(r"=\s*(True|False|None)\b", line):
        return "TOML writes true and false in lower case; without a value, leave the line out"
    if fault.startswith("Cannot declare"):
        return "a section stands once in a file; beside lines like lora.rank = 16, write lora.alpha = 8, and no section"
    return 'a line is like lr = 1e-4 or name = "adamw"'
