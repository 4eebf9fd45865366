"""Implements `prep init`: inspects a source or converts another tool's file, and writes the recipe atomically."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.errors import ConfigError, PathError, UsageError
from prep.formatting import counted, format_size, printable, shell_name
from prep.fs import atomic
from prep.fs.blob import open_file
from prep.fs.paths import check_not_cache, check_replaceable
from prep.fs.place import place_of, require_local
from prep.fs.text import read_small, without_mark
from prep.fs.untrusted import read_up_to
from prep.models.named import moved
from prep.progress import Tick
from prep.recipe.convert.detect import convert
from prep.recipe.convert.draft import ConvertedRecipe
from prep.recipe.convert.note import ConversionNote
from prep.recipe.convert.prompts import NAME
from prep.recipe.load import load_recipe
from prep.recipe.overview import Overview, overview_of
from prep.recipe.prompts import read_prompts
from prep.recipe.schema import Recipe
from prep.recipe.suggest import suggest
from prep.recipe.write import Comment, render_recipe

FORMAT, VERSION = "latentry/init", 1
_KEYS = ("[[source]]", "[source]", "source =")  # every recipe contains one of these


@dataclass(frozen=True, kw_only=True, slots=True)
class InitReport:
    """A written recipe, and what it was made from."""

    output: Path
    recipe: Recipe
    seen: Overview | None = None
    converted: ConvertedRecipe | None = None
    training: Path | None = None  # the train.toml written beside it
    prompts: Path | None = None  # the prompt file written beside it

    def as_json(self) -> dict[str, Any]:
        """The document of `prep init --json`."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "recipe": str(self.output),
                                    "sources": len(self.recipe.sources)}
        if self.seen is not None:
            document["seen"] = _seen_json(self.seen)
        if self.converted is not None:
            document["from"] = self.converted.tool
            document["train"] = None if self.training is None else str(self.training)
            document["prompts"] = None if self.prompts is None else str(self.prompts)
            document["notes"] = [{"key": note.key, "value": note.value, "detail": note.said, "at": note.at}
                                 for note in self._notes]
        return document

    def as_text(self) -> str:
        """A one-line summary of each written file."""
        image, count = self.recipe.image, len(self.recipe.sources)
        sides = ", ".join(map(str, image.resolutions))
        line = (f"{shell_name(str(self.output))}: {counted(count, 'source')}, resolution {sides}, buckets "
                f"{image.buckets}")
        written = {self.training: (len(self.converted.training.settings), "training setting")
                   if self.converted is not None and self.converted.training is not None else None,
                   self.prompts: (self.converted.prompts.count("\n"), "prompt") if self.converted is not None else None}
        if self.seen is not None and self.recipe.prompts is not None:
            line += f", sample prompts of {shell_name(str(self.recipe.prompts))}"
        return "\n".join([line, *(f"{shell_name(str(path))}: {counted(*what)}" for path, what in written.items()
                                  if path is not None and what is not None)])

    @property
    def _notes(self) -> tuple[ConversionNote, ...]:
        """Notes on settings of the other file that have no counterpart or another meaning here."""
        if self.converted is None:
            return ()
        training = self.converted.training
        return (*self.converted.notes, *(() if training is None else training.notes))

    @property
    def notices(self) -> list[str]:
        """The lines for stderr: unreadable pictures, or conversion notes, with repeated ones merged."""
        if self.seen is not None and (unread := self._unread(self.seen)):
            return unread
        grouped: dict[tuple[str, str, str], list[str]] = {}
        for note in self._notes:
            grouped.setdefault((note.key.rpartition(".")[2], note.value, note.said), []).append(note.text)
        return [f"note: {texts[0]}{f' (and {len(texts) - 1} more)' if len(texts) > 1 else ''}"
                for texts in grouped.values()]

    def _unread(self, seen: Overview) -> list[str]:
        notices = []
        if seen.unread:
            first, more = seen.unread[0], len(seen.unread) - 1
            notices.append(f"note: {printable(first.path)}: {printable(first.detail)}"
                           f"{f' (and {more} more errors)' if more else ''}; prep scan lists all")
        if seen.opened.unreadable:
            notices.append(f"note: {seen.opened.unreadable} of {seen.opened.count} files cannot be read as pictures; "
                           f"prep scan {shell_name(str(self.output))} lists the reasons")
        return notices


def check_choice(sources: Sequence[Path], other: Path | None, model: str | None) -> None:
    """Raises `UsageError` unless the user gives either sources or one file to convert, with matching options;
    `PathError` for a file in a store."""
    if other is not None:
        require_local(other, "FILE")
    if bool(sources) == (other is not None):
        raise UsageError("prep init needs a SOURCE or --from FILE, not both",
                         hint="prep init photos, or prep init --from concepts.json")
    if other is not None and model is not None:
        raise UsageError("--model needs a SOURCE: a file to convert sets its own resolution",
                         hint="set [model] path in the recipe, or pass --model to prep encode")
    for source in sources:
        require_local(source, "SOURCE", f'name it in a recipe of your own: [[source]] path = "{place_of(source)}"; '
                      "prep scan and prep encode take the URL itself, too", UsageError)
        if source.suffix in (".toml", ".json") and not source.is_dir():
            raise UsageError(f"SOURCE is {source}, expected a directory of pictures or tars",
                             hint=f"prep init --from {shell_name(str(source))} converts another tool's file")


def target_of(output: Path | None, other: Path | None) -> Path:
    """The path of the recipe: `output`, else dataset.toml, or recipe.toml if dataset.toml is the file to convert.

    Raises `PathError` if `output` is the file to convert.
    """
    usual = Path("dataset.toml")
    target = output or usual
    if other is None or not (target.exists() and other.exists() and target.samefile(other)):
        return target
    if output is not None:
        raise PathError(f"recipe {output} is the file to convert, which is never replaced",
                        hint="choose another name: -o recipe.toml")
    return Path("recipe.toml")


def check_target(output: Path, force: bool) -> None:
    """Raises `PathError` unless `output` does not exist, or is a recipe and `force` is set."""
    require_local(output, "recipe")
    if output.suffix != ".toml":
        raise PathError(f"recipe {output} has the wrong extension, expected NAME.toml")
    check_not_cache(output)
    if output.exists() and not force:
        raise PathError(f"recipe {output} already exists", hint="choose another -o, or add --force to replace it")
    check_replaceable(output, "recipe", lambda _: not output.exists() or _is_recipe(output))


def _is_recipe(path: Path) -> bool:
    with open_file(path) as stream:
        head = without_mark(read_up_to(stream, 1 << 20)).decode(errors="replace")
    return any(line.strip().startswith(_KEYS) for line in head.splitlines())


def init_from_sources(sources: Sequence[Path], output: Path, *, model: str | None, jobs: int,
                      tick: Tick) -> InitReport:
    """Inspects `sources` and writes a recipe for them. Raises `PathError`, `ModelError`."""
    seen = overview_of(sources, jobs=jobs, tick=tick)
    named = " ".join(shell_name(str(source)) for source in sources)
    suggestion = suggest(seen, model=_placed(model or ""), named=named, name=shell_name(output.name))
    recipe = replace(suggestion.recipe, prompts=prompts_near(sources, output))
    write_recipe(recipe, output, remarks=suggestion.remarks, shown=suggestion.shown)
    return InitReport(output=output, recipe=recipe, seen=seen)


def prompts_near(sources: Sequence[Path], output: Path) -> Path | None:
    """The first prompt file without a fault beside the recipe, in a source, or beside one; absolute."""
    folders = [output.parent, *filter(Path.is_dir, sources), *(source.parent for source in sources)]
    for path in (folder.absolute() / name for folder in folders for name in PROMPT_FILES):
        with suppress(PathError, ConfigError):
            alone = path.is_file() and len(list(path.parent.glob(f"{path.stem}.*"))) == 1  # else a picture's caption
            if alone and read_prompts(path, "prompts.file")[1]:
                return path
    return None


PROMPT_FILES = ("prompts.txt", "sample_prompts.txt")


def _placed(model: str) -> str:
    return moved(model, lambda path: str(path.absolute())) if model else model


def init_from_file(other: Path, output: Path, *, force: bool = False) -> InitReport:
    """Converts another tool's file to a recipe, and its training settings and prompts, if any, to files beside it.

    Raises `PathError`, `ConfigError`.
    """
    converted = convert(other)
    target = None if converted.training is None else output.with_name("train.toml")
    if target is not None:
        _check_train_target(target, other, output, force)
    recipe, prompts = converted.recipe, None
    if converted.prompts:
        prompts = output.with_name(NAME)
        _check_prompts_target(prompts, converted.prompts, force)
        recipe = replace(recipe, prompts=prompts.absolute())
    top = Comment(at="", text=f"Written by prep init --from {other} ({converted.tool}). Settings that have no "
                  "counterpart here, or another meaning, are noted where they would be.")
    try:
        write_recipe(recipe, output, remarks=[top, *converted.remarks], shown=("image.resolution",))
    except ConfigError as error:
        raise ConfigError(f"{other} does not convert to a valid recipe: {error.message}", hint=error.hint) from None
    if target is not None and converted.training is not None:
        with atomic.new_file(target) as file:
            atomic.write(file, converted.training.rendered(
                f"Written by prep init --from {other} ({converted.tool}). Settings without counterpart are at the end."
            ).encode())
    if prompts is not None:
        with atomic.new_file(prompts) as file:
            atomic.write(file, converted.prompts.encode())
    return InitReport(output=output, recipe=recipe, converted=converted, training=target, prompts=prompts)


def _check_prompts_target(target: Path, text: str, force: bool) -> None:
    """Raises `PathError` unless the prompts may be written at `target`: it is absent, has them, or `force` is set."""
    check_replaceable(target, "prompt file", lambda _: True)
    if target.exists() and not force and read_small(target, regular=True) != text.encode():
        raise PathError(f"prompt file {target} already exists, and the file to convert has other prompts",
                        hint="choose an -o in another directory, or add --force to replace it")


def _check_train_target(target: Path, other: Path, output: Path, force: bool) -> None:
    """Raises `PathError` unless the training settings may be written at `target`."""
    if target.exists() and target.samefile(other):
        raise PathError(f"training settings go to {target}, which is the file to convert and is never replaced",
                        hint="name a recipe in another directory: -o new/recipe.toml")
    if target.name == output.name:
        raise PathError(f"recipe {output} has the name of the training settings, which are written beside it",
                        hint="choose another name: -o recipe.toml")
    if target.exists() and not force:
        raise PathError(f"training settings {target} already exist",
                        hint="choose an -o in another directory, or add --force to replace them")
    check_replaceable(target, "training settings", lambda _: not target.exists() or not _is_recipe(target))


def write_recipe(recipe: Recipe, output: Path, *, remarks: Sequence[Comment], shown: Collection[str]) -> None:
    """Writes `output` atomically, after reading it back as a check. Raises `ConfigError`, `PathError`."""
    text = render_recipe(recipe, base=output.absolute().parent, remarks=remarks, shown=shown)
    with atomic.staged(output.absolute(), end=".toml") as staged:  # the loader reads only .toml as a recipe
        atomic.write_synced(staged, text.encode())
        try:
            back = load_recipe(staged, choices={})
        except ConfigError as error:
            raise ConfigError(error.message.replace(f"{staged}: ", ""), hint=error.hint) from None
        assert len(back.sources) == len(recipe.sources), "a recipe reads back as it was written"
        atomic.publish(staged, output)


def _seen_json(seen: Overview) -> dict[str, Any]:
    opened = seen.opened
    sizes = sorted(opened.sizes, key=lambda size: size[0] * size[1])
    middle = {"smallest": sizes[0], "median": sizes[len(sizes) // 2], "largest": sizes[-1]} if sizes else {}
    masks = [str(folder) for folder in seen.mask_folders]
    return {"pictures": seen.total("pictures"), "captions": seen.captions, "without_caption": seen.total("missing"),
            "masks": seen.total("masked"), "mask_folder": masks[0] if masks else None, "mask_folders": masks,
            "sources": [{"path": str(part.place.path), "role": part.place.role, "pictures": part.pictures}
                        for part in seen.parts],
            "folders": [{"name": folder.name, "repeats": folder.repeats, "class": folder.words,
                         "pictures": folder.pictures} for folder in seen.folders],
            "opened": opened.count, "unreadable": opened.unreadable, "alpha": opened.alpha,
            "sizes": {name: format_size(size) for name, size in middle.items()},
            "empty_captions": opened.empty, "several_lines": opened.several, "wildcards": opened.wildcards,
            "tags": opened.tags}
