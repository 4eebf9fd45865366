"""Foreground masks by rembg, an extra (`pip install 'latentry[rembg]'`): its models are ONNX files below `~/.u2net`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prep.errors import ModelError, UsageError, first_line

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Matting:
    """A session of rembg. `name` is one of its models: u2net, isnet-general-use, birefnet-general …

    Raises `UsageError` without the package, `ModelError` for a model that is not there: rembg would fetch it from the
    network of its own accord, so unless `download` says so, its file has to be there.
    """

    def __init__(self, name: str, *, download: bool) -> None:
        self._name = name
        self._rembg: Any = _imported()
        home = _home()
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise ModelError(f"model '{name[:60]}' is no name of a rembg model, expected one like u2net")
        if not download and not (home / f"{name}.onnx").is_file():
            raise ModelError(f"rembg model '{name}' is not in {home}", hint="add --download to let rembg fetch it")
        try:
            self._session = self._rembg.new_session(name)
        except Exception as error:  # names it does not know, files that are broken, networks that are not there
            raise ModelError(f"rembg cannot load '{name}': {first_line(error)}") from None

    def prepare(self, picture: Pixels) -> Pixels:
        """The picture itself: rembg scales it."""
        return picture

    def maps(self, inputs: Sequence[Pixels]) -> list[Pixels]:
        """The foreground's opacity, uint8 [H, W], picture by picture: rembg has no batches."""
        return [self._map(picture) for picture in inputs]

    def _map(self, picture: Pixels) -> Pixels:
        found = np.asarray(self._rembg.remove(picture, session=self._session, only_mask=True))
        if found.shape != picture.shape[:2]:
            raise ModelError(f"rembg model '{self._name}' gives an array of {list(found.shape)}, expected one mask of "
                             f"{list(picture.shape[:2])}", hint="choose another model, u2net for one")
        return found.astype(np.uint8)


def _imported() -> Any:
    try:
        import rembg
    except (ImportError, SystemExit):  # it ends the process where it finds no onnxruntime
        raise UsageError("--with rembg needs the package rembg with onnxruntime, which is not installed",
                         hint="pip install 'latentry[rembg]'") from None
    return rembg


def _home() -> Path:
    """Where rembg keeps its models: as its sessions say."""
    given = os.environ.get("U2NET_HOME") or f"{os.environ.get('XDG_DATA_HOME', '~')}/.u2net"
    return Path(given).expanduser()
