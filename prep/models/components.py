"""The classes that pipeline components may be loaded as. No others: a model directory can name any Python class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prep.errors import ModelError
from prep.models.configs import index_file
from prep.models.families.registry import FAMILIES, families_of_pipeline
from prep.models.family import Class
from prep.models.files import Model
from prep.parse import brief


def known_classes(name: str) -> frozenset[Class]:
    """Every class that some family has for the component `name`."""
    return frozenset(kind for family in FAMILIES.values() for kind in family.components.get(name, ()))


_NUMBERED = re.compile(r"(text_encoder|tokenizer)(?:_[2-9])?")  # text_encoder, text_encoder_2, text_encoder_3


def class_of(index: Mapping[str, Any], name: str, model: Model) -> Class:
    """The class of the component `name`, from `index`, that of `model`.

    Raises `ModelError` if it is a class of no family: those of the pipeline's own family are expected.
    """
    named, known = index.get(name), known_classes(name)
    if isinstance(named, list) and len(named) == 2 and all(isinstance(part, str) for part in named):
        library, kind = named
        if (library, kind) in known:
            return library, kind
    families = families_of_pipeline(index.get("_class_name")).values()
    own = {kind for family in families for kind in family.components.get(name, ())}
    expected = (own if families else known) or {("diffusers", "no such component")}
    raise ModelError(f"{name} in {index_file(model)} is {brief(named)}, expected "
                     f"{' or '.join(sorted(f'{kind} of {library}' for library, kind in expected))}",
                     hint="only these classes are loaded; code in a model directory is never run")


def numbered(index: Mapping[str, Any], stem: str) -> list[str]:
    """The pipeline's components named `stem`, `stem`_2 and so on, in this order; always includes `stem`."""
    return [stem, *sorted(name for name, named in index.items()
                          if name != stem and (found := _NUMBERED.fullmatch(name)) and found[1] == stem
                          and named not in (None, [None, None]))]
