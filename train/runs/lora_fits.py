"""Compares a LoRA file that a run begins with, with what the run trains: layers, ranks, alphas. No torch."""

from __future__ import annotations

import json
from math import prod, sqrt

from prep.errors import ConfigError, ModelError
from prep.formatting import shell_name
from prep.parse import Unparsed, brief
from prep.training.schema import Lora
from train.models.adapters.covering import targets_of
from train.models.adapters.readers import KINDS
from train.models.adapters.stored import StoredAdapter, by_columns, check_shapes, rank_of
from train.models.naming import Naming
from train.models.products import product_alpha, product_shapes
from train.models.targets import Presets, Shapes, adapter_of, targeted
from train.runs.lora_file import LoraFile, unfit


def check_lora(file: LoraFile, lora: Lora, layers: Shapes, presets: Presets, naming: Naming) -> None:
    """Compares the adapters of a file with the settings. Raises `ConfigError` with the one that fits, `ModelError`."""
    adapters, wanted = file.contents.adapters, targeted(layers, lora, presets)
    if lora.kind != "lora":
        naming.require(lora, wanted)
    for adapter in adapters:
        if adapter.merged_only:
            raise ModelError(f"{file.path} has '{adapter.merged_only[:120]}', which no run trains",
                             hint="add the file to its model with train merge, and train that one")
        if adapter.kind != lora.kind:
            raise ConfigError(f"{file.path} has a {KINDS[adapter.kind]} of {adapter.name[:80]}, but lora.kind is "
                              f"'{lora.kind}'", hint=f"--set lora.kind={adapter.kind}")
    targets = set(wanted)
    adapted = {adapter.name: [layer for _, layer in adapter.parts if layer in targets] or [
        layer for _, layer in adapter.parts] for adapter in adapters}  # of fused ones others' rows may be 0
    present = {layer for own in adapted.values() for layer in own}
    if present != targets:
        raise ConfigError(f"{file.path} adapts {len(present)} layers, like {min(present)}, which are not those of "
                          f"lora.targets {brief(lora.targets)}", hint=_targets(targets_of(present, layers, presets)))
    for adapter in adapters:
        try:
            (_check_adapter if lora.kind == "lora" else _check_product)(
                file, adapter, adapted[adapter.name], layers, lora)
            check_shapes(adapter, file.shapes, layers)
        except Unparsed as error:
            raise unfit(file.path, error) from None


def _targets(targets: str | tuple[str, ...]) -> str:
    if isinstance(targets, str):
        return f"--set lora.targets={targets}"
    return f"--set {shell_name(f'lora.targets={json.dumps(targets)}')}"


def _check_adapter(file: LoraFile, adapter: StoredAdapter, trained: list[str], layers: Shapes, lora: Lora) -> None:
    """Raises `ConfigError` for another rank or alpha, `ModelError` or `Unparsed` for other shapes.

    The rank in the file is that of all trained layers together, or one that they share.
    """
    module, layer = ", ".join(trained), layers[trained[0]]
    shapes = {kind: file.shapes.get(adapter.tensors.get(kind, "")) for kind in ("down", "up")}
    chosen, file_rank = adapter_of(lora, trained[0], layer[2:]), rank_of(adapter, file.shapes)
    large = "conv_" if prod(layer[2:]) > 1 else ""
    own = chosen.rank * (2 if lora.init == "pissa" else 1)
    rank = own if file_rank == own else own * len(trained)
    if shapes["down"] is not None and file_rank != rank:
        doubled = ", which lora.init 'pissa' doubles" if own > chosen.rank else ""
        hint = f"--set lora.conv_rank={file_rank}" if large else f"--rank {file_rank}"
        raise ConfigError(f"{file.path} has rank {file_rank} in {module}, but lora.{large}rank is "
                          f"{chosen.rank}{doubled}",
                          hint=f"--set lora.init=kaiming {hint}" if doubled else hint)
    wanted = {"down": (rank, *layer[1:]), "up": (adapter.rows(layers), rank, *(1 for _ in layer[2:]))}
    for kind, shape in wanted.items():
        if prod(shapes[kind] or ()) != prod(shape) or (shapes[kind] or ())[:2] != shape[:2]:
            seen = "no tensor" if shapes[kind] is None else f"shape {list(shapes[kind] or ())}"
            raise ModelError(f"{file.path} has {seen} '{kind}' of {module}, expected shape {list(shape)}",
                             hint="name a LoRA of the same family of models")
    _check_lengths(file, module, adapter, layer, lora)
    _check_alpha(file, module, file.scale(adapter) * chosen.rank, chosen.alpha, f"lora.{large}alpha",
                 sqrt(chosen.rank) if lora.rslora else 1.0)


def _check_alpha(file: LoraFile, module: str, alpha: float, chosen: float, setting: str, root: float) -> None:
    """Raises `ConfigError` for another alpha than the chosen one."""
    if abs(alpha - chosen) <= 1e-3 * chosen:  # a float16 has three digits
        return
    if alpha <= 0:
        raise ModelError(f"{file.path} has alpha {alpha:g} in {module}, which no setting gives",
                         hint="name a LoRA whose alphas are above 0")
    raise ConfigError(f"{file.path} has alpha {alpha:g} in {module}, but {setting} is {chosen:g}"
                      f"{' there, by lora.rslora' if root != 1 else ''}", hint=f"--set {setting}={alpha / root:g}")


def _check_lengths(file: LoraFile, module: str, adapter: StoredAdapter, layer: tuple[int, ...], lora: Lora) -> None:
    """Raises `ConfigError` if only the file or only the run is of DoRA, `Unparsed` for lengths of columns."""
    name = adapter.tensors.get("magnitude")
    if (name is not None) != lora.dora:
        lengths = "no lengths of rows, but lora.dora is on" if lora.dora else "lengths of rows, but lora.dora is off"
        raise ConfigError(f"{file.path} has {lengths}: {module}", hint=f"--set lora.dora={str(not lora.dora).lower()}")
    if name is not None and by_columns(name, file.shapes[name], layer):
        wanted = [layer[0], *(1 for _ in layer[1:])]
        raise Unparsed(f"it has lengths of {module} with shape {list(file.shapes[name])}, expected {wanted}: of rows, "
                       "as a run trains them, where a dora_scale of columns can only be merged")


def _check_product(file: LoraFile, adapter: StoredAdapter, trained: list[str], layers: Shapes, lora: Lora) -> None:
    """Raises `ModelError` unless an adapter has exactly the tensors of LoHa or LoKr that the settings give."""
    hint = "give it the lora.kind, factor, rank and targets that the file was trained with"
    (layer,) = trained  # `Naming.require` refuses parts of fused layers
    rank = adapter_of(lora, layer, layers[layer][2:]).rank
    wanted, tensors = product_shapes(layers[layer], rank, lora), adapter.tensors
    if extra := [name for kind, name in tensors.items() if kind not in (*wanted, "alpha")]:
        raise ModelError(f"{file.path} has the tensor '{extra[0][:80]}', which a {KINDS[lora.kind]} "
                         "with these settings does not have", hint=hint)
    for kind, shape in wanted.items():
        seen = file.shapes[tensors[kind]] if kind in tensors else None
        if seen is None or prod(seen) != prod(shape) or seen[:1] != shape[:1]:
            shape_text = "no such tensor" if seen is None else f"shape {list(seen)}"
            raise ModelError(f"{file.path} has {shape_text}: '{tensors.get(kind, f'{_stem(adapter)}.{kind}')[:80]}', "
                             f"expected shape {list(shape)}", hint=hint)
    alpha, stored = product_alpha(layers[layer], rank, lora), file.scale(adapter) * rank
    name = tensors.get("alpha", f"{_stem(adapter)}.alpha")
    if "lokr_w2" not in wanted and abs(stored - alpha) > 1e-3 * alpha:
        raise ConfigError(f"{file.path} has '{name[:80]}' of {stored:g}, expected {alpha:g} by lora.alpha",
                          hint=f"--set lora.alpha={stored * lora.alpha / alpha:g}")


def _stem(adapter: StoredAdapter) -> str:
    """The name of the file's layer, with its prefix."""
    kind, name = next(iter(adapter.tensors.items()))
    return name.removesuffix(f".{kind}")
