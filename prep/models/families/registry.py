"""The known families. To add one: a module here, and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping

from prep.models.families import (
    anima,
    auraflow,
    chroma,
    cogview4,
    ernie,
    flux,
    flux2,
    flux3,
    flux_fill,
    flux_kontext,
    hidream,
    kolors,
    krea2,
    longcat_image,
    longcat_image_edit,
    lumina2,
    ovis,
    pixart,
    qwenimage,
    qwenimage21,
    qwenimage_edit,
    sana,
    sd3,
    sd15,
    sd15_inpaint,
    sd21,
    sd21_inpaint,
    sdxl,
    sdxl_inpaint,
    zimage,
)
from prep.models.family import Family

FAMILIES: Mapping[str, Family] = {family.name: family for family in (
    sd15.FAMILY,
    sd15_inpaint.FAMILY,
    sd21.FAMILY,
    sd21_inpaint.FAMILY,
    sdxl.FAMILY,
    sdxl_inpaint.FAMILY,
    sd3.FAMILY,
    flux.FAMILY,
    flux_kontext.FAMILY,
    flux_fill.FAMILY,
    pixart.ALPHA,
    pixart.SIGMA,
    zimage.FAMILY,
    chroma.FAMILY,
    qwenimage.FAMILY,
    qwenimage_edit.FAMILY,
    qwenimage21.FAMILY,
    flux2.DEV,
    flux2.KLEIN,
    flux3.FAMILY,
    lumina2.FAMILY,
    ovis.FAMILY,
    longcat_image.FAMILY,
    longcat_image_edit.FAMILY,
    cogview4.FAMILY,
    sana.FAMILY,
    auraflow.FAMILY,
    hidream.FAMILY,
    krea2.FAMILY,
    ernie.FAMILY,
    anima.FAMILY,
    kolors.FAMILY,
)}  # fmt: skip


def families_of_pipeline(class_name: object) -> Mapping[str, Family]:
    """The families whose pipelines have this diffusers class, by name: none, one, or several told apart by `fits`."""
    return {name: family for name, family in FAMILIES.items() if class_name in family.pipelines}
