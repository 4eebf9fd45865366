"""What each setting may be: one checking function a key, `(value, name) → value`, raising `prep.parse.Unparsed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prep.parse import Unparsed, expect, list_of, one_of, within

Check = Callable[[Any, str], Any]


def whole(low: int, high: int = 1 << 40) -> Check:
    """A whole number in [low, high]."""

    def check(value: Any, where: str) -> int:
        within(expect(value, int, where), low, high, where)
        return int(value)

    return check


def number(low: float, high: float = 1e12) -> Check:
    """A number in [low, high]."""

    def check(value: Any, where: str) -> float:
        given = expect(value, float, where)
        within(given, low, high, where)
        return given

    return check


def choice(options: Iterable[str]) -> Check:
    """One of `options`."""
    known = tuple(options)
    return lambda value, where: one_of(value, known, where)


def switch(value: Any, where: str) -> bool:
    """True or false."""
    return expect(value, bool, where)


def _pair(each: Check) -> Check:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        pair = list_of(list(value) if isinstance(value, tuple) else value, each, where)
        if len(pair) != 2:
            raise Unparsed(f"{where} has {len(pair)} values, expected 2")
        return tuple(pair)

    return check


def _size(value: Any, where: str) -> tuple[Any, ...]:
    """(width, height) in pixels; 8 of them make a latent cell."""
    size: tuple[Any, ...] = _pair(whole(8, 8192))(value, where)
    if any(side % 8 for side in size):
        raise Unparsed(f"{where} is {list(size)}, expected [width, height] in multiples of 8")
    return size


def _targets(value: Any, where: str) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return one_of(value, ("attention", "all-linear"), where)
    names = list_of(list(value) if isinstance(value, tuple) else value, lambda each, at: expect(each, str, at), where)
    if not names or not all(names):
        raise Unparsed(f"{where} is {names}, expected module names like 'to_q', or 'attention' or 'all-linear'")
    return tuple(names)


CHECKS: Mapping[str, Check] = {
    "method": choice(("lora", "full")),
    "steps": whole(1),
    "epochs": whole(1),
    "batch_size": whole(1, 1 << 20),
    "micro_batch": whole(1, 1 << 20),
    "underfill": choice(("drop", "partial", "repeat")),
    "seed": whole(0, (1 << 63) - 1),
    "precision": choice(("auto", "bf16", "fp32")),
    "prediction": choice(("manifest", "epsilon", "v_prediction")),
    "caption_dropout": number(0, 1),
    "gradient_checkpointing": switch,
    "lora.rank": whole(1, 4096),
    "lora.alpha": number(1e-6, 1e6),
    "lora.dropout": number(0, 0.99),
    "lora.targets": _targets,
    "lora.format": choice(("kohya", "diffusers")),
    "optimizer.name": choice(("adamw",)),
    "optimizer.lr": number(0, 100),
    "optimizer.betas": _pair(number(0, 0.999999)),
    "optimizer.eps": number(1e-30, 1),
    "optimizer.weight_decay": number(0, 100),
    "optimizer.clip": number(0),
    "schedule.name": choice(("constant", "cosine")),
    "schedule.warmup": whole(0),
    "loss.masked": switch,
    "loss.unmasked_weight": number(0, 1),
    "loss.normalize_area": switch,
    "loss.min_snr": number(0, 1e6),
    "ema.decay": number(0, 0.9999999),
    "validation.every": whole(0),
    "validation.timesteps": whole(1, 1000),
    "sample.every": whole(0),
    "sample.steps": whole(1, 1000),
    "sample.guidance": number(1, 100),
    "sample.seed": whole(0, (1 << 63) - 1),
    "sample.size": _size,
    "checkpoint.every": whole(0),
    "checkpoint.keep": whole(0),
}
