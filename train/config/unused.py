"""Finds settings that have no effect beside the others: they are accepted, but whoever set them should know."""

from __future__ import annotations

from collections.abc import Iterator

from train.config.load import by_name
from train.config.schema import Config
from train.config.table import SETTINGS

_FOLLOWING = ("lora.alpha", "lora.conv_rank", "lora.conv_alpha")  # the rank, unless they were set


def unused(config: Config, *, masked: bool, large: bool) -> Iterator[str]:
    """A sentence for each reason why settings that differ from their defaults have no effect.

    `masked`: whether masks are used; `large`: whether convolutions larger than 1x1 get an adapter.
    """
    set_names = [name for name, value in by_name(config).items() if value != SETTINGS[name].default]
    for names, why in _reasons(config, masked, large):
        found = [name for name in set_names if name in names]
        if found:
            yield f"{' and '.join(found)} {'have' if len(found) > 1 else 'has'} no effect: {why}"


def _reasons(config: Config, masked: bool, large: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings, and why they have no effect."""
    lora, draws, schedule = config.lora, config.timesteps, config.schedule
    if config.method == "full":
        yield _of("lora", but=_FOLLOWING), "method is 'full'"
    else:
        yield _of("full"), "method is 'lora'"
        if not large and (lora.conv_rank, lora.conv_alpha) != (lora.rank, lora.alpha):
            yield ("lora.conv_rank", "lora.conv_alpha"), ("lora.targets has no convolution larger than 1x1; "
                                                          "kohya-conv has those of a UNet")
    if schedule.name == "constant":
        yield ("schedule.floor",), "schedule.name is 'constant'"
    if schedule.name != "cosine-restarts":
        yield ("schedule.cycles",), f"schedule.name is '{schedule.name}', expected 'cosine-restarts' for it"
    if schedule.name != "polynomial":
        yield ("schedule.power",), f"schedule.name is '{schedule.name}', expected 'polynomial' for it"
    if draws.distribution != "logit-normal":
        yield ("timesteps.mean", "timesteps.std"), (f"timesteps.distribution is '{draws.distribution}', expected "
                                                    "'logit-normal' for it")
    if draws.distribution != "mode":
        yield ("timesteps.mode_scale",), f"timesteps.distribution is '{draws.distribution}', expected 'mode' for it"
    if draws.shift_by_size != "area":
        yield ("timesteps.base_side",), f"timesteps.shift_by_size is '{draws.shift_by_size}', expected 'area' for it"
    if not config.noise.pyramid:
        yield ("noise.pyramid_levels",), "noise.pyramid is 0"
    if not config.ema.decay:
        yield ("ema.device",), "ema.decay is 0"
    if not masked:
        yield ("loss.unmasked_weight", "loss.normalize_area"), "no masks are used"


def _of(section: str, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(name for name in SETTINGS if name.startswith(f"{section}.") and name not in but)
