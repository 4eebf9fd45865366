"""The demo's dataset: drawn pictures with captions and masks, some broken files, a recipe and a training config.

Half of the pictures show what the tiny model never saw (`LEFT_OUT`), half what it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prep.demo.drawing import as_file, draw_picture
from prep.demo.vocabulary import COLORS, GROUNDS, LEFT_OUT, SHAPES, caption

# Five buckets with a step of 16 pixels at resolution 96; the last two are small on purpose.
_SIZES = ((128, 128), (100, 140), (140, 100), (96, 96), (168, 120), (120, 168), (160, 80), (72, 162))
_SUFFIXES = (".png", ".png", ".jpg", ".png", ".webp")

DATASET_TOML = """\
# What `prep encode` reads: which pictures, which model's encoders, how pictures get into buckets.
[model]
path = "model"
family = "sd15"
dtype = "bfloat16"      # of the stored rows
compute = "float32"     # of the encoders: CPUs are slow in bfloat16

[image]
resolution = 96
step = 16               # pixels between bucket sides; real models want 64

[caption]
missing = "reject"      # photos/broken has pictures without one

[mask]
from = "sidecar"        # NAME-masklabel.png

[[source]]
path = "photos"

[validation]
fraction = 0.1

[prompts]
file = "prompts.txt"
"""

TRAIN_TOML = """\
# What `train run` reads: a LoRA that teaches the tiny model red hearts, about a minute on two CPU cores.
method = "lora"
steps = 1200
batch_size = 8          # samples per optimizer step
micro_batch = 8         # samples per forward pass
caption_dropout = 0.1   # so that guidance goes on working
seed = 0

[lora]
rank = 16
alpha = 16
targets = "all-linear"  # feed-forward layers too: attention alone makes hearts with dents

[optimizer]
name = "adamw"
lr = 1.5e-3             # high, because the model is tiny; 1e-4 for real ones

[schedule]
name = "cosine"

[loss]
masked = true
unmasked_weight = 0.3

[validation]
every = 200

[sample]
every = 400
guidance = 4.0
size = [96, 96]         # pixels
seed = 2

[checkpoint]
every = 400
"""

PROMPTS = f"""\
# One prompt a line; what follows --n is its negative prompt.
{caption(*LEFT_OUT, "striped")}
{caption(*LEFT_OUT, "cloudy")}
{caption("blue", "circle", "checked")}
{caption("green", "triangle", "shaded")} --n {caption("blue", "square", "striped")}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Photo:
    """One picture to draw, and the files beside it."""

    stem: str  # below photos/, such as "hearts/007"
    suffix: str  # of the picture
    sidecar: str  # suffix of its caption
    color: str
    shape: str
    ground: str
    size: tuple[int, int]  # (width, height)
    seed: int
    masked: bool  # whether a mask lies beside it


def write_dataset(root: Path, *, count: int = 48, seed: int = 0) -> None:
    """Writes `root`/photos with `count` good pictures and the broken ones, and the recipe's files beside it."""
    for photo in photos(count, seed):
        _write_photo(root / "photos", photo)
    _write_broken(root / "photos" / "broken", seed)
    for name, text in (("dataset.toml", DATASET_TOML), ("train.toml", TRAIN_TOML), ("prompts.txt", PROMPTS)):
        write_file(root / name, text.encode())


def photos(count: int, seed: int) -> Iterator[Photo]:
    """The good pictures: every second one of the left-out pair, every third without a mask."""
    known = tuple(shape for shape in SHAPES if shape != LEFT_OUT[1])
    for index in range(count):
        half = index // 2
        new = index % 2 == 0
        color, shape = LEFT_OUT if new else (COLORS[half % len(COLORS)], known[half % len(known)])
        yield Photo(
            stem=f"{shape}s/{index:03}" if new else f"others/{GROUNDS[half % len(GROUNDS)]}/{index:03}",
            suffix=_SUFFIXES[half % len(_SUFFIXES)],
            sidecar=".caption" if index % 9 == 4 else ".txt",
            color=color, shape=shape, ground=GROUNDS[half % len(GROUNDS)],
            size=_SIZES[(3 * half + half // 8 + index % 2) % len(_SIZES)],
            seed=seed * 1_000_003 + index,
            masked=index % 3 != 2,
        )  # fmt: skip


def _write_photo(folder: Path, photo: Photo) -> None:
    picture, mask = draw_picture(
        shape=photo.shape, color=photo.color, ground=photo.ground, size=photo.size, seed=photo.seed
    )
    stem = folder / photo.stem
    write_file(stem.with_suffix(photo.suffix), as_file(picture, photo.suffix))
    write_file(stem.with_suffix(photo.sidecar), f"{caption(photo.color, photo.shape, photo.ground)}\n".encode())
    if photo.masked:
        write_file(stem.with_name(f"{stem.name}-masklabel.png"), as_file(mask, ".png"))


def _write_broken(folder: Path, seed: int) -> None:
    """Writes six pictures that `prep scan` must report, each with its own fault, and all but one with a caption."""
    words = caption("blue", "ring", "checked").encode()
    (cut, _), (uncaptioned, _), (untitled, _), (masked, mask) = (
        draw_picture(shape="ring", color="blue", ground="checked", size=(112, 112), seed=seed + index)
        for index in range(4)
    )
    jpg = as_file(cut, ".jpg")
    for name, data, text in (
        ("truncated.jpg", jpg[: len(jpg) // 2], words),
        ("not-a-picture.png", b"This is text, whatever its name says.\n", words),
        ("zero-bytes.png", b"", words),
        ("empty-caption.png", as_file(untitled, ".png"), b"\n"),
        ("no-caption.png", as_file(uncaptioned, ".png"), None),
        ("other-mask.png", as_file(masked, ".png"), words),
    ):
        write_file(folder / name, data)
        if text is not None:
            write_file((folder / name).with_suffix(".txt"), text)
    write_file(folder / "other-mask-masklabel.png", as_file(mask.crop((0, 0, 112, 56)), ".png"))


def write_file(path: Path, data: bytes) -> None:
    """Writes a file, in directories that are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
