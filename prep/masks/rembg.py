"""Makes foreground masks with rembg, an extra (`pip install 'latentry[rembg]'`); its ONNX models lie in `~/.u2net`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
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
        home = _home()
        if not _is_installed():
            raise _not_installed()
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise ModelError(f"model '{name[:60]}' is not a rembg model name, expected one like u2net")
        if not download and not (home / f"{name}.onnx").is_file():
            raise ModelError(f"rembg model '{name}' is not in {home}", hint="add --download to let rembg download it")
        self._rembg: Any = _imported()  # last: it takes 40 s of a processor where its code is not yet compiled
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
        opacity = np.asarray(self._rembg.remove(picture, session=self._session, only_mask=True))
        if opacity.shape != picture.shape[:2]:
            raise ModelError(f"rembg model '{self._name}' gives an array of {list(opacity.shape)}, expected one mask "
                             f"of {list(picture.shape[:2])}", hint="choose another model, for example u2net")
        return opacity.astype(np.uint8)


def _is_installed() -> bool:
    """Whether rembg is installed, without importing it."""
    if "rembg" in sys.modules:
        return sys.modules["rembg"] is not None
    return find_spec("rembg") is not None


def _imported() -> Any:
    try:
        import rembg
    except (ImportError, SystemExit):  # rembg exits if onnxruntime is missing
        raise _not_installed() from None
    return rembg


def _not_installed() -> UsageError:
    return UsageError("--with rembg needs the package rembg with onnxruntime, which is not installed",
                      hint="pip install 'latentry[rembg]'")


def _home() -> Path:
    """The directory of rembg's models, computed as its sessions do."""
    home = os.environ.get("U2NET_HOME") or f"{os.environ.get('XDG_DATA_HOME', '~')}/.u2net"
    return Path(home).expanduser()
