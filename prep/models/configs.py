"""Reads the configs of a pipeline's components, which say what rows will look like before any weights are read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.files import INDEX, MODULAR, Model, SingleFile, class_in, entry_in, read_config
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
        """Whether the index names a class for `component`. Raises `ModelError`."""
        return self.value(component) not in (None, [None, None])

    def value(self, name: str, default: Any = None) -> Any:
        """A value of the index. Raises `ModelError`."""
        if "" not in self._read:
            self._read[""] = pipeline_index(self.model)
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


# ---- which components there are --------------------------------------------------------------------------------------


def is_modular(model: Model) -> bool:
    """Whether `model` is a modular repository: with modular_model_index.json, and without model_index.json."""
    return not os.path.lexists(model / INDEX) and os.path.lexists(model / MODULAR)


def index_file(model: Model) -> Path:
    """The file that names the components of `model`."""
    return model / (MODULAR if is_modular(model) else INDEX)


def copied_index(model: Model, others: Collection[str]) -> dict[str, Any]:
    """modular_model_index.json for a copy of `model` whose files have the names of no variant. The repository that the
    index names does not have the copy's `others`, so the index names none for them: diffusers finds them in the copy's
    directory, and fails where it would load those of the repository. Raises `ModelError`.
    """
    own = {"pretrained_model_name_or_path": None, "revision": None}
    return {name: [*value[:2], {**entry_in(value), "variant": None, **(own if name in others else {})}]
            if entry_in(value) else value for name, value in read_config(model / MODULAR).items()}


def pipeline_index(model: Model) -> dict[str, Any]:
    """What model_index.json of `model` says, or of what a single file has its configs of; of a modular repository the
    same: library and class of each component. Raises `ModelError`.

    A modular repository also says where each component is. It has to be in the directory, in a folder of its name: that
    is where diffusers looks first (`ModularPipeline.__init__`), whatever repository is named.
    """
    if isinstance(model, SingleFile):
        model = model.config
    if not model.is_dir():
        raise ModelError(f"model {model} is not a directory", hint="--model takes a diffusers pipeline directory "
                         "(with model_index.json), or a Hub id like owner/name")
    path = index_file(model)
    index = read_config(path)
    if path.name == INDEX:
        return index
    there = {each.name for each in model.iterdir()}
    for name, value in index.items():
        folder = entry_in(value).get("subfolder") or name
        if folder != name and isinstance(folder, str) and folder in there:
            raise ModelError(f"{path} has the component {name} in the folder {brief(folder)}, expected {name}",
                             hint=f"rename that folder to {name}, and its subfolder in {path.name}, in a copy")
    return {name: class_in(value) if entry_in(value) else value for name, value in index.items()}
