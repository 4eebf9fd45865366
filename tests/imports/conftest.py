"""Pictures with sd-scripts' caches beside them, of a VAE that was trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sd_scripts
import tiny_pipelines
from pictures import draw

from prep.demo.shipped import write_model

SIZES = [(200, 200), (240, 200), (300, 150), (150, 310), (180, 250), (256, 256)]


@pytest.fixture(scope="session")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model; never written to."""
    root = tmp_path_factory.mktemp("sd15")
    write_model(root)
    return root / "model"


@pytest.fixture(scope="session")
def sdxl(sd15: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SDXL with the demo's VAE: that of random weights makes noise, from which nothing can be told."""
    model = tiny_pipelines.save("sdxl", tmp_path_factory.mktemp("sdxl") / "model")
    shutil.rmtree(model / "vae")
    shutil.copytree(sd15 / "vae", model / "vae")
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures with captions."""
    for number, size in enumerate(SIZES):
        picture = draw(tmp_path / "pictures" / f"{number}.png", size, seed=number)
        picture.with_suffix(".txt").write_text(f"picture number {number}")
    return tmp_path / "pictures"


@pytest.fixture
def caches(folder: Path) -> Callable[..., list[Path]]:
    """`caches(model, word, …)` caches the latents of all pictures in `folder`."""
    def make(model: Path, word: str = "sd", **options: Any) -> list[Path]:
        vae = sd_scripts.load_vae(model)
        resos = sd_scripts.buckets(96, 16)
        return [sd_scripts.cache_latents(path, vae, word, resos, seed=number, **options)
                for number, path in enumerate(sorted(folder.glob("*.png")))]

    return make
