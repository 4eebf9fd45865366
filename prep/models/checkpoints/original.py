"""Which tensors of a single file are of which component, and what diffusers and transformers call them.

The names are those of a model's authors, of ComfyUI's checkpoints, or already diffusers'. diffusers' own functions
rename; here they are first run on tensors without data, so that all is compared before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import SD_2_TEXT_ENCODER_KEYS_TO_IGNORE, convert_open_clip_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Weights = dict[str, Tensor]
Convert = Callable[[Weights], Weights]

DENOISER, VAE = ("model.diffusion_model.", "diffusion_model."), ("first_stage_model.", "vae.")
# Text encoders: with the names of transformers, or those of OpenCLIP.
_OF_TRANSFORMERS = re.compile(r"cond_stage_model\.transformer\.|conditioner\.embedders\.\d+\.transformer\."
                              r"|text_encoders\.\w+\.transformer\.")
_OF_OPEN_CLIP = re.compile(r"cond_stage_model\.model\.|conditioner\.embedders\.\d+\.model\.")
_ONLY_VAE = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "bn.")  # all names of a file of a VAE

# What files have beside their components, and why leaving it out changes nothing.
HARMLESS: Mapping[re.Pattern[str], str] = {
    re.compile(r"model_ema\."): "a moving average of the denoiser, which is there beside it",
    re.compile(r"(\w+_)?alphas_cumprod(_prev)?$"): "the noise schedule, which --config has",
    re.compile(r"(betas|sigmas|log_sigmas|scale_factor|logvar|lvlb_weights|posterior_\w+)$"): "as above",
    re.compile(r"(denoiser|model_sampling)\.\w+$"): "as above",
    re.compile(r"(first_stage_model\.|vae\.)?loss\."): "what judged a VAE in its training",
    re.compile(r"(.+\.)?position_ids$"): "counts up from 0",
    re.compile(r"(.+\.)?logit_scale$"): "CLIP's, for comparing pictures with texts",
    re.compile(r"(.+\.)?attn_mask$"): "computed from the length",
    re.compile(r"(.+\.)?spiece_model$"): "a tokenizer, which --config has",
    re.compile(r"text_encoders\.clip_l\.transformer\.text_projection\.weight$"): "SD3 does not project this vector",
    re.compile(r"((model\.)?diffusion_model\.)?norm_final\.weight$"): "of Lumina 2 and Z-Image, whose code ignores it",
    re.compile(r"((model\.)?diffusion_model\.)?pos_embed$"): "of SANA, whose positions are computed; SD3 reads its own",
    re.compile(r"((model\.)?diffusion_model\.)?y_embedder\.y_embedding$"): "of SANA, for no caption: that is encoded",
    re.compile(r"(v_pred|ztsnr)$"): "a mark, which is compared with the scheduler's config",
}


def is_harmless(name: str) -> bool:
    """Whether leaving the tensor `name` of a file out changes nothing."""
    return name in SD_2_TEXT_ENCODER_KEYS_TO_IGNORE or any(pattern.match(name) for pattern in HARMLESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The names of a file's tensors by component, each without its prefix → as the file has it."""

    denoiser: Mapping[str, str]
    vae: Mapping[str, str]
    encoders: Mapping[str, Mapping[str, str]]  # by prefix


def parts_of(names: Iterable[str]) -> Parts:
    """The components that a file with tensors of these `names` has. CLIP-L comes first, as in pipelines."""
    names = sorted(names, key=lambda name: ("clip_l" not in name, name))

    def below(prefixes: tuple[str, ...]) -> dict[str, str]:
        return {name.removeprefix(prefix): name for prefix in prefixes for name in names if name.startswith(prefix)}

    denoiser, vae = below(DENOISER), below(VAE)
    encoders: dict[str, dict[str, str]] = {}
    for name in names:
        found = _OF_TRANSFORMERS.match(name) or _OF_OPEN_CLIP.match(name)
        if found:
            encoders.setdefault(found[0], {})[name.removeprefix(found[0])] = name
    if not (denoiser or vae or encoders):  # a file of one component, without a prefix
        only = {name: name for name in names}
        of_vae = all(name.startswith(_ONLY_VAE) for name in names)
        return Parts(denoiser={} if of_vae else only, vae=only if of_vae else {}, encoders={})
    return Parts(denoiser=denoiser, vae=vae, encoders=encoders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How tensors of a file become those of a component."""

    names: Mapping[str, str]  # as `convert` wants to find them → as the file has them
    convert: Convert


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a component's tensors in a file fit into the model that a config describes."""

    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)  # under their new names
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
    origins = _Origins(given)
    with origins:
        made = dict(way.convert(dict(given)))
    expected = {_bare(name): tuple(value.shape) for name, value in model.state_dict().items()}
    tied, names = _tied(model), {_bare(name): name for name in made}
    found = {name: tuple(made[names[name]].shape) for name in expected.keys() & names.keys()}
    read = frozenset[str]().union(*(origins.of(made[names[name]]) for name in found))
    return Fit(layout={name: (value.dtype, tuple(value.shape)) for name, value in made.items()
                       if _bare(name) in expected}, common=len(found),
               missing=tuple(sorted(name for name in expected.keys() - found.keys()
                                    if not tied.get(name, frozenset()) & found.keys())),
               misshapen=tuple(sorted(name for name, shape in found.items() if shape != expected[name])),
               unread=tuple(sorted(there for name, there in way.names.items()
                                   if name not in read and not is_harmless(there))))


def _bare(name: str) -> str:
    """A tensor's name without what transformers writes before those of CLIP, or not."""
    return name.removeprefix("text_model.")


def _tied(model: Any) -> dict[str, frozenset[str]]:
    """For each tensor that has several names: all of them."""
    same: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        same.setdefault(id(value), []).append(_bare(name))
    return {name: frozenset(names) for names in same.values() if len(names) > 1 for name in names}


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, tensors that are made of others remember of which."""

    def __init__(self, given: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(value): frozenset([name]) for name, value in given.items()}
        self._alive: list[Any] = []  # so that no other tensor gets the number of one of these

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        names = frozenset[str]().union(*(self.of(each) for each in tree_leaves((args, kwargs))))
        self._names |= {id(each): names for each in tree_leaves(made)}
        self._alive.append(made)
        return made

    def of(self, value: Any) -> frozenset[str]:
        """The names of the given tensors that `value` was made of."""
        return self._names.get(id(value), frozenset())


def ways_of_diffusers(kind: Any, config: Mapping[str, Any], part: Mapping[str, str]) -> Iterator[Way]:
    """How a denoiser's or a VAE's tensors may become those of the class `kind` with this `config`: they have its names,
    or their authors', if diffusers knows these.
    """
    yield Way(names=part, convert=dict)
    table = cast("Mapping[str, Mapping[str, Any]]", SINGLE_FILE_LOADABLE_CLASSES)
    found = next((table[one.__name__] for one in kind.__mro__ if one.__name__ in table), None)
    if found is not None:
        before = DENOISER[0] if kind.__name__ == "UNet2DConditionModel" else ""
        yield Way(names={before + name: there for name, there in part.items()},
                  convert=lambda weights: found["checkpoint_mapping_fn"](checkpoint=weights, config=dict(config)))


def ways_of_encoder(prefix: str, part: Mapping[str, str], model: Any) -> Iterator[Way]:
    """How the tensors of a text encoder below `prefix` may become those of `model`."""
    if _OF_OPEN_CLIP.fullmatch(prefix):
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
