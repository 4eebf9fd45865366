"""Reads the reference pictures that sample prompts name: digest, size, and how they are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from prep.buckets.references import ReferenceRules
from prep.dataset.facts import fact_kinds
from prep.dataset.ingest import KnownReference, fault_of
from prep.dataset.reading import FactReader, NotRead
from prep.errors import ConfigError
from prep.formatting import counted, format_size, printable_name
from prep.fs.blob import Blob, blob_at
from prep.fs.memo import Fact, Memo
from prep.geometry import Placement, fits
from prep.models.family import Family
from prep.parse import Alpha
from prep.recipe.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReference:
    """A reference picture of a prompt, and how it is placed: as those of samples, but to no bucket."""

    name: str  # as the prompt file has it
    known: KnownReference
    placement: Placement | None  # None: as in a sample that has it, of a family that inpaints
    line: int  # of the first prompt that names it
    mask: NamedMask | None = None  # what is painted of it; None: what its sample's mask says


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMask:
    """A mask that a prompt names."""

    name: str  # as the prompt file has it
    blob: Blob
    digest: str


PromptReferences = Mapping[tuple[str, str], PromptReference]  # by the paths of picture and mask in the prompt file
NO_REFERENCES: PromptReferences = MappingProxyType({})


def prompt_references(prompts: Sequence[Prompt], folder: Path, family: Family, rules: ReferenceRules | None,
                      alpha: Alpha | None, facts: Memo) -> PromptReferences:
    """The pictures and masks that `prompts` name, relative to `folder`. Raises `ConfigError` for one that cannot be
    used, and for a prompt that has too many, or none where the family needs one: nobody looks for a prompt that was
    left out. `alpha`: what becomes of transparency; `None`: it is refused."""
    named = {picture: prompt for prompt in reversed(prompts) for picture in prompt.pictures}
    for prompt in prompts:
        _check(prompt, family, rules)
    reader, references = FactReader(), {}
    try:
        for (name, mask), prompt in named.items():
            known = _known(prompt, name, folder, alpha, facts, reader)
            placement = None if rules is None else rules.alone(known.size)
            if placement is None and rules is not None:
                raise _unusable(prompt, name, f"it is {format_size(known.size)}, which family '{family.name}' does "
                                "not take")
            references[name, mask] = PromptReference(
                name=name, known=known, placement=placement, line=prompt.line,
                mask=_known_mask(prompt, known, folder, facts, reader) if mask else None)
    finally:
        reader.close()
    return references


def _check(prompt: Prompt, family: Family, rules: ReferenceRules | None) -> None:
    """Raises `ConfigError` for a prompt with more references than the family takes, or fewer than it needs."""
    count, most = len(prompt.references), family.most_references if rules is None else rules.most
    if count and not most:
        raise ConfigError(f"{_at(prompt)} has --ref, expected none for family '{family.name}', which takes no "
                          "reference pictures")
    if count > most:
        raise ConfigError(f"{_at(prompt)} has {counted(count, 'reference')}, expected at most {most}, as family "
                          f"'{family.name}' takes")
    if family.inpainting is None:
        if prompt.mask:
            raise ConfigError(f"{_at(prompt)} has --mask, expected none for family '{family.name}', which does not "
                              "inpaint")
        return
    if not count:
        raise ConfigError(f"{_at(prompt)} names no picture, expected one of the data set for family '{family.name}', "
                          "which paints where its mask is white",
                          hint="add --ref PICTURE to the line; without a prompt file, sample pictures are made of a "
                          "few held-out pictures and their captions")
    if prompt.settings.width is not None or prompt.settings.height is not None:
        raise ConfigError(f"{_at(prompt)} has --w or --h, expected neither: what is made has the size of the picture "
                          "that is painted")


def _known(prompt: Prompt, name: str, folder: Path, alpha: Alpha | None, facts: Memo, reader: FactReader
           ) -> KnownReference:
    """The picture `name` of a prompt, read. Raises `ConfigError`."""
    blob = blob_at(folder / name)
    fact = _fact(prompt, "reference", name, "picture", blob, facts, reader)
    if (fault := fault_of(fact, alpha)) is not None:
        raise _unusable(prompt, name, fault[1])
    return KnownReference.of(blob, fact)


def _known_mask(prompt: Prompt, picture: KnownReference, folder: Path, facts: Memo, reader: FactReader) -> NamedMask:
    """The mask of a prompt's picture, decoded once. Raises `ConfigError`."""
    blob = blob_at(folder / prompt.mask)
    digest, size, mean = (_fact(prompt, "mask", prompt.mask, kind, blob, facts, reader)[name] for kind, name in (
        ("file", "digest"), ("mask-size", "size"), ("mask-mean", "mean")))
    if digest == picture.picture:
        why = "it is the picture itself"
    elif size is None or mean is None:
        why = "it cannot be decoded"
    elif not fits(size, picture.size):
        why = f"it is {format_size(size)}, not of the shape of its picture, {format_size(picture.size)}"
    elif not mean:
        why = "it is entirely black, so nothing would be painted"
    else:
        return NamedMask(name=prompt.mask, blob=blob, digest=digest)
    raise _unusable(prompt, prompt.mask, why, "mask")


def _fact(prompt: Prompt, what: str, name: str, kind: str, blob: Blob, facts: Memo, reader: FactReader) -> Fact:
    try:
        fact = facts.get_or_read(blob, fact_kinds()[kind], partial(reader.read, kind))
    except NotRead as error:
        raise _unusable(prompt, name, error.detail, what) from None
    except OSError as error:
        raise _unusable(prompt, name, f"cannot be read: {error.strerror or error}", what) from None
    if "code" in fact:
        raise _unusable(prompt, name, str(fact["detail"]), what)
    return fact


def _at(prompt: Prompt) -> str:
    return f"the prompt in line {prompt.line}"


def _unusable(prompt: Prompt, name: str, why: str, what: str = "reference") -> ConfigError:
    return ConfigError(f"{_at(prompt)} names the {what} {printable_name(name)}: {why}",
                       hint="paths are relative to the prompt file; prep scan says what is wrong with a picture")
