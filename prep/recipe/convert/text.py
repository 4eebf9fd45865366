"""Fits a file's caption settings to a model family; the others become notes, since encode refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.models.families.registry import FAMILIES
from prep.recipe.convert.draft import Draft
from prep.recipe.convert.training import Training
from prep.recipe.schema import SETTINGS


def fit_text(family: str, options: Mapping[str, tuple[int, str]], draft: Draft, training: Training) -> dict[str, Any]:
    """The [model] settings of `options`, {name: (value, key in the file)}, that a `family` takes; an unknown one: all.
    """
    facts = FAMILIES[family].text if family in FAMILIES else None
    fitted: dict[str, Any] = {}
    for name, (value, key) in options.items():
        bounds = SETTINGS[f"model.{name}"].bounds
        if facts is not None and name == "max_length":
            bounds = facts.shortest, facts.longest
        if facts is not None and not {"clip_skip": facts.clip, "text_windows": facts.windows}.get(name, True):
            training.note(key, value, f"models of family '{family}' have no [model] {name}; not written")
        else:
            fitted[name] = draft.within(key, value, bounds, "model")
    return fitted
