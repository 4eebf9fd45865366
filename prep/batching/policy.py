"""The choices of a plan: about short micro-batches, and which samples may meet. Imports nothing, for `--help`."""

from __future__ import annotations

from typing import Literal

Underfill = Literal["drop", "partial", "repeat"]
Shuffle = Literal["global", "partitioned"]
