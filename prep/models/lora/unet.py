"""The names of a UNet's layers in its authors' code, which counts blocks through where diffusers numbers them by level.

sd-scripts' own UNet for SDXL (library/sdxl_original_unet.py) has them, too, so its LoRA files do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prep.models.lora.kohya import Rule

_RESNET = {"conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "conv2": "out_layers.3",
           "conv_shortcut": "skip_connection"}
_ENDS = {"conv_in": "input_blocks.0.0", "conv_out": "out.2",
         "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
         "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
_PUBLISHED = 2  # layers of each level on the way down, in Stable Diffusion 1, 2 and XL
_PART = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def original_rules(layers: Iterable[str]) -> tuple[Rule, ...]:
    """Rules for the layers of a UNet that has `layers`: how many a level has decides the numbers. On the way up a level
    has one more."""
    parts = {(way, int(level), kind, int(number)) for layer in layers if (match := _PART.match(layer))
             for way, level, kind, number in [match.groups()]}
    counts = [number + (way == "down") for way, _, kind, number in parts if kind in ("resnets", "attentions")]
    count = max(counts, default=_PUBLISHED)
    attended = {level for way, level, kind, _ in parts if way == "up" and kind == "attentions"} or {0, 1}
    levels = max((level for _, level, _, _ in parts), default=3) + 1
    of_levels = (rule for level in range(levels) for rule in _level(level, count, level in attended))
    return (*_ends(), *_middle(), *of_levels)


def _ends() -> Iterator[Rule]:
    for ours, theirs in _ENDS.items():
        yield Rule(layer=re.escape(ours), name=theirs)


def _middle() -> Iterator[Rule]:
    yield from _resnet(r"mid_block\.resnets\.0", "middle_block.0")
    yield Rule(layer=r"mid_block\.attentions\.0\.(.+)", name="middle_block.1.{}")
    yield from _resnet(r"mid_block\.resnets\.1", "middle_block.2")


def _level(level: int, count: int, attended: bool) -> Iterator[Rule]:
    """A level on the way down, and the one of the same number on the way up."""
    for way, theirs, first, many in (("down", "input", 1, count), ("up", "output", 0, count + 1)):
        for number in range(many):
            block = f"{theirs}_blocks.{level * (count + 1) + first + number}"
            yield from _resnet(rf"{way}_blocks\.{level}\.resnets\.{number}", f"{block}.0")
            yield Rule(layer=rf"{way}_blocks\.{level}\.attentions\.{number}\.(.+)", name=f"{block}.1.{{}}")
    after = (level + 1) * (count + 1)
    yield Rule(layer=rf"down_blocks\.{level}\.downsamplers\.0\.conv", name=f"input_blocks.{after}.0.op")
    yield Rule(layer=rf"up_blocks\.{level}\.upsamplers\.0\.conv",
               name=f"output_blocks.{after - 1}.{2 if attended else 1}.conv")


def _resnet(block: str, name: str) -> Iterator[Rule]:
    for ours, theirs in _RESNET.items():
        yield Rule(layer=rf"{block}\.{ours}", name=f"{name}.{theirs}")
