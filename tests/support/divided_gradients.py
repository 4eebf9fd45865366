"""For torchrun: gradients of divided models against those of whole ones, with the same samples. Prints the largest
difference of each, relative to the largest gradient of its parameter; also whether any rank kept a whole model.

    torchrun --nproc-per-node 2 divided_gradients.py
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from train.parallel.ranks import Ranks, joined
from train.parallel.shards import Sharded

SAMPLES, CPU = 8, torch.device("cpu")


def unet() -> tuple[Any, Any]:
    model = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
    given = (torch.randn(SAMPLES, 4, 8, 8), torch.randint(1000, (SAMPLES,)), torch.randn(SAMPLES, 5, 8))
    return model, lambda part: model(given[0][part], given[1][part], given[2][part]).sample


def flux() -> tuple[Any, Any]:
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4))
    hidden, text, pooled = torch.randn(SAMPLES, 16, 4), torch.randn(SAMPLES, 5, 8), torch.randn(SAMPLES, 8)
    time, places = torch.rand(SAMPLES), torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return model, lambda part: model(hidden[part], text[part], pooled[part], time[part], img_ids=places,
                                     txt_ids=torch.zeros(5, 3)).sample


def gradients(run: Any, part: slice, passes: int) -> None:
    """Those of the part's samples, added in so many passes."""
    size = (part.stop - part.start) // passes
    for start in range(part.start, part.stop, size):
        run(slice(start, start + size)).pow(2).flatten(1).mean(1).sum().backward()


def difference(make: Any, lora: bool, checkpointing: bool, ranks: Ranks) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, run = make()
    if lora:
        targets = ["to_q", "to_v", "conv1"] if make is unet else ["to_q", "to_v"]
        inject_adapter_in_model(LoraConfig(r=2, init_lora_weights=False, target_modules=targets), model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    model.train()
    gradients(run, slice(0, SAMPLES), 1)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    wanted: dict[str, Tensor | None] = {name: model.get_parameter(name).grad for name in trained}
    model.zero_grad()
    numbers = sum(value.numel() for value in model.parameters())
    ranks.divide(model, CPU)
    own = sum(value.to_local().numel() for value in model.parameters())
    shards = Sharded({name: value for name, value in model.named_parameters() if name in trained}, ranks)
    each = SAMPLES // ranks.world
    gradients(run, slice(each * ranks.rank, each * (ranks.rank + 1)), 2)
    shards.sum_gradients(shards.own)
    worst = 0.0
    for name, grad in wanted.items():
        found = shards.own[name].grad
        assert (found is None) == (grad is None), name
        if grad is not None and found is not None and found.numel():
            away = (found - shards.rows(grad)).abs().max() / grad.abs().max()
            worst = max(worst, float(away))
    return worst, own > 0.8 * numbers


def main() -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        for make, lora, checkpointing in product((unet, flux), (False, True), (False, True)):
            worst, whole = difference(make, lora, checkpointing, ranks)
            found = ranks.gather([worst, whole])
            if ranks.first:
                print(json.dumps({"case": f"{make.__name__} lora={lora} checkpointing={checkpointing}",
                                  "worst": max(each for each, _ in found), "whole": any(each for _, each in found)}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's end is not what is tested: threads of gloo have aborted it
