"""What a plan does by choice: with short micro-batches, and which samples may meet. Imports nothing, for `--help`."""

from __future__ import annotations

from typing import Literal

Underfill = Literal["drop", "partial", "repeat"]
Shuffle = Literal["global", "partitioned"]
