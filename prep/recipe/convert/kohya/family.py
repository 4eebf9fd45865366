"""Tells which model family a configuration of sd-scripts or its GUI is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig

OF_DIFFUSION = ("sd15", "sd21", "sdxl")  # what predicts epsilon or v
# The boxes of the GUI, and modules that are for one family. Families that are not here keep their own names.
_BOXES: Mapping[str, str] = {
    "sdxl": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "sd3", "lumina_checkbox": "lumina2",
    "anima_checkbox": "anima", "hunyuan_image_checkbox": "hunyuan-image"}
_OF_MODULES: Mapping[str, str] = {
    "networks.lora_flux": "flux", "networks.oft_flux": "flux", "networks.lora_sd3": "sd3",
    "networks.lora_lumina": "lumina2", "networks.lora_krea2": "krea2", "networks.lora_anima": "anima",
    "networks.lora_hunyuan_image": "hunyuan-image"}
# The modules that the GUI takes for its types; of Standard for SD 3, networks.lora_sd3.
MODULES: Mapping[str, str] = {
    "Flux1": "networks.lora_flux", "Lumina": "networks.lora_lumina", "Anima": "networks.lora_anima",
    "HunyuanImage-2.1": "networks.lora_hunyuan_image", "Kohya LoHa": "networks.loha", "Kohya LoKr": "networks.lokr"}
_SIGNS: Mapping[str, str] = {  # files and settings that only some families have; the first decides
    "clip_g": "sd3", "gemma2": "lumina2", "clip_l": "flux", "t5xxl": "flux",
    **dict.fromkeys(("ae", "timestep_sampling", "discrete_flow_shift"), "flow")}
_GUI = ("LoRA_type", "model_list", "epoch")  # which it saves for every model, and sd-scripts does not have
# The GUI's own defaults, where they are not sd-scripts': the fields that a file lacks keep them.
DEFAULTS: Mapping[str, bool | int] = {"enable_bucket": True, "max_bucket_reso": 2048}
# Settings of the GUI that take the place of others for a family.
PREFIXES: Mapping[str, str] = {"lumina_checkbox": "lumina_", "anima_checkbox": "anima_",
                               "hunyuan_image_checkbox": "hunyuan_"}


def module_of(config: ToolConfig) -> str | None:
    """sd-scripts' network_module, also of a configuration of the GUI, which has a type instead."""
    kind, module = config.any("LoRA_type"), config.any("network_module")
    return MODULES.get(str(kind)) if module is None else str(module)


def of_gui(config: ToolConfig) -> bool:
    """Whether the GUI wrote the configuration."""
    return is_gui(config.layers[0].table)


def is_gui(table: Mapping[str, Any]) -> bool:
    """Whether the GUI wrote the settings."""
    return any(name in table for name in _GUI)


def family_of(config: ToolConfig) -> str:
    """The family that a configuration is for; "flow" if it says only that, "" if it says nothing.

    The GUI has the settings of flows for every model, and says itself which it is.
    """
    boxes = {name: config.any(name) for name in _BOXES}
    family = next((family for name, family in _BOXES.items() if boxes[name] is True), None)
    if family is None:
        family = _OF_MODULES.get(module_of(config) or "")
    if family is None and False not in (boxes["flux1_checkbox"], boxes["sd3_checkbox"]):
        table = config.layers[0].table
        family = next((family for name, family in _SIGNS.items() if table.get(name)), None)
    if family is None and config.any("v2") is True:
        return "sd21"
    if family is None and of_gui(config) and boxes["sdxl"] is False:
        return "sd15"
    return "chroma" if family in ("flux", "flow") and config.any("model_type") == "chroma" else family or ""


def is_flow(config: ToolConfig) -> bool:
    """Whether the configuration is for a flow."""
    return family_of(config) not in ("", *OF_DIFFUSION)
