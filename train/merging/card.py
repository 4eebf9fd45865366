"""The README.md of a merged model: its base, the weights that were added to it, and the data of their training.

What it says of the training comes from the metadata of the weights, which may be another program's: it is text, and
missing facts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prep.errors import Problem
from prep.formatting import printable
from prep.models.configs import is_modular, pipeline_index
from prep.models.files import Model
from train.card import called, changed_settings, code, escaped, front_matter, table
from train.config.load import parse
from train.metadata import table_in

CARD = "README.md"
_MOST = 1000  # characters of a text of others
# Titles of lines, and the metadata that they are of: those of `train.metadata`.
_TOLD: Mapping[str, str] = {
    "Manifest": "latentry.manifest", "Recipe": "latentry.recipe", "Steps": "latentry.step", "Seed": "latentry.seed",
    "Begun": "modelspec.date", "Author": "modelspec.author"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Merger:
    """The facts of a merged model."""

    model: Model
    hub_id: str | None  # of the model, if it was named by that
    base: Mapping[str, str]  # fingerprints of the model's parts
    trained: str  # the name of the file
    sha256: str  # its digest
    strength: float | None  # of a LoRA; None: all weights were trained
    metadata: Mapping[str, str]  # of the file


def card(merger: Merger) -> str:
    """The text of the card."""
    said, name = merger.metadata, escaped(_line(merger.hub_id or merger.model.name))
    title = _text(said, "modelspec.title") or escaped(_line(merger.trained))
    parts = [_front(merger), f"# {title}, merged into {name}"]
    parts += filter(None, [_text(said, "modelspec.description")])
    if trigger := _text(said, "modelspec.trigger_phrase"):
        parts.append(f"Words of a prompt that show what was learned: **{trigger}**")
    parts += [table(dict(_facts(merger, name))), "## Use", _use(merger), *_settings(said), "*Written by train merge.*"]
    return "\n\n".join(parts) + "\n"


def _plain(metadata: Mapping[str, str], key: str) -> str:
    return _line(metadata.get(key, ""))


def _text(metadata: Mapping[str, str], key: str) -> str:
    return escaped(_plain(metadata, key))


def _line(text: str) -> str:
    """A text of others on one line."""
    return printable(" ".join(text.split())[:_MOST])


def _front(merger: Merger) -> str:
    """The front matter by which the Hub sorts models."""
    facts: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image",
                             "tags": ["text-to-image", "diffusers"]}
    optional = {"base_model": merger.hub_id and merger.hub_id.partition("@")[0],
                "license": _plain(merger.metadata, "modelspec.license"),
                "instance_prompt": _plain(merger.metadata, "modelspec.trigger_phrase")}
    return front_matter(facts | {key: value for key, value in optional.items() if value})


def _facts(merger: Merger, name: str) -> Iterator[tuple[str, str]]:
    """Title and value of each line of the table."""
    yield "Base model", name
    for part, digest in sorted(merger.base.items()):
        yield f"Fingerprint of {escaped(_line(part))}", escaped(_line(str(digest)))
    trained = escaped(_line(merger.trained))
    if merger.strength is None:
        yield "Its weights are now those of", trained
    else:
        yield "Added", f"{trained}, with a strength of {merger.strength:g}"
    yield "SHA-256 of that file", f"`{merger.sha256}`"
    for title, key in _TOLD.items():
        if value := _text(merger.metadata, key):
            yield title, value


def _use(merger: Merger) -> str:
    """The code with which diffusers loads the directory."""
    pipeline = str(pipeline_index(merger.model)["_class_name"])
    prompt = json.dumps(_plain(merger.metadata, "modelspec.trigger_phrase") or "a picture", ensure_ascii=False)
    return code(f"from diffusers import {pipeline}", "", f'pipeline = {pipeline}.from_pretrained(".")',
                *called(prompt, modular=is_modular(merger.model)))


def _settings(metadata: Mapping[str, str]) -> Iterator[str]:
    """The settings of the run, if the file has them and they are still read."""
    if table := table_in(metadata, "latentry.config"):
        with suppress(Problem):
            yield from changed_settings(parse(table, "metadata"))
