"""Methods that make mask pictures, their options, and the names of the files.

`prep.masks.generate` makes the masks, from maps that `prep.masks.pixels` or a model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from prep.errors import UsageError
from prep.findings import Finding
from prep.parse import Unparsed, color_of, suggest, within
from prep.sources.tree import MASK

Method = Literal["alpha", "color", "threshold", "clipseg", "segment", "rembg"]
Combine = Literal["replace", "add", "subtract", "intersect"]
Naming = Literal["onetrainer", "kohya"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFacts:
    """Facts about a method."""

    says: str  # what trains
    threshold: float | None  # default threshold of its map; None: the mask stays gray
    needs: str = ""  # the option that it requires
    model: bool = False  # a model makes its map


# 0.3: OneTrainer's default for CLIPSeg, whose maps stay far below 1 even where the prompt matches.
METHODS: Mapping[Method, MethodFacts] = {
    "alpha": MethodFacts(says="opaque parts train", threshold=None),
    "color": MethodFacts(says="parts that differ from the background color train", threshold=None),
    "threshold": MethodFacts(says="bright parts train", threshold=0.5),
    "clipseg": MethodFacts(says="parts that a prompt names train", threshold=0.3, needs="--prompt", model=True),
    "segment": MethodFacts(says="parts with a label train", threshold=0.5, needs="--label", model=True),
    "rembg": MethodFacts(says="the foreground trains", threshold=None, model=True),
}
COMBINE: Mapping[Combine, str] = {
    "replace": "the new mask", "add": "the lighter of both", "subtract": "the old mask minus the new one",
    "intersect": "the darker of both"}
NAMING: Mapping[Naming, str] = {"onetrainer": f"{MASK}.png", "kohya": ".png"}  # what follows the picture's stem
MOST_SMOOTH, MOST_EXPAND = 256, 1024  # pixels; more than any outline needs


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskOptions:
    """The options of making masks. The order: map, smooth, threshold, invert, expand, combine."""

    method: Method
    color: str = "white"  # of `color`: the background
    tolerance: int = 16  # of `color`: largest difference of a channel from it, 0 to 254
    threshold: float | None = None  # fraction of white from which a pixel trains; None: the method's own
    invert: bool = False
    smooth: float = 0.0  # radius of a Gaussian blur before the threshold, in pixels
    expand: int = 0  # pixels by which the white area grows on each side; negative: shrinks
    prompts: tuple[str, ...] = ()  # of `clipseg`
    labels: tuple[str, ...] = ()  # of `segment`
    combine: Combine | None = None  # None: a picture's own mask is used as it is, an existing file is kept
    naming: Naming = "onetrainer"
    force: bool = False  # existing files are replaced

    @property
    def cut(self) -> float | None:
        """The threshold of the map; `None`: it stays gray."""
        return METHODS[self.method].threshold if self.threshold is None else self.threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeMasks:
    """The result of `make_masks`."""

    written: int
    kept: int  # existed already
    skipped: int  # would be entirely white: no transparency, nothing of the color
    findings: tuple[Finding, ...]  # pictures that cannot be used
    black: tuple[str, ...] = ()  # names of those written that are entirely black: nothing of the picture trains


def mask_path(name: str, naming: Naming = "onetrainer") -> PurePosixPath:
    """Path of the mask of the picture `name` in the mask directory: the same folder, with the name of `naming`."""
    path = PurePosixPath(name)
    assert not path.is_absolute() and ".." not in path.parts, f"item name {name!r} leads out of its source"
    return path.with_name(f"{path.stem}{NAMING[naming]}")


def check_options(choice: MaskOptions) -> None:
    """Raises `UsageError` for options that make no mask."""
    _check_words(choice)
    try:
        within(choice.tolerance, 0, 254, "--tolerance")
        within(0.5 if choice.cut is None else choice.cut, 0.001, 1, "--threshold")
        within(choice.smooth, 0, MOST_SMOOTH, "--smooth")
        within(choice.expand, -MOST_EXPAND, MOST_EXPAND, "--expand")
        color_of(choice.color, "--color")
    except Unparsed as error:
        hint = "for example: prep mask SOURCE --with color --color '#00ff00' -o DIR" if "--color" in str(error) else ""
        raise UsageError(str(error), hint=hint) from None


def _check_words(choice: MaskOptions) -> None:
    """Raises `UsageError` for an unknown word, and for prompts or labels that are missing or for another method."""
    method: str = choice.method
    for option, value, known in (("--with", method, METHODS), ("--combine", choice.combine or "add", COMBINE),
                                 ("--naming", choice.naming, NAMING)):
        if value not in known:
            raise UsageError(f"{option} is '{value}', expected one of: {', '.join(known)}{suggest(value, known)}")
    for option, words, owner in (("--prompt", choice.prompts, "clipseg"), ("--label", choice.labels, "segment")):
        if words and owner != method:
            raise UsageError(f"{option} is for --with {owner}, not for --with {method}")
        if owner == method and not [word for word in words if word.strip()]:
            raise UsageError(f"--with {method} has no {option}, expected at least one: {METHODS[choice.method].says}")
