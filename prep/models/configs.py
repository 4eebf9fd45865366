"""Reads the configs of a pipeline's components, which say what rows will look like before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.errors import ModelError
from prep.models.files import Model, read_config
from prep.parse import brief

MOST_WIDTH = 1 << 17  # channels; three layers of FLUX.2's text encoder together have 15,360


class Configs:
    """The configs of the pipeline directory `model`, each read once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._read: dict[str, Mapping[str, Any]] = {}

    def __call__(self, component: str) -> Mapping[str, Any]:
        """The config.json of `component`. Raises `ModelError`."""
        if component not in self._read:
            self._read[component] = read_config(self.model / component / "config.json")
        return self._read[component]

    def has(self, component: str) -> bool:
        """Whether model_index.json names a class for `component`. Raises `ModelError`."""
        return self.value(component) not in (None, [None, None])

    def value(self, name: str, default: Any = None) -> Any:
        """A value of model_index.json. Raises `ModelError`."""
        if "" not in self._read:
            self._read[""] = read_config(self.model / "model_index.json")
        return self._read[""].get(name, default)

    def width(self, component: str, *keys: str) -> int:
        """A number of channels in the config of `component`, below nested `keys`. Raises `ModelError`."""
        found: Any = self(component)
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if type(found) is not int or not 1 <= found <= MOST_WIDTH:
            raise ModelError(f"{self.model / component / 'config.json'} has {'.'.join(keys)} {brief(found)}, expected "
                             f"a whole number from 1 to {MOST_WIDTH}")
        return found
