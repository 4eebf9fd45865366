"""Names the formats of `prep export`."""

from __future__ import annotations

FORMATS = ("safetensors", "webdataset", "kohya", "folder")
