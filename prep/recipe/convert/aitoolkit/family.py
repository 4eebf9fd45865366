"""Tells which model family a configuration of ai-toolkit is for, and how ai-toolkit names and shifts things for it."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig

UNETS = ("sd15", "sd21", "sdxl")
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
# The layers of the blocks, which ai-toolkit adapts, as lora.targets: a preset that has just these, or all-linear, the
# nearest of the others; and the start of their names, as an expression.
PRESETS: Mapping[str, str] = {**dict.fromkeys(("flux", "flux_kontext", "chroma", "sd3", "lumina2"), "kohya"),
                              **dict.fromkeys(("flux2", "flux2_klein", "krea2", "auraflow"), "all-linear")}
BLOCKS: Mapping[str, str] = {
    **dict.fromkeys(("flux", "flux_kontext", "sd3"), r"(?:single_)?transformer_blocks\."),
    **dict.fromkeys(("qwenimage", "qwenimage_edit", "pixart_alpha", "pixart_sigma", "cogview4", "anima"),
                    r"transformer_blocks\."),
    **dict.fromkeys(("zimage", "ernie"), r"layers\."), "hidream": r"(?:double|single)_stream_blocks\.",
    "lumina2": r"(?:layers|noise_refiner|context_refiner)\.",
    # What the presets kohya and kohya-conv of UNets have.
    **dict.fromkeys(UNETS, r".*\.(?:to_q|to_k|to_v|to_out\.0|ff\.net\.0\.proj|ff\.net\.2|proj_in|proj_out)$"),
}


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
