"""The training adapter that `base.adapter` names, before it is loaded: whether it can be one, and fits the model."""

from __future__ import annotations

from pathlib import Path

from prep.errors import ModelError, PathError
from prep.models.fingerprint import FileDigest
from prep.parse import Unparsed
from prep.training.schema import Config
from train.models.adapters.frozen import FrozenAdapter, FrozenLayer
from train.models.adapters.stored import StoredAdapter, check_shapes
from train.models.naming import Naming
from train.models.targets import Shapes
from train.runs.lora_file import LoraFile, open_lora, unfit

_KINDS = {"down", "up", "alpha"}  # of tensors
_MERGE = "add it to the model with train merge, and train that one with --model"


def training_adapter(config: Config, layers: Shapes, naming: Naming, digest: FileDigest) -> FrozenAdapter | None:
    """The training adapter for a denoiser with these layers, or `None` if there is none. Raises `PathError`,
    `ModelError`, `CacheError`."""
    if not config.base.adapter:
        return None
    path = Path(config.base.adapter)
    if not path.is_file() or path.suffix != ".safetensors":
        seen = "is not a .safetensors file" if path.exists() else "does not exist"
        raise PathError(f"base.adapter is {path}, which {seen}, expected the LoRA file of a training adapter",
                        hint="--set base.adapter=FILE names it where it is; hf download gets a published one")
    file = open_lora(path, layers, naming, "name an undamaged LoRA file with base.adapter")
    found = {}
    for adapter in file.contents.adapters:
        scale = config.base.adapter_scale * _checked(file, adapter, layers)
        for where, layer in adapter.parts:
            found[layer] = FrozenLayer(where=where, down=adapter.tensors["down"], up=adapter.tensors["up"], scale=scale)
    return FrozenAdapter(path=path, digest=digest(path), shapes=file.shapes, layers=found, notes=file.notes(path.name))


def _checked(file: LoraFile, adapter: StoredAdapter, layers: Shapes) -> float:
    """The scale of an adapter in the file. Raises `ModelError` unless it is a plain LoRA of a layer of its shape."""
    other = [name for kind, name in adapter.tensors.items() if kind not in _KINDS]
    if other:
        raise ModelError(f"{file.path} has '{other[0][:120]}', but a training adapter is a plain LoRA: it has down, up "
                         "and alpha of each layer", hint=_MERGE)
    try:
        check_shapes(adapter, file.shapes, layers)
        scale = file.scale(adapter)
    except Unparsed as error:
        raise unfit(file.path, error) from None
    for _, layer in adapter.parts:
        if len(layers[layer]) == 4 and layers[layer][1] == 1 < layers[layer][0]:
            raise ModelError(f"{file.path} adapts '{layer}', which convolves each channel by itself: nothing can be "
                             "added beside it", hint=_MERGE)
    return scale
