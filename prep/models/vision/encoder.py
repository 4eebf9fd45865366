"""Embeds pictures with a vision model on its device: rows of length 1, in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from prep.errors import ModelError, OutOfMemoryError, first_line
from prep.models.device.memory import FittingBatches, move
from prep.models.loading import dtype_keyword, load_transformers, quiet_transformers
from prep.models.pipeline import single_model_files
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored
from prep.models.vision.model import COMPUTE, STORED, VisionModel, vision_fingerprint

# Legend: B pictures, H W pixels, D numbers of an embedding.

Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class VisionEncoder:
    """A vision model on its device; `begin` returns rows ready to store."""

    ahead = 0  # batches to begin before the rows of one are asked for

    def __init__(self, model: VisionModel, *, device: str) -> None:
        """Raises `OutOfMemoryError`, and `ModelError`, also if the files do not match the expected fingerprint."""
        quiet_transformers()
        self._model, self._device = model, pick_device(device)
        self.batches = FittingBatches(self._device, COMPUTE)
        self._tower = move(load_half(model, without="text_model"), self._device, "the vision model", COMPUTE)
        how, shape = model.preparation, (1, 3, 1, 1)
        self._mean_1311, self._std_1311 = (torch.tensor(values, device=self._device).reshape(shape)
                                           for values in (how.mean, how.std))
        try:
            (row,) = self._forward(np.zeros((1, *how.seen[::-1], 3), np.uint8))
        except OutOfMemoryError:
            raise
        except Exception as error:  # of a library: some faulty configs fail only here
            raise ModelError(f"the model in {model.folder} cannot embed a picture: {first_line(error)}",
                             hint="download the model again, or choose another one") from None
        assert row is None or row["embedding"].shape == (model.width,), "its weights have the shapes in its config"

    def begin(self, pixels_BHW3: Pixels) -> Callable[[], list[Arrays | None]]:
        """One row per prepared picture, uint8 [H, W, 3] as the model sees it: "embedding", float16 [D] of length 1;
        `None` if it is not finite. All is done when this returns.

        A batch that does not fit into the device's memory is halved. Raises `OutOfMemoryError`.
        """
        rows = self.batches.run(pixels_BHW3, self._forward, "a picture")
        return lambda: rows

    @torch.inference_mode()
    def _forward(self, pixels_BHW3: Pixels) -> list[Arrays | None]:
        given = torch.from_numpy(pixels_BHW3).to(self._device).permute(0, 3, 1, 2).float()
        image_B3HW = (given * self._model.preparation.factor - self._mean_1311) / self._std_1311
        made_BD = outputs(self._tower, self._model.kind.output, image_B3HW).float()
        unit_BD = (made_BD / made_BD.norm(dim=1, keepdim=True)).cpu()
        return [{"embedding": row} if fine else None
                for row, fine in zip(stored(unit_BD, STORED), finite_rows(unit_BD, STORED), strict=True)]


def outputs(tower: Any, output: str, image_B3HW: torch.Tensor) -> torch.Tensor:
    """What of a model is the embedding of pictures, [B, D]."""
    return pooled(tower(pixel_values=image_B3HW) if output == "cls" else
                  tower.get_image_features(pixel_values=image_B3HW))


def pooled(made: Any) -> torch.Tensor:
    """The row for each item, [B, D], of what a model returns."""
    found: torch.Tensor = made if isinstance(made, torch.Tensor) else made.pooler_output
    return found


def load_half(model: VisionModel, *, without: str) -> Any:
    """The model in memory, `without` what reads texts, or pictures. Raises `ModelError`, `OutOfMemoryError`."""
    files = single_model_files(model.folder)
    options: dict[str, Any] = {dtype_keyword(transformers.__version__): DTYPES[COMPUTE]}
    loaded = load_transformers(getattr(transformers, model.kind.model), files, "vision model", trust_remote_code=False,
                               **options)
    model.expected.require(vision_fingerprint(files, model.expected.file_digest), f"the model in {model.folder}")
    if hasattr(loaded, without):
        delattr(loaded, without)
    return loaded.eval().requires_grad_(False)
