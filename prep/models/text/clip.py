"""Runs a CLIP text encoder on captions of one or more windows, for what a pipeline's `encode_prompt` cannot do.

A window is what CLIP's position table holds: 77 tokens, of which the first is the start, and the end and padding follow
the text. Longer captions are cut after every 75 tokens, and each window is encoded alone, as sd-scripts
(max_token_length 150 and 225) and most interfaces for inference do. A cut may fall inside a word. sd-scripts then drops
the inner start and end tokens; here, as in ComfyUI, whole windows stand side by side.

B captions, L tokens of a window, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prep.models.family import TextOptions

MARKS = 2  # start and end


def encode(tokenizer: Any, encoder: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Any:
    """The encoder's output for [B * windows, L] tokens, the windows of a caption one after the other.

    It has all hidden states, before the final norm.
    """
    inner = options.max_length - MARKS
    tokens = tokenizer(list(captions), truncation=True, max_length=inner * options.windows + MARKS)["input_ids"]
    windows = [window for ids in tokens for window in _windows(ids, options)]
    tensors = tokenizer.pad({"input_ids": windows}, padding="max_length", max_length=options.max_length,
                            return_tensors="pt").to(device)
    masked = getattr(encoder.config, "use_attention_mask", False)
    return encoder(tensors["input_ids"], attention_mask=tensors["attention_mask"] if masked else None,
                   output_hidden_states=True)


def joined(states: Any, options: TextOptions) -> Any:
    """[B * windows, L, D] as [B, windows * L, D]."""
    return states.reshape(-1, options.tokens, states.shape[-1])


def _windows(ids: Sequence[int], options: TextOptions) -> list[list[int]]:
    """The tokens of a caption, with its start and end, as windows with a start and an end each."""
    (start, *text, end), inner = ids, options.max_length - MARKS
    return [[start, *text[at:at + inner], end] for at in range(0, inner * options.windows, inner)]
