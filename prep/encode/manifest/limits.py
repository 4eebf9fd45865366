"""Bounds the size of a manifest before anything is encoded, so that no long run fails at its end.

Samples, shards and findings are in tables, so only the contents of the recipe can make it large: prompts, sources,
options, paths, and the number of buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prep.cache.shard_format import MAX_ROWS
from prep.digest import canonical
from prep.encode.manifest.document import buckets_of, roles_of
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import PromptTarget
from prep.errors import ConfigError
from prep.fs.place import Place, relative_name
from prep.manifest.document import LIMIT, version_of
from prep.manifest.schema import check_document
from prep.parse import Unparsed
from prep.recipe.prompts import Prompt, read_prompts

PROMPT_BYTES = 1 << 18  # the manifest contains them, and stays below 1 MiB
_COUNT = (1 << 53) - 1  # the largest number that `prep.parse.count` accepts
_ROW = {"shard": (1 << 31) - 1, "row": MAX_ROWS - 1}  # the tables have int32
_DIGEST = "0" * 64
_HINTS = {
    "prompts": "remove prompts from the prompt file: it is for the few prompts of sample pictures",
    "sources": "name fewer sources: a source may be a directory that contains others",
    "buckets": "a larger image.step, or a smaller image.resolution, makes fewer buckets",
}


def check_manifest_size(resolved: ResolvedRecipe, frame: Mapping[str, Any], path: Place) -> None:
    """Raises `ConfigError` if the manifest at `path` may become too large, or invalid for readers.

    `frame` comes from `prep.encode.manifest.document.fixed_fields`.
    """
    check_document_size(_largest(resolved, frame, path), path)


def check_document_size(document: Mapping[str, Any], path: Place) -> None:
    """Raises `ConfigError` if `document`, the largest that the manifest at `path` may become, is too large or invalid.
    """
    size = len(canonical(document))
    if size <= LIMIT:
        try:
            check_document(document, str(path))
        except Unparsed as error:
            raise ConfigError(f"no manifest can hold this recipe: {error}", hint=_HINTS["buckets"]) from None
        return
    sizes = {name: len(canonical({name: value})) for name, value in document.items()}
    worst = max(sizes, key=sizes.__getitem__)
    raise ConfigError(f"the manifest would have up to {size} bytes, expected at most {LIMIT}; "
                      f"{sizes[worst]} of them are its {worst}",
                      hint=_HINTS.get(worst, "shorter paths and fewer options make it smaller"))


def _largest(resolved: ResolvedRecipe, frame: Mapping[str, Any], path: Place) -> dict[str, Any]:
    """A document at least as long as the one that is assembled: nothing rejected, unknown numbers at their maximum."""
    buckets = buckets_of(resolved.targets.samples)
    largest = dict.fromkeys(("rows", "shards", "bytes"), _COUNT)
    return {
        **frame, "version": version_of(resolved.targets.samples.shapes, embedded=resolved.vision is not None),
        "fields": {field: {"context": context, "arrays": resolved.specs.as_manifest(field), **largest}
                   for field, context in resolved.contexts.by_field().items()},
        "buckets": buckets, "samples": roles_of(buckets),
        "prompts": largest_prompts(resolved.recipe.prompts, path, resolved.targets.prompts),
        "tables": dict.fromkeys(("samples", "shards", "findings"), _DIGEST), "rejected": _COUNT, "self": _DIGEST,
    }


def largest_prompts(file: Path | None, path: Place, prompts: Sequence[PromptTarget]) -> dict[str, Any]:
    """The prompts of the manifest at `path`, all encoded, with the places of their rows at maximum."""
    return {"file": None if file is None else relative_name(file, path), "digest": _DIGEST,
            "unconditional": _ROW, "samples": [prompt.as_document(lambda _: _ROW) for prompt in prompts]}


def read_small_prompts(path: Path, named: str) -> tuple[bytes, list[Prompt]]:
    """The bytes of a prompt file that a manifest can hold, and its prompts, as `read_prompts`. Raises `PathError`,
    `ConfigError`."""
    data, prompts = read_prompts(path, named)
    if len(data) > PROMPT_BYTES:
        raise ConfigError(f"prompt file {path} ({named}) has {len(data)} bytes, expected at most {PROMPT_BYTES}",
                          hint="it is for the few prompts of sample pictures; captions lie beside the pictures")
    return data, prompts
