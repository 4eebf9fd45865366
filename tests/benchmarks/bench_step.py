"""`train run`'s step against a bare loop: the same model, LoRA, optimizer and batches, resident in memory.

    python tests/benchmarks/bench_step.py [--model demo|sd15] [--method lora|full] [--steps 60] [--rounds 5]

The bare loop has its batches in memory and does what any loop must: noise the latents, predict, the mean squared error,
backward, clip, step. Ours also reads rows and checks them, draws noise from keys, weighs samples, checks that numbers
are finite and logs each step. Both take turns, in this process; start-up is not counted. `demo` is the demo's model and
data at batch 8; `sd15` has the size of Stable Diffusion 1.5's UNet, random weights, and rows of 512x512. Target: 1.03.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import emit, parser_of, table
from torch import Tensor

from prep.demo.tiny_model import build_random
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.rows import Rows
from train.check import check
from train.config.load import parse
from train.loop import train
from train.models.denoiser import load
from train.objectives.forward import latents_of
from train.runs.log import Log
from train.setup import RunRequest, Setup

CPU = torch.device("cpu")
WARM = 4  # steps before the clock starts
SIDE, PICTURES = 512, 64
SETTINGS: dict[str, Any] = {"validation": {"every": 0}, "sample": {"every": 0}, "checkpoint": {"every": 0},
                            "precision": "fp32"}


def demo(root: Path, settings: dict[str, Any], steps: int) -> Setup:
    """The demo's model and encoded data."""
    words = [sys.executable, "-m", "prep"]
    for command in (["demo", "demo"], ["encode", "demo/dataset.toml", "--cache", "cache", "-o", "demo.json"]):
        subprocess.run([*words, *command], cwd=root, check=True, capture_output=True)
    return checked(root / "demo.json", {**settings, "steps": steps, "batch_size": 8, "micro_batch": 8})


def sd15(root: Path, settings: dict[str, Any], steps: int) -> Setup:
    """A UNet of published size, and random rows of its latents and texts."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_manifest as making
    from diffusers import UNet2DConditionModel

    making.BUCKETS, making.TOKENS, making.WIDTH = ((SIDE, SIDE),), 77, 768
    build_random(root / "model")
    UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8).save_pretrained(root / "model" / "unet")
    made = making.build(root, root / "model", counts=(PICTURES,), validation=0, prompts=None)
    return checked(made.path, {**settings, "steps": steps, "batch_size": 1, "micro_batch": 1})


MODELS = {"demo": demo, "sd15": sd15}


def checked(manifest: Path, settings: dict[str, Any]) -> Setup:
    report = check(RunRequest(manifest=manifest), parse(settings, "bench_step"))
    assert report.setup is not None, [fault.message for fault in report.faults]
    return report.setup


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def ours(setup: Setup, run: Path) -> tuple[float, float]:
    """Wall and CPU seconds a step."""
    times: dict[int, tuple[float, float]] = {}

    def watch(event: Any) -> None:
        if event["event"] == "step":
            times[event["step"]] = clock()

    with Log(run / "log.jsonl", watch) as log:
        train(setup, run, CPU, log)
    return per_step(times[WARM], times[setup.steps], setup.steps - WARM)


def per_step(begun: tuple[float, float], ended: tuple[float, float], steps: int) -> tuple[float, float]:
    return (ended[0] - begun[0]) / steps, (ended[1] - begun[1]) / steps


def resident(setup: Setup) -> list[Batch]:
    """The batches of all steps, in memory."""
    asked = draws.training(setup.index, setup.plan, 0, setup.steps, dropout=0.0, timesteps=1000)
    with batches(Rows(setup.index), asked, masked=False, pinned=False) as feed:
        return [replace(batch, latent_BChw=batch.latent_BChw.clone(), noise_BChw=batch.noise_BChw.clone(),
                        timestep_B=batch.timestep_B.clone(), text={"hidden": batch.text["hidden"].clone()})
                for batch in feed]


def bare(setup: Setup, held: list[Batch]) -> tuple[float, float]:
    """Wall and CPU seconds a step."""
    denoiser = load(setup.model, setup.config, setup.prediction, CPU)
    parameters, settings = list(denoiser.parameters.values()), setup.config.optimizer
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps,
                                  weight_decay=settings.weight_decay)
    latents = latents_of(setup.manifest)
    begun = clock()
    for number, batch in enumerate(held):
        if number == WARM:
            begun = clock()
        clean, level = latents.normalize(batch.latent_BChw), denoiser.levels[batch.timestep_B].view(-1, 1, 1, 1)
        noised = level.sqrt() * clean + (1 - level).sqrt() * batch.noise_BChw
        predicted: Tensor = denoiser.model(noised, batch.timestep_B, batch.text["hidden"].float()).sample
        torch.nn.functional.mse_loss(predicted, batch.noise_BChw).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return per_step(begun, clock(), len(held) - WARM)


def main() -> None:
    """Prints a line for each side."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--steps", type=int, default=0, help="of a round; default: 100, of sd15 8")
    parser.add_argument("--rounds", type=int, default=0, help="default: 9, of sd15 2")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    steps, rounds = (100, 9) if options.model == "demo" else (8, 2)
    if options.quick:
        steps, rounds = (40, 3) if options.model == "demo" else (6, 1)
    steps, rounds = options.steps or steps, options.rounds or rounds
    torch.set_num_threads(options.threads)
    settings = {**SETTINGS, "method": options.method}
    taken: list[tuple[tuple[float, float], tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        setup = MODELS[options.model](root, settings, steps)
        held = resident(setup)
        for number in range(rounds):
            sides = [lambda number=number: ours(setup, root / f"run{number}"), lambda: bare(setup, held)]
            if number % 2:
                taken.append(tuple(side() for side in reversed(sides))[::-1])  # type: ignore[arg-type]
            else:
                taken.append(tuple(side() for side in sides))  # type: ignore[arg-type]
    words = (f"{options.method}, batches of {setup.config.batch_size}, {steps - WARM} steps a round, {rounds} rounds, "
             f"{options.threads} thread{'s' * (options.threads > 1)} of torch.")
    emit(f"A training step over a bare loop, {options.model}", f"{words}\n\n{figures(taken)}", options.write)


def figures(taken: list[tuple[tuple[float, float], tuple[float, float]]]) -> str:
    rows = []
    for name, side in (("train run", 0), ("bare loop", 1)):
        wall, cpu = (statistics.median(pair[side][kind] for pair in taken) for kind in (0, 1))
        rows.append((name, f"{wall * 1000:.2f}", f"{cpu * 1000:.2f}"))
    ratios = [sorted(mine[kind] / least[kind] for mine, least in taken) for kind in (0, 1)]
    rows.append(("ratio", *(f"{statistics.median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})" for each in ratios)))
    return table(("ms a step", "wall", "CPU"), rows)


if __name__ == "__main__":
    main()
