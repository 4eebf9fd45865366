"""Qwen-Image-Edit 2509 and 2511: Qwen-Image, told what to change about one to three pictures, which its text encoder
sees, too.

Sources: `QwenImageEditPlusPipeline` in diffusers 0.42. Transformer and VAE are Qwen-Image's. `encode_prompt` writes the
pictures and the caption into the template below, and cuts off the rows of its first 64 tokens. Its `__call__` scales
each picture twice: to about 384² pixels for the text encoder, and to about 1024² for the VAE. The latents follow the
noise. In the pipeline no caption is ever cut; here, one of more than `max_length` tokens is, pictures not counted.

The negative prompt is encoded with the same pictures, and so is " ", that of its authors' examples.

The transformer of 2511 has `zero_cond_t`: it treats all but the first of `img_shapes` as free of noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prep.geometry import Placement, Size
from prep.models.families import qwenimage
from prep.models.family import References, TextOptions, TextRow, Vision
from prep.models.text.places import PLACE, positions_by_place, without_places

TEMPLATE = ("<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
            "background), then explain how the user's text instruction should alter or modify the image. Generate a "
            "new image that meets the user's requirements while maintaining consistency with the original input where "
            "appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
DROPPED = 64  # tokens of the template before pictures and caption
PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
MOST = 3  # pictures: "optimal performance is currently achieved with 1 to 3" (QwenLM/Qwen-Image, README)
SIDE, SEEN_SIDE = 1024, 384  # of squares of VAE_IMAGE_SIZE and CONDITION_IMAGE_SIZE pixels
MULTIPLE = 32  # pixels that sides are rounded to
LONGEST = 200  # times its shorter side: `smart_resize` in transformers refuses more


# Published models make a token of 28 x 28 pixels: at most 235 of a picture that is placed so, and a label.
PICTURE_TOKENS = 256


def place(size: Size, side: int) -> Placement | None:
    """Stretched to `calculate_dimensions` of the pipeline, in floats as there."""
    ratio = size[0] / size[1]
    width = math.sqrt(side * side * ratio)
    wide, high = (round(each / MULTIPLE) * MULTIPLE for each in (width, width / ratio))
    if not wide or not high:
        return None
    return Placement(scaled=(wide, high), crop=(0, 0), bucket=(wide, high))


def see(size: Size) -> Placement | None:
    """How the text encoder sees a picture of this size."""
    placed = place(size, SEEN_SIDE)
    return None if placed is None or max(placed.bucket) > LONGEST * min(placed.bucket) else placed


def place_both(size: Size, side: int) -> Placement | None:
    """How the VAE sees a picture; `None` also if the text encoder cannot."""
    return None if see(size) is None else place(size, side)


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without pictures and without padding."""
    pipeline.processor.room = DROPPED + options.max_length
    hidden_BLD, mask_BL = pipeline.encode_prompt(list(captions), device=device)
    if mask_BL is None:  # no row is shorter than another
        return [{"hidden": hidden_LD} for hidden_LD in hidden_BLD]
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def encode_seen(pipeline: Any, caption: str | None, pictures: Sequence[Any], options: TextOptions,
                device: Any) -> TextRow:
    """`hidden` of a caption with pictures, without padding."""
    # A place without a picture would be an error of the text encoder.
    words = qwenimage.NEGATIVE if caption is None else without_places(caption)
    labels = "".join(PICTURE.format(number) for number in range(1, len(pictures) + 1)).replace(PLACE, "")
    beside = len(pipeline.processor.tokenizer(labels)["input_ids"])
    pipeline.processor.room = DROPPED + beside + options.max_length
    with positions_by_place(pipeline):
        hidden_1LD, _ = pipeline.encode_prompt([words], image=list(pictures), device=device)
    return {"hidden": hidden_1LD[0]}


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The encoding of " "."""
    return encode(pipeline, [qwenimage.NEGATIVE], options, device)[0]


FAMILY = replace(
    qwenimage.FAMILY, name="qwenimage_edit", models=("Qwen-Image-Edit 2509", "Qwen-Image-Edit 2511"),
    pipelines=("QwenImageEditPlusPipeline",),
    components={**qwenimage.COMPONENTS, "processor": (("transformers", "Qwen2VLProcessor"),)},
    references=References(most=MOST, resolution=SIDE, place=place_both, append=qwenimage.append),
    text=replace(qwenimage.TEXT, max_length=512, longest=1024, encode=encode, without_prompt=without_prompt,
                 vision=Vision(place=lambda size, _: see(size), encode=encode_seen, tokens=PICTURE_TOKENS),
                 constants={"template": TEMPLATE, "dropped": DROPPED, "picture": PICTURE,
                            "negative": qwenimage.NEGATIVE}),
    # Its own insists on pictures, which it would scale and encode again; loop and schedule are the same.
    sampling=replace(qwenimage.SAMPLING, pipeline="QwenImagePipeline"),
)
