"""The linear layers of a denoiser's blocks, which several trainers adapt, as lora.targets."""

from __future__ import annotations

from collections.abc import Mapping

UNETS = ("sd15", "sd21", "sdxl")
# Every linear layer of the blocks as lora.targets: a preset that has just these, or all-linear, the nearest of the
# others; and the start of their names, as an expression.
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


def blocks_of(family: str) -> str | list[str]:
    """Every linear layer of the blocks of a transformer, as lora.targets; all-linear where that is the nearest."""
    preset = PRESETS.get(family) or (None if family in BLOCKS else "all-linear")
    return preset or [f"re:^{BLOCKS[family]}"]
