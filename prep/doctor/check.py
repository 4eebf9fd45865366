"""The result of one check of `prep doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check of one thing: fine, worth knowing, or a problem."""

    name: str
    state: State
    what: str
    hint: str = ""  # what would help
