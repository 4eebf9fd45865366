"""`train run`'s step against a bare loop: the same model, LoRA, optimizer and batches, resident in memory.

    python tests/benchmarks/bench_step.py [--device cpu|cuda] [--model demo|sd15] [--method lora|full] [--ema]
                                          [--steps 600] [--block 12]

On a GPU, which is taken if there is one, `sd15` is measured twice: a LoRA, and full with a moving average (--method
full --ema), in bfloat16 at batch 4. On the CPU it is the demo's LoRA, in float32. Naming a model, a method or --ema
measures that case only.

The bare loop has its batches in memory and does what any loop must: noise the latents, predict, the mean squared error,
backward, clip, step. Ours also reads rows and checks them, draws noise from keys, weighs samples, checks that numbers
are finite and logs each step. With --ema both move an average of what they train, in one call for all tensors. All
take turns, in this process, every few steps: a machine's speed changes by a tenth within seconds, and what is compared
is what was measured beside each other. Start-up and the first turns are not counted. `demo` is the demo's model and
data at batch 8; `sd15` has the size of Stable Diffusion 1.5's UNet, random weights, and rows of 512x512. Target: 1.03.

A GPU is waited for at the ends of turns only, so that it computes while the host goes on, as it does in training.
`train run` shows a step when the passes of the next one are on their way: its turns end as many passes later as they
begin.

For the demo, two more sides are loops as diffusers' example scripts for LoRA have them: `train_text_to_image_lora.py`
decodes, crops, and runs the VAE and the text encoder in each step; with `--cache_latents`, as the DreamBooth scripts
have it, latents are kept in memory, and the text encoder runs in each step. Their pictures are squares of the area of
ours.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
from prep.fs.place import Local
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.models.loading import quiet_libraries
from train.check import check
from train.config.load import parse
from train.failures import Progress
from train.loop import train
from train.models.denoiser import load
from train.runs.heart import Heart
from train.runs.log import Log
from train.runs.stored.stored import OnDisk
from train.setup import RunRequest, Setup

WARM = 1  # turns before the clock starts
DECAY = 0.999  # of the moving average
SIZES = {"demo": (120, 600, 12), "cuda": (24, 120, 12), "cpu": (4, 12, 1)}  # steps with --quick, steps, steps a turn
SIDE, PICTURES = 512, 64
SETTINGS: dict[str, Any] = {"validation": {"every": 0}, "sample": {"every": 0}, "checkpoint": {"every": 0}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    model: str
    method: str
    ema: bool
    device: torch.device

    @property
    def words(self) -> str:
        where = f", {torch.cuda.get_device_name(self.device)}" if self.device.type == "cuda" else ""
        return f"{self.model}, {self.method}{' with a moving average' if self.ema else ''}{where}"

    @property
    def settings(self) -> dict[str, Any]:
        precision = "bf16" if self.device.type == "cuda" else "fp32"
        return {**SETTINGS, "method": self.method, "precision": precision, "ema": {"decay": DECAY if self.ema else 0.0}}

    def synchronize(self) -> None:
        """Waits until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def demo(root: Path, case: Case, steps: int) -> Setup:
    """The demo's model and encoded data."""
    words = [sys.executable, "-m", "prep"]
    for command in (["demo", "demo"], ["encode", "demo/dataset.toml", "--cache", "cache", "-o", "demo.json"]):
        subprocess.run([*words, *command], cwd=root, check=True, capture_output=True)
    whole = {"batch_size": 8, "micro_batch": 8, "underfill": "repeat"}  # every step has 8 samples
    return checked(root / "demo.json", {**case.settings, **whole, "steps": steps})


def sd15(root: Path, case: Case, steps: int) -> Setup:
    """A UNet of published size, and random rows of its latents and texts."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_manifest as making
    from diffusers import UNet2DConditionModel

    making.BUCKETS, making.TOKENS, making.WIDTH = ((SIDE, SIDE),), 77, 768
    build_random(root / "model")
    UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8).save_pretrained(root / "model" / "unet")
    made = making.build(root, root / "model", counts=(PICTURES,), validation=0, prompts=None)
    batch = 4 if case.device.type == "cuda" else 1
    return checked(made.path, {**case.settings, "steps": steps, "batch_size": batch, "micro_batch": batch})


MODELS = {"demo": demo, "sd15": sd15}


def checked(manifest: Path, settings: dict[str, Any]) -> Setup:
    report = check(RunRequest(manifest=manifest), parse(settings, "bench_step"))
    assert report.setup is not None, [fault.message for fault in report.faults]
    return report.setup


class Turns:
    """Wall and CPU seconds a step, of each turn of each side."""

    def __init__(self, block: int, case: Case) -> None:
        self.block = block  # steps a turn
        self.case = case
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def clock(self) -> tuple[float, float]:
        """The time at which a turn begins or ends, when the device has nothing left to do."""
        self.case.synchronize()
        return time.perf_counter(), time.process_time()

    def take(self, name: str, begun: tuple[float, float]) -> None:
        """Notes a turn that began at this time and ends now."""
        wall, cpu = self.clock()
        self.taken.setdefault(name, []).append(((wall - begun[0]) / self.block, (cpu - begun[1]) / self.block))

    def others(self, sides: Mapping[str, Iterator[None]]) -> None:
        """A turn of each side; of an iterator, each step is one item."""
        for name in sorted(sides, reverse=len(self.taken.get("train run", ())) % 2 == 1):
            begun = self.clock()
            for _ in range(self.block):
                next(sides[name])
            self.take(name, begun)


def ours(setup: Setup, run: Path, turns: Turns, sides: Mapping[str, Iterator[None]]) -> None:
    """All steps of a run, with turns of the other sides between them."""
    begun = turns.clock()

    def watch(event: Any) -> None:
        nonlocal begun
        if event["event"] == "start":
            begun = turns.clock()
        elif event["event"] == "step" and event["step"] % turns.block == 0:
            turns.take("train run", begun)
            if event["step"] < setup.steps:
                turns.others(sides)
            begun = turns.clock()

    run.mkdir(parents=True, exist_ok=True)
    with Log(run / "log.jsonl", watch) as log, Heart(run, log) as heart:
        train(setup, OnDisk(Local(run)), log, Progress(device=turns.case.device), requests=heart)
    turns.others(sides)  # after the run has left its memory


def resident(setup: Setup, device: torch.device) -> list[Batch]:
    """The batches of all steps, in the device's memory."""
    asked = draws.training(setup.index, setup.plan, 0, setup.steps, timesteps=1000)
    with batches(Rows(setup.index), asked, masked=False, pinned=False) as feed:
        return [replace(batch, latent_BChw=batch.latent_BChw.clone().to(device),
                        noise_BChw=batch.noise_BChw.clone().to(device),
                        timestep_B=batch.timestep_B.clone().to(device),
                        text={"hidden": batch.text["hidden"].clone().to(device)}) for batch in feed]


def bare(setup: Setup, held: list[Batch], device: torch.device) -> Iterator[None]:
    """Its steps, one after another."""
    denoiser = load(setup.model.path, setup.config, setup.prediction, device)
    parameters, settings = list(denoiser.parameters.values()), setup.config.optimizer
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps,
                                  weight_decay=settings.weight_decay, fused=device.type == "cuda")
    average = [value.detach().clone() for value in parameters] if setup.config.ema.decay else []
    latents = latents_of(setup.manifest).to(device)
    for batch in held:
        clean, level = latents.normalize(batch.latent_BChw), denoiser.levels[batch.timestep_B].view(-1, 1, 1, 1)
        noised = level.sqrt() * clean + (1 - level).sqrt() * batch.noise_BChw
        with torch.autocast(device.type, denoiser.dtype, enabled=denoiser.dtype != torch.float32):
            predicted: Tensor = denoiser.model(noised.to(denoiser.dtype), batch.timestep_B,
                                               batch.text["hidden"].to(denoiser.dtype)).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), batch.noise_BChw)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if average:
            torch._foreach_lerp_(average, [value.detach() for value in parameters], 1 - setup.config.ema.decay)
        yield


def example(setup: Setup, root: Path, device: torch.device, *, cached: bool) -> Iterator[None]:
    """The steps of a loop as diffusers' example scripts have it, on the demo's pictures."""
    denoiser, batch = load(setup.model.path, setup.config, setup.prediction, device), setup.config.batch_size
    vae: Any = AutoencoderKL.from_pretrained(setup.model.path / "vae").requires_grad_(False).to(device)
    encoder: Any = CLIPTextModel.from_pretrained(setup.model.path / "text_encoder").requires_grad_(False).to(device)
    tokenizer = CLIPTokenizer.from_pretrained(setup.model.path / "tokenizer")
    scheduler = DDPMScheduler.from_pretrained(setup.model.path / "scheduler")
    side = int(max(width * height for width, height in setup.manifest.buckets) ** 0.5) // 8 * 8
    photos = root / "demo" / "photos"
    found = [path for folder in ("hearts", "others") for path in sorted((photos / folder).iterdir())
             if path.suffix in (".png", ".jpg", ".webp") and path.with_suffix(".txt").exists()]
    items = [(path, tokenizer(path.with_suffix(".txt").read_text(), padding="max_length", truncation=True,
                              return_tensors="pt").input_ids[0]) for path in found[:48]]
    parameters = list(denoiser.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=setup.config.optimizer.lr)

    def latents_at(places: list[int]) -> Any:
        pictures = torch.stack([pixels(items[place][0], side) for place in places])
        return vae.encode(pictures.to(device)).latent_dist

    kept = [latents_at([place]) for place in range(len(items))] if cached else []
    order = torch.randperm(batch * setup.steps) % len(items)
    for number in range(setup.steps):
        places = order[number * batch:(number + 1) * batch].tolist()
        drawn = torch.cat([kept[place].sample() for place in places]) if cached else latents_at(places).sample()
        clean = drawn * vae.config.scaling_factor
        noise, steps = torch.randn_like(clean), torch.randint(0, 1000, (batch,), device=device)
        hidden = encoder(torch.stack([items[place][1] for place in places]).to(device))[0]
        with torch.autocast(device.type, denoiser.dtype, enabled=denoiser.dtype != torch.float32):
            noised = scheduler.add_noise(clean, noise, steps).to(denoiser.dtype)
            predicted = denoiser.model(noised, steps, hidden.to(denoiser.dtype)).sample
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
    """Prints a section for each case, with a line for each side."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(MODELS), help="default: sd15 on a GPU, demo on the CPU")
    parser.add_argument("--method", choices=("lora", "full"), help="default: lora; on a GPU full with --ema as well")
    parser.add_argument("--ema", action="store_true", help="keep a moving average of what is trained")
    parser.add_argument("--steps", type=int, default=0, help="default: 600, of sd15 120 on a GPU and 12 on the CPU; "
                        "with --quick 120, 24 and 4")
    parser.add_argument("--block", type=int, default=0, help="steps a turn; default: 12, of sd15 on the CPU 1")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(options.threads)
    for case in cases(options):
        measure(case, options)
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()


def cases(options: argparse.Namespace) -> list[Case]:
    """What the options name, or else what is measured on such a device."""
    device, gpu = torch.device(options.device), options.device == "cuda"
    usual = "sd15" if gpu else "demo"
    if options.model is None and options.method is None and not options.ema and gpu:
        return [Case(model=usual, method=method, ema=ema, device=device)
                for method, ema in (("lora", False), ("full", True))]
    return [Case(model=options.model or usual, method=options.method or "lora", ema=options.ema, device=device)]


def measure(case: Case, options: argparse.Namespace) -> None:
    """Trains the case on all sides, and prints its section."""
    few, many, block = SIZES["demo" if case.model == "demo" else case.device.type]
    block = options.block or block
    steps = (options.steps or (few if options.quick else many)) // block * block
    if (case.model, case.method, case.device.type) == ("sd15", "full", "cpu"):
        block = steps  # two such models and what their optimizers keep need more than 24 GiB
    turns = Turns(block, case)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        setup = MODELS[case.model](root, case, steps)
        sides = {"bare loop": bare(setup, resident(setup, case.device), case.device)}
        if (case.model, case.method, case.ema) == ("demo", "lora", False):
            sides |= {"diffusers' example, nothing cached": example(setup, root, case.device, cached=False),
                      "diffusers' example, latents cached": example(setup, root, case.device, cached=True)}
        ours(setup, root / "run", turns, sides)
    words = (f"{case.words}: batches of {setup.config.batch_size}, {steps} steps of each, in turns of {block}, "
             f"{options.threads} thread{'s' * (options.threads > 1)} of torch.")
    told = f"{words}\n\n{figures(turns.taken)}"
    emit(f"A training step over a bare loop, {case.words}", told, options.write)


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
