"""Items → surveyed items: every file read once, digested, its header and caption understood; nothing is decoded.

What cannot be used becomes a finding. A run over unchanged files reads only captions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from prep import captions, images
from prep.digest import digest_bytes
from prep.errors import ConfigError
from prep.facts import Facts
from prep.recipe import CaptionChoice, Recipe
from prep.records import Blob, Finding, Item, Sample, Surveyed
from prep.report.words import names_of
from prep.sources.blob import code_of, read_blob
from prep.sources.directory import MaskFolder, walk
from prep.sources.folders import printable

Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All of a recipe's usable items in walking order, and what is to be said of the others."""

    items: tuple[Surveyed, ...]
    findings: tuple[Finding, ...]


def walk_all(recipe: Recipe) -> Iterator[Item | Finding]:
    """Everything in a recipe's sources; paths of findings are labels. Raises `PathError`."""
    masks = MaskFolder.read(recipe.mask) if isinstance(recipe.mask, Path) else recipe.mask
    for number, source in enumerate(recipe.sources):
        for one in walk(source.path, source=number, mask_from=masks):
            yield replace(one, path=_label(recipe, number, one.path)) if isinstance(one, Finding) else one
    if isinstance(masks, MaskFolder):
        yield from masks.orphans()


def walk_labelled(recipe: Recipe) -> Iterator[Item | Finding]:
    """The same, and items have their labels for names: for reports, which look nothing up by name."""
    for one in walk_all(recipe):
        yield replace(one, name=label(recipe, one)) if isinstance(one, Item) else one


def label(recipe: Recipe, item: Item | Sample) -> str:
    """What findings call an item, unique in its recipe: its name, with several sources below `source[1]/`."""
    return _label(recipe, item.source, item.name)


def _label(recipe: Recipe, source: int, name: str) -> str:
    return name if len(recipe.sources) == 1 else f"source[{source}]/{name}"


def survey(recipe: Recipe, facts: Facts, *, jobs: int, tick: Tick = lambda _: None) -> Survey:
    """The survey of a recipe. Raises `PathError`, and `ConfigError` for missing captions under `missing = "stop"`."""
    found = list(walk_all(recipe))
    findings = [one for one in found if isinstance(one, Finding)]
    items: list[Surveyed] = []
    stopped: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda item: _survey_item(item, recipe, facts), _only_items(found)):
            tick(1)
            if isinstance(result, Surveyed):
                items.append(result)
            elif result.code == "missing-caption" and recipe.caption.missing == "stop":
                stopped.append(result.path)
            else:
                findings.append(result)
    if stopped:
        _stop(stopped)
    return Survey(items=tuple(items), findings=tuple(findings))


def _only_items(found: Iterable[Item | Finding]) -> list[Item]:
    return [one for one in found if isinstance(one, Item)]


def _survey_item(item: Item, recipe: Recipe, facts: Facts) -> Surveyed | Finding:
    """The item, read and understood, or the reason why it cannot be used."""
    what: tuple[str, Blob | None] = "", None  # that is being read, where it is not the picture
    try:
        header = facts.of(item.picture.path, "picture", _picture_facts)
        if "code" in header:
            return _reject(recipe, item, str(header["code"]), str(header["detail"]))
        if header["alpha"] and recipe.image.alpha == "reject":
            return _reject(recipe, item, "has-alpha", 'has transparency, and [image] alpha is "reject"')
        what = "caption", item.caption
        words = _captions(item, recipe.caption)
        what = "mask", item.mask
        mask = _mask_digest(item.mask, facts)
    except OSError as error:
        return _reject(recipe, item, code_of(error), f"{_its(*what)}cannot be read: {error.strerror or error}")
    except captions.BadCaption as error:
        return _reject(recipe, item, error.code, error.detail)
    if words is None:
        return _reject(recipe, item, "missing-caption", "has no caption, or an empty one")
    return Surveyed(item=item, picture=header["digest"], size=(header["width"], header["height"]),
                    has_alpha=header["alpha"], captions=words, mask=mask)


def _picture_facts(data: bytes) -> dict[str, Any]:
    digest = digest_bytes(data)
    try:
        header = images.read_header(data)
    except images.BadPicture as error:
        return {"digest": digest, "code": error.code, "detail": error.detail}
    return {"digest": digest, "width": header.size[0], "height": header.size[1], "alpha": header.has_alpha}


def _mask_digest(mask: Blob | None, facts: Facts) -> str | None:
    if mask is None:
        return None
    return str(facts.of(mask.path, "file", lambda data: {"digest": digest_bytes(data)})["digest"])


def _its(what: str, blob: Blob | None) -> str:
    """Which of an item's files is meant; the picture needs no word."""
    return "" if blob is None else f"its {what} {printable(blob.path.name)} "


def _captions(item: Item, choice: CaptionChoice) -> tuple[str, ...] | None:
    """The item's captions; for a missing or empty one what the recipe's policy says; `None` where it takes none."""
    if item.caption is not None:
        words = tuple(caption for caption in captions.read_caption(read_blob(item.caption)) if caption)
        if words:
            return words
    if choice.missing in ("stop", "reject"):
        return None
    return ({"empty": "", "constant": choice.constant, "filename": spoken_name(item.name)}[choice.missing],)


def spoken_name(name: str) -> str:
    """A file name as a caption: the stem, `_` and `-` as spaces."""
    return " ".join(PurePosixPath(name).stem.replace("_", " ").replace("-", " ").split())


def _reject(recipe: Recipe, item: Item, code: str, detail: str) -> Finding:
    return Finding(path=label(recipe, item), code=code, severity="error", detail=detail)


def _stop(names: list[str]) -> None:
    raise ConfigError(f"pictures without a caption ({len(names)}): {names_of(names, 8)}",
                      hint="write the captions, or choose --missing-caption reject, empty, filename or constant")
