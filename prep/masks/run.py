"""Runs `prep mask`: checks where it writes, finds the model, makes the masks and the pages that show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prep.dataset.listing import picture_places, walk_recipe
from prep.errors import ConfigError, PathError, UsageError
from prep.findings import Finding, rejected_lines
from prep.formatting import counted, grouped, join_names, printable
from prep.fs.paths import NamedPath, check_disjoint, check_not_cache
from prep.masks.generate import make_masks
from prep.masks.methods import METHODS, MadeMasks, MaskOptions, check_options, mask_path
from prep.masks.picture import Model
from prep.models.device.named import require_device
from prep.models.hub import SINGLE, locate_directory
from prep.progress import Progress, phase
from prep.recipe.schema import Recipe
from prep.runtime import defer_interrupts
from prep.sources.item import Item

CLIPSEG = "CIDAS/clipseg-rd64-refined"  # the published weights of the paper, by its authors
REMBG = "u2net"  # rembg's own default


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskEntry:
    """A picture and the path of its mask."""

    item: Item
    name: str  # for people
    mask: Path


Show = Callable[[Sequence[MaskEntry]], tuple[Path, ...]]  # writes pages; returns their paths


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskCall:
    """A call of `prep mask`."""

    recipe: Recipe
    choice: MaskOptions
    output: Path
    show: Show | None  # makes pages that show the masks
    model: str  # a directory, or a Hub id; for rembg, a model name; "": the method's default
    device: str
    batch_size: int
    jobs: int
    download: bool
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskReport:
    """The result of `prep mask`."""

    made: MadeMasks
    output: Path
    pages: tuple[Path, ...]

    def as_json(self) -> dict[str, Any]:
        """The document of `prep mask --json`."""
        return {"format": "latentry/mask", "version": 1,
                "directory": str(self.output), "written": self.made.written, "kept": self.made.kept,
                "skipped": self.made.skipped, "black": list(self.made.black),
                "pages": [str(page) for page in self.pages],
                "findings": [finding.as_json() for finding in self.made.findings]}

    def as_text(self, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every rejected picture."""
        made = self.made
        existing = f"{grouped(made.kept)} existing kept{' (--force replaces them)' if made.kept else ''}"
        need = "picture needs" if made.skipped == 1 else "pictures need"
        lines = [f"{printable(str(self.output))}: {counted(made.written, 'mask')} written, {existing}, "
                 f"{grouped(made.skipped)} {need} none (all white)"]
        if made.black:
            lines.append(f"entirely black, so they would not train: {join_names(made.black, None if every else 8)}")
        lines += [f"page: {printable(str(page))}" for page in self.pages]
        return "\n".join([*lines, *rejected_lines(made.findings, every=every)])


def run_mask(call: MaskCall) -> MaskReport:
    """Makes the masks of all pictures of the recipe. Raises `UsageError`, `ConfigError`, `PathError`, `ModelError`."""
    choice = call.choice
    require_device(call.device)
    check_options(choice)
    if call.model and not METHODS[choice.method].model:
        raise UsageError(f"--model is for methods with a model, not for --with {choice.method}")
    if choice.method == "segment" and not call.model:
        raise UsageError("--with segment has no --model, expected a segmentation model",
                         hint="name a directory, or a Hub id like nvidia/segformer-b0-finetuned-ade-512-512")
    if call.recipe.mask == "alpha":
        raise UsageError("--mask is 'alpha', expected auto, none, sidecar or a directory",
                         hint="--with alpha makes masks from transparency")
    _check_places(call)
    entries = list(walk_recipe(call.recipe))
    items = [entry for entry in entries if isinstance(entry, Item)]
    unread = [entry for entry in entries if isinstance(entry, Finding) and entry.severity == "error"]
    _check_names(call.recipe, items, choice)
    with call.progress("masking", len(items), "pictures") as tick:
        made = make_masks(items, choice, out=call.output, load=partial(_load, call), jobs=call.jobs,
                          batch_size=call.batch_size, tick=tick)
    return MaskReport(made=replace(made, findings=(*unread, *made.findings)), output=call.output,
                      pages=() if call.show is None else call.show(_entries(call, items)))


def _check_places(call: MaskCall) -> None:
    """Raises `PathError` if the output overlaps the pictures, is a cache or is a file; before anything is written."""
    places = picture_places(call.recipe)
    for pictures in places:
        check_disjoint([pictures, NamedPath(role="output", path=call.output)])
    check_not_cache(call.output)
    if call.output.exists() and not call.output.is_dir():
        raise PathError(f"{call.output} is a file, expected a directory for masks")


def _check_names(recipe: Recipe, items: Sequence[Item], choice: MaskOptions) -> None:
    """Raises `ConfigError` if pictures of two sources would share a mask: `prep encode` finds masks by name."""
    if len(recipe.sources) == 1:
        return
    owners: dict[str, Item] = {}
    for item in items:
        place = str(mask_path(item.name, choice.naming))
        other = owners.setdefault(place, item)
        if other.source != item.source:
            raise ConfigError(f"{other.label} and {item.label} would share the mask {place}",
                              hint="run prep mask for each source, and set its directory as mask in that [[source]]")


def _load(call: MaskCall) -> Model:
    with phase(call.progress, "loading the model"):
        return _model(call)


def _model(call: MaskCall) -> Model:
    choice, model = call.choice, call.model
    if choice.method == "rembg":
        with defer_interrupts():
            from prep.masks.rembg import Matting  # here: an extra

        return Matting(model or REMBG, download=call.download)
    folder = locate_directory(model or CLIPSEG, download=call.download, parts=SINGLE)
    with defer_interrupts():
        from prep.masks import segmentation  # here: most masks need no torch

    if choice.method == "clipseg":
        return segmentation.clipseg(folder, prompts=choice.prompts, device=call.device)
    return segmentation.segment(folder, labels=choice.labels, device=call.device)


def _entries(call: MaskCall, items: Sequence[Item]) -> list[MaskEntry]:
    return [MaskEntry(item=item, name=item.label, mask=call.output / mask_path(item.name, call.choice.naming))
            for item in items]
