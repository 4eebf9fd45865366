"""PEFT's settings of an adapter: in metadata, where diffusers keeps them, or in PEFT's adapter_config.json.

As `peft.LoraConfig` and `get_pattern_key` of PEFT 0.21 read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from prep.parse import Unparsed, brief
from train.models.targets import endings

KEY = "lora_adapter_metadata"
# Ways to begin whose first values are taken out of the base's weights: what the file adds is not all that changed.
_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# A stranger's patterns must not take for ever: names are looked up, and few may be expressions, short and of few parts.
_NAME = re.compile(r"\^?(?:[\w\-]|\\?\.)+\$?")
_EXPRESSION = re.compile(r"(?:[\w\-^$|()]|\\[.dw\-]\+?|\.[*+]?|\[[\w\-]+\]\+?)+")
_MOST_EXPRESSIONS, _MOST_REPEATS, _MOST_GROUPS, _LONGEST = 10, 2, 2, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """Values for layers by patterns; the first pattern that fits a layer counts."""

    names: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # with the number of the pattern
    expressions: tuple[tuple[int, re.Pattern[str], float], ...] = ()

    def value(self, layer: str) -> float | None:
        """The value for a layer: of a pattern of its whole name, or of what follows one of its dots."""
        values = [self.names[name] for name in (f"^{layer}", layer, *endings(layer)) if name in self.names]
        values += [(number, value) for number, pattern, value in self.expressions if pattern.fullmatch(layer)]
        return min(values)[1] if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The settings that decide the scale of an adapter."""

    alpha: float | None = None  # None: the rank
    alphas: Patterns = field(default_factory=Patterns)
    by_root: bool = False  # use_rslora: alpha / sqrt(rank)
    products: bool = False  # whether PEFT's LoHa or LoKr wrote it: these are scaled whatever they are made of

    def alpha_of(self, layer: str, rank: int) -> float:
        """The alpha that scales a layer's adapter, if alpha / rank does."""
        own = self.alphas.value(layer)
        alpha = self.alpha if own is None else own
        alpha = float(rank) if alpha is None else alpha
        return alpha * sqrt(rank) if self.by_root else alpha


def settings_in(metadata: Mapping[str, str], component: str) -> PeftSettings:
    """The settings of the adapter of `component` (unet or transformer), as diffusers keeps them. Raises `Unparsed`."""
    table = _document(metadata[KEY], KEY) if KEY in metadata else {}
    return parse({name.removeprefix(f"{component}."): value for name, value in table.items()
                  if name.startswith(f"{component}.")})


def settings_of(document: str) -> PeftSettings:
    """The settings in the text of an adapter_config.json. Raises `Unparsed`."""
    return parse(_document(document, "adapter_config.json"))


def parse(table: Mapping[str, Any]) -> PeftSettings:
    """The settings in PEFT's table. Raises `Unparsed`, also for an adapter that the file does not have all of."""
    first = table.get("init_lora_weights")
    if isinstance(first, str) and first.lower().startswith(_FROM_BASE):
        raise Unparsed(f"its init_lora_weights is {brief(first)}: the adapter began with a part of the base's weights, "
                       "which was taken out of them and is not in the file. PEFT writes what is added to the base with "
                       "save_pretrained(path_initial_model_for_weight_conversion=…)")
    products = table.get("peft_type") in ("LOHA", "LOKR")
    name = "alpha" if products else "lora_alpha"
    alpha = table.get(name)
    return PeftSettings(alpha=None if alpha is None else _number(name, alpha), products=products,
                        by_root=table.get("use_rslora") is True, alphas=_patterns(table.get("alpha_pattern") or {}))


def unusual(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """The values of the layers that do not have the usual one. Readers take the first name that ends a layer's, so a
    layer whose name ends in another's comes before that, with its own value."""
    own = {name: value for name, value in values.items() if value != usual}
    longer = sorted((name for name in values if any(end in own for end in endings(name))), key=len, reverse=True)
    return {name: values[name] for name in (*longer, *own)}


def _patterns(table: Any) -> Patterns:
    if not isinstance(table, dict):
        raise Unparsed(f"its alpha_pattern is {brief(table)}, expected a table")
    names: dict[str, tuple[int, float]] = {}
    expressions = []
    for number, (pattern, spelled) in enumerate(table.items()):
        value = _number(f"alpha_pattern of {brief(pattern)}", spelled)
        if _NAME.fullmatch(pattern):
            names.setdefault(pattern.replace("\\.", ".").removesuffix("$"), (number, value))
        else:
            expressions.append((number, _expression(pattern), value))
    if len(expressions) > _MOST_EXPRESSIONS:
        raise Unparsed(f"its alpha_pattern has {len(expressions)} expressions, expected at most {_MOST_EXPRESSIONS}")
    return Patterns(names=names, expressions=tuple(expressions))


def _expression(pattern: str) -> re.Pattern[str]:
    """The expression as PEFT matches it, if it takes no longer than its text."""
    plain = (len(pattern) <= _LONGEST and _EXPRESSION.fullmatch(pattern) is not None
             and pattern.count("(") <= _MOST_GROUPS and len(re.findall(r"[*+]", pattern)) <= _MOST_REPEATS)
    try:
        if plain:
            return re.compile(rf"(?:.*\.)?(?:{pattern})")
    except (re.error, RecursionError):
        pass
    raise Unparsed(f"its alpha_pattern has {brief(pattern)}, expected a layer's name, or an expression of at most "
                   f"{_MOST_REPEATS} repeats and {_MOST_GROUPS} groups")


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e9:  # so neither is NaN
        raise Unparsed(f"its {name} is {brief(value)}, expected a number")
    return float(value)


def _document(text: str, name: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"its {name} is not JSON: {str(error)[:80]}") from None
    if not isinstance(table, dict):
        raise Unparsed(f"its {name} is {brief(table)}, expected a table")
    return table
