"""The two naming schemes that LoRA files are written in, and a family's names of its layers; `adapters` reads more.

kohya       lora_unet_down_blocks_0_…_to_q.lora_down.weight, .lora_up.weight, .alpha: ComfyUI reads it, of some families
            diffusers, too
diffusers   unet.down_blocks.0.….to_q.lora_A.weight, .lora_B.weight; alpha is in the file's metadata

With DoRA also .dora_scale, which diffusers drops, or .lora_magnitude_vector, which ComfyUI does not read: the length of
each row of the weights. Of a UNet's attention ComfyUI does not read diffusers' names, but an older form of them.

kohya's names of SDXL and of a transformer are those of its authors' code, where one layer may stand for several of
diffusers, such as `img_attn_qkv` for `to_q`, `to_k` and `to_v`. The adapters of such layers become one, of the sum of
their ranks: the `down` matrices one below the other, the `up` matrices along the diagonal, and alpha grows with the
rank. It adds the same to the weights.

Where the authors' code computes shift and scale of a last normalization from one layer, diffusers has scale and shift:
the halves of the rows are exchanged.

ComfyUI (0.29: `model_lora_keys_unet` of comfy/lora.py) reads `lora_unet_` and the name in the authors' checkpoint, with
underscores for dots, of any layer of any model that it knows. A family without kohya's names here is one that ComfyUI
does not know, or whose checkpoints diffusers does not convert, so that no test could prove the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import TYPE_CHECKING

from prep.errors import ConfigError
from prep.models.family import Family
from prep.models.lora.kohya import UNET, Kohya, LayerSlice, Rule
from prep.training.schema import Lora
from train.config.load import own_alphas
from train.models.targets import Shapes, adapter_of

if TYPE_CHECKING:  # train check reads names, and imports no torch
    from torch import Tensor

_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight", "alpha": ".alpha", "magnitude": ".dora_scale"}
_DIFFUSERS = {"down": ".lora_A.weight", "up": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
_EARLIER = re.compile("lora_unet_(down|mid|up)_block")  # of SDXL


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """A family's names of tensors in a LoRA file."""

    component: str  # prefix of diffusers' names: unet or transformer
    kohya: Kohya | None  # None: not known for this family
    in_comfyui: bool = True  # whether ComfyUI reads diffusers' names of this family
    further: tuple[Rule, ...] = ()  # names of the authors' code that are read, but never written
    original: Callable[[Iterable[str]], tuple[Rule, ...]] | None = None  # of a UNet: its authors' names, by its layers
    earlier: bool = False  # whether files are written as by versions before `earlier_format`

    def knowing(self, layers: Iterable[str]) -> Naming:
        """The names for a model with these layers."""
        if self.original is None:
            return self
        rules, kohya = self.original(layers), self.kohya
        if kohya is not None and kohya.counted:
            kohya = replace(kohya, rules=rules)
        return replace(self, kohya=kohya, further=rules, original=None)

    def earlier_format(self) -> Naming:
        """The names of files that were written before SDXL had its authors' names, and before `auto` meant kohya's for
        DoRA and for families of which ComfyUI reads no others."""
        kohya = UNET if self.kohya is not None and self.kohya.counted else self.kohya
        return replace(self, kohya=kohya, earlier=True)

    def as_written(self, names: Iterable[str], lora: Lora) -> Naming:
        """The names that a file of a run with these settings has: those of an earlier version, or today's."""
        listed = list(names)
        by_diffusers = any(name.startswith(f"{self.component}.") for name in listed)
        if lora.format == "auto" and self.format_of(lora) == "kohya" and by_diffusers:
            return self.earlier_format()
        older = self.kohya is not None and self.kohya.counted and any(map(_EARLIER.match, listed))
        return self.earlier_format() if older else self

    def format_of(self, lora: Lora) -> str:
        """`lora.format`; auto is kohya where it is usual. Raises `ConfigError` where kohya's names are not known."""
        if lora.kind != "lora" and self.kohya is None:
            raise ConfigError(f"lora.kind is '{lora.kind}', but its names are not known for this family of "
                              "models",
                              hint="--set lora.kind=lora")
        if lora.kind != "lora":
            return "kohya"
        if lora.format == "auto":
            later = lora.dora or not self.in_comfyui
            usual = self.kohya is not None and self.kohya.usual and not (later and self.earlier)
            return "kohya" if usual else "diffusers"
        if lora.format == "kohya" and self.kohya is None:
            raise ConfigError("lora.format is 'kohya', but kohya's names are not known for this family of models",
                              hint="--set lora.format=diffusers")
        return lora.format

    def require(self, lora: Lora, layers: Iterable[str]) -> None:
        """Raises `ConfigError` if `lora.format` has no name for one of `layers`, or one name for layers of different
        ranks, or with DoRA one name for layers that do not all have an adapter: their rows have no length in the
        file."""
        seen: dict[str, str] = {}
        rows: dict[str, list[LayerSlice]] = {}
        for layer in layers if self.format_of(lora) == "kohya" else ():
            where = self.slice_of(layer, "kohya")
            if where is None:
                raise ConfigError(f"lora.format is 'kohya', but kohya's names have none for the layer '{layer}'",
                                  hint="--set lora.format=diffusers" if lora.kind == "lora" else
                                  "list other layers in lora.targets, or --set lora.kind=lora")
            if lora.kind != "lora" and where.of > 1:
                raise ConfigError(f"lora.kind is '{lora.kind}', but in kohya's names '{layer}' is a part of the layer "
                                  f"'{where.name}', which has to be adapted as a whole",
                                  hint="list other layers in lora.targets, or --set lora.kind=lora")
            rows.setdefault(where.name, []).append(where)
            other = seen.setdefault(where.name, layer)
            if other != layer and adapter_of(lora, other, ()).rank != adapter_of(lora, layer, ()).rank:
                raise ConfigError(f"lora.format is 'kohya', whose names have one for '{other}' and '{layer}', but "
                                  "lora.layers gives them other ranks", hint="--set lora.format=diffusers")
        for name, slices in rows.items() if lora.dora else ():
            if sum(where.count for where in slices) < slices[0].of:
                raise ConfigError(f"lora.dora is on and lora.format is 'kohya', whose names have one for "
                                  f"'{seen[name]}' and layers without an adapter", hint="--set lora.format=diffusers, "
                                  "or --set lora.targets=all-linear")

    def require_shapes(self, lora: Lora, shapes: Shapes) -> None:
        """Raises `ConfigError` if `lora.format` cannot hold layers of these shapes, by name: fused layers with other
        shares of the rows than the published models', and LoHa or LoKr of rows whose halves are exchanged."""
        units: dict[str, tuple[str, float]] = {}
        for layer, shape in shapes.items() if self.format_of(lora) == "kohya" else ():
            where = self.slice_of(layer, "kohya")
            if where is None:
                continue
            if lora.kind != "lora" and where.exchanges(shape[0], shape[1]):
                raise ConfigError(f"lora.kind is '{lora.kind}', but in kohya's names '{layer}' has the halves of its "
                                  "rows exchanged", hint="list other layers in lora.targets, or --set lora.kind=lora")
            other, unit = units.setdefault(where.name, (layer, shape[0] / where.count))
            if unit != shape[0] / where.count:
                raise ConfigError(f"lora.format is 'kohya', whose names have one for '{other}' and '{layer}', but "
                                  "their rows are not in the proportion of the published models'",
                                  hint="--set lora.format=diffusers")

    def fits_kohya(self, lora: Lora, shapes: Shapes) -> bool:
        """Whether kohya's names can hold this LoRA on layers of these shapes, by name."""
        renamed = replace(lora, format="kohya")
        try:
            self.require(renamed, shapes)
            self.require_shapes(renamed, shapes)
        except ConfigError:
            return False
        return not own_alphas(lora)

    def is_misread(self, lora: Lora, strengths: Iterable[float]) -> bool:
        """Whether ComfyUI reads the file of this LoRA, but scales what it adds in another way than it was trained. It
        reads no metadata, and without a tensor for alpha takes it for the rank. `strengths` as of `strengths_of`."""
        return (not all(isclose(strength, 1.0) for strength in strengths) and self.in_comfyui and not lora.dora
                and self.component != "unet" and self.format_of(lora) == "diffusers")

    def alpha_of(self, metadata: Mapping[str, str], layer: str, rank: int) -> float:
        """The alpha of a layer by the metadata that diffusers writes; the rank if there are none, as its loader takes
        it."""
        try:
            table = json.loads(metadata["lora_adapter_metadata"])
            own = table.get(f"{self.component}.alpha_pattern", {})
            return float(own.get(layer, table.get(f"{self.component}.lora_alpha", rank)))
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            return float(rank)

    def slice_of(self, layer: str, layout: str) -> LayerSlice | None:
        """The slice that a layer is in a file of this layout; `None` if the layout has none for it."""
        if layout == "diffusers":
            return LayerSlice(name=f"{self.component}.{layer}")
        return None if self.kohya is None else self.kohya.slice_of(layer)


def naming_of(family: Family, layers: Iterable[str] | None = None) -> Naming:
    """The names of tensors in the family's LoRA files; `layers`: of the denoiser, which decide a UNet's names. Without
    these, an adapter's own layers do."""
    lora = family.lora
    naming = Naming(component=family.denoiser, kohya=lora.kohya, in_comfyui=lora.in_comfyui, further=lora.further,
                    original=lora.original)
    return naming if layers is None else naming.knowing(layers)


def strengths_of(lora: Lora, shapes: Shapes) -> tuple[float, ...]:
    """The factors alpha / rank of adapters on layers of these shapes, by name; each once, the smallest first."""
    adapters = (adapter_of(lora, name, shape[2:]) for name, shape in shapes.items())
    return tuple(sorted({adapter.alpha / adapter.rank for adapter in adapters}))


def in_file_order(where: LayerSlice, up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
    """`rows`, one for each of `up`, in the file's order if they are in that of the layer, and the other way round."""
    return rows.roll(len(rows) // 2, 0) if where.exchanges(len(up), down.shape[1]) else rows


def ends_of(layout: str) -> dict[str, str]:
    """The suffixes of a layer's tensors in a file, by kind: down, up, magnitude, and alpha if the layout
    has such tensors."""
    return _KOHYA if layout == "kohya" else _DIFFUSERS


def shape_of_lengths(name: str, rows: int, dimensions: int) -> tuple[int, ...]:
    """The shape of DoRA's lengths of a weight with so many rows and dimensions, in a file where they have this name."""
    if name.endswith(_KOHYA["magnitude"]):
        return (rows, *(1 for _ in range(dimensions - 1)))
    return (rows,) if dimensions == 2 else (1, rows, *(1 for _ in range(dimensions - 2)))
