"""What `prep init` does: looks at a source, or converts another tool's file, and writes the recipe, all or nothing."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.errors import ConfigError, PathError, UsageError
from prep.formatting import counted, format_size, printable, shell_name
from prep.fs.atomic import remove, rename, sync_dir, write_synced
from prep.fs.paths import check_not_cache, check_replaceable
from prep.fs.text import without_mark
from prep.progress import Tick
from prep.recipe.convert.detect import convert
from prep.recipe.convert.draft import Converted
from prep.recipe.convert.note import ConversionNote
from prep.recipe.load import load_recipe
from prep.recipe.overview import Overview, overview_of
from prep.recipe.schema import Recipe
from prep.recipe.suggest import suggest
from prep.recipe.write import Comment, render_recipe

FORMAT, VERSION = "latentry/init", 1
_KEYS = ("[[source]]", "[source]", "source =")  # one of these is in every recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class InitReport:
    """A recipe that was written, and what it was made of."""

    output: Path
    recipe: Recipe
    seen: Overview | None = None
    converted: Converted | None = None
    training: Path | None = None  # the train.toml that was written, too

    def as_json(self) -> dict[str, Any]:
        """The document of `prep init --json`."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "recipe": str(self.output),
                                    "sources": len(self.recipe.sources)}
        if self.seen is not None:
            document["seen"] = _seen_json(self.seen)
        if self.converted is not None:
            document["from"] = self.converted.tool
            document["train"] = None if self.training is None else str(self.training)
            document["notes"] = [{"key": one.key, "value": one.value, "detail": one.said, "at": one.at}
                                 for one in self._notes]
        return document

    def as_text(self) -> str:
        """A line for people."""
        image, count = self.recipe.image, len(self.recipe.sources)
        sides = ", ".join(map(str, image.resolutions))
        line = (f"{shell_name(str(self.output))}: {counted(count, 'source')}, resolution {sides}, buckets "
                f"{image.buckets}")
        if self.converted is None or self.converted.training is None:
            return line
        count = len(self.converted.training.settings)
        return f"{line}\n{shell_name(str(self.training))}: {counted(count, 'setting')} of training"

    @property
    def _notes(self) -> tuple[ConversionNote, ...]:
        """What the other file says that has no counterpart, or another meaning."""
        if self.converted is None:
            return ()
        training = self.converted.training
        return (*self.converted.notes, *(() if training is None else training.notes))

    @property
    def notices(self) -> list[str]:
        """What stderr says: pictures that cannot be read; settings without counterpart, those of many places once."""
        if self.seen is not None and (unread := self._unread(self.seen)):
            return unread
        grouped: dict[tuple[str, str], list[str]] = {}
        for one in self._notes:
            grouped.setdefault((one.key.rpartition(".")[2], one.said), []).append(one.text)
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
                           f"prep scan {shell_name(str(self.output))} says why of each")
        return notices


def check_choice(sources: Sequence[Path], other: Path | None, model: str | None) -> None:
    """Raises `UsageError` unless there is one kind of thing to make a recipe of."""
    if bool(sources) == (other is not None):
        raise UsageError("prep init needs a SOURCE or --from FILE, and not both",
                         hint="prep init photos, or prep init --from concepts.json")
    if other is not None and model is not None:
        raise UsageError("--model goes with a SOURCE: another tool's file says its own resolution",
                         hint="write [model] path into the recipe, or give --model to prep encode")
    for source in sources:
        if source.suffix in (".toml", ".json") and not source.is_dir():
            raise UsageError(f"SOURCE is {source}, expected a directory of pictures or tars",
                             hint=f"prep init --from {shell_name(str(source))} converts another tool's file")


def target_of(output: Path | None, other: Path | None) -> Path:
    """Where the recipe goes: `output`, else dataset.toml, else recipe.toml where that is the file to convert.

    Raises `PathError` for an output that is the file to convert.
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
    """Raises `PathError` unless a recipe may be written at `output`: nothing is there, or a recipe and `force`."""
    if output.suffix != ".toml":
        raise PathError(f"recipe {output} has another name, expected NAME.toml")
    check_not_cache(output)
    if output.exists() and not force:
        raise PathError(f"recipe {output} exists, and is not replaced", hint="choose another -o, or add --force")
    check_replaceable(output, "recipe", lambda _: not output.exists() or _is_recipe(output))


def _is_recipe(path: Path) -> bool:
    with path.open("rb") as stream:
        head = without_mark(stream.read(1 << 20)).decode(errors="replace")
    return any(line.strip().startswith(_KEYS) for line in head.splitlines())


def init_from_sources(sources: Sequence[Path], output: Path, *, model: str | None, jobs: int,
                      tick: Tick) -> InitReport:
    """Looks at `sources` and writes the recipe for them. Raises `PathError`, `ModelError`."""
    seen = overview_of(sources, jobs=jobs, tick=tick)
    found = suggest(seen, model=_placed(model or ""), given=" ".join(shell_name(str(one)) for one in sources),
                    name=shell_name(output.name))
    write_recipe(found.recipe, output, remarks=found.remarks, shown=found.shown)
    return InitReport(output=output, recipe=found.recipe, seen=seen)


def _placed(model: str) -> str:
    return str(Path(model).absolute()) if model and Path(model).is_dir() else model


def init_from_file(other: Path, output: Path, *, force: bool = False) -> InitReport:
    """Converts another tool's file; one with settings of training makes a train.toml beside the recipe, too.

    Raises `PathError`, `ConfigError`.
    """
    converted = convert(other)
    target = None if converted.training is None else output.with_name("train.toml")
    if target is not None:
        _check_train_target(target, other, output, force)
    top = Comment(at="", text=f"Written by prep init --from {other} ({converted.tool}). What has no counterpart here, "
                  "or another meaning, is said where it would stand.")
    try:
        write_recipe(converted.recipe, output, remarks=[top, *converted.remarks], shown=("image.resolution",))
    except ConfigError as error:
        raise ConfigError(f"what {other} says makes no recipe: {error.message}", hint=error.hint) from None
    if target is not None and converted.training is not None:
        _write_text(target, converted.training.rendered(
            f"Written by prep init --from {other} ({converted.tool}). Settings without counterpart stand at the end."))
    return InitReport(output=output, recipe=converted.recipe, converted=converted, training=target)


def _check_train_target(target: Path, other: Path, output: Path, force: bool) -> None:
    """Raises `PathError` unless the settings of training may be written at `target`."""
    if target.exists() and target.samefile(other):
        raise PathError(f"settings of training go to {target}, which is the file to convert and is never replaced",
                        hint="name a recipe in another directory: -o new/recipe.toml")
    if target.name == output.name:
        raise PathError(f"recipe {output} has the name of the settings of training, which are written beside it",
                        hint="choose another name: -o recipe.toml")
    if target.exists() and not force:
        raise PathError(f"settings of training {target} exist, and are not replaced",
                        hint="choose an -o in another directory, or add --force")
    check_replaceable(target, "settings of training", lambda _: not target.exists() or not _is_recipe(target))


def _write_text(target: Path, text: str) -> None:
    """Writes a file, all of it or nothing."""
    staged = target.absolute().with_name(f".{secrets.token_hex(8)}.toml")
    try:
        write_synced(staged, text.encode())
        rename(staged, target)
    finally:
        remove(staged)
    sync_dir(target.absolute().parent)


def write_recipe(recipe: Recipe, output: Path, *, remarks: Sequence[Comment], shown: Collection[str]) -> None:
    """Writes `output`, all of it or nothing, when it reads back as `recipe`. Raises `ConfigError`, `PathError`."""
    text = render_recipe(recipe, base=output.absolute().parent, remarks=remarks, shown=shown)
    staged = output.absolute().with_name(f".{secrets.token_hex(8)}.toml")  # only what ends like one is read as a recipe
    try:
        write_synced(staged, text.encode())
        try:
            back = load_recipe(staged, choices={})
        except ConfigError as error:
            raise ConfigError(error.message.replace(f"{staged}: ", ""), hint=error.hint) from None
        assert len(back.sources) == len(recipe.sources), "a recipe reads back as it was written"
        rename(staged, output)
    finally:
        remove(staged)
    sync_dir(output.absolute().parent)


def _seen_json(seen: Overview) -> dict[str, Any]:
    opened = seen.opened
    sizes = sorted(opened.sizes, key=lambda size: size[0] * size[1])
    middle = {"smallest": sizes[0], "median": sizes[len(sizes) // 2], "largest": sizes[-1]} if sizes else {}
    masks = [str(one) for one in seen.mask_folders]
    return {"pictures": seen.total("pictures"), "captions": seen.captions, "without_caption": seen.total("missing"),
            "masks": seen.total("masked"), "mask_folder": masks[0] if masks else None, "mask_folders": masks,
            "sources": [{"path": str(one.place.path), "role": one.place.role, "pictures": one.pictures}
                        for one in seen.parts],
            "folders": [{"name": one.name, "repeats": one.repeats, "class": one.words, "pictures": one.pictures}
                        for one in seen.folders],
            "opened": opened.count, "unreadable": opened.unreadable, "alpha": opened.alpha,
            "sizes": {name: format_size(size) for name, size in middle.items()},
            "empty_captions": opened.empty, "several_lines": opened.several, "wildcards": opened.wildcards,
            "tags": opened.tags}
