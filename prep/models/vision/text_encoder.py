"""Embeds texts with the half of a vision model that reads them: rows of length 1, comparable with those of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prep.errors import ModelError, OutOfMemoryError, first_line
from prep.models.device.memory import FittingBatches, move
from prep.models.files import refuse_redirection
from prep.models.fingerprint import Expected
from prep.models.loading import quiet_transformers, refuse_unknown_tokens
from prep.models.pipeline import single_model_files, single_tokenizer_files
from prep.models.tensors import finite_rows, pick_device, stored
from prep.models.text.tokenizer import load_tokenizer, without_panics
from prep.models.vision.encoder import load_half, pooled
from prep.models.vision.model import COMPUTE, STORED, VisionModel, reading_of

# Legend: B texts, D numbers of an embedding.

_AGAIN = "download the model again, or choose another one"
Row = np.ndarray[Any, np.dtype[np.float16]]  # [D], of length 1


class TextEncoder:
    """The half of a vision model that reads texts, on its device, with its tokenizer."""

    def __init__(self, model: VisionModel, *, device: str) -> None:
        """Raises `OutOfMemoryError`, and `ModelError`, also if the files do not match what is expected of them."""
        assert model.reading is not None, "it reads texts"
        quiet_transformers()
        files = single_model_files(model.folder)
        tokenizer, found = single_tokenizer_files(files), reading_of(files, model.kind)
        Expected(digest=model.reading.digest, file_digest=model.expected.file_digest).require(
            "" if found is None else found.digest, f"the tokenizer in {model.folder}")
        assert tokenizer is not None, "its digest is that of one"
        refuse_redirection(tokenizer.config, model.folder / "tokenizer_config.json")  # pictures do not need it
        self._model, self._reading = model, model.reading
        self._tokenizer = load_tokenizer(model.reading.tokenizer, tokenizer)
        self.batches = FittingBatches(pick_device(device), COMPUTE)
        self._tower = move(load_half(model, without="vision_model"), self.batches.device, "the vision model", COMPUTE)
        refuse_unknown_tokens(self._tower.text_model, model.folder)
        (row,) = self.rows(["a"])
        if row is not None and row.shape != (model.width,):
            raise ModelError(f"the model in {model.folder} makes {len(row)} numbers of a text, expected "
                             f"{model.width}, as of a picture", hint=_AGAIN)

    def rows(self, texts: Sequence[str]) -> list[Row | None]:
        """One row per text, float16 [D] of length 1; `None` if it is not finite. A batch that does not fit into the
        device's memory is halved. Raises `ModelError`, `OutOfMemoryError`."""
        try:
            return self.batches.run(list(texts), self._forward, "a caption")
        except (ModelError, OutOfMemoryError):
            raise
        except Exception as error:  # of a library: some faulty files fail only here
            raise ModelError(f"the model in {self._model.folder} cannot embed a text: {first_line(error)}",
                             hint=_AGAIN) from None

    @torch.inference_mode()
    def _forward(self, texts: Sequence[str]) -> list[Row | None]:
        with without_panics(self._model.folder):
            inputs: Any = self._tokenizer(list(texts), padding=self._model.kind.padding, truncation=True,
                                          max_length=self._reading.tokens, return_tensors="pt")
        given = {name: value.to(self.batches.device) for name, value in inputs.items()
                 if name in ("input_ids", "attention_mask")}
        made_BD = pooled(self._tower.get_text_features(**given)).float()
        unit_BD = (made_BD / made_BD.norm(dim=1, keepdim=True)).cpu()
        return [row if fine else None
                for row, fine in zip(stored(unit_BD, STORED), finite_rows(unit_BD, STORED), strict=True)]
