"""Items → surveyed items: every file read once, digested, its header and caption understood; nothing is decoded.

What cannot be used becomes a finding. A run over unchanged files reads only captions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from prep import captions, images
from prep.digest import digest_bytes
from prep.errors import ConfigError
from prep.facts import Facts
from prep.paths import check_source
from prep.recipe import CaptionChoice, Recipe
from prep.records import Blob, Finding, Item, Surveyed
from prep.sources.blob import read_blob
from prep.sources.directory import walk

Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All of a recipe's usable items in walking order, and what is to be said of the others."""

    items: tuple[Surveyed, ...]
    findings: tuple[Finding, ...]


def walk_all(recipe: Recipe) -> Iterator[Item | Finding]:
    """Everything in a recipe's sources. Raises `PathError`."""
    for number, source in enumerate(recipe.sources):
        check_source(source.path)
        yield from walk(source.path, source=number, mask_from=recipe.mask)


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
    try:
        header = facts.of(item.picture.path, "picture", _picture_facts)
        if "code" in header:
            return _reject(item, str(header["code"]), str(header["detail"]))
        if header["alpha"] and recipe.image.alpha == "reject":
            return _reject(item, "has-alpha", 'has transparency, and [image] alpha is "reject"')
        words = _captions(item, recipe.caption)
        mask = _mask_digest(item.mask, facts)
    except OSError as error:
        return _reject(item, "unreadable-file", f"cannot be read: {error.strerror or error}")
    except captions.BadCaption as error:
        return _reject(item, error.code, error.detail)
    if isinstance(words, Finding):
        return words
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


def _captions(item: Item, choice: CaptionChoice) -> tuple[str, ...] | Finding:
    """The item's captions; for a missing or empty one what the recipe's policy says."""
    if item.caption is not None:
        words = tuple(caption for caption in captions.read_caption(read_blob(item.caption)) if caption)
        if words:
            return words
    if choice.missing in ("stop", "reject"):
        return _reject(item, "missing-caption", "has no caption, or an empty one")
    return ({"empty": "", "constant": choice.constant, "filename": spoken_name(item.name)}[choice.missing],)


def spoken_name(name: str) -> str:
    """A file name as a caption: the stem, `_` and `-` as spaces."""
    return " ".join(PurePosixPath(name).stem.replace("_", " ").replace("-", " ").split())


def _reject(item: Item, code: str, detail: str) -> Finding:
    return Finding(path=item.name, code=code, severity="error", detail=detail)


def _stop(names: list[str]) -> None:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise ConfigError(f"{len(names)} pictures have no caption: {shown}",
                      hint="write the captions, or choose --missing-caption reject, empty, filename or constant")
