"""Reads the reference pictures that sample prompts name: digest, size, and how they are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from prep.buckets.references import ReferenceRules
from prep.dataset.facts import fact_kinds
from prep.dataset.ingest import KnownReference
from prep.dataset.reading import FactReader, NotRead
from prep.errors import ConfigError
from prep.formatting import format_size, printable_name
from prep.fs.blob import blob_at
from prep.fs.memo import Memo
from prep.geometry import Placement
from prep.models.family import Family
from prep.recipe.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReference:
    """A reference picture of a prompt, and how it is placed: as those of samples, but to no bucket."""

    name: str  # as the prompt file has it
    known: KnownReference
    placement: Placement
    line: int  # of the first prompt that names it


PromptReferences = Mapping[str, PromptReference]  # by the path in the prompt file
NO_REFERENCES: PromptReferences = MappingProxyType({})


def prompt_references(prompts: Sequence[Prompt], folder: Path, family: Family, rules: ReferenceRules | None,
                      facts: Memo) -> PromptReferences:
    """The pictures that `prompts` name, relative to `folder`. Raises `ConfigError` for one that cannot be used."""
    named = {name: prompt for prompt in reversed(prompts) for name in prompt.references}
    if not named:
        return {}
    if rules is None:
        raise ConfigError(f"{_at(next(iter(named.values())))} has --ref, expected none for family '{family.name}', "
                          "which takes no reference pictures")
    for prompt in prompts:
        if len(prompt.references) > rules.most:
            raise ConfigError(f"{_at(prompt)} has {len(prompt.references)} references, expected at most {rules.most}, "
                              f"as family '{family.name}' takes")
    reader, kind = FactReader(), fact_kinds()["picture"]
    references = {}
    try:
        for name, prompt in named.items():
            blob = blob_at(folder / name)
            try:
                fact = facts.get_or_read(blob, kind, partial(reader.read, "picture"))
            except NotRead as error:
                raise _unusable(prompt, name, error.detail) from None
            except OSError as error:
                raise _unusable(prompt, name, f"cannot be read: {error.strerror or error}") from None
            if "code" in fact:
                raise _unusable(prompt, name, str(fact["detail"]))
            known = KnownReference(blob=blob, picture=fact["digest"], size=(fact["width"], fact["height"]),
                                   has_alpha=fact["alpha"])
            placement = rules.alone(known.size)
            if placement is None:
                raise _unusable(prompt, name, f"it is {format_size(known.size)}, which family '{family.name}' does "
                                "not take")
            references[name] = PromptReference(name=name, known=known, placement=placement, line=prompt.line)
    finally:
        reader.close()
    return references


def _at(prompt: Prompt) -> str:
    return f"the prompt in line {prompt.line}"


def _unusable(prompt: Prompt, name: str, why: str) -> ConfigError:
    return ConfigError(f"{_at(prompt)} names the reference {printable_name(name)}: {why}",
                       hint="paths are relative to the prompt file; prep scan says what is wrong with a picture")
