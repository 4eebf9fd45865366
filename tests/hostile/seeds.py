"""What comes from outside, whole: pictures of every format that is read, captions, tables, tars, recipes of others.

All small, and the same on every machine but for the bytes that encoders choose.
"""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import plugged
import pyarrow as pa
import pyarrow.parquet as pq
from pictures import saved
from PIL import Image, ImageCms

SIZE = 41, 33  # width and height of every picture but masks


def photo(mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colors, with some transparency where the mode has it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 4), np.uint8)
    return Image.fromarray(coarse, "RGBA").resize(SIZE, Image.Resampling.BICUBIC).convert(mode)


def exif(orientation: int = 6) -> bytes:
    found = Image.Exif()
    found[0x0112], found[0x010E], found[0x0131] = orientation, "a cat on a mat", "a camera"
    return found.tobytes()


def profile() -> bytes:
    """sRGB with its primaries exchanged, so that it is converted."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return srgb.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")


# ---- pictures --------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png(depth: int, color: int, *, interlaced: bool = False, extra: bytes = b"") -> bytes:
    """A PNG of kinds that Pillow does not write: 16 bits a channel, small depths, interlaced."""
    width, height = SIZE
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    rows = b""
    for left, top, right, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        wide, high = -(-(width - left) // right), -(-(height - top) // down)
        line = -(-wide * channels * depth // 8)
        rows += b"".join(b"\0" + bytes((x * 7 + y * 5) % 251 & (1 if color == 3 and depth == 8 else 255)
                                       for x in range(line)) for y in range(high))
    palette = chunk(b"PLTE", bytes(range(3 << min(depth, 7)))) if color == 3 else b""
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", *SIZE, depth, color, 0, 0, interlaced))
            + palette + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def _pngs() -> Iterator[tuple[str, bytes]]:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        yield "png", saved(photo("L").convert("I;16") if mode == "I;16" else photo(mode))
    yield "png", saved(photo(), exif=exif(), icc_profile=profile(), dpi=(72, 72))
    yield "png", saved(photo("P"), transparency=b"\0\x40\xff")
    yield "png", saved(photo("RGB"), transparency=(1, 2, 3))
    yield "png", saved(photo("RGBA"), save_all=True, append_images=[photo("RGBA", 1), photo("RGBA", 2)])
    for depth, color, interlaced in ((16, 2, False), (16, 6, True), (16, 0, True), (8, 2, True), (2, 0, False),
                                      (4, 3, True), (1, 0, True), (8, 4, True)):
        yield "png", png(depth, color, interlaced=interlaced)
    yield "png", png(16, 0, extra=chunk(b"tRNS", b"\0\x01"))
    comment = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * 3000))
    yield "png", png(8, 2, extra=comment + chunk(b"gAMA", b"\0\1\0\0"))


def _jpegs() -> Iterator[tuple[str, bytes]]:
    for mode, options in (("RGB", {"quality": 90}), ("RGB", {"progressive": True, "subsampling": 2}), ("L", {}),
                          ("CMYK", {}), ("RGB", {"exif": exif(), "icc_profile": profile(), "comment": b"a cat"}),
                          ("RGB", {"restart_marker_blocks": 1}), ("L", {"progressive": True}),
                          ("RGB", {"subsampling": 0, "exif": exif(8), "keep_rgb": True})):
        yield "jpg", saved(photo(mode), "JPEG", **options)


def _webps() -> Iterator[tuple[str, bytes]]:
    yield "webp", saved(photo(), "WEBP", method=0)
    yield "webp", saved(photo(), "WEBP", lossless=True, method=0)
    yield "webp", saved(photo("RGBA"), "WEBP", method=0, exif=exif(), icc_profile=profile())
    yield "webp", saved(photo("RGBA"), "WEBP", method=0, save_all=True, append_images=[photo("RGBA", 1)])


def _avifs() -> Iterator[tuple[str, bytes]]:
    yield "avif", saved(photo(), "AVIF", speed=10, exif=exif(), icc_profile=profile())
    yield "avif", saved(photo("RGBA"), "AVIF", speed=10)
    yield "avif", saved(photo(), "AVIF", speed=10, save_all=True, append_images=[photo(seed=1)])


def _tiffs() -> Iterator[tuple[str, bytes]]:
    for mode, options in (
            ("RGB", {}), ("RGB", {"compression": "tiff_lzw"}), ("RGBA", {"compression": "tiff_adobe_deflate"}),
            ("RGB", {"compression": "jpeg"}), ("L", {"compression": "packbits"}), ("1", {"compression": "group4"}),
            ("CMYK", {}), ("P", {}), ("LAB", {}), ("YCbCr", {"compression": "jpeg"}),
            ("RGB", {"exif": exif(), "icc_profile": profile()}), ("RGB", {"big_tiff": True}),
            ("RGB", {"save_all": True, "append_images": [photo(seed=1), photo(seed=2)]})):
        yield "tif", saved(photo(mode), "TIFF", **options)
    yield "tif", saved(photo("L").convert("I;16"), "TIFF", compression="tiff_lzw")
    yield "tif", saved(photo("L").convert("I"), "TIFF")
    yield "tif", saved(Image.fromarray(np.asarray(photo("L"), np.float32) / 255), "TIFF")


def _others() -> Iterator[tuple[str, bytes]]:
    for mode in ("RGB", "P", "1", "L", "RGBA"):
        yield "bmp", saved(photo(mode), "BMP")
    yield "gif", saved(photo("P"), "GIF")
    yield "gif", saved(photo("P"), "GIF", transparency=3, interlace=True, comment=b"a cat")
    yield "gif", saved(photo("P"), "GIF", save_all=True, append_images=[photo("P", 1), photo("P", 2)], disposal=2)


def _plugged() -> Iterator[tuple[str, bytes]]:
    """Of formats that are read by extras, where they are installed."""
    if find_spec("pillow_heif"):
        for mode in ("RGB", "RGBA", "L"):
            yield "heic", plugged.heic(photo(mode))
        yield "heic", plugged.heic(photo(), quality=50, chroma=420, exif=exif())
        yield "heic", plugged.heic(np.full((33, 42, 3), 40_000, np.uint16), "RGB;16")
    if find_spec("pillow_jxl"):
        for mode in ("RGB", "RGBA", "L", "LA"):
            yield "jxl", plugged.jxl(photo(mode))
        yield "jxl", plugged.jxl(photo(), lossless=False, quality=70)
        yield "jxl", plugged.jxl(photo(), exif=exif(), icc_profile=profile(), use_container=True)


@cache
def pictures() -> tuple[tuple[str, bytes], ...]:
    """(extension, file) of each kind."""
    return tuple(one for kinds in (_pngs, _jpegs, _webps, _avifs, _tiffs, _others, _plugged) for one in kinds())


@cache
def icon() -> bytes:
    """A sound picture that takes no time."""
    return saved(Image.new("RGB", (40, 40), "red").resize((33, 33)))


@cache
def large(number: int) -> bytes:
    """A sound picture that is large enough to be trained on."""
    return saved(photo(seed=number).resize((96, 80)))


# ---- captions and tables ---------------------------------------------------------------------------------------------

CAPTIONS: tuple[tuple[str, bytes], ...] = (
    ("txt", b"a cat, on a mat"), ("txt", "eine Katze\nund noch eine".encode("utf-16")), ("txt", "ネコ\r\n".encode()),
    ("txt", b"\xef\xbb\xbfa cat"), ("txt", "\ufeffa cat".encode("utf-16-be")),
    ("caption", b"{a|b} cat\r\n\r\n[trigger]"),
    ("txt", b"one, two ||| three, four, {five|six|{seven|eight}} " * 6), ("txt", ("é" * 50 + "\u2028x\x85y").encode()),
    *(("json", json.dumps(document).encode()) for document in (
        {"caption": "a cat", "tags": ["a", "b"]}, ["a", "b"], "a cat", {"captions": ["one", "two"]}, {"text": "x\ty"},
        {"prompt": "a cat", "tags": "red, blue", "width": 5}, {"texts": "a cat", "more": {"deep": [1.5, None]}})),
    ("json", b'\xef\xbb\xbf{"caption": "\\u00e9 \\ud83d\\ude00"}'),
)

ROWS: tuple[Mapping[str, Any], ...] = (
    {"file_name": "a.png", "text": "a cat", "mask_file_name": "masks/a.png"},
    {"file_name": "sub/b.jpg", "text": "a dog, on a log", "mask_file_name": None},
    {"file_name": "c.webp", "text": "ein Käfer", "mask_file_name": ""},
    {"file_name": "nowhere.png", "text": "x", "mask_file_name": None},
)


def _csv() -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(ROWS[0]))
    writer.writeheader()
    writer.writerows([*ROWS, {"file_name": "c.webp", "text": 'said "no",\nthen left'}])
    return stream.getvalue().encode()


def parquet(columns: Any = None, **options: Any) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(ROWS)) if columns is None else pa.table(columns), stream, **options)
    return stream.getvalue().to_pybytes()


def _parquets() -> Iterator[bytes]:
    names = [row["file_name"] for row in ROWS]
    yield parquet()
    yield parquet(compression="zstd", use_dictionary=False)
    yield parquet(compression="none", write_statistics=False, data_page_version="2.0")
    for odd in (pa.array([b"\xff", b"x", b"", None]), pa.array([[["x"]], [], None, [None, ["y"]]]),
                pa.array([1 << 62, -1, 0, None]), pa.array([{"bytes": b"x"}, None, {"bytes": None}, None]),
                pa.array([1, -(1 << 62), (1 << 62), None], pa.timestamp("ns", "Europe/Berlin")),
                pa.array([1 << 62, 0, 1, 2], pa.timestamp("ms")), pa.array(["a", "b", "a", None]).dictionary_encode(),
                pa.array([1 << 62, 0, 1, 2], pa.duration("s")), pa.array([1 << 30, 0, 1, 2], pa.date32())):
        yield parquet({"file_name": names, "text": odd}, store_schema=True)
        yield parquet({"file_name": odd, "tags": odd})


@cache
def tables() -> tuple[tuple[str, bytes], ...]:
    """(name, file) of tables of captions; those that are called metadata are found, the others are named."""
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    kohya = {"a": {"caption": "a cat", "tags": "red"}, "sub/b.jpg": {"tags": ["blue"], "train_resolution": [5, 5]},
             "c.webp": {"captions": ["x", "y"]}}
    return (("metadata.jsonl", lines), ("captions.jsonl", lines.replace(b"text", b"captions") + b"\r\n\r\n"),
            ("metadata.csv", _csv()), ("metadata.csv", b"\xef\xbb\xbf" + _csv().replace(b"\r\n", b"\r")),
            ("captions.json", json.dumps(kohya).encode()), ("captions.json", json.dumps([*ROWS, *ROWS]).encode()),
            *(("metadata.parquet", data) for data in _parquets()))


# ---- tars ------------------------------------------------------------------------------------------------------------


def tar(kind: int, names: Mapping[str, bytes], *, links: bool = True, **pax: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as out:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.pax_headers = len(data), 1_700_000_000, dict(pax)
            out.addfile(info, io.BytesIO(data))
        others = (("link.png", tarfile.SYMTYPE), ("hard.png", tarfile.LNKTYPE), ("folder", tarfile.DIRTYPE))
        for name, what in others if links else ():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = what, "a.png"
            out.addfile(info)
    return stream.getvalue()


@cache
def tars() -> tuple[bytes, ...]:
    """Tars in all three spellings, with names of every length, and one that is compressed."""
    members = {"a.png": icon(), "a.txt": b"a cat", "b.json": b'{"caption": "x"}', "b.png": icon(), "b.mask.png": icon(),
               "deep/er/c.webp": pictures()[30][1], "deep/er/c.txt": b"x"}
    long = {"x" * 99 + "/" + "y" * 120 + ".png": icon(), "x" * 99 + "/" + "y" * 120 + ".txt": b"a cat", **members}
    plain = tar(tarfile.USTAR_FORMAT, members)
    packed, sound = zlib.compressobj(wbits=31), tar(tarfile.GNU_FORMAT, members, links=False)
    return (plain, sound, tar(tarfile.GNU_FORMAT, long), tar(tarfile.PAX_FORMAT, {**long, "ü/猫.png": icon()}),
            tar(tarfile.PAX_FORMAT, members, comment="x", size="70", path="other.png"), plain[:-1024],
            tar(tarfile.PAX_FORMAT, members, **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
            tar(tarfile.PAX_FORMAT, members, **{"GNU.sparse.map": "0,3,5,2", "GNU.sparse.size": "9"}),
            packed.compress(plain) + packed.flush())


# ---- recipes and what other tools write ------------------------------------------------------------------------------

RECIPES: tuple[str, ...] = (
    """
[image]
resolution = [64, 128]
buckets = "step"
step = 16
upscale = 1.5
crop = "random"
views = 2
flip = "both"
alpha = "#ff0000"
min_bucket = 1
[caption]
missing = "filename"
lines = "join"
variants = 4
wildcards = true
shuffle = true
dropout = 0.25
trigger = "ohwx"
[mask]
from = "sidecar"
resize = "reject"
[references]
from = ["masks"]
missing = "none"
[scan]
ignore = ["blank"]
severity = {near-duplicate = "error"}
[[source]]
path = "photos"
repeats = 2
weight = 0.5
include = ["*", "!x"]
exclude = ["raw/", "{a,b}[0-9]*"]
table = "captions.jsonl"
caption = {prefix = "a photo, ", keep_tokens = 1}
[[source]]
path = "photos/sub"
role = "validation"
mask = "masks"
references = ["masks", "photos"]
missing_reference = "reject"
[validation]
fraction = 0.1
""", """
source = [{path = "photos"}]
[image]
buckets = "list"
sizes = ["64x64", "48x80"]
step = 16
min_side = 1
upscale = "allow"
[model]
path = "none/such"
family = "sd15"
dtype = "bfloat16"
[prompts]
file = "prompts.txt"
""", """
[image]
resolution = 64
buckets = "ratio"
shortest = 32
longest = 128
min_side = 16
upscale = "allow"
[caption]
missing = "constant"
constant = "a cat, {red|blue}"
[[source]]
path = "in.tar"
repeats = 3
""")

KOHYA = """
[general]
enable_bucket = true
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
[[datasets]]
resolution = [512, 768]
batch_size = 4
min_bucket_reso = 320
max_bucket_reso = 1280
validation_split = 0.1
  [[datasets.subsets]]
  image_dir = "photos"
  num_repeats = 3
  class_tokens = "ohwx dog"
  conditioning_data_dir = "masks"
  caption_tag_dropout_rate = 0.1
  random_crop = true
  [[datasets.subsets]]
  image_dir = "photos/sub"
  metadata_file = "captions.json"
  is_reg = true
  flip_aug = true
[[datasets]]
resolution = 1024
enable_bucket = false
  [[datasets.subsets]]
  image_dir = "photos"
"""
ONETRAINER: tuple[Mapping[str, Any], ...] = (
    {"name": "dogs", "path": "photos", "seed": 7, "type": "STANDARD", "include_subdirectories": True, "enabled": True,
     "text_variations": 4, "image_variations": 3, "balancing": 2.5, "balancing_strategy": "REPEATS", "loss_weight": 0.5,
     "image": {"enable_crop_jitter": True, "enable_random_flip": False, "enable_fixed_flip": True,
               "enable_resolution_override": True, "resolution_override": "512, 768", "random_hue_max_strength": 0.1},
     "text": {"prompt_source": "concept", "prompt_path": "prompts.txt", "enable_tag_shuffling": True,
              "tag_delimiter": ";", "keep_tags_count": 2, "tag_dropout_enable": True, "tag_dropout_mode": "RANDOM",
              "tag_dropout_probability": 0.1}},
    {"name": "held", "path": "photos/sub", "type": "VALIDATION", "balancing_strategy": "SAMPLES", "repeats": 1},
    {"name": "reg", "path": "photos", "type": "PRIOR_PREDICTION", "concept_stats": {"size": 5}, "text": None},
)
SIMPLETUNER: tuple[Mapping[str, Any], ...] = (
    {"id": "a", "type": "local", "instance_data_dir": "photos", "resolution": 1.0, "resolution_type": "area",
     "crop": True, "crop_aspect": "square", "crop_style": "center", "minimum_image_size": 0.5, "repeats": 10,
     "caption_strategy": "textfile", "cache_dir_vae": "x", "metadata_backend": "discovery",
     "conditioning_data": "m", "prepend_instance_prompt": True, "instance_prompt": "a dog", "metadata_file": None},
    {"id": "m", "type": "local", "dataset_type": "conditioning", "conditioning_type": "mask",
     "instance_data_dir": "masks"},
    {"id": "b", "type": "local", "instance_data_dir": "photos/sub", "resolution": 512, "resolution_type": "pixel",
     "caption_strategy": "instanceprompt", "is_regularisation_data": True, "vae_cache_ondemand": True,
     "caption_filter_list": "x", "aspect_bucket_rounding": 2, "crop": False, "maximum_image_size": 2.0},
    {"id": "t", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "x"},
)
