"""Makes masks with segmentation models of transformers: local safetensors files, no code but the library's own.

A map holds, for each cell, the model's confidence from 0 to 255 that a prompt or label applies. Outputs differ:

    clipseg       one map per prompt; the maximum over the prompts
    semantic      class probabilities per pixel (softmax), summed over the labels (Segformer, BEiT, UperNet, DPT, …)
    by queries    objects, each with class probabilities and a map; the maximum over objects of the map times the
                  labels' probability. Instance, panoptic and semantic checkpoints of MaskFormer, Mask2Former and
                  DETR are read alike

Pictures are scaled as the model's own preprocessor_config.json says, but never cropped: the mask covers every pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prep.errors import ModelError, UsageError
from prep.models.files import ComponentFiles
from prep.models.loading import dtype_keyword, load_part, load_transformers, quiet_transformers
from prep.models.pipeline import single_model_files
from prep.models.tensors import pick_device
from prep.parse import suggest

# Legend: B pictures, Q queries, C classes, H W pixels, h w cells of a map.
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
BY_QUERIES = ("maskformer", "mask2former", "detr")  # model types in config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """A picture as the model's input."""

    pixels_3HW: torch.Tensor
    valid: tuple[int, int]  # rows and columns of the picture; the rest is padding
    padded: bool  # the processor marks which part is the picture


class Segmenter:
    """A segmentation model on its device, with its prompts or labels; see `clipseg` and `segment`."""

    def __init__(self, model: Any, processor: Any, device: torch.device,
                 sure: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]) -> None:
        self._model, self._processor, self._device, self._sure = model, processor, device, sure

    def prepare(self, picture: Pixels) -> ModelInput:
        """A picture, uint8 [H, W, 3], scaled and normalized."""
        features = self._processor(images=picture, input_data_format="channels_last", return_tensors="pt")
        pixels_3HW = features["pixel_values"][0]
        if "pixel_mask" not in features:
            return ModelInput(pixels_3HW=pixels_3HW, valid=(pixels_3HW.shape[1], pixels_3HW.shape[2]), padded=False)
        inside_HW = features["pixel_mask"][0].bool()
        return ModelInput(pixels_3HW=pixels_3HW, padded=True,
                          valid=(int(inside_HW.any(1).sum()), int(inside_HW.any(0).sum())))

    def maps(self, inputs: Sequence[ModelInput]) -> list[Pixels]:
        """A map for each picture: uint8 [h, w], over all of it; pictures of one shape share a forward pass."""
        maps: dict[int, Pixels] = {}
        for numbers in _of_one_shape(inputs):
            chosen = [inputs[number] for number in numbers]
            maps.update(zip(numbers, self._maps(chosen), strict=True))
        return [maps[number] for number in range(len(inputs))]

    @torch.inference_mode()
    def _maps(self, inputs: Sequence[ModelInput]) -> Iterator[Pixels]:
        pixels_B3HW = torch.stack([picture.pixels_3HW for picture in inputs])
        batch = {"pixel_values": pixels_B3HW.to(self._device)}
        if inputs[0].padded:
            inside_BHW = torch.zeros(pixels_B3HW.shape[0], *pixels_B3HW.shape[2:], dtype=torch.int64)
            for number, picture in enumerate(inputs):
                inside_BHW[number, :picture.valid[0], :picture.valid[1]] = 1
            batch["pixel_mask"] = inside_BHW.to(self._device)
        sure_Bhw = self._sure(self._model, batch).float()
        if any(picture.valid != picture.pixels_3HW.shape[1:] for picture in inputs):  # padding may end inside a cell
            sure_Bhw = torch.nn.functional.interpolate(sure_Bhw[:, None], pixels_B3HW.shape[2:], mode="bilinear")[:, 0]
        gray_Bhw = sure_Bhw.nan_to_num(0).clamp(0, 1).mul(255).round().to(torch.uint8).cpu().numpy()
        for gray_hw, picture in zip(gray_Bhw, inputs, strict=True):
            cut = picture.valid != picture.pixels_3HW.shape[1:]
            yield np.ascontiguousarray(gray_hw[:picture.valid[0], :picture.valid[1]]) if cut else gray_hw


def clipseg(folder: Path, *, prompts: Sequence[str], device: str) -> Segmenter:
    """Loads CLIPSeg (Lüddecke and Ecker, 2022) from `folder`, for `prompts`. Raises `ModelError`, `UsageError`."""
    quiet_transformers()
    where = pick_device(device)
    files = single_model_files(folder)
    config = load_part(transformers.AutoConfig, files, "config")
    if config.model_type != "clipseg":
        raise ModelError(f"the model in {folder} has type {config.model_type}, expected clipseg",
                         hint="--with segment takes other segmentation models")
    model = _load(transformers.CLIPSegForImageSegmentation, files).to(where).eval()
    tokens = load_part(transformers.AutoTokenizer, files, "tokenizer")
    embeddings = [_embedded(model, tokens, prompt, where) for prompt in prompts]

    def sure(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        count = batch["pixel_values"].shape[0]
        logits = (model(**batch, conditional_embeddings=embedding_1D.expand(count, -1)).logits
                  for embedding_1D in embeddings)
        return torch.stack([map_BHW.reshape(count, *map_BHW.shape[-2:]) for map_BHW in logits]).amax(0).sigmoid()

    return Segmenter(model, _processor(files), where, sure)


@torch.inference_mode()
def _embedded(model: Any, tokens: Any, prompt: str, device: torch.device) -> torch.Tensor:
    """CLIPSeg's embedding of a prompt, [1, channel]."""
    words = tokens(prompt, return_tensors="pt").to(device)
    count, most = words["input_ids"].shape[1], model.config.text_config.max_position_embeddings
    if count > most:
        raise UsageError(f"prompt '{prompt[:60]}' has {count} tokens, expected at most {most}")
    embedding: torch.Tensor = model.get_conditional_embeddings(
        batch_size=1, input_ids=words["input_ids"], attention_mask=words["attention_mask"])
    return embedding


def segment(folder: Path, *, labels: Sequence[str], device: str) -> Segmenter:
    """Loads the segmentation model in `folder`, for `labels` that it knows. Raises `ModelError`, `UsageError`."""
    quiet_transformers()
    where = pick_device(device)
    files = single_model_files(folder)
    config = load_part(transformers.AutoConfig, files, "config")
    classes = _numbers(config.id2label, labels)
    queries = config.model_type in BY_QUERIES
    kinds = transformers.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING if queries else (
        transformers.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING)
    if type(config) not in kinds:
        raise ModelError(f"the model in {folder} has type {config.model_type}, expected a semantic segmentation model "
                         f"or one of: {', '.join(BY_QUERIES)}", hint="clipseg models are for --with clipseg")
    model = _load(kinds[type(config)], files).to(where).eval()

    def semantic(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits_BChw = model(pixel_values=batch["pixel_values"]).logits
        alone = logits_BChw.shape[1] == 1  # softmax over a single class is always 1
        sure: torch.Tensor = (logits_BChw.sigmoid() if alone else logits_BChw.softmax(1))[:, classes].sum(1)
        return sure

    def by_queries(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output = model(**batch)
        detr = config.model_type == "detr"
        classes_BQC = output.logits if detr else output.class_queries_logits
        masks_BQhw = output.pred_masks if detr else output.masks_queries_logits
        sure_BQ = classes_BQC.softmax(-1)[..., classes].sum(-1)
        best: torch.Tensor = (sure_BQ[..., None, None] * masks_BQhw.sigmoid()).amax(1)
        return best

    return Segmenter(model, _processor(files), where, by_queries if queries else semantic)


def _numbers(names: Mapping[int, str], labels: Sequence[str]) -> list[int]:
    """The class numbers of `labels`: case is ignored, and "person" matches "person, individual"."""
    known: dict[str, set[int]] = {}
    for number, name in names.items():
        for word in (name, *name.split(",")):
            known.setdefault(word.strip().casefold(), set()).add(int(number))
    numbers: set[int] = set()
    for label in labels:
        if label.strip().casefold() not in known:
            raise UsageError(f"label '{label[:60]}' is not among this model's {len(names)}"
                             f"{suggest(label.strip().casefold(), known)}", hint=f"the model has: {_some(names)}")
        numbers |= known[label.strip().casefold()]
    return sorted(numbers)


def _some(names: Mapping[int, str]) -> str:
    words = [name.split(",")[0].strip() for name in names.values()]
    return ", ".join(words[:40]) + (f" and {len(words) - 40} more" if len(words) > 40 else "")


def _of_one_shape(inputs: Sequence[ModelInput]) -> list[list[int]]:
    shapes: dict[tuple[torch.Size, bool], list[int]] = {}
    for number, picture in enumerate(inputs):
        shapes.setdefault((picture.pixels_3HW.shape, picture.padded), []).append(number)
    return list(shapes.values())


def _processor(files: ComponentFiles) -> Any:
    """The model's own image processor, without its center crop."""
    processor = load_part(transformers.AutoImageProcessor, files, "image processor")
    if getattr(processor, "do_center_crop", False):
        processor.do_center_crop = False
    return processor


def _load(kind: Any, files: ComponentFiles) -> Any:
    """Loads the model. The hint names SciPy, which MaskFormer's training loss needs as soon as the model is made."""
    options: dict[str, Any] = {dtype_keyword(transformers.__version__): torch.float32}
    return load_transformers(kind, files, "segmentation model",
                             packages="; pip install 'latentry[masks]' installs SciPy",
                             trust_remote_code=False, **options)
