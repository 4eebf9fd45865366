"""Lists the libraries of Latentry and of its extras: installed versions, and what missing ones are needed for."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prep.doctor.check import Check

# By extra, as in pyproject.toml: the libraries that it brings, and what they are for.
EXTRAS = {
    "heic": (("pillow-heif",), "pictures in HEIC and HEIF"),
    "jxl": (("pillow-jxl-plugin",), "pictures in JPEG XL"),
    "rembg": (("rembg",), "prep mask --with rembg"),
    "masks": (("scipy",), "prep mask with MaskFormer and Mask2Former"),
    "bnb": (("bitsandbytes",), "text encoders in 8 and 4 bits, a LoRA's base in NF4, AdamW in 8 bits"),
    "optimizers": (("prodigyopt", "schedulefree", "lion-pytorch"), "Prodigy, schedule-free AdamW, Lion"),
    "kolors": (("sentencepiece",), "captions and sample pictures of Kolors"),
    "siglip": (("sentencepiece", "protobuf"), "captions compared with their pictures by SigLIP"),
    "gguf": (("gguf",), "models in GGUF files"),
    "tagger": (("onnxruntime",), "prep caption --tagger"),
    "tensorboard": (("tensorboard",), "log.tensorboard"),
    "wandb": (("wandb",), "log.wandb"),
    "remote": (("obstore",), "caches in S3, Google Cloud Storage and Azure"),
    "ray": (("ray",), "prep encode --engine ray"),
    "datasets": (("datasets",), "prep.api.hf_dataset: samples as a datasets.IterableDataset"),
    "view": (("starlette", "uvicorn"), "prep view"),
}


def check_libraries(names: tuple[str, ...]) -> list[Check]:
    """Checks the versions of libraries, from their metadata."""
    checks = []
    for name in names:
        installed = _version(name)
        if installed is None:
            checks.append(Check(name=name, state="warning", what="not installed",
                                hint=f"{Path(sys.executable).name} -m pip install latentry"))
        else:
            checks.append(Check(name=name, state="ok", what=installed))
    return checks


def check_extras() -> list[Check]:
    """Checks the extras; a note for each with a missing library."""
    checks = []
    for extra, (libraries, purpose) in EXTRAS.items():
        versions = [_version(name) for name in libraries]
        missing = [name for name, installed in zip(libraries, versions, strict=True) if installed is None]
        if missing:
            checks.append(Check(name=extra, state="note", what=f"not installed: needed for {purpose}",
                                hint=f"pip install 'latentry[{extra}]'"))
        else:
            what = ", ".join(f"{name} {installed}" for name, installed in zip(libraries, versions, strict=True))
            checks.append(Check(name=extra, state="ok", what=what))
    return checks


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
