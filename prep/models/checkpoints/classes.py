"""Imports the classes of components, by the names that model_index.json has for them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from prep.models.checkpoints.bounds import known_warnings
from prep.models.family import Class
from prep.models.files import KOLORS

# Of `library` in model_index.json: diffusers names classes beside a pipeline by its folder.
_MODULES = {KOLORS: "diffusers.pipelines.kolors"}


@cache
def imported(kind: Class) -> Any:
    """The class of this library and name, which must be among `components.known_classes`. Raises `ImportError`."""
    library, name = kind
    with known_warnings():
        found = getattr(import_module(_MODULES.get(library, library)), name)
    return _as_others(found) if name == "ChatGLMModel" else found


def _as_others(kind: Any) -> Any:
    """ChatGLM's model, which makes its weights where torch is told to, as other models do, and random.

    By default it makes all of them in host memory, without values: also where a model is only counted.
    """
    def make(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **{**options, "empty_init": False})

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})
