"""The adapters in a file, by the names and shapes of its tensors: nothing is computed before these fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from prep.models.lora.kohya import LayerSlice, slice_by
from prep.parse import Unparsed
from train.models.adapters.peft import PeftSettings
from train.models.adapters.readers import KINDS
from train.models.adapters.spelling import candidates, kind_of, of_text, spelled, split
from train.models.naming import Naming, shape_of_lengths
from train.models.products import CORES, LOHA
from train.models.targets import Shapes

# How kinds of tensors begin, by kind of adapter.
_BEGIN = {"loha": ("hada_",), "lokr": ("lokr_",), "glora": ("glora_",), "ia3": ("ia3",),
          "lora": ("down", "up", "mid"), "diff": ("diff",)}
_BESIDE = {"glora": ("alpha",), "ia3": (), "diff": ("alpha", "diff_b")}  # further tensors; of others all
_MERGED = ("mid", *CORES, "glora_a1", "ia3", "diff", "diff_b")  # kinds of tensors that no run trains
Table = Mapping[str, "tuple[tuple[LayerSlice, str], ...]"]  # layers of the denoiser, by how they are called in files
_SCALARS = ((), (1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    """An adapter in a file: of a layer of the denoiser, or of several that are one layer in the file."""

    name: str  # of the file's layer, without prefix
    parts: tuple[tuple[LayerSlice, str], ...]  # its layers in the order of their rows
    tensors: Mapping[str, str]  # names in the file, by kind

    @property
    def kind(self) -> str:
        """lora, loha, lokr, glora or ia3; diff: a whole difference of weights, or of a bias alone."""
        return next((name for name, begins in _BEGIN.items() if any(kind.startswith(begins) for kind in self.tensors)),
                    "lora")

    @property
    def merged_only(self) -> str:
        """The name of a tensor that no run trains; "": there is none."""
        return next((self.tensors[kind] for kind in _MERGED if kind in self.tensors), "")

    def rows(self, layers: Shapes) -> int:
        """The number of rows of the file's layer."""
        where, layer = self.parts[0]
        return layers[layer][0] // where.count * where.of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraContents:
    """The contents of a LoRA file."""

    adapters: tuple[StoredAdapter, ...]
    text: tuple[str, ...]  # tensors of text encoders, which are left out

    def layers(self) -> list[str]:
        """The layers of the denoiser that have an adapter."""
        return [layer for each in self.adapters for _, layer in each.parts]


def table_of(layers: Iterable[str], naming: Naming) -> Table:
    """A table from each name that a layer has in files of any program to its layers."""
    table: dict[str, list[tuple[LayerSlice, str]]] = {}
    rules = (*(naming.kohya.rules if naming.kohya is not None else ()), *naming.further)
    for layer in layers:
        slices = (slice_by(rules, layer), slice_by(naming.further, layer), LayerSlice(name=layer))
        for where in {spelled(each.name): each for each in slices if each is not None}.values():
            table.setdefault(spelled(where.name), []).append((where, layer))
    return {name: tuple(sorted(parts, key=lambda part: part[0].first)) for name, parts in table.items()}


def contents_of(names: Iterable[str], table: Table) -> LoraContents:
    """The adapters whose tensors have these names. Raises `Unparsed` for a tensor that nothing here reads."""
    example, names = min(table, default=""), dict.fromkeys(names)
    called_as: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {}
    text = []
    for name in names:
        if of_text(name):
            text.append(name)
            continue
        stem, kind = split(name) or ("", "")
        if kind == "ia3" and f"{stem}.on_input" not in names:  # a weight as models have it
            stem = ""
        names_of_stem = candidates(stem) if stem else []
        called = next((candidate for candidate in names_of_stem if spelled(candidate) in table), None)
        if called is None:
            raise Unparsed(_unread(name, example, found_end=bool(stem)))
        group = spelled(called)
        called_as.setdefault(group, called)
        if (other := tensors.setdefault(group, {}).setdefault(kind, name)) != name:
            raise Unparsed(f"it has '{other[:120]}' and '{name[:120]}', which are the same")
    adapters = [StoredAdapter(name=called, parts=table[group], tensors=tensors[group])
                for group, called in called_as.items()]
    _require_once(adapters)
    return LoraContents(adapters=tuple(adapters), text=tuple(text))


def _require_once(adapters: Iterable[StoredAdapter]) -> None:
    """Raises `Unparsed` if two adapters are on one layer, whose names in the file differ."""
    seen: dict[str, str] = {}
    for adapter in adapters:
        for _, layer in adapter.parts:
            if (other := seen.setdefault(layer, adapter.name)) != adapter.name:
                raise Unparsed(f"it adapts '{layer}' twice, as '{other[:120]}' and as '{adapter.name[:120]}'")


def _unread(name: str, example: str, *, found_end: bool) -> str:
    if kind := kind_of(name):
        return f"it has the tensor '{name[:120]}': names of {kind}, not read"
    if found_end:
        return (f"it has the tensor '{name[:120]}', but the denoiser of this model has no layer of that name: its "
                f"layers are like {example}")
    return (f"it has the tensor '{name[:120]}', expected names of a LoRA of this model, like "
            f"'lora_unet_{example}.lora_down.weight'")


# ---- shapes ----------------------------------------------------------------------------------------------------------


def rank_of(adapter: StoredAdapter, shapes: Shapes) -> int:
    """The rank of an adapter; of LoKr's whole matrices 1. Raises `Unparsed`."""
    for kind in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b", "glora_a2"):
        if name := adapter.tensors.get(kind):
            if not shapes[name] or not shapes[name][0]:
                raise Unparsed(f"it has '{name[:120]}' with shape {list(shapes[name])}, expected a rank of 1 or more")
            return shapes[name][0]
    return 1


def check_shapes(adapter: StoredAdapter, shapes: Shapes, layers: Shapes) -> None:
    """Raises `Unparsed` unless the tensors make a weight of the shape that the layer has."""
    tensors, (_, layer) = adapter.tensors, adapter.parts[0]
    rows, columns = adapter.rows(layers), prod(layers[layer][1:])
    if name := next((name for kind, name in tensors.items() if kind == "alpha" and shapes[name] not in _SCALARS), None):
        raise Unparsed(f"it has '{name[:120]}' with shape {list(shapes[name])}, expected one number")
    own = (*_BEGIN[adapter.kind], *_BESIDE.get(adapter.kind, ("alpha", "diff_b", "magnitude")))
    if extra := [name for kind, name in tensors.items() if not kind.startswith(own)]:
        raise Unparsed(f"it has '{extra[0][:120]}' beside a {KINDS[adapter.kind]} of the same layer")
    if len(layers[layer]) < 2 and adapter.kind != "diff":
        raise Unparsed(f"it has a {KINDS[adapter.kind]} of {adapter.name[:120]}, which is a norm")
    for kind, wanted in (("diff", layers[layer]), ("diff_b", layers[layer][:1])):
        if kind in tensors:
            _check_whole(tensors[kind], shapes[tensors[kind]], (rows, *wanted[1:]))
    if adapter.kind in ("lora", "glora"):
        _check_matrices(adapter, shapes, rows, layers[layer])
    elif adapter.kind == "ia3":
        _check_factors(adapter, shapes, (rows, layers[layer][1]))
    elif adapter.kind != "diff":
        _check_product(adapter, shapes, layers[layer], (rows, columns))
    if name := tensors.get("magnitude"):
        _check_lengths(name, shapes[name], rows, layers[layer], fused=adapter.parts[0][0].of > 1)


def _check_whole(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape[:1] != expected[:1] or prod(shape) != prod(expected):
        raise Unparsed(f"it has '{name[:120]}' with shape {list(shape)}, expected {list(expected)}")


def _check_product(adapter: StoredAdapter, shapes: Shapes, layer: tuple[int, ...], expected: tuple[int, int]) -> None:
    tensors = adapter.tensors
    for kind in ("lokr_w1", "lokr_w2"):
        part = next((tensors[f"{kind}_{end}"] for end in "ab" if f"{kind}_{end}" in tensors), tensors.get("lokr_t2"))
        if kind in tensors and part and (kind == "lokr_w2" or part != tensors.get("lokr_t2")):
            raise Unparsed(f"it has '{part[:120]}' beside '{tensors[kind][:120]}', expected one of them")
    if _made(adapter, shapes) != expected:
        first = min((kind, name) for kind, name in tensors.items() if kind.startswith(_BEGIN[adapter.kind]))[1]
        raise Unparsed(f"it has '{first[:120]}' and others that do not make a weight of shape {list(layer)}")


def _check_matrices(adapter: StoredAdapter, shapes: Shapes, rows: int, layer: tuple[int, ...]) -> None:
    """Raises `Unparsed` unless the matrices of a LoRA or GLoRA are there, and have these shapes."""
    rank, ones = rank_of(adapter, shapes), tuple(1 for _ in layer[2:])
    if adapter.kind == "glora":
        wanted_shapes = {"glora_a1": (layer[1], rank, *ones), "glora_a2": (rank, layer[1], *ones),
                         "glora_b1": (rows, rank, *ones), "glora_b2": (rank, *layer[1:])}
    elif "mid" in adapter.tensors:  # it has the sides of the kernel
        wanted_shapes = {"down": (rank, layer[1], *ones), "mid": (rank, rank, *layer[2:]), "up": (rows, rank, *ones)}
    else:
        wanted_shapes = {"down": (rank, *layer[1:]), "up": (rows, rank, *ones)}
    for kind, wanted in wanted_shapes.items():
        _require(adapter, kind)
        shape = shapes[adapter.tensors[kind]]
        if _without_ones(shape) != _without_ones(wanted):
            raise Unparsed(f"it has '{kind}' of {adapter.name[:120]} with shape {list(shape)}, expected {list(wanted)}")


def _check_factors(adapter: StoredAdapter, shapes: Shapes, expected: tuple[int, int]) -> None:
    """Raises `Unparsed` unless IA3 has a factor for each row, or for each column; which, its values say."""
    _require(adapter, "ia3")
    name, flag = adapter.tensors["ia3"], adapter.tensors["ia3_input"]
    if shapes[flag] not in _SCALARS:
        raise Unparsed(f"it has '{flag[:120]}' with shape {list(shapes[flag])}, expected one number")
    if prod(shapes[name]) not in expected or max(shapes[name], default=1) != prod(shapes[name]):
        raise Unparsed(f"it has '{name[:120]}' with shape {list(shapes[name])}, expected {expected[0]} or "
                       f"{expected[1]} numbers")


def _require(adapter: StoredAdapter, kind: str) -> None:
    if kind not in adapter.tensors:
        raise Unparsed(f"it has no tensor '{kind}' of {adapter.name[:120]}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows, columns and sides of a kernel, if it is larger than 1 x 1: a linear layer's are those of such a kernel."""
    return shape[:2] if len(shape) >= 2 and prod(shape[2:]) == 1 else shape


def _made(adapter: StoredAdapter, shapes: Shapes) -> tuple[int, int] | None:
    """Rows and columns of the product of LoHa or LoKr; `None`: its parts do not fit each other."""
    flat = {kind: (shapes[name][0], prod(shapes[name][1:])) for kind, name in adapter.tensors.items()
            if kind not in ("alpha", "magnitude") and len(shapes[name]) >= 2}

    def product(first: str, second: str, core: str = "") -> tuple[int, int] | None:
        if core in adapter.tensors:
            shape, first_sides, second_sides = shapes[adapter.tensors[core]], flat.get(first), flat.get(second)
            if first_sides is None or second_sides is None or shape[:2] != (first_sides[0], second_sides[0]):
                return None
            return first_sides[1], second_sides[1] * prod(shape[2:])
        if first not in flat or second not in flat or not flat[first][1] or flat[first][1] != flat[second][0]:
            return None
        return flat[first][0], flat[second][1]

    if adapter.kind == "loha":
        first_product, second_product = product(*LOHA[:2], "hada_t1"), product(*LOHA[2:], "hada_t2")
        return first_product if first_product == second_product else None
    small, large = (flat.get(name) or product(f"{name}_a", f"{name}_b", core)
                    for name, core in (("lokr_w1", ""), ("lokr_w2", "lokr_t2")))
    return None if small is None or large is None else (small[0] * large[0], small[1] * large[1])


def _check_lengths(name: str, shape: tuple[int, ...], rows: int, layer: tuple[int, ...], *, fused: bool) -> None:
    """Raises `Unparsed` unless DoRA's lengths are those of rows, or of the columns of a whole layer."""
    if fused or not by_columns(name, shape, layer):
        wanted = shape_of_lengths(name, rows, len(layer))
        if shape not in (wanted, (rows,)):
            raise Unparsed(f"it has '{name[:120]}' with shape {list(shape)}, expected {list(wanted)}")


def by_columns(name: str, shape: tuple[int, ...], layer: tuple[int, ...]) -> bool:
    """Whether DoRA's lengths are those of columns, of input channels: as OneTrainer writes them, and LyCORIS with
    wd_on_output off."""
    return name.endswith(".dora_scale") and shape == (1, layer[1], *(1 for _ in layer[2:])) and layer[0] > 1


def scale_of(adapter: StoredAdapter, shapes: Shapes, alpha: float | None, settings: PeftSettings) -> float:
    """The factor of what an adapter adds; `alpha`: that of its own tensor, if it has one."""
    rank = rank_of(adapter, shapes)
    if settings.products and alpha is None and settings.alpha is not None:
        return settings.alpha_of(adapter.name, rank) / rank
    if adapter.kind != "lora" and (alpha is None or (adapter.kind == "lokr" and not _is_product(adapter))):
        return 1.0
    return (settings.alpha_of(adapter.name, rank) if alpha is None else alpha) / rank


def _is_product(adapter: StoredAdapter) -> bool:
    """Whether one of LoKr's matrices is a product; two whole ones are not scaled."""
    return any(kind in adapter.tensors for kind in ("lokr_w1_b", "lokr_w2_b"))
