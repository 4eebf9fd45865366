"""`prep encode` against the caching loops of other trainers: seconds and bytes on disk for the same pictures.

    python tests/benchmarks/bench_caching.py [--rounds 3] [--threads 2] [--vae small|sd15]

The pictures are those of LATENTRY_REAL_DATA (`photos/`), or drawn ones without it. All sides make 512x512 latents with
the same VAE, threads and allocator, in this process, and take turns. The other loops are written anew here from what
those tools do:

one after the other   every picture decoded, then the VAE in batches of 4, in memory only
diffusers examples    pictures decoded when the dataset is made, batches of 4, the posterior kept in memory
sd-scripts            batches of 1, a float32 .npz a picture, a collection of garbage after each batch
OneTrainer            batches of 1 from two threads, torch.save of two files a picture

Ours does more: it digests every file, writes checksums and syncs, and encodes captions. Their models are loaded before
the clock starts, ours after.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from bench_encode import WIDTHS, ours, timed, write_model, write_pictures
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from results import emit, parser_of, table

from prep.models.device.allocator import settled_heap
from prep.models.loading import quiet_libraries

SIDE, BATCH = 512, 4
Loop = Callable[[AutoencoderKL, list[Path], Path], None]


def pixels(path: Path) -> torch.Tensor:
    """[3, SIDE, SIDE] from -1 to 1: the center of the picture."""
    with Image.open(path) as opened:
        image = ImageOps.fit(ImageOps.exif_transpose(opened).convert("RGB"), (SIDE, SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 127.5 - 1


def one_after_the_other(vae: AutoencoderKL, pictures: list[Path], root: Path) -> None:
    decoded = [pixels(path) for path in pictures]
    for start in range(0, len(decoded), BATCH):
        vae.encode(torch.stack(decoded[start:start + BATCH])).latent_dist.mean.bfloat16()


def diffusers_examples(vae: AutoencoderKL, pictures: list[Path], root: Path) -> None:
    dataset = [pixels(path) for path in pictures]
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    kept = [vae.encode(batch).latent_dist for batch in loader]
    assert kept


def sd_scripts(vae: AutoencoderKL, pictures: list[Path], root: Path) -> None:
    for path in pictures:
        latent = vae.encode(pixels(path)[None]).latent_dist.sample()[0]
        np.savez(root / f"{path.stem}_0512x0512_sd.npz", latents=latent.float().numpy(),
                 original_size=np.array([SIDE, SIDE]), crop_ltrb=np.array([0, 0, SIDE, SIDE]))
        gc.collect()


def onetrainer(vae: AutoencoderKL, pictures: list[Path], root: Path) -> None:
    def keep(item: tuple[int, Path]) -> None:
        with torch.inference_mode():
            latent = vae.encode(pixels(item[1])[None]).latent_dist.mean[0].clone()
        torch.save({"latent_image": latent}, root / f"image-{item[0]}.pt")
        torch.save({"prompt": item[1].stem, "crop_resolution": (SIDE, SIDE)}, root / f"text-{item[0]}.pt")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(keep, enumerate(pictures)))


LOOPS: dict[str, Loop] = {"one after the other": one_after_the_other, "diffusers examples": diffusers_examples,
                          "sd-scripts": sd_scripts, "OneTrainer": onetrainer}


def find_pictures(root: Path, count: int) -> list[Path]:
    """Links to the real pictures with their captions, or drawn ones."""
    real = os.environ.get("LATENTRY_REAL_DATA")
    if not real:
        return write_pictures(root / "photos", count)
    (root / "photos").mkdir()
    found = []
    for path in sorted(Path(real, "photos").rglob("*")):
        if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"}:
            found.append(root / "photos" / path.name)
            for file in (path, path.with_suffix(".txt")):
                if file.exists():
                    (root / "photos" / file.name).write_bytes(file.read_bytes())
    return found


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=63, help="drawn ones, without real data")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--vae", choices=list(WIDTHS), default="small", help="its width: a quarter of SD1.5's, or that")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.pictures = 1, 16
    quiet_libraries()
    torch.set_num_threads(options.threads)
    taken: dict[str, list[tuple[float, float]]] = {}
    kept: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch, settled_heap(torch.device("cpu")):
        root = Path(scratch)
        write_model(root / "model", options.vae)
        pictures = find_pictures(root, options.pictures)
        vae = AutoencoderKL.from_pretrained(root / "model" / "vae", low_cpu_mem_usage=False).eval()
        with torch.inference_mode():
            vae.encode(torch.zeros(BATCH, 3, SIDE, SIDE))
        for number in range(options.rounds):
            for name, loop in LOOPS.items():
                place = root / f"{number}" / name
                place.mkdir(parents=True)
                with torch.inference_mode():
                    taken.setdefault(name, []).append(timed(lambda loop=loop, place=place: loop(vae, pictures, place)))
                kept[name] = size(place)
            place = root / f"{number}" / "ours"
            place.mkdir()
            taken.setdefault("prep encode", []).append(timed(lambda place=place: ours(root, place / "cache")))
            kept["prep encode"] = json.loads((place / "cache.json").read_text())["fields"]["latent"]["bytes"]
    width = {"small": "a VAE of SD1.5's shape at a quarter of its width", "sd15": "SD1.5's VAE"}[options.vae]
    words = (f"{len(pictures)} pictures at {SIDE}x{SIDE}, {width}, {options.threads} threads, {options.rounds} rounds; "
             "bytes are those of latents alone, and ours are bfloat16.")
    emit(f"prep encode beside other caching loops{', full width' * (options.vae == 'sd15')}",
         f"{words}\n\n{figures(taken, kept, len(pictures))}", options.write)


def figures(taken: dict[str, list[tuple[float, float]]], kept: dict[str, int], count: int) -> str:
    mine = taken["prep encode"]
    rows = []
    for name, times in taken.items():
        wall, cpu = (statistics.median(side) for side in zip(*times, strict=True))
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(mine, times, strict=True)]
        rows.append((name, f"{wall / count:.3f}", f"{cpu / count:.3f}", f"{statistics.median(ratios):.2f}",
                     f"{kept[name] / count / 1024:.1f}" if kept[name] else "in memory"))
    return table(("", "s a picture", "CPU s a picture", "prep encode takes (times)", "KiB a picture"), rows)


if __name__ == "__main__":
    main()
