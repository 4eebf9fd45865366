"""The `prep` commands that encode or repair a manifest's rows, with paths relative to the working directory."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from prep.cache.store import cache_at
from prep.fs.place import Place, shortest_name
from prep.manifest.document import Manifest


def encode_command(manifest: Manifest, *options: Place | str) -> str:
    """The `prep encode` command that encodes missing rows, to be typed in the working directory.

    `options` are words to add, such as `"--mask", "sidecar"`; they replace the manifest's options of the same name.
    For a manifest in an object store, it is the command that uploads what is missing, from where the cache was made.
    """
    if manifest.in_store:
        return f"prep push MANIFEST {shlex.quote(str(manifest.path))} --recheck"
    recipe = manifest.document["recipe"]
    sources = [place for place in manifest.sources if place is not None]
    named = manifest.folder / recipe if recipe is not None else sources[0] if sources else Path("SOURCE")
    words = (*_without(manifest.options, set(options)), *options)
    imported = manifest.document["latents"].get("imported")
    if imported is not None:
        return command_of(named, ("--from", imported["from"], *imported["options"], *words), manifest.cache,
                          manifest.path, verb="import")
    return command_of(named, words, manifest.cache, manifest.path)


def command_of(source: Place, options: Iterable[Place | str], cache: Place, manifest: Place, *, verb: str = "encode"
               ) -> str:
    """The `prep encode` (or other) command of a recipe (or source) and its options."""
    words = "".join(f" {_here(word)}" for word in options)
    return f"prep {verb} {_here(source)}{words} --cache {_here(cache)} -o {_here(manifest)}"


def mending(manifest: Manifest, *, recorded: bool = False) -> str:
    """Says what repairs a cache, here or in an object store; `recorded`: the damage is recorded in it, if it can be."""
    if manifest.in_store:
        return (f"upload it again from where it was made: {encode_command(manifest)}; if it was encoded into the "
                "store, run that prep encode again with --recheck")
    records = recorded and cache_at(manifest.cache).records_damage
    return f"encode again only what is damaged: {encode_command(manifest, *(() if records else ('--recheck',)))}"


def prompts_command(manifest: Manifest, file: Path) -> str:
    """The `prep prompts` command that encodes the prompts of a file and names it in the manifest."""
    return f"prep prompts {_here(file)} --manifest {_here(manifest.path)}"


def repair_command(manifest: Manifest, *, recorded: bool = True) -> str:
    """The commands that list and repair damage; `recorded` is False if the cache could not be written."""
    why = "" if recorded else "the cache cannot be written here, so the damage is not recorded in it; "
    return (f"{why}prep verify {_here(manifest.path)} lists all damage; to repair it, "
            f"{mending(manifest, recorded=recorded)}")


def _without(words: Iterable[Place | str], flags: Container[Place | str]) -> Iterator[Place | str]:
    """The words without these flags and the value after each."""
    dropped = False
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            dropped = word in flags
        if not dropped:
            yield word


def _here(path: Place | str) -> str:
    """A word or a place as a person would type it, quoted for the shell."""
    return shlex.quote(path if isinstance(path, str) else shortest_name(path))
