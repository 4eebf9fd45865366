"""`train run`'s step against a bare loop: the same model, LoRA, optimizer and batches, resident in memory.

    python tests/benchmarks/bench_step.py [--model demo|sd15] [--method lora|full] [--steps 600] [--block 12]

The bare loop has its batches in memory and does what any loop must: noise the latents, predict, the mean squared error,
backward, clip, step. Ours also reads rows and checks them, draws noise from keys, weighs samples, checks that numbers
are finite and logs each step. All take turns, in this process, every few steps: a machine's speed changes by a tenth
within seconds, and what is compared is what was measured beside each other. Start-up and the first turns are not
counted. `demo` is the demo's model and data at batch 8; `sd15` has the size of Stable Diffusion 1.5's UNet, random
weights, and rows of 512x512. Target: 1.03.

For the demo, two more sides are loops as diffusers' example scripts for LoRA have them: `train_text_to_image_lora.py`
decodes, crops, and runs the VAE and the text encoder in each step; with `--cache_latents`, as the DreamBooth scripts
have it, latents are kept in memory, and the text encoder runs in each step. Their pictures are squares of the area of
ours.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler
from PIL import Image, ImageOps
from results import emit, parser_of, table
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from prep.demo.tiny_model import build_random
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.models.loading import quiet_libraries
from train.check import check
from train.config.load import parse
from train.loop import train
from train.models.denoiser import load
from train.runs.log import Log
from train.setup import RunRequest, Setup

CPU = torch.device("cpu")
WARM = 1  # turns before the clock starts
SIDE, PICTURES = 512, 64
SETTINGS: dict[str, Any] = {"validation": {"every": 0}, "sample": {"every": 0}, "checkpoint": {"every": 0},
                            "precision": "fp32"}


def demo(root: Path, settings: dict[str, Any], steps: int) -> Setup:
    """The demo's model and encoded data."""
    words = [sys.executable, "-m", "prep"]
    for command in (["demo", "demo"], ["encode", "demo/dataset.toml", "--cache", "cache", "-o", "demo.json"]):
        subprocess.run([*words, *command], cwd=root, check=True, capture_output=True)
    whole = {"batch_size": 8, "micro_batch": 8, "underfill": "repeat"}  # every step has 8 samples
    return checked(root / "demo.json", {**settings, **whole, "steps": steps})


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


class Turns:
    """Wall and CPU seconds a step, of each turn of each side."""

    def __init__(self, block: int) -> None:
        self.block = block  # steps a turn
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def take(self, name: str, begun: tuple[float, float]) -> None:
        """Notes a turn that began at this time and ends now."""
        wall, cpu = clock()
        self.taken.setdefault(name, []).append(((wall - begun[0]) / self.block, (cpu - begun[1]) / self.block))

    def others(self, sides: Mapping[str, Iterator[None]]) -> None:
        """A turn of each side; of an iterator, each step is one item."""
        for name in sorted(sides, reverse=len(self.taken.get("train run", ())) % 2 == 1):
            begun = clock()
            for _ in range(self.block):
                next(sides[name])
            self.take(name, begun)


def ours(setup: Setup, run: Path, turns: Turns, sides: Mapping[str, Iterator[None]]) -> None:
    """All steps of a run, with turns of the other sides between them."""
    begun = clock()

    def watch(event: Any) -> None:
        nonlocal begun
        if event["event"] == "start":
            begun = clock()
        elif event["event"] == "step" and event["step"] % turns.block == 0:
            turns.take("train run", begun)
            if event["step"] < setup.steps:
                turns.others(sides)
            begun = clock()

    with Log(run / "log.jsonl", watch) as log:
        train(setup, run, CPU, log)
    turns.others(sides)  # after the run has left its memory


def resident(setup: Setup) -> list[Batch]:
    """The batches of all steps, in memory."""
    asked = draws.training(setup.index, setup.plan, 0, setup.steps, dropout=0.0, timesteps=1000)
    with batches(Rows(setup.index), asked, masked=False, pinned=False) as feed:
        return [replace(batch, latent_BChw=batch.latent_BChw.clone(), noise_BChw=batch.noise_BChw.clone(),
                        timestep_B=batch.timestep_B.clone(), text={"hidden": batch.text["hidden"].clone()})
                for batch in feed]


def bare(setup: Setup, held: list[Batch]) -> Iterator[None]:
    """Its steps, one after another."""
    denoiser = load(setup.model, setup.config, setup.prediction, CPU)
    parameters, settings = list(denoiser.parameters.values()), setup.config.optimizer
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps,
                                  weight_decay=settings.weight_decay)
    latents = latents_of(setup.manifest)
    for batch in held:
        clean, level = latents.normalize(batch.latent_BChw), denoiser.levels[batch.timestep_B].view(-1, 1, 1, 1)
        noised = level.sqrt() * clean + (1 - level).sqrt() * batch.noise_BChw
        predicted: Tensor = denoiser.model(noised, batch.timestep_B, batch.text["hidden"].float()).sample
        torch.nn.functional.mse_loss(predicted, batch.noise_BChw).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def example(setup: Setup, root: Path, *, cached: bool) -> Iterator[None]:
    """The steps of a loop as diffusers' example scripts have it, on the demo's pictures."""
    denoiser, batch = load(setup.model, setup.config, setup.prediction, CPU), setup.config.batch_size
    vae = AutoencoderKL.from_pretrained(setup.model / "vae").requires_grad_(False)
    encoder = CLIPTextModel.from_pretrained(setup.model / "text_encoder").requires_grad_(False)
    tokenizer = CLIPTokenizer.from_pretrained(setup.model / "tokenizer")
    scheduler = DDPMScheduler.from_pretrained(setup.model / "scheduler")
    side = int(max(width * height for width, height in setup.manifest.buckets) ** 0.5) // 8 * 8
    photos = root / "demo" / "photos"
    found = [path for folder in ("hearts", "others") for path in sorted((photos / folder).iterdir())
             if path.suffix in (".png", ".jpg", ".webp") and path.with_suffix(".txt").exists()]
    items = [(path, tokenizer(path.with_suffix(".txt").read_text(), padding="max_length", truncation=True,
                              return_tensors="pt").input_ids[0]) for path in found[:48]]
    parameters = list(denoiser.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=setup.config.optimizer.lr)

    def latents_at(places: list[int]) -> Any:
        return vae.encode(torch.stack([pixels(items[place][0], side) for place in places])).latent_dist

    kept = [latents_at([place]) for place in range(len(items))] if cached else []
    order = torch.randperm(batch * setup.steps) % len(items)
    for number in range(setup.steps):
        places = order[number * batch:(number + 1) * batch].tolist()
        drawn = torch.cat([kept[place].sample() for place in places]) if cached else latents_at(places).sample()
        clean = drawn * vae.config.scaling_factor
        noise, steps = torch.randn_like(clean), torch.randint(0, 1000, (batch,))
        hidden = encoder(torch.stack([items[place][1] for place in places]))[0]
        predicted = denoiser.model(scheduler.add_noise(clean, noise, steps), steps, hidden).sample
        torch.nn.functional.mse_loss(predicted.float(), noise.float()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def pixels(path: Path, side: int) -> Tensor:
    """[3, side, side] from -1 to 1."""
    with Image.open(path) as opened:
        image = ImageOps.fit(opened.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 127.5 - 1


def main() -> None:
    """Prints a line for each side."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--steps", type=int, default=0, help="default: 600, of sd15 12; with --quick 120 and 4")
    parser.add_argument("--block", type=int, default=0, help="steps a turn; default: 12, of sd15 1")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    few, many, block = (120, 600, 12) if options.model == "demo" else (4, 12, 1)
    block = options.block or block
    steps = (options.steps or (few if options.quick else many)) // block * block
    if (options.model, options.method) == ("sd15", "full"):
        block = steps  # two such models and what their optimizers keep need more than 24 GiB
    quiet_libraries()
    torch.set_num_threads(options.threads)
    settings = {**SETTINGS, "method": options.method}
    turns = Turns(block)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        setup = MODELS[options.model](root, settings, steps)
        sides = {"bare loop": bare(setup, resident(setup))}
        if options.model == "demo" and options.method == "lora":
            sides |= {"diffusers' example, nothing cached": example(setup, root, cached=False),
                      "diffusers' example, latents cached": example(setup, root, cached=True)}
        ours(setup, root / "run", turns, sides)
    words = (f"{options.method}, batches of {setup.config.batch_size}, {steps} steps of each, in turns of {block}, "
             f"{options.threads} thread{'s' * (options.threads > 1)} of torch.")
    told = f"{words}\n\n{figures(turns.taken)}"
    emit(f"A training step over a bare loop, {options.model}, {options.method}", told, options.write)


def figures(taken: Mapping[str, list[tuple[float, float]]]) -> str:
    """A line for each side: the median turn, and the median and quartiles of what a turn of ours takes over the one
    beside it."""
    rows = []
    for name, turns in taken.items():
        warm = min(WARM, len(turns) - 1)
        wall, cpu = (statistics.median(side) for side in zip(*turns[warm:], strict=True))
        pairs = list(zip(taken["train run"], turns, strict=True))[warm:]
        told = []
        for kind in (0, 1):
            ratios = [mine[kind] / theirs[kind] for mine, theirs in pairs]
            low, middle, high = statistics.quantiles(ratios if len(ratios) > 1 else ratios * 2, n=4)
            told.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        rows.append((name, f"{wall * 1000:.2f}", f"{cpu * 1000:.2f}", *told))
    return table(("ms a step", "wall", "CPU", "train run takes, wall (times, quartiles)", "CPU"), rows)


if __name__ == "__main__":
    main()
