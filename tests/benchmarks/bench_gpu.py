"""Encoding and training on a GPU: throughput, the time of a step and peaks of memory, with models of published size.

    python tests/benchmarks/bench_gpu.py [--model sdxl] [--model flux] [--case NAME] [--device cuda] [--steps 8]
                                         [--pictures 32] [--side 1024]

Weights are random and lie in the directory for temporary files, which TMPDIR names: 7 GB for sdxl, 34 for flux.
Pictures are encoded by `prep encode`. Cases are runs at batch 1, one after another in a process: the time of a step is
the mean of the last half, `peak` the most memory that tensors took, loading and the trial of the largest bucket
included, `forecast` what `train check` says of it, without libraries. `diffusers` is a loop as
`train_dreambooth_lora_*.py` among its examples have it, with latents and texts at hand: `from_pretrained` in bfloat16,
an adapter in float32, autocast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from processes import measured as ran
from results import emit, parser_of, table

from prep.training.table import spell

ON, OFF, HOST = ({"gradient_checkpointing": value} for value in (True, False, "offload"))
FULL = {"method": "full", "full": {"dtype": "bfloat16", "fused_backward": True},
        "optimizer": {"name": "adamw-8bit", "clip": 0.0}}
BASES = {form: {**ON, "quantization": form} for form in ("fp8", "fp8-w8a8", "int8", "nf4")}
CASES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sdxl": {"plain": OFF, "recomputed": ON, "the same again": ON, "inputs in RAM": HOST, **BASES,
             "35 of 70 blocks in RAM": {**ON, "offload": 35}, "all blocks in RAM": {**ON, "offload": 70},
             "compiled": {**ON, "compile": True}, "full, bfloat16, within backward": {**ON, **FULL}},
    "flux": {"recomputed": ON, "the same again": ON, "inputs in RAM": HOST, **BASES,
             "28 of 57 blocks in RAM": {**ON, "offload": 28}, "all blocks in RAM": {**ON, "offload": 57},
             "nf4, all blocks in RAM": {**BASES["nf4"], "offload": 57}}}
FIRST = 4  # pictures that are encoded first
OFTEN = {"batch_size": 1, "validation": {"every": 0}, "sample": {"every": 0}, "checkpoint": {"every": 0}}
OURS = """
import gc, hashlib, json, statistics, sys, time
begun = time.perf_counter()
from pathlib import Path
import torch
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from prep.models.device.memory import free_memory
from prep.models.loading import quiet_libraries
from prep.runtime import resident
from train.check import check
from train.config.load import parse
from train.failures import Progress
from train.loop import accumulate
from train.memory.forecast import blocks_offloaded
from train.runs.log import Log
from train.setup import RunRequest
from train.state import create_state
from train.trial import tried
from train.update import update_of

root, device = Path(sys.argv[1]), torch.device(sys.argv[2])
wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
quiet_libraries()
print("imports", round(time.perf_counter() - begun, 1), flush=True)


def run(name, settings):
    gc.collect()
    free_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [time.perf_counter()]
    report = check(RunRequest(manifest=root / "manifest.json"), parse(settings, ""))
    assert report.setup is not None, [fault.message for fault in report.faults]
    marks.append(time.perf_counter())
    trainee = create_state(report.setup, device, offload=blocks_offloaded(report.setup, device))
    wait()
    marks.append(time.perf_counter())
    progress = Progress(device=device)
    setup, _ = tried(trainee, report.setup, progress)
    wait()
    marks.append(time.perf_counter())
    log = root / f"{name}.jsonl"
    requests = draws.training(Rows(setup.index).index, setup.plan, 0, setup.steps, timesteps=trainee.denoiser.timesteps,
                              most=setup.config.micro_batch)
    times = []
    with (batches(Rows(setup.index), requests, masked=setup.masked, pinned=device.type == "cuda") as feed,
          Log(log, lambda event: None) as told):
        told.rewind(0)
        with update_of(trainee, setup, told, progress) as update:
            for step, batch in enumerate(feed):
                marks.append(time.perf_counter())
                with update.gathering(step, 1) as between:
                    gathered = accumulate(trainee, setup.config, [batch], progress, between)
                update.make(step, gathered)
                if step + 1 == setup.steps // 2:
                    update.finish()
                    wait()
                    half = time.perf_counter()
            update.finish()
            wait()
            seconds = (time.perf_counter() - half) / (setup.steps - setup.steps // 2)
    losses = [json.loads(line).get("loss") for line in log.read_text().splitlines() if "grad_norm" in line]
    digest = hashlib.sha256(b"".join(value.detach().cpu().view(torch.uint8).numpy().tobytes()
                                     for value in trainee.denoiser.parameters.values())).hexdigest()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps([name, seconds, peak, resident(), losses, digest[:8],
                      [round(after - before, 1) for before, after in zip(marks[:3], marks[1:4])]]), flush=True)


for name, settings in json.loads(sys.argv[3]).items():
    try:
        run(name, settings)
    except Exception as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"[:300]]), flush=True)
"""
DIFFUSERS = """
import json, sys, time
import diffusers, torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig

name, folder, side, steps, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
unet = name == "sdxl"
kind, part = (diffusers.UNet2DConditionModel, "unet") if unet else (diffusers.FluxTransformer2DModel, "transformer")
begun = time.perf_counter()
model = kind.from_pretrained(folder, subfolder=part, variant="fp16" if unet else None, torch_dtype=torch.bfloat16)
model = model.to(device).requires_grad_(False)
loaded = time.perf_counter() - begun
targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian",
                             target_modules=targets[:4] if unet else targets))
cast_training_params(model, dtype=torch.float32)
if sys.argv[6] == "1":
    model.enable_gradient_checkpointing()
trained = [value for value in model.parameters() if value.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01)
draw = lambda *shape: torch.randn(*shape, device=device)
side //= 8
if unet:
    shape = 1, 4, side, side
    given = {"encoder_hidden_states": draw(1, 77, 2048).bfloat16(), "added_cond_kwargs": {
        "text_embeds": draw(1, 1280).bfloat16(), "time_ids": torch.tensor([[side * 8.0] * 6], device=device)}}
else:
    tokens, shape = side * side // 4, (1, side * side // 4, 64)
    given = {"encoder_hidden_states": draw(1, 512, 4096).bfloat16(), "pooled_projections": draw(1, 768).bfloat16(),
             "guidance": torch.full((1,), 3.5, device=device), "txt_ids": torch.zeros(512, 3, device=device),
             "img_ids": torch.rand(tokens, 3, device=device), "timestep": torch.full((1,), 0.5, device=device)}
wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
for step in range(steps):
    if step == steps // 2:
        wait()
        begun = time.perf_counter()
    noise, target = draw(*shape), draw(*shape)
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
        if unet:
            found = model(noise, torch.tensor([500], device=device), **given).sample
        else:
            found = model(hidden_states=noise, **given, return_dict=False)[0]
    loss = (found.float() - target).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # as they show it at each step
wait()
seconds = (time.perf_counter() - begun) / (steps - steps // 2)
print(json.dumps([seconds, torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0, loaded]))
"""


def pictures(folder: Path, first: int, last: int, side: int) -> None:
    """Draws smooth pictures with captions, by their numbers."""
    folder.mkdir(exist_ok=True)
    for number in range(first, last):
        small = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number:04}.jpg")
        (folder / f"{number:04}.txt").write_text(f"a picture with the number {number}, as smooth as the others")


def encoded(root: Path, model: Path, options: Any) -> None:
    """Encodes some pictures, then more, and says what that took."""
    (root / "prompts.txt").write_text("a smooth picture\n")
    words = ["-m", "prep", "encode", str(root / "pictures"), "--cache", str(root / "cache"), "--model", str(model),
             "-o", str(root / "manifest.json"), "--resolution", str(options.side), "--device", options.device,
             "--prompts", str(root / "prompts.txt")]
    for first, last in ((0, FIRST), (FIRST, FIRST + options.pictures))[:1 + (options.pictures > 0)]:
        pictures(root / "pictures", first, last, options.side)
        begun = time.perf_counter()
        ran(words, root)
        print(f"encode: {time.perf_counter() - begun:.1f} s for {last - first} pictures", flush=True)


def forecasts(root: Path, cases: Mapping[str, Any]) -> dict[str, subprocess.Popen[str]]:
    """Starts `train check` for each case, on the processor, of which it takes a core."""
    found = {}
    for number, (name, settings) in enumerate(cases.items()):
        config = root / f"{number}.toml"
        config.write_text("".join(f"{key} = {spell(value)}\n" for key, value in flat(settings)))
        found[name] = subprocess.Popen(
            [sys.executable, "-m", "train", "check", str(root / "manifest.json"), "-c", str(config), "--json",
             "-o", str(root / f"runs-{number}"), "--memory", "200GB"], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return found


def flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings with names as in `lora.rank`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield name, value


def measured(name: str, root: Path, options: Any) -> list[tuple[str, ...]]:
    """The lines of a model."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_sizes

    begun = time.perf_counter()
    model = real_sizes.build(name, root / "model", parts=("denoiser", "vae", "text"))
    print(f"built {name} in {time.perf_counter() - begun:.0f} s", flush=True)
    encoded(root, model, options)
    cases = {case: {**OFTEN, "steps": options.steps, **settings} for case, settings in CASES[name].items()
             if not options.case or case in options.case}
    waiting = forecasts(root, cases)
    ours = subprocess.Popen([sys.executable, "-c", OURS, str(root), options.device, json.dumps(cases)],
                            stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    rows = []
    for line in ours.stdout:
        print(line.strip(), flush=True)
        found = json.loads(line) if line.startswith("[") else []
        if len(found) > 2:
            case, seconds, peak, host, *_ = found
            said = json.loads(waiting[case].communicate()[0] or "{}").get("memory")
            size = (said["peak"] - said["parts"]["libraries"]) if said else 0
            rows.append((f"{name}, {case}", f"{seconds:.3f}", f"{peak / 2**30:.2f}", f"{size / 2**30:.2f}",
                         f"{size / (peak or 1):.3f}", f"{host / 1e9:.1f}"))
    ours.wait()
    for checkpointing in (True, False) if name == "sdxl" else (True,):
        theirs = ran(["-c", DIFFUSERS, name, str(model), str(options.side), str(options.steps), options.device,
                      str(int(checkpointing))], root)
        seconds, memory, loaded = json.loads(theirs.out.splitlines()[-1])
        rows.append((f"{name}, diffusers{', recomputed' if checkpointing else ''}", f"{seconds:.3f}",
                     f"{memory / 2**30:.2f}", "", "", f"{theirs.resident / 1e9:.1f}"))
        print(*rows[-1], f"loaded in {loaded:.1f} s", flush=True)
    return rows


def main() -> None:
    """Prints a line for each case."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--case", action="append", help="of a model; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=32, help="encoded after the first four")
    parser.add_argument("--side", type=int, default=1024)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use")
    rows = []
    for name in options.model or CASES:
        with tempfile.TemporaryDirectory() as root:
            rows += measured(name, Path(root), options)
    emit("Training on a GPU", table(("model, case", "s a step", "peak GiB", "forecast GiB", "forecast / peak",
                                     "host GB"), rows), options.write)


if __name__ == "__main__":
    main()
