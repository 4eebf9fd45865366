"""Sample prompts and their rows: those of the manifest, or of an edited file as far as the cache has them.

Nothing here raises for a prompt: one without a row is left out, with a warning that names it and the command that
makes it. Training goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prep.cache.ledger.ledger import load_ledger
from prep.cache.records import RowRef
from prep.digest import digest_bytes
from prep.errors import PathError
from prep.keys import text_key
from prep.loader.index import Index
from prep.manifest.commands import encode_command
from prep.recipe.prompts import PromptPair, read_prompts

WARNINGS = 20  # of single prompts; more are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """A prompt that can be sampled without a text encoder."""

    prompt: str
    positive: RowRef
    negative: RowRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Prompts, and what is to be said of those that are not among them."""

    prompts: tuple[PromptRows, ...]
    warnings: tuple[str, ...] = ()


def cached(index: Index) -> tuple[PromptRows, ...]:
    """The prompts that were encoded with the manifest."""
    samples = index.manifest.document["prompts"]["samples"]
    return tuple(PromptRows(prompt=each["prompt"], positive=index.ref(**each["positive"]),
                            negative=index.ref(**each["negative_row"])) for each in samples)


def current(index: Index) -> Found:
    """The prompts as their file has them now; the manifest's when it is unchanged, gone, or has none with a row."""
    manifest = index.manifest
    named, digest = manifest.document["prompts"]["file"], manifest.document["prompts"]["digest"]
    if named is None:
        return Found(prompts=cached(index))
    path = manifest.folder / named
    try:
        data, pairs = read_prompts(path)
    except PathError as error:
        return Found(prompts=cached(index), warnings=(f"{error.message}; the prompts of the manifest are used",))
    if digest_bytes(data) == digest:
        return Found(prompts=cached(index))
    if not pairs:
        return Found(prompts=cached(index), warnings=(f"{path} has no prompts; those of the manifest are used",))
    found = look_up(index, pairs, path, quote=".." not in Path(named).parts)
    return found if found.prompts else Found(prompts=cached(index), warnings=found.warnings)


def look_up(index: Index, pairs: Iterable[PromptPair], path: Path, *, quote: bool = True) -> Found:
    """`pairs` from the file at `path`, as far as the cache has their rows.

    Without `quote` the warnings do not repeat what is in the file: a stranger's manifest may name any, and logs travel.
    """
    context = index.manifest.fields["text"].context
    ledger = load_ledger(index.cache)
    unconditional = index.ref(**index.manifest.document["prompts"]["unconditional"])
    prompts: list[PromptRows] = []
    lacking: list[str] = []
    for prompt, negative in pairs:
        positive = ledger.find(text_key(prompt, context))
        against = unconditional if negative is None else ledger.find(text_key(negative, context))
        if positive is None or against is None:
            lacking.append(prompt if positive is None else f"{prompt} --n {negative}")
        else:
            prompts.append(PromptRows(prompt=prompt, positive=positive, negative=against))
    command = encode_command(index.manifest, f" --prompts {shlex.quote(str(path))}")
    if lacking and not quote:
        some = f"{len(lacking)} of {len(lacking) + len(prompts)} prompts"
        return Found(prompts=tuple(prompts), warnings=(
            f"{some} of {path} have no text row yet, so they are left out; {command} makes them",))
    warnings = [f"prompt '{prompt}' of {path} has no text row yet, so it is left out; {command} makes it"
                for prompt in lacking[:WARNINGS]]
    if len(lacking) > WARNINGS:
        warnings.append(f"and {len(lacking) - WARNINGS} more prompts of {path} have none")
    return Found(prompts=tuple(prompts), warnings=tuple(warnings))
