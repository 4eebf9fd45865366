"""Pictures, captions, masks, tables and tars changed at random, through the real scan: each is reported, or is sound.

    python -m pytest tests/test_scan_fuzz.py -m slow
"""

from __future__ import annotations

import io
import json
import tarfile
from random import Random

import numpy as np
import pytest
from PIL import Image

from prep.scan.examine import Examined
from prep.scan.protocol import BlobMessage, DecodeRequest
from prep.scan.scanner import scan
from prep.scan.worker import LIMITS, PIXELS, SERVICE
from prep.sources.item import Item
from prep.sources.walk import walk_source
from prep.workers.pool import WorkerPool

SAMPLE, ALL, AT_ONCE = 300, 5000, 100


def photo(rng: Random, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (7, 9, 4), np.uint8)
    return Image.fromarray(small, "RGBA").resize((61, 47), Image.Resampling.BICUBIC).convert(mode)


def encoded(rng: Random) -> tuple[str, bytes]:
    """(extension, bytes) of some picture."""
    kind, mode, options = rng.choice((
        ("JPEG", "RGB", {"quality": 90}), ("JPEG", "L", {"progressive": True}), ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}), ("PNG", "RGBA", {}), ("PNG", "P", {}), ("PNG", "1", {}), ("PNG", "LA", {}),
        ("WEBP", "RGB", {}), ("WEBP", "RGBA", {"lossless": True}), ("GIF", "P", {"save_all": True}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}), ("TIFF", "L", {"compression": "tiff_deflate"}),
        ("TIFF", "RGB", {}), ("BMP", "RGB", {}), ("BMP", "P", {}), ("AVIF", "RGB", {"speed": 10}),
    ))
    if kind == "GIF":
        options = {**options, "append_images": [photo(rng, "P")]}
    stream = io.BytesIO()
    picture = photo(rng, mode)
    exif = Image.Exif()
    exif[0x0112] = rng.randrange(1, 10)
    if kind in ("JPEG", "PNG", "WEBP"):
        options = {**options, "exif": exif}
    picture.save(stream, kind, **options)
    return kind.lower(), stream.getvalue()


def changed(data: bytes, rng: Random) -> bytes:
    """`data` with one to four things wrong with it."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out)) if rng.random() < 0.5 else rng.randrange(min(len(out), 64))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[max(at, 1):]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 3:
            del out[at : at + rng.randint(1, 16)]
            out = out or bytearray(b"x")
        elif kind == 4:
            out[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\1"))
        elif kind == 5:
            there = rng.randrange(len(out))
            out[at : at + 8], out[there : there + 8] = out[there : there + 8], out[at : at + 8]
        else:
            out += out[at : at + 64]
    return bytes(out)


CAPTIONS = (b"a cat, on a mat", "eine Katze\nund noch eine".encode("utf-16"), "ネコ".encode(), b"\xef\xbb\xbfa cat",
            json.dumps({"caption": "a cat", "tags": ["a", "b"]}).encode(), b'["a", "b"]', b"{a|b} cat\r\n\r\n")
TABLE = "\n".join(json.dumps({"file_name": f"{number}.jpeg", "text": f"cat {number}"}) for number in range(40))


def fill(root, rng: Random, count: int) -> None:
    """A directory of mutants: pictures with captions and masks of their own or from a table, and a tar of others."""
    members = []
    for number in range(count):
        extension, data = encoded(rng)
        picture = changed(data, rng) if rng.random() < 0.8 else data
        words = rng.choice(CAPTIONS)
        caption = changed(words, rng) if rng.random() < 0.7 else words
        suffix = "json" if words[:1] in b"{[" and rng.random() < 0.8 else "txt"
        if rng.random() < 0.3:
            members += [(f"{number}.{extension}", picture), (f"{number}.{suffix}", caption)]
            continue
        (root / f"{number}.{extension}").write_bytes(picture)
        if rng.random() < 0.8:
            (root / f"{number}.{suffix}").write_bytes(caption)
        if rng.random() < 0.2:
            (root / f"{number}-masklabel.png").write_bytes(changed(encoded(rng)[1], rng))
    (root / "metadata.jsonl").write_bytes(changed(TABLE.encode(), rng))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = stream.getvalue()
    (root.parent / "mutants.tar").write_bytes(changed(data, rng) if rng.random() < 0.5 else data)


def attack(tmp_path, seed: int, count: int) -> tuple[int, int]:
    """(pictures, those that can be used) of a directory and a tar of mutants."""
    root = tmp_path / str(seed) / "in"
    root.mkdir(parents=True)
    fill(root, Random(f"scan {seed}"), count)
    seen: list[tuple[Item, Examined]] = []
    pictures = samples = 0
    for place in (root, root.parent / "mutants.tar"):
        report = scan(walk_source(place, source=0, masks="sidecar"), jobs=2,
                      check=lambda item, examined: seen.append((item, examined)) or ())
        pictures, samples = pictures + report.pictures, samples + report.samples
        json.dumps([one.as_json() for one in report.findings])
        assert all(one.path and one.detail and one.code not in ("decoder-hung",) for one in report.findings), seed
    assert len(seen) == pictures
    with WorkerPool(SERVICE) as workers:
        for item, examined in seen:
            if examined.usable:  # whole: it can be decoded once more
                assert examined.identity is not None, (seed, item.name)
                question = DecodeRequest(BlobMessage.of(item.picture))
                assert all(workers.ask(PIXELS, question, LIMITS)), (seed, item.name)
            else:
                assert any(one.severity == "error" for one in examined.findings), (seed, item.name)
    return pictures, samples


def test_a_sample_of_mutants(tmp_path):
    pictures, samples = attack(tmp_path, 0, SAMPLE)
    assert pictures > SAMPLE / 2 and 0.05 * pictures < samples < 0.9 * pictures


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, ALL // AT_ONCE + 1))
def test_all_mutants(tmp_path, seed):
    attack(tmp_path, seed, AT_ONCE)
