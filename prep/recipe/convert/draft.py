"""Shared code of the converters: a recipe under construction, and tables that record which of their keys were read.

No setting is dropped silently: every setting that is not converted gets a note, unless it is off or null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from prep.buckets.sizes import MOST_RESOLUTION
from prep.captions.options import CaptionOptions
from prep.parse import Unparsed, brief, expect
from prep.recipe.checks import ENLARGED
from prep.recipe.convert.note import ConversionNote, shown
from prep.recipe.convert.training import Training
from prep.recipe.schema import SETTINGS, ImageOptions, Recipe, Source
from prep.recipe.write import Comment
from prep.sources.item import MaskFrom

T = TypeVar("T")
Number = TypeVar("Number", int, float)
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
UNKNOWN = "unknown setting; ignored"
VIEWS = 4  # crops per picture, for tools that draw a new crop each time they show it
CUTS = f"{VIEWS} crops of each picture are drawn once and kept: [image] views"
BALANCED = "an epoch shows these pictures as often as the training pictures, never more"
FLAT = ("*/*",)  # globs that match everything in subdirectories
# Numbers that converters write.
_OF_IMAGES = ("step", "shortest", "longest", "min_side", "views")
_OF_CAPTIONS = ("variants", "dropout", "keep_tokens")
_OF_SOURCES = ("repeats", "weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedRecipe:
    """A recipe made from another tool's file."""

    tool: str
    recipe: Recipe  # its paths are absolute
    notes: tuple[ConversionNote, ...]
    training: Training | None = None  # for a train.toml
    prompts: str = ""  # the text of a prompt file to write beside the recipe

    @property
    def remarks(self) -> list[Comment]:
        """The notes as comments for the recipe."""
        return [Comment(at=note.at, text=note.text) for note in self.notes]


@dataclass(kw_only=True, slots=True)
class Draft:
    """A recipe under construction."""

    tool: str
    base: Path  # the directory of the other tool's file
    sources: list[Source] = field(default_factory=list)  # each with its caption and mask settings
    images: list[tuple[str, ImageOptions]] = field(default_factory=list)  # (place in the file, options)
    validation: float = 0.0
    notes: list[ConversionNote] = field(default_factory=list)
    trains: bool = False  # whether the file also has training settings, which become a train.toml
    batches: list[int] = field(default_factory=list)  # batch sizes set by parts of the dataset
    dropouts: list[float] = field(default_factory=list)  # caption dropout rate of each source
    usual: ImageOptions | None = None  # of the whole file, if parts of it may have their own
    longer: Fraction = Fraction(1)  # how many of the tool's epochs one epoch of the recipe is
    epoch: int = 0  # samples of the tool's epoch; 0: unknown, or the same

    @property
    def here(self) -> str:
        """The recipe's name for the source that is added next."""
        return f"source[{len(self.sources)}]"

    def note(self, key: str, value: Any, said: str, at: str) -> None:
        """Adds a note, once for each key and value."""
        value_shown = shown(key, value)
        if all((note.key, note.value, note.said) != (key, value_shown, said) for note in self.notes):
            self.notes.append(ConversionNote(key=key, value=value_shown, said=said, at=at))

    def place(self, text: str, key: str) -> Path:
        """The existing path that a text of the file means; if there is none, the likeliest, with a note. Raises
        `Unparsed`."""
        if "\0" in text or not text:
            raise Unparsed(f"{key} is {brief(text)}, expected a path")
        path = self.existing(text)
        if path is None:
            self.note(key, text, "this path does not exist", self.here)
        return path or self.base / text

    def reference_folders(self, texts: Sequence[str], key: str) -> tuple[Path, ...] | None:
        """The directories of references that these texts mean, those that exist; `None` if there are none. Raises
        `Unparsed`."""
        folders = [path for text in texts if (path := self.place(text, key)).is_dir()]
        if len(folders) < len(texts):
            self.note(key, texts, "no references are read from what is not a directory", self.here)
        return tuple(dict.fromkeys(folders)) or None

    def existing(self, text: str) -> Path | None:
        """The path in the file's directory, the current directory, or the parent of the file's directory, if it exists.

        Tools resolve paths against the directory they are started in; files often lie below it (`config/x.json`).
        """
        spelled = [Path(text), Path(text.replace("\\", "/"))]
        options = (base / spelling for spelling in spelled for base in (self.base, Path.cwd(), self.base.parent))
        return next((path for path in options if _exists(path)), None)

    def finish(self) -> ConvertedRecipe:
        """The recipe, with shared settings of all sources in its sections. Raises `Unparsed` if there is no source."""
        self._fit()
        self._join_resolutions()
        if not self.sources:
            why = f": {self.notes[0].text}" if self.notes else ""
            raise Unparsed(f"it has no source that can be converted{why}")
        captions = [source.caption or CaptionOptions() for source in self.sources]
        caption = CaptionOptions(**{name: getattr(captions[0], name) for name in CaptionOptions.__dataclass_fields__
                                    if len({getattr(choice, name) for choice in captions}) == 1})
        masks = self._masks()
        mask = masks[0] if masks[0] is not None and all(other == masks[0] for other in masks) else "auto"
        recipe = Recipe(
            sources=tuple(replace(source, caption=None if own == caption else own,
                                  mask=None if (where or "auto") == mask else where)
                          for source, own, where in zip(self.sources, captions, masks, strict=True)),
            image=self._image(), caption=caption, mask=mask, validation=self.validation)
        return ConvertedRecipe(tool=self.tool, recipe=recipe, notes=tuple(self.notes))

    def _fit(self) -> None:
        """Replaces numbers that a recipe does not take by the nearest that it does, each with a note."""
        self.images = [(where, self._fit_image(where, image)) for where, image in self.images]
        for number, source in enumerate(self.sources):
            where, at = self.images[number][0], f"source[{number}]"
            own = self._nearest(source, "source", _OF_SOURCES, where, at)
            caption = source.caption and replace(
                source.caption, **self._nearest(source.caption, "caption", _OF_CAPTIONS, where, at))
            self.sources[number] = replace(source, caption=caption, **own)
        self.validation = self.within("validation", self.validation, SETTINGS["validation.fraction"].bounds,
                                      "validation")

    def _fit_image(self, where: str, image: ImageOptions) -> ImageOptions:
        image = replace(image, **self._nearest(image, "image", _OF_IMAGES, where, "image"))
        bounds = (image.step or 8, MOST_RESOLUTION)
        sides = tuple(sorted({self.within(f"{where}: resolution", side, bounds, "image")
                              for side in image.resolutions}))
        upscale = image.upscale if isinstance(image.upscale, str) else self.within(
            f"{where}: upscale", image.upscale, ENLARGED, "image")
        return replace(image, resolution=sides[0] if len(sides) == 1 else sides, upscale=upscale)

    def _nearest(self, record: Any, section: str, names: Iterable[str], where: str, at: str) -> dict[str, Any]:
        """The numbers of `record` with these names, within the section's bounds; defaults as they are."""
        values = {name: getattr(record, name) for name in names}
        return {name: value if value == SETTINGS[f"{section}.{name}"].default else
                self.within(f"{where}: {name}", value, SETTINGS[f"{section}.{name}"].bounds, at)
                for name, value in values.items()}

    def within(self, key: str, value: Number, bounds: tuple[float, float], at: str) -> Number:
        """`value`, or the nearest number within `bounds`, with a note."""
        low, high = bounds
        if low <= value <= high:
            return value
        nearest = type(value)(min(max(value, low), high) if value == value else low)
        self.note(key, value, f"a recipe has numbers from {low:g} to {high:g}; {nearest:g} is written", at)
        return nearest

    def _join_resolutions(self) -> None:
        """Merges sources that repeat at several resolutions, and are otherwise equal, into sources at all of them."""
        groups: dict[Any, list[int]] = {}
        for number, (_, image) in enumerate(self.images):
            groups.setdefault(image.resolution, []).append(number)
        (first, *others) = list(groups.values()) or [[]]
        alike = all(list(map(self._at_any, other)) == list(map(self._at_any, first)) for other in others)
        if not others or not alike or self.images[0][1].buckets == "list":
            return
        sides = tuple(sorted(side for resolution in groups
                             for side in ([resolution] if isinstance(resolution, int) else resolution)))
        place = {f"source[{number}]": f"source[{at}]" for group in groups.values() for at, number in enumerate(group)}
        self.notes = [replace(note, at=place.get(note.at, note.at)) for note in self.notes]
        self.sources = [self.sources[number] for number in first]
        self.images = [(self.images[number][0], replace(self.images[number][1], resolution=sides)) for number in first]

    def _at_any(self, number: int) -> tuple[Source, ImageOptions]:
        """A source and its image options, without the resolution."""
        return self.sources[number], replace(self.images[number][1], resolution=512)

    def _image(self) -> ImageOptions:
        """The image options of all pictures, with a note for each key in which a group of them differs."""
        chosen = self.chosen_image()
        for where, image in self.images:
            for name in ImageOptions.__dataclass_fields__:
                wanted = getattr(image, name)
                if wanted != getattr(chosen, name) and not (name == "resolution" and image.sizes):
                    self.note(f"{where}: {name}", wanted, "a recipe has one [image], with "
                              f"{brief(getattr(chosen, name))}; make another recipe for this value", "image")
        return chosen

    def chosen_image(self) -> ImageOptions:
        """The options of the first group of pictures that has the file's own resolution, or else of the first."""
        sized = ("resolution", "buckets", "sizes", "step")
        usual = [image for _, image in self.images if self.usual is not None
                 and all(getattr(image, name) == getattr(self.usual, name) for name in sized)]
        return next(iter([*usual, *(image for _, image in self.images)]), ImageOptions())

    def _masks(self) -> list[MaskFrom | None]:
        """The masks of the sources; alpha is removed, with a note, if others use files: a recipe has one kind."""
        masks = [source.mask for source in self.sources]
        if "alpha" in masks and any(mask not in (None, "none", "alpha") for mask in masks):
            for number, mask in enumerate(masks):
                if mask == "alpha":
                    self.note(f"{self.sources[number].path.name}: alpha as mask", None,
                              "a recipe's masks are all alpha or all files; make another recipe for this source",
                              f"source[{number}]")
            masks = [None if mask == "alpha" else mask for mask in masks]
        return masks


@dataclass(kw_only=True, slots=True)
class Layer:
    """A table of the file, and its place there."""

    table: Mapping[str, Any]
    where: str  # "" or "datasets[0]"
    keys_read: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        """A key with its place in the file."""
        return f"{self.where}.{name}" if self.where else name


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolConfig:
    """Layered settings, the most specific first; null counts as not given."""

    draft: Draft
    layers: Sequence[Layer]

    def has(self, name: str) -> bool:
        """Whether any layer has a value."""
        return any(layer.table.get(name) is not None for layer in self.layers)

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The most specific value, which must be of type `kind`. Raises `Unparsed`."""
        value = self.any(name)
        return default if value is None else expect(value, kind, self.key(name))

    def any(self, name: str) -> Any:
        """The most specific value, of any type; None if no layer has one."""
        for layer in self.layers:
            layer.keys_read.add(name)
        return next((layer.table[name] for layer in self.layers if layer.table.get(name) is not None), None)

    def key(self, name: str) -> str:
        """The key, prefixed by the place of the layer that has it."""
        layer = next((layer for layer in self.layers if layer.table.get(name) is not None), self.layers[0])
        return layer.key(name)

    def note(self, name: str, said: str, *, at: str | None = None) -> None:
        """Adds a note on a setting if it is given and not off."""
        value = self.any(name)
        if value not in OFF:
            self.draft.note(self.key(name), value, said, self._at(name) if at is None else at)

    def note_all(self, names: Mapping[str, str]) -> None:
        """Adds notes on several settings, each if it is given and not off."""
        for name, said in names.items():
            self.note(name, said)

    def note_unread(self, known: Mapping[str, str] | None = None, *, at: str | None = None) -> None:
        """Adds notes on all keys that were not read; `known` maps some of them to their notes."""
        for layer in self.layers:
            for name in layer.table:
                if name not in layer.keys_read:
                    self.note(name, (known or {}).get(name, UNKNOWN), at=at)

    def _at(self, name: str) -> str:
        """The place of a note: the source for its own setting, the top of the recipe for a shared one."""
        nearest = len(self.layers) == 1 or self.layers[0].table.get(name) is not None
        return self.draft.here if nearest else ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is invalid on this system
        return False
