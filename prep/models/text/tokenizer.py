"""Counts the tokens of captions with a pipeline's tokenizers, without reading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from prep.errors import ModelError
from prep.models.components import class_of, numbered
from prep.models.families.registry import FAMILIES
from prep.models.loading import load_tokenizer
from prep.models.pipeline import infer_family, pipeline_index, tokenizer_files

ABSURD = 1 << 20  # tokens; transformers reports 10^30 for a tokenizer without a limit


class TokenCounter:
    """Counts with the pipeline's tokenizer that has the largest limit: no encoder sees tokens beyond it.

    Tokenizers of language models have limits far above what a pipeline reads, or none: the family's holds, then.
    """

    def __init__(self, model: Path) -> None:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # long captions: we report them
        index = pipeline_index(model)
        loaded = [load_tokenizer(class_of(index, name, model)[1], tokenizer_files(model, name))
                  for name in numbered(index, "tokenizer")]
        text = FAMILIES[infer_family(model)].text
        found = [one for one in loaded if one.model_max_length < ABSURD or not text.clip]
        if not found:
            raise ModelError(f"no tokenizer in {model} says how many tokens its encoder takes")
        self._tokenizer = max(found, key=lambda one: int(one.model_max_length))
        self.limit = min(int(self._tokenizer.model_max_length), text.longest)

    def longest(self, captions: Sequence[str]) -> int:
        """Token count of the longest of `captions`, with start and end tokens; 0 without captions."""
        if not captions:
            return 0
        return max(map(len, self._tokenizer(list(captions), truncation=False)["input_ids"]))

