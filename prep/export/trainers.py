"""Lays pictures out for ai-toolkit, musubi-tuner and diffusion-pipe, each with a configuration of its data.

    train/3_photos/NAME.jpg             the picture, byte for byte; `prep.export.layout` has the directories
    train/3_photos/NAME.txt             its caption, whole: these tools take a file for one caption
    train/masks/3_photos/NAME.png       masks of a directory that has any, for ai-toolkit and diffusion-pipe
    train/control_1/3_photos/NAME.jpg   its first reference, and so on
    train/3_photos/captions.json        lists of captions by name where a picture has several, for diffusion-pipe
    train/3_photos.jsonl                pictures, captions and references of a directory, for musubi-tuner, which finds
                                        references in a directory by the beginning of a name, so also another picture's
    config.yaml or dataset.toml         directories, repeats, sizes and roles

Names, defaults and meanings of the keys: ai-toolkit 27a03a91 (toolkit/config_modules.py), musubi-tuner 30c658c
(docs/dataset_config.md), diffusion-pipe 8f83dbf (utils/dataset.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any

from prep.errors import UsageError
from prep.export import folder
from prep.export.kohya_config import Resolution, is_mirrored, sizes_of
from prep.export.layout import Picture
from prep.export.masks import is_masked, whole_mask
from prep.formatting import join_names

NAMES = {"ai-toolkit": "config.yaml", "musubi": "dataset.toml", "diffusion-pipe": "dataset.toml"}
HELD_OUT = "validation.toml"  # held-out pictures for diffusion-pipe's eval_datasets
# The endings that each reads; musubi-tuner reads the last two with their plugins, diffusion-pipe what Pillow does.
READ: dict[str, tuple[str, ...]] = {
    "ai-toolkit": (".jpg", ".jpeg", ".png", ".webp"),
    "musubi": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl"),
    "diffusion-pipe": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".tif", ".tiff", ".gif")}
_TITLES = {"ai-toolkit": "ai-toolkit", "musubi": "musubi-tuner", "diffusion-pipe": "diffusion-pipe"}


@dataclass(frozen=True)
class TrainerPlan:
    """The form in which one of `TRAINERS` gets an export's pictures."""

    to: str
    pictures: Sequence[Picture]  # also those that are held out

    @cached_property
    def _folders(self) -> dict[str, list[Picture]]:
        folders: dict[str, list[Picture]] = {}
        for picture in self.pictures:
            folders.setdefault(picture.folder, []).append(picture)
        return folders

    @cached_property
    def _masked(self) -> set[str]:
        return {name for name, pictures in self._folders.items() if self.to != "musubi"
                and any(is_masked(picture.first) for picture in pictures)}

    @cached_property
    def _sizes(self) -> list[Resolution]:
        return sizes_of([picture for picture in self.pictures if picture.role != "validation"] or self.pictures)

    def check(self) -> None:
        """Raises `UsageError` for samples that the tool cannot read, or would train otherwise."""
        whose, odd = _TITLES[self.to], [picture.first.name for picture in self.pictures
                                        if picture.suffix not in READ[self.to]]
        if odd:
            raise UsageError(f"{whose} skips pictures in formats that it does not read ({len(odd)}): "
                             f"{join_names(odd, 8)}", hint="convert them to PNG, and encode again; --to folder takes "
                             "any")
        if any(picture.first.of.manifest.paired for picture in self.pictures[:1]):
            raise UsageError(f"the pictures are pairs for a slider, but {whose} would take the others for conditions",
                             hint="--to folder, webdataset and safetensors have both pictures of each pair")
        if self.to != "ai-toolkit" and any(picture.role == "prior" for picture in self.pictures):
            raise UsageError(f"samples have the role prior, but {whose} knows no regularization pictures",
                             hint="encode without these sources (--sources), or --to ai-toolkit")
        if self.to != "diffusion-pipe":
            return
        for name, pictures in self._folders.items():
            counts = {len(folder.controls(picture)) for picture in pictures}
            if counts not in ({0}, {1}):
                raise UsageError(f"the pictures of {name} have {' or '.join(map(str, sorted(counts)))} references, but "
                                 "diffusion-pipe takes one for each picture of a directory",
                                 hint="--to ai-toolkit, musubi, folder and webdataset have several")

    def files(self, picture: Picture) -> dict[str, folder.Make]:
        """The files of one picture by name, each with the function that makes its bytes."""
        makers: dict[str, folder.Make] = {picture.name: picture.first.picture}
        if picture.first.captions and self.to != "musubi":
            makers[f"{picture.stem}.txt"] = picture.first.captions[0].encode
        if picture.folder in self._masked and is_masked(picture.first):
            makers[f"{_beside(picture.folder, 'masks')}{picture.stem.removeprefix(picture.folder)}.png"] = partial(
                whole_mask, folder.largest(picture))
        for name, reference in folder.controls(picture).items():
            makers[name] = partial(picture.first.reference_file, reference)
        return makers

    def lists(self) -> dict[str, folder.Make]:
        """The configuration, and the lists of captions of directories."""
        makers: dict[str, folder.Make] = {}
        for name, pictures in self._folders.items():
            if self.to == "musubi":
                makers[f"{name}.jsonl"] = partial(_rows, pictures)
            elif self.to == "diffusion-pipe" and any(len(picture.first.captions) > 1 for picture in pictures):
                makers[f"{name}/captions.json"] = partial(_captions, pictures)
        lines: Mapping[str, Callable[[], Iterator[str]]] = {
            "ai-toolkit": self._ai_toolkit, "musubi": self._musubi, "diffusion-pipe": self._diffusion_pipe}
        makers[NAMES[self.to]] = lambda: _joined(lines[self.to]())
        if self.to == "diffusion-pipe" and any(picture.role == "validation" for picture in self.pictures):
            makers[HELD_OUT] = lambda: _joined(self._diffusion_pipe(held_out=True))
        return makers

    # ---- the configurations ------------------------------------------------------------------------------------------

    def _head(self, *, held_out: bool = False) -> Iterator[str]:
        """Yields comments: how to start the tool, and what it does not know."""
        yield f"# Written by prep export. Paths are relative to this directory: start {_TITLES[self.to]} in it."
        shown = [picture for picture in self.pictures if (picture.role == "validation") == held_out]
        yield f"# An epoch shows {sum(sum(picture.repeats.values()) for picture in shown)} pictures, with repeats."
        for said, differs in (
                ("have weights here", self.to != "ai-toolkit" and any(
                    picture.first.facts()["weight"] != 1 for picture in shown)),
                ("are also mirrored here", self.to != "ai-toolkit" and any(map(is_mirrored, shown))),
                ("have masks here", self.to == "musubi" and any(is_masked(picture.first) for picture in shown)),
                ("have several captions here, of which the first is written", self.to != "diffusion-pipe" and any(
                    len(picture.first.captions) > 1 for picture in shown))):
            if differs:
                yield f"# Pictures {said}, which {_TITLES[self.to]} does not know."
        if self.to != "ai-toolkit":
            yield f"# {_TITLES[self.to]} turns no picture by its EXIF orientation: turn such files before."

    def _shown(self, role: str) -> Iterator[tuple[str, list[Picture], int, list[Resolution]]]:
        """Yields the directories of a role, with the repeats and sizes of their pictures."""
        for name, pictures in self._folders.items():
            by_repeats: dict[int, list[Resolution]] = {}
            for size in self._sizes:
                counts = [count for bucket, count in pictures[0].repeats.items() if bucket in size.buckets]
                if counts:
                    by_repeats.setdefault(counts[0], []).append(size)
            for repeats, sizes in by_repeats.items():
                if pictures[0].role == role:
                    yield name, pictures, repeats, sizes

    def _ai_toolkit(self) -> Iterator[str]:
        yield from self._head()
        yield "# Add network, train, model, save and sample; type is that of your version (diffusion_trainer)."
        yield from ("job: extension", "config:", "  name: export", "  process:", "    - type: sd_trainer",
                    "      datasets:")
        for role in ("train", "prior"):
            for name, pictures, repeats, sizes in self._shown(role):
                count = max(len(folder.controls(picture)) for picture in pictures)
                weight = float(pictures[0].first.facts()["weight"])
                options = {"folder_path": name, "caption_ext": "txt", "resolution": [size.side for size in sizes],
                           "num_repeats": repeats, "is_reg": role == "prior", "loss_multiplier": weight,
                           "flip_x": all(map(is_mirrored, pictures)),
                           "mask_path": _beside(name, "masks") if name in self._masked else None,
                           "control_path": [_beside(name, f"control_{number}") for number in range(1, count + 1)]}
                first = "-"
                for key, value in options.items():
                    if value not in (None, False, []) and (key, value) != ("loss_multiplier", 1.0):
                        yield f"        {first} {key}: {_spelled(value)}"
                        first = " "

    def _musubi(self) -> Iterator[str]:
        yield from self._head()
        yield from ("", "[general]", "enable_bucket = true", "")
        for name, _, repeats, sizes in self._shown("train"):
            for size in sizes:
                yield from ("[[datasets]]", f"image_jsonl_file = {_spelled(f'{name}.jsonl')}",
                            f"cache_directory = {_spelled(f'.cache/{size.side}/{name}')}",
                            f"resolution = [{size.side}, {size.side}]", f"num_repeats = {repeats}",
                            f"bucket_no_upscale = {_spelled(size.no_upscale)}", "")

    def _diffusion_pipe(self, *, held_out: bool = False) -> Iterator[str]:
        yield from self._head(held_out=held_out)
        yield from ("", "enable_ar_bucket = true", "")
        for name, pictures, repeats, sizes in self._shown("validation" if held_out else "train"):
            yield from ("[[directory]]", f"path = {_spelled(name)}", f"num_repeats = {repeats}")
            if len(sizes) == 1:
                yield f"size_buckets = {[[*bucket, 1] for bucket in sorted(sizes[0].buckets)]}"
            else:
                ratios = sorted({round(width / height, 4) for size in sizes for width, height in size.buckets})
                yield from (f"resolutions = {sorted(size.side for size in sizes)}", f"ar_buckets = {ratios}")
            if name in self._masked:
                yield f"mask_path = {_spelled(_beside(name, 'masks'))}"
            if any(folder.controls(picture) for picture in pictures):
                yield f"control_path = {_spelled(_beside(name, 'control_1'))}"
            yield from (f"skip_empty_caption = {_spelled(all(picture.first.captions for picture in pictures))}", "")


def _beside(name: str, what: str) -> str:
    """A directory of the masks, or of the references, of the pictures in `name`: train/masks/3_photos."""
    role, _, place = name.partition("/")
    return f"{role}/{what}/{place}"


def _rows(pictures: Sequence[Picture]) -> bytes:
    """JSON lines of pictures with their captions and references."""
    rows = ({"image_path": picture.name, "caption": next(iter(picture.first.captions), ""),
             **{f"control_path_{number}": name for number, name in enumerate(folder.controls(picture))}}
            for picture in pictures)
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _captions(pictures: Sequence[Picture]) -> bytes:
    """The captions of each picture of a directory, by its name."""
    table: dict[str, Any] = {PurePosixPath(picture.name).name: list(picture.first.captions) for picture in pictures}
    return json.dumps(table, ensure_ascii=False, indent=1).encode() + b"\n"


def _spelled(value: Any) -> str:
    """A value as both TOML and YAML have it."""
    return json.dumps(value, ensure_ascii=False)


def _joined(lines: Iterator[str]) -> bytes:
    return "\n".join(lines).rstrip("\n").encode() + b"\n"
