"""Renders the chat templates of models in a worker. A template is a program that came with a model, and the text that
it makes decides rows: so it may depend on nothing but the messages, and takes neither long nor much memory.

The fingerprint has the template, but not what it could ask for: the time, random numbers, addresses in memory.
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2.ext
from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from prep.errors import ModelError, first_line
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Service, Task

LIMITS = Limits(seconds=20, memory=1 << 30)  # for one caption: it takes a millisecond and 100 MB
MOST_ADDED = 1 << 20  # characters of a text, beside those of the messages
RENDERED = "{{ messages[0].content }}"  # the template of what has been rendered
HINT = "take the chat template of the model's authors; it writes a caption between some fixed words"
# No part of the one is that of the other.
CLOCKS = (datetime(2001, 2, 3, 4, 5, 6, 789), datetime(2012, 11, 23, 15, 37, 48, 123456))


def render_apart(tokenizer: Any, folder: Path) -> None:
    """From now on a worker renders the chat template of a tokenizer, which was loaded from `folder`.

    Its `apply_chat_template` raises `ModelError`.
    """
    kind = type(tokenizer)
    own = inspect.signature(kind.apply_chat_template).parameters
    pool = WorkerPool(SERVICE, most=1)
    weakref.finalize(tokenizer, pool.close)

    def apply_chat_template(self: Any, conversation: Any, **options: Any) -> Any:
        template = self.get_chat_template(options.pop("chat_template", None), None)
        values = {**self.special_tokens_map, **{name: value for name, value in options.items() if name not in own},
                  "tools": None, "documents": None,
                  "add_generation_prompt": options.get("add_generation_prompt", False)}

        def rendered(chat: Any) -> list[dict[str, str]]:
            return [{"role": "user", "content": render(pool, template, {**values, "messages": chat}, folder)}]

        several = isinstance(conversation[0], list | tuple)
        texts = [rendered(chat) for chat in conversation] if several else rendered(conversation)
        return kind.apply_chat_template(self, texts, chat_template=RENDERED, **options)

    tokenizer.__class__ = type(kind.__name__, (kind,), {"apply_chat_template": apply_chat_template,
                                                        "__module__": kind.__module__})


def render(pool: WorkerPool, template: str, values: Mapping[str, Any], folder: Path) -> str:
    """The text that a template in `folder` makes of a conversation and what belongs to it; `pool` is one of this
    module's `SERVICE`. Raises `ModelError`."""
    try:
        ((text, failure),) = pool.ask(RENDER, (template, json.dumps(values, default=str)), LIMITS)
    except WorkerLost as lost:
        raise ModelError(f"the chat template in {folder} cannot be rendered within its limits: {lost.detail}",
                         hint=HINT) from None
    if failure:
        raise ModelError(f"the chat template in {folder} cannot be rendered: {failure}", hint=HINT)
    return text


# ---- in a worker -----------------------------------------------------------------------------------------------------


def _rendered(question: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the text of a conversation, and the reason if there is none."""
    template, values = question
    try:
        text, other = (_program(template, clock).render(json.loads(values)) for clock in CLOCKS)
        if text != other:
            raise TemplateError("it writes the date or time into the text")
        if len(text) > len(values) + MOST_ADDED:
            raise TemplateError(f"it adds {len(text) - len(values)} characters, expected at most {MOST_ADDED}")
    except MemoryError:
        raise
    except Exception as error:  # what a template does may raise anything
        yield "", f"{first_line(error) or type(error).__name__}"[:300]
    else:
        yield text, ""


@functools.cache
def _program(template: str, clock: datetime) -> jinja2.Template:
    """A template with what transformers gives to chat templates, without what another process would answer otherwise.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters = {name: _steady_filter(call) for name, call in environment.filters.items() if name != "random"}
    environment.filters["tojson"] = _tojson
    environment.globals = {"range": _Function(safe_range), "dict": _Function(dict),
                           "namespace": _Names, "raise_exception": _Function(_raise_exception),
                           "strftime_now": _Function(clock.strftime)}
    return environment.from_string(template)


class _Function:
    """A function that shows no address when it is printed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __repr__(self) -> str:
        return "<function>"


def _steady(value: Any) -> Any:
    """A value that prints the same in every process."""
    if isinstance(value, Iterator):
        return list(value)
    return _Function(value) if callable(value) and not isinstance(value, type | Undefined | _Function) else value


def _steady_filter(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)  # also whether it is given the environment
    def steady(*args: Any, **options: Any) -> Any:
        return _steady(call(*args, **options))

    return steady


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, whose methods show no address."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _steady(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _steady(super().getitem(obj, argument))


class _Generation(jinja2.ext.Extension):
    """Reads `{% generation %}`, which marks what an assistant says, and does nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Names(Namespace):
    """A namespace without names that lead into Python."""

    def __init__(*args: Any, **options: Any) -> None:
        self, *arguments = args
        names: Mapping[str, Any] = dict(*arguments, **options)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


RENDER = Task(name="render", question=tuple[str, str], part=tuple[str, str], work=_rendered)
SERVICE = Service(module=__name__, tasks=(RENDER,))
