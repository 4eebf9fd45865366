"""Caches latents as sd-scripts 0.10 does, by its rules and without a line of `prep`.

`library/train_util.py` (`BucketManager`, `trim_and_resize_if_required`), `library/strategy_base.py`
(`save_latents_to_disk`), `strategy_sd.py` and `strategy_flux.py`; in place of OpenCV's INTER_AREA, Pillow's box filter.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

NORMALIZED = ("flux", "lumina")  # whose VAE shifts and scales in `encode`
ONE_SIZE = ("sd", "sdxl")


def load_vae(model: Path) -> Any:
    vae: Any = diffusers.AutoencoderKL  # its methods have no type annotations
    return vae.from_pretrained(model / "vae", low_cpu_mem_usage=False).eval()


def select_bucket(width: int, height: int, resos: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], tuple[int, int]]:
    """`BucketManager.select_bucket` with upscaling: the bucket, and the size to which the picture is scaled."""
    aspect = width / height
    ratios = np.array([w / h for w, h in resos])
    reso = (width, height) if (width, height) in resos else resos[int(np.abs(ratios - aspect).argmin())]
    scale = reso[1] / height if aspect > reso[0] / reso[1] else reso[0] / width
    return reso, (int(width * scale + 0.5), int(height * scale + 0.5))


def select_unscaled(width: int, height: int, steps: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The same with `bucket_no_upscale`, for a picture with no more pixels than `max_area`."""
    return (width - width % steps, height - height % steps), (width, height)


def get_crop_ltrb(reso: tuple[int, int], size: tuple[int, int]) -> tuple[float, float, float, float]:
    if reso[0] / reso[1] > size[0] / size[1]:
        wide, high = reso[1] * (size[0] / size[1]), reso[1]
    else:
        wide, high = reso[0], reso[0] / (size[0] / size[1])
    left, top = (reso[0] - wide) // 2, (reso[1] - high) // 2
    return left, top, left + wide, top + high


def trimmed(image: np.ndarray[Any, Any], reso: tuple[int, int], resized: tuple[int, int]) -> np.ndarray[Any, Any]:
    """`trim_and_resize_if_required`, without a random crop."""
    height, width = image.shape[:2]
    if (width, height) != resized:
        down = width >= resized[0] and height >= resized[1]
        pil = Image.fromarray(image).resize(resized, Image.Resampling.BOX if down else Image.Resampling.LANCZOS)
        image = np.array(pil)
    left, top = (resized[0] - reso[0]) // 2, (resized[1] - reso[1]) // 2
    return image[top:top + reso[1], left:left + reso[0]]


def encode(vae: Any, pixels: np.ndarray[Any, Any], *, word: str, seed: int) -> np.ndarray[Any, Any]:
    """A sample of the posterior; of Flux and Lumina as `flux_models.AutoEncoder.encode` returns it."""
    picture = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        latent = vae.encode(picture).latent_dist.sample(generator=torch.Generator().manual_seed(seed))[0]
    if word in NORMALIZED:
        latent = vae.config.scaling_factor * (latent - vae.config.shift_factor)
    found: np.ndarray[Any, Any] = latent.float().numpy()
    return found


def cache_latents(path: Path, vae: Any, word: str, resos: Sequence[tuple[int, int]], *, flip: bool = False,
                  mask: bool = False, unscaled_steps: int = 0, legacy: bool = False, seed: int = 0) -> Path:
    """Writes the cache of a picture beside it, over what an older one has; returns its path."""
    with Image.open(path) as opened:
        image = np.array(opened.convert("RGB"), np.uint8)
    size = image.shape[1], image.shape[0]
    reso, resized = select_unscaled(*size, unscaled_steps) if unscaled_steps else select_bucket(*size, resos)
    pixels = trimmed(image, reso, resized)
    latents = encode(vae, pixels, word=word, seed=seed)
    suffix = "" if word in ONE_SIZE else f"_{latents.shape[1]}x{latents.shape[2]}"
    file = path.with_suffix(".npz") if legacy else path.with_name(
        f"{path.stem}_{size[0]:04d}x{size[1]:04d}_{word}.npz")
    arrays: dict[str, Any] = {}
    if file.exists():
        with np.load(file) as old:
            arrays = {name: old[name] for name in old.files}
    arrays[f"latents{suffix}"] = latents
    arrays[f"original_size{suffix}"] = np.array(size)
    arrays[f"crop_ltrb{suffix}"] = np.array(get_crop_ltrb(reso, size))
    if flip:
        arrays[f"latents_flipped{suffix}"] = encode(vae, pixels[:, ::-1], word=word, seed=seed + 1)
    if mask:
        arrays[f"alpha_mask{suffix}"] = np.ones(reso[::-1], np.float32)
    np.savez(file, **arrays)
    return file


def buckets(side: int, steps: int) -> list[tuple[int, int]]:
    """Bucket sizes of about this area, as `model_util.make_bucket_resolutions` lists them."""
    found = {(math.isqrt(side * side) // steps * steps,) * 2}
    for width in range(steps * 2, side * 2 + 1, steps):
        height = min(side * 2, side * side // width // steps * steps)
        if height >= steps * 2:
            found |= {(width, height), (height, width)}
    return sorted(found)


# ---- dataset.toml ----------------------------------------------------------------------------------------------------

GENERAL = {"caption_extension", "enable_wildcard", "flip_aug", "num_repeats"}
DATASET = {"resolution", "enable_bucket", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso",
           "bucket_no_upscale", "subsets"}
DREAMBOOTH = {"image_dir", "num_repeats", "is_reg", "alpha_mask", "flip_aug", "enable_wildcard"}
CONTROLNET = {"image_dir", "num_repeats", "conditioning_data_dir", "flip_aug", "enable_wildcard"}
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_config(file: Path) -> list[dict[str, Any]]:
    """The datasets of a config by `config_util.ConfigSanitizer`: unknown keys are refused, and a dataset is
    ControlNet's if all of its subsets have conditioning_data_dir. Each has `shown`: path → (repeats, caption, mask path
    or None)."""
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    assert set(config) <= {"general", "datasets"} and set(config.get("general", {})) <= GENERAL
    for dataset in config["datasets"]:
        controlled = all("conditioning_data_dir" in subset for subset in dataset["subsets"])
        assert set(dataset) <= DATASET
        assert all(set(subset) <= (CONTROLNET if controlled else DREAMBOOTH) for subset in dataset["subsets"])
        assert dataset["min_bucket_reso"] <= dataset["resolution"] <= dataset["max_bucket_reso"]
        dataset["shown"] = _shown(file.parent, dataset["subsets"], config["general"]["caption_extension"])
    return list(config["datasets"])


def _shown(root: Path, subsets: Sequence[dict[str, Any]], extension: str) -> dict[str, tuple[int, str, str | None]]:
    """`DreamBoothDataset.__init__`: regularization images are repeated until they are as many as training images."""
    found, regular, trained = {}, [], 0
    assert len({subset["image_dir"] for subset in subsets}) == len(subsets)
    for subset in subsets:
        paths = sorted(one for one in (root / subset["image_dir"]).iterdir() if one.suffix.lower() in EXTENSIONS)
        assert paths
        masks = subset.get("conditioning_data_dir")
        if masks is not None:  # exactly one for each image
            assert {one.stem for one in (root / masks).iterdir()} == {one.stem for one in paths}
        for path in paths:
            caption = path.with_suffix(extension).read_text(encoding="utf-8").splitlines()[0].strip()
            entry = [subset["num_repeats"], caption, None if masks is None else f"{masks}/{path.stem}.png"]
            name = path.relative_to(root).as_posix()
            if subset.get("is_reg"):
                regular.append((name, entry))
            else:
                found[name] = entry
                trained += entry[0]
    shown, first = 0, True
    while regular and shown < trained:
        for name, entry in regular:
            if first:
                found[name] = entry
            entry[0] += not first
            shown += entry[0] if first else 1
            if shown >= trained:
                break
        first = False
    return {name: (repeats, caption, mask) for name, (repeats, caption, mask) in found.items()}
