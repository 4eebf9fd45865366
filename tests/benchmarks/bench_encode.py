"""CPU seconds of `prep encode` over the floor: decoding the same pictures and the VAE's forward, nothing else.

    python tests/benchmarks/bench_encode.py [--pictures 24] [--pairs 9] [--vae small|sd15]

Both sides run in this process, one after the other in each pair, with the same threads, batch size and allocator; the
worker processes that decode for ours count, too. Ours does everything a new cache needs: walk, SHA-256 of every file,
fingerprints, loading the models, latents and text, checksums, fsync, tables, manifest. The floor has its VAE loaded
beforehand. Target: 1.03 or less with SD 1.5's VAE.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from results import emit, parser_of, table

from prep.cli.ticker import progress
from prep.demo.tiny_model import build_random
from prep.encode.options import EncodeOptions
from prep.encode.prepare import EncodeCall
from prep.encode.run import run_encode
from prep.models.device.allocator import settled_heap
from prep.models.loading import quiet_libraries
from prep.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
SIDE, BATCH, THREADS = 512, 4, 2
PREP = "from prep.encode import plan; plan.TASK_ROWS = 8\nfrom prep.cli.main import main\nmain()"


def write_pictures(root: Path, count: int) -> list[Path]:
    """JPEG photographs, in effect: smooth colors with noise, 900x900."""
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((900, 900), Image.BICUBIC)
        grain = rng.integers(-12, 13, (900, 900, 3))
        pixels = np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{number:03}.jpg", quality=92)
        (root / f"{number:03}.txt").write_text(f"picture {number}")
    return sorted(root.glob("*.jpg"))


WIDTHS = {"small": (32, 64, 128, 128), "sd15": (128, 256, 512, 512)}


def write_halves(root: Path, pictures: int) -> None:
    """So many pictures in `root/photos`, and the first half of them in `root/half`."""
    paths = write_pictures(root / "photos", pictures)
    (root / "half").mkdir()
    for path in paths[: pictures // 2]:
        for name in (path.name, f"{path.stem}.txt"):
            (root / "half" / name).hardlink_to(path.with_name(name))


def seconds_to_encode(root: Path, *words: str, **environment: str) -> float:
    """Seconds of a whole `prep encode` of such pictures in a process of its own, with tasks of 8 rows."""
    whole = ["encode", *words, "--model", "model", "--buckets", "list", "--sizes", f"{SIDE}x{SIDE}", "--compute",
             "float32", "--jobs", "2", "--quiet"]
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PREP, *whole], cwd=root, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment})
    if done.returncode:
        sys.exit(f"{' '.join(whole)} failed:\n{done.stderr}")
    return time.perf_counter() - begun


def write_model(root: Path, kind: str) -> None:
    """A pipeline whose VAE has the published shape of SD1.5's, at its width or at a quarter of it; random weights."""
    build_random(root)
    widths = WIDTHS[kind]
    vae = AutoencoderKL(block_out_channels=widths, layers_per_block=2, norm_num_groups=widths[0] // 4,
                        latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 4,
                        up_block_types=["UpDecoderBlock2D"] * 4)
    vae.save_pretrained(root / "vae")


def floor(vae: AutoencoderKL, pictures: list[Path]) -> None:
    def pixels(path: Path) -> np.ndarray:
        return np.asarray(Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.LANCZOS))

    with settled_heap(torch.device("cpu")), ThreadPoolExecutor(THREADS) as pool, torch.inference_mode():
        decoded = pool.map(pixels, pictures)
        for start in range(0, len(pictures), BATCH):
            batch = np.stack([next(decoded) for _ in pictures[start:start + BATCH]])
            image = torch.from_numpy(batch).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
            vae.encode(image).latent_dist.mean.bfloat16()


def ours(root: Path, cache: Path) -> None:
    recipe = load_recipe(root / "photos", choices={"model.path": str(root / "model"), "model.compute": "float32",
                                                   "image.buckets": "list", "image.sizes": (f"{SIDE}x{SIDE}",)})
    run_encode(EncodeCall(recipe=recipe, cache=cache, output=cache.with_suffix(".json"),
                          options=EncodeOptions(device="cpu", batch_size=BATCH, jobs=THREADS),
                          progress=lambda title, total, unit: progress(title, total, shown=False)))


def cpu(call, *args) -> float:
    begun = spent()
    call(*args)
    return spent() - begun


def spent() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU."""
    begun, cpu = time.perf_counter(), spent()
    call()
    return time.perf_counter() - begun, spent() - cpu


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--vae", choices=list(WIDTHS), default="small", help="its width: a quarter of SD1.5's, or that")
    options = parser.parse_args()
    if options.quick:
        options.pictures, options.pairs = 8, 3
    quiet_libraries()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_model(root / "model", options.vae)
        pictures = write_pictures(root / "photos", options.pictures)
        vae = AutoencoderKL.from_pretrained(root / "model" / "vae", low_cpu_mem_usage=False).eval()
        floor(vae, pictures[:BATCH])
        ours(root, root / "warm")  # imports, first-use costs of libraries
        pairs = [(cpu(ours, root, root / f"cache{number}"), cpu(floor, vae, pictures))
                 for number in range(options.pairs)]
    ratios = sorted(mine / least for mine, least in pairs)
    rows = [(name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}")
            for name, seconds in zip(("prep encode", "floor"), zip(*pairs, strict=True), strict=True)]
    rows.append(("ratio", f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f}", f"{ratios[-1]:.3f}"))
    width = {"small": "a VAE of SD1.5's shape at a quarter of its width", "sd15": "SD1.5's VAE"}[options.vae]
    emit(f"prep encode over decoding and the VAE's forward, CPU seconds{', full width' * (options.vae == 'sd15')}",
         f"{options.pictures} pictures of 900x900 at {SIDE}, batch {BATCH}, {width}, {options.pairs} pairs.\n\n"
         + table(("", "median", "lowest", "highest"), rows), options.write)


if __name__ == "__main__":
    main()
