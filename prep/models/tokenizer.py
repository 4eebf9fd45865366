"""How many tokens a caption has for a pipeline's tokenizers; no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging

from prep.errors import ModelError, first_line
from prep.models.pipeline import pipeline_index

ABSURD = 1 << 20  # tokens; what transformers says where a tokenizer has no limit is 10^30


class TokenCounter:
    """The tokenizer of a pipeline whose encoder takes most tokens: what is beyond that, no encoder sees."""

    def __init__(self, model: Path) -> None:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of long captions; saying so is our business
        names = sorted(name for name in pipeline_index(model) if name.startswith("tokenizer"))
        found = [one for one in (_load(model / name) for name in names) if one.model_max_length < ABSURD]
        if not found:
            raise ModelError(f"no tokenizer in {model} says how many tokens its encoder takes")
        self._tokenizer = max(found, key=lambda one: int(one.model_max_length))
        self.limit = int(self._tokenizer.model_max_length)

    def longest(self, captions: Sequence[str]) -> int:
        """Tokens of the longest of `captions`, those at its start and end included; 0 for none."""
        if not captions:
            return 0
        return max(map(len, self._tokenizer(list(captions), truncation=False)["input_ids"]))


def _load(folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a broken file makes the libraries raise nearly everything
        raise ModelError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from None
