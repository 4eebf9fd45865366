"""What `train check` says of memory, beside what a step takes: models of published size on this computer's CPU.

    python tests/benchmarks/bench_forecast.py [--model sd15|sdxl] [--method lora|full] [--checkpointing]
        [--dtype bfloat16] [--fused] [--optimizer adafactor]

UNets of published size with random weights, and rows of their latents and texts, at batch 1. `resident` is what the
process takes beyond what it took before the model was loaded, at the most in its second and third step; what loading
takes is not in it. `allocated` is what torch's allocator has given out then, also within kernels, in other steps. A
LoRA of SD1.5 takes 6 GB, full fine-tuning of it with --checkpointing 10 GB. --dtype and --fused are full.dtype and
full.fused_backward.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import emit, parser_of, table

from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from prep.models.device.allocator import settled_heap
from prep.models.loading import quiet_libraries
from prep.runtime import peak_resident, resident
from prep.training.optimizers import OPTIMIZERS
from train.check import check
from train.config.load import parse
from train.failures import Progress
from train.loop import accumulate
from train.memory.room import room_of
from train.memory.step import count
from train.runs.log import Log
from train.setup import RunRequest, Setup
from train.state import create_state
from train.update import update_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768, "attention_head_dim": 8},
    "sdxl": {"block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
             "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
             "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
             "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True}}
SIDES = {"sd15": 512, "sdxl": 768}


def made(root: Path, model: str, side: int, settings: dict[str, Any]) -> Setup:
    """A run of a UNet of published size; SDXL's without the embedding of sizes, which has 0.1 % of its weights."""
    import real_manifest as making
    from diffusers import UNet2DConditionModel

    from prep.demo.tiny_model import build_random

    making.BUCKETS, making.TOKENS, making.WIDTH = ((side, side),), 77, int(UNETS[model]["cross_attention_dim"])
    build_random(root / "model")
    UNet2DConditionModel(**UNETS[model]).save_pretrained(root / "model" / "unet")
    family = {"sd15": "sd15", "sdxl": "sd21"}[model]  # which UNets without that embedding are taken for
    manifest = making.build(root, root / "model", counts=(4,), validation=0, prompts=None, masks=False,
                            change=lambda document: document.update(family=family))
    report = check(RunRequest(manifest=manifest.path), parse({"steps": 3, "batch_size": 1, **settings}, ""))
    assert report.setup is not None, [fault.message for fault in report.faults]
    return report.setup


def resident_peak(setup: Setup, root: Path) -> int:
    """Bytes by which this process grows at most in two steps, beyond what it had before the model was there."""
    gc.collect()
    before = resident() or 0
    make_steps(setup, root, lambda: Path("/proc/self/clear_refs").write_text("5"))  # the peak begins anew
    return (peak_resident() or 0) - before


def allocated_peak(setup: Setup, root: Path) -> int:
    """Bytes that torch's allocator has given out at a time, at most, in two steps."""
    from allocations import Allocations

    with Allocations() as allocations:
        make_steps(setup, root, allocations.reset_peak)
    return allocations.peak


def make_steps(setup: Setup, root: Path, begin: Callable[[], object]) -> None:
    """Loads the model and makes three steps, before the second of which it calls `begin`."""
    request, progress = draws.trial(setup.index, setup.plan, 1), Progress(device=torch.device("cpu"))
    with (settled_heap(progress.device),
          batches(Rows(setup.index), iter([request] * 3), masked=setup.masked, pinned=False) as feed,
          Log(root / "log.jsonl", lambda event: None) as log):
        trainee = create_state(setup, progress.device)
        log.rewind(0)
        update = update_of(trainee, setup, log, progress)
        for number, batch in enumerate(feed):
            if number == 1:
                begin()
            with update.gathering(number, 1) as between:
                gathered = accumulate(trainee, setup.config, [batch], progress, between)
            update.make(number, gathered)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=UNETS, default="sd15")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--side", type=int, help="of the pictures, in pixels: 512 of sd15, 768 of sdxl")
    options = parser.parse_args()
    side = options.side or SIDES[options.model]
    quiet_libraries()
    settings = {"method": options.method, "gradient_checkpointing": options.checkpointing,
                "full": {"dtype": options.dtype, "fused_backward": options.fused},
                "optimizer": {"name": options.optimizer, "clip": 0.0 if options.fused else 1.0}}
    with tempfile.TemporaryDirectory() as root:
        setup = made(Path(root), options.model, side, settings)
        started = time.process_time()
        said = sum(count(setup, room_of("cpu")).parts.values())
        seconds = time.process_time() - started
        found, allocated = (measure(setup, Path(root)) for measure in (resident_peak, allocated_peak))
    name = f"{options.model}, {options.method}{', recomputed' if options.checkpointing else ''}"
    name += f", {options.optimizer}{', fused' if options.fused else ''}"
    emit(f"The forecast of memory: {name}", table(
        ("", "forecast GiB", "allocated GiB", "resident GiB", "forecast / allocated", "/ resident", "CPU seconds"),
        [(f"{side} px, batch 1, {options.dtype}", f"{said / 2**30:.2f}", f"{allocated / 2**30:.2f}",
          f"{found / 2**30:.2f}", f"{said / allocated:.3f}", f"{said / found:.3f}", f"{seconds:.1f}")]), options.write)


if __name__ == "__main__":
    main()
