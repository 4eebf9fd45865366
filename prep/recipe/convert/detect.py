"""Detects which tool wrote a file, by its contents, and converts it. Parsing is strict and bounded; no code is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from prep.errors import ConfigError, PathError
from prep.fs.paths import unpacking
from prep.fs.text import TooLarge, decode_text, parse_toml, read_small
from prep.parse import Unparsed, brief
from prep.recipe.convert import civitai, simpletuner
from prep.recipe.convert.aitoolkit import training as aitoolkit
from prep.recipe.convert.diffusionpipe import dataset as diffusionpipe
from prep.recipe.convert.diffusionpipe import training as diffusionpipe_training
from prep.recipe.convert.draft import ConvertedRecipe
from prep.recipe.convert.kohya import dataset as kohya
from prep.recipe.convert.kohya import training as kohya_training
from prep.recipe.convert.musubi import dataset as musubi
from prep.recipe.convert.musubi import training as musubi_training
from prep.recipe.convert.onetrainer import concepts as onetrainer
from prep.recipe.convert.onetrainer import training as onetrainer_training

MOST_BYTES = 1 << 24  # of a file; a file that lists every directory by hand has less than a hundredth
MOST_SOURCES = 10_000
KNOWN = ("a kohya dataset TOML ([[datasets]]) or training configuration (dataset_config, train_data_dir), OneTrainer's "
         "concepts JSON (a list with 'path') or main configuration, SimpleTuner's multidatabackend.json (a list with "
         "'instance_data_dir'), musubi-tuner's dataset TOML or training configuration, diffusion-pipe's main TOML "
         "(dataset, [model] type) or dataset TOML ([[directory]]), ai-toolkit's YAML (job, config.process), or "
         "Civitai's training parameters (engine, networkDim)")
MOST_YAML = 1 << 20  # bytes; its parser is slow
MOST_DEEP = 100  # of collections in one another
MOST_DIGITS = 4300  # of a number: YAML's with colons (1:30:00) take time with their square


def convert(path: Path) -> ConvertedRecipe:
    """Converts the file at `path` to a recipe with notes. Raises `PathError`, `ConfigError`."""
    if path.suffix.lower() == ".zip" and path.is_file():
        raise ConfigError(f"{path} is a zip, expected another tool's configuration", hint=unpacking(path))
    try:
        return _converted(_read(path, regular=False), path.absolute().parent)
    except Unparsed as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path, *, regular: bool = True) -> Any:
    """The document in a file; `regular` as in `read_small`. Raises `PathError`, `ConfigError`, `Unparsed`."""
    try:
        return _document(read_small(path, most=MOST_BYTES, regular=regular), path)
    except TooLarge:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes, expected {KNOWN}") from None
    except OSError as error:
        raise PathError(f"cannot read {path}: {error.strerror or error}") from None


def _converted(document: Any, base: Path) -> ConvertedRecipe:
    """The recipe for a parsed file in the directory `base`. Raises `Unparsed`, `PathError`, `ConfigError`."""
    found = _of_table(document, base) if isinstance(document, dict) else None
    if found is not None:
        return found
    tables = [entry for entry in document if isinstance(entry, dict)] if isinstance(document, list) else []
    if len(tables) > MOST_SOURCES:
        raise Unparsed(f"it lists {len(tables)} sources, expected at most {MOST_SOURCES}")
    if any({"instance_data_dir", "dataset_type"} & table.keys() for table in tables):
        return simpletuner.convert(document, base)
    if any("path" in table for table in tables):
        return onetrainer.convert(document, base)
    raise Unparsed(f"it is not in a format that can be converted, expected {KNOWN}")


def _of_table(document: Mapping[str, Any], base: Path) -> ConvertedRecipe | None:
    """The recipe for a table; `None` if no tool is known by it. Raises like `_converted`."""
    if isinstance(document.get("datasets"), list):
        return musubi.convert(document, base) if musubi.is_dataset(document) else kohya.convert(document, base)
    if civitai.is_parameters(document):
        return civitai.convert(document, base, _read)
    if aitoolkit.processes_of(document):
        return aitoolkit.convert(document, base)
    if "source" in document:
        raise Unparsed("it is a recipe already, expected another tool's file")
    if "concept_file_name" in document or "concepts" in document:
        return onetrainer_training.convert(document, base, _read)
    if diffusionpipe_training.is_training(document):
        return diffusionpipe_training.convert(document, base, _read)
    if diffusionpipe.is_dataset(document):
        return diffusionpipe.convert(document, base)
    if not kohya_training.is_training(document):
        return None
    if musubi_training.is_training(document, base, _read):
        return musubi_training.convert(document, base, _read)
    return kohya_training.convert(document, base, _read)


def _document(data: bytes, path: Path) -> Any:
    """The parsed document: JSON if the bytes begin with a bracket or brace and parse, else TOML."""
    text, fault = decode_text(data, KNOWN), "no line is like resolution = 512"
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
        except Unparsed:
            raise
        except (ValueError, RecursionError) as error:  # also for numbers with more digits than Python parses
            fault = str(error)
    if _YAML.search(text):
        return _yaml(text)
    if not _JSON.match(text) and _TOML.search(text):  # a TOML file may begin with a section, as a JSON list does
        return parse_toml(text, str(path))
    raise Unparsed(f"it is neither JSON nor TOML: {fault[:200]}")


def _yaml(text: str) -> Any:
    """The document of a YAML file without aliases, of which few bytes may stand for very many. Raises `Unparsed`."""
    if len(text) > MOST_YAML:
        raise Unparsed(f"it is YAML of more than {MOST_YAML} characters")
    try:
        _check_events(yaml.parse(text, yaml.SafeLoader))
        return _keys_as_texts(yaml.safe_load(text))
    except Unparsed:
        raise
    except (LookupError, AttributeError):  # of the library
        raise Unparsed("it is YAML with a value that its tag does not have, like !!bool maybe") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unparsed(f"it is not YAML: {' '.join(str(error).split())[:200]}") from None


def _keys_as_texts(value: Any) -> Any:
    """The document with keys as JSON and TOML have them: YAML's may be numbers, dates or nothing."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else brief(key): _keys_as_texts(inner) for key, inner in value.items()}
    return [_keys_as_texts(inner) for inner in value] if isinstance(value, list) else value


def _check_events(events: Iterable[yaml.Event]) -> None:
    """Raises `Unparsed` for aliases, deep nesting, very long numbers, and a key that is in a mapping twice, of which
    YAML keeps the last."""
    inside: list[set[str] | None] = []  # for each open collection, the keys of a mapping
    expects_key: list[bool] = []  # whether its next node is a key; alternates in a mapping
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            raise Unparsed("it has aliases (*name), expected YAML without")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_DIGITS and _DIGITS.fullmatch(event.value):
            raise Unparsed(f"it has a number of more than {MOST_DIGITS} digits")
        keys = inside[-1] if inside else None
        if keys is not None and isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if expects_key[-1] and isinstance(event, yaml.ScalarEvent):
                if event.value in keys:
                    raise Unparsed(f"the key {brief(event.value)} occurs twice in a table")
                keys.add(event.value)
            expects_key[-1] = not expects_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            expects_key.append(True)
            if len(inside) > MOST_DEEP:
                raise Unparsed(f"it is YAML nested deeper than {MOST_DEEP}")
        elif isinstance(event, yaml.CollectionEndEvent):
            inside.pop()
            expects_key.pop()


_DIGITS = re.compile(r"[-+]?[0-9_:.]+")
_YAML = re.compile(r"^job\s*:", re.MULTILINE)
_JSON = re.compile(r"\s*(\{|\[\s*\{)")
_TOML = re.compile(r"""^[ \t]*(\[\[?[\w ."'-]+\]\]?[ \t]*(#.*)?$|[\w."'-]+[ \t]*=)""", re.MULTILINE)


def _once(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Unparsed(f"the key {brief(next(key for key in keys if keys.count(key) > 1))} occurs twice in a table")
    return table


def _refuse(word: str) -> NoReturn:
    raise Unparsed(f"it has the number {word}, which is not JSON")
