"""How many tokens a caption has for a pipeline's tokenizers; no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from prep.errors import ModelError
from prep.models.components import class_of, numbered
from prep.models.loading import load_tokenizer
from prep.models.pipeline import pipeline_index, tokenizer_files

ABSURD = 1 << 20  # tokens; what transformers says where a tokenizer has no limit is 10^30


class TokenCounter:
    """The tokenizer of a pipeline whose encoder takes most tokens: what is beyond that, no encoder sees."""

    def __init__(self, model: Path) -> None:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of long captions; saying so is our business
        index = pipeline_index(model)
        loaded = [load_tokenizer(class_of(index, name, model)[1], tokenizer_files(model, name))
                  for name in numbered(index, "tokenizer")]
        found = [one for one in loaded if one.model_max_length < ABSURD]
        if not found:
            raise ModelError(f"no tokenizer in {model} says how many tokens its encoder takes")
        self._tokenizer = max(found, key=lambda one: int(one.model_max_length))
        self.limit = int(self._tokenizer.model_max_length)

    def longest(self, captions: Sequence[str]) -> int:
        """Tokens of the longest of `captions`, those at its start and end included; 0 for none."""
        if not captions:
            return 0
        return max(map(len, self._tokenizer(list(captions), truncation=False)["input_ids"]))

