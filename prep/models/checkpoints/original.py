"""What diffusers and transformers call the tensors of a single file's components.

The names are those of a model's authors, of ComfyUI's checkpoints, or already diffusers'. diffusers' own functions
rename; here they are first run on tensors without data, so that all is compared before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from prep.models.checkpoints.parts import DENOISER, OF_OPEN_CLIP, is_harmless

Weights = dict[str, Tensor]
Convert = Callable[[Weights], Weights]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How tensors of a file become those of a component."""

    names: Mapping[str, str]  # as `convert` wants to find them → as the file has them
    convert: Convert


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a component's tensors in a file fit into the model that a config describes."""

    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)  # under their new names
    made: Mapping[str, Made] = field(default_factory=dict)  # by the same names
    missing: tuple[str, ...] = ()  # that the model has, and the file has not
    misshapen: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # of the file, by its names
    common: int = 0  # names that the model has, too

    @property
    def whole(self) -> bool:
        """Whether every tensor has its place."""
        return not (self.missing or self.misshapen or self.unread)


def fit(given: Weights, way: Way, model: Any) -> Fit:
    """How tensors of a file, without data, fit into `model`, which has none either, once they are converted."""
    recorder = _Recorder(given, way.names)
    with recorder:
        made = dict(way.convert(dict(given)))
    expected = {_bare(name): tuple(value.shape) for name, value in model.state_dict().items()}
    tied, names = _tied(model), {_bare(name): name for name in made}
    found = {name: tuple(made[names[name]].shape) for name in expected.keys() & names.keys()}
    read = frozenset[str]().union(*(recorder.of(made[names[name]]).names() for name in found))
    placed = {name: value for name, value in made.items() if _bare(name) in expected}
    return Fit(layout={name: (value.dtype, tuple(value.shape)) for name, value in placed.items()},
               made={name: recorder.of(value) for name, value in placed.items()}, common=len(found),
               missing=tuple(sorted(name for name in expected.keys() - found.keys()
                                    if not tied.get(name, frozenset()) & found.keys())),
               misshapen=tuple(sorted(name for name, shape in found.items() if shape != expected[name])),
               unread=tuple(sorted(there for there in way.names.values()
                                   if there not in read and not is_harmless(there))))


def _bare(name: str) -> str:
    """A tensor's name without what transformers writes before those of CLIP, or not."""
    return name.removeprefix("text_model.")


def _tied(model: Any) -> dict[str, frozenset[str]]:
    """For each tensor that has several names: all of them."""
    same: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        same.setdefault(id(value), []).append(_bare(name))
    return {name: frozenset(names) for names in same.values() if len(names) > 1 for name in names}


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """How a tensor is made of those of a file: the operation, or the name of the one that it is."""

    func: Any  # None: it is the tensor `name`
    name: str = ""
    args: Any = ()  # with these records in the place of tensors
    kwargs: Any = field(default_factory=dict)
    output: int | None = None  # which, of an operation that returns several

    def names(self) -> frozenset[str]:
        """The names of the file's tensors that it is made of."""
        inner = (one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Made))
        return frozenset([self.name] if self.func is None else []).union(*(one.names() for one in inner))

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor, in host memory; `read` reads those of the file."""
        if self.func is None:
            return read(self.name)
        args, kwargs = tree_map(lambda one: one.value(read) if isinstance(one, Made) else one, (self.args, self.kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        found = self.func(*args, **kwargs)
        made: Tensor = found if self.output is None else found[self.output]
        return made


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, tensors that are made of others remember how."""

    def __init__(self, given: Weights, names: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = {id(value): Made(None, names[name]) for name, value in given.items()}
        self._alive: list[Any] = []  # so that no other tensor gets the number of one of these

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        taken = tree_map(lambda one: self.of(one) if isinstance(one, Tensor) else one, (args, kwargs or {}))
        if isinstance(found, Tensor):
            self._made[id(found)] = Made(func, "", taken[0], taken[1])
        else:
            self._made |= {id(each): Made(func, "", taken[0], taken[1], number) for number, each in enumerate(found)}
        self._alive.append(found)
        return found

    def of(self, value: Tensor) -> Made:
        """How `value` was made."""
        return self._made[id(value)]


def ways_of_diffusers(kind: Any, config: Mapping[str, Any], part: Mapping[str, str]) -> Iterator[Way]:
    """How a denoiser's or a VAE's tensors may become those of the class `kind` with this `config`: they have its names,
    or their authors', if diffusers knows these.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES  # here: directories need none of it

    yield Way(names=part, convert=dict)
    table = cast("Mapping[str, Mapping[str, Any]]", SINGLE_FILE_LOADABLE_CLASSES)
    found = next((table[one.__name__] for one in kind.__mro__ if one.__name__ in table), None)
    if found is not None:
        before = DENOISER[0] if kind.__name__ == "UNet2DConditionModel" else ""
        yield Way(names={before + name: there for name, there in part.items()},
                  convert=lambda weights: found["checkpoint_mapping_fn"](checkpoint=weights, config=dict(config)))


def ways_of_encoder(prefix: str, part: Mapping[str, str], model: Any) -> Iterator[Way]:
    """How the tensors of a text encoder below `prefix` may become those of `model`."""
    if OF_OPEN_CLIP.fullmatch(prefix):
        from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint  # as above

        convert: Any = convert_open_clip_checkpoint
        yield Way(names={prefix + name: there for name, there in part.items()},
                  convert=lambda weights: convert(model, weights, prefix=prefix))
        return

    def unprojected(weights: Weights) -> Weights:
        """With a projection that changes nothing: SD3 takes the vector of CLIP-L as it is."""
        some, side = next(iter(weights.values())), model.config.projection_dim
        return {**weights, "text_projection.weight": torch.eye(side).to(some.device, some.dtype)}

    projects = "clip_l" in prefix and hasattr(model, "text_projection")
    yield Way(names=part, convert=unprojected if projects else dict)
    yield Way(names={name.removeprefix("model."): there for name, there in part.items()}, convert=dict)
