"""Names the formats of `prep export`."""

from __future__ import annotations

TRAINERS = ("ai-toolkit", "musubi", "diffusion-pipe")  # that get pictures, and a configuration of their data
FORMATS = ("safetensors", "webdataset", "kohya", "folder", *TRAINERS)
PICTURES = ("kohya", "folder", *TRAINERS)  # those that have pictures, and need them
