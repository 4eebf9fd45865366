"""Keeps the manifest that another one replaces, takes over its sample prompts, and says what the new one lacks.

It is kept beside the new one until `prep gc`, which removes what only the old one needs: that of `photos.json` as
`photos.json.replaced-1a2b3c4d5e6f`, by its digest. It is a manifest like any other: `mv` brings it back. Stores keep
none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.batching.split import ROLES
from prep.encode.manifest.limits import read_small_prompts
from prep.errors import Problem
from prep.formatting import counted, grouped, shell_name
from prep.fs import atomic
from prep.fs.place import Place, real_name
from prep.fs.untrusted import read_regular
from prep.maintenance.others import replaced_name
from prep.manifest.document import LIMIT, Manifest, read_manifest
from prep.recipe.edits import NONE
from prep.recipe.prompts import Prompt, PromptSettings
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """A manifest that another one replaced."""

    kept: Path | None  # where it is until gc; None: nowhere, since it was in a store
    lacks: tuple[str, ...]  # what it had and the new one lacks

    @classmethod
    def of(cls, old: Manifest | None, new: Manifest) -> Replaced | None:
        """What became of the manifest that `new` replaced; `None` if there was none, or the same."""
        if old is None or old.digest == new.digest:
            return None
        return cls(kept=replaced_name(old), lacks=tuple(lacks(old, new)))

    def as_json(self) -> dict[str, Any]:
        """Its entry in the document of `prep encode --json`."""
        return {"kept": None if self.kept is None else str(self.kept), "lacks": list(self.lacks)}

    def note(self, name: str) -> str:
        """A line about what the manifest called `name` lacks; "" if that is nothing."""
        if not self.lacks:
            return ""
        where = f"; the one before is {shell_name(str(self.kept))} until prep gc" if self.kept is not None else ""
        return f"note: {name} lacks what the one before had: {', '.join(self.lacks)}{where}"


def read_replaced(path: Place) -> Manifest | None:
    """The manifest that one at `path` would replace; `None` if there is none that can be read."""
    with suppress(Problem, OSError):
        return read_manifest(path, fetch=False)
    return None


def keep_replaced(old: Manifest, document: Mapping[str, Any]) -> None:
    """Copies a manifest to where it stays until gc, before one with another `document` replaces it; not in a store."""
    same = {name: value for name, value in old.document.items() if name != "self"} == dict(document)
    place = replaced_name(old)
    if not same and place is not None and not place.exists():
        staging = old.cache_root / "tmp"  # as of the manifest itself: a kill leaves nothing beside them
        atomic.write_atomic(place, read_regular(Path(real_name(old.path)), LIMIT),
                            staging=staging if staging.is_dir() else None)


def prompts_for(recipe: Recipe, old: Manifest | None) -> tuple[Recipe, bytes | None, list[Prompt], str]:
    """The recipe with its prompt file, the file's bytes, the prompts, and a note if they are those of the manifest that
    is replaced: from their file, or as the manifest has them if that is gone. Raises `PathError`, `ConfigError`."""
    by = "--prompts" if recipe.file is None else "--prompts, or file in [prompts] of the recipe"
    if recipe.prompts is not None and recipe.prompts != NONE:
        return recipe, *read_small_prompts(recipe.prompts, by), ""
    samples = [] if old is None or recipe.prompts == NONE else old.document["prompts"]["samples"]
    recipe = replace(recipe, prompts=None)
    if old is None or not samples:
        return recipe, None, [], ""
    named = old.document["prompts"]["file"]
    file = None if named is None else Path(old.folder, named)
    count = counted(len(samples), "prompt")
    note = f"note: sample prompts as in the {shell_name(old.path.name)} that this replaces ({count}"
    leave = "--prompts none leaves them out"
    if file is not None and file.is_file():
        recipe = replace(recipe, prompts=file, options=(*recipe.options, "--prompts", file))
        return recipe, *read_small_prompts(file, "--prompts"), f"{note}, from {shell_name(str(file))}); {leave}"
    prompts = [Prompt(text=sample["prompt"], negative=sample["negative"], line=number,
                      settings=PromptSettings.of_document(sample.get("settings", {})),
                      references=tuple(reference["name"] for reference in sample.get("references", ())),
                      mask=next((each["mask"]["name"] for each in sample.get("references", ()) if "mask" in each), ""))
               for number, sample in enumerate(samples, 1)]
    return recipe, None, prompts, f"{note}, whose file is gone); {leave}"


def lacks(old: Manifest, new: Manifest) -> Iterator[str]:
    """What a manifest had that the one that replaces it lacks."""
    before, after = old.document, new.document
    for role in ROLES:
        if after["samples"][role] < before["samples"][role]:
            yield f"{grouped(before['samples'][role])} {role} samples, now {grouped(after['samples'][role])}"
    if "mask" in old.fields and "mask" not in new.fields:
        yield "masks"
    if len(after["prompts"]["samples"]) < len(before["prompts"]["samples"]):
        yield f"{counted(len(before['prompts']['samples']), 'sample prompt')}, now {len(after['prompts']['samples'])}"
    options = {word for word in new.options if isinstance(word, str)}
    for flag, *values in _options(old):
        if flag not in options and flag != "--prompts":
            yield shlex.join([flag, *values])


def _options(manifest: Manifest) -> Iterator[list[str]]:
    """The options of a manifest's command, each with its values."""
    group: list[str] = []
    for word in manifest.options:
        if isinstance(word, str) and word.startswith("--"):
            if group:
                yield group
            group = []
        group.append(str(word))
    if group:
        yield group
