"""What `prep doctor` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at: fine, good to know, or something that will get in the way."""

    name: str
    state: State
    what: str
    hint: str = ""  # what would help
