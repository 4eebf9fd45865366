"""A LoRA file of any program as it lies there, without a model: its layers by the names of their tensors, what scales
them, and the settings that say their ranks, for other ranks written again."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from prep.errors import ModelError
from prep.fs import atomic
from prep.parse import Unparsed
from prep.runs.documents import refused
from train.merging.trained import another
from train.metadata import table_in
from train.models.adapters.peft import KEY, PeftSettings, unusual
from train.models.adapters.readers import KINDS
from train.models.adapters.spelling import kind_of, of_text, split
from train.models.adapters.stored import StoredAdapter, scale_of
from train.models.targets import Shapes
from train.runs.checkpoint import open_weights
from train.runs.checkpoint_files import CheckpointFile, write_part
from train.runs.lora_file import CONFIG, PEFT, read_config, require_finite, settings_of_file
from train.runs.safetensors.header import TensorInfo, read_header_and_metadata
from train.runs.safetensors.reader import STORED, read_tensor

_COMPONENTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")  # in diffusers' names
_OF_PEFT = "base_model.model."
_OTHERWISE = "add the file to its model with train merge, and make a LoRA of that with train extract"


@dataclass(frozen=True, kw_only=True, slots=True)
class Factored:
    """A LoRA file, without its values."""

    path: Path
    infos: Mapping[str, TensorInfo]
    shapes: Shapes
    metadata: Mapping[str, str]
    layers: Mapping[str, Mapping[str, str]]  # names of tensors by kind, by what their names begin with
    settings: Mapping[str, PeftSettings]  # by component, "" for those of PEFT's adapter_config.json
    config: Mapping[str, Any]  # that document; empty: there is none

    def read(self, name: str) -> Tensor:
        """A tensor's values. Raises `CacheError`."""
        try:
            return read_tensor(self.path, self.infos[name], STORED)
        except (OSError, Unparsed) as error:
            raise refused(self.path, error, another(self.path)) from None

    def placed(self, stem: str) -> tuple[str, str]:
        """The component that a layer is of, if diffusers keeps its settings in metadata, and its name in settings.

        Names of earlier releases, `unet.….lora.down.weight`, have no settings."""
        if self.config:
            return "", stem.removeprefix(_OF_PEFT)
        component, _, layer = stem.partition(".")
        today = ".lora_A" in self.layers[stem].get("down", "")
        return (component, layer) if today and component in _COMPONENTS else ("", stem)

    def scale(self, stem: str) -> float:
        """The factor of what a layer's tensors add. Raises `Unparsed`, `CacheError`."""
        (component, layer), kinds = self.placed(stem), self.layers[stem]
        alpha = kinds.get("alpha")
        if alpha is not None and prod(self.shapes[alpha]) != 1:
            raise Unparsed(f"it has '{alpha[:120]}' with shape {list(self.shapes[alpha])}, expected one number")
        adapter = StoredAdapter(name=layer, parts=(), tensors=kinds)
        return scale_of(adapter, self.shapes, None if alpha is None else float(self.read(alpha).float()),
                        self.settings.get(component, PeftSettings()))

    @property
    def bare(self) -> set[str]:
        """The layers whose alpha nothing says, so that readers take the rank for it; diffusers that of the first."""
        return {stem for stem, kinds in self.layers.items() if "down" in kinds and "alpha" not in kinds
                and not self.config and not self.placed(stem)[0]}


def open_factored(path: Path) -> Factored:
    """The file without its values. Raises `CacheError`, and `ModelError` for adapters of other kinds than LoRA."""
    try:
        with open_weights(path) as handle:
            infos, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
            start, layers = handle.tell(), _layers(path, infos)
            require_finite(path, handle, start, infos.items())
    except (OSError, Unparsed) as error:
        raise refused(path, error, another(path)) from None
    beside = path.with_name(CONFIG)
    config = read_config(beside) if path.name == PEFT and KEY not in metadata and beside.is_file() else ""
    components = ("",) if config else _COMPONENTS
    return Factored(path=path, infos=infos, shapes={name: info.shape for name, info in infos.items()},
                    metadata=metadata, layers=layers, config=table_in({KEY: config}, KEY) if config else {},
                    settings={name: settings_of_file(path, metadata, name) for name in components})


def _layers(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
    """The tensors of each layer, by kind. Raises `ModelError` for those that are no product of two matrices."""
    layers: dict[str, dict[str, str]] = {}
    for name in infos:
        stem, kind = split(name) or ("", "")
        plain = kind == "ia3" and f"{stem}.on_input" not in infos  # a weight as models have it
        if of_text(name) and (not stem or plain):
            continue  # the embedding of a word, which stays as it is
        if not stem or plain:
            of = kind_of(name)
            raise ModelError(f"{path} has the tensor '{name[:120]}', " + (
                f"of {of}, which is no product of two matrices" if of else
                "expected names of a LoRA, like '….lora_down.weight'"),
                hint=_OTHERWISE if of else "name a LoRA file, a run, or a directory of PEFT")
        layers.setdefault(stem, {})[kind] = name
    for stem, kinds in layers.items():
        adapter = StoredAdapter(name=stem, parts=(), tensors=kinds)
        if adapter.kind not in ("lora", "diff"):
            raise ModelError(f"{path} has a {KINDS[adapter.kind]} of {stem[:120]}, which is no product of two "
                             "matrices", hint=_OTHERWISE)
    return layers


# ---- the settings of other ranks -------------------------------------------------------------------------------------


def metadata_for(file: Factored, ranks: Mapping[str, int], large: set[str], given: Mapping[str, str]
                 ) -> dict[str, str]:
    """The `given` metadata if the file's layers have these ranks and alphas. `large`: convolutions larger than 1x1."""
    metadata = dict(given)
    metadata.pop("sshs_legacy_hash", None)
    if "ss_network_dim" in metadata:
        usual = _usual({stem: rank for stem, rank in ranks.items() if stem not in large} or ranks)
        metadata |= {"ss_network_dim": str(usual), "ss_network_alpha": str(float(usual))}
    arguments = table_in(metadata, "ss_network_args")
    if large and "conv_dim" in arguments:
        conv = _usual({stem: ranks[stem] for stem in large})
        metadata["ss_network_args"] = json.dumps({**arguments, "conv_dim": str(conv), "conv_alpha": str(float(conv))})
    places = {stem: file.placed(stem) for stem in ranks}
    if KEY in metadata or any(component for component, _ in places.values()):
        table = dict(table_in(metadata, KEY))
        for component in sorted({component for component, _ in places.values()} - {""}):
            own = {places[stem][1]: rank for stem, rank in ranks.items() if places[stem][0] == component}
            news = _settings(file, own, table.get(f"{component}.target_modules"))
            table |= {f"{component}.{name}": value for name, value in news.items()}
        metadata[KEY] = json.dumps(table)
    return metadata


def write_directory(output: Path, file: Factored, ranks: Mapping[str, int], tensors: Mapping[str, Tensor],
                    metadata: Mapping[str, str]) -> None:
    """PEFT's directory, whole or not at all: the file, and its settings beside it."""
    own = {file.placed(stem)[1]: rank for stem, rank in ranks.items()}
    config = {**file.config, **_settings(file, own, file.config.get("target_modules"))}
    with atomic.new_directory(output) as staged:
        write_part(staged / PEFT, CheckpointFile(name=PEFT, tensors=tensors, metadata=metadata))
        atomic.write_synced(staged / CONFIG, json.dumps(config, indent=2).encode() + b"\n")


def _settings(file: Factored, ranks: Mapping[str, int], targets: Any) -> dict[str, Any]:
    """PEFT's settings of layers with these ranks, and the same alphas."""
    usual = _usual(ranks)
    lengths = any("magnitude" in kinds for kinds in file.layers.values())
    return {"r": usual, "lora_alpha": usual, "rank_pattern": unusual(ranks, usual),
            "alpha_pattern": unusual(ranks, usual), "use_rslora": False, "target_modules": targets or sorted(ranks),
            **({"use_dora": True} if lengths else {})}


def _usual(ranks: Mapping[str, int]) -> int:
    return Counter(ranks.values()).most_common(1)[0][0]
