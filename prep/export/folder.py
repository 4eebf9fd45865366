"""Spells pictures, captions and masks as a folder that most trainers and `datasets` read.

    train/3_photos/NAME.jpg             the picture, byte for byte; `prep.export.layout` has the directories
    train/3_photos/NAME.txt             its captions, one a line, for OneTrainer, SimpleTuner and sd-scripts
    train/3_photos/NAME-masklabel.png   its mask, where there is one, as OneTrainer looks for it
    train/control_1/3_photos/NAME.jpg   its first reference, where it has any, and so on: ai-toolkit's `control_path`,
                                        musubi-tuner's `control_directory`
    train/metadata.jsonl                a line a picture for Hugging Face `datasets` ("imagefolder"): file_name, text,
                                        captions, role, repeats, weight, size, buckets; where there are any,
                                        mask_file_name, control_1_file_name and so on
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

from prep.export.layout import Picture, suffix_of
from prep.export.masks import is_masked, whole_mask
from prep.export.sample import ExportSample

METADATA = "metadata.jsonl"
MASK = "-masklabel.png"
Make = Callable[[], bytes]  # raises `CacheError`


def files(picture: Picture) -> dict[str, Make]:
    """The files of one picture by name, each with the function that makes its bytes."""
    makers = plain_files(picture)
    if is_masked(picture.first):
        makers[f"{picture.stem}{MASK}"] = partial(whole_mask, largest(picture))
    for name, reference in controls(picture).items():
        makers[name] = partial(picture.first.reference_file, reference)
    return makers


def controls(picture: Picture) -> dict[str, int]:
    """The number of each reference of a picture, by the path of its file below the export, in order; none where it is
    the picture itself, under its mask."""
    first, (role, _, place) = picture.first, picture.stem.partition("/")
    if first.of.manifest.inpaints:
        return {}
    named = ((first.of.columns.reference_name(first.number, number), number)
             for number in first.references(first.views[0]))
    return {f"{role}/control_{order}/{place}{suffix_of(name)}": number for order, (name, number) in enumerate(named, 1)}


def plain_files(picture: Picture) -> dict[str, Make]:
    """The picture itself, and its captions."""
    makers: dict[str, Make] = {picture.name: picture.first.picture}
    if picture.first.captions:
        makers[f"{picture.stem}.txt"] = partial(caption_lines, picture.first)
    return makers


def largest(picture: Picture) -> ExportSample:
    """The picture's sample with the most pixels, whose mask is the finest."""
    return max(picture.samples, key=lambda sample: sample.bucket[0] * sample.bucket[1])


def caption_lines(sample: ExportSample) -> bytes:
    """The captions, each on one line."""
    return "".join(f"{' '.join(caption.split())}\n" for caption in sample.captions).encode()


def metadata(pictures: Sequence[Picture]) -> dict[str, Make]:
    """metadata.jsonl of each role's directory."""
    makers: dict[str, Make] = {}
    for top in dict.fromkeys(picture.folder.partition("/")[0] for picture in pictures):
        mine = [picture for picture in pictures if picture.folder.startswith(f"{top}/")]
        masked = any(is_masked(picture.first) for picture in mine)
        referred = max(len(controls(picture)) for picture in mine)
        makers[f"{top}/{METADATA}"] = partial(_lines, mine, len(top) + 1, masked=masked, referred=referred)
    return makers


def _lines(pictures: Sequence[Picture], start: int, *, masked: bool, referred: int) -> bytes:
    return b"".join(json.dumps(_line(picture, start, masked=masked, referred=referred), ensure_ascii=False).encode()
                    + b"\n" for picture in pictures)


def _line(picture: Picture, start: int, *, masked: bool, referred: int) -> dict[str, object]:
    facts = picture.first.facts()
    mask = f"{picture.stem[start:]}{MASK}" if is_masked(picture.first) else None
    return {"file_name": picture.name[start:], "text": (facts["captions"] or [""])[0],
            **({"mask_file_name": mask} if masked else {}),
            **dict(zip_longest((f"control_{order}_file_name" for order in range(1, referred + 1)),
                               (name[start:] for name in controls(picture)))),
            **{name: facts[name] for name in ("captions", "role", "repeats", "weight", "size")},
            "buckets": [list(sample.bucket) for sample in picture.samples]}
