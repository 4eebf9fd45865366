"""A table of the optimizers. Torch and the libraries are imported when one is built.

All of them resume exactly: their state from step to step is in `state` and `numbers`, and is stored as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from prep.training.schema import Optimizer

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Groups = Sequence[dict[str, Any]]
StateShapes = Mapping[str, tuple[str, Shape]]  # name → dtype as safetensors spells it, and shape
_BYTES = {"F32": 4, "I64": 8, "U8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """One optimizer."""

    # Groups of parameters as torch takes them, settings, whether they are on a CUDA GPU.
    build: Callable[[Groups, Optimizer, bool], Any]
    state: Callable[[Shape], StateShapes]  # its tensors for a parameter of this shape; I64: a Python number
    numbers: Mapping[str, type] = field(default_factory=dict)  # what it changes in its groups of parameters
    library: str = ""  # module that must be installed
    extra: str = ""  # of this package, which installs it
    torch: tuple[int, int] = (2, 6)  # least version
    device: str = ""  # the only kind of device that it works on; empty: any
    elementwise: bool = False  # whether each number of a weight is updated for itself: any part of it, as the whole
    # Whether, on a CUDA GPU, it leaves out an update for which a tensor on the GPU, its `found_inf`, is not 0.
    skips_on_inf: bool = False
    paged: bool = False  # whether what it keeps moves to host memory where a GPU is full
    averages: bool = False  # whether it averages the weights itself: they are then not those of its steps


def state_bytes(spec: OptimizerSpec, shapes: Sequence[Shape]) -> int:
    """The bytes of the optimizer's state for parameters of these shapes."""
    return sum(_BYTES[dtype] * prod(sides) for shape in shapes for dtype, sides in spec.state(shape).values())


# ---- what each keeps -------------------------------------------------------------------------------------------------

_STEP: StateShapes = {"step": ("I64", ())}
_LEAST_8BIT = 4096  # bitsandbytes keeps smaller parameters' moments in float32
_BLOCK = 256  # numbers with a common scale


def _adamw_state(shape: Shape) -> StateShapes:
    return {"step": ("F32", ()), "exp_avg": ("F32", shape), "exp_avg_sq": ("F32", shape)}


def _8bit_state(shape: Shape) -> StateShapes:
    if prod(shape) < _LEAST_8BIT:
        return {**_STEP, "state1": ("F32", shape), "state2": ("F32", shape)}
    blocks = (-(-prod(shape) // _BLOCK),)
    return {**_STEP, "state1": ("U8", shape), "state2": ("U8", shape), "absmax1": ("F32", blocks),
            "absmax2": ("F32", blocks)}


def _schedule_free_state(shape: Shape) -> StateShapes:
    return {"z": ("F32", shape), "exp_avg_sq": ("F32", shape)}


def _adafactor_state(shape: Shape) -> StateShapes:
    if len(shape) < 2:
        return {**_STEP, "exp_avg_sq": ("F32", shape)}
    return {**_STEP, "exp_avg_sq_row": ("F32", shape[:-1]), "exp_avg_sq_col": ("F32", (*shape[:-2], shape[-1]))}


def _lion_state(shape: Shape) -> StateShapes:
    return {"exp_avg": ("F32", shape)}


def _muon_state(shape: Shape) -> StateShapes:
    return {"momentum_buffer": ("F32", shape)} if len(shape) == 2 else _adamw_state(shape)


def _prodigy_state(shape: Shape) -> StateShapes:
    flat = (prod(shape),)
    return {**_STEP, "s": ("F32", flat), "p0": ("F32", flat), "exp_avg": ("F32", shape), "exp_avg_sq": ("F32", shape)}


# ---- how each is built -----------------------------------------------------------------------------------------------


def _adamw(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Loshchilov & Hutter 2019, Algorithm 2; fused into few kernels on a GPU."""
    from torch.optim import AdamW

    return AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
                 fused=on_gpu or None)


def _adamw_8bit(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """AdamW with moments in 8 bits, scaled by blocks (Dettmers et al. 2022)."""
    from bitsandbytes.optim.adamw import AdamW8bit

    kind: Any = AdamW8bit
    return kind(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
                min_8bit_size=_LEAST_8BIT, is_paged=settings.name == "adamw-8bit-paged")


def _schedule_free(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Defazio et al. 2024, Algorithm 1. The parameters are its y, at which gradients are taken; see `average`."""
    from schedulefree import AdamWScheduleFree

    made = AdamWScheduleFree(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps,
                             weight_decay=settings.weight_decay)
    made.train()
    return made


def _adafactor(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Shazeer & Stern 2018, Algorithm 4, with the learning rate as it is, as other trainers use it.

    Torch's own always multiplies it by the size of the weights, which a LoRA's lora_B begins without.
    """
    from transformers import optimization

    kind: Any = optimization.Adafactor
    return kind(groups, lr=settings.lr, weight_decay=settings.weight_decay, scale_parameter=False, relative_step=False,
                warmup_init=False)


def _lion(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Chen et al. 2023, Algorithm 2. Every step sets the rate; a rate of 0 is not accepted here."""
    from lion_pytorch import Lion

    return Lion(groups, lr=settings.lr or 1.0, betas=settings.betas, weight_decay=settings.weight_decay)


def _muon(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Jordan et al. 2024 for matrices, with updates as large as AdamW's (Liu et al. 2025); AdamW for the rest."""
    from torch.optim import Muon

    def those(are_matrices: bool) -> Groups:
        chosen = [{**group, "params": [value for value in group["params"] if (value.ndim == 2) == are_matrices]}
                  for group in groups]
        return [group for group in chosen if group["params"]]

    matrices, rest = those(True), those(False)
    made = Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay, momentum=settings.momentum,
                adjust_lr_fn="match_rms_adamw") if matrices else None
    other = _adamw(rest, settings, on_gpu) if rest else None
    return made if other is None else other if made is None else Both(made, other)


def _prodigy(groups: Groups, settings: Optimizer, on_gpu: bool) -> Any:
    """Mishchenko & Defazio 2024, Algorithm 4. It prints a line if it is built with weight decay, so that comes later.
    """
    from prodigyopt import Prodigy

    decay = [group.get("weight_decay", settings.weight_decay) for group in groups]
    made = Prodigy(groups, lr=settings.lr or 1.0, betas=settings.betas, eps=settings.eps, d_coef=settings.d_coef,
                   use_bias_correction=settings.bias_correction, safeguard_warmup=settings.safeguard_warmup)
    for group, own in zip(made.param_groups, decay, strict=True):
        group["weight_decay"] = own
    return made


class Both:
    """Two optimizers of different parameters, used like one."""

    def __init__(self, first: Any, second: Any) -> None:
        self._parts = (first, second)
        second.state = first.state  # by parameter
        self.state = first.state
        self.param_groups = [*first.param_groups, *second.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)


def average(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averaged weights of a schedule-free optimizer: x in y = (1 - beta) z + beta x.

    Its own `eval` computes them in place, and its `train` returns to y, but not to the same bits.
    """
    beta = optimizer.param_groups[0]["betas"][0]
    weights = {}
    for name, value in parameters.items():
        z = optimizer.state.get(value, {}).get("z")
        weights[name] = value.detach().clone() if z is None else value.detach().lerp(z, 1 - 1 / beta)
    return weights


TABLE: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(build=_adamw, state=_adamw_state, elementwise=True, skips_on_inf=True),
    "adamw-8bit": OptimizerSpec(build=_adamw_8bit, state=_8bit_state, library="bitsandbytes", extra="bnb"),
    "adamw-8bit-paged": OptimizerSpec(build=_adamw_8bit, state=_8bit_state, library="bitsandbytes", extra="bnb",
                                      device="cuda", paged=True),
    "adamw-schedule-free": OptimizerSpec(build=_schedule_free, state=_schedule_free_state, library="schedulefree",
                                         extra="optimizers", averages=True, elementwise=True,
                                         numbers={"k": int, "weight_sum": float, "lr_max": float}),
    "adafactor": OptimizerSpec(build=_adafactor, state=_adafactor_state),
    "lion": OptimizerSpec(build=_lion, state=_lion_state, library="lion_pytorch", extra="optimizers", elementwise=True),
    "muon": OptimizerSpec(build=_muon, state=_muon_state, torch=(2, 9)),
    "prodigy": OptimizerSpec(build=_prodigy, state=_prodigy_state, library="prodigyopt", extra="optimizers",
                             numbers={"k": int, "d": float, "d_max": float, "d_numerator": float}),
}
