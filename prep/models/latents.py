"""What a VAE's config says of its latents: channels, factor, and how a denoiser wants them normalized.

    normalized = (latent - shift) · scale, with scaling_factor and shift_factor as in diffusers' pipelines, or
    normalized = (latent - mean) · scale / std, with statistics for each channel, or for each number of a 2 × 2 patch

Rows hold latents as the VAE makes them; training normalizes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prep.errors import ConfigError, ModelError
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.family import Family
from prep.models.files import FETCH_AGAIN, Model, read_config
from prep.models.pipeline import weighted_files
from prep.models.weights import read_vector
from prep.parse import brief

SMALLEST = 1e-4  # smallest latent factor, and the inverse of the largest; published models have 0.1 to 2
BATCH_NORM_EPS = 1e-4  # of AutoencoderKLFlux2 in diffusers 0.42, if its config has none
Config = Mapping[str, Any]
# Where a VAE class has what normalizes its latents. config: factors, and perhaps latents_mean and latents_std;
# channels: latents_mean and latents_std; batch_norm: its weights have a batch norm over patches of 2 × 2 cells.
Normalized = Literal["config", "channels", "batch_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a VAE class's config says about its latents, and where."""

    channels: tuple[str, int]  # key and default
    halvings: Callable[[Config], int | None]  # how often sides are halved; None: not as expected
    normalized: Normalized = "config"
    posterior: bool = True  # whether it encodes to a distribution, which has a standard deviation


def _blocks(key: str, default: int) -> Callable[[Config], int | None]:
    """Each of the blocks that `key` lists, but the last, halves the sides."""
    def count(config: Config) -> int | None:
        blocks = config.get(key, [0] * default)
        return len(blocks) - 1 if isinstance(blocks, list) and 1 <= len(blocks) <= 8 else None
    return count


# Defaults are those of the classes in diffusers 0.42.
GEOMETRIES: Mapping[str, Geometry] = {
    "AutoencoderKL": Geometry(channels=("latent_channels", 4), halvings=_blocks("block_out_channels", 1)),
    "AutoencoderKLQwenImage": Geometry(channels=("z_dim", 16), halvings=_blocks("dim_mult", 4), normalized="channels"),
    "AutoencoderKLQwenImage21": Geometry(channels=("z_dim", 64), halvings=_blocks("dim_mult", 5),
                                         normalized="channels"),
    "AutoencoderDC": Geometry(channels=("latent_channels", 32), halvings=_blocks("encoder_block_out_channels", 6),
                              posterior=False),
    "AutoencoderKLFlux2": Geometry(channels=("latent_channels", 32), halvings=_blocks("block_out_channels", 4),
                                   normalized="batch_norm"),
}


def latent_facts(model: Model, family: Family) -> dict[str, Any]:
    """What normalizes the latents of the model's VAE, as the shortest decimals that read back the same.

    `scaling_factor` and `shift_factor` of its config, or else of `family`; with `mean` and `std`, lists by channel, or
    by channel, row and column of a patch, if the VAE has statistics. Raises `ModelError`, also if the VAE's latents do
    not fit the family.
    """
    path = model / "vae" / "config.json"
    config = read_config(path)
    geometry = GEOMETRIES[class_of(pipeline_index(model), "vae", model)[1]]
    _check_geometry(config, path, geometry, family)
    if family.keeps_alpha and (seen := config.get("in_channels", 4)) != 4:
        raise ModelError(f"the VAE in {path.parent} takes pictures of {brief(seen)} channels, expected 4, of which one "
                         "is their opacity", hint=FETCH_AGAIN)
    if geometry.normalized == "batch_norm":
        return {"scaling_factor": "1", "shift_factor": "0", **_batch_norm(model, config, path, family)}
    if geometry.normalized == "channels":
        return {"scaling_factor": "1", "shift_factor": "0", **_statistics(config, path, family.latent_channels)}
    found = any(config.get(key) for key in ("latents_mean", "latents_std"))
    return {"scaling_factor": _factor(config, path, "scaling_factor") or family.scaling_factor,
            "shift_factor": _factor(config, path, "shift_factor") or family.shift_factor,
            **(_statistics(config, path, family.latent_channels) if found else {})}


def require_posterior(model: Model) -> None:
    """Raises `ConfigError` unless the model's VAE encodes pictures to distributions."""
    kind = class_of(pipeline_index(model), "vae", model)[1]
    if not GEOMETRIES[kind].posterior:
        raise ConfigError(f"model.posterior is 'mean+std', but {kind}, the VAE of {model}, encodes a picture to one "
                          "latent, without a standard deviation", hint="leave it out: nothing is lost")


def vae_compute(model: Model, family: Family, compute: str) -> str:
    """The dtype that the VAE computes in where `compute` is asked for: never one that the pipeline avoids.

    SDXL's VAE overflows in float16; `force_upcast`, true if its config has none (diffusers 0.42), says so. Raises
    `ModelError`.
    """
    avoided = compute == "float16" and family.upcasts_vae
    return "float32" if avoided and read_config(model / "vae" / "config.json").get("force_upcast", True) else compute


def _check_geometry(config: Config, path: Path, geometry: Geometry, family: Family) -> None:
    halvings = geometry.halvings(config)
    for name, seen, wanted in (("channels", config.get(*geometry.channels), family.latent_channels),
                               ("pixels a side", 0 if halvings is None else 1 << halvings, family.factor)):
        if seen != wanted:
            raise ModelError(f"latents of the VAE in {path.parent} have {brief(seen)} {name}, expected {wanted}",
                             hint="name another model, or set its family in [model]")


def _factor(config: Config, path: Path, key: str) -> str | None:
    value = config.get(key)
    if value is None:
        return None
    zero = key == "shift_factor" and value == 0
    if type(value) not in (int, float) or not (zero or SMALLEST <= abs(value) <= 1 / SMALLEST) or (
            value < 0 and key == "scaling_factor"):
        raise ModelError(f"{path} has {key} {brief(value)}, expected a number from {SMALLEST} to {1 / SMALLEST:.0f}",
                         hint=FETCH_AGAIN)
    return _decimal(value)


def _statistics(config: Config, path: Path, channels: int) -> dict[str, list[str]]:
    """`mean` and `std` by channel, from the config. Raises `ModelError` if it lacks them."""
    found = {name: config.get(f"latents_{name}") for name in ("mean", "std")}
    for name, values in found.items():
        _check_numbers(values, channels, SMALLEST if name == "std" else -1 / SMALLEST, f"{path} has latents_{name}")
    return {name: [_decimal(value) for value in values or ()] for name, values in found.items()}


def _batch_norm(model: Model, config: Config, path: Path, family: Family) -> dict[str, list[str]]:
    """`mean` and `std` by channel, row and column of a patch: the running statistics of the VAE's batch norm.

    `Flux2Pipeline` divides by the square root of the variance plus the epsilon of the VAE's config (diffusers 0.42);
    some families have an epsilon of their own.
    """
    if config.get("patch_size", [2, 2]) != [2, 2]:
        raise ModelError(f"{path} has patch_size {brief(config['patch_size'])}, expected [2, 2]", hint=FETCH_AGAIN)
    own = config.get("batch_norm_eps", BATCH_NORM_EPS)
    epsilon = own if family.batch_norm_eps is None else family.batch_norm_eps
    if type(epsilon) not in (int, float) or not 0 < epsilon <= 1:
        raise ModelError(f"{path} has batch_norm_eps {brief(epsilon)}, expected a number above 0, at most 1",
                         hint=FETCH_AGAIN)
    files, count = weighted_files(model, "vae"), 4 * family.latent_channels
    names = (f"bn.running_{name}" for name in ("mean", "var"))
    mean, variance = (read_vector(files.weights, files.part.get(name, name)) for name in names)
    for values, name, least in ((mean, "mean", -1 / SMALLEST), (variance, "var", 0.0)):
        _check_numbers(values, count, least, f"{files.place} has bn.running_{name}")
    return {"mean": [_decimal(value) for value in mean],
            "std": [_decimal(math.sqrt(value + epsilon)) for value in variance]}


def _check_numbers(values: Any, count: int, least: float, what: str) -> None:
    """Raises `ModelError` unless `values` are `count` numbers of at least `least`."""
    if not isinstance(values, Sequence) or len(values) != count or not all(
            type(value) in (int, float) and least <= value <= 1 / SMALLEST for value in values):
        raise ModelError(f"{what} {brief(values)}, expected {count} numbers from {least:g} to {1 / SMALLEST:.0f}",
                         hint=FETCH_AGAIN)


def _decimal(value: float) -> str:
    """The shortest decimal that reads back the same."""
    return repr(float(value)).removesuffix(".0")
