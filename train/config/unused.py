"""Finds settings that have no effect beside the others: they are accepted, but whoever set them should know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prep.formatting import listed
from prep.training.checks import IN_HOST
from prep.training.schema import Config
from prep.training.table import SETTINGS
from train.config.load import by_name

_Reasons = Iterable[tuple[tuple[str, ...], str]]  # settings, and why they have no effect


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What decides beside the settings: the data and the model."""

    masked: bool  # whether masks are used
    prior: bool  # whether there are samples of role "prior"
    referring: bool  # whether there are reference pictures
    held_out: bool  # whether there are validation samples
    large: bool  # whether convolutions larger than 1x1 get an adapter
    convolves: bool  # whether the denoiser has convolutions
    rescaled: bool  # whether its noise schedule ends in pure noise by itself


def unused(config: Config, facts: Facts) -> Iterator[str]:
    """A sentence for each reason why settings that differ from their defaults have no effect."""
    return _told(config, (*_of_method(config, facts), *_of_optimizer(config), *_of_draws(config, facts),
                          *_of_evaluation(config, facts)))


def unused_on(config: Config, device: str | None, world: int | None) -> Iterator[str]:
    """The same for the kind of device and the number of processes; None: not known."""
    yield from _told(config, _of_computer(config, device, world))
    if device in ("cpu", "mps") and config.gradient_checkpointing == IN_HOST:
        yield f"gradient_checkpointing '{IN_HOST}' is as true: the device is {device}, whose memory is the system's"


def depends_on_device(config: Config) -> bool:
    """Whether it depends on the kind of device that a setting has an effect."""
    return any(True for kind in ("cpu", "mps") for _ in unused_on(config, kind, None))


def _told(config: Config, reasons: _Reasons) -> Iterator[str]:
    set_names = [name for name, value in by_name(config).items() if value != _usual(config, name)]
    for names, why in reasons:
        ineffective = [name for name in set_names if name in names]
        if ineffective:
            yield f"{listed(ineffective)} {'have' if len(ineffective) > 1 else 'has'} no effect: {why}"


def _usual(config: Config, name: str) -> object:
    """The value of a setting that was not set."""
    lora = config.lora
    following = {"lora.alpha": lora.rank, "lora.conv_rank": lora.rank,
                 "lora.conv_alpha": lora.alpha if lora.conv_rank == lora.rank else lora.conv_rank}
    return following.get(name, SETTINGS[name].default)


def _of_method(config: Config, facts: Facts) -> _Reasons:
    if config.method == "full":
        yield _of("lora"), "method is 'full'"
        yield ("result.tags",), "method is 'full', and only files of a LoRA hold the counts"
    else:
        yield _of("full"), "method is 'lora'"
        if not config.base.adapter:
            yield ("base.adapter_scale",), "base.adapter is not set"
        if not facts.large:
            yield ("lora.conv_rank", "lora.conv_alpha"), ("lora.targets has no convolution larger than 1x1; "
                                                          "kohya-conv has those of a UNet")
        if config.lora.kind == "loha":
            yield ("lora.factor",), "lora.kind is 'loha', expected 'lokr' for it"
    if not facts.convolves:
        yield ("channels_last",), "the denoiser has no convolutions"


def _of_optimizer(config: Config) -> _Reasons:
    optimizer, schedule = config.optimizer, config.schedule
    if schedule.name == "constant":
        yield ("schedule.floor",), "schedule.name is 'constant'"
        if not schedule.warmup and optimizer.lr == 1 and not optimizer.bias_correction:
            yield ("optimizer.safeguard_warmup",), "the learning rate is 1 from the first step to the last"
    if schedule.name != "cosine-restarts":
        yield ("schedule.cycles",), f"schedule.name is '{schedule.name}', expected 'cosine-restarts' for it"
    if schedule.name != "polynomial":
        yield ("schedule.power",), f"schedule.name is '{schedule.name}', expected 'polynomial' for it"
    if not config.ema.decay and not config.ema.snapshots:
        yield ("ema.device",), "ema.decay is 0"


def _of_draws(config: Config, facts: Facts) -> _Reasons:
    draws = config.timesteps
    if draws.distribution != "logit-normal":
        yield ("timesteps.mean", "timesteps.std"), (f"timesteps.distribution is '{draws.distribution}', expected "
                                                    "'logit-normal' for it")
    if draws.distribution != "mode":
        yield ("timesteps.mode_scale",), f"timesteps.distribution is '{draws.distribution}', expected 'mode' for it"
    if draws.shift_by_size != "area":
        yield ("timesteps.base_side",), f"timesteps.shift_by_size is '{draws.shift_by_size}', expected 'area' for it"
    if not config.noise.pyramid:
        yield ("noise.pyramid_levels",), "noise.pyramid is 0"
    if facts.rescaled:
        yield ("zero_terminal_snr",), "the model's own noise schedule ends in pure noise"
    if not facts.masked:
        yield ("loss.unmasked_weight", "loss.normalize_area", "preserve.unmasked"), "no masks are used"
    if not config.preserve.prompted:
        yield ("preserve.prompts",), "preserve.prompted is 0"
    if not config.slider.on:
        yield ("slider.neutral", "slider.strength"), "slider.positive is slider.negative"
    if not facts.prior:
        yield ("preserve.prior",), 'no sample has the role "prior"'
    if not facts.referring:
        yield ("reference_dropout", "each_reference_dropout"), "no picture has references"


def _of_evaluation(config: Config, facts: Facts) -> _Reasons:
    if not facts.held_out:
        yield _of("validation"), "the manifest holds out no samples"
    elif not config.validation.every:
        yield ("validation.timesteps", "validation.most"), "validation.every is 0"
    if not config.evaluate.every:
        yield (tuple(name for name in _of("evaluate") if name != "evaluate.every"),
               "evaluate.every is 0, and only train evaluate uses such settings then")
    settings = ("sample.wait", "sample.encode")
    if not config.sample.every and not config.evaluate.every:
        yield settings, "sample.every is 0"
        yield (tuple(name for name in _of("sample") if name not in (*settings, "sample.every")),
               "sample.every is 0, and only train sample uses such settings then")
    elif not config.sample.wait:
        yield ("sample.encode",), "sample.wait is 0"


def _of_computer(config: Config, device: str | None, world: int | None) -> _Reasons:
    if device not in (None, "cuda"):
        yield ("tf32",), f"the device is {device}, expected an NVIDIA GPU for it"
    if device == "cpu" and (config.ema.decay or config.ema.snapshots):
        yield ("ema.device",), "the device is cpu, where the weights are as well"
    if device in ("cpu", "mps"):
        yield ("offload",), f"the device is {device}, whose memory is the system's"
    if world == 1:
        yield ("parallel.shard",), "there is one process; several are started with torchrun"


def _of(section: str) -> tuple[str, ...]:
    return tuple(name for name in SETTINGS if name.startswith(f"{section}."))
