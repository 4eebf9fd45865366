"""Sample prompts and their rows: those of the manifest, or of an edited file as far as the cache has them.

Nothing here raises for a prompt: one without a row is skipped, with a warning that names its line and the command that
encodes it. Training goes on. The manifest may be a stranger's and name any file of this machine, so nothing that is in
the file is repeated: warnings name lines, and the text of a prompt is shown only where the cache has its row.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from prep.cache.ledger.ledger import load_ledger
from prep.cache.records import RowRef
from prep.digest import digest_bytes
from prep.errors import Problem
from prep.fs.paths import is_inside, resolve
from prep.keys import text_key
from prep.loader.index import Index
from prep.manifest.commands import encode_command
from prep.manifest.document import Manifest
from prep.recipe.prompts import Prompt, PromptSettings, prompts_of, read_prompt_file

WARNINGS = 20  # of single prompts; more are counted
MOST_CAPTIONS = 4  # that stand in for prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """A prompt that can be sampled without a text encoder: places in the cache, or text rows `[1, L, D]` themselves."""

    prompt: str
    positive: RowRef | Tensor
    negative: RowRef | Tensor
    settings: PromptSettings = field(default_factory=PromptSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Prompts, and what is to be said of those that are not among them."""

    prompts: tuple[PromptRows, ...]
    warnings: tuple[str, ...] = ()


def cached(index: Index) -> tuple[PromptRows, ...]:
    """The prompts that were encoded with the manifest; without any, a few captions, whose rows are there anyway."""
    samples = index.manifest.document["prompts"]["samples"]
    if not samples and index.manifest.document["prompts"]["file"] is None:
        return of_captions(index)[0]
    return tuple(PromptRows(prompt=each["prompt"], positive=index.ref(**each["positive"]),
                            negative=index.ref(**each["negative_row"]),
                            settings=PromptSettings.of_document(each.get("settings", {}))) for each in samples)


def of_captions(index: Index) -> tuple[tuple[PromptRows, ...], str]:
    """Up to four different captions as prompts, and whose they are: those of validation samples, or of training samples
    where none is held out."""
    unconditional = index.ref(**index.manifest.document["prompts"]["unconditional"])
    texts, found = index.samples.texts, dict[str, PromptRows]()
    held_out = any(len(members) for members in index.validation)
    for members in index.validation if held_out else index.training:
        for sample in members[: 16 * MOST_CAPTIONS].tolist():
            first = int(index.samples.text_offsets[sample])
            captions = index.samples.captions(sample)
            if captions and captions[0].strip() and len(found) < MOST_CAPTIONS:
                place = index.ref(int(texts["shard"][first]), int(texts["row"][first]))
                found.setdefault(captions[0], PromptRows(prompt=captions[0], positive=place, negative=unconditional))
    return tuple(found.values()), "validation" if held_out else "training"


def current(index: Index) -> Found:
    """The prompts as their file has them now; the manifest's when it is unchanged, gone, or has none with a row."""
    named, digest = index.manifest.document["prompts"]["file"], index.manifest.document["prompts"]["digest"]
    if named is None:
        return Found(prompts=cached(index))
    path = index.manifest.folder / named
    if _leads_out(index.manifest, named):
        return _of_manifest(index, f"prompt file {path} is a link out of the manifest's directory, so it is not read")
    try:
        data = read_prompt_file(path)
        if digest_bytes(data) == digest:
            return Found(prompts=cached(index))
        prompts = prompts_of(data, path, echo=False)
    except Problem as error:
        return _of_manifest(index, error.message)
    if not prompts:
        return _of_manifest(index, f"prompt file {path} has no prompts")
    found = look_up(index, prompts, path)
    return found if found.prompts else Found(prompts=cached(index), warnings=found.warnings)


def look_up(index: Index, prompts: Iterable[Prompt], path: Path) -> Found:
    """`prompts` from the file at `path`, as far as the cache has their rows."""
    context = index.manifest.fields["text"].context
    ledger = load_ledger(index.cache)
    unconditional = index.ref(**index.manifest.document["prompts"]["unconditional"])
    found: list[PromptRows] = []
    lacking: list[Prompt] = []
    for prompt in prompts:
        positive = ledger.find(text_key(prompt.text, context))
        against = unconditional if prompt.negative is None else ledger.find(text_key(prompt.negative, context))
        if positive is None or against is None:
            lacking.append(prompt)
        else:
            found.append(PromptRows(prompt=prompt.text, positive=positive, negative=against, settings=prompt.settings))
    command = encode_command(index.manifest, f" --prompts {shlex.quote(str(path))}")
    warnings = [f"the prompt in line {prompt.line} of {path} has no text row yet, so it is skipped; {command} "
                "encodes it" for prompt in lacking[:WARNINGS]]
    if len(lacking) > WARNINGS:
        warnings.append(f"{len(lacking) - WARNINGS} more prompts of {path} have no text row yet")
    return Found(prompts=tuple(found), warnings=tuple(warnings))


def _of_manifest(index: Index, why: str) -> Found:
    return Found(prompts=cached(index), warnings=(f"{why}; the prompts of the manifest are used",))


def _leads_out(manifest: Manifest, named: str) -> bool:
    """Whether a path that does not climb out of the manifest's directory ends outside of it, through a link.

    A path with `..` says openly where it leads, as to a folder of prompts beside that of manifests.
    """
    if Path(named).is_absolute() or Path(os.path.normpath(named)).parts[:1] == ("..",):
        return False
    try:
        return not is_inside(resolve(manifest.folder / named), resolve(manifest.folder))
    except Problem:  # a loop of links: reading it says so
        return False
