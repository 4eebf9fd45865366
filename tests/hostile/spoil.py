"""What may be wrong with a file that comes from outside: anywhere in its bytes, or where its format hurts most.

The second kind is mended afterwards (checksums, lengths), so that it is looked at and not refused at the door.
"""

from __future__ import annotations

import json
import re
import struct
import tomllib
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from mutations import LEAVES, PATHS, RAWS, mutate_json

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF,
           0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF)
Spoil = Callable[[bytearray, Random], None]


def some_bytes(data: bytes, rng: Random, other: bytes = b"") -> bytes:
    """`data` with one to four things wrong with it, anywhere; of `other`, a part may come in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if not out:
            return b""
        at = rng.randrange(len(out)) if rng.random() < 0.6 else rng.randrange(min(len(out), 64))
        end = min(len(out), at + rng.choice((1, 2, 4, 8, 16, 64, 300)))
        kind = rng.randrange(9)
        if kind <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            _number(out, at, rng)
        elif kind == 3:
            out[at:end] = rng.choice((bytes(end - at), b"\xff" * (end - at), rng.randbytes(end - at)))
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            out[at:at] = rng.randbytes(end - at)
        elif kind == 6:
            del out[at:end]
        elif kind == 7:
            out[at:at] = out[at:end] * rng.choice((1, 1, 2, 50))
        else:
            start = rng.randrange(len(other) + 1)
            out[at:] = other[start:] if rng.random() < 0.5 else other[start : start + 64] + out[end:]
    return bytes(out)


def _number(out: bytearray, at: int, rng: Random) -> None:
    """One of the numbers that programs forget, of 1 to 8 bytes, either way round."""
    size = rng.choice((1, 2, 2, 4, 4, 4, 8))
    value = rng.choice((*NUMBERS, rng.getrandbits(64))) & ((1 << 8 * size) - 1)
    out[at : at + size] = value.to_bytes(size, rng.choice(("big", "little")))


# ---- pictures --------------------------------------------------------------------------------------------------------


def _png(out: bytearray, rng: Random) -> None:
    """A chunk's data, length, kind or place; its checksum fits again."""
    chunks, at = [], 8
    while at + 12 <= len(out):
        length, kind = struct.unpack_from(">I4s", out, at)
        chunks.append([kind, bytes(out[at + 8 : at + 8 + length]), length])
        at += 12 + length
    number = rng.randrange(len(chunks))
    kind, data, _ = one = chunks[number]
    what = rng.choice(("data", "data", "data", "length", "kind", "twice", "drop", "swap", "size", "inside"))
    if what == "data" and data:
        one[1] = some_bytes(data, rng)[:1 << 16]
        one[2] = len(one[1])
    elif what == "length":
        one[2] = rng.choice(NUMBERS) & 0xFFFFFFFF
    elif what == "kind":
        one[0] = rng.choice((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT", b"iCCP", b"eXIf",
                             b"zTXt", b"iTXt", b"\0\0\0\0", b"idat"))
    elif what == "twice":
        chunks[number:number] = [list(one)] * rng.choice((1, 40))
    elif what == "drop":
        del chunks[number]
    elif what == "swap":
        other = rng.randrange(len(chunks))
        chunks[number], chunks[other] = chunks[other], one
    elif what == "size":
        head = bytearray(chunks[0][1])
        _number(head, rng.choice((0, 2, 4, 6, 8, 9, 10, 11, 12)), rng)
        chunks[0][1] = bytes(head[:13])
    elif kind == b"IDAT":  # what is in it is spoiled, and packed again
        one[1] = zlib.compress(some_bytes(zlib.decompress(data), rng))
        one[2] = len(one[1])
    out[8:] = b"".join(struct.pack(">I", length) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
                       for kind, data, length in chunks)


def _jpeg(out: bytearray, rng: Random) -> None:
    """A segment's length, marker, or what is in it."""
    places = [found.start() for found in re.finditer(rb"\xff[\xc0-\xfe]", bytes(out))]
    at = rng.choice(places)
    what = rng.randrange(5)
    if what == 0:
        out[at + 2 : at + 4] = struct.pack(">H", rng.choice(NUMBERS) & 0xFFFF)
    elif what == 1:
        out[at + 1] = rng.choice((*range(0xC0, 0xE3), 0xEE, 0xFE, 0xFF, 0x00))
    elif what == 2:
        _number(out, min(at + rng.randrange(2, 24), len(out) - 1), rng)
    elif what == 3:
        end = at + 2 + int.from_bytes(out[at + 2 : at + 4], "big")
        out[at:at] = out[at:end] * rng.choice((1, 3, 60))
    else:
        del out[at : at + rng.randrange(2, 40)]


def _tiff(out: bytearray, rng: Random) -> None:
    """Tag, type, count or value of an entry; or where the next directory is."""
    order = "<" if out[:2] == b"II" else ">"
    big = out[2:4] in (b"+\0", b"\0+")
    start = struct.unpack_from(order + ("Q" if big else "I"), out, 8 if big else 4)[0]
    if start + 8 > len(out):
        return
    entries = struct.unpack_from(order + ("Q" if big else "H"), out, start)[0]
    first, width = start + (8 if big else 2), 20 if big else 12
    at = first + width * rng.randrange(max(1, min(entries, 60)))
    field, size = rng.choice(((0, 2), (2, 2), (4, 8 if big else 4), (12, 8) if big else (8, 4)))
    if rng.random() < 0.1:
        at, field, size = first + width * min(entries, 60), 0, 8 if big else 4
        value = rng.choice((8, start, first, 0, 1 << 31))
    else:
        tags = (254, 256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339,
                347, 530, 34675, 33432, 50838)
        value = rng.choice(tags if field == 0 else range(20) if field == 2 else (*NUMBERS, start, len(out) - 1))
    if at + field + size <= len(out):
        out[at + field : at + field + size] = (value & ((1 << 8 * size) - 1)).to_bytes(
            size, "little" if order == "<" else "big")


def _riff(out: bytearray, rng: Random) -> None:
    """The size of a chunk, the canvas, the flags or a frame's place."""
    names = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF", b"EXIF", b"ICCP", b"RIFF")
    places = [found.start() for found in re.finditer(b"|".join(names), bytes(out))]
    at = rng.choice(places)
    what = rng.randrange(4)
    if what == 0:
        out[at + 4 : at + 8] = struct.pack("<I", rng.choice((*NUMBERS, 7, 9)) & 0xFFFFFFFF)
    elif what == 1:
        out[at : at + 4] = rng.choice(names)
    elif what == 2:
        out[at + 8 + rng.randrange(24)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    else:
        out[4:8] = struct.pack("<I", len(out) + rng.choice((-8, -1, 0, 8, -20)))
    del out[1 << 20 :]


def _boxes(out: bytearray, rng: Random) -> None:
    """The size or the content of a box of ISO media."""
    names = (b"ftyp", b"meta", b"hdlr", b"pitm", b"iloc", b"iinf", b"infe", b"iprp", b"ipco", b"ispe", b"pixi", b"av1C",
             b"ipma", b"iref", b"auxC", b"colr", b"mdat", b"moov", b"trak", b"stsz", b"stco", b"stts", b"irot", b"imir",
             b"hvcC", b"idat", b"jxlc", b"jxlp", b"JXL ", b"Exif", b"xml ", b"brob")
    places = [found.start() for found in re.finditer(b"|".join(names), bytes(out))]
    at = rng.choice(places)
    what = rng.randrange(4)
    if what == 0:
        out[at - 4 : at] = struct.pack(">I", rng.choice((*NUMBERS, 7, 9)) & 0xFFFFFFFF)
    elif what == 1:
        out[at : at + 4] = rng.choice(names)
    elif what == 2 or len(out) - at < 8:
        _number(out, min(at + 4 + rng.randrange(40), len(out) - 1), rng)
    else:
        size = int.from_bytes(out[at - 4 : at], "big")
        out[at - 4 : at - 4] = out[at - 4 : at - 4 + min(size, 4000)]


def _bitmap(out: bytearray, rng: Random) -> None:
    _number(out, rng.choice((10, 14, 18, 22, 26, 28, 30, 34, 46, 50, 54)), rng)


def _gif(out: bytearray, rng: Random) -> None:
    """The screen, the flags, or a block's head."""
    places = [6, 8, 10, 11, *(found.start() + rng.randrange(1, 11) for found in re.finditer(rb"[,!]", bytes(out)))]
    _number(out, min(rng.choice(places), len(out) - 1), rng)


_FORMATS: dict[bytes, Spoil] = {b"\x89PNG": _png, b"\xff\xd8": _jpeg, b"II": _tiff, b"MM": _tiff, b"RIFF": _riff,
                                b"BM": _bitmap, b"GIF8": _gif}


def picture(data: bytes, rng: Random, other: bytes) -> bytes:
    """A picture with something wrong with it, perhaps with a part of another one."""
    spoil = next((spoil for start, spoil in _FORMATS.items() if data.startswith(start)),
                 _boxes if data[4:8] in (b"ftyp", b"JXL ") else None)
    if spoil is None or rng.random() < 0.4:
        return some_bytes(data, rng, other)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        try:
            spoil(out, rng)
        except (struct.error, IndexError, zlib.error, ValueError):  # it was too broken already
            break
    return bytes(out) if rng.random() < 0.8 else some_bytes(bytes(out), rng, other)


# ---- text ------------------------------------------------------------------------------------------------------------

WORDS = ('"', "'", "\0", "\r", "\n", ",", "{", "}", "[", "]", "|", ":", "\\", "\ufeff", "\u2028", "\u202e", "\x1b[31m",
         "x" * 140_000, "{a|" * 300, "{" * 4000, "|" * 3000, "\\ud800", "\\u0000", "null", "1e999", "9" * 5000,
         "[trigger]", '"""', "= ", "[[", "#", "inf", "nan", "-1", "0", "1" + "0" * 400, "1979-05-27",
         "../", "/", "true", "é", "🐱")


def text(data: bytes, rng: Random) -> bytes:
    """Text with words in it, or out of it, that its readers may not expect."""
    found = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(found) + 1)
        end = rng.choice((at, at, at + 1, at + rng.randrange(1, 30)))
        found = found[:at] + rng.choice((*WORDS, *(str(one) for one in PATHS))) + found[end:]
    return found.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")


def values(data: bytes, rng: Random) -> bytes:
    """JSON, or JSON lines, whose values are others."""
    lines = [line for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    number = rng.randrange(len(lines))
    document = [json.loads(lines[number])]
    raw: dict[str, str] = {}
    if rng.random() < 0.1:
        document = [rng.choice(LEAVES)]
    elif rng.random() < 0.07:
        document, raw = ["@raw@"], {"@raw@": rng.choice(RAWS)}
    elif isinstance(document[0], dict | list) and document[0]:
        inner: Any = document[0] if isinstance(document[0], dict) else {"": document[0]}
        raw = mutate_json(inner, rng)
        document = [inner if isinstance(document[0], dict) else inner.get("", [])]
    spelled = json.dumps(document[0])
    for mark, said in raw.items():
        spelled = spelled.replace(f'"{mark}"', said)
    lines[number] = spelled
    return "\n".join(lines).encode("utf-8", "replace")


TOML = ("nan", "-inf", "1e999", "1" + "0" * 400, "1979-05-27T07:32:00Z", "07:32:00", "[" * 3000 + "]" * 3000,
        "{a = " * 3000 + "1" + "}" * 3000, "a.b", "0x7fffffffffffffff", "9" * 5000, '"""\n"""', "true", "[[]]",
        "{}", "[]", '"\\u0000"', '"a\\u0000b"', "1_000", "-1", "0.5", "[1, 'a', {b = 1}]")


def toml(data: bytes, rng: Random) -> bytes:
    """TOML whose values are others."""
    document = tomllib.loads(data.decode())
    raw = mutate_json(document, rng)
    raw = {mark: rng.choice(TOML) if rng.random() < 0.9 else said for mark, said in raw.items()}
    spelled = "".join(f"{json.dumps(str(name))} = {_in_toml(value, raw)}\n" for name, value in document.items())
    return spelled.encode("utf-8", "replace")


def _in_toml(value: Any, raw: dict[str, str]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {_in_toml(one, raw)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_in_toml(one, raw) for one in value) + "]"
    if isinstance(value, str):
        return raw.get(value) or json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[]" if value is None else str(value).lower()


def parquet(data: bytes, rng: Random) -> bytes:
    """Its footer, which says where everything is, or its pages."""
    length = int.from_bytes(data[-8:-4], "little")
    out = bytearray(data)
    if rng.random() < 0.7:
        footer = some_bytes(bytes(out[-8 - length : -8]), rng)
        out[-8 - length : -8] = footer
        if rng.random() < 0.9:
            out[-8:-4] = struct.pack("<I", len(footer))
        return bytes(out)
    return some_bytes(data[: -8 - length], rng) + data[-8 - length :]


# ---- tars ------------------------------------------------------------------------------------------------------------

_FIELDS = {"name": (0, 100), "mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12),
           "type": (156, 1), "link": (157, 100), "magic": (257, 8), "prefix": (345, 155), "sparse": (386, 97)}
_NAMES = (b"../x.png", b"/etc/passwd", b"a/../../x.png", b"C:\\x.png", b"..\\x.png", b"\xff\xfe.png", b".png", b"a.png",
          b"", b"x.", b"a.b.c.png", b"__x__/a.png", b"a\n.png", b"link.png/x.png", b"a.png/b.png", b"\x1b[31m.png",
          b"./a.png")
_SIZES = (b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" * 11 + b"\0", b"\xff" * 10 + b"\xfe\0", b"77777777777\0",
          b"\x80" + bytes(10) + b"\1", b"-1\0", b"00000000001\0", b"            ", b"0x10\0", b"00000001000\0", b"9\0",
          b"\0" * 12)


def tar(data: bytes, rng: Random) -> bytes:
    """A header's field, its checksum made anew, or what a PAX header says."""
    out = bytearray(data)
    heads = [at for at in range(0, len(out) - 511, 512) if out[at + 257 : at + 262] == b"ustar"]
    if not heads or rng.random() < 0.2:
        return some_bytes(data, rng, data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice(heads)
        name = rng.choice((*_FIELDS, "size", "size", "type", "name", "pax", "pax"))
        if name == "pax":
            _pax(out, at, rng)
        else:
            start, width = _FIELDS[name]
            value = {"size": rng.choice(_SIZES), "name": rng.choice(_NAMES), "link": rng.choice(_NAMES),
                     "type": rng.choice((b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"V",
                                         b"\0", b"A", b"X", b"\xff"))}.get(name) or rng.randbytes(width)
            out[at + start : at + start + width] = value[:width].ljust(width, b"\0")
        out[at + 148 : at + 156] = b" " * 8
        out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out) if rng.random() < 0.8 else some_bytes(bytes(out), rng, data)


def _pax(out: bytearray, at: int, rng: Random) -> None:
    """A record of a PAX header instead of whatever follows this header; the header says that it is one."""
    key = rng.choice((b"path", b"size", b"linkpath", b"GNU.sparse.map", b"GNU.sparse.size", b"GNU.sparse.major",
                      b"GNU.sparse.name", b"hdrcharset", b"mtime", b"comment", b"uid", b"GNU.sparse.realsize"))
    value = rng.choice((*_NAMES, b"-512", b"-1", b"-1024", b"99999999999999999999", b"1e9", b"nan", b"1,2,3",
                        b"0,5,5,-1", b"1", b"0", b"BINARY", b"a\0b", b"\xff", b"1" * 450, b"-9" * 200))
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 3 if rng.random() < 0.8 else rng.choice((0, 1, 5, 10**6, 10**30))
    record = (b"%03d" % length) + body
    out[at + 512 : at + 1024] = record[:512].ljust(512, b"\0")
    out[at + 124 : at + 136] = b"%011o\0" % min(len(record), 512)
    out[at + 156] = ord(rng.choice("xxxg"))
