"""Makes foreground masks with rembg, an extra (`pip install 'latentry[rembg]'`); its ONNX models lie in `~/.u2net`."""

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

    Raises `UsageError` without the package, `ModelError` for a missing model: rembg would download it unasked, so
    without `download` its file must exist.
    """

    def __init__(self, name: str, *, download: bool) -> None:
        self._name = name
        self._rembg: Any = _imported()
        home = _home()
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise ModelError(f"model '{name[:60]}' is not a rembg model name, expected one like u2net")
        if not download and not (home / f"{name}.onnx").is_file():
            raise ModelError(f"rembg model '{name}' is not in {home}", hint="add --download to let rembg download it")
        try:
            self._session = self._rembg.new_session(name)
        except Exception as error:  # unknown names, broken files, no network
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
                             f"{list(picture.shape[:2])}", hint="choose another model, for example u2net")
        return found.astype(np.uint8)


def _imported() -> Any:
    try:
        import rembg
    except (ImportError, SystemExit):  # rembg exits if onnxruntime is missing
        raise UsageError("--with rembg needs the package rembg with onnxruntime, which is not installed",
                         hint="pip install 'latentry[rembg]'") from None
    return rembg


def _home() -> Path:
    """The directory of rembg's models, computed as its sessions do."""
    given = os.environ.get("U2NET_HOME") or f"{os.environ.get('XDG_DATA_HOME', '~')}/.u2net"
    return Path(given).expanduser()
