"""Names the formats of `prep export`."""

from __future__ import annotations

FORMATS = ("safetensors", "webdataset", "kohya", "folder")
PICTURES = ("kohya", "folder")  # those that have pictures, and need them
