"""LongCat-Image-Edit: LongCat-Image, told what to change about one picture, which its text encoder sees, too.

Sources: `LongCatImageEditPipeline` in diffusers 0.42. Transformer and VAE are LongCat-Image's. `__call__` scales the
picture to about 1024² pixels, whose latent follows the noise, with 2 on the first axis of positions, and shows it at
half that size to the text encoder. `_encode_prompt` puts it before the caption; a row begins with its tokens, and the
positions of both latents count from the row's length. The negative prompt, "", is encoded with the same picture.

The pipeline makes no picture without one; here, a caption without has the same template, and 512 tokens. The text
encoder is told which tokens are the picture, as transformers knew itself before version 5.

The transformer gets no mask, so texts of each length have a call of their own: those with one size of references have
one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.geometry import Placement, Size
from prep.models.denoiser import packing, padding
from prep.models.families import longcat_image, ovis, qwenimage_edit
from prep.models.family import Conditions, Prompted, References, TextOptions, TextRow, Vision
from prep.models.text.places import PLACE, without_places

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = ("<|im_start|>system\nAs an image editing expert, first analyze the content and attributes of the input "
          "image(s). Then, based on the user's editing instructions, clearly and precisely determine how to modify the "
          "given image(s), ensuring that only the specified parts are altered and all other aspects remain consistent "
          "with the original(s).<|im_end|>\n<|im_start|>user\n")
PICTURE = f"<|vision_start|>{PLACE}<|vision_end|>"
SIDE = 1024  # of the square whose area pictures are scaled to
MULTIPLE = 16  # pixels that sides are rounded up to
# Published models make a token of 28 x 28 pixels: about 340 of a picture that is placed so, 466 of a very narrow one.
# There are two marks.
PICTURE_TOKENS = 480


def place(size: Size, side: int) -> Placement | None:
    """Stretched to `calculate_dimensions` of the pipeline, in floats as there; `None`: transformers refuses its shape.
    """
    ratio = size[0] / size[1]
    width = math.sqrt(side * side * ratio)
    wide, high = (math.ceil(each / MULTIPLE) * MULTIPLE for each in (width, width / ratio))
    if max(wide, high) // 2 > qwenimage_edit.LONGEST * (min(wide, high) // 2):
        return None
    return Placement(scaled=(wide, high), crop=(0, 0), bucket=(wide, high))


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without pictures."""
    return longcat_image.encode_behind(PREFIX, pipeline, list(map(without_places, captions)), options, device)


def encode_seen(pipeline: Any, caption: str | None, pictures: Sequence[Any], options: TextOptions,
                device: Any) -> TextRow:
    """`hidden` of a caption with its picture, as the VAE is given it."""
    tokenizer, processor = pipeline.tokenizer, pipeline.text_processor
    seen = processor(text=[PICTURE], images=list(map(processor.halved, pictures)))
    before = longcat_image.numbers(tokenizer, PREFIX)
    words = "" if caption is None else without_places(caption)
    read = longcat_image.around(tokenizer, [*before, *seen["input_ids"][0].tolist()], [words], options)
    read["mm_token_type_ids"] = (read["input_ids"] == tokenizer.convert_tokens_to_ids(PLACE)).int()
    given = {**read.to(device), **{name: seen[name].to(device) for name in ("pixel_values", "image_grid_thw")}}
    return longcat_image.rows(pipeline, len(before), **given)[0]


TEXT = replace(
    longcat_image.TEXT, layout="trimmed", encode=encode,
    vision=Vision(place=lambda _, placed: placed, encode=encode_seen, tokens=PICTURE_TOKENS),
    constants={"prefix": PREFIX, "picture": PICTURE, "suffix": longcat_image.SUFFIX,
               "quoted": longcat_image.QUOTED.pattern})


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    patches_BNP = packing.pack(noised_BChw)

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        given = append({"hidden_states": patches_BNP[numbers], "encoder_hidden_states": hidden_GLD,
                        "img_ids": longcat_image.positions(noised_BChw, hidden_GLD.shape[1])},
                       [reference[numbers] for reference in conditions.references])
        packed: Tensor = transformer(**given, txt_ids=ovis.numbers(hidden_GLD), timestep=sigma_B[numbers],
                                     return_dict=False)[0]
        return packing.unpack(packed[:, :patches_BNP.shape[1]], (noised_BChw.shape[-1], noised_BChw.shape[-2]))

    return padding.by_length(conditions.text, "hidden", answer)


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The transformer's arguments with references [B, C, h, w] behind the noise."""
    if not references:
        return given
    ids = [longcat_image.positions(latent, given["encoder_hidden_states"].shape[1], 2) for latent in references]
    return {**given, "img_ids": packing.joined(given["img_ids"], ids),
            "hidden_states": packing.joined(given["hidden_states"], [packing.pack(latent) for latent in references])}


def prepare(pipeline: Any, prompted: Prompted) -> None:
    """Has LongCat-Image's pipeline take the row of the prompt, and count positions from its length."""
    hidden_1LD, _ = padding.cut(prompted.positive, "hidden")
    pipeline._encode_prompt, pipeline.tokenizer_max_length = lambda _: hidden_1LD, hidden_1LD.shape[1]


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `LongCatImagePipeline.__call__`, to guide as `LongCatImageEditPipeline` does."""
    negative_1LD, _ = padding.cut(prompted.negative, "hidden")
    return {**longcat_image.call(transformer, prompted), "negative_prompt_embeds": negative_1LD,
            "enable_cfg_renorm": False}


FAMILY = replace(
    longcat_image.FAMILY, name="longcat_image_edit", models=("LongCat-Image-Edit",),
    pipelines=("LongCatImageEditPipeline",),
    components={**longcat_image.COMPONENTS, "text_processor": (
        ("transformers", "Qwen2_5_VLProcessor"), ("transformers", "Qwen2VLProcessor"))},
    references=References(most=1, resolution=SIDE, place=place, append=append), text=TEXT, predict=predict,
    by_length="always",
    # Its own insists on a picture, which it would scale and encode again; loop and schedule are the same.
    sampling=replace(longcat_image.SAMPLING, call=call, prepare=prepare, pipeline="LongCatImagePipeline"),
)
