"""`train extract`: a LoRA of what a model was changed by, from its weights and those of the model that it was made of.

Of each layer the difference of the weights is decomposed by itself, in float32: the largest singular values are the
best approximation of that rank (Eckart and Young 1936). Weights are read one layer at a time, so the memory is that of
the LoRA and the largest layer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prep.errors import ModelError, PathError
from prep.models.checkpoints.converted import empty_model, weights_of
from prep.models.checkpoints.stored import Stored
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import ComponentFiles, Model
from prep.models.fingerprint import FileDigest
from prep.models.pipeline import infer_family, prediction_of, weighted_files
from prep.models.weights import read_tensors, shapes_in
from prep.training.schema import Dtype, Lora
from train.merging.differences import beside, rounding
from train.merging.reduced import Reduced, Written, check_output, whole, write_lora
from train.merging.trained import find_trained
from train.models import lora
from train.models.base import base_fingerprints, remembered_digests
from train.models.naming import Naming, naming_of
from train.models.principal import Directions, directions_of
from train.models.targets import Shapes, is_ambiguous, layers_of, targeted

Tick = Callable[[int], object]
_DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractRequest:
    """A request for a LoRA of a difference."""

    base: Model
    tuned: Model
    output: Path
    rank: int  # the most of each layer
    run: bool = False  # whether `tuned` is a full run or one of its checkpoints
    keep: float | None = None  # the part of each layer's norm that is enough
    lora: Lora  # targets and format
    dtype: Dtype = "float32"
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two denoisers of one architecture, without their weights, and what of their difference is asked for."""

    request: ExtractRequest
    family: Family
    base: Stored
    tuned: Stored
    weights: Path | None  # the file of a run's denoiser; None: it is that of a model
    shapes: Shapes  # of the denoiser's weights
    naming: Naming
    groups: tuple[tuple[str, ...], ...]  # the layers that get an adapter; those together have one rank in the file

    @property
    def layers(self) -> list[str]:
        """All these layers."""
        return [name for group in self.groups for name in group]


def pair_of(request: ExtractRequest) -> Pair:
    """The two denoisers. Raises `ModelError`, `ConfigError`, `PathError`, `UsageError`."""
    base = request.base
    check_output(request.output, [], force=request.force)
    family = FAMILIES[infer_family(base)]
    mine = stored_in(weighted_files(base, family.denoiser))
    if request.run:
        assert isinstance(request.tuned, Path)
        path = find_trained(request.tuned, family)
        if path is None:
            raise PathError(f"{request.tuned} is no run that trained all weights, expected one with its result or a "
                            "checkpoint", hint="the LoRA of a run is RUN/lora.safetensors")
        theirs = Stored.of(read_tensors((path,)))
    else:
        path = None
        if (other := infer_family(request.tuned)) != family.name:
            raise ModelError(f"{request.tuned} is of family '{other}', but {base} is of family '{family.name}'",
                             hint="name the model that the other one was made of")
        theirs = stored_in(weighted_files(request.tuned, family.denoiser))
    shapes = _shapes(request, family, mine, theirs)
    layers = layers_of(shapes)
    naming = naming_of(family, layers)
    chosen = [name for name in targeted(layers, request.lora, family.lora.presets) if _adaptable(layers[name])]
    naming.require(request.lora, chosen)
    naming.require_shapes(request.lora, {name: layers[name] for name in chosen})
    return Pair(request=request, family=family, base=mine, tuned=theirs, weights=path, shapes=shapes, naming=naming,
                groups=_groups(chosen, naming, request.lora))


def stored_in(files: ComponentFiles) -> Stored:
    """The weights of a component by the names of its library. Raises `ModelError`."""
    return weights_of(files, empty_model(files)) if files.part else Stored.of(files.tensors)


def extract(pair: Pair, device: torch.device, tick: Tick = lambda count: None) -> Written:
    """Writes the file. `tick`: called for each layer. Raises `ModelError`."""
    request, reduced, parameters = pair.request, list[Reduced](), dict[str, Tensor]()
    for group in pair.groups:
        found = {name: one for name in group if (one := _difference(pair, name, device)).norm}
        rank = max((one.rank(request.rank, request.keep) for one in found.values()), default=0)
        for name, one in found.items():
            parameters |= _adapter(name, one, rank, pair.shapes[f"{name}.weight"], _DTYPES[request.dtype])
            reduced.append(Reduced(layer=name, before=min(len(one.left), len(one.right)), rank=rank, norm=one.norm,
                                   kept=one.kept(rank)))
        tick(len(group))
    if not reduced:
        raise ModelError(f"{request.tuned} and {request.base} have the same weights in all {len(pair.layers)} layers",
                         hint="name the model that was changed, and the one that it was made of, or other --targets")
    settings = _settings(request.lora, {each.layer: each.rank for each in reduced}, pair.shapes)
    tensors = lora.pack(parameters, settings, pair.naming)
    with remembered_digests() as digest:
        facts = _facts(pair, reduced, digest)
    described = lora.describe(parameters, settings, pair.naming, anchored=is_ambiguous(
        pair.shapes, request.lora, pair.family.lora.presets))
    write_lora(request.output, tensors, {**facts, **described})
    return Written(output=request.output, layers=reduced, size=request.output.stat().st_size,
                   notes=tuple(_notes(pair)))


def _notes(pair: Pair) -> list[str]:
    """What of the difference the file does not hold, and what in it is no training."""
    request, held = pair.request, {f"{name}.weight" for name in pair.layers}
    notes = [*rounding(pair.base, pair.tuned, held)]
    notes += beside(pair.base, pair.tuned, {name: shape for name, shape in pair.shapes.items() if name not in held})
    if not request.run:
        for name in _components(request.base, request.tuned, pair.family):
            first, second = (weighted_files(model, name) for model in (request.base, request.tuned))
            one, other = stored_in(first), stored_in(second)
            shapes = {each: shape for each, shape in shapes_in(one.tensors).items()
                      if each in other.tensors and other.tensors[each].shape == shape}
            if not shapes:
                notes.append(f"{request.tuned.name} and {request.base.name} name the tensors of their "
                             f"{name.replace('_', ' ')} differently, so these are not compared")
            notes += beside(one, other, shapes, component=name.replace("_", " "))
        before, after = (prediction_of(model, pair.family) for model in (request.base, request.tuned))
        if before != after:
            notes.append(f"{request.tuned.name} predicts {after}, {request.base.name} {before}: what draws with the "
                         "LoRA has to be told")
    return notes


def _components(base: Model, tuned: Model, family: Family) -> list[str]:
    """The text encoders and the VAE that both have, in files that are not the same."""
    names = [name for name in family.components if name.startswith("text_encoder") or name == "vae"]

    def files_of(model: Model, name: str) -> tuple[Path, ...]:
        try:
            return weighted_files(model, name).weights
        except ModelError:  # one without it is compared without it
            return ()

    found = []
    for name in names:
        first, second = files_of(base, name), files_of(tuned, name)
        same = len(first) == len(second) and all(one.samefile(other) for one, other in zip(first, second, strict=True))
        if first and second and not same:
            found.append(name)
    return found


def _shapes(request: ExtractRequest, family: Family, base: Stored, tuned: Stored) -> Shapes:
    """The shapes of both denoisers' weights. Raises `ModelError` unless they are the same."""
    one, other = ({name: shape for name, shape in shapes_in(each.tensors).items() if name not in family.buffers}
                  for each in (base, tuned))
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            seen, expected = (f"shape {list(shapes[name])}" if name in shapes else "no such tensor"
                              for shapes in (other, one))
            raise ModelError(f"{request.tuned} has '{name[:80]}' with {seen}, but {request.base} with {expected}",
                             hint="name models of one architecture")
    return one


def _adaptable(shape: tuple[int, ...]) -> bool:
    """Whether a LoRA can change a layer: not one that convolves each channel by itself."""
    return not (len(shape) == 4 and shape[1] == 1 < shape[0])


def _groups(chosen: list[str], naming: Naming, settings: Lora) -> tuple[tuple[str, ...], ...]:
    """The layers by their layer in the file."""
    groups: dict[str, list[str]] = {}
    for name in chosen:
        where = naming.slice_of(name, naming.format_of(settings))
        groups.setdefault(name if where is None else where.name, []).append(name)
    return tuple(tuple(group) for group in groups.values())


def _difference(pair: Pair, name: str, device: torch.device) -> Directions:
    """The directions of a layer's difference. Raises `ModelError`."""
    before, after = (stored.read(f"{name}.weight", torch.float32).to(device, torch.float32)
                     for stored in (pair.base, pair.tuned))
    change = (after - before).flatten(1)
    if not bool(change.isfinite().all()):
        raise ModelError(f"'{name[:80]}' has NaN or infinity in {pair.request.tuned} or {pair.request.base}",
                         hint="name undamaged models")
    if not bool(change.any()):
        return Directions(change, change.new_zeros(0), change, 0.0)
    found = directions_of(change, pair.request.rank, 0)
    return Directions(found.left.cpu(), found.values.cpu(), found.right.cpu(), found.norm)


def _adapter(name: str, found: Directions, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's matrices under PEFT's names, in this dtype: none of their numbers is above the root of the largest
    singular value, so it can hold them."""
    up, down = found.factors(rank)
    values = {"A": down.reshape(rank, *shape[1:]), "B": up.reshape(len(up), rank, *(1 for _ in shape[2:]))}
    return {f"{name}.lora_{letter}.default.weight": value.to(dtype).contiguous() for letter, value in values.items()}


def _settings(asked: Lora, ranks: Mapping[str, int], shapes: Shapes) -> Lora:
    """The settings of a LoRA with these ranks and alphas by layer. A layer's own rule comes before that of another
    whose name ends its."""
    rank = Counter(ranks.values()).most_common(1)[0][0]
    large = [each for name, each in ranks.items() if prod(shapes[f"{name}.weight"][2:]) > 1]
    conv = Counter(large or [rank]).most_common(1)[0][0]
    rules = sorted(ranks, key=len, reverse=True) if {*ranks.values()} != {rank} else []
    return replace(asked, rank=rank, alpha=float(rank), conv_rank=conv, conv_alpha=float(conv), layers=tuple(
        {"match": name, "rank": ranks[name], "alpha": float(ranks[name])} for name in rules))


def _facts(pair: Pair, reduced: list[Reduced], digest: FileDigest) -> dict[str, str]:
    """Metadata: both models by digest, what was asked for, and what web UIs sort by."""
    request, family = pair.request, pair.family
    base = base_fingerprints(request.base, family, digest)
    tuned = digest(pair.weights) if pair.weights else base_fingerprints(request.tuned, family, digest)["denoiser"]
    made = {"name": request.tuned.name, "denoiser": tuned, "rank": request.rank, "keep": request.keep,
            "targets": request.lora.targets, "kept": round(whole(reduced), 6)}
    labels = family.labels_of(prediction_of(request.base, family), Configs(request.base))
    return {"latentry.base": json.dumps(base, sort_keys=True), "latentry.extracted": json.dumps(made),
            "modelspec.sai_model_spec": "1.0.1", "modelspec.architecture": f"{labels.architecture}/lora",
            "modelspec.implementation": "diffusers", "modelspec.title": request.output.stem,
            "ss_base_model_version": labels.version or family.name, "ss_sd_model_name": request.base.name}
