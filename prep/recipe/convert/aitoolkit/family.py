"""Tells which model family a configuration of ai-toolkit is for, and how ai-toolkit names and shifts things for it."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.layers import UNETS

# By `arch`; others are no family here. ssd and vega are SDXL's UNet with fewer blocks.
_FAMILIES: Mapping[str, str] = {
    "sd1": "sd15", "sd2": "sd21", "sd3": "sd3", "sdxl": "sdxl", "ssd": "sdxl", "vega": "sdxl", "flux": "flux",
    "flex1": "flux", "flux_kontext": "flux_kontext", "flux2": "flux2", "flux2_klein_4b": "flux2_klein",
    "flux2_klein_9b": "flux2_klein", "chroma": "chroma", "qwen_image": "qwenimage", "qwen_image_edit": "qwenimage_edit",
    "qwen_image_edit_plus": "qwenimage_edit", "zimage": "zimage", "lumina2": "lumina2", "pixart": "pixart_alpha",
    "pixart_sigma": "pixart_sigma", "auraflow": "auraflow", "hidream": "hidream", "krea2": "krea2",
    "ernie_image": "ernie", "anima": "anima", "cogview4": "cogview4",
}
# Switches of older files, which say what `arch` says.
FLAGS: Mapping[str, str] = {"is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart_sigma": "pixart_sigma",
                            "is_pixart": "pixart", "is_auraflow": "auraflow", "is_flux": "flux",
                            "is_lumina2": "lumina2", "is_vega": "vega", "is_ssd": "ssd"}
# Those whose schedulers shift noise by a picture's size, there and here.
DYNAMIC = ("flux", "flux_kontext", "flux2", "flux2_klein", "chroma", "qwenimage", "qwenimage_edit", "krea2")
GUIDED = ("flux", "flux_kontext", "flux2")  # whose denoisers take guidance as a number


def arch_of(model: ToolConfig) -> str:
    """ai-toolkit's name of the model; "sd1", its default, if the file has none."""
    arch = str(model.any("arch") or "").partition(":")[0]  # after a colon, its page has a color
    flagged = [name for flag, name in FLAGS.items() if model.any(flag) is True]
    return arch or (flagged[0] if flagged else "sd1")


def family_of(model: ToolConfig) -> str:
    """Our name of the model's family; "" if it is none of ours."""
    return _FAMILIES.get(arch_of(model), "")


def is_unet(model: ToolConfig) -> bool:
    """Whether the model is a UNet, of which alone ai-toolkit uses an alpha."""
    return family_of(model) in UNETS
