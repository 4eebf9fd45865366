"""Finds how many tokens the row of a caption will have, without reading the weights of a text encoder.

Rows of families with trimmed text are stored in groups of equal length, so lengths decide the tasks. The pipeline's own
`encode_prompt` runs with encoders that return one zero for each token: it counts what the real one would return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from prep.geometry import Size
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.family import GROUP, TOKEN, Family, TextOptions, TextRow
from prep.models.files import Model
from prep.models.fingerprint import TextFiles, text_files
from prep.models.pipeline import PROCESSORS
from prep.models.text.pipeline import assemble, tokenizers_of

MOST_LAYERS = 128  # hidden states that a pipeline may ask for
BATCH = 256  # captions counted at once


class ZeroEncoder(nn.Module):
    """Stands in for a text encoder: hidden states of one channel, all zero. With `projected`, the first output is a
    vector for each caption.
    """

    def __init__(self, *, projected: bool = False) -> None:
        super().__init__()
        self._projected = projected
        self.final_layer_norm = nn.Identity()
        self.model = SimpleNamespace(norm=nn.Identity())
        self.config = SimpleNamespace(hidden_size=1, use_attention_mask=False, text_config=SimpleNamespace())
        self.dtype = torch.float32
        self.device = torch.device("cpu")

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        hidden_BL1 = torch.zeros(*input_ids.shape, 1)
        if self._projected:
            return CLIPTextModelOutput(text_embeds=hidden_BL1[:, 0], last_hidden_state=hidden_BL1,
                                       hidden_states=(hidden_BL1,) * MOST_LAYERS)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_BL1, pooler_output=hidden_BL1[:, 0],
                                          hidden_states=(hidden_BL1,) * MOST_LAYERS)


def text_pipeline(model: Model, family: Family, files: TextFiles, tokenizers: Mapping[str, Any]) -> Any:
    """The pipeline of `model` with these tokenizers, and a stand-in for each text encoder. Raises `ModelError`."""
    index = pipeline_index(model)
    encoders = {name: ZeroEncoder(projected=class_of(index, name, model)[1].endswith("WithProjection"))
                for name in files.encoders}
    for name in PROCESSORS:
        if name in tokenizers:
            tokenizers[name].looks = False
    return assemble(model, family, {**encoders, **tokenizers})


def row_length(family: Family, row: TextRow) -> int:
    """The tokens of a row."""
    dims = family.text.arrays
    return max(int(value.shape[dims[name].index(TOKEN)]) for name, value in row.items() if TOKEN in dims[name])


class LengthCounter:
    """Counts the tokens of rows with a pipeline's own tokenizers. Raises `ModelError` if they cannot be loaded."""

    def __init__(self, model: Model, family: Family, options: TextOptions) -> None:
        files = text_files(model)
        self._pipeline = text_pipeline(model, family, files, tokenizers_of(model, family, files))
        self._family, self._options = family, options

    @torch.inference_mode()
    def groups(self, captions: Sequence[str], *, negative: bool = False) -> list[int]:
        """The length in tokens of the group that the row of each caption, or negative prompt, belongs to."""
        groups: list[int] = []
        for start in range(0, len(captions), BATCH):
            chunk = list(captions[start:start + BATCH])
            rows = self._family.text.encode_texts(self._pipeline, chunk, self._options, torch.device("cpu"),
                                                  negative=negative)
            groups += [self._group(row) for row in rows]
        return groups

    @torch.inference_mode()
    def seen(self, caption: str | None, sizes: Sequence[Size]) -> int:
        """The same for a caption, or no prompt, with pictures of these sizes."""
        assert self._family.text.vision is not None, "other families have no such rows"
        blank = [np.zeros((height, width, 3), np.uint8) for width, height in sizes]
        return self._group(self._family.text.vision.encode(self._pipeline, caption, blank, self._options,
                                                           torch.device("cpu")))

    @torch.inference_mode()
    def unconditional(self) -> int:
        """The length of the group of the row without a prompt, in tokens."""
        return self._group(self._family.text.unconditional(self._pipeline, self._options, torch.device("cpu")))

    def _group(self, row: TextRow) -> int:
        return max(GROUP, -(-row_length(self._family, row) // GROUP) * GROUP)
