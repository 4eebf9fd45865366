"""FLUX.1 Kontext: FLUX.1, told by one picture what to change.

Sources: `FluxKontextPipeline` in diffusers 0.42. Transformer, VAE and text rows are FLUX.1 dev's; the latent of the
picture comes behind the noise, at 1 on the first axis of positions. Without a picture the model works like FLUX.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prep.geometry import Placement, Size
from prep.models.denoiser import packing
from prep.models.denoiser.samplers import BY_SIGMAS
from prep.models.families import flux
from prep.models.family import Prompted, References

MULTIPLE = flux.FACTOR * packing.PATCH  # pixels of a token's side
# PREFERRED_KONTEXT_RESOLUTIONS of the pipeline: those of training, all of about 1024² pixels.
SIDE = 1024
SIZES: tuple[Size, ...] = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)


def place(size: Size, side: int) -> Placement | None:
    """Stretched to the preferred size whose aspect is nearest to that of the picture's whole tokens, in floats as the
    pipeline does; with another side than 1024, that size scaled, and rounded down to whole tokens."""
    wide, high = (each // MULTIPLE for each in size)
    if not wide or not high:
        return None
    _, *nearest = min((abs(wide / high - width / height), width, height) for width, height in SIZES)
    width, height = (each * side // SIDE // MULTIPLE * MULTIPLE for each in nearest)
    if not width or not height:
        return None
    return Placement(scaled=(width, height), crop=(0, 0), bucket=(width, height))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `FluxKontextPipeline.__call__`, which scales the size to `max_area`."""
    return {**flux.call(transformer, prompted), "max_area": prompted.size[0] * prompted.size[1]}


FAMILY = replace(
    flux.FAMILY, name="flux_kontext", models=("FLUX.1 Kontext dev",), pipelines=("FluxKontextPipeline",),
    references=References(most=1, resolution=SIDE, place=place, append=flux.append),
    # The guidance of the pipeline's example. Unlike FLUX.1's, it gives every scheduler sigmas.
    sampling=replace(flux.SAMPLING, call=call, solvers=BY_SIGMAS, guidance=2.5),
)
