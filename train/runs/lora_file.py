"""A LoRA file of any program, read up to its values: its adapters, what scales them, whether it is sound. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prep.errors import ModelError
from prep.parse import Unparsed
from prep.runs.documents import MOST, refused
from train.models.adapters.peft import KEY, PeftSettings, settings_in, settings_of
from train.models.adapters.stored import LoraContents, StoredAdapter, contents_of, scale_of, table_of
from train.models.naming import Naming
from train.models.targets import Shapes
from train.runs.checkpoint import open_weights
from train.runs.safetensors.header import TensorInfo, read_header_and_metadata
from train.runs.safetensors.values import FLOATS, NUMBERS, first_not_finite, number

PEFT, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMES = ("lora.safetensors", PEFT, "pytorch_lora_weights.safetensors")  # in a directory: ours, PEFT's, diffusers'
_OF_PEFT = "base_model.model."
_ONE = ((), (1,))  # shapes of a single number


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFile:
    """The names, shapes, alphas and settings in a LoRA file, without its values."""

    path: Path
    shapes: Shapes  # of every tensor
    metadata: Mapping[str, str]
    contents: LoraContents
    alphas: Mapping[str, float]  # by the tensor's name
    settings: PeftSettings  # PEFT's; empty if there are none

    def notes(self, name: str) -> tuple[str, ...]:
        """Notes for the user about the file that is called `name`."""
        notes = []
        if self.contents.text:
            notes.append(f"{name} also adapts text encoders; {len(self.contents.text)} of its tensors are not used")
        of_peft = any(name.startswith(_OF_PEFT) for name in self.shapes)
        if not self.alphas and self.settings == PeftSettings() and of_peft:
            notes.append(f"{name} has PEFT's names, but no {CONFIG} beside it: its alpha is taken for its rank")
        return tuple(notes)

    def scale(self, adapter: StoredAdapter) -> float:
        """The factor of what an adapter adds. Raises `Unparsed`."""
        return scale_of(adapter, self.shapes, self.alphas.get(adapter.tensors.get("alpha", "")), self.settings)


def open_lora(path: Path, layers: Shapes, naming: Naming, hint: str) -> LoraFile:
    """The LoRA file at `path`, for a denoiser with these layers. `hint`: what to do about a damaged one.

    Raises `CacheError` if it is damaged, `ModelError` if something in it is not read.
    """
    try:
        with open_weights(path) as handle:
            tensors, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
            start = handle.tell()
            contents = _contents(path, tensors, layers, naming)
            alphas = _alphas(handle, start, tensors, contents)
            require_finite(path, handle, start, ((name, tensors[name]) for each in contents.adapters
                                                 for name in each.tensors.values()))
    except (OSError, Unparsed) as error:
        raise refused(path, error, hint) from None
    return LoraFile(path=path, shapes={name: info.shape for name, info in tensors.items()}, metadata=metadata,
                    contents=contents, alphas=alphas, settings=settings_of_file(path, metadata, naming.component))


def require_finite(path: Path, handle: BinaryIO, start: int, tensors: Iterable[tuple[str, TensorInfo]]) -> None:
    """Raises `ModelError` if one of the tensors, which begin at byte `start` of the file, has NaN or infinity;
    `Unparsed`, `OSError`."""
    if (spoiled := first_not_finite(handle, start, tensors)) is not None:
        raise ModelError(f"{path} has NaN or infinity in '{spoiled[:120]}': what wrote it had failed",
                         hint="name a file from before that, like an earlier checkpoint")


def unfit(path: Path, error: Unparsed) -> ModelError:
    """The error for a file whose content is not read, or does not fit the model."""
    reason = str(error)
    rows = " whose lengths are those of rows (wd_on_output)" if "dora_scale" in reason or "magnitude" in reason else ""
    return ModelError(f"{path} {reason.removeprefix('it ')}",
                      hint=f"name a LoRA{rows} of the same family of models, for the model that it was trained on")


def _contents(path: Path, tensors: Mapping[str, TensorInfo], layers: Shapes, naming: Naming) -> LoraContents:
    try:
        contents = contents_of(tensors, table_of(layers, naming))
        for adapter in contents.adapters:
            for kind, name in adapter.tensors.items():
                known = NUMBERS if kind in ("alpha", "ia3_input") else FLOATS
                if tensors[name].dtype not in known:
                    raise Unparsed(f"it has '{name[:120]}' of dtype {tensors[name].dtype}, expected one of the dtypes "
                                   f"{', '.join(known)}")
    except Unparsed as error:
        raise unfit(path, error) from None
    if not tensors:
        raise ModelError(f"{path} has no tensors, so it is no LoRA", hint="name a run, or a LoRA file")
    if not contents.adapters:
        raise ModelError(f"{path} adapts text encoders only", hint="name a LoRA that adapts the denoiser")
    return contents


def _alphas(handle: BinaryIO, start: int, tensors: Mapping[str, TensorInfo],
            contents: LoraContents) -> dict[str, float]:
    """The values of the tensors that are single numbers."""
    alphas = {}
    for adapter in contents.adapters:
        name = adapter.tensors.get("alpha", "")
        info = tensors.get(name)
        if info is not None and info.shape in _ONE:
            handle.seek(start + info.start)
            alphas[name] = number(info.dtype, handle.read(info.end - info.start))
    return alphas


def settings_of_file(path: Path, metadata: Mapping[str, str], component: str) -> PeftSettings:
    """PEFT's settings of the adapter of `component` (unet or transformer): those in the metadata, or beside PEFT's own
    file. Raises `ModelError`, `CacheError`."""
    config = path.with_name(CONFIG)
    try:
        if KEY in metadata or path.name != PEFT or not config.is_file():
            return settings_in(metadata, component)
        return settings_of(read_config(config))
    except Unparsed as error:
        raise unfit(path, error) from None


def read_config(config: Path) -> str:
    """The text of PEFT's adapter_config.json. Raises `CacheError`."""
    try:
        with open_weights(config) as handle:
            return handle.read(min(os.fstat(handle.fileno()).st_size, MOST)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise refused(config, error, "name the file with its adapter_config.json beside it") from None
