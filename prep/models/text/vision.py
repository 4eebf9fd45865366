"""Reads texts with pictures for text encoders that see, as their processors do: placeholders become a token for each
part of a picture.

transformers' own processor also reads videos, which needs torchvision. Its preparation of pictures by Pillow does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import BatchFeature
from transformers.image_transforms import resize
from transformers.image_utils import ChannelDimension, PILImageResampling

from prep.errors import ModelError
from prep.models.files import ComponentFiles
from prep.models.loading import load_part
from prep.models.text.places import PLACE

MOST_PARTS = 1 << 14  # of a picture of 1024 x 1024 pixels; Qwen2.5-VL makes 5329 of it, before it joins four


class SeeingProcessor:
    """What a pipeline calls as its `processor`: `Qwen2VLProcessor`, or `Qwen3VLProcessor`, for texts and pictures.

    `room`: tokens of a text that are kept, beside those of pictures; `None`: all. `scales`: whether pictures are scaled
    as its config says, or have the right size. `looks`: whether it returns parts of pictures, or only their numbers, to
    count tokens.
    """

    def __init__(self, tokenizer: Any, pictures: Any) -> None:
        self.tokenizer, self.room, self.scales, self.looks = tokenizer, None, True, True
        self.image_processor = pictures  # some pipelines ask for it when they are made

    room: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """As the tokenizer has it, for one conversation; in a list, as processors return it."""
        return [self.tokenizer.apply_chat_template(conversation, **options)]

    def __call__(self, text: Sequence[str], images: Any = None, padding: bool = True, return_tensors: str = "pt",
                 **options: Any) -> Any:
        """Token ids and mask [B, L] of texts, and which tokens are of pictures; with pictures, uint8 [H, W, 3] each, in
        the order of their places in the one text, also their parts and the numbers of them. `options` are the
        tokenizer's."""
        seen, texts, beside = {}, list(text), 0
        if images:
            seen = self._seen([np.asarray(each) for each in images])
            joined = self.image_processor.merge_size ** 2
            counts = [int(grid.prod()) // joined for grid in seen["image_grid_thw"]]
            pieces = texts[0].split(PLACE, len(counts))
            texts = ["".join(piece + PLACE * count for piece, count in zip(pieces, counts, strict=False)) + pieces[-1]]
            beside = sum(counts)
        cut = {} if self.room is None else {"truncation": True, "max_length": self.room + beside}
        read = self.tokenizer(texts, padding=padding, return_tensors=return_tensors, **cut, **options)
        of_pictures = (read["input_ids"] == self.tokenizer.convert_tokens_to_ids(PLACE)).int()
        return BatchFeature({"input_ids": read["input_ids"], "attention_mask": read["attention_mask"],
                             "mm_token_type_ids": of_pictures, **seen})

    def halved(self, picture: Any) -> Any:
        """A picture, uint8 [H, W, 3], scaled with Lanczos to half its sides, rounded down, as some pipelines do."""
        height, width = picture.shape[0] // 2, picture.shape[1] // 2
        return resize(picture, (height, width), PILImageResampling.LANCZOS, data_format=ChannelDimension.LAST,
                      input_data_format=ChannelDimension.LAST)

    def _seen(self, pictures: Sequence[Any]) -> Any:
        """The parts of pictures, and how many there are of each: frames, rows and columns."""
        if self.looks:
            return self.image_processor(images=list(pictures), input_data_format="channels_last", do_resize=self.scales,
                                  return_tensors="pt")
        side = self.image_processor.patch_size
        counts = [self.image_processor.get_number_of_image_patches(*picture.shape[:2]) if self.scales else
                  picture.shape[0] // side * (picture.shape[1] // side) for picture in pictures]
        return {"pixel_values": torch.empty(0), "image_grid_thw": torch.tensor([[1, 1, count] for count in counts])}


def load_processor(files: ComponentFiles, tokenizer: Any) -> SeeingProcessor:
    """The processor of these files around their tokenizer. Raises `ModelError`."""
    pictures = load_part(transformers.Qwen2VLImageProcessorPil, files, "processor")
    try:
        parts = pictures.get_number_of_image_patches(1024, 1024)
        joins = pictures.merge_size ** 2
    except Exception as error:  # of a library, for broken configs nearly any
        raise ModelError(f"the processor in {files.folder} cannot prepare a picture: {error!r}") from None
    if not 0 < parts <= MOST_PARTS or parts % joins:
        raise ModelError(f"the processor in {files.folder} makes {parts} parts of a picture of 1024x1024 pixels, "
                         f"expected at most {MOST_PARTS}, a multiple of {joins}")
    return SeeingProcessor(tokenizer, pictures)
