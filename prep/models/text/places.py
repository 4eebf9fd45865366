"""Places of pictures in texts, for text encoders that see. Does not import torch: families are read without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLACE = "<|image_pad|>"  # where a picture is in a text


def without_places(text: str) -> str:
    """The text without anything that would be read as the place of a picture."""
    while PLACE in text:  # taking one out may join the halves of another
        text = text.replace(PLACE, "")
    return text


@contextmanager
def positions_by_place(pipeline: Any) -> Iterator[None]:
    """Inside, the pipeline's text encoder knows which tokens are pictures, and gives these positions in two dimensions.

    Before version 5 transformers saw that itself; diffusers 0.42 does not say it yet (huggingface/diffusers 14194), and
    all positions would be those of words.
    """
    place = pipeline.processor.tokenizer.convert_tokens_to_ids(PLACE)

    def told(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**named, "mm_token_type_ids": (named["input_ids"] == place).int()}

    hook = pipeline.text_encoder.register_forward_pre_hook(told, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
