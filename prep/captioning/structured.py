"""Captions that are JSON objects, as FLUX.2 and others read them: what models are asked for, and the check
of what they said.

The schema is part of each prompt, since models on this computer have no other way to learn it; servers get it as
`response_format` too, and may hold their models to it. An answer that does not follow it is no answer: it is not
remembered, so the next run asks again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.captioning.engine import Answer, Unanswered
from prep.captions.variants import spell_json
from prep.errors import ConfigError
from prep.formatting import printable
from prep.fs.text import read_text
from prep.parse import Unparsed, brief

PROMPT = "Describe this image: the subjects, the surroundings, the composition, the style, the light and the colors."
MOST_SCHEMA = 1 << 16  # bytes; it is sent with each picture
DEPTH = 16  # of a schema
# A whole number is a number, too; true is none.
TYPES: Mapping[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "integer": (int,),
                                         "number": (int, float), "boolean": (bool,), "null": (type(None),)}
CHECKED = {"type": (str, list), "properties": (dict,), "required": (list,), "items": (dict,), "enum": (list,),
           "additionalProperties": (bool,)}
SAID = ("$schema", "$id", "title", "description", "default", "examples")  # to people and models


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """What JSON objects are asked for."""

    document: Mapping[str, Any]

    def asking(self, prompt: str) -> str:
        """A prompt that asks for such an object."""
        schema = spell_json(self.document)
        return f"{prompt} Answer with one JSON object and nothing else. It follows this JSON schema: {schema}".strip()

    @property
    def response_format(self) -> Mapping[str, Any]:
        """The option of a request, https://platform.openai.com/docs/api-reference/chat/create. Not `strict`, which
        refuses schemas with optional properties."""
        return {"type": "json_schema", "json_schema": {"name": "caption", "schema": self.document}}

    def read(self, answer: Answer | Unanswered) -> Answer | Unanswered:
        """The object in an answer, on one line; or why it is none."""
        if isinstance(answer, Unanswered) or answer.refused:
            return answer
        start, end = answer.text.find("{"), answer.text.rfind("}") + 1  # around it may be a fence, or "Here it is:"
        try:
            value = json.loads(answer.text[max(start, 0):end or None], parse_constant=_refuse)
        except (ValueError, RecursionError):
            why = "was cut off: raise --max-tokens" if answer.cut else f"is not JSON: '{printable(answer.text[:60])}'"
            return Unanswered(detail=f"the answer {why}")
        fault = next(_faults(value, self.document), "")
        return Unanswered(detail=fault) if fault else replace(answer, text=spell_json(value), cut=False)


def schema_of(path: Path) -> Schema:
    """The JSON schema in a file. Raises `ConfigError` for one that is not of objects, or has what is not checked here.
    """
    hint = 'for example: {"type": "object", "properties": {"scene": {"type": "string"}}, "required": ["scene"]}'
    try:
        document = json.loads(read_text(path, most=MOST_SCHEMA))
        _check(document)
        if document.get("type") != "object":
            raise Unparsed(f"the schema has type {brief(document.get('type'))}, expected \"object\"")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=hint) from None
    except RecursionError:
        raise ConfigError(f"{path}: the schema is nested too deeply", hint=hint) from None
    except ValueError as error:  # no JSON, or `Unparsed`
        raise ConfigError(f"{path}: {error}", hint=hint) from None
    return Schema(document=document)


def _check(schema: Any, path: str = "", deep: int = DEPTH) -> None:
    """Raises `Unparsed` for a schema that says something which is not checked."""
    where = _at(path, "the schema")
    if not isinstance(schema, dict):
        raise Unparsed(f"{where} is {brief(schema)}, expected an object")
    if not deep:
        raise Unparsed(f"{where} is nested too deeply, expected at most {DEPTH} levels")
    for key, value in schema.items():
        if key in SAID:
            continue
        if key not in CHECKED:
            raise Unparsed(f"{where} has {brief(key)}, expected only {', '.join([*CHECKED, *SAID])}")
        if not isinstance(value, CHECKED[key]):
            raise Unparsed(f"{where} has {key} = {brief(value)}, expected another kind of value")
    for name in _types(schema):
        if name not in TYPES:
            raise Unparsed(f"{where} has type {brief(name)}, expected one of {', '.join(TYPES)}")
    for name, inner in schema.get("properties", {}).items():
        _check(inner, f"{path}.{name}", deep - 1)
    if "items" in schema:
        _check(schema["items"], f"{path}[]", deep - 1)


def _faults(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What of a value does not follow its schema."""
    where = _at(path, "the answer")
    types = _types(schema)
    if types and not any(type(value) in TYPES[name] for name in types):
        yield f"{where} is {brief(value)}, expected {' or '.join(types)}"
    if "enum" in schema and not any(type(value) is type(each) and value == each for each in schema["enum"]):
        yield f"{where} is {brief(value)}, expected one of {brief(schema['enum'])}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where} has no '{printable(str(name))}'"
        for name, inner in value.items():
            if name in known:
                yield from _faults(inner, known[name], f"{path}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{where} has '{printable(name[:60])}', which the schema has not"
    if isinstance(value, list) and "items" in schema:
        for place, inner in enumerate(value):
            yield from _faults(inner, schema["items"], f"{path}[{place}]")


def _at(path: str, whole: str) -> str:
    """A part, for people: 'subjects[0].position' of the answer."""
    return f"'{printable(path[:200].lstrip('.'))}' of {whole}" if path else whole


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity, which Python reads and JSON has not


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]
