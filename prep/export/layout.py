"""Lays pictures out for other trainers: a directory for each role, each source and each number of repeats.

    train/3_photos/NAME.jpg             10 pictures that an epoch shows three times
    regularization/1_people/NAME.jpg
    train/control_1/3_photos/NAME.jpg   the first references of those pictures, under their names
    validation/1_photos/NAME.jpg        only on request: no trainer knows that these are held out

sd-scripts and OneTrainer look into no directory below the one that they are given, so a name like `sub/a.jpg` becomes
`sub_a.jpg`. A name that two pictures would have gets a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from prep.export.sample import ExportSample, Samples, safe_path
from prep.geometry import Size

ROLES = {"train": "train", "prior": "regularization", "validation": "validation"}
REPEATED = re.compile(r"\d+_")  # as sd-scripts names directories
PLAIN = {".jpe": ".jpg", ".jfif": ".jpg", ".dib": ".bmp"}  # other trainers know a format by fewer endings


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture in an export, with its samples: one for each size at which it was encoded."""

    samples: Sequence[ExportSample]
    folder: str  # below the export: train/3_photos
    stem: str  # its path below the export, without suffix

    @property
    def first(self) -> ExportSample:
        """The picture's first sample: name, captions and role are those of all."""
        return self.samples[0]

    @property
    def role(self) -> str:
        """The role of the picture's samples."""
        return self.first.role

    @property
    def repeats(self) -> dict[Size, int]:
        """The number of times that an epoch shows the picture, by bucket."""
        return {sample.bucket: sample.repeats for sample in self.samples}

    @property
    def name(self) -> str:
        """The picture's path below the export."""
        return f"{self.stem}{self.suffix}"

    @property
    def suffix(self) -> str:
        """The ending of the picture's name."""
        return suffix_of(self.first.name)


def suffix_of(name: str) -> str:
    """The ending of a picture's name in an export."""
    suffix = PurePosixPath(name).suffix.lower()
    return PLAIN.get(suffix, suffix)


def lay_out(samples: Samples, *, held_out: bool) -> list[Picture]:
    """The pictures of an export in the order of source and name; those that are held out only if `held_out`."""
    taken: set[str] = set()
    folders: dict[tuple[object, ...], str] = {}
    placed = []
    pictures = _by_picture(sample for sample in samples if held_out or sample.role != "validation")
    most = max(map(len, pictures), default=0)
    for some in pictures:
        first, repeats = some[0], [sample.repeats for sample in some]
        repeats = [1] * len(some) if first.role == "validation" else repeats
        key = first.role, first.source, *repeats, *((sample.bucket for sample in some) if len(some) < most else ())
        if key not in folders:
            folders[key] = _unique(f"{ROLES[first.role]}/{repeats[0]}_{_source_name(first)}", taken)
        name = safe_path(str(PurePosixPath(first.name).with_suffix(""))).replace("/", "_")
        placed.append(Picture(samples=some, folder=folders[key], stem=_unique(f"{folders[key]}/{name}", taken)))
    return placed


def _by_picture(samples: Iterable[ExportSample]) -> list[list[ExportSample]]:
    """The samples of each picture, in the order of the first: a picture at several sizes makes several."""
    def whose(sample: ExportSample) -> tuple[int, str, str]:
        return sample.source, sample.name, sample.role

    return [list(some) for _, some in groupby(sorted(samples, key=whose), whose)]


def _source_name(sample: ExportSample) -> str:
    """The name of a source's directory, without the repeats that it may have there."""
    place = sample.of.manifest.sources[sample.source]
    name = "" if place is None else place.stem if place.suffix == ".tar" else place.name
    return REPEATED.sub("", safe_path(re.sub(r"[{}\[\]*?]", "", name)), count=1).strip("_ ") or f"source{sample.source}"


def _unique(path: str, taken: set[str]) -> str:
    """A path that is not taken, also where case does not count; takes it."""
    unique, copy = path, 2
    while unique.casefold() in taken:
        unique, copy = f"{path}-{copy}", copy + 1
    taken.add(unique.casefold())
    return unique
