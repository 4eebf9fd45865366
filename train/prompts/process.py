"""The process that encodes prompts beside a run: its request is JSON on its input.

Writes a safetensors file for each text. Only this process loads a text encoder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from prep.errors import Problem
from prep.fs.place import place_of
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models.hub import locate
from train.runs.checkpoint_files import CheckpointFile, write_file
from train.sampling.text import encode_texts

_NICE = 10  # leaves the CPU to training


def main() -> None:
    """Answers one request, and exits with what went wrong."""
    try:
        _encode(json.loads(sys.stdin.read()))
    except Problem as problem:
        sys.exit(problem.message)


def _encode(request: Mapping[str, Any]) -> None:
    """Encodes the texts of a request. Raises `Problem`."""
    with suppress(OSError, AttributeError):  # Windows has no such thing
        os.nice(_NICE)
    cache = place_of(request["cache"]) if request["cache"] else None
    index = open_index(read_manifest(place_of(request["manifest"]), cache=cache))
    texts = {key: (str(text), bool(negative)) for key, (text, negative) in request["texts"].items()}
    model = locate(request["model"], download=None)
    rows = encode_texts(index, model, list(texts.values()), torch.device(request["device"]))
    for key, row in zip(texts, rows, strict=True):
        write_file(Path(request["folder"]) / f"{key}.safetensors", CheckpointFile(name="", tensors=row))
