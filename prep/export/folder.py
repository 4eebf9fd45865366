"""Spells pictures and captions as a folder that most trainers and `datasets` read.

    STEM.jpg           the picture, byte for byte
    STEM.txt           its captions, one a line, as OneTrainer, SimpleTuner and sd-scripts look for them
    metadata.jsonl     a line a picture for Hugging Face `datasets` ("imagefolder"): file_name, text, captions, role,
                       repeats, weight, size, buckets
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath

from prep.export.sample import Sample

METADATA = "metadata.jsonl"
Make = Callable[[], bytes]  # raises `CacheError`


def files(samples: Sequence[Sample]) -> dict[str, Make]:
    """The files of one picture by name, with what makes their bytes: `samples` are it at each of its sizes."""
    first = samples[0]
    found: dict[str, Make] = {picture_name(first): first.picture}
    if first.captions:
        found[f"{first.stem}.txt"] = partial(caption_lines, first)
    return found


def picture_name(sample: Sample) -> str:
    """The picture's path in an export."""
    return f"{sample.stem}{PurePosixPath(sample.name).suffix.lower()}"


def caption_lines(sample: Sample) -> bytes:
    """The captions, each on one line."""
    return "".join(f"{' '.join(caption.split())}\n" for caption in sample.captions).encode()


def metadata_line(samples: Sequence[Sample]) -> bytes:
    """The picture's line in metadata.jsonl."""
    facts = samples[0].facts()
    line = {"file_name": picture_name(samples[0]), "text": (facts["captions"] or [""])[0],
            **{name: facts[name] for name in ("captions", "role", "repeats", "weight", "size")},
            "buckets": [list(sample.bucket) for sample in samples]}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
