"""The two naming schemes of LoRA files.

kohya       lora_unet_down_blocks_0_…_to_q.lora_down.weight, .lora_up.weight, .alpha: ComfyUI and diffusers read it
diffusers   unet.down_blocks.0.….to_q.lora_A.weight, .lora_B.weight; alpha is in the file's metadata
"""

from __future__ import annotations

from dataclasses import dataclass

from prep.errors import ConfigError
from train.config.schema import Lora

_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
_DIFFUSERS = {"down": ".lora_A.weight", "up": ".lora_B.weight"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """How a family's tensors are named in a LoRA file."""

    component: str  # prefix of diffusers' names: unet or transformer
    kohya: str | None  # prefix of kohya's names; None: no other program reads them for this family

    def format_of(self, lora: Lora) -> str:
        """`lora.format`; auto is kohya where other programs read it. Raises `ConfigError` where none does."""
        if lora.format == "auto":
            return "diffusers" if self.kohya is None else "kohya"
        if lora.format == "kohya" and self.kohya is None:
            raise ConfigError("lora.format is 'kohya', but no program reads kohya's names for this family of models",
                              hint="--set lora.format=diffusers")
        return lora.format

    def spell(self, module: str, end: str, layout: str) -> str:
        """The name of a tensor of the layer `module`: its `down` or `up` matrix."""
        if layout == "kohya":
            return self.kohya_module(module) + _KOHYA[end]
        return f"{self.component}.{module}{_DIFFUSERS[end]}"

    def kohya_module(self, module: str) -> str:
        """kohya's name of a layer."""
        return (self.kohya or "") + module.replace(".", "_")
