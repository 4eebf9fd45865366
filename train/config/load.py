"""Settings of a training run: `train.toml` and command options → one frozen record with every value filled in.

Unknown keys are errors with a suggestion; a value out of range names its key, what it is and what was wanted.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from prep.errors import ConfigError
from prep.parse import Unparsed, expect, known_keys
from train.config.checks import CHECKS

Method = Literal["lora", "full"]
Underfill = Literal["drop", "partial", "repeat"]
Precision = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters on the denoiser."""

    rank: int = 16
    alpha: float = 16.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "attention"  # attention | all-linear | ends of module names
    format: Literal["kohya", "diffusers"] = "kohya"  # names in the file; diffusers reads both, ComfyUI kohya's


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2)."""

    name: Literal["adamw"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of the step's gradient; 0: never clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate over the steps, as a factor of `optimizer.lr`."""

    name: Literal["constant", "cosine"] = "constant"
    warmup: int = 0  # steps of linear rise before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What is minimised: squared error of the prediction, weighted by mask, sample and timestep."""

    masked: bool = False
    unmasked_weight: float = 0.1  # of a cell whose mask is 0; one whose mask is 1 has weight 1
    normalize_area: bool = False  # divide by the masks' sum instead of the number of cells
    min_snr: float = 0.0  # gamma of Hang et al. 2023, equation 6; 0: off, 5 is what they use


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """An exponential moving average of what is trained; when on, it is what the run hands out."""

    decay: float = 0.0  # 0: off


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The loss on the validation samples, with noise and timesteps that never change."""

    every: int = 200  # steps; 0: never
    timesteps: int = 4  # how many per sample, evenly spread over the noise schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Pictures of the manifest's prompts while it trains."""

    every: int = 200  # training steps; 0: never
    steps: int = 25  # of the sampler
    guidance: float = 7.5  # 1: none
    seed: int = 0
    size: tuple[int, int] | None = None  # (width, height) in pixels; None: the bucket with the most samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When the whole state is kept."""

    every: int = 500  # steps; 0: only the last
    keep: int = 3  # newest ones that stay; 0: all


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    method: Method = "lora"
    steps: int | None = None  # None: as many as `epochs` have
    epochs: int | None = None  # None: `steps` decides
    batch_size: int = 4  # samples per optimizer step
    micro_batch: int = 4  # samples per forward pass
    underfill: Underfill = "partial"
    seed: int = 0
    precision: Precision = "auto"  # auto: bf16 where the device has it, else fp32
    prediction: Literal["manifest", "epsilon", "v_prediction"] = "manifest"
    caption_dropout: float = 0.0  # how often a caption gives way to the unconditional row
    gradient_checkpointing: bool = False
    lora: Lora = field(default_factory=Lora)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    ema: Ema = field(default_factory=Ema)
    validation: Validation = field(default_factory=Validation)
    sample: Sampling = field(default_factory=Sampling)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


STEPS = 2000  # when neither steps nor epochs are given
_INSTEAD = {"steps": "epochs", "epochs": "steps"}
_SECTIONS: Mapping[str, Any] = {
    "lora": Lora, "optimizer": Optimizer, "schedule": Schedule, "loss": Loss, "ema": Ema, "validation": Validation,
    "sample": Sampling, "checkpoint": Checkpoint,
}  # fmt: skip


def load(path: Path | None, overrides: Mapping[str, Any] | None = None, start: Mapping[str, Any] | None = None,
         ) -> Config:
    """The settings in the file at `path`, or of `start`, changed by `overrides` (`{"lora.rank": 8}`).

    Raises `ConfigError`.
    """
    table = copy.deepcopy(dict(start or {})) if path is None else _read(path)
    for name, value in (overrides or {}).items():
        _put(table, name, value)
        if name in _INSTEAD and _INSTEAD[name] not in (overrides or {}):
            table.pop(_INSTEAD[name], None)  # an option that counts the other way replaces the file's
    return parse(table, "the options" if path is None else str(path))


def parse(table: Mapping[str, Any], where: str) -> Config:
    """`table` (as TOML gives it) as settings. Raises `ConfigError` with `where` in its message."""
    try:
        return _together(_build(Config, table, where, ""))
    except Unparsed as error:
        raise ConfigError(str(error), hint="train run --help and manifests/train.toml list every setting") from None


def as_table(config: Config) -> dict[str, Any]:
    """`config` as nested plain values; `parse` of it gives `config` again."""
    return {name: value for name, value in _plain(asdict(config)).items() if value is not None}


def option(text: str) -> tuple[str, Any]:
    """`("lora.rank", 8)` from `"lora.rank=8"`: a TOML value, or else a string. Raises `ConfigError`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set is {text!r}, expected NAME=VALUE", hint="for example: --set lora.rank=8")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # of numbers with more digits than Python reads, too
        return name.strip(), value.strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    section, dot, key = name.partition(".")
    if not dot:
        table[name] = value
        return
    inner = table.setdefault(section, {})
    if isinstance(inner, dict):  # anything else is told by `parse`
        inner[key] = value


def _build(record: Any, table: Mapping[str, Any], where: str, prefix: str) -> Any:
    known_keys(table, (each.name for each in fields(record)), f"[{prefix}] of {where}" if prefix else where)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if record is Config and name in _SECTIONS:
            values[name] = _build(_SECTIONS[name], expect(value, dict, f"[{name}] of {where}"), where, name)
        else:
            values[name] = CHECKS[f"{prefix}.{name}" if prefix else name](value, f"{prefix}.{name}".lstrip("."))
    if record is Config and "micro_batch" not in values and "batch_size" in values:
        values["micro_batch"] = values["batch_size"]
    return record(**values)


def _together(config: Config) -> Config:
    """`config`, when its values fit each other."""
    if config.steps is not None and config.epochs is not None:
        raise Unparsed(f"steps is {config.steps} and epochs is {config.epochs}, expected one of them")
    if config.batch_size % config.micro_batch:
        raise Unparsed(f"batch_size is {config.batch_size}, expected a multiple of micro_batch {config.micro_batch}")
    if config.steps is None and config.epochs is None:
        return Config(**{each.name: getattr(config, each.name) for each in fields(config)} | {"steps": STEPS})
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    return list(value) if isinstance(value, tuple) else value
