"""Tells which model family and part of a model a configuration of OneTrainer trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from prep.recipe.convert.draft import ToolConfig

T = TypeVar("T")
# By the start of model_type; the first that fits. Others are no family here.
_FAMILIES: Mapping[str, str] = {
    "STABLE_DIFFUSION_15_INPAINTING": "sd15_inpaint", "STABLE_DIFFUSION_20_INPAINTING": "sd21_inpaint",
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "sdxl_inpaint",
    "STABLE_DIFFUSION_20_DEPTH": "",  # its UNet is given the depth of a picture
    "STABLE_DIFFUSION_XL": "sdxl", "STABLE_DIFFUSION_3": "sd3", "STABLE_DIFFUSION_15": "sd15",
    "STABLE_DIFFUSION_2": "sd21", "PIXART_ALPHA": "pixart_alpha", "PIXART_SIGMA": "pixart_sigma",
    "FLUX_DEV": "flux", "FLUX_FILL": "flux_fill", "FLUX_2": "flux2",
    "SANA": "sana", "HI_DREAM": "hidream", "CHROMA": "chroma", "QWEN": "qwenimage", "Z_IMAGE": "zimage",
    "KREA_2": "krea2", "ERNIE": "ernie", "ANIMA": "anima"}
# Multiples of what the sides of its buckets are, in pixels; of other models, of 64.
_STEPS: Mapping[str, int] = {"STABLE_DIFFUSION_XL": 64, "STABLE_DIFFUSION_3": 64, "STABLE_DIFFUSION": 8, "PIXART": 16,
                             "SANA": 32, "WUERSTCHEN": 128, "STABLE_CASCADE": 128}
STEP = 64
# Those whose timesteps OneTrainer shifts by the size of the picture if it is asked for.
_SHIFTED = ("FLUX_DEV", "FLUX_2", "QWEN", "Z_IMAGE", "KREA_2", "ERNIE", "ANIMA", "IDEOGRAM")


def model_type(config: ToolConfig) -> str:
    """OneTrainer's name of the model."""
    return str(config.any("model_type") or "STABLE_DIFFUSION_15")


def family_of(config: ToolConfig) -> str:
    """Our name of the model's family; "" if it is none of ours."""
    return _by_start(_FAMILIES, model_type(config), "")


def bucket_step(config: ToolConfig) -> int:
    """Pixels between the sides of OneTrainer's buckets."""
    return _by_start(_STEPS, model_type(config), STEP)


def is_shifted(config: ToolConfig) -> bool:
    """Whether a shift by size has an effect on the model, as far as the file says which that is."""
    return not config.has("model_type") or model_type(config).startswith(_SHIFTED)


def denoiser_of(config: ToolConfig) -> str:
    """The part of the model that is trained; the settings of other parts have no effect."""
    kind = model_type(config)
    if kind.startswith(("WUERSTCHEN", "STABLE_CASCADE")):
        return "prior"
    has_unet = kind.startswith("STABLE_DIFFUSION") and not kind.startswith("STABLE_DIFFUSION_3")
    return "unet" if has_unet else "transformer"


def part_of(config: ToolConfig, name: str) -> Mapping[str, Any]:
    """The settings of one part of the model; empty if there are none."""
    part = config.any(name)
    return part if isinstance(part, dict) else {}


def _by_start(table: Mapping[str, T], name: str, usual: T) -> T:
    return next((value for start, value in table.items() if name.startswith(start)), usual)
