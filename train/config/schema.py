"""The settings of a run, as frozen records with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prep.batching.plan import Underfill

Method = Literal["lora", "full"]
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
