"""The demo of pairs: a white shape, and the same shape in the color that the caption says; no heart among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from prep.demo.dataset import write_file
from prep.demo.drawing import as_file, draw_picture
from prep.demo.vocabulary import LEFT_OUT, SHAPES

BEFORE = "white"  # the color of each reference's shape
SIZE = (64, 64)
GROUNDS = ("cloudy", "shaded")
AFTER = ("red", "orange", "yellow")  # few, so that a minute is enough: darker ones take longer
_KNOWN = tuple(shape for shape in SHAPES if shape != LEFT_OUT[1])

DATASET_TOML = """\
# What `prep encode` reads: pictures, the pictures that they were made from, and which model's encoders.
[model]
path = "model"
family = "flux_kontext"
dtype = "bfloat16"      # of the stored rows
compute = "float32"     # of the encoders: CPUs are slow in bfloat16
max_length = 8          # tokens of a caption; real models want more

[image]
resolution = 64
step = 16

[[source]]
path = "after"
references = ["before"] # for each picture the one that it was made from, by the same name

[references]
resolution = 64         # as large as the pictures; real models want 1024

[validation]
fraction = 0.1          # sample pictures show some of these, with their references
"""

TRAIN_TOML = """\
# What `train run` reads: all weights learn to color shapes, in about a minute on two CPU cores.
method = "full"
steps = 800
batch_size = 16
micro_batch = 16
reference_dropout = 0.1 # so that the model goes on making pictures without a reference, too
seed = 0

[optimizer]
name = "adamw"
lr = 3e-3               # high, because the model is tiny and new; 1e-5 for real ones

[schedule]
name = "cosine"

[validation]
every = 200

[sample]
every = 800
steps = 8
size = [64, 64]         # pixels
seed = 2

[checkpoint]
every = 400
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One shape to draw twice."""

    stem: str  # of both files
    shape: str
    color: str  # after
    ground: str
    seed: int

    @property
    def caption(self) -> str:
        """What is asked for."""
        return f"paint it {self.color}"

    def drawn(self) -> tuple[Image.Image, Image.Image, Image.Image]:
        """The picture before and after, RGB of `SIZE`, and the mask of the shape (L, 255 inside)."""
        (before, mask), (after, _) = (
            draw_picture(shape=self.shape, color=color, ground=self.ground, size=SIZE, seed=self.seed, alike=True)
            for color in (BEFORE, self.color))
        return before, after, mask


def write_pairs(root: Path, *, count: int = 96, seed: int = 0) -> None:
    """Writes `root`/before and `root`/after with `count` pairs, and the recipe's files."""
    for pair in pairs(count, seed):
        before, after, _ = pair.drawn()
        write_file(root / "before" / f"{pair.stem}.png", as_file(before, ".png"))
        write_file(root / "after" / f"{pair.stem}.png", as_file(after, ".png"))
        write_file(root / "after" / f"{pair.stem}.txt", f"{pair.caption}\n".encode())
    for name, text in (("dataset.toml", DATASET_TOML), ("train.toml", TRAIN_TOML)):
        write_file(root / name, text.encode())


def pairs(count: int, seed: int = 0) -> Iterator[Pair]:
    """The pairs that are learned: each shape in each color, on either ground, again and again."""
    for index in range(count):
        color = (index // len(_KNOWN) + index) % len(AFTER)
        shape = _KNOWN[index % len(_KNOWN)]
        yield Pair(stem=f"{shape}{'es' if shape.endswith('s') else 's'}/{index:03}", shape=shape, color=AFTER[color],
                   ground=GROUNDS[index // 2 % len(GROUNDS)], seed=seed * 1_000_003 + index)
