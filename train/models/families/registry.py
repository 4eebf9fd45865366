"""The families that can be trained, by the names of `prep.models.families.registry`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prep.models.family import Family
from train.models.families import (
    auraflow,
    chroma,
    cogview4,
    ernie,
    flux,
    flux2,
    hidream,
    krea2,
    lumina2,
    ovis,
    pixart,
    qwenimage,
    sana,
    sd3,
    sd15,
    sd21,
    sdxl,
    zimage,
)
from train.models.family import DenoiserFamily
from train.models.naming import Naming

DENOISERS: Mapping[str, DenoiserFamily] = {
    "sd15": sd15.DENOISER,
    "sd21": sd21.DENOISER,
    "sdxl": sdxl.DENOISER,
    "sd3": sd3.DENOISER,
    "flux": flux.DENOISER,
    "pixart_alpha": pixart.DENOISER,
    "pixart_sigma": pixart.DENOISER,
    "zimage": zimage.DENOISER,
    "chroma": chroma.DENOISER,
    "qwenimage": qwenimage.DENOISER,
    "flux2": flux2.DEV,
    "flux2_klein": flux2.KLEIN,
    "lumina2": lumina2.DENOISER,
    "ovis": ovis.DENOISER,
    "cogview4": cogview4.DENOISER,
    "sana": sana.DENOISER,
    "auraflow": auraflow.DENOISER,
    "hidream": hidream.DENOISER,
    "krea2": krea2.DENOISER,
    "ernie": ernie.DENOISER,
}  # fmt: skip


def naming_of(family: Family, layers: Iterable[str] | None = None) -> Naming:
    """How tensors of the family's LoRA files are named; `layers`: of the denoiser, which decide a UNet's names. Without
    these, an adapter's own layers do."""
    facts = DENOISERS[family.name]
    found = Naming(component=family.denoiser, kohya=facts.kohya, in_comfyui=facts.in_comfyui, further=facts.further,
                   original=facts.original)
    return found if layers is None else found.knowing(layers)
