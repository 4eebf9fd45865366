"""Names of models: a directory, a Hub id, or a single file; as users write them, and as documents record them.

A single file that needs configs of others is named together with them: FILE@CONFIGS, of which CONFIGS is a directory, a
Hub id, or the name of configs in this package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from prep.models.checkpoints.contents import CHECKPOINTS, PICKLES, published
from prep.models.checkpoints.gguf import SUFFIX
from prep.models.files import Model, SingleFile
from prep.parse import Unparsed, brief, expect, hub_id, known_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFile:
    """A single file as a user names it."""

    path: Path
    configs: str  # a directory, a Hub id, or a name of the package's; "": the package's for what the file is

    def __str__(self) -> str:
        return f"{self.path}@{self.configs}" if self.configs else str(self.path)


_SINGLE_FILES = (*CHECKPOINTS, *PICKLES, SUFFIX)
_WITH_CONFIGS = re.compile(rf"(.+?(?:{'|'.join(map(re.escape, _SINGLE_FILES))}))@(.+)", re.IGNORECASE | re.DOTALL)


def file_of(model: str | Path) -> NamedFile | None:
    """The single file that `model` names: one that is there, or has the name of one, which no Hub id has."""
    named = str(model)
    if "://" in named or Path(named).is_dir():
        return None
    if Path(named).is_file() or (Path(named).suffix.lower() in _SINGLE_FILES and not _WITH_CONFIGS.fullmatch(named)):
        return NamedFile(path=Path(named), configs="")
    found = _WITH_CONFIGS.fullmatch(named)
    return None if found is None else NamedFile(path=Path(found[1]), configs=found[2])


def name_for_others(model: Model) -> str:
    """`model` by absolute paths, so that another process finds it."""
    if isinstance(model, SingleFile):
        return f"{model.path.resolve()}@{model.config.resolve()}"
    return str(model.resolve())


def is_there(model: str | Path) -> bool:
    """Whether there is a directory or a single file of this name; of what the Hub may have, nothing is known."""
    file = file_of(model)
    return Path(model).is_dir() if file is None else file.path.is_file()


def is_local(model: str | Path) -> bool:
    """Whether `model` is the name of a directory or a single file, not an id that the Hub may know."""
    return Path(model).is_dir() or file_of(model) is not None


def recorded(model: str | Path, spell: Callable[[Path], str]) -> dict[str, Any]:
    """How documents name a model: by its path, a single file's with that of its configs, or as the Hub does."""
    file = file_of(model)
    if file is None:
        return {"path": spell(Path(model))} if Path(model).is_dir() else {"hub": str(model)}
    if not file.configs:
        return {"path": spell(file.path)}
    own = {"own": file.configs} if published(file.configs) else {"hub": file.configs}
    local = Path(file.configs)
    return {"path": spell(file.path), "configs": {"path": spell(local)} if local.is_dir() else own}


def check_recorded(model: dict[str, Any], where: str, check_path: Callable[[Any, str], object]) -> None:
    """Raises `Unparsed` unless `model` is what `recorded` makes; `check_path` checks its paths."""
    known_keys(model, ("path", "hub", "configs"), where)
    if ("path" in model) == ("hub" in model) or ("configs" in model and "path" not in model):
        raise Unparsed(f"{where} is {brief(model)}, expected exactly one of 'path' and 'hub'")
    if "hub" in model:
        hub_id(expect(model["hub"], str, f"{where}.hub"), f"{where}.hub")
        return
    check_path(model["path"], f"{where}.path")
    if "configs" in model:
        configs = expect(model["configs"], dict, f"{where}.configs")
        if set(configs) == {"own"}:
            if not published(expect(configs["own"], str, f"{where}.configs.own")):
                raise Unparsed(f"{where}.configs.own is {brief(configs['own'])}, which is not in this package")
            return
        known_keys(configs, ("path", "hub", "own"), f"{where}.configs")
        check_recorded(configs, f"{where}.configs", check_path)


def named_in(model: Mapping[str, Any], folder: Path) -> Path | str:
    """The model of a document whose paths are relative to `folder`."""
    if "hub" in model:
        return str(model["hub"])
    path, configs = folder / PurePosixPath(model["path"]), model.get("configs")
    if configs is None:
        return path
    if "path" in configs:  # an absolute path is no Hub id: where the directory is gone, the Hub may have its name
        return f"{path}@{(folder / PurePosixPath(configs['path'])).absolute()}"
    return f"{path}@{configs.get('own', configs.get('hub'))}"


def beside(model: str, base: Path) -> str:
    """`model` with each directory and file in its name that is there, or is named like one, as found from `base`;
    anything else may be a Hub id."""
    file = file_of(base / model) if model else None
    if file is not None:
        configs = base / file.configs
        return str(replace(file, configs=str(configs)) if file.configs and configs.is_dir() else file)
    return str(base / model) if model and (base / model).exists() else model


def without_folders(model: str) -> str:
    """`model` without the places of its directories and files; a Hub id as it is."""
    file = file_of(model)
    if file is None:
        return Path(model).name if Path(model).is_absolute() or Path(model).is_dir() else model
    return f"{file.path.name}@{without_folders(file.configs)}" if file.configs else file.path.name


def moved(model: str, move: Callable[[Path], str]) -> str:
    """`model` with each directory and file in its name as `move` spells it; a Hub id as it is."""
    file = file_of(model)
    if file is None:
        return move(Path(model)) if Path(model).is_dir() else model
    configs = move(Path(file.configs)) if file.configs and Path(file.configs).is_dir() else file.configs
    return f"{move(file.path)}@{configs}" if configs else move(file.path)
