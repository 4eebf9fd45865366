"""Builds a family's pipeline with weights that a seed decides, and saves it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tiny_pipelines.calls import known_warnings, without_bars, without_torchvision
from tiny_pipelines.families.flux import (
    chroma,
    flux,
    flux2,
    flux2_klein,
    flux3,
    flux_fill,
    flux_kontext,
    longcat_image,
    longcat_image_edit,
    ovis,
)
from tiny_pipelines.families.further import auraflow, cogview4, ernie, hidream, krea2
from tiny_pipelines.families.single_encoder import (
    anima,
    lumina2,
    pixart_alpha,
    pixart_sigma,
    qwenimage,
    qwenimage21,
    qwenimage_edit,
    sana,
    zimage,
)
from tiny_pipelines.families.stable_diffusion import (
    kolors,
    sd3,
    sd15,
    sd15_inpaint,
    sd21,
    sd21_inpaint,
    sdxl,
    sdxl_inpaint,
)

FAMILIES: Mapping[str, Callable[..., Any]] = {
    family.__name__: family
    for family in (sd15, sd15_inpaint, sd21, sd21_inpaint, sdxl, sdxl_inpaint, sd3, flux, flux_kontext, flux_fill,
                   flux2, flux2_klein, flux3, qwenimage, qwenimage_edit, qwenimage21, zimage, chroma, pixart_alpha,
                   pixart_sigma, sana, lumina2, auraflow, cogview4, ovis, longcat_image, longcat_image_edit, krea2,
                   ernie, hidream, anima, kolors)
}
# Those that few people train.
SECONDARY = frozenset({"auraflow", "cogview4", "ovis", "longcat_image", "longcat_image_edit", "krea2", "ernie",
                       "hidream", "kolors"})

MODULAR = frozenset({"flux3", "anima"})  # those that are published with modular_model_index.json

DEVIATION = 0.05  # of the weights that would be zeros


def build(family: str, seed: int = 0, **options: Any) -> Any:
    """A complete pipeline of the family: float32, on the CPU, for inference; `options` are those of its function.

    The seed decides all weights. Does not change the caller's random state. Raises `KeyError` for an unknown family.
    """
    without_torchvision()
    with torch.random.fork_rng(devices=[]), known_warnings():
        torch.manual_seed(seed)
        pipeline = FAMILIES[family](**options)
        for network in networks(pipeline):
            network.eval().requires_grad_(False)
            _fill_zeros(network)
    without_bars(pipeline)
    return pipeline


def save(family: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Writes `build(family, seed, **options)` to `folder`, as people who train the family have it; returns `folder`."""
    key = (family, seed, repr(sorted(options.items())))
    if key not in _saved:  # made once, which takes most of a second, and copied
        kept = _saved[key] = Path(_kept().name) / str(len(_saved))
        _save(build(family, seed, **options), family, kept)
    return shutil.copytree(_saved[key], folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


_saved: dict[tuple[str, int, str], Path] = {}


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-pipelines.")


def _save(pipeline: Any, family: str, folder: Path) -> None:
    if family not in MODULAR:
        pipeline.save_pretrained(folder, safe_serialization=True)
        return
    pipeline.save_pretrained(str(folder), safe_serialization=True, overwrite_modular_index=True)
    index = folder / pipeline.config_name  # it names a repository, as where a published one was copied
    index.write_text(index.read_text(encoding="utf-8").replace(json.dumps(str(folder)), f'"someone/{family}"'),
                     encoding="utf-8")


def networks(pipeline: Any) -> Iterator[torch.nn.Module]:
    """The parts of a pipeline that have weights, by name."""
    for _, part in sorted(pipeline.components.items()):
        if isinstance(part, torch.nn.Module):
            yield part


def _fill_zeros(network: torch.nn.Module) -> None:
    """Gives random values to each parameter, and each row of a matrix, that is all zeros.

    New networks have zeros where trained ones do not: last layers, gates and modulations, padding tokens, biases. What
    is multiplied by zero could be wrong without any test that fails.
    """
    with torch.no_grad():
        for parameter in network.parameters():
            rows = parameter.view(len(parameter), -1) if parameter.dim() > 1 else parameter.view(1, -1)
            empty = ~rows.any(dim=1)
            if empty.any():
                rows[empty] = DEVIATION * torch.randn(int(empty.sum()), rows.shape[1])
