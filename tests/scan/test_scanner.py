"""A small source with one of each fault, written here; every code that a picture, caption or mask can get."""

from __future__ import annotations

import ast
import io
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pictures import saved
from PIL import Image
from walking import item_of, walk

import prep
from prep.findings import CODES, Finding
from prep.fs.blob import Blob
from prep.geometry import fits
from prep.scan.examine import check_item
from prep.scan.scanner import as_json, scan

RNG = np.random.default_rng(5)


def photo(seed: int = 0, size=(96, 80)) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def codes(tmp_path, picture: bytes, name="a.png", caption=b"a cat", mask=None) -> dict[str, Finding]:
    """What is said of one item, by code."""
    (tmp_path / name).write_bytes(picture)
    blobs = {}
    for kind, data in (("caption", caption), ("mask", mask)):
        if data is not None:
            (tmp_path / kind).write_bytes(data)
        blobs[kind] = None if data is None else Blob(file=str(tmp_path / kind))
    item = item_of(tmp_path / name, name=f"in/{name}", **blobs)
    found = check_item(item)
    assert found.usable == all(one.severity != "error" for one in found.findings)
    return {one.code: one for one in found.findings}


def gray(values: np.ndarray) -> bytes:
    return saved(Image.fromarray(values.astype(np.uint8)))


def rgba(alpha: np.ndarray) -> bytes:
    return saved(Image.merge("RGBA", [*photo().split(), Image.fromarray(alpha.astype(np.uint8))]))


PICTURES = {
    "nothing": (saved(photo()), "a.png", {}),
    "wrong extension": (saved(photo(), "JPEG"), "a.png",
                        {"wrong-extension": "content is JPEG, the name ends in '.png'"}),
    "upper case": (saved(photo(), "JPEG"), "A.JPEG", {}),
    "alpha": (rgba(np.where(np.arange(96) < 24, 0, 255) * np.ones((80, 1))), "a.png",
              {"has-alpha": "25% of its pixels are transparent or translucent",
               "plain-border": "plain bars: left 25%"}),
    "opaque alpha": (rgba(np.full((80, 96), 255)), "a.png", {}),
    "no alpha left": (rgba(np.zeros((80, 96))), "a.png",
                      {"fully-transparent": "entirely transparent; nothing of it will be visible"}),
    "blank": (saved(Image.new("RGB", (80, 80), "navy")), "a.png", {"blank": "all pixels are the same"}),
    "small": (saved(photo(size=(80, 31))), "a.png", {"too-small": "80x31 pixels, expected at least 32 each way"}),
    "long": (saved(photo(size=(250, 60))), "a.png", {"extreme-aspect": "250x60 pixels, expected at most 4:1"}),
    "gray": (saved(photo().convert("L")), "a.png", {"grayscale": "has one color channel"}),
    "one bit": (saved(photo().convert("1")), "a.png",
                {"grayscale": "has one color channel", "low-bit-depth": "1 bit per pixel",
                 "low-information": "1.0 bits of information in its gray levels, expected at least 3"}),
    "16 bit": (saved(Image.fromarray(RNG.integers(0, 65536, (80, 80), np.uint16))), "a.png",
               {"grayscale": "has one color channel", "high-bit-depth": "16 bits per channel; reduced to 8"}),
    "palette": (saved(photo().convert("P")), "a.png", {"palette": "has a palette of at most 256 colors"}),
    "cmyk": (saved(photo().convert("CMYK"), "JPEG"), "a.jpg", {"not-rgb": "colors are CMYK; converted to sRGB"}),
    "frames": (saved(photo(), "GIF", save_all=True, append_images=[photo(1)]), "a.gif",
               {"animated": "2 frames; the first is used"}),
    "pages": (saved(photo(), "TIFF", save_all=True, append_images=[photo(1)]), "a.tif",
              {"multi-page": "2 pages; the first is used"}),
    "cut": (saved(photo(), "JPEG")[:900], "a.jpg", {"truncated": "ends after 900 bytes; the rest is missing"}),
    "empty": (b"", "a.jpg", {"empty-file": "file has 0 bytes"}),
    "text": (b"not found", "a.jpg", {"not-an-image": "file starts with b'not foun'"}),
}  # fmt: skip


@pytest.mark.parametrize("case", PICTURES)
def test_pictures(tmp_path, case):
    data, name, wanted = PICTURES[case]
    found = codes(tmp_path, data, name)
    assert set(found) == set(wanted)
    for code, detail in wanted.items():
        assert found[code].detail.startswith(detail)
        assert found[code].severity == CODES[code][0]
        assert found[code].path == f"in/{name}"


def test_many_pixels(tmp_path):
    found = codes(tmp_path, saved(Image.new("1", (9000, 8000))))
    assert found["many-pixels"].detail == "9000x8000 pixels take much memory"


def test_a_checksum_is_an_error_only_where_it_matters(tmp_path):
    data = bytearray(saved(photo()))
    data[30] ^= 1  # of the header
    assert codes(tmp_path, bytes(data))["bad-checksum"].severity == "error"


@pytest.mark.parametrize(
    ("caption", "code", "severity"),
    [(None, "missing-caption", "warning"), (b" \n", "empty-caption", "warning"), (b"\xe9", "caption-encoding", "error"),
     ("x".encode("utf-16"), "caption-utf16", "warning"), (b"a\0", "caption-control-characters", "error"),
     (b"a\nb", "caption-multiline", "info"), (b"w " * 999, "caption-too-long", "warning")],
)  # fmt: skip
def test_captions(tmp_path, caption, code, severity):
    found = codes(tmp_path, saved(photo()), caption=caption)
    assert {one.code: one.severity for one in found.values()} == {code: severity}


def test_no_word_on_the_missing_caption_of_a_broken_picture(tmp_path):
    assert set(codes(tmp_path, b"", caption=None)) == {"empty-file"}


@pytest.mark.parametrize(("data", "says"), [
    (b'{"url": "x", "score": NaN}', ""), (b"\xef\xbb\xbf[1]", ""), (b"null", ""), ('"x"'.encode("utf-16"), ""),
    (b"[" * 100_000, ""), (b"9" * 10_000, ""),
    (b'{"width": 512, "ca', "18 bytes, not valid JSON from character 15 on (Unterminated string starting at)"),
    (b"", "0 bytes, not valid JSON from character 0 on (Expecting value)"), (b'"\xe9"', "3 bytes that are not UTF-8"),
    (None, "cannot be read: No such file or directory"),
])  # fmt: skip
@pytest.mark.parametrize("member", [True, False], ids=["in a tar", "in a directory"])
def test_json_that_is_not_used(tmp_path, data, says, member):
    """Most of it is what a downloader wrote of the picture; that it is cut off says something of the picture, too."""
    whole = saved(photo())
    if member:
        (tmp_path / "a.tar").write_bytes(whole + (data or b""))
        picture, other = (Blob(file=str(tmp_path / "a.tar"), offset=offset, length=length, member=name)
                          for name, offset, length in
                          (("x/a.png", 0, len(whole)), ("x/a.json", len(whole), 9 if data is None else len(data))))
    else:
        (tmp_path / "a.png").write_bytes(whole)
        if data is not None:
            (tmp_path / "a.json").write_bytes(data)
        picture, other = (Blob(file=str(tmp_path / name)) for name in ("a.png", "a.json"))
    name = "a.tar/x/a" if member else "in/a"
    found = check_item(item_of("", name=f"{name}.png", picture=picture, captions=("a cat",), metadata=other))
    assert found.usable
    assert [(one.path, one.code, one.severity) for one in found.findings] == (
        [(f"{name}.json", "bad-json", "warning")] if says else [])
    if says and data is not None:
        assert found.findings[0].detail == says


RING = np.full((80, 96), 255)
RING[20:60, 20:76] = 0
HALF = np.where(np.arange(96) < 48, 0, 255) * np.ones((80, 1))


@pytest.mark.parametrize(
    ("mask", "code", "detail"),
    [(gray(HALF), None, ""), (gray(HALF * 0), "mask-empty", "mask is entirely black"),
     (gray(HALF * 0 + 255), "mask-full", "mask is entirely white"),
     (gray(RING), "mask-inverted", "mask has a white border and a black middle; white areas train"),
     (gray(255 - RING), None, ""), (gray(np.maximum(RING, HALF)), None, ""),
     (gray(HALF[::2, ::2]), "mask-resized", "mask has 48x40 pixels, its picture 96x80"),
     (gray(HALF[:40]), "mask-size-mismatch", "mask has 96x40 pixels, its picture 96x80"),
     (saved(photo()), "mask-not-gray", "mask has colors; their brightness is used"),
     (saved(Image.merge("LA", [Image.new("L", (96, 80), 255), Image.fromarray(HALF.astype(np.uint8))])),
      "mask-not-gray", "mask has transparency, which counts as black"),
     (gray(HALF)[:60], "truncated", "PNG ends before its last chunk, after 60 bytes")],
)  # fmt: skip
def test_masks(tmp_path, mask, code, detail):
    found = codes(tmp_path, saved(photo()), mask=mask)
    assert set(found) == ({code} if code else set())
    if code:
        assert found[code].detail == detail
        assert found[code].path == "in/mask"


def test_gray_masks_of_three_channels_are_fine(tmp_path):
    three = saved(Image.fromarray(HALF.astype(np.uint8)).convert("RGB"))
    assert codes(tmp_path, saved(photo()), mask=three) == {}


@pytest.mark.parametrize("kind", ["picture", "caption", "mask"])
def test_huge_files(tmp_path, kind):
    paths = {"picture": tmp_path / "a.png", "caption": tmp_path / "a.txt", "mask": tmp_path / "a-masklabel.png"}
    paths["picture"].write_bytes(saved(photo()))
    paths["caption"].write_bytes(b"a cat")
    paths["mask"].write_bytes(saved(photo().convert("L")))
    with paths[kind].open("wb") as stream:
        stream.truncate(1 << 41)
    found = check_item(item_of("a.png", **{name: Blob(file=str(path)) for name, path in paths.items()}))
    details = {one.code: one.detail for one in found.findings if one.severity == "error"}
    assert details == {"too-large": "cannot be read: it has 2199023255552 bytes, expected at most 1073741824"}


@pytest.mark.parametrize("step", ["decode_layers", "identify", "decode_mask_layers",
                                  "examine_caption"])
def test_what_memory_does_not_hold(tmp_path, monkeypatch, step):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr(f"prep.scan.examine.{step}", exhausted)
    found = codes(tmp_path, saved(photo()), mask=saved(photo().convert("L")))
    assert found["too-large"].detail == "takes more memory than there is" and found["too-large"].severity == "error"


def test_files_that_are_gone(tmp_path):
    gone = Blob(file=str(tmp_path / "gone"))
    (tmp_path / "a.png").write_bytes(saved(photo()))
    here = Blob(file=str(tmp_path / "a.png"))
    for blobs in ({"picture": gone, "caption": None, "mask": None}, {"picture": here, "caption": gone, "mask": None},
                  {"picture": here, "caption": None, "mask": gone}):  # fmt: skip
        found = check_item(item_of("a.png", **blobs)).findings
        assert "cannot be read: No such file or directory" in [one.detail for one in found]
        assert not check_item(item_of("a.png", **blobs)).usable


@pytest.mark.parametrize(
    ("mask", "picture", "fit"),
    [((100, 100), (100, 100), True), ((50, 50), (100, 100), True), ((333, 250), (1333, 1000), True),
     ((64, 43), (1536, 1024), True), ((100, 50), (100, 100), False), ((256, 100), (256, 256), False),
     ((110, 100), (100, 100), False), ((1, 1), (3, 2), True), ((7, 512), (14, 1024), True)],
)  # fmt: skip
def test_fits(mask, picture, fit):
    assert fits(mask, picture) is fit


# ---- whole sources ---------------------------------------------------------------------------------------------------


def source(tmp_path):
    picture = photo(1)
    files = {"cat.jpg": saved(picture, "JPEG", quality=95), "cat copy.jpg": saved(picture, "JPEG", quality=95),
             "cat.txt": b"a cat", "cat copy.txt": b"a cat", "dog.png": saved(photo(2)), "dog.txt": b"a dog",
             "broken.png": b"?", "broken.txt": b"a thing"}
    files["cat pixels.png"] = saved(Image.open(io.BytesIO(files["cat.jpg"])))
    files["cat small.png"] = saved(picture.resize((72, 64)))
    files["dog flipped.png"] = saved(photo(2).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_a_whole_source(tmp_path):
    stages = []

    @contextmanager
    def progress(title, total, unit):
        ticks = []
        yield ticks.append
        stages.append((title, total, unit, sum(ticks)))

    report = scan(walk(source(tmp_path), source=0, mask_from="none"), jobs=2, progress=progress)
    assert (report.pictures, report.samples) == (7, 6)
    assert stages == [("scanning", None, "pictures", 7), ("comparing", 4, "pictures", 4)]
    told = {(one.path, one.code): one.detail for one in report.findings if one.code != "missing-caption"}
    assert told == {
        ("broken.png", "not-an-image"): told[("broken.png", "not-an-image")],
        ("cat copy.jpg", "exact-duplicate"): "same bytes as cat.jpg",
        ("cat pixels.png", "pixel-duplicate"): "same pixels as cat.jpg",
        ("cat small.png", "near-duplicate"): told[("cat small.png", "near-duplicate")],
        ("dog flipped.png", "mirrored-duplicate"): told[("dog flipped.png", "mirrored-duplicate")],
    }
    assert told[("cat small.png", "near-duplicate")].startswith("nearly the same picture as cat.jpg (9")
    assert told[("dog flipped.png", "mirrored-duplicate")].startswith("the mirror image of dog.png (")
    others = {one.path: (one.other, one.likeness) for one in report.findings if one.other is not None}
    assert {path: other for path, (other, _) in others.items()} == {
        "cat copy.jpg": "cat.jpg", "cat pixels.png": "cat.jpg", "cat small.png": "cat.jpg",
        "dog flipped.png": "dog.png"}
    assert others["cat copy.jpg"][1] == others["cat pixels.png"][1] == 1
    assert all(0.9 < likeness <= 1 for _, likeness in others.values())
    assert list(report.findings) == sorted(report.findings, key=lambda one: (one.path, one.code))
    assert (report.count("error"), report.count("info")) == (1, 1)


def test_jobs_do_not_change_the_report(tmp_path):
    source(tmp_path)
    one, four = (scan(walk(tmp_path, source=0, mask_from="none"), jobs=jobs) for jobs in (1, 4))
    assert one == four


def test_as_json(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    assert as_json(scan(walk(tmp_path, source=0, mask_from="none"), jobs=1)) == {
        "format": "latentry/scan", "version": 1, "pictures": 1, "samples": 0,
        "findings": [{"path": "a.png", "code": "empty-file", "severity": "error", "detail": "file has 0 bytes"}]}


def test_nothing_to_scan(tmp_path):
    report = scan(walk(tmp_path, source=0, mask_from="none"), jobs=1)
    assert (report.pictures, report.samples, report.findings) == (0, 0, ())


def test_codes_are_complete_sentences_of_three():
    for code, (severity, meaning, advice) in CODES.items():
        assert code == code.lower()
        assert " " not in code
        assert severity in ("error", "warning", "info")
        assert meaning
        assert advice


def literals() -> set[str]:
    """Every string constant of prep's own modules but the table of codes itself."""
    found: set[str] = set()
    for path in Path(prep.__file__).parent.rglob("*.py"):
        if path.name != "codes.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {node.value for node in ast.walk(tree)
                      if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found


def test_every_code_is_used():
    assert set(CODES) - literals() == set()


def called(path: Path) -> set[str]:
    """The codes handed to BadPicture, BadCaption, finding, say and Finding in one module."""
    places = {"BadPicture": 0, "BadCaption": 0, "finding": 1, "say": 1}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            arguments = [node.args[places[name]]] if name in places and len(node.args) > places[name] else []
            arguments += [word.value for word in node.keywords if name == "Finding" and word.arg == "code"]
            found |= {one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_every_code_has_a_meaning():
    root = Path(prep.__file__).parent
    used = {code for path in root.rglob("*.py") for code in called(path)}
    assert len(used) > 15
    assert used - set(CODES) == {""}  # of the example that a page's script fills
