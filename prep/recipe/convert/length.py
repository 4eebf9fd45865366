"""Keeps the length of a run where an epoch here shows more than one of another tool.

A recipe repeats pictures a whole number of times, and shows each at all resolutions. Where a tool shows a part of a
source's pictures in an epoch, or each at one of several resolutions, an epoch here is as long as several there: the
shares of the sources stay as they are, and epochs become fewer, or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Any

from prep.errors import Problem
from prep.formatting import counted
from prep.fs.place import is_directory
from prep.recipe.convert.draft import Draft
from prep.recipe.convert.training import Training
from prep.recipe.schema import Source
from prep.sources.globs import chosen_by
from prep.sources.item import Item
from prep.sources.walk import walk_source

_MOST_TIMES = 1000  # epochs there in one here
_LEAST = 1e-6  # of a source's pictures, of which no directory has one
_TOLERANCE = 0.01  # of a source's share of an epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Frequency:
    """The number of times that another tool shows the pictures of a source in an epoch."""

    key: str  # of the setting, with its place in the file
    times: float  # each picture; below 1: not all of them
    samples: int | None = None  # in all, if the tool counts these


def count_pictures(source: Source) -> int:
    """The pictures of a source that is a directory on this computer; 0 if it has none, or is none."""
    if not is_directory(source.path):
        return 0
    fits = chosen_by(source.include, source.exclude)
    try:
        return sum(isinstance(entry, Item) and fits(entry.name)
                   for entry in walk_source(source.path, source=0, masks="sidecar"))
    except (Problem, OSError):
        return 0


def is_never(frequency: Frequency, source: Source) -> bool:
    """Whether an epoch has no sample of a source: a part of its pictures that is less than one of them."""
    if frequency.samples is not None or frequency.times < _LEAST:
        return not (frequency.samples or 0) > 0
    return frequency.times < 1 and 0 < count_pictures(source) * frequency.times < 1


def put_repeats(draft: Draft, shown: Sequence[Frequency], sides: int = 0) -> None:
    """Sets the repeats of the draft's sources to whole numbers in the proportions of `shown`, and how many of the other
    tool's epochs one epoch here is, `draft.longer`. `sides`: how often an epoch here shows a picture for once there; 0:
    once at each resolution."""
    drawn = [number for number, source in enumerate(draft.sources) if source.role == "train"]
    priors = [number for number, source in enumerate(draft.sources) if source.role == "prior"]
    sides = sides or len(draft.chosen_image().resolutions)
    whole = all(shown[number].samples is None and shown[number].times == int(shown[number].times) for number in drawn)
    if whole and sides == 1 and not priors:
        draft.sources = [replace(source, repeats=int(frequency.times))
                         for source, frequency in zip(draft.sources, shown, strict=True)]
        return
    counts = [count_pictures(source) for source in draft.sources]
    times = {number: _times(shown[number], counts[number]) for number in drawn}
    more = _multiplier(list(times.values()))
    theirs, ours = dict[int, int](), dict[int, int]()
    for number in drawn:
        repeats = max(1, round(times[number] * more))
        draft.sources[number] = replace(draft.sources[number], repeats=repeats)
        ours[number] = counts[number] * repeats * sides
    total = sum(ours.values())
    ours |= dict.fromkeys(priors, total // max(1, len(priors)))  # which are shown as often as the rest, in all
    for number in ours:
        frequency = shown[number]
        theirs[number] = floor(counts[number] * frequency.times) if frequency.samples is None else frequency.samples
    draft.longer = Fraction(more).limit_denominator(_MOST_TIMES) * sides
    if total and all(counts[number] for number in ours) and sum(theirs.values()):
        draft.epoch = sum(theirs.values())
        draft.longer = Fraction(sum(ours.values()), draft.epoch)
    for number in ours:
        _note_share(draft, number, shown[number], theirs[number], Fraction(ours[number], max(1, sum(ours.values()))))


def _times(frequency: Frequency, count: int) -> float:
    """The number of times that each of `count` pictures is shown; 1 if samples are counted and pictures cannot be."""
    return frequency.times if frequency.samples is None else frequency.samples / count if count else 1.0


def _multiplier(times: Sequence[float]) -> float:
    """The least factor that makes all of `times` nearly whole numbers of at least 1."""
    least = min(times, default=1.0)

    def fits(more: float) -> bool:
        return all(abs(round(count * more) - count * more) <= _TOLERANCE * count * more for count in times)

    whole = range(max(1, ceil((1 - _TOLERANCE) / least)), _MOST_TIMES)
    return next((float(more) for more in whole if fits(more)), max(1.0, 1 / least))


def _note_share(draft: Draft, number: int, frequency: Frequency, samples: int, share: Fraction) -> None:
    """Adds a note on a source that is not shown a whole number of times, or not as often as there."""
    source, samples_shown = draft.sources[number], frequency.samples
    value = frequency.times if samples_shown is None else f"{samples_shown} samples"
    theirs = Fraction(samples, draft.epoch) if draft.epoch else share
    alike = abs(theirs - share) <= _TOLERANCE * theirs
    if alike and frequency.samples is None and source.role == "train" and frequency.times == source.repeats:
        return
    if not draft.epoch:
        said = "repeats are whole numbers, and pictures could not be counted"
    elif alike:
        said = f"{float(share):.3g} of the samples of an epoch, as there"
    else:
        said = (f"{float(share):.3g} of the samples of an epoch, {float(theirs):.3g} there; fewer files, or an "
                "exclude, make it less")
    draft.note(frequency.key, value, f"repeats = {source.repeats} is written: {said}", f"source[{number}]")


def keep_length(draft: Draft, training: Training, batch: int) -> None:
    """Changes the settings' epochs, which are the other tool's, to the same length here.

    `batch`: samples of a step. Without the number of pictures the epochs stay, with a note.
    """
    if draft.longer == 1:
        return
    for name, value in list(training.settings.items()):
        if (count := _epochs(name, value)) is None:
            continue
        fewer, steps = count / draft.longer, max(1, floor(Fraction(count * draft.epoch, batch)))
        if not draft.epoch:
            said = "divide by that, which is not done here, since no pictures were found to count"
        elif fewer.denominator == 1:
            said = f"{fewer.numerator} of its epochs are as long, and are written"
            training.settings[name] = _spelled(name, fewer.numerator)
        else:
            said = f"{counted(steps, 'step')}, as many as there, in place of {counted(count, 'epoch')}"
            training.settings = {"steps" if key == name == "epochs" else key: steps if key == name else other
                                 for key, other in training.settings.items()}
        training.note(training.keys.get(name, name), count, f"an epoch here shows {float(draft.longer):.4g} times as "
                      f"many samples as one there: {said}")


def _epochs(name: str, value: Any) -> int | None:
    """The epochs of a setting: a number of them, or an interval like "2 epochs"."""
    if name == "epochs":
        return int(value)
    return int(value.split()[0]) if isinstance(value, str) and value.endswith((" epoch", " epochs")) else None


def _spelled(name: str, count: int) -> int | str:
    return count if name == "epochs" else f"{count} epoch{'' if count == 1 else 's'}"
